"""Words of a text with their tags and the constituents that hold neighbours together, as columns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Annotation:
    """Of a text with M words in S sentences.

    Attributes:
        tagset: `penn` or `upos`: which tags `tag` holds.
        start, end: (M,) int, characters of the text that the word takes up, end exclusive. Words ascend.
        tag: (M,) str, of that tag set; upos: (M,) str, the universal tag, empty where the treebank has none.
        sentence: (M,) int, number of the word's sentence; sentence_ids: (S,) str, its name in the treebank.
        joint_label: (M,) str, label of the smallest constituent that holds this word and the next one of its sentence; empty where the
            sentence ends or has no tree.
        joint_words: (M,) int, how many words that constituent has; 0 where there is none.
    """

    tagset: str
    start: np.ndarray
    end: np.ndarray
    tag: np.ndarray
    upos: np.ndarray
    sentence: np.ndarray
    sentence_ids: np.ndarray
    joint_label: np.ndarray
    joint_words: np.ndarray

    @property
    def has_trees(self) -> bool:
        """Whether any sentence has constituents."""
        return bool((self.joint_words > 0).any())

    @cached_property
    def digest(self) -> str:
        """sha256 of all of it."""
        whole = hashlib.sha256(self.tagset.encode())
        for column in (self.start, self.end, self.sentence, self.joint_words):
            whole.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        for words in (self.tag, self.upos, self.sentence_ids, self.joint_label):
            whole.update("\t".join(map(str, words)).encode())
        return whole.hexdigest()
