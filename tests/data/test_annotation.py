"""Annotation: every word is where it says, joints are the smallest constituents, tags that are not gold say so, what does not fit is named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness_world import make_treebank
from hypothesis import given
from hypothesis import strategies as st
from tiny import refused

from quicksilver.data import annotation
from quicksilver.data.annotation import CLASSES, align, classes, joined, joints, read_treebank, sentences, table, tag_text, trees
from quicksilver.data.spec import DatasetConfig, FilesConfig, TaggerConfig
from quicksilver.data.text import read_text
from quicksilver.runs.config import compose


def block(text: str, *rows: tuple[str, str, str, str]) -> str:
    """A sentence: id, form, upos, xpos of each line."""
    lines = [f"{number}\t{form}\t_\t{upos}\t{tag}\t_\t_\t_\t_\t_" for number, form, upos, tag in rows]
    return "\n".join([f"# text = {text}", *lines, ""])


GONNA = block("I'm gonna go", ("1-2", "I'm", "_", "_"), ("1", "I", "PRON", "PRP"), ("2", "'m", "AUX", "VBP"), ("3-4", "gonna", "_", "_"),
              ("3", "going", "VERB", "VBG"), ("4", "to", "PART", "TO"), ("4.1", "be", "_", "_"), ("5", "go", "VERB", "VB"))  # fmt: skip


def standing(text: str, note: annotation.Annotation) -> list[str]:
    """What stands where the spans say."""
    return [text[start:end] for start, end in zip(note.start, note.end, strict=True)]


# -- treebanks ---------------------------------------------------------------------------------------------------------------------
def test_every_word_stands_where_its_span_says(tmp_path: Path):
    text, note = read_treebank(make_treebank(tmp_path), "test", "penn")
    forms = [line.split("\t")[1] for line in (tmp_path / "dep" / "two.conllu").read_text().splitlines() if "\t" in line]
    assert standing(text, note) == forms
    assert len(note.sentence_ids) == note.sentence.max() + 1 == 60
    assert (np.diff(note.start) > 0).all()
    other, calibrating = read_treebank(tmp_path, "calibration", "penn")
    assert other != text
    assert set(calibrating.sentence_ids).isdisjoint(note.sentence_ids)


def test_words_of_one_written_unit_share_it_and_sentences_paragraphs_and_documents_are_parted():
    (found,) = sentences(GONNA, "file")
    assert [found.text[a:b] for a, b in found.spans] == ["I", "'m", "gonna", "gonna", "go"]
    assert found.tags == ["PRP", "VBP", "VBG", "TO", "VB"]
    parts = "".join(f"# {begins}\n{GONNA}\n" if begins else f"{GONNA}\n" for begins in ("newdoc id = a", "", "newpar", "newdoc"))
    text, note = joined(sentences(parts, "file"))
    assert text == "I'm gonna go I'm gonna go\nI'm gonna go\n\nI'm gonna go"
    assert text[note.start[-1] : note.end[-1]] == "go"
    assert not note.has_trees


def test_a_joint_is_the_smallest_constituent_that_holds_both():
    words = ["the", "dog", "saw", "a", "cat", "."]
    tree = "(ROOT (S (NP-SBJ (DT the) (NN dog)) (VP (VBD saw) (NP (DT a) (NN cat))) (. .)))"
    assert joints(*trees(tree, "here"), words, "here") == [("NP", 2), ("S", 6), ("VP", 3), ("NP", 2), ("S", 6), ("", 0)]
    assert joints(*trees("((X (-LRB- -LRB-) (NN a-RRB-)))", "here"), ["(", "a)"], "here") == [("X", 2), ("", 0)]
    deep = "(A (B b) " * 3000 + "(C c)" + ")" * 3000
    assert joints(*trees(deep, "here"), ["b"] * 3000 + ["c"], "here")[0] == ("A", 3001)


def test_auxiliaries_are_what_the_treebank_calls_so_and_the_paper_goes_by_tag():
    _, note = joined(sentences(GONNA, "file"))
    assert classes(note).tolist() == ["pronoun", "auxiliary", "content", "other", "content"]
    _, universal = joined(sentences(GONNA, "file"), "upos")
    assert classes(universal).tolist() == classes(note).tolist()
    _, note = joined(sentences(block("it works", ("1", "it", "PRON", "PRP"), ("2", "works", "VERB", "VBZ")), "file"))
    assert classes(note).tolist() == ["pronoun", "content"]
    assert classes(note, "paper").tolist() == ["pronoun", "auxiliary"]
    entries = [[one] if isinstance(one, str) else one for tags in table().values() for one in tags.values()]
    assert {name for entry in entries for name in entry} == set(CLASSES)


def test_what_is_no_aligned_conllu_and_a_tree_that_is_none_or_does_not_cover_its_words_are_named():
    for content, says in (
        (block("I go", ("1", "I", "PRON", "PRP"), ("2", "went", "VERB", "VBD")), r"line 1: its words do not align.*'went' was expected at character 2"),
        (block("I go now", ("1", "I", "PRON", "PRP"), ("2", "go", "VERB", "VBP")), "'now' at character 5 is no word"),
        ("1\tI\t_\n", "line 1: 3 columns"),
        (block("I", ("2", "I", "PRON", "PRP")), "word '2' where word 1 was expected"),
        (block("I", ("1-x", "I", "_", "_"), ("1", "I", "PRON", "PRP")), "line 2: '1-x' is no range of words from 1 on"),
        (block("I", ("1-2", "I", "_", "_"), ("1", "I", "PRON", "PRP")), "it has 1 words, and a range up to 2"),
        (block("I", ("0.1", "I", "PRON", "PRP")), "it has 0 words"),
        ("1\tI\t_\tPRON\tPRP\t_\t_\t_\t_\t_\n", "no `# text"),
        ("", "no sentence"),
        (block("I", ("1", "I", "PRON", "PRON")), r"word 1 \(I\): 'PRON' is no tag of the penn tag set.*reader=treebank-upos"),
    ):  # fmt: skip
        with refused(says):
            joined(sentences(content, "file"))
    for tree, says in (
        ("(S (NN dog))", "word 2 is 'barks' in the sentence and None"),
        ("(S (NN dog) (VB bark))", "'bark' in the tree"),
        ("(S (NN a))\n(S (NN b)", "tree 2: 1 brackets are not closed"),
        (")", "tree 1: a bracket closes"),
        ("(S (NN dog)) barks", "tree 2: 'barks' stands outside"),
    ):
        with refused(says):
            joints(trees(tree, "file")[0], ["dog", "barks"], "here")


def test_a_treebank_that_is_not_whole_is_refused(tmp_path: Path):
    bank = make_treebank(tmp_path)
    for file, says in (("const/two.ptb", "60 sentences in dep/ and 1 trees"), ("splits.md", "no section 'dev'")):
        (bank / file).write_text("(S (NN a))")
        with refused(says):
            read_treebank(bank, "test", "penn")
    with refused(r"none\.conllu is missing"):
        read_treebank(bank / "none.conllu", "test", "penn")


ITALIAN = block("Parla della città.", ("1", "Parla", "VERB", "V"), ("2-3", "della", "_", "_"), ("2", "di", "ADP", "E"),
                ("3", "la", "DET", "RD"), ("4", "città", "NOUN", "S"), ("5", ".", "PUNCT", "FS"))  # fmt: skip
JAPANESE = block("猫が見た。", ("1", "猫", "NOUN", "名詞"), ("2", "が", "ADP", "助詞"), ("3", "見", "VERB", "動詞"),
                 ("4", "た", "AUX", "助動詞"), ("5", "。", "PUNCT", "補助記号"))  # fmt: skip


def test_any_language_is_read_by_its_universal_tags(tmp_path: Path):
    path = tmp_path / "xx-ud-test.conllu"
    path.write_text(f"{ITALIAN}\n{JAPANESE}", encoding="utf-8")
    text = read_text(compose(["dataset=ud", f"dataset.files.test={path}"]).dataset)
    assert standing(text.text, text.annotation) == ["Parla", "della", "della", "città", ".", *"猫が見た。"]
    italian = ["content", "preposition", "determiner", "content", "other"]
    assert classes(text.annotation).tolist() == [*italian, "content", "preposition", "content", "auxiliary", "other"]


# -- sub-words meet words by characters, however a tokenizer cuts ------------------------------------------------------------------
def annotated(words: list[str], spaces: list[bool]):
    text = "".join(word + (" " if space else "") for word, space in zip(words, spaces, strict=True)).rstrip()
    return joined(sentences(block(text, *((str(i), word, "NOUN", "NN") for i, word in enumerate(words, 1))), "file"))


@given(st.data())
def test_a_token_belongs_to_the_word_that_it_shares_most_with(data: st.DataObject):
    words = data.draw(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=8))
    text, note = annotated(words, data.draw(st.lists(st.booleans(), min_size=len(words), max_size=len(words))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))) - {len(text)})
    offsets = np.array(list(zip([0, *cuts], [*cuts, len(text)], strict=True)))
    found = align(note, np.zeros(len(offsets), dtype=int), offsets, np.arange(len(offsets))[None])
    for token, (low, high) in enumerate(offsets):
        shared = [max(0, min(high, end) - max(low, start)) for start, end in zip(note.start, note.end, strict=True)]
        assert found.touched[0, token] == sum(one > 0 for one in shared)
        assert found.word[0, token] == (int(np.argmax(shared)) if max(shared) else -1)
    for word in set(found.word[0]) - {-1}:
        own = found.word[0] == word
        assert found.piece[0][own].tolist() == list(range(own.sum()))
        assert (found.pieces[0][own] == own.sum()).all()
    assert (found.occurrences == len(offsets)).all()
    assert found.sentence_tokens.max() == (found.word >= 0).sum()


def test_a_word_that_no_token_touches_is_named():
    _, note = annotated(["one", "two"], [True, False])
    with refused("no token of the model is of word 1 .characters 4 to 7"):
        align(note, np.zeros(1, dtype=int), np.array([[0, 3]]), np.zeros((1, 1), dtype=int))


# -- tags that are not gold --------------------------------------------------------------------------------------------------------
TEXT = " \n = The heading = \n the dog saw a cat in the dog . a cat saw the dog .\n"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TaggerConfig:
    pytest.importorskip("nltk")
    bank = make_treebank(tmp_path_factory.mktemp("bank"))
    return TaggerConfig("perceptron", str(bank / "dep" / "one.conllu"), str(bank / "dep" / "two.conllu"))


def test_every_word_is_tagged_where_it_stands_and_calibration_needs_no_tags(config, tmp_path):
    """Sentences end with marks and lines."""
    path = tmp_path / "wiki.tokens"
    path.write_text(TEXT)
    dataset = DatasetConfig("wiki", "tagged", files=FilesConfig(str(path), str(path)), tagger=config)
    text = read_text(dataset, "test", cache=tmp_path)
    note, words = text.annotation, TEXT.split()
    assert text.text == TEXT
    assert standing(TEXT, note) == words
    tags = dict(zip(words[4:12], note.tag[4:12].tolist(), strict=True))
    assert tags == {"the": "DT", "dog": "NN", "saw": "VBD", "a": "DT", "cat": "NN", "in": "IN"}
    assert note.sentence.tolist() == [0] * 4 + [1] * 9 + [2] * 6
    assert not note.has_trees
    assert text.source.startswith(f"{path}; tagged by an averaged perceptron (nltk ")
    assert "100.0% of the" in text.source  # its sentences are of the same few words
    assert text.source.endswith("words of two.conllu are right")
    assert read_text(dataset, "calibration", cache=tmp_path).annotation is None


def test_marks_that_only_wikitext_has_are_no_content_words(config):
    """`twenty @-@ five`: the tagger reads a hyphen, and whatever it says of it, it is one."""
    text = "= the dog =\n the dog @-@ cat saw 1 @,@ 000 — a cat 2 @.@ 5 .\n"
    note, _ = tag_text(text, config, None, None)
    by_class = dict(zip(text.split(), classes(note).tolist(), strict=True))
    assert {by_class[mark] for mark in ("=", "@-@", "@,@", "@.@", "—", ".")} == {"other"}
    assert note.tag[text.split().index("@-@")] == "HYPH"
    assert by_class["dog"] == by_class["cat"] == "content"
    assert note.sentence.max() == 1  # a point within a number ends no sentence


def test_tags_are_kept_and_another_tagger_is_asked_anew(config, tmp_path, monkeypatch):
    first = tag_text(TEXT, config, None, tmp_path)
    monkeypatch.setattr(annotation, "_perceptron", lambda train: (_ for _ in ()).throw(RuntimeError))
    again = tag_text(TEXT, config, None, tmp_path)
    assert (again[0].digest, again[1]) == (first[0].digest, first[1])
    with pytest.raises(RuntimeError):
        tag_text(TEXT, replace(config, train=config.test), None, tmp_path)
    (kept,) = tmp_path.glob("tags-*.json")
    kept.write_text("{")
    with pytest.raises(RuntimeError):  # what is damaged is no answer
        tag_text(TEXT, config, None, tmp_path)


def test_a_spacy_model_is_given_the_words_as_they_are(config, monkeypatch):
    def fake(model):
        assert model == "en_core_web_sm"
        return "spaCy's fake 1", lambda sentences: (["VBZ|AUX" if word == "saw" else "NN" for word in one] for one in sentences)

    monkeypatch.setattr(annotation, "find_spec", lambda name: name in ("spacy", "en_core_web_sm"))
    monkeypatch.setattr(annotation, "_spacy", fake)
    note, said = tag_text(TEXT, replace(config, name="auto"), None, None)
    assert np.unique(classes(note)[note.tag == "VBZ"]).tolist() == ["auxiliary"]
    assert said.startswith("tagged by spaCy's fake 1: ")


def test_what_is_missing_is_named(config):
    for text, changed, said in (
        (TEXT, {"name": "en_core_web_none"}, "en_core_web_none: that spaCy model is not installed.*perceptron"),
        (TEXT, {"train": "/nowhere/train.conllu"}, "treebank /nowhere/train.conllu cannot be read"),
        (" \n ", {}, "the text has no word to be tagged"),
    ):
        with refused(said):
            tag_text(text, replace(config, **changed), None, None)
