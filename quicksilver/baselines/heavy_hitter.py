"""Heavy-hitter eviction: the K/V that has been attended to most, and the most recent (H2O)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from quicksilver.modules.signals import lowest, slot_draw
from quicksilver.runtime.module import EvictionPolicy
from quicksilver.runtime.options import Count, Positive
from quicksilver.runtime.view import CacheView


@dataclass(kw_only=True)
class HeavyHitter(EvictionPolicy):
    """Each layer keeps the K/V of its `recent` newest tokens and of the `heavy` others that have received most attention so far.

    Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (Zhang et al., arXiv 2306.14048),
    algorithm 1: attention is added up over all queries since the prompt began, and after each step the entry with the least sum
    leaves, the recent ones apart.

    What differs: H2O chooses for every head, here the heads of a layer share one choice (a cache entry is one token's K/V of all
    heads), by the mean of their sums. Entries leave after a pass: within a pass of several tokens (the prompt; the scored tokens
    of `continuation`) all of it is still seen. Which K/V stays depends on later queries, so it is no causal module; but it decides
    about the cache between two passes only, and no logit ever knows a later token.

    The sums are a q·k product of all queries once more, because the attention kernel keeps its weights to itself; the cost is in
    the ledger.

    Args:
        heavy, recent: entries kept in each layer; a sequence of at most heavy + recent tokens loses none.
        criterion: `attention`, or `random`: the null, which keeps as many others by a draw for each layer and slot.
        seed: of `random`.

    Raises:
        ConfigError: an option out of range.
    """

    heavy: Count = 45
    recent: Positive = 45
    criterion: Literal["attention", "random"] = "attention"
    seed: Count = 0
    priority: ClassVar[int] = 20

    @property
    def causal(self) -> bool:
        return False

    def null(self, seed: int) -> HeavyHitter:
        return replace(self, criterion="random", seed=seed)

    def sums_attention(self, layer: int) -> bool:
        return self.criterion == "attention"

    def evict(self, view: CacheView) -> torch.Tensor | None:
        surplus = view.present.sum(1, keepdim=True) - (self.heavy + self.recent)
        old = view.present & (view.slots < view.n_seen - self.recent)
        if self.criterion == "random":
            received = slot_draw(self.seed, view.layer, view.slots)
        else:
            assert view.attention is not None
            received = view.attention
        return lowest(received.masked_fill(~old, math.inf), old, surplus.clamp(min=0))
