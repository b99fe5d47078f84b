"""Bytes per token: exact, or refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import first
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from quicksilver.data.windows import token_byte_lengths
from quicksilver.runtime import ConfigError

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
