"""From text to the windows that are scored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quicksilver.data.annotation.alignment import AnnotatedTokens, align
from quicksilver.data.annotation.annotation import Annotation
from quicksilver.data.token_bytes import token_byte_lengths
from quicksilver.runtime.errors import ConfigError


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

    Raises:
        ConfigError: the text is shorter than one window; annotation that does not align with it.
    """
    encoded = _encoded(text, tokenizer, offsets=annotation is not None)
    ids = encoded["input_ids"]
    every = windows_of(ids, window_tokens)
    rows = torch.arange(len(every))
    rows = rows if limit is None or limit >= len(every) else torch.linspace(0, len(every) - 1, limit).long()
    taken = every[rows]
    try:
        token_bytes, why = token_byte_lengths(tokenizer), None
    except ConfigError as error:
        token_bytes, why = None, str(error)
    annotated = None
    if annotation is not None:
        places = rows.numpy()[:, None] * window_tokens + np.arange(window_tokens)
        annotated = align(annotation, np.array(ids), np.array(encoded["offset_mapping"]), places)
    return Windows(taken, len(every), len(ids), token_bytes, why, annotated)


def _encoded(text: str, tokenizer: Any, *, offsets: bool) -> Any:
    # verbose=False: transformers warns that the text is longer than the model's context. It is cut by the caller.
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    if not offsets:
        return tokenizer(text, **options)
    try:
        return tokenizer(text, return_offsets_mapping=True, **options)
    except NotImplementedError as error:
        raise ConfigError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, so words cannot be aligned with it: load the "
            "fast tokenizer."
        ) from error


def windows_of(ids: torch.Tensor | Sequence[int], window_tokens: int, limit: int | None = None) -> torch.Tensor:
    """Cut a token stream into disjoint windows, in order; what is left over at its end is not used.

    Args:
        ids: (T,) token ids of the whole text.
        window_tokens: length of a window.
        limit: at most this many windows; None: all there are.

    Returns:
        (W, window_tokens) long.

    Raises:
        ConfigError: the text is shorter than one window, or `limit` is below 1.
    """
    ids = torch.as_tensor(ids, dtype=torch.long)
    if limit is not None and limit < 1:
        raise ConfigError(f"a limit of {limit} windows leaves nothing to score: at least 1, or none for all.")
    count = len(ids) // window_tokens
    if count == 0:
        raise ConfigError(
            f"the text has {len(ids)} tokens and one window needs {window_tokens}: "
            "give a longer text, or a smaller protocol.window_tokens."
        )
    count = count if limit is None else min(count, limit)
    return ids[: count * window_tokens].view(count, window_tokens)
