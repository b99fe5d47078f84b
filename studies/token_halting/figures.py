"""Figures of the detection study, made of its frames in results/detection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import BoundaryNorm

from quicksilver.experiments.drawing import horizontal, intervals, line, look
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.figure import GREY, PALETTE, SEQUENTIAL, Figure, legend_below, panels, style, whiskers

from . import tables as results
from .scenes import corners

CURVES = (
    ("box", "learned"), ("uniform", "learned"), ("random", "random"), ("norm", "norm"), ("static", "static"), ("gentle", "learned"),
    ("wide_gentle", "learned"),
)  # fmt: skip
ACROSS = {  # by column: in short, in full, and how many times the column
    "tokens": ("tokens", "token-layers computed, %", 100), "executed_flops_saved_pct": ("FLOPs", "executed FLOPs saved, %", 1),
    "encoder_latency_ratio": ("time", "encoder's time, % of the dense one's", 100),
}  # fmt: skip
KINDS = {"box": "Gates, box weights", "uniform": "Gates, uniform weights"}
ASKED = 0.9  # of the operations saved


@artefact(list)
def figure_detection(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure detection: average precision against token-layers and executed FLOPs, with and without recycling, and what training did.

    Curves of AP against tokens, operations and, where it was timed, wall clock, and token-layers left by training step.
    """
    found = results.summary()
    timed = "encoder_latency_ratio" in found
    with style():
        drawing, plots = panels(2, 2 + timed, size=(10.6 if timed else 7.4, 6.0))
        for row, ap in zip(plots, ("ap", "ap_unrecycled"), strict=True):
            _curves(row[0], found, "tokens", ap)
            row[0].set_ylabel("average precision")
            if timed:
                _curves(row[2], found, "encoder_latency_ratio", ap)
        _curves(plots[0, 1], found, "executed_flops_saved_pct", "ap")
        _training(plots[1, 1], results.frame("curves"))
        legend_below(drawing, plots[0, 0].get_legend_handles_labels()[0], ncols=3)
    caption = (
        "Detectors of cars and pedestrians in lidar-like scenes. Recycled: the head reads the frozen states of halted tokens; else it reads none of "
        "them. Bars: least to greatest of the seeds. Random and norm halt as many tokens after each layer as the gates with box weights. Operations "
        "and time are in percent of the dense detector's, also for the wider one.",
        *results.note(),
    )
    return Figure(name, "Average precision under token halting", found, drawing, caption, finding=_finding(found))


def _finding(found: pd.DataFrame) -> str:
    """What the wider detector finds in less time than the dense one, if it does."""
    if not {"detector", "encoder_latency_ratio"} <= set(found):
        return ""
    dense = found.loc[found["detector"] == "control", "ap"].max()
    better = found[(found["detector"] == "wide_gentle") & (found["encoder_latency_ratio"] < 1) & (found["ap"] > dense)]
    if better.empty:
        return ""
    best = better.loc[better["ap"].idxmax()]
    return f"Wider and halting: AP {best['ap']:.2f} in {100 * best['encoder_latency_ratio']:.0f}% of the encoder's time; the dense detector has {dense:.2f}"


def _curves(plot: Any, found: pd.DataFrame, across: str, ap: str) -> None:
    """AP of every policy against a column, with the dense detector's as a line."""
    short, label, times = ACROSS[across]
    plot.set(title=f"{'Recycled' if ap == 'ap' else 'Not recycled'}: {short}", ylim=(-0.02, 0.7), xlabel=label)
    if found.empty:
        return
    dense = found.loc[found["detector"] == "control", ap].iloc[0]
    plot.axhline(dense, color=GREY, linewidth=0.9, label="dense, trained as long")
    for place, key in enumerate(CURVES):
        points = found[(found["detector"] == key[0]) & (found["policy"] == key[1])].dropna(subset=[across]).sort_values(across)
        if points.empty:
            continue
        bars = look(place, label=results.LABELS[key], elinewidth=0.7, capsize=1.5)
        intervals(plot, times * points[across], points, ap, **bars)


def _training(plot: Any, trained: pd.DataFrame) -> None:
    """Share of token-layers left, and of pillars in boxes, by step."""
    plot.set(title="Training of the gates", xlabel="step", ylabel="share left")
    if trained.empty:
        return
    for place, detector in enumerate(KINDS):
        steps = trained[trained["detector"] == detector].groupby("step")[["tokens", "kept_in_box"]].mean()
        for column, said, dash in (("tokens", "token-layers", "-"), ("kept_in_box", "pillars in boxes, last layer", ":")):
            line(plot, steps.index, steps[column], label=f"{detector}: {said}", color=PALETTE[place], linestyle=dash)
    plot.legend()


@artefact(list)
def figure_detection_scene(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure detection_scene: one scene from above, each pillar coloured by the last layer that it went through.

    The points, then the depth of each pillar under two kinds of gates, with the labelled boxes.
    """
    scene, boxes = results.frame("scene"), results.frame("scene_boxes")
    with style():
        drawing, plots = panels(1, 3, size=(7.4, 2.9), sharex=True, sharey=True)
        if not scene.empty:
            grid = scene.pivot(index="x", columns="y", values="log_points")
            size = float(np.diff(grid.index).min())
            half, low, high = size / 2, scene[["x", "y"]].min(), scene[["x", "y"]].max()
            extent = (high["y"] + half, low["y"] - half, low["x"] - half, high["x"] + half)
            shown = plots[0, 0].imshow(grid.to_numpy()[:, ::-1], origin="lower", extent=extent, cmap="Greys")
            plots[0, 0].set_title(f"Points: white 0, black {np.expm1(grid.to_numpy()).max():.0f} (log)")
            n_layers = int(results.facts()["layers"])
            norm = BoundaryNorm(np.arange(n_layers + 1) + 0.5, matplotlib.colormaps[SEQUENTIAL].N)
            for plot, (kind, said) in zip(plots[0, 1:], KINDS.items(), strict=True):
                depth = scene.pivot(index="x", columns="y", values=f"halt_layer_{kind}")
                layers = depth.to_numpy()[:, ::-1] + 1
                shown = plot.imshow(layers, origin="lower", extent=extent, cmap=SEQUENTIAL, norm=norm)
                plot.set_title(said)
            bar = drawing.colorbar(shown, ax=plots[0, 1:], ticks=range(1, n_layers + 1), shrink=0.8)
            bar.set_label(f"layers gone through, of {n_layers}")
            for plot in plots.flat:
                plot.grid(visible=False)
                _outline(plot, boxes)
                plot.set_xlabel("left, m")
            plots[0, 0].set_ylabel("ahead, m")
    caption = (
        "The sensor stands below the picture. Boxes that are labelled are outlined: cars red, pedestrians white on black. A token that goes "
        "to the end has the brightest colour.",
        *results.note(),
    )
    return Figure(name, "Which pillars go how far", scene, drawing, caption, finding=_finding_of_scene(scene))


def _finding_of_scene(scene: pd.DataFrame) -> str:
    """How many pillars in labelled boxes go to the end under either kind of gates."""
    if scene.empty:
        return ""
    inside, n_layers = scene[scene["in_box"].astype(bool)], int(results.facts()["layers"])
    through = {kind: int((inside[f"halt_layer_{kind}"] >= n_layers - 1).sum()) for kind in KINDS}
    who = f"of {len(inside)} pillars in labelled boxes go through all {n_layers} layers"
    return f"With box weights {through['box']} {who}, with uniform weights {through['uniform']}"


def _outline(plot: Any, boxes: pd.DataFrame) -> None:
    for box in boxes.to_dict("records"):
        (ring,) = corners(np.array([[box[name] for name in ("x", "y", "length", "width", "yaw")]]))
        ring = np.append(ring, ring[:1], axis=0)
        colours = ("#d62828",) if box["label"] == 0 else ("black", "white")
        for width, colour in zip((1.6, 0.7), colours, strict=False):
            line(plot, ring[:, 1], ring[:, 0], color=colour, linewidth=width)


@artefact(list)
def figure_detection_size(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure detection_size: how much of the operations that halting saves is saved of the encoder's time, by the detector's size.

    A curve for each number of pillars and of scenes a pass, by width.
    """
    made = results.frame("sizes")
    found = made if made.empty else results.realized(made)
    with style():
        drawing, plots = panels(1, 1, size=(5.2, 3.4))
        plot = plots[0, 0]
        plot.set(xlabel="width of the encoder", ylabel="time saved ÷ FLOPs saved", ylim=(0, 1.1))
        plot.set_xscale("log", base=2)
        groups = [] if found.empty else found.groupby(["pillars", "scenes_a_pass"])
        for place, ((pillars, scenes), points) in enumerate(groups):
            said = f"{pillars} pillars, {'one scene' if scenes == 1 else f'{scenes} scenes'} a pass"
            points = points.sort_values("width")
            share = 100 / points["flops_saved_pct"]
            # Less time is more saved: the high end of the ratio is the low end of the bar.
            ends = (points["latency_ratio"] - points[f"latency_ratio_{end}"] for end in ("high", "low"))
            spread = whiskers(points["realized"], *(points["realized"] + end * share for end in ends))
            bars = look(place, label=said, elinewidth=0.7, capsize=1.5)
            plot.errorbar(points["width"], points["realized"], yerr=spread, **bars)
        if not found.empty:
            widths = sorted(set(found["width"]))
            plot.set_xticks(widths, [str(width) for width in widths])
            plot.minorticks_off()
            horizontal(plot, ASKED, color=GREY, linewidth=0.9)
            plot.legend(loc="lower right")
    caption = (
        "Encoders of 4 layers with random weights. 35%, 20% and 15% of the tokens are left after the first three layers. Bars: quartiles of the rounds. "
        f"Grey line: {ASKED:g} of the saved FLOPs are saved time, a mark set for this study.",
        f"Made by `{results.COMMAND} --sizes-only`.",
    )
    return Figure(name, "Time saved by halting, by size", found, drawing, caption, finding=_finding_of_size(found))


def _finding_of_size(found: pd.DataFrame) -> str:
    """How much of the saved operations is saved time in the narrowest encoder and in the widest."""
    if found.empty:
        return ""
    least = found.groupby("width")["realized"].min().sort_index()
    return f"At width {least.index[0]} at least {least.iloc[0]:.2f} of the saved FLOPs are saved time; at width {least.index[-1]}, {least.iloc[-1]:.2f}"
