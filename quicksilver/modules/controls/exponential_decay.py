"""The paper's model of how many tokens stay active: exponential decay over depth (App. J)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quicksilver.modules.checks import check_number
from quicksilver.modules.halting import HaltingPolicy, fill_up, halted_shares
from quicksilver.modules.signals import Random
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.view import LayerView


@dataclass(kw_only=True)
class ExponentialDecay(HaltingPolicy):
    """Random tokens halt so that N·exp(−alpha·ℓ) are active in layer ℓ, counted from 0 (App. J: alpha from 0.05 to 0.1).

    Args:
        alpha: per layer.
        even: every row keeps exactly that many (non-causal). False: each token halts with probability 1 − exp(−alpha) after each
            layer, so that rows are uneven (causal).
        seed: of the draw.
        window: from which depth on, and up to which.
    """

    alpha: float = 0.07
    even: bool = True
    seed: int = 0
    window: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, 0.0)
        self._random = Random(self.seed)
        super().__post_init__()

    @property
    def chooses_causally(self) -> bool:
        return not self.even

    def bind(self, architecture: Architecture) -> None:
        super().bind(architecture)
        self._halted_shares = halted_shares(
            "exponential", self.first_layer, self.last_layer, architecture.n_layers, 0.0, self.alpha
        )

    def halted_share_after(self, layer: int) -> float | None:
        return self._halted_shares[layer] if self.even else None

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        draw = self._random(view, tokens, eligible)
        if self.even:
            return fill_up(view, tokens, eligible, draw, self._halted_shares[view.layer])
        return eligible & (draw < 1 - math.exp(-self.alpha))
