"""Texts that the package makes or reads where it runs: the same every time, parts that share nothing, and nothing that an evaluation text has."""

import ast
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import refused

from quicksilver.data import made_here
from quicksilver.data.made_here import far_context, python_docs
from quicksilver.data.overlap import NGRAM_WORDS, ngrams, without_overlap
from quicksilver.data.text import read_text
from quicksilver.runs.config import compose


def paragraphs(text: str) -> list[str]:
    return [words for p in text.split("\n\n") if len(words := " ".join(p.split())) >= 40]


@pytest.mark.parametrize("name", ["python-docs", "far-copy", "far-recall", "python-source"])
def test_a_text_is_the_same_every_time_and_parts_share_nothing(name):
    config = compose([f"dataset={name}"]).dataset
    test, calibration = read_text(config), read_text(config, "calibration")
    assert test.digest == read_text(config).digest != calibration.digest
    if name != "python-source":
        shared = r"\w{5,} [^\n]{60,}"
        assert not set(re.findall(shared, test.text)) & set(re.findall(shared, calibration.text))


def test_python_docs_scores_nothing_twice_and_never_calibrates_on_what_it_scores():
    test, calibration = python_docs("test"), python_docs("calibration")
    assert not set(paragraphs(test)) & set(paragraphs(calibration))
    assert len(test) > 3 * len(calibration) > 100_000
    assert len(paragraphs(test)) == len(set(paragraphs(test)))


def test_every_copy_is_whole_and_every_question_is_answered_as_it_was_said():
    text = far_context("copy", "test")
    passage = text[:800]
    assert text.count(passage) == 3
    facts = re.findall(r"Where is the [a-z ]+\? In the [a-z]+\.", far_context("recall", "test"))
    block = facts[:24]
    assert sorted(block[:12]) == sorted(block[12:])
    assert block[:12] != block[12:]
    assert len(set(block)) == 12


def test_a_part_is_whole_files_of_its_packages_and_parts_share_none(tmp_path, monkeypatch):
    parts = {part: made_here.source_files(part) for part in made_here.PACKAGES}
    assert not set(parts["test"]) & set(parts["calibration"])
    for part, files in parts.items():
        text = made_here.python_source(part)
        assert len(text) > 300_000
        assert "test" not in {name for path in files for name in path.parts[-3:-1]}
        assert files[0].read_text(encoding="utf-8").strip() in text
        ast.parse(files[-1].read_text(encoding="utf-8"))
    monkeypatch.setattr(made_here.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with refused("has no Python files: dataset=python-source needs the library's source"):
        read_text(compose(["dataset=python-source"]).dataset)


WORDS = st.lists(st.sampled_from("abcd"), min_size=0, max_size=60)


@given(ours=st.lists(WORDS, max_size=6), theirs=WORDS, words=st.integers(2, 5))
def test_nothing_that_is_shared_is_left_within_a_line(ours: list[list[str]], theirs: list[str], words: int):
    text = "".join(" ".join(line) + "\n" for line in ours)
    found = without_overlap(text, {"test": " ".join(theirs)}, words)
    held = set(ngrams(" ".join(theirs), words))
    assert not any(held & set(ngrams(line, words)) for line in found.text.splitlines())
    assert found.removed == found.removed_by["test"]
    if not held & set(ngrams(text, words)):
        assert (found.text, found.removed) == (text, 0)


def test_case_and_punctuation_hide_nothing_and_a_shared_run_across_lines_counts():
    run = [f"word{i}" for i in range(NGRAM_WORDS)]
    text = "first line stays\n" + " ".join(run[:7]).upper() + ",\n" + "; ".join(run[7:]) + ".\nlast line stays\n"
    found = without_overlap(text, {"test": "before " + " ".join(run) + " after", "other": "nothing of it"})
    assert found.text == "first line stays\nlast line stays\n"
    assert (found.paragraphs, found.removed, found.removed_by) == (4, 2, {"test": 2, "other": 0})
