"""Treebanks: CoNLL-U files and bracketed trees, read and checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quicksilver.data.annotation import Annotation, check_tags
from quicksilver.data.spec import Part
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_bytes

_COLUMNS = 10


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
    """All sentences of a file; `source` is its name, for messages.

    Raises:
        ConfigError: a line that is no CoNLL-U, a sentence without text, or words that are not in its text; names the first place.
    """
    numbered = enumerate((line.rstrip("\r") for line in content.split("\n")), 1)
    blocks = [list(lines) for blank, lines in groupby(numbered, lambda one: not one[1].strip()) if not blank]
    found = [_sentence(lines, source) for lines in blocks if any(not line.startswith("#") for _, line in lines)]
    if not found:
        raise ConfigError(f"{source} has no sentence: is it a CoNLL-U file?")
    return found


def _sentence(lines: list[tuple[int, str]], source: str) -> Sentence:
    comments: dict[str, str] = {}
    units: list[tuple[str, list[int]]] = []  # what is written as one, and the words that it stands for
    words: list[list[str]] = []  # form, universal tag, the treebank's tag
    covered = 0  # last word of the present multiword token
    for number, line in lines:
        if line.startswith("#"):
            key, _, value = line[1:].partition("=")
            comments[key.strip()] = value.strip()
            continue
        cells = line.split("\t")
        if len(cells) != _COLUMNS:
            raise ConfigError(f"{source}, line {number}: {len(cells)} columns where CoNLL-U has {_COLUMNS}, parted by tabs.")
        place, form = cells[:2]
        if "." in place:
            continue  # an empty node is not written
        if "-" in place:
            low, covered = map(int, place.split("-"))
            units.append((form, list(range(low - 1, covered))))
            continue
        if not place.isdigit() or int(place) != len(words) + 1:
            raise ConfigError(f"{source}, line {number}: word {place!r} where word {len(words) + 1} was expected.")
        if int(place) > covered:
            units.append((form, [len(words)]))
        words.append([form, *("" if tag == "_" else tag for tag in cells[3:5])])
    name = comments.get("sent_id", f"{source}, line {lines[0][0]}")
    if "text" not in comments:
        raise ConfigError(f"{source}, sentence {name}: it has no `# text = …`, so its words cannot be found in it.")
    begun = {key.partition(" ")[0] for key in comments}
    begins = "document" if "newdoc" in begun else "paragraph" if "newpar" in begun else ""
    forms, upos, tags = (list(column) for column in zip(*words, strict=True))
    spans = _spans(comments["text"], units, forms, f"{source}, sentence {name}")
    return Sentence(name, comments["text"], begins, forms, tags, upos, spans)


def _spans(text: str, units: list[tuple[str, list[int]]], forms: list[str], place: str) -> list[tuple[int, int]]:
    """Characters of every word. Words of one written unit share it in turn where they spell it, else each has all of it."""
    spans: dict[int, tuple[int, int]] = {}
    at = 0
    for written, words in units:
        at = len(text) - len(text[at:].lstrip())
        if not text.startswith(written, at):
            raise ConfigError(
                f"{place}: its words do not align with its text: {written!r} was expected at character {at}, and there is "
                f"{text[at : at + 20]!r}."
            )
        end = at + len(written)
        spelled = "".join(forms[word] for word in words) == written
        for word in words:
            spans[word] = (at, at + len(forms[word])) if spelled else (at, end)
            at = spans[word][1] if spelled else at
        at = end
    left = text[at:].lstrip()
    if left:
        raise ConfigError(
            f"{place}: its words do not align with its text: {left[:20]!r} at character {len(text) - len(left)} is no word."
        )
    return [spans[word] for word in range(len(forms))]


_BRACKET_OR_WORD = re.compile(r"\(\s*(?P<label>[^\s()]*)|\)|[^\s()]+")
_ESCAPED = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}


class Tree(NamedTuple):
    """Leaves of a tree; and by leaf, label and number of leaves of the smallest constituent that holds it and the next one."""

    leaves: list[str]
    joints: dict[int, tuple[str, int]]


def trees(content: str, source: str) -> list[Tree]:
    """The bracketings of a file, in their order. A label is the part before `-` and `=` (function tags): NP of NP-SBJ.

    Raises:
        ConfigError: brackets that do not close, or a word outside of all brackets; names the tree.
    """
    found: list[Tree] = []
    tree = Tree([], {})
    stack: list[tuple[str, int, list[int]]] = []  # label, first leaf, first leaves of the children but the first child
    for match in _BRACKET_OR_WORD.finditer(content):
        token, place, leaf = match[0], f"{source}, tree {len(found) + 1}", len(tree.leaves)
        if token == ")":
            if not stack:
                raise ConfigError(f"{place}: a bracket closes that was not opened.")
            label, first, later = stack.pop()
            plain = re.split(r"(?<!^)[-=]", label)[0]
            for child in later:
                if child < leaf:  # an empty constituent joins nothing
                    tree.joints.setdefault(child - 1, (plain, leaf - first))
            if not stack:
                found.append(tree)
                tree = Tree([], {})
            continue
        if stack and leaf > stack[-1][1]:
            stack[-1][2].append(leaf)
        if token[0] == "(":
            stack.append((match["label"], leaf, []))
        elif stack:
            tree.leaves.append(token)
        else:
            raise ConfigError(f"{place}: {token!r} stands outside of all brackets.")
    if stack:
        raise ConfigError(f"{source}, tree {len(found) + 1}: {len(stack)} brackets are not closed.")
    return found


def joints(tree: Tree, words: Sequence[str], place: str) -> list[tuple[str, int]]:
    """Of every word of a sentence, label and number of words of the smallest constituent that holds it and the next word; ("", 0) of the
    last one. `place` is for messages.

    Raises:
        ConfigError: a tree that does not cover its words.
    """
    for number, (leaf, word) in enumerate(zip_longest(tree.leaves, words), 1):
        if leaf is None or word is None or _plain(leaf) != _plain(word):
            raise ConfigError(
                f"{place}: the tree does not cover its words: word {number} is {word!r} in the sentence and {leaf!r} in the tree."
            )
    return [*(tree.joints[number] for number in range(len(words) - 1)), ("", 0)]


def _plain(word: str) -> str:
    return re.sub("|".join(_ESCAPED), lambda found: _ESCAPED[found[0]], word)


_JOINED_BY = {"document": "\n\n", "paragraph": "\n", "": " "}
_CALIBRATES = "dev"  # the section of splits.md; all other documents are scored
_DOCUMENT = re.compile(r"\s*\* (\S+)")


def read_treebank(path: Path, part: Part, tagset: str) -> tuple[str, Annotation]:
    """Text and annotation of a treebank.

    Args:
        path: a CoNLL-U file, or a folder with `dep/*.conllu`, `const/*.ptb` and `splits.md` (GUM).
        part: of a folder, its documents for testing or for calibration; a file is one part.
        tagset: `penn`, the treebank's own tags, or `upos`, the universal ones.

    Raises:
        ConfigError: a missing file, annotation that does not align with its text or with its tree, an unknown tag; names the first place.
    """
    found = _of_folder(path, part) if path.is_dir() else sentences(_content(path), path.name)
    return joined(found, tagset)


def joined(found: Sequence[Sentence], tagset: str = "penn") -> tuple[str, Annotation]:
    """Sentences as one text with its annotation."""
    text = ""
    spans: list[tuple[int, int]] = []
    for sentence in found:
        text += _JOINED_BY[sentence.begins] if text else ""
        spans += [(len(text) + start, len(text) + end) for start, end in sentence.spans]
        text += sentence.text
    upos = [tag for sentence in found for tag in sentence.upos]
    tags = upos if tagset == "upos" else [tag for sentence in found for tag in sentence.tags]
    places = [f"sentence {one.name}, word {number} ({form})" for one in found for number, form in enumerate(one.forms, 1)]
    check_tags(tagset, tags, places)
    (starts, ends), (labels, words) = (
        zip(*pairs, strict=True) for pairs in (spans, [one for s in found for one in s.tree or [("", 0)] * len(s.forms)])
    )
    return text, Annotation(
        tagset, np.array(starts), np.array(ends), np.array(tags), np.array(upos),
        np.repeat(np.arange(len(found)), [len(sentence.forms) for sentence in found]), np.array([one.name for one in found]),
        np.array(labels), np.array(words),
    )  # fmt: skip


def _of_folder(folder: Path, part: Part) -> list[Sentence]:
    calibrating = _section(_content(folder / "splits.md"), _CALIBRATES)
    found: list[Sentence] = []
    names = sorted(path.stem for path in (folder / "dep").glob("*.conllu"))
    for name in names:
        if (name in calibrating) != (part == "calibration"):
            continue
        document = sentences(_content(folder / "dep" / f"{name}.conllu"), f"{name}.conllu")
        parsed = trees(_content(folder / "const" / f"{name}.ptb"), f"{name}.ptb")
        if len(parsed) != len(document):
            raise ConfigError(
                f"{folder}: {name} has {len(document)} sentences in dep/ and {len(parsed)} trees in const/: they are not of one release."
            )
        for sentence, tree in zip(document, parsed, strict=True):
            sentence.tree = joints(tree, sentence.forms, f"{name}.ptb, sentence {sentence.name}")
        found += document
    if not found:
        raise ConfigError(
            f"{folder} has no document to {'calibrate on' if part == 'calibration' else 'score'}: {folder}/dep/*.conllu."
        )
    return found


def _section(content: str, name: str) -> set[str]:
    """The documents listed below `## name` of splits.md."""
    for section in content.split("\n## ")[1:]:
        if section.partition("\n")[0].strip() == name:
            return {match[1] for match in map(_DOCUMENT.match, section.splitlines()) if match}
    raise ConfigError(f"splits.md has no section {name!r}: it says which documents calibrate.")


def _content(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: the treebank is not whole. Give another data.root=/folder or dataset.files.test=…"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
