"""Figure detection_scene: one scene from above, each pillar coloured by the last layer that it went through."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import BoundaryNorm

from quicksilver.report.artefacts import Outcome
from quicksilver.report.figure import SEQUENTIAL, Figure, panels, style

from . import results

KINDS = {"box": "Gates, box weights", "uniform": "Gates, uniform weights"}

rows = results.no_rows


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """The points, then the depth of each pillar under two kinds of gates, with the labelled boxes."""
    scene, boxes = results.frame("scene"), results.frame("scene_boxes")
    with style():
        drawing, plots = panels(1, 3, size=(7.4, 2.9), sharex=True, sharey=True)
        if not scene.empty:
            grid = scene.pivot(index="x", columns="y", values="log_points")
            size = float(np.diff(grid.index).min())
            half, low, high = size / 2, scene[["x", "y"]].min(), scene[["x", "y"]].max()
            extent = (high["y"] + half, low["y"] - half, low["x"] - half, high["x"] + half)
            shown = plots[0, 0].imshow(grid.to_numpy()[:, ::-1], origin="lower", extent=extent, cmap="Greys")
            plots[0, 0].set_title("Points in a pillar, log")
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
    return Figure(name, "Which pillars go how far", scene, drawing, caption)


def _outline(plot: object, boxes: pd.DataFrame) -> None:
    for box in boxes.to_dict("records"):
        cos, sin = np.cos(box["yaw"]), np.sin(box["yaw"])
        turn = np.array([[cos, -sin], [sin, cos]])
        ring = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1], [1, 1]]) / 2 * [box["length"], box["width"]] @ turn.T
        ring += [box["x"], box["y"]]
        colours = ("#d62828",) if box["label"] == 0 else ("black", "white")
        for width, colour in zip((1.6, 0.7), colours, strict=False):
            plot.plot(ring[:, 1], ring[:, 0], color=colour, linewidth=width, linestyle="-", marker="")  # type: ignore[attr-defined]
