"""From text to the windows that are scored."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
import torch

from quicksilver.data.annotation import AnnotatedTokens, Annotation, align
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
    sentencepiece tokenizer puts its dummy space before the first word: that token is never scored. Special tokens count 0: a
    tokenizer inserts them. Only the unknown token counts what it spells, because a tokenizer that can write every byte makes it
    from nothing else (WikiText is full of a literal `<unk>`).

    `tokenizer` is of Hugging Face with a `tokenizers` backend, or that backend; byte-level BPE (GPT-2, Pythia, Qwen, Llama 3) or
    sentencepiece with byte fallback (Llama 2, Mistral). Raises ConfigError: it loses bytes, and bits per byte would be a guess.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, tokenizers.Tokenizer):
        name = type(tokenizer).__name__
        raise ConfigError(f"{name} has no `tokenizers` backend to read lengths from: load the fast tokenizer.")
    description = json.loads(backend.to_str())
    decoders = {part["type"] for part in _parts(description["decoder"])}
    if not decoders & {"ByteLevel", "ByteFallback"}:
        raise ConfigError(
            f"the tokenizer (decoder {', '.join(sorted(decoders)) or 'none'}) is neither byte-level nor sentencepiece with byte "
            "fallback: it cannot write every text, so bytes per token are unknown; score with token_bytes=None."
        )
    # The text after an added token starts anew and gets a dummy space of its own: one byte that the text does not have.
    restarts = any(part["type"] == "Prepend" for part in _parts(description["normalizer"])) or any(
        part.get("prepend_scheme") == "always" for part in _parts(description["pre_tokenizer"])
    )

    vocabulary = backend.get_vocab(with_added_tokens=True)
    lengths = torch.zeros(max(vocabulary.values()) + 1, dtype=torch.long)
    for token, index in vocabulary.items():
        if "ByteLevel" in decoders:
            lengths[index] = len(token)  # one printable stand-in character per byte
        else:
            lengths[index] = 1 if _BYTE_TOKEN.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
    for added in description["added_tokens"]:  # found in the raw text: their characters are themselves
        spelled = not added["special"] or added["content"] == description["model"].get("unk_token")
        lengths[added["id"]] = len(added["content"].encode()) - restarts if spelled else 0
    return lengths


@dataclass(frozen=True)
class Windows:
    """Disjoint windows of one text.

    Attributes:
        ids: (W, N) long.
        available: windows the text has; W of them, evenly spread, were taken.
        tokens: tokens of the whole text.
        token_bytes: (V,) long, bytes behind each token; None where a tokenizer loses bytes.
        why_no_bytes: then, why.
        annotated: the words that the tokens of the windows belong to, where the text has annotation.
    """

    ids: torch.Tensor
    available: int
    tokens: int
    token_bytes: torch.Tensor | None
    why_no_bytes: str | None
    annotated: AnnotatedTokens | None = None

    @property
    def token_digest(self) -> str:
        """sha256 of the ids: the same windows, whatever text and tokenizer they came from."""
        return hashlib.sha256(self.ids.contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def encode(
    text: str, tokenizer: Any, window_tokens: int, limit: int | None = None, annotation: Annotation | None = None
) -> Windows:
    """Tokenise without special tokens and cut into windows; at most `limit`, spread evenly so that the whole text is represented.
    Raises ConfigError: the text is shorter than one window; annotation that does not align with it."""
    # verbose=False: transformers warns that the text is longer than the model's context. It is cut here.
    options = {"return_offsets_mapping": annotation is not None, "return_attention_mask": False, "verbose": False}
    try:
        encoded = tokenizer(text, add_special_tokens=False, **options)
    except NotImplementedError as error:
        without = (
            f"{type(tokenizer).__name__} does not say which characters a token stands for, so words cannot be aligned with it"
        )
        raise ConfigError(f"{without}: load the fast tokenizer.") from error
    ids = encoded["input_ids"]
    every = windows_of(ids, window_tokens)
    rows = torch.arange(len(every))
    rows = rows if limit is None or limit >= len(every) else torch.linspace(0, len(every) - 1, limit).long()
    try:
        token_bytes, why = token_byte_lengths(tokenizer), None
    except ConfigError as error:
        token_bytes, why = None, str(error)
    annotated = None
    if annotation is not None:
        places = rows.numpy()[:, None] * window_tokens + np.arange(window_tokens)
        annotated = align(annotation, np.array(ids), np.array(encoded["offset_mapping"]), places)
    return Windows(every[rows], len(every), len(ids), token_bytes, why, annotated)


def check_context(model: Any, window_tokens: int) -> None:
    """Raises ConfigError where windows are longer than the model's context."""
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and window_tokens > context:
        longer = f"protocol.window_tokens={window_tokens} is longer than the model's context of {context} tokens"
        raise ConfigError(f"{longer}: give at most protocol.window_tokens={context}.")


def windows_of(ids: torch.Tensor | Sequence[int], window_tokens: int) -> torch.Tensor:
    """Cut a token stream, ids (T,), into disjoint windows (W, window_tokens) long, in order; what is left over at its end is not
    used. Raises ConfigError: the text is shorter than one window."""
    ids = torch.as_tensor(ids, dtype=torch.long)
    count = len(ids) // window_tokens
    if count == 0:
        needs = f"the text has {len(ids)} tokens and one window needs {window_tokens}"
        raise ConfigError(f"{needs}: give a longer text, or a smaller protocol.window_tokens.")
    return ids[: count * window_tokens].view(count, window_tokens)
