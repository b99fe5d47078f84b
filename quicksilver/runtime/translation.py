"""What the runtime asks of fitted maps: one predicts the K/V of halted tokens (`missing_kv="predict"`), one stands in for an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class PredictedKV:
    """K and V of the same M tokens in consecutive layers.

    Attributes:
        first_layer: the first of them.
        keys, values: (L, B, H_kv, M, head_dim), K before its rotation.
    """

    first_layer: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + len(self.keys))

    def __contains__(self, layer: int) -> bool:
        return layer in self.layers

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, (B, H_kv, M, head_dim) each."""
        return self.keys[layer - self.first_layer], self.values[layer - self.first_layer]


class KVTranslator(Protocol):
    """Predicts, from the states that enter one layer, the K and V of the layers after it.

    A token that halts after layer ℓ-1 is frozen in the state that enters layer ℓ, the `source_layer`: there its K/V are projected
    exactly, as those of every token, and in later layers they are what `translate` says.

    Attributes:
        source_layer: ℓ.
        flops_per_token: floating-point operations of `translate` for one token, all later layers and ranks together.
    """

    @property
    def source_layer(self) -> int: ...

    @property
    def flops_per_token(self) -> int: ...

    def translate(self, hidden: torch.Tensor) -> PredictedKV:
        """K before its rotation, and V, of each layer after `source_layer`.

        Args:
            hidden: (B, M, D), states entering `source_layer`.

        Returns:
            In the dtype of `hidden`, of the heads that this process has (`arch.ranks`).
        """
        ...


class MLPMap(Protocol):
    """Stands in for the MLP of one layer.

    Attributes:
        flops_per_token: floating-point operations of a call for one token.
    """

    @property
    def flops_per_token(self) -> int: ...

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """What the MLP is given -> about what it returns: (B, M, D) each, in the same dtype."""
        ...
