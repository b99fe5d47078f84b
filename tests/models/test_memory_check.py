"""Room for a model: what fits nowhere is refused before it is loaded, what does not fit into memory stays on disk and gives the same logits."""

from __future__ import annotations

import pytest
import torch
from harness_world import make_model

from quicksilver.models import memory_check
from quicksilver.models.loading import load, locate
from quicksilver.models.spec import ModelConfig
from quicksilver.modules import Halting
from quicksilver.modules.fitted import model_digest
from quicksilver.runtime import apply
from quicksilver.runtime.errors import ConfigError

IDS = torch.arange(40).view(2, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def loaded(folder, device_map):
    config = ModelConfig(name="mine", path=str(folder), device_map=device_map)
    return load(config, locate(config)).model


@pytest.fixture(scope="module")
def plain(folder):
    return loaded(folder, "cpu")


def disk_with(monkeypatch, free):
    monkeypatch.setattr(memory_check.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))


def test_weights_are_counted_from_the_heads_of_their_files(folder, plain):
    assert memory_check.weights_bytes(folder, 4) == 4 * sum(parameter.numel() for parameter in plain.parameters())


def test_a_model_larger_than_memory_and_disk_is_refused_before_it_is_loaded(folder, monkeypatch):
    needed = memory_check.weights_bytes(folder, 4)
    monkeypatch.setattr(memory_check, "memory_bytes", lambda: needed - 100)
    disk_with(monkeypatch, 99)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ConfigError, match=r"model=mine: its weights are .* free on disk. Take a smaller model"):
        loaded(folder, "auto")
    monkeypatch.setattr(memory_check, "host_memory_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"model=mine: its weights are .* model.device_map=auto leaves on disk"):
        loaded(folder, "cpu")
    disk_with(monkeypatch, 100)
    memory_check.check_room(needed, "tiny")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU would take it")
def test_what_memory_does_not_hold_stays_on_disk(folder, plain, monkeypatch):
    needed = memory_check.weights_bytes(folder, 4)
    monkeypatch.setattr(memory_check, "free_memory_bytes", lambda: int(0.6 * needed / 0.8))
    model = loaded(folder, "auto")
    elsewhere = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert elsewhere
    assert "disk" in model.hf_device_map.values()
    assert model_digest(model) == model_digest(plain)
    found = []
    for each in (plain, model):
        with (
            apply(each, [Halting(tau_drift=0.9, missing_kv="project", tau_entropy=None, resume_layers=0)]) as run,
            torch.no_grad(),
        ):
            found.append((each(IDS).logits, run.flops, run.kv_bytes))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert found[0][1].executed < found[0][1].dense_nominal
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta] == elsewhere
