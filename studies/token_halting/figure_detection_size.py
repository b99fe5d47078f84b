"""Figure detection_size: how much of the operations that halting saves is saved of the encoder's time, by the detector's size."""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report.artefacts import Outcome
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, panels, style

from . import results

ASKED = 0.9  # of the operations saved

rows = results.no_rows


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """A curve for each number of pillars and of scenes a pass, by width."""
    made = results.frame("sizes")
    found = made if made.empty else results.realized(made)
    with style():
        drawing, plots = panels(1, 1, size=(5.2, 3.4))
        plot = plots[0, 0]
        plot.set_xlabel("width of the encoder")
        plot.set_ylabel("time saved ÷ FLOPs saved")
        plot.set_xscale("log", base=2)
        plot.set_ylim(0, 1.1)
        groups = [] if found.empty else found.groupby(["pillars", "scenes_a_pass"])
        for place, ((pillars, scenes), points) in enumerate(groups):
            said = f"{pillars} pillars, {'one scene' if scenes == 1 else f'{scenes} scenes'} a pass"
            points = points.sort_values("width")
            share = 100 / points["flops_saved_pct"]
            spread = [
                (points["latency_ratio_high"] - points["latency_ratio"]) * share,
                (points["latency_ratio"] - points["latency_ratio_low"]) * share,
            ]
            plot.errorbar(
                points["width"], points["realized"], yerr=spread, label=said, color=PALETTE[place], marker=MARKERS[place],
                linestyle=DASHES[place], elinewidth=0.7, capsize=1.5,
            )  # fmt: skip
        if not found.empty:
            widths = sorted(set(found["width"]))
            plot.set_xticks(widths, [str(width) for width in widths])
            plot.minorticks_off()
            plot.axhline(ASKED, color=GREY, linewidth=0.9, label=f"{ASKED:g} of the FLOPs saved")
            plot.legend()
    caption = (
        "Encoders of 4 layers with drawn weights, of which 35%, 20% and 15% of the tokens are left after the first three layers; bars: quartiles of the "
        f"rounds. Made by `{results.COMMAND} --sizes-only`.",
    )
    return Figure(name, "Time saved by halting, by size", found, drawing, caption)
