"""Texts and windows: the right part, the same digest, every token's bytes, and one message for everything that is no text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from harness_world import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import first
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from quicksilver.data.made_here import python_docs
from quicksilver.data.spec import DatasetConfig, FilesConfig, HubDatasetConfig
from quicksilver.data.text import read_text
from quicksilver.data.windows import encode, token_byte_lengths
from quicksilver.runs.config import compose
from quicksilver.runtime.errors import ConfigError


def local(reader: str, path: Path | str, **more) -> DatasetConfig:
    return DatasetConfig(name="mine", reader=reader, files=FilesConfig(test=str(path), calibration=str(path)), **more)


def paragraphs(text: str) -> set[str]:
    return {words for p in text.split("\n\n") if len(words := " ".join(p.split())) >= 40}


def test_python_docs_never_calibrates_on_what_it_scores():
    test, calibration = python_docs("test"), python_docs("calibration")
    assert not paragraphs(test) & paragraphs(calibration)
    assert len(test) > 3 * len(calibration) > 100_000
    long = [p for p in test.split("\n\n") if len(" ".join(p.split())) >= 40]
    assert len(long) == len(paragraphs(test))  # nothing is scored twice


def test_python_docs_is_the_same_text_every_time():
    config = compose([]).dataset
    assert read_text(config).digest == read_text(config).digest
    assert read_text(config).source == "pydoc_data.topics"
    assert read_text(config).digest != read_text(config, "calibration").digest


def test_a_file_is_read_as_it_is(tmp_path):
    content = "first line \r\n\n = Title = \n naïve <unk> @-@ \n"
    (tmp_path / "text.txt").write_bytes(content.encode())
    for config, root in ((local("text", tmp_path / "text.txt"), None), (local("lines", "text.txt"), tmp_path)):
        text = read_text(config, root=root)
        assert text.text == content
        assert text.source == str(tmp_path / "text.txt")


def test_scored_and_calibrating_documents_are_disjoint(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"document {i}"}) for i in range(6)))
    config = local("documents", path, documents=4, calibration_documents=5)
    assert read_text(config).text.split("\n\n") == [f"document {i}" for i in range(4)]
    assert read_text(config, "calibration").text.split("\n\n") == ["document 4", "document 5"]
    with pytest.raises(ConfigError, match=r"calibrating needs dataset\.documents"):
        read_text(local("documents", path), "calibration")


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\x00\x01text", "is binary"), (b"caf\xe9", "is not UTF-8 text (byte 3"), (b" \n\n ", "has no text in its test part")],
)
def test_what_is_no_text_is_named(tmp_path, content, says):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_text(local("text", tmp_path / "file"))
    assert says in str(caught.value)
    assert str(tmp_path / "file") in str(caught.value)


def test_a_missing_file_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.txt.*dataset\.files\.test="):
        read_text(local("text", tmp_path / "nothing.txt"))
    with pytest.raises(ConfigError, match=r"data\.root, which is not set.*QUICKSILVER_DATA"):
        read_text(local("text", "books/nothing.txt"))
    with pytest.raises(ConfigError, match=r"no text to calibrate on: give dataset\.files\.calibration="):
        read_text(DatasetConfig(name="mine", reader="text", files=FilesConfig(test="/x")), "calibration")


def test_a_file_for_a_text_that_is_embedded_would_have_no_effect():
    with pytest.raises(ConfigError, match="have no effect on python-docs"):
        read_text(compose(["dataset.files.test=/x"]).dataset)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_model(tmp_path_factory.mktemp("model")))


def test_windows_are_disjoint_and_spread_over_the_whole_text(tokenizer):
    text = "".join(chr(97 + i // 10) for i in range(200))  # 20 windows of 10 equal letters
    every, some = encode(text, tokenizer, 10), encode(text, tokenizer, 10, limit=3)
    assert every.ids.shape == (20, 10)
    assert (every.ids == every.ids[:, :1]).all()
    assert every.ids[:, 0].unique().numel() == 20
    assert some.available == 20
    assert torch.equal(some.ids, every.ids[[0, 9, 19]])
    assert some.token_digest != every.token_digest
    assert encode(text, tokenizer, 10, limit=99).token_digest == every.token_digest
    assert every.token_bytes[every.ids].sum() == 200


def test_a_text_shorter_than_a_window_gives_no_windows(tokenizer):
    with pytest.raises(ConfigError, match=r"9 tokens and one window needs 10.*window_tokens"):
        encode("too short", tokenizer, 10)


def test_a_tokenizer_that_loses_bytes_has_no_bits_per_byte(tokenizer, monkeypatch):
    def refuse(_):
        raise ConfigError("it loses bytes")

    monkeypatch.setattr("quicksilver.data.windows.token_byte_lengths", refuse)
    windows = encode("enough text for it", tokenizer, 10)
    assert windows.token_bytes is None
    assert windows.why_no_bytes == "it loses bytes"


def test_a_dataset_without_a_hub_and_without_its_file_says_so():
    config = DatasetConfig(name="mine", reader="text", hub=HubDatasetConfig())
    with pytest.raises(ConfigError, match="has no text to score"):
        read_text(config)


DATA = Path(os.environ.get("QUICKSILVER_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def byte_level() -> Tokenizer:
    """A byte-level tokenizer without merges, a special token, and one added token that is plain text."""
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["naïve  "])
    return tokenizer


@given(st.text())
@settings(deadline=None)
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str) -> None:
    text = text.replace("<|end|>", "")
    tokenizer = byte_level()
    lengths = token_byte_lengths(tokenizer)
    ids = tokenizer.encode("<|end|>" + text + "naïve  ").ids
    assert int(lengths[torch.tensor(ids)].sum()) == len((text + "naïve  ").encode())


@pytest.mark.parametrize(("folder", "dummy_space"), first([("stories260K", 1), ("gpt2-tokenizer", 0), ("llama2-tokenizer", 1)]))
def test_real_tokenizers_on_real_text(folder: str, dummy_space: int) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no data folder at {DATA}: set QUICKSILVER_DATA")
    tokenizer = AutoTokenizer.from_pretrained(DATA / folder)
    lengths = token_byte_lengths(tokenizer)
    text = (DATA / "wikitext-103" / "wiki.valid.tokens").read_text(encoding="utf-8")[:60_000] + " café  日本 \t\U0001f600\n"
    ids = tokenizer(text, verbose=False)["input_ids"]
    assert int(lengths[torch.tensor(ids)].sum()) == len(text.encode()) + dummy_space


def test_a_tokenizer_that_loses_bytes_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"WordPiece.*token_bytes=None"):
        token_byte_lengths(tokenizer)
    with pytest.raises(ConfigError, match="dict has no"):
        token_byte_lengths({})
