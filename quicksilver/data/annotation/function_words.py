"""Function and content words by a closed list of English, where there is no tagger. Whole words are put together from their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
CLASSES = ("function", "content", "other")


def word_classes(tokens: Sequence[str]) -> list[str]:
    """The class of the word that each token is a part of: `function`, `content`, or `other` (no letters: digits, marks, white space).

    A token that begins with a space, or follows one that is no letter, begins a word.
    """
    words: list[list[int]] = []
    previous = ""
    for i, token in enumerate(tokens):
        text = token.strip()
        continues = text[:1].isalpha() and not token[:1].isspace() and previous[-1:].isalpha()
        if continues:
            words[-1].append(i)
        else:
            words.append([i])
        previous = token
    classes = [""] * len(tokens)
    for members in words:
        word = "".join(tokens[i] for i in members).strip().lower()
        kind = "other" if not any(map(str.isalpha, word)) else "function" if word in FUNCTION_WORDS else "content"
        for i in members:
            classes[i] = kind
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
