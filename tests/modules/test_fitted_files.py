"""Every file of what was fitted × damages to its tensors and its header: refused in one line, or a fact that another model may have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quicksilver.modules.fitted import MODELS_FOLDER, FittedFile
from quicksilver.modules.learned_halting import TrainedGates
from quicksilver.modules.lens import Lens
from quicksilver.modules.translators import Translator
from quicksilver.runtime import ConfigError

KINDS: tuple[type[FittedFile], ...] = (Translator, Lens, TrainedGates)
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int32": lambda x: x.to(torch.int32), "bool": lambda x: x > 0, "complex": lambda x: x.to(torch.complex64), "NaN": lambda x: x * torch.nan,
    "infinite": lambda x: x / 0, "transposed": lambda x: x.transpose(0, -1).contiguous(), "flat": lambda x: x.flatten(), "one more": lambda x: x[None],
    "short": lambda x: x[..., :-1].contiguous(), "empty": lambda x: x[:0], "another": lambda x: x + 1,
}  # fmt: skip
FACTS: list[Any] = [None, "x", -1, 1.5, [], True, [None], 1e308, {"a": 1}, "[" * 10_000]
HARMLESS = {("provenance", "{'a': 1}"), ("weights_digest", "'x'"), ("weights_digest", repr(FACTS[-1])), ("predicts", "[]")}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_damaged_file_is_believed(kind: type[FittedFile], tmp_path: Path) -> None:
    path = next(iter(sorted(MODELS_FOLDER.glob(f"reference-gpt2/{kind.folder}/*.safetensors"))))
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
