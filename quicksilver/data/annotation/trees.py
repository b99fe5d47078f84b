"""Penn bracketings: what is needed of a tree is the smallest constituent that holds two neighbouring words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quicksilver.runtime.errors import ConfigError

_TOKEN = re.compile(r"\(|\)|[^\s()]+")
_ESCAPED = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}


def trees(content: str, source: str) -> list[str]:
    """The bracketings of a file, in their order.

    Raises:
        ConfigError: brackets that do not close; names the tree.
    """
    found, depth, start = [], 0, 0
    for match in re.finditer(r"[()]", content):
        if match[0] == "(":
            start = match.start() if depth == 0 else start
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                found.append(content[start : match.end()])
            if depth < 0:
                raise ConfigError(f"{source}, tree {len(found) + 1}: a bracket closes that was not opened.")
    if depth:
        raise ConfigError(f"{source}, tree {len(found) + 1}: {depth} brackets are not closed.")
    return found


def joints(tree: str, words: Sequence[str], place: str) -> list[tuple[str, int]]:
    """Of every word, label and number of words of the smallest constituent that holds it and the next word; ("", 0) of the last one.

    A label is the part before `-` and `=` (function tags): NP of NP-SBJ.

    Args:
        words: the sentence that the tree is of.
        place: for messages.

    Raises:
        ConfigError: a tree that does not cover its words, or is no bracketing.
    """
    leaves: list[str] = []
    found: dict[int, tuple[str, int]] = {}
    _read(_TOKEN.findall(tree), leaves, found, place)
    for number in range(max(len(leaves), len(words))):
        leaf = leaves[number] if number < len(leaves) else None
        word = words[number] if number < len(words) else None
        if leaf != word and (leaf is None or word is None or _plain(leaf) != _plain(word)):
            raise ConfigError(
                f"{place}: the tree does not cover its words: word {number + 1} is {word!r} in the sentence and {leaf!r} in the tree."
            )
    return [*(found[number] for number in range(len(words) - 1)), ("", 0)]


def _plain(word: str) -> str:
    return re.sub("|".join(_ESCAPED), lambda found: _ESCAPED[found[0]], word)


def _read(tokens: list[str], leaves: list[str], found: dict[int, tuple[str, int]], place: str) -> None:
    """Fill in the leaves and, by word, what joins it to the next. A stack, because trees may be deeper than calls."""
    at = 0
    stack: list[tuple[str, int, list[int]]] = []  # label, first word, firsts of the children but the first child's
    while at < len(tokens):
        if tokens[at] == "(":
            labelled = at + 1 < len(tokens) and tokens[at + 1] not in "()"
            label = tokens[at + 1] if labelled else ""
            if stack and len(leaves) > stack[-1][1]:
                stack[-1][2].append(len(leaves))
            stack.append((label, len(leaves), []))
            at += 1 + labelled
        elif tokens[at] == ")":
            label, first, later = stack.pop()
            plain = re.split(r"(?<!^)[-=]", label)[0]
            for child in later:
                if child < len(leaves):  # an empty constituent joins nothing
                    found.setdefault(child - 1, (plain, len(leaves) - first))
            at += 1
        else:
            if not stack:
                raise ConfigError(f"{place}: {tokens[at]!r} stands outside of all brackets.")
            if len(leaves) > stack[-1][1]:
                stack[-1][2].append(len(leaves))
            leaves.append(tokens[at])
            at += 1
