"""What a translator says, and which files and models it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tiny
import torch

from quicksilver.modules.fitted import ModelShape, model_digest
from quicksilver.modules.learned_halting import TrainedGates
from quicksilver.modules.lens import Lens
from quicksilver.modules.translators import Translator, translator_for
from quicksilver.runtime import ConfigError, architecture_of


def translator(name: str = "llama", layer: int = 1) -> Translator:
    arch = architecture_of(tiny.load(name))
    random = tiny.random_translators(arch)[layer - 1].translator
    return dataclasses.replace(random, weights_digest=model_digest(arch.model), provenance={"tokens": 7})


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_it_predicts_k_and_v_of_every_later_layer_from_the_normalised_state_alone(name: str) -> None:
    arch = architecture_of(tiny.load(name))
    own = translator(name)
    hidden = torch.randn(2, 3, arch.width)
    found = own.bound(arch).translate(hidden)
    assert list(found.layers) == [2, 3, 4]
    one = torch.cat([torch.ones(2, 3, 1), arch.normalised_input(1, hidden)], dim=-1)
    for layer in found.layers:
        for index, part in enumerate(found[layer]):
            assert part.shape == (2, arch.n_kv_heads, 3, arch.head_dim)
            wanted = torch.einsum("bmd,dhk->bhmk", one, own.weight[:, layer - 2, index])
            torch.testing.assert_close(part, wanted)


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    own = translator()
    own.save(tmp_path / "t.safetensors")
    again = Translator.load(tmp_path / "t.safetensors")
    assert torch.equal(again.weight, own.weight)
    assert (again.digest, again.provenance, again.shape) == (own.digest, own.provenance, own.shape)
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_another_weight_is_another_digest() -> None:
    own = translator()
    assert dataclasses.replace(own, weight=own.weight + 1e-3).digest != own.digest


def test_files_that_are_no_translator_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    translator().save(path)
    whole = path.read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], "cut short or damaged"),
        (b"", "cut short or damaged"),
        (whole.replace(b"quicksilver-translator-1", b"quicksilver-translator-9"), "format 'quicksilver-translator-9'"),
        (whole.replace(b"source_layer", b"source_floor"), "source_floor"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message) as refused:
            Translator.load(path)
        assert "\n" not in str(refused.value)
        assert "quicksilver fit" in str(refused.value)
    with pytest.raises(ConfigError, match="no translator .*nowhere"):
        Translator.load(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_what_is_no_float_is_refused_in_every_kind_of_file(dtype: torch.dtype, tmp_path: Path) -> None:
    own, path = translator(), tmp_path / "t.safetensors"
    gates = TrainedGates((0, 1), torch.zeros(2, 4), torch.zeros(2), 3)
    for whole in (own, Lens(torch.zeros(2, 5, 4), ""), gates):
        whole.save(path)
        assert type(whole).load(path).weight.dtype == torch.float32
        whole.save(path, dtype)
        with pytest.raises(ConfigError, match=f"{path}.* is of {str(dtype).removeprefix('torch.')}, where floats are needed"):
            type(whole).load(path)
    with pytest.raises(ConfigError, match="where floats are needed"):
        dataclasses.replace(own, weight=own.weight.to(dtype))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    translator().save(path)
    for kind in (Lens, TrainedGates):
        with pytest.raises(ConfigError, match=f"has format 'quicksilver-translator-1', and this version reads a {kind.kind}"):
            kind.load(path)


def test_a_weight_that_is_not_finite_or_of_another_shape_is_refused() -> None:
    own = translator()
    broken = own.weight.clone()
    broken[3, 0, 1] = torch.nan
    with pytest.raises(ConfigError, match="not finite"):
        dataclasses.replace(own, weight=broken)
    with pytest.raises(ConfigError, match="shape"):
        dataclasses.replace(own, weight=own.weight[1:])
    with pytest.raises(ConfigError, match="no later layer"):
        dataclasses.replace(own, source_layer=tiny.LAYERS - 1)


def test_a_translator_of_another_model_names_the_first_fact_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    translator("llama").save(path)
    for other, message in (
        (tiny.load("gpt2"), "model_type=llama and this one has gpt2"),
        (tiny.build("llama", num_hidden_layers=6), "n_layers=5 and this one has 6"),
        (tiny.build("llama", hidden_size=40), "width=32 and this one has 40"),
        (tiny.build("llama", initializer_range=0.1), "other weights"),
    ):
        with pytest.raises(ConfigError, match=message):
            translator_for(architecture_of(other), path, 1)
    with pytest.raises(ConfigError, match=r"stop before layer 1, and these stop before layer 2.*layers=\[2\]"):
        translator_for(architecture_of(tiny.load("llama")), path, 2)
    with pytest.raises(ConfigError, match="none with this model"):
        translator_for(architecture_of(tiny.load("llama")), "embedded", 1)


def test_the_shape_is_read_from_the_model() -> None:
    assert ModelShape.of(architecture_of(tiny.load("llama"))) == ModelShape("llama", tiny.LAYERS, tiny.WIDTH, 2, 8)
