"""Sliding-window attention: the most recent tokens, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from quicksilver.baselines.sink_attention import SinkAttention
from quicksilver.runtime.options import Count, Positive


@dataclass(kw_only=True)
class SlidingWindow(SinkAttention):
    """Every query attends to the last `window` tokens, itself included; the K/V of the others leaves the cache. Causal.

    Source: "Longformer: The Long-Document Transformer" (Beltagy et al., arXiv 2004.05150); "Mistral 7B" (Jiang et al., arXiv
    2310.06825) has it with a rolling cache.

    What differs: those were trained with it, and here it is put on a model that was not. As for `SinkAttention`, a prompt saves
    nothing.

    Args:
        window: tokens a query sees; a sequence no longer than that is the dense model's.
        sinks: 0; with some it is `SinkAttention`.
    """

    window: Positive = 90
    sinks: Count = 0
