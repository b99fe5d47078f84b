"""The null of every adaptive depth: all tokens stop after the same layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quicksilver.modules.checks import check_number
from quicksilver.modules.halting import HaltingPolicy
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.view import LayerView


@dataclass(kw_only=True)
class StaticDepth(HaltingPolicy):
    """Every token stops after the same `depth`, a fraction of the layers: early exit that reads no state. Causal."""

    depth: float = 0.5
    window: tuple[float, float] = field(default=(0.5, 1.0), init=False)

    def __post_init__(self) -> None:
        check_number("depth", self.depth, 0.0, 1.0)
        self.window = (self.depth, 1.0)
        super().__post_init__()

    @property
    def chooses_causally(self) -> bool:
        return True

    def halted_share_after(self, layer: int) -> float | None:
        return 1.0

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        return eligible
