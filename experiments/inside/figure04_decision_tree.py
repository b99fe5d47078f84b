"""Figure 4: the decision tree of halting and merging, with the measured share of tokens that goes down each branch.

The record is that of Table 11's last row, all four mechanisms together; what the paper says about shares of tokens is answered here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from quicksilver.records.record import TRACE, Record
from quicksilver.report.artefacts import Outcome, Row, find
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.figure import HATCHES, PALETTE, Figure, panels, style
from quicksilver.report.provenance import notes

from . import sentences, trace_counts

READS = (TRACE,)

PANEL, KEY = "continuation", "cumulative.quantization"
BRANCHES = {"halted": "halted", "merged": "merged", "full": "computed in full"}
LOOK = {"halted": ("#e9c46a", HATCHES[1]), "merged": ("#83b692", HATCHES[2]), "full": (PALETTE[0], "")}
DEEP = 20 / 30  # "at depth ℓ > 20" (K), in models of 30 layers


def rows() -> list[Row]:
    """Table 11's last row."""
    return [row for row in find("table", "11").experiment.rows() if (row.panel, row.key) == (PANEL, KEY)]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Left the tree, right what the tokens of the prompts are doing in each layer."""
    _, record = sentences.measured(outcomes, KEY)
    frame, layers = branches(record), trace_counts.by_layer(record)
    prompts = layers[layers["part"] == "prompt"].groupby("layer", as_index=False)[["tokens", "active", "halted", "carried"]].sum()
    with style():
        drawing, axes = panels(1, 2, size=(9, 4.1), width_ratios=[1.55, 1])
        _tree(axes[0, 0], frame)
        _layers(axes[0, 1], prompts)
    resumed = trace_counts.first_resumed_layer(record)
    alpha, quality = trace_counts.decay_per_layer(layers[layers["part"] == "prompt"], resumed - 1)
    after = frame[(frame["part"] == "continuation") & (frame["branch"] == "halted")].iloc[0]
    caption = (
        "Left: what was decided first about each token of a prompt, halting before merging (2.4); shares are of all prompt tokens, with 95% "
        "intervals over windows. A token is stable when its drift and its entropy are below their thresholds at some layer, and merged when it is "
        "among the share of its prompt that lies closest to a neighbour at the layer where fusion acts.",
        f"Right: the same tokens by layer. From layer {resumed} on halted tokens take part again (resume_layers)."
        if resumed <= record.model.layers
        else "Right: the same tokens by layer.",
        f"Computed tokens decay by {alpha.value:.3f} [{alpha.low:.3f} {alpha.high:.3f}] a layer up to layer {resumed - 1}, were it exponential "
        f"(R² {quality:.2f}); the paper says 0.05 to 0.1 (K).",
        f"Of the tokens after the prompts {after['share_pct']:.1f}% [{after['low']:.1f} {after['high']:.1f}] halt; none may be merged, because that looks ahead.",
        *notes(outcomes),
    )
    both = pd.concat([frame, prompts.assign(part="prompt, by layer")], ignore_index=True)
    return Figure(name, "Figure 4: halting, merging, or neither", both, drawing, caption)


def branches(record: Record) -> pd.DataFrame:
    """A row a part and branch: share of its tokens with interval, and the mean layer after which it was decided."""
    counted = trace_counts.by_branch(record)
    rows = []
    for part, windows in counted.groupby("part", sort=False):
        for branch in BRANCHES:
            share = trace_counts.share_pct(windows[branch], windows["tokens"])
            total = windows[branch].sum()
            mean = windows[f"{branch}_layers"].sum() / total if total and branch != "full" else None
            rows.append(
                {
                    "part": part,
                    "branch": branch,
                    "share_pct": share.value,
                    "low": share.low,
                    "high": share.high,
                    "mean_layer": mean,
                }
            )
    return pd.DataFrame(rows)


def _tree(axes: Axes, frame: pd.DataFrame) -> None:
    """Questions left to right, outcomes below the answer that leads to them; arrows as wide as their share."""
    share = frame[frame["part"] == "prompt"].set_index("branch")
    asked_second = 100 - share.loc["halted", "share_pct"]
    axes.set(xlim=(-0.05, 10.65), ylim=(0.3, 5.7))
    axes.axis("off")
    _arrow(axes, (1.5, 4.9), (1.95, 4.9), 100, "")
    _arrow(axes, (4.25, 4.9), (6.1, 4.9), asked_second, f"no {asked_second:.1f}%")
    _arrow(axes, (3.1, 4.2), (2.6, 2.25), share.loc["halted", "share_pct"], "yes")
    _arrow(axes, (7.1, 4.2), (6.1, 2.25), share.loc["merged", "share_pct"], "yes")
    _arrow(axes, (8.1, 4.2), (9.1, 2.25), share.loc["full", "share_pct"], "no")
    _box(axes, (0.75, 4.9), 1.5, 1.4, "every token\nof a prompt")
    _box(axes, (3.1, 4.9), 2.3, 1.4, "stable?\ndrift < τ and\nentropy < τ")
    _box(axes, (7.6, 4.9), 3.0, 1.4, "like its neighbour?\namong the closest\nof its prompt")
    for branch, place in (("halted", 2.2), ("merged", 5.7), ("full", 9.2)):
        row = share.loc[branch]
        after = f"mean layer {row['mean_layer']:.1f}" if pd.notna(row["mean_layer"]) else "in every layer"
        text = f"{BRANCHES[branch]}\n{row['share_pct']:.1f}%  [{row['low']:.1f} {row['high']:.1f}]\n{after}"
        _box(axes, (place, 1.3), 2.8, 1.8, text, LOOK[branch])


def _box(
    axes: Axes, centre: tuple[float, float], width: float, height: float, text: str, look: tuple[str, str] | None = None
) -> None:
    """Words in a frame; an outcome has a band of the colour that it has on the right."""
    corner = (centre[0] - width / 2, centre[1] - height / 2)
    axes.add_patch(Rectangle(corner, width, height, facecolor="white", edgecolor="black", linewidth=0.9, zorder=3))
    band = 0.35 if look else 0.0
    if look:
        axes.add_patch(Rectangle(corner, width, band, facecolor=look[0], hatch=look[1], edgecolor="white", linewidth=0, zorder=3))
        axes.add_patch(Rectangle(corner, width, band, facecolor="none", edgecolor="black", linewidth=0.9, zorder=3.5))
    middle = (centre[0], centre[1] + band / 2)
    axes.text(
        *middle, text, ha="center", va="center", fontsize=7.5, zorder=4, linespacing=1.35, weight="bold" if look else "normal"
    )


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], share: float, label: str) -> None:
    arrow = {
        "arrowstyle": "-|>",
        "linewidth": 0.8 + share / 14,
        "color": "#8a8a8a",
        "shrinkA": 0,
        "shrinkB": 0,
        "mutation_scale": 10 + share / 8,
    }
    axes.annotate("", xy=end, xytext=start, arrowprops=arrow, zorder=2)
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    if label:
        axes.text(
            *middle,
            label,
            ha="center",
            va="center",
            fontsize=7,
            zorder=4,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )


def _layers(axes: Axes, counts: pd.DataFrame) -> None:
    """Stacked shares of what prompt tokens do in each layer."""
    below = pd.Series(0.0, index=counts.index)
    for name, column in (("full", "active"), ("merged", "carried"), ("halted", "halted")):
        colour, hatch = LOOK[name]
        height = 100 * counts[column] / counts["tokens"]
        label = {"full": "computed", "merged": "carried by a neighbour", "halted": "halted"}[name]
        axes.bar(
            counts["layer"], height, 1.0, bottom=below, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4, label=label
        )
        below = below + height
    axes.set(xlabel="layer", ylabel="tokens of the prompts (%)", xlim=(0.5, counts["layer"].max() + 0.5), ylim=(0, 100))
    axes.grid(visible=False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=1, reverse=True)


# --- what the paper says about shares of tokens ---------------------------------------------------------------------------------


def _record(panel: Mapping[str, Outcome]) -> Record | None:
    return panel[KEY].record


def fused_share(panel: Mapping[str, Outcome]) -> Estimate | None:
    """Prompt tokens that a neighbour carries in the last third of the layers."""
    return _share(panel, "carried", DEEP)


def _share(panel: Mapping[str, Outcome], column: str, beyond: float, of: str = "tokens") -> Estimate | None:
    record = _record(panel)
    if record is None:
        return None
    layers = trace_counts.by_layer(record)
    deep = (
        layers[(layers["part"] == "prompt") & (layers["layer"] > beyond * record.model.layers)]
        .groupby("window")
        .sum(numeric_only=True)
    )
    return trace_counts.share_pct(deep[column], deep[of])


ANSWERS = {"k.fused.fused_share_pct": AnsweredBy(PANEL, KEY, of=fused_share)}
