"""Texts and windows: the right part, every token's bytes, one message for what is no text. Texts that the package makes where it runs are the same
every time, their parts share nothing, and they have nothing that an evaluation text has."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from harness_world import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import first
from tiny import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from quicksilver.data import made_here
from quicksilver.data.made_here import far_context, python_docs
from quicksilver.data.overlap import NGRAM_WORDS, ngrams, without_overlap
from quicksilver.data.spec import DatasetConfig, FilesConfig, HubDatasetConfig
from quicksilver.data.text import read_text
from quicksilver.data.windows import encode, token_byte_lengths
from quicksilver.runs.config import compose


def local(reader: str, path: Path | str, **more) -> DatasetConfig:
    return DatasetConfig(name="mine", reader=reader, files=FilesConfig(test=str(path), calibration=str(path)), **more)


def test_a_file_is_read_as_it_is(tmp_path):
    content = "first line \r\n\n = Title = \n naïve <unk> @-@ \n"
    (tmp_path / "text.txt").write_bytes(content.encode())
    for config, root in ((local("text", tmp_path / "text.txt"), None), (local("lines", "text.txt"), tmp_path)):
        text = read_text(config, root=root)
        assert (text.text, text.source) == (content, str(tmp_path / "text.txt"))


def test_scored_and_calibrating_documents_are_disjoint(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"document {i}"}) for i in range(6)))
    config = local("documents", path, documents=4, calibration_documents=5)
    assert read_text(config).text.split("\n\n") == [f"document {i}" for i in range(4)]
    assert read_text(config, "calibration").text.split("\n\n") == ["document 4", "document 5"]
    with refused(r"calibrating needs dataset\.documents"):
        read_text(local("documents", path), "calibration")


def test_what_is_no_text_is_named(tmp_path):
    path = tmp_path / "file"
    no_text = {"is binary": b"\x00\x01text", r"is not UTF-8 text \(byte 3": b"caf\xe9", "has no text in its test part": b" \n\n "}
    for says, content in no_text.items():
        path.write_bytes(content)
        with refused(f"{path} {says}"):
            read_text(local("text", path))


@pytest.mark.parametrize(("config", "part", "says"), [
    (local("text", "/nowhere/nothing.txt"), "test", r"there is no file .*nothing\.txt.*dataset\.files\.test="),
    (local("text", "books/nothing.txt"), "test", r"data\.root, which is not set.*QUICKSILVER_DATA"),
    (DatasetConfig("mine", "text", files=FilesConfig("/x")), "calibration", r"no text to calibrate on: give dataset\.files\.calibration="),
    (DatasetConfig("mine", "text", hub=HubDatasetConfig()), "test", "has no text to score"),
    (DatasetConfig("mine", "pydoc", files=FilesConfig("/x")), "test", "have no effect on python-docs"),
])  # fmt: skip
def test_what_is_missing_or_has_no_effect_is_named(config, part, says):
    with refused(says):
        read_text(config, part)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_model(tmp_path_factory.mktemp("model")))


def test_windows_are_disjoint_and_spread_over_the_whole_text(tokenizer):
    text = "".join(chr(97 + i // 10) for i in range(209))  # 20 windows of 10 equal letters, and a tail
    every, some = encode(text, tokenizer, 10), encode(text, tokenizer, 10, limit=3)
    assert every.ids.tolist() == [tokenizer(text[start : start + 10])["input_ids"] for start in range(0, 200, 10)]
    assert some.available == 20
    assert torch.equal(some.ids, every.ids[[0, 9, 19]])
    assert some.token_digest != every.token_digest == encode(text, tokenizer, 10, limit=99).token_digest
    assert every.token_bytes[every.ids].sum() == 200
    with refused(r"9 tokens and one window needs 10.*window_tokens"):
        encode("too short", tokenizer, 10)


@given(st.text())
@settings(deadline=None)
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str):
    """A byte-level tokenizer without merges, a special token, and one added token that is plain text."""
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["naïve  "])
    text = text.replace("<|end|>", "")
    ids = tokenizer.encode("<|end|>" + text + "naïve  ").ids
    assert int(token_byte_lengths(tokenizer)[torch.tensor(ids)].sum()) == len((text + "naïve  ").encode())


@pytest.mark.parametrize(("folder", "dummy_space"), first([("stories260K", 1), ("gpt2-tokenizer", 0), ("llama2-tokenizer", 1)]))
def test_real_tokenizers_on_real_text(folder: str, dummy_space: int, data_root):
    tokenizer = AutoTokenizer.from_pretrained(data_root / folder)
    text = (data_root / "wikitext-103" / "wiki.valid.tokens").read_text(encoding="utf-8")[:60_000] + " café  日本 \t\U0001f600\n"
    ids = tokenizer(text, verbose=False)["input_ids"]
    assert int(token_byte_lengths(tokenizer)[torch.tensor(ids)].sum()) == len(text.encode()) + dummy_space


def test_a_tokenizer_that_loses_bytes_has_no_bits_per_byte(tokenizer, monkeypatch):
    lossy = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    lossy.decoder = decoders.WordPiece()
    with refused(r"WordPiece.*token_bytes=None") as caught:
        token_byte_lengths(lossy)
    with refused("dict has no"):
        token_byte_lengths({})
    monkeypatch.setattr("quicksilver.data.windows.token_byte_lengths", lambda _: token_byte_lengths(lossy))
    windows = encode("enough text for it", tokenizer, 10)
    assert (windows.token_bytes, windows.why_no_bytes) == (None, str(caught.value))


# -- texts that are made here ------------------------------------------------------------------------------------------------------
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
