"""What the runtime asks of whoever predicts the K/V of halted tokens (`missing_kv="predict"`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


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

    def translate(self, hidden: torch.Tensor) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
        """K before its rotation, and V, of each layer after `source_layer`.

        Args:
            hidden: (B, M, D), states entering `source_layer`.

        Returns:
            By layer: (B, H_kv, M, head_dim) each, in the dtype of `hidden`, of the heads that this process has (`arch.ranks`).
        """
        ...
