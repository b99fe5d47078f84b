"""CoNLL-U: sentences with their text, their words and where these stand in it (universaldependencies.org/format.html)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from quicksilver.runtime.errors import ConfigError

_COLUMNS = 10
_SPACE = re.compile(r"\s*")


@dataclass
class Sentence:
    """One sentence.

    Attributes:
        name: its `sent_id`, or file and line.
        text: as it is written.
        begins: `document`, `paragraph` or "": what begins with it.
        forms, tags, upos: by word; `tags` are the treebank's own (XPOS).
        spans: by word, its characters in `text`, end exclusive.
        tree: (label, words) of the smallest constituent that holds each word and the next one; empty without a tree.
    """

    name: str
    text: str
    begins: str
    forms: list[str]
    tags: list[str]
    upos: list[str]
    spans: list[tuple[int, int]]
    tree: list[tuple[str, int]] = field(default_factory=list)


def sentences(content: str, source: str) -> list[Sentence]:
    """All sentences of a file.

    Args:
        source: name of the file, for messages.

    Raises:
        ConfigError: a line that is no CoNLL-U, a sentence without text, or words that are not in its text; names the first place.
    """
    found = []
    for number, block in _blocks(content):
        found.append(_sentence(block, number, source))
    if not found:
        raise ConfigError(f"{source} has no sentence: is it a CoNLL-U file?")
    return found


def _blocks(content: str) -> Iterator[tuple[int, list[str]]]:
    """The lines of each sentence and the number of the first, from 1."""
    lines: list[str] = []
    first = 1
    for number, line in enumerate([*content.split("\n"), ""], 1):
        line = line.rstrip("\r")
        if line.strip():
            first = first if lines else number
            lines.append(line)
        elif lines:
            if any(not one.startswith("#") for one in lines):
                yield first, lines
            lines = []


def _sentence(lines: list[str], first: int, source: str) -> Sentence:
    comments: dict[str, str] = {}
    units: list[tuple[str, list[int]]] = []  # what is written as one, and the words that it stands for
    forms: list[str] = []
    tags: list[str] = []
    upos: list[str] = []
    covered = 0  # last word of the present multiword token
    for number, line in enumerate(lines, first):
        if line.startswith("#"):
            key, _, value = line[1:].partition("=")
            comments[key.strip()] = value.strip()
            continue
        cells = line.split("\t")
        if len(cells) != _COLUMNS:
            raise ConfigError(f"{source}, line {number}: {len(cells)} columns where CoNLL-U has {_COLUMNS}, parted by tabs.")
        if "." in cells[0]:
            continue  # an empty node is not written
        if "-" in cells[0]:
            low, high = map(int, cells[0].split("-"))
            units.append((cells[1], list(range(low - 1, high))))
            covered = high
            continue
        if not cells[0].isdigit() or int(cells[0]) != len(forms) + 1:
            raise ConfigError(f"{source}, line {number}: word {cells[0]!r} where word {len(forms) + 1} was expected.")
        forms.append(cells[1])
        upos.append("" if cells[3] == "_" else cells[3])
        tags.append("" if cells[4] == "_" else cells[4])
        if int(cells[0]) > covered:
            units.append((cells[1], [len(forms) - 1]))
    name = comments.get("sent_id", f"{source}, line {first}")
    if "text" not in comments:
        raise ConfigError(f"{source}, sentence {name}: it has no `# text = …`, so its words cannot be found in it.")
    begins = (
        "document" if "newdoc" in comments or "newdoc id" in comments
        else "paragraph" if "newpar" in comments or "newpar id" in comments else ""
    )  # fmt: skip
    text = comments["text"]
    return Sentence(name, text, begins, forms, tags, upos, _spans(text, units, forms, f"{source}, sentence {name}"))


def _spans(text: str, units: list[tuple[str, list[int]]], forms: list[str], place: str) -> list[tuple[int, int]]:
    """Characters of every word. Words of one written unit share it in turn where they spell it, else each has all of it."""
    spans: dict[int, tuple[int, int]] = {}
    at = 0
    for written, words in units:
        space = _SPACE.match(text, at)
        assert space is not None  # it matches nothing, too
        at = space.end()
        if not text.startswith(written, at):
            raise ConfigError(
                f"{place}: its words do not align with its text: {written!r} was expected at character {at}, and there is "
                f"{text[at : at + 20]!r}."
            )
        end = at + len(written)
        if "".join(forms[word] for word in words) == written:
            for word in words:
                spans[word] = (at, at + len(forms[word]))
                at += len(forms[word])
        else:
            spans |= dict.fromkeys(words, (at, end))
        at = end
    at += len(text[at:]) - len(text[at:].lstrip())
    if at < len(text):
        raise ConfigError(f"{place}: its words do not align with its text: {text[at:][:20]!r} at character {at} is no word.")
    return [spans[word] for word in range(len(forms))]
