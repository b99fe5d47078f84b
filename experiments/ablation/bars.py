"""What mechanisms do to time, operations and perplexity, as bars beside the paper's numbers. Figures 6 and 7 have this shape.

They draw the records of Table 11: the same rows, so the same runs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from quicksilver.report.artefacts import Outcome, Row, find
from quicksilver.report.claims.reported import reported
from quicksilver.report.comparison import MEASURED
from quicksilver.report.comparison import frame as ablation_frame
from quicksilver.report.figure import GREY, HATCHES, PALETTE, Figure, panels, style, whiskers
from quicksilver.report.provenance import notes
from quicksilver.report.table import number

PROTOCOLS = {"all": "protocol all", "continuation": "protocol continuation"}
# column of the frame, its interval (None: none), what the axis says
MEASURES = (
    ("speedup_pct", "time gone\n(% of dense)"),
    ("paper_flops_saved_pct", "operations gone,\npaper's ledger (%)"),
    ("delta_ppl_pct", "perplexity added\n(% of dense)"),
)
_REPORTED = {
    "speedup_pct": "reported_speedup_pct",
    "paper_flops_saved_pct": "reported_flops_saved_pct",
    "delta_ppl_pct": "reported_delta_ppl_pct",
}
_INTERVAL = ("speedup_pct", "delta_ppl_pct")


def rows(prefix: str) -> list[Row]:
    """The rows of Table 11 whose key begins with `prefix` (`isolated.`, `cumulative.`), and dense inference."""
    return [row for row in find("table", "11").experiment.rows() if row.key == "baseline" or row.key.startswith(prefix)]


def figure(outcomes: Sequence[Outcome], name: str, title: str, sentence: str) -> Figure:
    """Three measures (rows) under both protocols (columns), a bar for each row of Table 11 that is not dense inference."""
    frame = drawn(outcomes)
    with style():
        drawing, axes = panels(len(MEASURES), len(PROTOCOLS), size=(8.5, 6.4), sharey="row", sharex="col")
        for column, (panel, heading) in enumerate(PROTOCOLS.items()):
            members = frame[frame["panel"] == panel].to_dict("records")
            for place, (measure, label) in enumerate(MEASURES):
                _bars(axes[place, column], members, measure)
                if column == 0:
                    axes[place, column].set_ylabel(label)
            axes[0, column].set_title(heading)
            names = [textwrap.fill(row["technique"], 12) for row in members]
            axes[-1, column].set_xticks(range(len(members)), names, rotation=0)
        for line in axes:
            # Room for the numbers on the bars, in both directions, and for markers at 0.
            low, high = line[0].get_ylim()
            line[0].set_ylim(low - (0.12 if low < 0 else 0.05) * (high - low), high + 0.16 * (high - low))
        handles = [
            Patch(
                facecolor=PALETTE[2],
                edgecolor="black",
                linewidth=0.5,
                label="measured, 95% interval; of time: quartiles of rounds",
            ),
            Line2D(
                [],
                [],
                linestyle="",
                marker="D",
                markerfacecolor="white",
                markeredgecolor=PALETTE[1],
                label="the paper (GPT-2 774M, A100)",
            ),
            Patch(facecolor="#e4e4e4", label="noise floor of the clock"),
        ]
        drawing.set_layout_engine("constrained", rect=(0, 0, 1, 0.95))  # room for the legend
        drawing.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.07, 1.0), ncols=3, borderaxespad=0)
    caption = (
        sentence,
        "Time: decrease of the wall clock of one batch against dense inference, which alternates with it; below 0 it takes longer. Operations: "
        "decrease in the paper's ledger (Appendix J), the one that its numbers are of. Perplexity: increase in percent of dense perplexity; the "
        f"paper's are taken in percent of its {reported()['table3.baseline'].values['ppl']:g}.",
        *(
            f"{heading[0].upper()}{heading[1:]}: {' '.join(notes([one for one in outcomes if one.row.panel == panel]))}"
            for panel, heading in PROTOCOLS.items()
        ),
    )
    return Figure(name, title, frame, drawing, caption)


def drawn(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """A row a bar: what was measured with its interval, what the paper says, or why there is no record."""
    frame = ablation_frame(outcomes)
    frame = frame[frame["key"] != "baseline"].copy()
    base = reported()["table3.baseline"].values["ppl"]
    frame["reported_delta_ppl_pct"] = 100 * frame["reported_delta_ppl"].astype(float) / base
    columns = ["panel", "key", "technique", "status"]
    for measure, _ in MEASURES:
        columns += [measure, *(f"{measure}_{end}" for end in ("low", "high") if measure in _INTERVAL), _REPORTED[measure]]
    return frame[[*columns, "noise_floor_pct", "executed_flops_saved_pct", "record", "dense_record"]].reset_index(drop=True)


def _bars(axes: Axes, members: Sequence[Mapping[str, object]], measure: str) -> None:
    axes.axhline(0, color="black", linewidth=0.8, linestyle="-", marker="")
    for place, row in enumerate(members):
        value, stated = number(row, measure), number(row, _REPORTED[measure])
        if row["status"] != MEASURED:
            reason = textwrap.fill(str(row["status"]), 12)
            axes.text(
                place,
                0.5,
                reason,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="center",
                fontsize=6.5,
                color=GREY,
                style="italic",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
        elif value is not None:
            floor = number(row, "noise_floor_pct") if measure == "speedup_pct" else None
            if floor is not None:
                axes.bar(place, 2 * floor, 0.9, bottom=-floor, color="#e4e4e4", zorder=0.5)
            low, high = number(row, f"{measure}_low"), number(row, f"{measure}_high")
            hatch = HATCHES[1 + place % (len(HATCHES) - 1)]
            axes.bar(place, value, 0.55, color=PALETTE[2], edgecolor="white", hatch=hatch, linewidth=0.5)
            axes.bar(place, value, 0.55, facecolor="none", edgecolor="black", linewidth=0.5)
            if low is not None and high is not None:
                axes.errorbar(
                    place,
                    value,
                    yerr=whiskers(value, low, high),
                    color="black",
                    linewidth=1,
                    capsize=2,
                    marker="",
                    linestyle="",
                )
            end = value if low is None or high is None else (high if value >= 0 else low)
            axes.annotate(
                f"{value:+.1f}", (place, end), xytext=(0, 3 if value >= 0 else -3), textcoords="offset points", ha="center",
                va="bottom" if value >= 0 else "top", fontsize=7, weight="bold",
            )  # fmt: skip
        if stated is not None:
            axes.plot(
                place + 0.36,
                stated,
                linestyle="",
                marker="D",
                markersize=4.5,
                markerfacecolor="white",
                markeredgecolor=PALETTE[1],
                zorder=4,
            )
    axes.set_xlim(-0.6, len(members) - 0.4)
    axes.grid(visible=False, axis="x")
