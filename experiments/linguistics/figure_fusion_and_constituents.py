"""Precision@Fusion over depth on gold trees: the closest neighbours of every layer against random ones and ones with the same tags."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.reported import reported
from quicksilver.report.figure import GREY, PALETTE, Figure, panels, percent_of_shares, style, whiskers

from . import runs
from .table09_13_fusion_and_constituents import DEFINITIONS, fused, result

DRAWN = ("short", "phrase", "np_vp")


def rows() -> list[Row]:
    """Fusion at the paper's three depths; the distances of neighbours are in each of these records."""
    return runs.fusion()


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """A picture a definition."""
    there = runs.records(outcomes)
    found = result(there[0])
    layers = np.array([one.layer for one in found.closest if one.precision])
    depth = there[0].model.layers
    frames = []
    with style():
        drawing, axes = panels(1, 3, size=(10, 3.4), sharey=True)
        for axis, definition in zip(axes[0], DRAWN, strict=True):
            chosen = [one for one in found.closest if one.precision]
            share = 100 * np.array(
                [[getattr(one.precision[definition], end) for end in ("value", "low", "high")] for one in chosen]
            )
            frame = pd.DataFrame({"definition": definition, "layer": layers})
            frame[["closest_pct", "closest_pct_low", "closest_pct_high"]] = share
            for null, colour, dash, label in (
                ("random", GREY, ":", "random neighbours"),
                ("same tags", PALETTE[3], "--", "neighbours with the same tags"),
            ):
                band = percent_of_shares(
                    [[getattr(one.nulls[definition][null], end) for end in ("expected", "low", "high")] for one in chosen]
                )
                axis.fill_between(layers, band[:, 1], band[:, 2], color=colour, alpha=0.3, linewidth=0)
                axis.plot(layers, band[:, 0], color=colour, linestyle=dash, marker="", label=label)
                short = null.replace(" ", "_")
                frame[[f"{short}_pct", f"{short}_pct_low", f"{short}_pct_high"]] = band
            axis.errorbar(layers, share[:, 0], yerr=whiskers(*share.T), color=PALETTE[1], linestyle="-", marker="o", capsize=2, elinewidth=0.8, label=f"the closest {found.share:.0%} of neighbours")  # fmt: skip
            for place, record in enumerate(there):
                one = fused(record)
                if one is not None:
                    axis.plot([one.layer], [100 * one.precision[definition].value], marker="D", markersize=6, markerfacecolor="none", color="black", linestyle="", label="really fused there" if place == 0 else None)  # fmt: skip
            if definition == "short":
                for place, (layer, fraction) in enumerate(runs.PAPER_DEPTHS.items()):
                    claim = reported()[f"table9.layer{layer}"].values
                    at = fraction * depth
                    axis.plot([at], [claim["precision_pct"]], marker="*", markersize=9, color="black", linestyle="", label="the paper, fused" if place == 0 else None)  # fmt: skip
                    axis.plot([at], [claim["random_precision_pct"]], marker="x", markersize=6, color="black", linestyle="", label="the paper, random" if place == 0 else None)  # fmt: skip
            axis.set_title(
                DEFINITIONS[definition].replace("constituent", "constituent\n", 1).replace("\n of", "\nof"), fontsize=8
            )
            axis.set_xlabel("layer")
            frames.append(frame)
        axes[0, 0].set_ylabel("inside one constituent, %")
        axes[0, 0].set_ylim(25, 100)
        axes[0, 0].legend(loc="upper left", fontsize=6, ncols=2)
    one = found.closest[-1]
    said = (
        "Pairs of two words of one sentence. Bands: 95% range of as many random pairs; bars: 95% intervals clustered by sentence. "
        f"Left out of the closest, from the first layer to layer {one.layer}: {_within(found.closest[0]):.0f} to {_within(one):.0f}% are pairs "
        "inside one word.",
    )
    return Figure(
        name, "Precision@Fusion over depth, gold trees", pd.concat(frames), drawing, (*said, *provenance.notes(outcomes))
    )


def _within(one: object) -> float:
    return 100 * one.within_word / one.pairs  # type: ignore[attr-defined]
