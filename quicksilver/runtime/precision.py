"""What the runtime asks of whoever executes widths: run a layer at the tokens' widths, and code K and V at them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import nn

from quicksilver.runtime.cache import CacheLayer
from quicksilver.runtime.ledger import BETA


class PrecisionExecutor(ABC):
    """Executes the widths that `TokenState.set_bits` decided.

    Attributes:
        kernel: what computed the products of quantised tokens, for the record.
        beta: what the paper's ledger charges a token by its width, relative to 16 bits.
    """

    kernel: str
    beta: Mapping[int, float] = BETA

    @abstractmethod
    def run_layer(self, layer: nn.Module, bits: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`call()`, which runs `layer`, with the inputs of its linear layers coded at `bits` (B, A) uint8; returns what it returns."""

    @abstractmethod
    def quantize_dequantize_kv(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """K or V (B, H_kv, M, head_dim) as it reads after having been coded at `bits` (B, M); zeros stay zeros."""

    @abstractmethod
    def new_store(self) -> CacheLayer:
        """A cache layer that keeps entries packed at their `bits` fact and returns what `quantize_dequantize_kv` would give."""

    def quantize_dequantize_states(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """The residual stream (B, M, D) right after widths were decided; bits (B, M), 16 where nothing was said."""
        return states
