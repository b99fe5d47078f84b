"""Published policies for the K/V cache: heavy hitters, attention sinks, the sliding window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from quicksilver.modules.signals import lowest, slot_draw
from quicksilver.runtime import CacheView, EvictionPolicy, Span, SpanPolicy
from quicksilver.runtime.options import Count, Positive


@dataclass(kw_only=True)
class HeavyHitter(EvictionPolicy):
    """Each layer keeps the K/V of its `recent` newest tokens and of the `heavy` others that have received most attention so far.

    Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (Zhang et al., arXiv 2306.14048),
    algorithm 1: attention is added up over all queries; after each step the entry with the least sum leaves, the recent ones apart.

    What differs: H2O chooses for every head, here the heads of a layer share one choice, by the mean of their sums. Entries leave after a
    pass: within a pass of several tokens all of it is still seen. Which K/V stays depends on later queries, so it is no causal module; but it
    decides between two passes only, and no logit ever knows a later token. The sums are one more q·k product, in the ledger.

    Args:
        heavy, recent: entries kept in each layer; a sequence of at most heavy + recent tokens loses none.
        criterion: `attention`, or `random`: the null, which keeps as many others by a draw for each layer and slot.
        seed: of `random`.
    """

    heavy: Count = 45
    recent: Positive = 45
    criterion: Literal["attention", "random"] = "attention"
    seed: Count = 0
    priority: ClassVar[int] = 20
    causal = False

    def null(self, seed: int) -> HeavyHitter:
        return replace(self, criterion="random", seed=seed)

    def sums_attention(self, layer: int) -> bool:
        return self.criterion == "attention"

    def evict(self, view: CacheView) -> torch.Tensor | None:
        surplus = view.present.sum(1, keepdim=True) - (self.heavy + self.recent)
        old = view.present & (view.slots < view.n_seen - self.recent)
        received = slot_draw(self.seed, view.layer, view.slots) if self.criterion == "random" else view.attention
        assert received is not None
        return lowest(received, old, surplus)


@dataclass(kw_only=True)
class SinkAttention(SpanPolicy, EvictionPolicy):
    """Every query attends to the last `window` tokens, itself included, and to the first `sinks`; the K/V of the others leaves. Causal.

    Source: "Efficient Streaming Language Models with Attention Sinks" (StreamingLLM, Xiao et al., arXiv 2309.17453).

    What differs: StreamingLLM gives cached keys positions of the cache; here they keep those of the text, which comes to the same while the
    text fits the model's context. A prompt saves nothing, as the pattern is a mask there; what is saved is K/V, and time in decoding.

    Args:
        window: recent tokens a query sees; a prompt of at most window + sinks tokens is the dense model's.
        sinks: first tokens of the sequence that are always seen.
    """

    window: Positive = 86
    sinks: Count = 4

    def span(self, layer: int) -> Span:
        return Span(self.window, self.sinks)

    def evict(self, view: CacheView) -> torch.Tensor | None:
        # The next query stands at slot n_seen: beside itself it sees window - 1 of those here.
        return (view.slots <= view.n_seen - self.window) & (view.slots >= self.sinks)


@dataclass(kw_only=True)
class SlidingWindow(SinkAttention):
    """Every query attends to the last `window` tokens, itself included; the K/V of the others leaves the cache. Causal.

    Source: "Longformer: The Long-Document Transformer" (Beltagy et al., arXiv 2004.05150); "Mistral 7B" (Jiang et al., arXiv
    2310.06825) has it with a rolling cache.

    What differs: those were trained with it. As for `SinkAttention`, a prompt saves nothing.

    Args:
        window: tokens a query sees; a sequence no longer than that is the dense model's.
        sinks: 0; with some it is `SinkAttention`.
    """

    window: Positive = 90
    sinks: Count = 0
