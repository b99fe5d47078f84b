"""python-docs: the language reference that every CPython carries (`pydoc_data.topics`). Real prose, at hand without a network."""

from __future__ import annotations

import hashlib

from quicksilver.data.spec import Part

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
        if paragraphs and _part_of(name) == part:
            kept.append("\n\n".join(paragraphs))
    return "\n\n".join(kept)


def _part_of(topic: str) -> Part:
    # By the name's digest: a topic that a new CPython adds moves no other topic to the other part.
    number = int(hashlib.sha256(topic.encode()).hexdigest(), 16)
    return "calibration" if number % _CALIBRATES_ONE_IN == 0 else "test"
