"""From text to the windows that are scored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from quicksilver.measure.perplexity import windows_of
from quicksilver.measure.token_bytes import token_byte_lengths
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
    """

    ids: torch.Tensor
    available: int
    tokens: int
    token_bytes: torch.Tensor | None
    why_no_bytes: str | None

    @property
    def token_digest(self) -> str:
        """sha256 of the ids: the same windows, whatever text and tokenizer they came from."""
        return hashlib.sha256(self.ids.contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def encode(text: str, tokenizer: Any, window_tokens: int, limit: int | None = None) -> Windows:
    """Tokenise without special tokens and cut into windows; at most `limit`, spread evenly so that the whole text is represented.

    Raises:
        ConfigError: the text is shorter than one window.
    """
    # verbose=False: transformers warns that the text is longer than the model's context. It is cut right below.
    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    every = windows_of(ids, window_tokens)
    taken = every if limit is None or limit >= len(every) else every[torch.linspace(0, len(every) - 1, limit).long()]
    try:
        token_bytes, why = token_byte_lengths(tokenizer), None
    except ConfigError as error:
        token_bytes, why = None, str(error)
    return Windows(taken, len(every), len(ids), token_bytes, why)
