"""Continuations of one record side by side with the dense model's, words that differ marked. No model is asked for anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher

import pandas as pd

from quicksilver.harness.record import Record
from quicksilver.measure.generation import GREEDY, SAMPLED, TEXTS
from quicksilver.runtime.errors import ConfigError

SHOWN = 8  # prompts of each way of decoding; all are in generation.parquet
_END_OF_PROMPT = 60  # words of a prompt that are shown
_WORD = re.compile(r"\s*\S+|\s+\Z")

Piece = tuple[str, bool]  # text, and whether the other side has something else there


@dataclass(frozen=True)
class Sample:
    """One prompt and both continuations.

    Attributes:
        prompt: the end of it, `cut` saying whether there is more before.
        run, dense: the continuations in pieces.
        same_tokens: tokens before the first that differs; agreement: share of places with the same token, 0 to 1.
    """

    number: int
    prompt: str
    cut: bool
    run: tuple[Piece, ...]
    dense: tuple[Piece, ...]
    same_tokens: int
    agreement: float
    nats: float
    dense_nats: float


def shown(record: Record) -> dict[str, list[Sample]]:
    """Samples by way of decoding; nothing of a record that generated no text.

    Raises:
        ConfigError: the file is damaged.
    """
    if TEXTS not in record.files:
        return {}
    try:
        frame = pd.read_parquet(record.path / TEXTS)
        return {way: [_sample(row) for _, row in frame[frame["way"] == way].head(SHOWN).iterrows()] for way in (GREEDY, SAMPLED)}
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{TEXTS} of {record.path} cannot be read: {error}.") from error


def _sample(row: pd.Series) -> Sample:
    words = _WORD.findall(row["prompt_text"])
    run, dense = marked(row["text"], row["dense_text"])
    return Sample(
        int(row["prompt"]), "".join(words[-_END_OF_PROMPT:]).lstrip(), len(words) > _END_OF_PROMPT, run, dense,
        int(row["same_tokens"]), float(row["agreement"]), float(row["nats"]), float(row["dense_nats"]),
    )  # fmt: skip


def marked(one: str, two: str) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Both texts in pieces, alternately as in the other and not; words are compared with the white space before them."""
    words, others = _WORD.findall(one), _WORD.findall(two)
    left: list[Piece] = []
    right: list[Piece] = []
    for kind, a, b, c, d in SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        for side, some in ((left, words[a:b]), (right, others[c:d])):
            if some:
                side.append(("".join(some), kind != "equal"))
    return tuple(left), tuple(right)
