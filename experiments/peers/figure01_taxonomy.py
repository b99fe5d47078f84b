"""Figure 1: taxonomy of techniques: what this version implements, by what each decides about, read off the classes.

The paper's picture is a drawing without numbers. This one has a leaf for every class of conf/modules but the nulls.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import PALETTE, Figure, panels, style

from . import table01_attributes as attributes

# The first verb that a class has says what it decides about.
BRANCHES = {
    "halt": "how deep a token goes",
    "fuse": "which tokens are one",
    "merge_cache": "which tokens are one",
    "set_bits": "at which precision a token is held",
    "skip_kv": "which K/V is kept",
    "evict": "which K/V is kept",
    "span": "how far back queries see",
    "applied": "the model itself: format, decoding",
}
_OTHER = "several of these: a preset"
COLUMNS = ["branch", "module", "class", "acts", "weights", "source", "quicksilver", "height"]
OURS = attributes.PAPER["QuickSilver"][1]


def rows() -> list[Row]:
    """None: there is nothing to run."""
    return []


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """A tree from left to right."""
    frame = taxonomy(attributes.techniques())
    leaves = len(frame)
    with style():
        drawing, axes = panels(size=(8.5, 0.27 * leaves + 0.6))
        axis = axes[0, 0]
        axis.set_axis_off()
        axis.set_xlim(0, 1)
        axis.set_ylim(leaves - 0.4, -1.4)
        heights = frame.groupby("branch", sort=False)["height"].agg(["mean", "min", "max"])
        root = (leaves - 1) / 2
        axis.text(0.0, root, "runtime\nacceleration,\nfrozen model", va="center", ha="left", size=8, weight="bold")
        for place, (branch, row) in enumerate(heights.iterrows()):
            colour = PALETTE[place % len(PALETTE)]
            axis.plot(
                [0.135, 0.17, 0.17, 0.2],
                [root, root, row["mean"], row["mean"]],
                color="#8a8a8a",
                linewidth=0.9,
                linestyle="-",
                marker="",
            )
            axis.text(0.205, row["mean"], str(branch), va="center", ha="left", size=8, color=colour, weight="bold")
            axis.plot(
                [0.475, 0.475], [row["min"] - 0.35, row["max"] + 0.35], color=colour, linewidth=2.2, linestyle="-", marker=""
            )
        for one in frame.to_dict("records"):
            weight = "bold" if one["quicksilver"] else "normal"
            axis.text(0.49, one["height"], one["module"], va="center", ha="left", size=7.5, weight=weight)
            axis.text(0.68, one["height"], one["acts"], va="center", ha="left", size=7)
            axis.text(
                0.80,
                one["height"],
                one["weights"].replace("frozen, coded copies beside them", "frozen, coded copies"),
                va="center",
                ha="left",
                size=7,
            )
        for x, text in ((0.205, "decides about"), (0.49, "module"), (0.68, "acts"), (0.80, "weights")):
            axis.text(x, -1, text, va="center", ha="left", size=7, style="italic", color="#555555")
    said = (
        "Every mechanism of conf/modules but the nulls, grouped by what it decides about; bold: the paper's four. acts anywhere: a decision reads a "
        "token and those before it; in prompts: it reads later tokens too; between passes: it changes the cache alone. None of them trains the model.",
        "Categories of the paper that are not implemented here: " + ", ".join(one.lower() for one, (_, classes) in attributes.PAPER.items() if not classes) + ".",
    )  # fmt: skip
    return Figure(name, "Figure 1: taxonomy of what is implemented", frame, drawing, said)


def taxonomy(found: pd.DataFrame) -> pd.DataFrame:
    """One row a class of `attributes.techniques`, by branch: `branch`, `module`, `class`, `acts`, `weights`, `source`, `quicksilver`, `height`."""
    branch = found["verbs"].map(lambda verbs: next((BRANCHES[verb] for verb in BRANCHES if verb in verbs.split(", ")), _OTHER))
    order = list(dict.fromkeys([*BRANCHES.values(), _OTHER]))
    found = found.assign(branch=branch, quicksilver=found["class"].isin(OURS))
    found = found.sort_values(
        ["branch", "module"], key=lambda column: column.map(order.index) if column.name == "branch" else column
    )
    return found.assign(height=range(len(found)))[COLUMNS]
