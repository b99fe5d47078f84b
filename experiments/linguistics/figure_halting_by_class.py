"""Halting over depth by word class, the paper's rule against two nulls: any tokens, and tokens as frequent at the same place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.reported import reported
from quicksilver.report.figure import GREY, PALETTE, Figure, panels, percent_of_shares, style, whiskers

from . import runs
from .table02_08_12_halting_by_class import CLASSES, result

MATCHED = "frequency × position"
DRAWN = tuple(CLASSES)[:6]


def rows() -> list[Row]:
    """The paper's rule with thresholds of this model."""
    return runs.halting(runs.MAIN)


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """One small picture a class."""
    (outcome,), (record,) = outcomes, runs.records(outcomes)
    found = result(record)
    lines, frames = [], []
    with style():
        drawing, axes = panels(2, 3, size=(9, 5), sharex=True, sharey=True)
        for axis, kind in zip(axes.flat, DRAWN, strict=True):
            title, claim = CLASSES[kind]
            if not found.has(kind):
                axis.set_axis_off()
                continue
            one = found.of(kind)
            depth = np.arange(1, len(one.by_layer) + 1)
            rate = 100 * np.array(one.by_layer)
            frame = pd.DataFrame({"class": kind, "layer": depth, "halted_pct": rate})
            for null, colour, label in (
                (MATCHED, PALETTE[3], "tokens as frequent, at the same place"),
                ("random", GREY, "any tokens"),
            ):
                over = one.over_depth[null]
                low, high, middle = (percent_of_shares(values) for values in (over.low, over.high, over.expected))
                axis.fill_between(depth, low, high, color=colour, alpha=0.3, linewidth=0, label=f"chance among {label}")
                axis.plot(depth, middle, color=colour, linestyle="-" if null == MATCHED else ":", marker="", linewidth=1)
                short = null.replace(" × ", "_")
                frame = frame.assign(**{f"{short}_pct": middle, f"{short}_pct_low": low, f"{short}_pct_high": high})
            axis.plot(depth, rate, color=PALETTE[1], linestyle="-", marker="o", markersize=2.5, label="halted")
            at = depth[found.layer - 1]
            share, least, most = (100 * end for end in (one.halted.value, one.halted.low, one.halted.high))
            axis.errorbar([at], [share], yerr=whiskers(share, least, most), color=PALETTE[1], capsize=3, linewidth=1.2)
            if claim is not None:
                axis.plot([at], [reported()[claim].values["halted_share_pct"]], marker="*", markersize=9, linestyle="", color="black", label="the paper, layer 15 of 30")  # fmt: skip
            axis.set_title(f"{title}: {one.tokens:,} tokens")
            axis.set_ylim(-3, 103)
            frames.append(frame)
            beyond = one.nulls[MATCHED]
            lines.append(f"{kind} {100 * beyond.excess:+.0f} [{100 * beyond.excess_low:+.0f} {100 * beyond.excess_high:+.0f}]")
        for axis in axes[1]:
            axis.set_xlabel("layer")
        for axis in axes[:, 0]:
            axis.set_ylabel("halted, %")
        axes[1, 2].legend(*axes[0, 0].get_legend_handles_labels(), loc="upper left", fontsize=6.5)  # content words leave the room
    said = (
        f"{outcome.row.technique}. Bands: 95% range of the same counts, on random tokens; bar: 95% interval at layer {found.layer}, "
        "clustered by sentence; star: the paper. Halted tokens take part again in the last layers, which is not drawn.",
        f"Points beyond chance among tokens as frequent at the same place, at layer {found.layer}: {', '.join(lines)}.",
    )
    return Figure(
        name,
        "Halting over depth by word class",
        pd.concat(frames),
        drawing,
        (*said, *runs.whose_tags(outcomes), *provenance.notes(outcomes)),
    )
