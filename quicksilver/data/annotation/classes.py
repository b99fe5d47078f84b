"""Word classes by tag: ours, and the paper's reading of the same tags (`word_classes.yaml`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import yaml

from quicksilver.data.annotation.annotation import Annotation
from quicksilver.runtime.errors import ConfigError

CLASSES = ("determiner", "preposition", "conjunction", "pronoun", "auxiliary", "content", "other")
FUNCTION = CLASSES[:5]  # those that the paper calls function words
Reading = Literal["ours", "paper"]


@cache
def table() -> MappingProxyType[str, Any]:
    """The yaml: tag set -> tag -> class, or [ours, the paper's]."""
    content = yaml.safe_load(files(__package__).joinpath("word_classes.yaml").read_text(encoding="utf-8"))
    return MappingProxyType(content)


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
    known = table()[annotation.tagset]
    column = 0 if reading == "ours" else 1

    def of(tag: str) -> str:
        entry = known[tag]
        return entry if isinstance(entry, str) else entry[column]

    by_tag = {tag: of(tag) for tag in np.unique(annotation.tag)}
    found = np.array([by_tag[tag] for tag in annotation.tag], dtype=object)
    if reading == "ours":
        found[annotation.upos == "AUX"] = "auxiliary"
    return found.astype(str)
