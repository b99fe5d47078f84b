"""Treebanks: every word is where the annotation says, every joint is the smallest constituent, and what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness_world import make_treebank

from quicksilver.data.annotation import CLASSES, classes, table
from quicksilver.data.text import read_text
from quicksilver.data.treebank import joined, joints, read_treebank, sentences, trees
from quicksilver.runs.config import compose
from quicksilver.runtime.errors import ConfigError


def block(text: str, *rows: tuple[str, str, str, str]) -> str:
    """A sentence: id, form, upos, xpos of each line."""
    lines = [f"{number}\t{form}\t_\t{upos}\t{tag}\t_\t_\t_\t_\t_" for number, form, upos, tag in rows]
    return "\n".join([f"# text = {text}", *lines, ""])


GONNA = block("I'm gonna go", ("1-2", "I'm", "_", "_"), ("1", "I", "PRON", "PRP"), ("2", "'m", "AUX", "VBP"), ("3-4", "gonna", "_", "_"),
              ("3", "going", "VERB", "VBG"), ("4", "to", "PART", "TO"), ("4.1", "be", "_", "_"), ("5", "go", "VERB", "VB"))  # fmt: skip


def test_every_word_stands_where_its_span_says(tmp_path: Path):
    text, note = read_treebank(make_treebank(tmp_path), "test", "penn")
    forms = [line.split("\t")[1] for line in (tmp_path / "dep" / "two.conllu").read_text().splitlines() if "\t" in line]
    assert [text[a:b] for a, b in zip(note.start, note.end, strict=True)] == forms
    assert len(note.sentence_ids) == note.sentence.max() + 1 == 60
    assert (np.diff(note.start) > 0).all()
    other, calibrating = read_treebank(tmp_path, "calibration", "penn")
    assert other != text
    assert set(calibrating.sentence_ids).isdisjoint(note.sentence_ids)


def test_words_of_one_written_unit_share_it():
    (found,) = sentences(GONNA, "file")
    assert [found.text[a:b] for a, b in found.spans] == ["I", "'m", "gonna", "gonna", "go"]
    assert found.tags == ["PRP", "VBP", "VBG", "TO", "VB"]


def test_sentences_paragraphs_and_documents_are_parted():
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
    present = block("it works", ("1", "it", "PRON", "PRP"), ("2", "works", "VERB", "VBZ"))
    _, note = joined(sentences(present, "file"))
    assert classes(note).tolist() == ["pronoun", "content"]
    assert classes(note, "paper").tolist() == ["pronoun", "auxiliary"]
    _, universal = joined(sentences(GONNA, "file"), "upos")
    assert classes(universal).tolist() == ["pronoun", "auxiliary", "content", "other", "content"]
    read = {
        name for tags in table().values() for entry in tags.values() for name in ([entry] if isinstance(entry, str) else entry)
    }
    assert read == set(CLASSES)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (block("I go", ("1", "I", "PRON", "PRP"), ("2", "went", "VERB", "VBD")), r"line 1: its words do not align.*'went' was expected at character 2"),
        (block("I go now", ("1", "I", "PRON", "PRP"), ("2", "go", "VERB", "VBP")), "'now' at character 5 is no word"),
        ("1\tI\t_\n", "line 1: 3 columns"),
        (block("I", ("2", "I", "PRON", "PRP")), "word '2' where word 1 was expected"),
        ("1\tI\t_\tPRON\tPRP\t_\t_\t_\t_\t_\n", "no `# text"),
        ("nothing", "columns"),
        ("", "no sentence"),
    ],
)  # fmt: skip
def test_what_is_no_aligned_conllu_is_named(content: str, says: str):
    with pytest.raises(ConfigError, match=says):
        sentences(content, "file")


def test_an_unknown_tag_names_its_place_and_the_other_tag_set():
    with pytest.raises(ConfigError, match=r"word 1 \(I\): 'PRON' is no tag of the penn tag set.*reader=treebank-upos"):
        joined(sentences(block("I", ("1", "I", "PRON", "PRON")), "file"))


def test_a_tree_that_does_not_cover_its_words_is_refused():
    for tree, says in (
        ("(S (NN dog))", "word 2 is 'barks' in the sentence and None"),
        ("(S (NN dog) (VB bark))", "'bark' in the tree"),
    ):
        with pytest.raises(ConfigError, match=says):
            joints(*trees(tree, "here"), ["dog", "barks"], "here")
    with pytest.raises(ConfigError, match="tree 2: 1 brackets are not closed"):
        trees("(S (NN a))\n(S (NN b)", "file")
    with pytest.raises(ConfigError, match="tree 1: a bracket closes"):
        trees(")", "file")


def test_a_treebank_that_is_not_whole_is_refused(tmp_path: Path):
    folder = make_treebank(tmp_path / "bank")
    with pytest.raises(ConfigError, match=r"none\.conllu is missing"):
        read_treebank(folder / "none.conllu", "test", "penn")
    (folder / "const" / "two.ptb").write_text("(S (NN a))")
    with pytest.raises(ConfigError, match="60 sentences in dep/ and 1 trees"):
        read_treebank(folder, "test", "penn")
    (folder / "splits.md").write_text("# nothing")
    with pytest.raises(ConfigError, match="no section 'dev'"):
        read_treebank(folder, "test", "penn")


ITALIAN = """# sent_id = it-1
# text = Parla della città.
1\tParla\tparlare\tVERB\tV\t_\t0\troot\t_\t_
2-3\tdella\t_\t_\t_\t_\t_\t_\t_\t_
2\tdi\tdi\tADP\tE\t_\t4\tcase\t_\t_
3\tla\til\tDET\tRD\t_\t4\tdet\t_\t_
4\tcittà\tcittà\tNOUN\tS\t_\t1\tobl\t_\tSpaceAfter=No
5\t.\t.\tPUNCT\tFS\t_\t1\tpunct\t_\t_

"""
JAPANESE = """# sent_id = ja-1
# text = 猫が見た。
1\t猫\t猫\tNOUN\t名詞\t_\t3\tnsubj\t_\tSpaceAfter=No
2\tが\tが\tADP\t助詞\t_\t1\tcase\t_\tSpaceAfter=No
3\t見\t見る\tVERB\t動詞\t_\t0\troot\t_\tSpaceAfter=No
4\tた\tた\tAUX\t助動詞\t_\t3\taux\t_\tSpaceAfter=No
5\t。\t。\tPUNCT\t補助記号\t_\t3\tpunct\t_\t_

"""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ITALIAN, ["content", "preposition", "determiner", "content", "other"]),
        (JAPANESE, ["content", "preposition", "content", "auxiliary", "other"]),
    ],
)
def test_any_language_is_read_by_its_universal_tags(content: str, expected: list[str], tmp_path: Path):
    path = tmp_path / "xx-ud-test.conllu"
    path.write_text(content, encoding="utf-8")
    text = read_text(compose(["dataset=ud", f"dataset.files.test={path}"]).dataset)
    assert text.annotation is not None
    assert classes(text.annotation).tolist() == expected
    forms = [text.text[start:end] for start, end in zip(text.annotation.start, text.annotation.end, strict=True)]
    assert "".join(dict.fromkeys(forms)) == text.text.replace(" ", "")  # "della" is two words and stands once


def test_a_language_whose_treebank_is_not_at_hand_is_said_to_be_missing():
    with pytest.raises(ConfigError, match="dataset.files.test has no value: dataset=ud needs dataset.files.test=") as said:
        read_text(compose(["dataset=ud"]).dataset)
    assert "\n" not in str(said.value)
    with pytest.raises(ConfigError, match="dataset=ud: there is no file /nowhere/xx.conllu"):
        read_text(compose(["dataset=ud", "dataset.files.test=/nowhere/xx.conllu"]).dataset)
