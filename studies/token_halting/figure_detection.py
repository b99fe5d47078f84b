"""Figure detection: average precision against token-layers and executed FLOPs, with and without recycling, and what training did."""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, panels, style, whiskers

from . import results

CURVES = (
    ("box", "learned"),
    ("uniform", "learned"),
    ("random", "random"),
    ("norm", "norm"),
    ("static", "static"),
    ("gentle", "learned"),
    ("wide_gentle", "learned"),
)
ACROSS = {
    "tokens": "token-layers computed, %",
    "executed_flops_saved_pct": "executed FLOPs saved, %",
    "encoder_latency_ratio": "encoder's time, % of the dense one's",
}


def rows() -> list[Row]:
    """None: the study has frames of its own."""
    return []


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Curves of AP against tokens, operations and, where it was timed, wall clock, and token-layers left by training step."""
    found, trained = results.summary(), results.frame("curves")
    timed = "encoder_latency_ratio" in found
    with style():
        drawing, plots = panels(2 + timed, 2, size=(7.4, 8.8 if timed else 6.0))
        axes = [
            (plots[0, 0], "tokens", "ap", "recycled", 100.0),
            (plots[0, 1], "tokens", "ap_unrecycled", "not recycled", 100.0),
            (plots[1, 0], "executed_flops_saved_pct", "ap", "recycled", 1.0),
        ]
        if timed:
            axes += [
                (plots[2, 0], "encoder_latency_ratio", "ap", "recycled", 100.0),
                (plots[2, 1], "encoder_latency_ratio", "ap_unrecycled", "not recycled", 100.0),
            ]
        for plot, across, ap, said, scale in axes:
            plot.set_title(said.capitalize())
            plot.set_ylabel("average precision")
            plot.set_ylim(-0.02, 0.7)
            plot.set_xlabel(ACROSS[across])
            for place, key in enumerate(CURVES if not found.empty else ()):
                points = found[(found["detector"] == key[0]) & (found["policy"] == key[1])]
                points = points.dropna(subset=[across]).sort_values(across)
                if points.empty:
                    continue
                ends = [points.get(f"{ap}_{end}") for end in ("low", "high")]
                spread = None if ends[0] is None else whiskers(points[ap], *ends)
                plot.errorbar(
                    scale * points[across], points[ap], yerr=spread, label=results.LABELS[key], color=PALETTE[place], marker=MARKERS[place],
                    linestyle=DASHES[place], elinewidth=0.7, capsize=1.5,
                )  # fmt: skip
            if not found.empty:
                (dense,) = found[(found["detector"] == "control")][ap]
                plot.axhline(dense, color=GREY, linewidth=0.9, label="dense, trained as long")
        if not found.empty:
            # Curves cross every corner of the plots: below them.
            drawing.set_layout_engine("constrained", rect=(0, 0.09, 1, 0.91))
            drawing.legend(
                *plots[0, 0].get_legend_handles_labels(), loc="lower center", bbox_to_anchor=(0.5, 0.0), ncols=3, borderaxespad=0
            )
        plot = plots[1, 1]
        plot.set_title("Training of the gates")
        plot.set_xlabel("step")
        plot.set_ylabel("share left")
        for place, detector in enumerate(("box", "uniform") if not trained.empty else ()):
            steps = trained[trained["detector"] == detector].groupby("step")[["tokens", "kept_in_box"]].mean()
            plot.plot(
                steps.index, steps["tokens"], label=f"{detector}: token-layers", color=PALETTE[place], linestyle="-", marker=""
            )
            plot.plot(
                steps.index,
                steps["kept_in_box"],
                label=f"{detector}: pillars in boxes, last layer",
                color=PALETTE[place],
                linestyle=":",
                marker="",
            )
        if not trained.empty:
            plot.legend()
    caption = (
        "Detectors of cars and pedestrians in lidar-like scenes; bars reach from the least to the greatest of the seeds. Random and norm halt as many "
        "tokens after each layer as the gates with box weights. Operations and time are in percent of the dense detector's, of the wider one's, too.",
        *results.note(),
    )
    return Figure(name, "Average precision under token halting", found, drawing, caption)
