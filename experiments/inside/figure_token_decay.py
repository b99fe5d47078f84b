"""Figure token-decay: active tokens by layer, and how well N·exp(−α·ℓ) fits them (App. J and K say α from 0.05 to 0.1).

The records are those of Table 11, under protocol continuation; prompts only, up to the layers that halted tokens take part in again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from quicksilver.records.record import TRACE, Record
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row, find
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, legend_below, panels, style

from . import trace_counts

READS = (TRACE,)

PANEL = "continuation"
HALTING = "isolated.halting"
KEYS = {
    HALTING: "halting alone",
    "isolated.fusion": "fusion alone",
    "cumulative.quantization": "all four",
    "budget.attention": "halting by attention",
}


def rows() -> list[Row]:
    """Those of Table 11 in which tokens leave."""
    return [row for row in find("table", "11").experiment.rows() if row.panel == PANEL and row.key in KEYS]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Shares of active tokens on a logarithmic axis, where an exponential is a straight line."""
    frame = pd.concat(
        [_decay(outcome.record, outcome.row.key) for outcome in outcomes if outcome.record is not None], ignore_index=True
    )
    low, high = reported()["k.decay"].bounds["decay_per_layer"]
    with style():
        drawing, axes = panels(1, 1, size=(6.4, 3.8))
        plot = axes[0, 0]
        depth = np.arange(0, int(frame["layer"].max()) + 1)
        plot.fill_between(
            depth,
            100 * np.exp(-(high or 0) * depth),
            100 * np.exp(-(low or 0) * depth),
            color="#ececec",
            label=f"the paper: α {low:g} to {high:g}",
        )
        for place, (key, mine) in enumerate(frame.groupby("key", sort=False)):
            fitted = mine[mine["fitted"]]
            one = mine.iloc[0]
            law = f"α {one['alpha']:.3f} [{one['alpha_low']:.3f} {one['alpha_high']:.3f}], R² {one['r_squared']:.2f}"
            style_of = {"color": PALETTE[place]}
            dash, marker = DASHES[place % len(DASHES)], MARKERS[place]
            plot.plot(mine["layer"], mine["active_pct"], marker=marker, linestyle="", **style_of)
            at = np.array([0, *fitted["layer"]])
            plot.plot(at, 100 * np.exp(-one["alpha"] * at), linestyle=dash, marker="", linewidth=1, **style_of)
            plot.plot([], [], linestyle=dash, marker=marker, linewidth=1, label=f"{KEYS[str(key)]}: {law}", **style_of)
        plot.axhline(100, color=GREY, linewidth=0.8, linestyle="-", marker="")
        plot.set_yscale("log")
        plot.set_yticks([10, 20, 30, 50, 70, 100], ["10", "20", "30", "50", "70", "100"])
        plot.minorticks_off()
        plot.set_xlabel("layer")
        plot.set_ylabel("active tokens of a prompt, %")
        title = "points: measured; lines: the exponential N·exp(−α·ℓ) fitted to them"
        legend_below(drawing, plot.get_legend_handles_labels()[0], ncols=2, title=title)
    caption = (
        "Share of a prompt's tokens that are computed in each layer. The paper says that it falls exponentially (App. J, K). A fit starts at 100% "
        "before the first layer and ends before the layer from which halted tokens are computed again (resume_layers). R² below 0: the mean of "
        "all layers fits better than an exponential.",
        "Fit: least squares in logarithms. Brackets: 95% intervals of α, bootstrap over windows.",
        *provenance.notes(outcomes),
    )
    return Figure(name, "Active tokens by layer, with exponential fits", frame, drawing, caption)


def decay(panel: Mapping[str, Outcome]) -> Estimate | None:
    """α of halting alone, fitted up to the layers that halted tokens take part in again."""
    record = panel[HALTING].record
    if record is None:
        return None
    layers = trace_counts.by_layer(record)
    return trace_counts.decay_per_layer(layers[layers["part"] == "prompt"], trace_counts.first_resumed_layer(record) - 1)[0]


# Halting alone: fusion takes away a share that is configured, all at once.
ANSWERS = {
    "k.decay.decay_per_layer": AnsweredBy(
        PANEL, HALTING, of=decay, note="halting alone, fitted up to the layers that halted tokens take part in again"
    )
}


def _decay(record: Record, key: str) -> pd.DataFrame:
    layers = trace_counts.by_layer(record)
    prompts = layers[layers["part"] == "prompt"]
    until = trace_counts.first_resumed_layer(record) - 1
    alpha, quality = trace_counts.decay_per_layer(prompts, until)
    sums = prompts.groupby("layer", as_index=False)[["tokens", "active"]].sum()
    found: dict[str, Any] = {"alpha": alpha.value, "alpha_low": alpha.low, "alpha_high": alpha.high, "r_squared": quality}
    return pd.DataFrame(
        {
            "key": key,
            "layer": sums["layer"],
            "active_pct": 100 * sums["active"] / sums["tokens"],
            "fitted": sums["layer"] <= until,
        }
        | found
    )
