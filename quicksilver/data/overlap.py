"""Text that shares long n-grams with evaluation text is left out of what anything is fitted on (Brown et al. 2020, app. C)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

NGRAM_WORDS = 13
_WORD = re.compile(r"\w+")


def ngrams(text: str, words: int = NGRAM_WORDS) -> Iterator[int]:
    """Hashes of the runs of so many consecutive words, case and punctuation apart; the same within one process only."""
    found = _WORD.findall(text.lower())
    for i in range(len(found) - words + 1):
        yield hash(tuple(found[i : i + words]))


def shared_pct(scored: str, other: str) -> float:
    """Percent of the runs of `NGRAM_WORDS` words of `scored` that `other` has, too."""
    there, found = set(ngrams(other)), list(ngrams(scored))
    return 100 * sum(gram in there for gram in found) / max(1, len(found))


@dataclass(frozen=True)
class Filtered:
    """Text without the paragraphs that an evaluation text has, too.

    Attributes:
        paragraphs, removed: how many there were, and how many were left out.
        removed_by: of these, how many share an n-gram with each evaluation text (one may share with several).
    """

    text: str
    paragraphs: int
    removed: int
    removed_by: dict[str, int]


def without_overlap(text: str, evaluation: Mapping[str, str], words: int = NGRAM_WORDS) -> Filtered:
    """`text` without every paragraph (line) that shares a run of `words` words with one of the `evaluation` texts, by name.

    A run that spans two paragraphs counts: both are left out.
    """
    held = {name: set(ngrams(other, words)) for name, other in evaluation.items()}
    lines = text.splitlines(keepends=True)
    of_word = [number for number, line in enumerate(lines) for _ in _WORD.findall(line.lower())]
    removed: dict[str, set[int]] = {name: set() for name in held}
    for i, gram in enumerate(ngrams(text, words)):
        for name, grams in held.items():
            if gram in grams:
                removed[name].update(of_word[i : i + words])
    every = set().union(*removed.values())
    kept = "".join(line for number, line in enumerate(lines) if number not in every)
    by = {name: len(numbers) for name, numbers in removed.items()}
    return Filtered(kept, sum(1 for line in lines if line.strip()), len(every), by)
