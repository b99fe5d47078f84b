"""One-shot halting: at one layer, the tokens of a prompt that attention moves least stop for good (DASH)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from quicksilver.modules.halting import HaltingPolicy, fill_up
from quicksilver.runtime.options import Count, Share
from quicksilver.runtime.pass_state import MissingKV, TokenState
from quicksilver.runtime.view import LayerView


@dataclass(kw_only=True)
class OneShotHalting(HaltingPolicy):
    """At one layer the share of a prompt's tokens whose attention output is smallest halts; the rest goes on to the end.

    Source: "Stability Implies Redundancy: Delta Attention Selective Halting for Efficient Long-Context Prefilling" (Chen et al., arXiv
    2604.18103). The score is ‖U_t‖₂, U the output of the layer's self-attention before it is added to the residual stream. The
    choice is made once; halted tokens skip attention and MLP of all later layers, so those have no K/V of them
    (`missing_kv="drop"`); decoding is left as it is.

    What differs: the layer is a fraction of the depth. The first tokens (attention sinks) are spared, beside the last one.

    Args:
        halted_share: ρ, share of a row's real tokens that halt; 0: none, the dense model.
        start: fraction of the layers gone through when the choice is made.

    Raises:
        ConfigError: an option out of range; by `bind`, a start after which nothing is left to save.
    """

    halted_share: Share = 0.54
    start: Share = 0.3
    missing_kv: MissingKV = "drop"
    protect_first: Count = 4
    window: tuple[float, float] = field(default=(0.3, 1.0), init=False)
    chooses_causally: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.window = (self.start, 1.0)

    def acts_at(self, layer: int) -> bool:
        return layer == self.first_layer and self.halted_share > 0

    def wants_attention(self, layer: int) -> bool:
        return self.acts_at(layer)

    def halted_share_after(self, layer: int) -> float | None:
        return self.halted_share

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        return fill_up(view, tokens, eligible, view.attention_output.float().norm(dim=-1), self.halted_share)
