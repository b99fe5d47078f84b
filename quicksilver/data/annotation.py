"""Words with their classes and phrases: what an annotated text says, and which tokens each word is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import yaml

from quicksilver.runtime.errors import ConfigError


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


CLASSES = ("determiner", "preposition", "conjunction", "pronoun", "auxiliary", "content", "other")
FUNCTION = CLASSES[:5]  # those that the paper calls function words
Reading = Literal["ours", "paper"]


@cache
def table() -> Mapping[str, Any]:
    """The yaml: tag set -> tag -> class, or [ours, the paper's]."""
    return yaml.safe_load(files(__package__).joinpath("word_classes.yaml").read_text(encoding="utf-8"))


def check_tags(tagset: str, tags: Sequence[str], places: Sequence[str]) -> None:
    """Raises ConfigError at the first tag that is not in the tag set, with its place."""
    known = table()[tagset]
    for tag, place in zip(tags, places, strict=True):
        if tag not in known:
            other = next((name for name in table() if name != tagset and tag in table()[name]), None)
            hint = f" It is one of {other}: dataset.reader=treebank{'-upos' if other == 'upos' else ''}." if other else ""
            raise ConfigError(f"{place}: {tag!r} is no tag of the {tagset} tag set ({', '.join(list(known)[:6])} …).{hint}")


def classes(annotation: Annotation, reading: Reading = "ours") -> np.ndarray:
    """The class of every word, (M,) str.

    `ours`: an auxiliary is what the treebank calls AUX, so that lexical verbs in the present tense are content words. `paper`: by the
    Penn tag alone, where MD, VBZ and VBP are "auxiliary verbs".
    """
    column = 0 if reading == "ours" else 1
    by_tag = {tag: entry if isinstance(entry, str) else entry[column] for tag, entry in table()[annotation.tagset].items()}
    found = np.array([by_tag[tag] for tag in annotation.tag], dtype=object)
    if reading == "ours":
        found[annotation.upos == "AUX"] = "auxiliary"
    return found.astype(str)


# Articles and determiners, prepositions, conjunctions, pronouns, auxiliaries, particles (after Huddleston and Pullum 2002, ch. 1 and 2).
_LIST = """
    a an the this that these those some any no every each either neither both all such what which whose of in to for with on
    at from by about as into like through after over between out against during without before under around among above
    below up down off near since until within along across behind beyond upon via per than and or but nor so yet if because
    although though while whereas unless whether when where how why i you he she it we they me him her us them my your his
    its our their mine yours hers ours theirs myself itself themselves who whom one be am is are was were been being have
    has had having do does did done will would shall should can could may might must not never there here also only then too
    very just
"""
FUNCTION_WORDS = frozenset(_LIST.split())
FUNCTION_OR_CONTENT = ("function", "content", "other")


def word_classes(tokens: Sequence[str]) -> list[str]:
    """The class of the word that each token is a part of: `function`, `content`, or `other` (no letters: digits, marks, white space).

    A token that begins with a space, or follows one that is no letter, begins a word.
    """
    starts, previous = [], ""
    for token in tokens:
        starts.append(not (token[:1].isalpha() and previous[-1:].isalpha()))
        previous = token
    classes: list[str] = []
    for start, end in pairwise([*(i for i, starting in enumerate(starts) if starting), len(tokens)]):
        word = "".join(tokens[start:end]).strip().lower()
        kind = "other" if not any(map(str.isalpha, word)) else "function" if word in FUNCTION_WORDS else "content"
        classes += [kind] * (end - start)
    return classes


# What an option called `…_ids` may name instead of words (quicksilver.runs.parts): which tokens of a vocabulary are meant, by their text.
TOKEN_SETS: dict[str, Callable[[str], bool]] = {
    "@function_words": lambda text: text.strip().lower() in FUNCTION_WORDS,
    "@with_letters": lambda text: any(map(str.isalpha, text)),
    "@begins_with_a_letter": lambda text: text[:1].isalpha(),  # goes on with a word, after a token that ends with a letter
    "@ends_with_a_letter": lambda text: text[-1:].isalpha(),
}


def token_set(name: str, tokenizer: Any) -> list[int]:
    """Ids of the tokens of a vocabulary that belong to a set of `TOKEN_SETS`."""
    belongs = TOKEN_SETS[name]
    return [number for number in range(len(tokenizer)) if belongs(tokenizer.decode([number]))]


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
