"""Weights that accelerate keeps on disk between calls: every way to use them gives what the plain model gives, and leaves them there."""

import pytest
import tiny
import torch
from thinning import first
from tiny import Batch
from transformers import AutoModelForCausalLM
from two_ranks import modules

from quicksilver.modules.fitted import model_digest
from quicksilver.runtime import apply, architecture_of

BATCH = Batch((tuple(range(1, 21)), tuple(range(40, 25, -1))))  # of unequal length


def offloaded(model, folder):
    """Every second layer on disk, all else in memory."""
    model.save_pretrained(folder)
    layers = {id(layer): ("cpu", "disk")[i % 2] for i, layer in enumerate(architecture_of(model).layers)}
    places, placed = {}, ()
    for name, module in model.named_modules():
        if name.startswith(placed):
            continue
        if id(module) in layers or not any(id(part) in layers for part in module.modules()):
            places[name] = layers.get(id(module), "cpu")
            placed = (*placed, f"{name}.")
    made = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=folder / "weights")
    return made.eval().requires_grad_(False)


@torch.no_grad()
@pytest.mark.parametrize("family", first(("gpt2", "llama", "phi3", "gpt_neox", "qwen3", "olmo2")))
def test_offloaded_is_plain(family, tmp_path, subtests):
    plain = tiny.load(family)
    model = offloaded(plain, tmp_path)
    elsewhere = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert len(elsewhere) > 10
    assert model_digest(model) == model_digest(plain)
    # Calls of an offloaded layer go through accelerate, which has a forward of its own in place.
    forwards = [layer.forward for layer in architecture_of(model).layers]
    for (name, ours), theirs in zip(modules(model).items(), modules(plain).values(), strict=True):
        with subtests.test(name):
            found = []
            for each, policies in ((plain, theirs), (model, ours)):
                with apply(each, policies) as run:
                    found.append((each(**BATCH.inputs(), use_cache=True).logits, run.flops, run.kv_bytes))
            assert all(torch.equal(a, b) for a, b in zip(BATCH.real(found[0][0]), BATCH.real(found[1][0]), strict=True))
            assert found[0][1:] == found[1][1:]
            assert found[0][1].executed != found[0][1].dense_nominal or name == "none"
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta] == elsewhere
    assert [layer.forward for layer in architecture_of(model).layers] == forwards
