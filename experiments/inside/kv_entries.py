"""K/V entries of the tokens of a text, written or skipped, drawn. Everything is read from `Record.signals`; figures 2 and 10 share it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from quicksilver.report.figure import PALETTE

# K/V entries of a token in a layer: colour and hatch, dark to light.
ENTRIES: Mapping[str, tuple[str, str]] = {
    "written": (PALETTE[0], ""),
    "kept": (PALETTE[2], ""),
    "carried": ("#bdbdbd", ""),
    "skipped": ("#ffffff", "/////"),
}
_WORDS = {
    "written": "written: the token takes part",
    "kept": "kept: it is halted, and protected",
    "carried": "none of its own: a neighbour carries it",
    "skipped": "skipped: it is halted",
}


def entries(signals: pd.DataFrame) -> pd.Series:
    """What each token has in the cache of each layer, one of `ENTRIES`."""
    held = pd.Series(np.where(signals["active"], "written", "kept"), index=signals.index)
    state = held.where(signals["kv"], "skipped")
    return state.where(signals["carrier"] == signals["slot"], "carried")


def draw_entries(axes: Axes, states: pd.DataFrame) -> None:
    """A map of `ENTRIES`: a row a layer (from 1), a column a token; equal neighbours are one bar, so that hatches run through."""
    for layer, row in states.iterrows():
        values = row.to_numpy()
        edges = np.flatnonzero(np.r_[True, values[1:] != values[:-1], True])
        for start, stop in pairwise(edges):
            colour, hatch = ENTRIES[values[start]]
            bar = [(float(start) - 0.5, float(stop - start))]
            axes.broken_barh(
                bar,
                (float(layer) - 0.5, 1),
                facecolor=colour,
                hatch=hatch,
                edgecolor="#9a9a9a" if hatch else "white",
                linewidth=0,
            )
    n_layers, n_tokens = states.shape
    for edge in range(1, n_tokens):
        axes.axvline(edge - 0.5, color="white", linewidth=0.4, linestyle="-", marker="")
    axes.set(xlim=(-0.5, n_tokens - 0.5), ylim=(0.5, n_layers + 0.5))
    axes.grid(visible=False)


def entries_legend(present: Iterable[str], *, short: bool = False) -> list[Patch]:
    """Handles for a legend of the entries that are there; `short` for a narrow place."""
    there = set(present)
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#9a9a9a", linewidth=0.5, label=name if short else _WORDS[name])
        for name, (colour, hatch) in ENTRIES.items()
        if name in there
    ]
