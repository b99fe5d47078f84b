"""Which tokens are never fused (paper 2.3, H.7)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quicksilver.modules.checks import check_count, check_known_ids, check_token_ids
from quicksilver.modules.overrides import by_id, by_place, by_slot, check_mask
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.view import LayerView


@dataclass(kw_only=True)
class Exemptions:
    """The options that name tokens which are never fused.

    Args:
        exempt_ids, exempt_mask: by id, or by slot: a bool tensor (S,) or (B, S).
        anchors: sequences of token ids, such as those of "Question:"; every token of an occurrence is exempt (2.3).
        token_counts: how often each token id occurs in some corpus, V numbers or a JSON file of them.
        rare_below: tokens that occur less often than this are exempt (2.3 "rare entities").
        protect_first: so are the first tokens of a sequence, the attention sinks (arXiv 2309.17453).
        protect_last: and the last tokens of a prompt: the very last one's logits predict what follows.

    Raises:
        ConfigError: an option out of range; in a run, options by id on a model that was given embeddings, or `token_counts` of a
            smaller vocabulary.
    """

    exempt_ids: Sequence[int] = ()
    exempt_mask: torch.Tensor | None = None
    anchors: Sequence[Sequence[int]] = ()
    token_counts: Sequence[int] | torch.Tensor | Path | str | None = None
    rare_below: int = 0
    protect_first: int = 4
    protect_last: int = 1

    def check_exemptions(self) -> None:
        """Check and normalise the options; raises ConfigError."""
        for name in ("rare_below", "protect_first", "protect_last"):
            check_count(name, getattr(self, name))
        self.exempt_ids = check_token_ids("exempt_ids", self.exempt_ids)
        check_mask("exempt_mask", self.exempt_mask)
        self.anchors = _anchors(self.anchors)
        self._counts = _counts(self.token_counts, self.rare_below)

    def check_known(self, vocabulary: int) -> None:
        """Raises ConfigError when an option names a token id beyond the vocabulary."""
        check_known_ids("exempt_ids", self.exempt_ids, vocabulary)
        for i, anchor in enumerate(self.anchors):
            check_known_ids(f"anchors[{i}]", anchor, vocabulary)

    def exempt(self, view: LayerView, architecture: Architecture) -> torch.Tensor:
        """(B, M) bool: never fused."""
        exempt = by_place(view, self.protect_first, self.protect_last)
        exempt |= by_id("exempt_ids", view, self.exempt_ids) | by_slot("exempt_mask", view, self.exempt_mask)
        if not self.anchors and self._counts is None:
            return exempt
        if view.input_ids is None or view.pass_ids is None:
            raise ConfigError(
                "anchors and token_counts select by token id, but the model was given embeddings: call it with input_ids, or "
                "use exempt_mask."
            )
        if self.anchors:
            exempt |= occurrences(view.pass_ids, self.anchors).gather(1, view.index)
        if self._counts is not None:
            if len(self._counts) < architecture.vocab_size:
                raise ConfigError(
                    f"token_counts has {len(self._counts)} numbers and the vocabulary {architecture.vocab_size} "
                    "tokens: count with the model's own tokenizer, one number per id."
                )
            exempt |= self._counts.to(view.input_ids.device)[view.input_ids] < self.rare_below
        return exempt


def occurrences(ids: torch.Tensor, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Tokens of `ids` (B, N) long that are part of one of the sequences: (B, N) bool."""
    found = torch.zeros_like(ids, dtype=torch.bool)
    for sequence in sequences:
        n = len(sequence)
        if n > ids.shape[1]:
            continue
        starts = (ids.unfold(1, n, 1) == torch.tensor(list(sequence), device=ids.device)).all(-1)  # (B, N - n + 1)
        for i in range(n):
            found |= F.pad(starts, (i, n - 1 - i))
    return found


def _anchors(value: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or any(not isinstance(a, Sequence) or not len(a) for a in value):
        raise ConfigError(f"anchors={value!r} must be a list of sequences of token ids, such as [[24361, 25]] for 'Question:'.")
    return tuple(check_token_ids(f"anchors[{i}]", anchor) for i, anchor in enumerate(value))


def _counts(value: Any, rare_below: int) -> torch.Tensor | None:
    """(V,) long."""
    if (value is None) != (rare_below == 0):
        raise ConfigError(
            f"rare_below={rare_below} and token_counts={'null' if value is None else 'given'}: rare tokens need both, "
            "the counts and how many make a token rare."
        )
    if value is None or isinstance(value, torch.Tensor):
        counts = value
    else:
        if isinstance(value, (str, Path)):
            try:
                value = json.loads(Path(value).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
                raise ConfigError(
                    f"token_counts={str(value)!r} cannot be read ({error}): give a JSON list, one count per id."
                ) from None
        counts = torch.tensor(check_token_ids("token_counts", value))
    if counts is not None and counts.dim() != 1:
        raise ConfigError(f"token_counts has shape {tuple(counts.shape)}: give one count per token id, (V,).")
    return counts
