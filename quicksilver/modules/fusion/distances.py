"""How far apart two tokens are: of neighbours as a signal, and of any two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from quicksilver.modules.checks import check_choice, check_count
from quicksilver.modules.fusion.grouping import active_first, own_columns
from quicksilver.modules.signals import Signal
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.view import LayerView

DISTANCES = ("l2", "relative", "cosine")


@dataclass(frozen=True)
class NeighbourDistance(Signal):
    """Distance of a token's state from that of its left neighbour, +inf where it has none (D.2).

    `l2`: ‖h_t − h_u‖₂ in state units (the paper's); `relative`: over the mean of the two norms; `cosine`: 1 − cos(h_t, h_u), 0
    to 2.
    """

    kind: Literal["l2", "relative", "cosine"] = "l2"
    name: ClassVar[str] = "neighbour"

    def __post_init__(self) -> None:
        check_choice("neighbour", self.kind, DISTANCES)

    @property
    def key(self) -> str:
        return f"neighbour-{self.kind}"

    def states(self, view: LayerView, tokens: TokenState) -> torch.Tensor:
        """What is compared: (B, M, D)."""
        return view.after

    def score(self, view: LayerView, tokens: TokenState, where: torch.Tensor) -> torch.Tensor:
        neighbour = tokens.left_neighbour()
        states = self.states(view, tokens)
        distance = distance_between(states, states.gather(1, neighbour[..., None].expand_as(states)), self.kind)
        return distance.masked_fill(neighbour == own_columns(neighbour), math.inf)

    def pairs(self, view: LayerView, tokens: TokenState) -> torch.Tensor:
        """The distance of any two tokens: (B, M, M) float32."""
        return pairwise_distances(self.states(view, tokens), self.kind)


@dataclass(frozen=True)
class ContextDivergence(NeighbourDistance):
    """δ_ctx of D.8: the distance between the contexts of a token and of its left neighbour.

    A context is the mean state of the `window` active tokens around (docs/conflicts.md #17: the model's own states, no sentence
    encoder). It looks ahead by half a window.
    """

    window: int = 32
    name: ClassVar[str] = "context"
    causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("context_window", self.window, 1)

    @property
    def key(self) -> str:
        return f"context-{self.kind}-{self.window}"

    def states(self, view: LayerView, tokens: TokenState) -> torch.Tensor:
        order, active = active_first(tokens.active)
        # The mean is a difference of two running sums, which would lose its digits in float32.
        states = view.after.double().gather(1, order[..., None].expand_as(view.after)) * active[..., None]
        so_far = F.pad(states.cumsum(1), (0, 0, 1, 0))  # (B, M + 1, D)
        place = own_columns(order)
        first = (place - self.window // 2).clamp(min=0)
        stop = torch.minimum(first + self.window, active.sum(1, keepdim=True)).clamp(min=1)
        first = torch.minimum(first, stop - 1)
        index = torch.stack([first, stop])[..., None].expand(-1, -1, -1, states.shape[-1])
        mean = (so_far.gather(1, index[1]) - so_far.gather(1, index[0])) / (stop - first)[..., None]
        return torch.zeros_like(mean).scatter(1, order[..., None].expand_as(mean), mean).float()


def distance_between(a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
    """Distances of `kind`, see `NeighbourDistance`: (..., D), (..., D) -> (...) float32."""
    a, b = a.float(), b.float()
    if kind == "cosine":
        return 1 - F.cosine_similarity(a, b, dim=-1)
    distance = (a - b).norm(dim=-1)
    return distance if kind == "l2" else distance / _mean_norm(a.norm(dim=-1), b.norm(dim=-1))


def pairwise_distances(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Distances of `kind` between all rows: (B, M, D) -> (B, M, M) float32, by one matrix product."""
    x = x.float()
    if kind == "cosine":
        unit = F.normalize(x, dim=-1)
        return 1 - unit @ unit.transpose(1, 2)
    squares = x.square().sum(-1)
    distance = (squares[:, :, None] + squares[:, None, :] - 2 * (x @ x.transpose(1, 2))).clamp(min=0).sqrt()
    return distance if kind == "l2" else distance / _mean_norm(squares.sqrt()[:, :, None], squares.sqrt()[:, None, :])


def _mean_norm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a + b) / 2).clamp_min(torch.finfo(torch.float32).tiny)
