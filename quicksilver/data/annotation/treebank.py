"""Treebanks as running text: a CoNLL-U file (any UD treebank), or GUM's folder of dependencies and constituent trees.

Sentences of a paragraph are joined by a space, paragraphs by a line's end, documents by an empty line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quicksilver.data.annotation.annotation import Annotation
from quicksilver.data.annotation.classes import check_tags
from quicksilver.data.annotation.conllu import Sentence, sentences
from quicksilver.data.annotation.trees import joints, trees
from quicksilver.data.spec import Part
from quicksilver.runtime.errors import ConfigError

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
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: the treebank is not whole. Give another data.root=/folder or dataset.files.test=…"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
