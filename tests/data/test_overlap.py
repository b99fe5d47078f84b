"""No run of 13 words that an evaluation text has stays in a text that something is fitted on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quicksilver.data.overlap import NGRAM_WORDS, ngrams, without_overlap

WORDS = st.lists(st.sampled_from("abcd"), min_size=0, max_size=60)


@given(ours=st.lists(WORDS, max_size=6), theirs=WORDS, words=st.integers(2, 5))
def test_nothing_that_is_shared_is_left_within_a_line(ours: list[list[str]], theirs: list[str], words: int) -> None:
    text = "".join(" ".join(line) + "\n" for line in ours)
    found = without_overlap(text, {"test": " ".join(theirs)}, words)
    held = set(ngrams(" ".join(theirs), words))
    assert not any(held & set(ngrams(line, words)) for line in found.text.splitlines())
    assert found.removed == found.removed_by["test"]
    if not held & set(ngrams(text, words)):
        assert found.text == text
        assert found.removed == 0


def test_case_and_punctuation_hide_nothing_and_a_shared_run_across_lines_counts() -> None:
    run = [f"word{i}" for i in range(NGRAM_WORDS)]
    text = "first line stays\n" + " ".join(run[:7]).upper() + ",\n" + "; ".join(run[7:]) + ".\nlast line stays\n"
    found = without_overlap(text, {"test": "before " + " ".join(run) + " after", "other": "nothing of it"})
    assert found.text == "first line stays\nlast line stays\n"
    assert (found.paragraphs, found.removed, found.removed_by) == (4, 2, {"test": 2, "other": 0})
