"""What the runtime asks of whoever holds tokens at fewer bits: run a layer at the tokens' widths, and hold K and V at them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn

from quicksilver.runtime.cache import RaggedLayer


class PrecisionExecutor(ABC):
    """Executes the widths that `TokenState.set_bits` decided."""

    @abstractmethod
    def run_layer(self, layer: nn.Module, bits: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`call()`, which runs `layer`, with the inputs of its linear layers held at `bits` (B, A) uint8; returns what it returns."""

    @abstractmethod
    def hold_kv(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """K or V (B, H_kv, M, head_dim) as it reads after having been held at `bits` (B, M); zeros stay zeros."""

    @abstractmethod
    def new_store(self) -> RaggedLayer:
        """A cache layer that keeps entries packed at their `bits` fact and returns what `hold_kv` would give."""
