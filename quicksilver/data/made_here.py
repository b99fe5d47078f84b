"""Texts that are made here: Python's own documentation and source, and passages that need far context."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from pathlib import Path

from quicksilver.data.spec import FarContext, Part
from quicksilver.runtime.errors import ConfigError

_REPEATED_FROM = 40  # characters; shorter paragraphs ("See also:") repeat because they are phrases, not because text was copied
_CALIBRATES_ONE_IN = 5


def python_docs(part: Part) -> str:
    """The text of one part; topics in the order of their names, each topic wholly in one part.

    A fifth of the language reference appears under several topics. Every paragraph is kept where it comes first only: scored
    twice it would pass for more evidence than it is, and in both parts it would calibrate on what is scored.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = []
    for name in sorted(topics):
        paragraphs = []
        for paragraph in topics[name].strip().split("\n\n"):
            words = " ".join(paragraph.split())
            if words not in seen:
                paragraphs.append(paragraph)
            if len(words) >= _REPEATED_FROM:
                seen.add(words)
        # By the name's digest: a topic that a new CPython adds moves no other topic to the other part.
        calibrates = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _CALIBRATES_ONE_IN == 0
        if paragraphs and calibrates == (part == "calibration"):
            kept.append("\n\n".join(paragraphs))
    return "\n\n".join(kept)


# Packages that every Python from 3.11 on carries. Their text is removed from what the far-context models learn (scripts/reference_corpus.py).
# reference-gpt2, reference-llama and the ladder learned from docstrings of these packages, though not from their code.
PACKAGES: dict[Part, tuple[str, ...]] = {
    "test": ("concurrent", "email", "logging", "wsgiref", "xml"),
    "calibration": ("html", "http", "xmlrpc"),
}


def python_source(part: Part) -> str:
    """The files of one part, each whole; a package is wholly in one part. Raises ConfigError: this Python has no source of its library."""
    return "\n\n".join(path.read_text(encoding="utf-8").strip() for path in source_files(part))


def source_files(part: Part) -> list[Path]:
    """Files of a part below the folder of the standard library, without its tests."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for package in PACKAGES[part]:
        files = sorted(path for path in (library / package).rglob("*.py") if "test" not in path.parts and path.stat().st_size)
        if not files:
            raise ConfigError(f"{library / package} has no Python files: dataset=python-source needs the library's source.")
        found += files
    return found


_SEEDS = {"test": 20, "calibration": 21}
_PASSAGE_CHARACTERS = 900  # some 250 tokens of the reference models
_FILLER_CHARACTERS = 600
_COPIES = 3
_WORDS = """
    brass silver broken painted wooden heavy small ancient green narrow hollow square
    kettle lantern ladder mirror compass violin saddle anchor basket clock barrel candle
    cellar attic garden stable library kitchen tower harbour chapel market orchard mill
"""
_ADJECTIVES, _THINGS, _PLACES = map(str.split, _WORDS.strip().splitlines())


def far_context(kind: FarContext, part: Part) -> str:
    """The text of one part: passages that are copied, or facts that are asked for behind a passage."""
    draw = random.Random(_SEEDS[part])
    passages = _passages(python_docs(part), _PASSAGE_CHARACTERS if kind == "copy" else _FILLER_CHARACTERS)
    draw.shuffle(passages)
    if kind == "copy":
        return "\n\n".join("\n\n".join([passage] * _COPIES) for passage in passages)
    return "\n\n".join(_with_questions(passage, draw) for passage in passages)


def _passages(text: str, characters: int) -> list[str]:
    """Whole paragraphs in the order of the text, put together until they have that many characters; longer ones are cut at a space."""
    found, open_ = [], ""
    for paragraph in text.split("\n\n"):
        open_ = f"{open_}\n\n{paragraph}" if open_ else paragraph
        if len(open_) >= characters:
            end = open_.rfind(" ", 0, characters)
            found.append(open_[: end if end > 0 else characters].strip())
            open_ = ""
    return found


def _with_questions(passage: str, draw: random.Random) -> str:
    shuffled = [draw.sample(words, len(words)) for words in (_ADJECTIVES, _THINGS, _PLACES)]
    facts = [f"Where is the {adjective} {thing}? In the {place}." for adjective, thing, place in zip(*shuffled, strict=True)]
    return "\n\n".join(["\n".join(facts), passage, "\n".join(draw.sample(facts, len(facts)))])
