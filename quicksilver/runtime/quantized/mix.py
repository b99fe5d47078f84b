"""How often each width was given in a run, from its trace."""

from __future__ import annotations

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.quantized.codes import WIDTHS
from quicksilver.runtime.trace import Trace


def mix_of(trace: Trace) -> dict[int, float]:
    """What the null needs: the share of each width among the active tokens of the layers after the first decision on widths.

    Raises:
        ConfigError: no token was given a width.
    """
    counts = dict.fromkeys(WIDTHS, 0)
    for p in trace.passes:
        for layer in range(min((q.layer for q in p.precisions), default=trace.n_layers) + 1, trace.n_layers):
            bits = p.bits(layer)[p.active(layer)]
            for width in WIDTHS:
                counts[width] += int((bits == width).sum())
    total = sum(counts.values())
    if not total:
        raise ConfigError("No token of this trace was given a width: run the model under AdaptiveQuantization.")
    return {width: n / total for width, n in counts.items()}
