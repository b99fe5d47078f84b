"""Sink attention: the first tokens and the most recent ones, nothing between (StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quicksilver.runtime.module import EvictionPolicy, SpanPolicy
from quicksilver.runtime.options import Count, Positive
from quicksilver.runtime.view import CacheView
from quicksilver.runtime.visibility import Span


@dataclass(kw_only=True)
class SinkAttention(SpanPolicy, EvictionPolicy):
    """Every query attends to the last `window` tokens, itself included, and to the first `sinks`; the K/V of the others leaves. Causal.

    Source: "Efficient Streaming Language Models with Attention Sinks" (Xiao et al., arXiv 2309.17453).

    What differs: StreamingLLM gives the keys in its cache positions of the cache; here they keep those of the text, which comes to
    the same as long as the text fits the model's context. In a prompt the pattern is a mask over the usual attention, so nothing
    is saved there, and the causal kernel can no longer skip the upper triangle: what is saved is K/V, and time in decoding.

    Args:
        window: recent tokens a query sees; a prompt of at most window + sinks tokens is the dense model's.
        sinks: first tokens of the sequence that are always seen.

    Raises:
        ConfigError: an option out of range.
    """

    window: Positive = 86
    sinks: Count = 4

    def span(self, layer: int) -> Span:
        return Span(self.window, self.sinks)

    def evict(self, view: CacheView) -> torch.Tensor | None:
        # The next query stands at slot n_seen: beside itself it sees window - 1 of those here.
        return (view.slots <= view.n_seen - self.window) & (view.slots >= self.sinks)
