"""Figure layer-times: where the time of each layer goes, dense, with all four mechanisms, and halting by attention (App. K, layerwise).

Drawn from the records of Table 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from quicksilver.records.record import Record
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import HATCHES, PALETTE, Figure, legend_below, panels, style

from . import costs

RUNS = {costs.DENSE: "dense", costs.JOINT: "all four", costs.BUDGET: "halting by attention"}
GROUPS = {
    "attention": ("attention",),
    "MLP": ("mlp",),
    "norms": ("norms",),
    "KV write": ("kv_write",),
    "signals, decisions, fusion": ("decisions", "fusion"),
    "quantization, gather, masks": ("quantization", "gather_scatter", "runtime"),
}


def rows() -> list[Row]:
    """Those of Table 7."""
    return costs.rows(tuple(RUNS))


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """A picture a run, a bar a layer."""
    records = costs.by_key(outcomes)
    frame = pd.concat([layers(records[key], key) for key in RUNS if key in records], ignore_index=True)
    there = [key for key in RUNS if key in records]
    with style():
        drawing, axes = panels(1, len(there), size=(8.6, 3.2), sharey=True)
        for plot, key in zip(axes.flat, there, strict=True):
            mine = frame[frame["run"] == key]
            bottom = np.zeros(mine["layer"].nunique())
            for place, group in enumerate(GROUPS):
                ms = mine[mine["group"] == group].sort_values("layer")["ms"].to_numpy()
                plot.bar(
                    np.arange(1, len(ms) + 1), ms, bottom=bottom, width=0.8, color=PALETTE[place], hatch=HATCHES[place], edgecolor="white",
                    linewidth=0.2, label=group,
                )  # fmt: skip
                bottom += ms
            plot.set_title(RUNS[key])
            plot.set_xlabel("layer")
            plot.set_xticks(sorted({1, *range(4, len(bottom) + 1, 4), len(bottom)}))
            plot.grid(axis="x", visible=False)
        axes[0, 0].set_ylabel("time in one pass, ms")
        legend_below(drawing, axes[0, 0].get_legend_handles_labels()[0], ncols=len(GROUPS))
    caption = (
        "Medians over rounds of one pass over a batch of prompts. The components are timed in a pass of their own; Table 7 "
        "compares their sum with an untouched pass. Embedding and output head belong to no layer.",
        *provenance.notes(outcomes),
    )
    return Figure(name, "Where the time of each layer goes", frame, drawing, caption)


def layers(record: Record, key: str) -> pd.DataFrame:
    """Milliseconds by group and layer (from 1) of a record."""
    found = costs.components(record).ours.layers_ms
    n_layers = len(next(iter(found.values())))
    return pd.DataFrame(
        [
            {"run": key, "group": group, "layer": layer + 1, "ms": sum(found[one][layer] for one in components if one in found)}
            for group, components in GROUPS.items()
            for layer in range(n_layers)
        ]
    )
