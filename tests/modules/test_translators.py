"""What is fitted: what a translator says, which files and models it refuses, and that no damaged file of any kind is believed."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quicksilver.measure.latency import shared_weight_copy
from quicksilver.modules.fitted import MODELS_FOLDER, FittedFile, Lens, Translator, model_digest, translator_for
from quicksilver.modules.learned_halting import TrainedGates
from quicksilver.modules.linear_mlp import MLPMaps
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
    assert dataclasses.replace(own, weight=own.weight + 1e-3).digest != own.digest


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    translator().save(path)
    for kind in (Lens, TrainedGates):
        with tiny.refused(f"has format 'quicksilver-translator-1', and this version reads a {kind.kind}"):
            kind.load(path)


def test_a_translator_of_another_model_names_the_first_fact_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    translator("llama").save(path)
    for other, source, layer, message in (
        (tiny.load("gpt2"), path, 1, "model_type=llama and this one has gpt2"),
        (tiny.build("llama", num_hidden_layers=6), path, 1, "n_layers=5 and this one has 6"),
        (tiny.build("llama", hidden_size=40), path, 1, "width=32 and this one has 40"),
        (tiny.build("llama", initializer_range=0.1), path, 1, "other weights"),
        (tiny.load("llama"), path, 2, r"stop before layer 1, and these stop before layer 2.*layers=\[2\]"),
        (tiny.load("llama"), "embedded", 1, "none with this model"),
    ):
        with tiny.refused(message):
            translator_for(architecture_of(other), source, layer)


def test_a_bound_translator_serves_a_copy_of_its_model_too() -> None:
    arch = architecture_of(tiny.load("llama"))
    copied = architecture_of(shared_weight_copy(arch.model))
    found = translator_for(copied, translator("llama").bound(arch), 1)
    assert found.architecture is copied


KINDS: tuple[type[FittedFile], ...] = (Translator, Lens, TrainedGates, MLPMaps)
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int32": lambda x: x.to(torch.int32), "bool": lambda x: x > 0, "complex": lambda x: x.to(torch.complex64), "NaN": lambda x: x * torch.nan,
    "infinite": lambda x: x / 0, "transposed": lambda x: x.transpose(0, -1).contiguous(), "flat": lambda x: x.flatten(), "one more": lambda x: x[None],
    "short": lambda x: x[..., :-1].contiguous(), "empty": lambda x: x[:0], "another": lambda x: x + 1,
}  # fmt: skip
FACTS: list[Any] = [None, "x", -1, 1.5, [], True, [None], 1e308, {"a": 1}, "[" * 10_000]
HARMLESS = {("provenance", "{'a': 1}"), ("weights_digest", "'x'"), ("weights_digest", repr(FACTS[-1])), ("predicts", "[]")}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_damaged_file_is_believed(kind: type[FittedFile], tmp_path: Path) -> None:
    path = next(iter(sorted(MODELS_FOLDER.glob(f"*-gpt2/{kind.folder}/*.safetensors"))[::-1]))
    kind.load(path).save(written := tmp_path / "written.safetensors")
    with safe_open(written, "pt") as file:
        header = json.loads(file.metadata()["quicksilver"])
    tensors, there, wrong = load_file(written), tmp_path / "file.safetensors", []

    def tried(what: str, tensors: dict[str, torch.Tensor], header: Any) -> None:
        save_file(tensors, there, metadata={"quicksilver": header if isinstance(header, str) else json.dumps(header)})
        try:
            kind.load(there)
        except ConfigError as error:
            if "\n" in str(error) or str(there) not in str(error):
                wrong.append(f"{what}: {error}")
        else:
            wrong.append(f"{what} is believed")

    for name, tensor in tensors.items():
        for damage, damaged in TENSORS.items():
            if tensor.ndim > 1 or damage not in ("transposed", "flat"):
                tried(f"{name} {damage}", {**tensors, name: damaged(tensor)}, header)
        tried(f"without {name}", {other: kept for other, kept in tensors.items() if other != name} or {"other": tensor}, header)
    for name in header.keys() - {"content"}:
        for value in FACTS:
            if (name, repr(value)) not in HARMLESS:
                tried(f"{name}={value!r:.20}", tensors, {**header, name: value})
        tried(f"without {name}", tensors, {other: kept for other, kept in header.items() if other != name})
    for text in ("", "{", "[" * 100_000, "[]", "3", "null"):
        tried(f"header {text:.10}", tensors, text)
    assert not wrong
