"""How many bytes of text each token of a vocabulary stands for: perplexities of different tokenizers meet in bits per byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers
import torch

from quicksilver.runtime.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE = "\u2581"  # sentencepiece writes a space as U+2581


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder, and those inside it."""
    if isinstance(part, dict):
        yield part
        for inner in (*part.get("decoders", ()), *part.get("normalizers", ()), *part.get("pretokenizers", ())):
            yield from _parts(inner)


def token_byte_lengths(tokenizer: Any) -> torch.Tensor:
    """Bytes of UTF-8 text behind every token: (V,) long, V = largest token id + 1.

    Summed over the tokens of a text they give the text's own length, as the tokenizer normalises it. One byte more where a
    sentencepiece tokenizer puts its dummy space before the first word: that token is never scored.

    Special tokens count 0: a tokenizer inserts them. Only the unknown token counts what it spells, because a tokenizer that
    can write every byte makes it from nothing else (WikiText is full of a literal `<unk>`).

    Args:
        tokenizer: a Hugging Face tokenizer with a `tokenizers` backend, or that backend; byte-level BPE (GPT-2, Pythia, Qwen,
            Llama 3) or sentencepiece with byte fallback (Llama 2, Mistral).

    Raises:
        ConfigError: a tokenizer that loses bytes: its bits per byte would be a guess.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(
            f"{type(tokenizer).__name__} has no `tokenizers` backend to read byte lengths from: load the fast tokenizer."
        )
    description = json.loads(backend.to_str())
    decoders = {part["type"] for part in _parts(description["decoder"])}
    if not decoders & {"ByteLevel", "ByteFallback"}:
        raise ConfigError(
            f"the tokenizer (decoder {', '.join(sorted(decoders)) or 'none'}) is neither byte-level nor sentencepiece with byte "
            "fallback: it cannot write every text, so bytes per token are unknown; score with token_bytes=None."
        )
    byte_level = "ByteLevel" in decoders
    # The text after an added token starts anew and gets a dummy space of its own: one byte that the text does not have.
    restarts = any(part["type"] == "Prepend" for part in _parts(description["normalizer"])) or any(
        part.get("prepend_scheme") == "always" for part in _parts(description["pre_tokenizer"])
    )

    vocabulary = backend.get_vocab(with_added_tokens=True)
    lengths = torch.zeros(max(vocabulary.values()) + 1, dtype=torch.long)
    for token, index in vocabulary.items():
        if byte_level:
            lengths[index] = len(token)  # one printable stand-in character per byte
        elif _BYTE_TOKEN.fullmatch(token):
            lengths[index] = 1
        else:
            lengths[index] = len(token.replace(_SPACE, " ").encode())
    for added in description["added_tokens"]:  # found in the raw text: their characters are themselves
        spelled = not added["special"] or added["content"] == description["model"].get("unk_token")
        lengths[added["id"]] = len(added["content"].encode()) - restarts if spelled else 0
    return lengths
