"""Rows that are parts of one another: SST-2's training rows are phrases of the same sentences.

A row that is kept out of training measures nothing while the rest of its sentence is trained on, so rows are kept out by sentence.
`out_of_fold` fits a linear model of word n-grams the same way: its answer about a row never saw the row's sentence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

FOLDS = 5
LONGEST = 3  # words of an n-gram


def owners(texts: Sequence[str]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The sentences that each text is in. A text that no longer one contains, word for word, is a sentence itself.

    Returns:
        Per text the numbers of its sentences, ascending; and (texts,) whether it is a whole sentence.
    """
    sentences: list[str] = []
    with_word: dict[str, list[int]] = defaultdict(list)
    found: dict[str, tuple[int, ...]] = {}
    whole: set[str] = set()
    for text in sorted({" ".join(text.split()) for text in texts}, key=lambda text: (-len(text.split()), text)):
        rarest = min((with_word.get(word, []) for word in text.split()), key=len, default=[])
        inside = tuple(i for i in rarest if f" {text} " in sentences[i])
        if not inside:
            inside = (len(sentences),)
            whole.add(text)
            for word in set(text.split()):
                with_word[word].append(len(sentences))
            sentences.append(f" {text} ")
        found[text] = inside
    plain = [" ".join(text.split()) for text in texts]
    return [found[text] for text in plain], np.array([text in whole for text in plain])


def kept_out(texts: Sequence[str], sentences: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to score and rows to train on, of different sentences.

    Args:
        sentences: how many are kept out; a tenth at most, and one at least.

    Returns:
        (texts,) rows that are whole kept sentences; (texts,) rows that are in another sentence too, which are trained on. A phrase of kept
        sentences alone is in neither. So it is between the official splits: a common phrase is trained on, the rest of a scored sentence is not.
    """
    owned, whole = owners(texts)
    there = 1 + max(max(own) for own in owned)
    kept = set(np.random.default_rng(seed).permutation(there)[: max(1, min(sentences, there // 10))].tolist())
    inside = np.array([all(i in kept for i in own) for own in owned])
    return inside & whole, ~inside


def out_of_fold(texts: Sequence[str], gold: Sequence[int], seed: int) -> list[np.ndarray]:
    """What a logistic regression of word 1- to 3-grams, fitted on the other folds, says after each word; a text goes with its first sentence.

    Args:
        gold: (texts,) 0 or 1.

    Returns:
        Per text (1 + words, 2): probabilities before the first word and after each. An n-gram that comes again counts again.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    first = np.array([own[0] for own in owners(texts)[0]])
    fold = np.random.default_rng(seed).integers(0, FOLDS, first.max() + 1)[first]
    labels, row = np.array(gold), np.array(texts, dtype=object)
    answers: list[np.ndarray] = [np.empty(0)] * len(texts)
    for number in range(FOLDS):
        rest = fold != number
        grams = TfidfVectorizer(ngram_range=(1, LONGEST), token_pattern=r"\S+", sublinear_tf=True)
        fitted = LogisticRegression(C=4.0, max_iter=300).fit(grams.fit_transform(row[rest]), labels[rest])
        for i in np.flatnonzero(~rest):
            answers[i] = _after_each_word(row[i], grams.vocabulary_, grams.idf_, fitted.coef_[0], fitted.intercept_[0])
    return answers


def _after_each_word(text: str, numbers: Mapping[str, int], idf: np.ndarray, weights: np.ndarray, bias: float) -> np.ndarray:
    """(1 + words, 2): the model's probabilities of each beginning of the text."""
    words = text.lower().split()
    push, norm = np.zeros(1 + len(words)), np.zeros(1 + len(words))
    for end in range(1, len(words) + 1):
        for length in range(1, min(LONGEST, end) + 1):
            gram = numbers.get(" ".join(words[end - length : end]))
            if gram is not None:
                push[end] += idf[gram] * weights[gram]
                norm[end] += idf[gram] ** 2
    logit = push.cumsum() / np.sqrt(np.maximum(norm.cumsum(), 1e-12)) + bias
    positive = 1 / (1 + np.exp(-logit))
    return np.stack([1 - positive, positive], axis=1)
