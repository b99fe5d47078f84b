"""Texts in which the next tokens are written far back: what drops the oldest tokens of a prompt must fail here.

Both are made by a fixed seed from the language reference of CPython, so they are at hand wherever Python is (the text follows Python's
version, and its digest is in the record).

- `copy`: passages of the reference, each given three times in a row. A token of the second and third copy is found about 250 tokens back.
- `recall`: a list of facts ("Where is the brass kettle? In the cellar."), a passage of the reference, then the questions again, in another
  order, with their answers.
"""

from __future__ import annotations

import random
from typing import get_args

from quicksilver.data.python_docs import python_docs
from quicksilver.data.spec import FarContext, Part

_SEEDS = {"test": 20, "calibration": 21}
_PASSAGE_CHARACTERS = 900  # some 250 tokens of the reference models
_FILLER_CHARACTERS = 600
_COPIES, _FACTS = 3, 12
_ADJECTIVES = [
    "brass",
    "silver",
    "broken",
    "painted",
    "wooden",
    "heavy",
    "small",
    "ancient",
    "green",
    "narrow",
    "hollow",
    "square",
]
_THINGS = [
    "kettle",
    "lantern",
    "ladder",
    "mirror",
    "compass",
    "violin",
    "saddle",
    "anchor",
    "basket",
    "clock",
    "barrel",
    "candle",
]
_PLACES = ["cellar", "attic", "garden", "stable", "library", "kitchen", "tower", "harbour", "chapel", "market", "orchard", "mill"]


def far_context(kind: str, part: Part) -> str:
    """The text of one part.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in get_args(FarContext):
        raise ValueError(f"{kind} is no text of far context: {', '.join(get_args(FarContext))}.")
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
    things = [
        f"{adjective} {thing}" for adjective, thing in zip(_shuffled(_ADJECTIVES, draw), _shuffled(_THINGS, draw), strict=True)
    ]
    facts = [f"Where is the {thing}? In the {place}." for thing, place in zip(things, _shuffled(_PLACES, draw), strict=True)][
        :_FACTS
    ]
    return "\n\n".join(["\n".join(facts), passage, "\n".join(_shuffled(facts, draw))])


def _shuffled(items: list[str], draw: random.Random) -> list[str]:
    return draw.sample(items, len(items))
