"""Treebanks: CoNLL-U files and bracketed trees, read and checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quicksilver.data.annotation import Annotation, check_tags
from quicksilver.data.spec import Part
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_bytes

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
    pieces: list[str] = []
    starts, ends = [], []
    at = 0
    for sentence in found:
        between = _JOINED_BY[sentence.begins] if pieces else ""
        at += len(between)
        starts += [at + start for start, _ in sentence.spans]
        ends += [at + end for _, end in sentence.spans]
        at += len(sentence.text)
        pieces += [between, sentence.text]
    lengths = [len(sentence.forms) for sentence in found]
    upos = [tag for sentence in found for tag in sentence.upos]
    tags = upos if tagset == "upos" else [tag for sentence in found for tag in sentence.tags]
    places = [f"sentence {one.name}, word {number + 1} ({form})" for one in found for number, form in enumerate(one.forms)]
    check_tags(tagset, tags, places)
    tree = [joint for one in found for joint in (one.tree or [("", 0)] * len(one.forms))]
    annotation = Annotation(
        tagset, np.array(starts), np.array(ends), np.array(tags), np.array(upos), np.repeat(np.arange(len(found)), lengths),
        np.array([one.name for one in found]), np.array([label for label, _ in tree]), np.array([words for _, words in tree]),
    )  # fmt: skip
    return "".join(pieces), annotation


def _of_folder(folder: Path, part: Part) -> list[Sentence]:
    calibrating = _section(_content(folder / "splits.md"), _CALIBRATES)
    found: list[Sentence] = []
    names = sorted(path.stem for path in (folder / "dep").glob("*.conllu"))
    for name in names:
        if (name in calibrating) != (part == "calibration"):
            continue
        document = sentences(_content(folder / "dep" / f"{name}.conllu"), f"{name}.conllu")
        bracketings = trees(_content(folder / "const" / f"{name}.ptb"), f"{name}.ptb")
        if len(bracketings) != len(document):
            raise ConfigError(
                f"{folder}: {name} has {len(document)} sentences in dep/ and {len(bracketings)} trees in const/: they are not of one release."
            )
        for sentence, tree in zip(document, bracketings, strict=True):
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
