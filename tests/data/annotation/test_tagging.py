"""Tags that are not gold: every word is tagged where it stands, the accuracy is of held-out words, and what is missing is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness_world import make_treebank

from quicksilver.data import tagging
from quicksilver.data.annotation import classes
from quicksilver.data.spec import DatasetConfig, FilesConfig, TaggerConfig
from quicksilver.data.tagging import tag_text
from quicksilver.data.text import read_text
from quicksilver.runtime.errors import ConfigError

TEXT = " \n = The heading = \n the dog saw a cat in the dog . a cat saw the dog .\n"


@pytest.fixture(scope="module")
def bank(tmp_path_factory) -> Path:
    pytest.importorskip("nltk")
    return make_treebank(tmp_path_factory.mktemp("bank"))


@pytest.fixture
def config(bank: Path) -> TaggerConfig:
    return TaggerConfig("perceptron", str(bank / "dep" / "one.conllu"), str(bank / "dep" / "two.conllu"))


def test_every_word_is_tagged_where_it_stands_and_sentences_end_with_marks_and_lines(config, tmp_path):
    note, said = tag_text(TEXT, config, None, tmp_path)
    words = [TEXT[start:end] for start, end in zip(note.start, note.end, strict=True)]
    assert words == TEXT.split()
    tags = dict(zip(words[4:12], note.tag[4:12].tolist(), strict=True))
    assert tags == {"the": "DT", "dog": "NN", "saw": "VBD", "a": "DT", "cat": "NN", "in": "IN"}
    assert note.sentence.tolist() == [0] * 4 + [1] * 9 + [2] * 6
    assert set(classes(note)) >= {"determiner", "content", "preposition"}
    assert not note.has_trees
    assert said.startswith("tagged by an averaged perceptron (nltk ")
    assert said.endswith("words of two.conllu are right")
    assert "100.0% of the" in said  # its sentences are of the same few words


def test_marks_that_only_wikitext_has_are_no_content_words(config):
    """`twenty @-@ five`: the tagger reads a hyphen, and whatever it says of it, it is one."""
    text = "= the dog =\n the dog @-@ cat saw 1 @,@ 000 — a cat 2 @.@ 5 .\n"
    note, _ = tag_text(text, config, None, None)
    by_class = dict(zip(text.split(), classes(note).tolist(), strict=True))
    assert {by_class[mark] for mark in ("=", "@-@", "@,@", "@.@", "—", ".")} == {"other"}
    assert note.tag[text.split().index("@-@")] == "HYPH"
    assert by_class["dog"] == by_class["cat"] == "content"
    assert note.sentence.max() == 1  # a point within a number ends no sentence


def test_tags_are_kept_and_another_tagger_is_asked_anew(config, bank, tmp_path, monkeypatch):
    first = tag_text(TEXT, config, None, tmp_path)
    made: list[int] = []
    monkeypatch.setattr(tagging, "_Perceptron", lambda train: made.append(len(train)) or (_ for _ in ()).throw(RuntimeError))
    again = tag_text(TEXT, config, None, tmp_path)
    assert again[1] == first[1]
    assert again[0].digest == first[0].digest
    with pytest.raises(RuntimeError):
        tag_text(TEXT, replace(config, train=config.test), None, tmp_path)
    assert len(made) == 1


def test_the_reader_gives_text_tags_and_whose_they_are_and_calibration_needs_none(config, tmp_path):
    path = tmp_path / "wiki.tokens"
    path.write_text(TEXT)
    dataset = DatasetConfig("wiki", "tagged", files=FilesConfig(str(path), str(path)), tagger=config)
    text = read_text(dataset, "test", cache=tmp_path)
    assert text.text == TEXT
    assert text.annotation is not None
    assert text.source.startswith(f"{path}; tagged by ")
    assert read_text(dataset, "calibration", cache=tmp_path).annotation is None


def test_a_spacy_model_is_given_the_words_as_they_are(config, monkeypatch):
    class Fake:
        name = "spaCy's fake 1"

        def __init__(self, model: str) -> None:
            assert model == "en_core_web_sm"

        def tag(self, sentences):
            for one in sentences:
                yield [("VBZ", True) if word == "saw" else ("NN", False) for word in one]

    monkeypatch.setattr(tagging, "find_spec", lambda name: name in ("spacy", "en_core_web_sm"))
    monkeypatch.setattr(tagging, "_Spacy", Fake)
    note, said = tag_text(TEXT, replace(config, name="auto"), None, None)
    assert np.unique(classes(note)[note.tag == "VBZ"]).tolist() == ["auxiliary"]
    assert said.startswith("tagged by spaCy's fake 1: ")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "en_core_web_none"}, "en_core_web_none: that spaCy model is not installed.*perceptron"),
        ({"train": "/nowhere/train.conllu"}, "treebank /nowhere/train.conllu cannot be read"),
    ],
)
def test_what_is_missing_is_named(config, changed, said):
    with pytest.raises(ConfigError, match=said):
        tag_text(TEXT, replace(config, **changed), None, None)


def test_a_text_without_words_is_refused(config):
    with pytest.raises(ConfigError, match="the text has no word to be tagged"):
        tag_text(" \n ", config, None, None)
