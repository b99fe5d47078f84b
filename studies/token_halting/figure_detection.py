"""Figure detection: average precision against token-layers and executed FLOPs, with and without recycling, and what training did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from quicksilver.report.artefacts import Outcome
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, panels, style, whiskers

from . import results

CURVES = (
    *(("box", "learned"), ("uniform", "learned"), ("random", "random"), ("norm", "norm"), ("static", "static")),
    *(("gentle", "learned"), ("wide_gentle", "learned")),
)
ACROSS = {
    "tokens": "token-layers computed, %",
    "executed_flops_saved_pct": "executed FLOPs saved, %",
    "encoder_latency_ratio": "encoder's time, % of the dense one's",
}

rows = results.no_rows


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Curves of AP against tokens, operations and, where it was timed, wall clock, and token-layers left by training step."""
    found = results.summary()
    timed = "encoder_latency_ratio" in found
    with style():
        drawing, plots = panels(2 + timed, 2, size=(7.4, 8.8 if timed else 6.0))
        _curves(plots[0, 0], found, "tokens", "ap", 100.0)
        _curves(plots[0, 1], found, "tokens", "ap_unrecycled", 100.0)
        _curves(plots[1, 0], found, "executed_flops_saved_pct", "ap", 1.0)
        if timed:
            _curves(plots[2, 0], found, "encoder_latency_ratio", "ap", 100.0)
            _curves(plots[2, 1], found, "encoder_latency_ratio", "ap_unrecycled", 100.0)
        if not found.empty:
            # Curves cross every corner of the plots: below them.
            drawing.set_layout_engine("constrained", rect=(0, 0.09, 1, 0.91))
            handles = plots[0, 0].get_legend_handles_labels()
            drawing.legend(*handles, loc="lower center", bbox_to_anchor=(0.5, 0.0), ncols=3, borderaxespad=0)
        _training(plots[1, 1], results.frame("curves"))
    caption = (
        "Detectors of cars and pedestrians in lidar-like scenes; bars reach from the least to the greatest of the seeds. Random and norm halt as many "
        "tokens after each layer as the gates with box weights. Operations and time are in percent of the dense detector's, of the wider one's, too.",
        *results.note(),
    )
    return Figure(name, "Average precision under token halting", found, drawing, caption)


def _curves(plot: Any, found: pd.DataFrame, across: str, ap: str, scale: float) -> None:
    """AP of every policy against a column, with the dense detector's as a line."""
    plot.set_title("Recycled" if ap == "ap" else "Not recycled")
    plot.set_ylabel("average precision")
    plot.set_ylim(-0.02, 0.7)
    plot.set_xlabel(ACROSS[across])
    if found.empty:
        return
    for place, key in enumerate(CURVES):
        points = found[(found["detector"] == key[0]) & (found["policy"] == key[1])].dropna(subset=[across]).sort_values(across)
        if points.empty:
            continue
        ends = [points.get(f"{ap}_{end}") for end in ("low", "high")]
        spread = None if ends[0] is None else whiskers(points[ap], *ends)
        plot.errorbar(
            scale * points[across], points[ap], yerr=spread, label=results.LABELS[key], color=PALETTE[place], marker=MARKERS[place],
            linestyle=DASHES[place], elinewidth=0.7, capsize=1.5,
        )  # fmt: skip
    (dense,) = found[found["detector"] == "control"][ap]
    plot.axhline(dense, color=GREY, linewidth=0.9, label="dense, trained as long")


def _training(plot: Any, trained: pd.DataFrame) -> None:
    """Share of token-layers left, and of pillars in boxes, by step."""
    plot.set_title("Training of the gates")
    plot.set_xlabel("step")
    plot.set_ylabel("share left")
    if trained.empty:
        return
    for place, detector in enumerate(("box", "uniform")):
        steps = trained[trained["detector"] == detector].groupby("step")[["tokens", "kept_in_box"]].mean()
        for column, said, line in (("tokens", "token-layers", "-"), ("kept_in_box", "pillars in boxes, last layer", ":")):
            plot.plot(steps.index, steps[column], label=f"{detector}: {said}", color=PALETTE[place], linestyle=line, marker="")
    plot.legend()
