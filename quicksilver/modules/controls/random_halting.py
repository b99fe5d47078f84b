"""The causal null of halting: tokens halt by chance."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quicksilver.modules.checks import check_number
from quicksilver.modules.halting import HaltingPolicy
from quicksilver.modules.signals import Random
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.view import LayerView


@dataclass(kw_only=True)
class RandomHalting(HaltingPolicy):
    """Each token halts after each layer of the window with probability `rate`, whatever its state.

    The draw is a hash of (seed, layer, slot, token id): the same alone, in a batch, in prefill and in decoding.
    """

    rate: float = 0.1
    seed: int = 0
    resume_layers: int = 4

    def __post_init__(self) -> None:
        check_number("rate", self.rate, 0.0, 1.0)
        self._random = Random(self.seed)
        super().__post_init__()

    @property
    def chooses_causally(self) -> bool:
        return True

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        return eligible & (self._random(view, tokens, eligible) < self.rate)
