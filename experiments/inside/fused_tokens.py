"""Tokens that are fused into a neighbour, layer by layer, drawn. Everything is read from `Record.signals`; figures 2, 11 and 12 share it."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from quicksilver.report.artefacts import Row
from quicksilver.report.figure import PALETTE

from . import sentences

ALONE, MERGED, SUPER = PALETTE[2], PALETTE[1], PALETTE[0]


def fusing() -> Row:
    """Fusion alone, half of each prompt in several steps: a setting that shows the mechanism, not one that pays."""
    overrides = (
        "modules.token_fusion.rule=capacity",
        "modules.token_fusion.tau_fuse=null",
        "modules.token_fusion.fused_share=0.5",
    )
    return Row(
        *("", "", "fusing", "Token fusion in steps"),
        ("protocol=continuation", "modules=[token_fusion]", *overrides, "modules.token_fusion.every=2", "measure=signals"),
        ("token_fusion",),
    )


def lives(signals: pd.DataFrame) -> pd.DataFrame:
    """A row a token: `slot`, `token`, `until`, the last layer (from 1) that it stands in by itself, `into`, the slot that carries it from
    then on (its own where nothing happened), `tokens`, how many it stands for in the end."""
    carriers = sentences.layers(signals, "carrier")
    own = carriers.eq(carriers.columns, axis=1)
    until = own.sum() - 1  # layer 0 is before the first; who was merged away never comes back
    last = carriers.index[-1]
    into = [int(carriers.loc[min(until[slot] + 1, last), slot]) for slot in carriers.columns]
    first = signals[signals["layer"] == 0].set_index("slot")["token"]
    found = pd.DataFrame({"slot": carriers.columns, "token": first.to_numpy(), "until": until.to_numpy(), "into": into})
    found["tokens"] = found["slot"].map(carriers.loc[last].value_counts()).fillna(0).astype(int)
    return found


def sizes(signals: pd.DataFrame) -> pd.DataFrame:
    """How many original tokens each stands for, by layer (from 0) and slot; 0 once a neighbour carries it."""
    carriers = sentences.layers(signals, "carrier")
    counted = [carriers.loc[layer].value_counts().reindex(carriers.columns, fill_value=0) for layer in carriers.index]
    return pd.DataFrame(counted, index=carriers.index)


def phrases(signals: pd.DataFrame) -> pd.Series:
    """By the slot of each super-token at the end: the words that it carries."""
    last = signals[signals["layer"] == signals["layer"].max()].sort_values("slot")
    carried = last.groupby("carrier")["token"].agg(["".join, "size"])
    return carried.loc[carried["size"] > 1, "join"]


def phrase(text: str, most: int = 30) -> str:
    """The words of a super-token on one line, cut after `most` characters."""
    words = " ".join(text.split()).replace("$", r"\$") or "⏎"
    return words if len(words) <= most else f"{words[: most - 1]}…"


def draw_lives(axes: Axes, signals: pd.DataFrame, slots: range, *, across: bool) -> None:
    """The lives of the tokens in `slots`: lines along the layers, arrows where one goes into its neighbour.

    Args:
        across: layers from left to right, a row a token; else upwards, a column a token.
    """
    found, size = lives(signals).set_index("slot"), sizes(signals)
    n_layers = int(size.index[-1])

    def place(slot: float, layer: float) -> tuple[float, float]:
        return (layer, slot) if across else (slot, layer)

    def line(slot: int, start: float, stop: float, **look: object) -> None:
        (x0, y0), (x1, y1) = place(slot, start), place(slot, stop)
        axes.plot([x0, x1], [y0, y1], marker="", solid_capstyle="butt", **look)  # type: ignore[arg-type]

    for slot in slots:
        until, into = int(found.loc[slot, "until"]), int(found.loc[slot, "into"])
        column = size[slot]
        grown = column[column > 1]
        first = int(grown.index[0]) - 0.5 if len(grown) else until + 0.5
        merged = into != slot
        line(
            slot,
            0.5,
            min(first, until + 0.5),
            color=MERGED if merged else ALONE,
            linestyle=(0, (3, 1)) if merged else "-",
            linewidth=1.0,
        )
        for layer in range(int(first + 0.5), until + 1) if len(grown) else ():
            line(slot, layer - 0.5, layer + 0.5, color=SUPER, linestyle="-", linewidth=1.2 + 0.9 * (column[layer] - 1))
        if merged:
            end = until + 0.5
            axes.plot(*place(slot, end), marker="x", color=MERGED, markersize=4.5, markeredgewidth=1.2, linestyle="")
            if into in slots:
                # Far arcs are flatter, so that they stay near their layer.
                bend = 0.5 / (into - slot) ** 0.25 if across else -0.5 / (into - slot) ** 0.5
                arrow = FancyArrowPatch(
                    place(slot, end), place(into, end), connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=5.5,
                    color=MERGED, linewidth=0.8, shrinkA=2, shrinkB=1, zorder=3,
                )  # fmt: skip
                axes.add_patch(arrow)
    along, beside = (axes.set_xlim, axes.set_ylim) if across else (axes.set_ylim, axes.set_xlim)
    along(0.5, n_layers + 0.5)
    beside(*((slots[-1] + 0.7, slots[0] - 0.7) if across else (slots[0] - 0.7, slots[-1] + 0.7)))
    axes.grid(visible=False)


def lives_legend(*, short: bool = False) -> list[Line2D]:
    """Handles for a legend of `draw_lives`; `short` for a narrow place."""
    merged, together = (
        ("merged", "super-token")
        if short
        else ("goes into a neighbour (×, arrow)", "super-token: the thicker, the more it carries")
    )
    return [
        Line2D([], [], color=ALONE, linestyle="-", marker="", linewidth=1.2, label="stays alone"),
        Line2D(
            [],
            [],
            color=MERGED,
            linestyle=(0, (3, 1)),
            marker="x",
            markersize=4.5,
            linewidth=1.0,
            label=merged,
        ),
        Line2D([], [], color=SUPER, linestyle="-", marker="", linewidth=3, label=together),
    ]
