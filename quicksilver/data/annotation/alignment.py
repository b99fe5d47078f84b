"""Which word each sub-word of a model belongs to, by the characters that both take up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quicksilver.data.annotation.annotation import Annotation
from quicksilver.runtime.errors import ConfigError


@dataclass(frozen=True)
class AnnotatedTokens:
    """Windows (W, N) of tokens over an annotated text; M words.

    Attributes:
        annotation: of the words.
        word: (W, N) int, the word a token belongs to, -1 where it is of none (white space). A token that touches several words belongs
            to the one with most characters in it, the first of equals.
        touched: (W, N) int, how many words a token touches.
        piece: (W, N) int, number of the token within its word, from 0; pieces: (W, N) int, how many tokens its word has in the text.
        occurrences: (W, N) int, how often the token occurs in the whole text.
        sentence_tokens: (W, N) int, how many tokens the sentence of its word has; 0 where it is of none.
    """

    annotation: Annotation
    word: np.ndarray
    touched: np.ndarray
    piece: np.ndarray
    pieces: np.ndarray
    occurrences: np.ndarray
    sentence_tokens: np.ndarray


def align(annotation: Annotation, ids: np.ndarray, offsets: np.ndarray, taken: np.ndarray) -> AnnotatedTokens:
    """Align the tokens of a text with its words.

    Args:
        ids: (T,) token ids of the whole text; offsets: (T, 2), the characters that each takes up, end exclusive.
        taken: (W, N) int, which tokens of the text the windows hold.

    Raises:
        ConfigError: a word that no token touches; names it.
    """
    start, end = annotation.start, annotation.end
    first = np.searchsorted(end, offsets[:, 0], side="right")  # first word that ends behind the token's beginning
    behind = np.searchsorted(start, offsets[:, 1], side="left")  # first word that begins behind the token's end
    touched = np.maximum(behind - first, 0)
    word = np.where(touched > 0, first, -1)
    for token in np.flatnonzero(touched > 1):
        candidates = np.arange(first[token], behind[token])
        shared = np.minimum(end[candidates], offsets[token, 1]) - np.maximum(start[candidates], offsets[token, 0])
        word[token] = candidates[shared.argmax()]
    reached = np.zeros(len(start) + 1, dtype=int)
    np.add.at(reached, first[touched > 0], 1)
    np.add.at(reached, behind[touched > 0], -1)
    missed = np.flatnonzero(reached.cumsum()[:-1] == 0)
    if len(missed):
        one = missed[0]
        raise ConfigError(
            f"annotation and text do not align: no token of the model is of word {one} (characters {start[one]} to {end[one]}, sentence "
            f"{annotation.sentence_ids[annotation.sentence[one]]})."
        )
    pieces = np.bincount(word[word >= 0], minlength=len(start))
    begins = np.concatenate([[True], word[1:] != word[:-1]])
    run_start = np.maximum.accumulate(np.where(begins, np.arange(len(word)), 0))
    piece = np.arange(len(word)) - run_start
    occurrences = np.bincount(ids)[ids]
    lengths = np.bincount(annotation.sentence[word[word >= 0]], minlength=len(annotation.sentence_ids))
    return AnnotatedTokens(
        annotation, word[taken], touched[taken], piece[taken], np.where(word >= 0, pieces[word], 0)[taken], occurrences[taken],
        np.where(word >= 0, lengths[annotation.sentence[word]], 0)[taken],
    )  # fmt: skip
