"""What the runtime asks of whoever holds tokens at fewer bits: run a layer at the tokens' widths, and hold K and V at them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import nn

from quicksilver.runtime.cache import RaggedLayer
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
        """`call()`, which runs `layer`, with the inputs of its linear layers held at `bits` (B, A) uint8; returns what it returns."""

    @abstractmethod
    def hold_kv(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """K or V (B, H_kv, M, head_dim) as it reads after having been held at `bits` (B, M); zeros stay zeros."""

    @abstractmethod
    def new_store(self) -> RaggedLayer:
        """A cache layer that keeps entries packed at their `bits` fact and returns what `hold_kv` would give."""

    def hold_states(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """The residual stream (B, M, D) right after widths were decided; bits (B, M), 16 where nothing was said."""
        return states
