"""Texts of far context: made by seed, the same every time, and what is asked was said before."""

from __future__ import annotations

import re

import pytest

from quicksilver.data.made_here import far_context
from quicksilver.runs.config import compose


@pytest.mark.parametrize("kind", ["copy", "recall"])
def test_a_text_is_the_same_every_time_and_parts_share_nothing(kind: str) -> None:
    test, calibration = far_context(kind, "test"), far_context(kind, "calibration")
    assert test == far_context(kind, "test")
    assert not set(re.findall(r"\w{5,} [^\n]{60,}", test)) & set(re.findall(r"\w{5,} [^\n]{60,}", calibration))
    assert compose([f"dataset=far-{kind}"]).dataset.reader == f"far-{kind}"


def test_every_copy_is_whole() -> None:
    text = far_context("copy", "test")
    passage = text[: text.index("\n\n", 850)]
    assert text.startswith("\n\n".join([passage[:800]]))
    assert text.count(passage[:800]) == 3


def test_every_question_is_answered_as_it_was_said() -> None:
    facts = re.findall(r"Where is the [a-z ]+\? In the [a-z]+\.", far_context("recall", "test"))
    block = facts[:24]
    assert sorted(block[:12]) == sorted(block[12:])
    assert block[:12] != block[12:]
    assert len(set(block)) == 12


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="copy, recall"):
        far_context("nonsense", "test")
