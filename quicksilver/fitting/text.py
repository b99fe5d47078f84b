"""The text that something is fitted on: windows of calibrating parts, without what evaluation texts have too, split in two halves.

Maps are fitted on one half and schedules chosen on the other, so that no choice is made on text that a map was fitted to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from quicksilver.data.overlap import without_overlap
from quicksilver.data.text import Text
from quicksilver.data.windows import encode
from quicksilver.runtime.errors import ConfigError

Half = Literal["fit", "choose"]
HALVES: tuple[str, ...] = ("fit", "choose")  # even windows, odd windows


@dataclass(frozen=True)
class FitText:
    """Windows of several texts.

    Attributes:
        ids: (W, N) long.
        digest: sha256 of the ids.
        provenance: by text: its source and digest, windows taken, paragraphs left out and for which evaluation text.
    """

    ids: torch.Tensor
    provenance: dict[str, Any]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.ids.contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def fit_text(
    texts: Mapping[str, Text],
    evaluation: Mapping[str, str],
    tokenizer: Any,
    *,
    half: Half,
    windows: int | None,
    window_tokens: int = 512,
) -> FitText:
    """Windows of one half of `texts`, by name, at most `windows` in all: texts give equal numbers as far as they have them.

    Args:
        evaluation: texts that must share no 13 consecutive words with what is fitted on, by name.

    Raises:
        ConfigError: nothing is left of a text, or it is shorter than two windows.
    """
    parts: dict[str, torch.Tensor] = {}
    said: dict[str, Any] = {}
    for name, text in texts.items():
        kept = without_overlap(text.text, evaluation)
        if not kept.text.strip():
            raise ConfigError(
                f"Nothing of {name} is left: every paragraph shares 13 words with an evaluation text. Give other text."
            )
        every = encode(kept.text, tokenizer, window_tokens).ids
        parts[name] = every[HALVES.index(half) :: 2]
        if not len(parts[name]):
            raise ConfigError(f"{name} has {len(every)} windows of {window_tokens} tokens: give at least two, one for each half.")
        said[name] = {
            "source": text.source,
            "digest": text.digest,
            "paragraphs": kept.paragraphs,
            "left_out": kept.removed,
            "left_out_by": kept.removed_by,
        }
    for name, count in _shares([len(part) for part in parts.values()], windows, list(parts)).items():
        parts[name] = parts[name][torch.linspace(0, len(parts[name]) - 1, count).long()]
        said[name]["windows"] = count
    return FitText(torch.cat(list(parts.values())), {"half": half, "window_tokens": window_tokens, "texts": said})


def _shares(available: Sequence[int], wanted: int | None, names: Sequence[str]) -> dict[str, int]:
    """How many windows each text gives: as equal as it goes, the shortest texts first."""
    if wanted is None or wanted >= sum(available):
        return dict(zip(names, available, strict=True))
    shares, left = {}, wanted
    for rank, index in enumerate(sorted(range(len(names)), key=lambda i: available[i])):
        shares[names[index]] = min(available[index], left // (len(names) - rank))
        left -= shares[names[index]]
    return shares
