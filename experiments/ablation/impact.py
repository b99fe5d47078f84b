"""Figures 6 and 7: what mechanisms do to time, operations and perplexity, as bars beside the paper's numbers: the records of Table 11.

What the paper says elsewhere about single mechanisms and about all four together is answered here too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from operator import sub
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from quicksilver.records.times import TimedProcess, one_by_one
from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row, artefact, find
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import HATCHES, PALETTE, Figure, panels, style
from quicksilver.report.provenance import notes, timings
from quicksilver.report.table import ENDS, number, numbers

from .. import drawing as draw
from ..cost.costs import set_against
from .techniques import MECHANISMS

PROTOCOLS = {"all": "protocol all", "continuation": "protocol continuation"}
# column of the frame -> the paper's column, what the axis says
MEASURES = {
    "speedup_pct": ("reported_speedup_pct", "time saved\n(% of dense)"),
    "paper_flops_saved_pct": ("reported_flops_saved_pct", "operations saved,\npaper's ledger (%)"),
    "delta_ppl_pct": ("reported_delta_ppl_pct", "perplexity added\n(% of dense)"),
}
_DIAMOND: dict[str, Any] = {"linestyle": "", "marker": "D", "markerfacecolor": "white", "markeredgecolor": PALETTE[1]}
_NULL: dict[str, Any] = {"color": PALETTE[4], "marker": "x", "markersize": 4.5, "linestyle": "", "linewidth": 1}
_FLOOR = "#e4e4e4"


def rows(section: str) -> list[Row]:
    """The rows of a section of Table 11 (`isolated.`, `cumulative.`), and dense inference."""
    return [row for row in find("table", "11").experiment.rows() if row.key == "baseline" or row.key.startswith(section)]


# --- claims -----------------------------------------------------------------------------------------------------------------------
def _of_dense(outcome: Outcome, column: str, processes: Sequence[TimedProcess] = ()) -> Estimate | None:
    """A column of `against_dense` with its interval; None where it was not measured."""
    if outcome.record is None or outcome.dense is None:
        return None
    row = comparison.against_dense(outcome.record, outcome.dense, processes, intervals=column != "speedup_pct")
    if column not in row:
        return None
    value, low, high = (row[f"{column}{end}"] for end in ENDS)
    return Estimate(value, low, high, row["noise_floor_pct"] if column == "speedup_pct" else 0.0)


def least_degrading(panel: Mapping[str, Outcome]) -> Estimate | None:
    """The lesser cost of KV skipping and quantization, less the greater one of halting and fusion; their intervals add up."""
    costs = [_of_dense(panel[f"isolated.{one}"], "delta_ppl_pct") for one in ("kv_skipping", "quantization", "halting", "fusion")]
    known = [one for one in costs if one is not None]
    if len(known) < len(costs):
        return None
    others, ours = (pick(known[at], key=lambda one: one.value) for pick, at in ((min, slice(2)), (max, slice(2, 4))))
    return set_against([(others, ours)], sub)


def added_speedup(panel: Mapping[str, Outcome]) -> Estimate | None:
    """Points of time gone that KV skipping adds to halting."""
    steps = [panel[f"cumulative.{step}"] for step in ("kv_skipping", "halting")]
    found = [[_of_dense(step, "speedup_pct", those) for step in steps] for those in one_by_one(timings([*panel.values()]))]
    pairs = [(after, before) for after, before in found if after is not None and before is not None]
    return set_against(pairs, sub) if pairs else None


def _in_both(key: str, **more: Any) -> tuple[AnsweredBy, ...]:
    return tuple(AnsweredBy(panel, key, **more) for panel in PROTOCOLS)


_JOINT = "cumulative.quantization"
_JOINT_CLAIMS = ("figure6.joint", "section3.ablation", "abstract.joint", "conclusion.joint", "faq.joint", "p4.joint", "p4.half")
CUMULATIVE_ANSWERS: dict[str, AnsweredBy | tuple[AnsweredBy, ...]] = {
    **dict.fromkeys(_JOINT_CLAIMS, AnsweredBy("continuation", _JOINT)),
    "f2.kv_skipping.added_speedup_pct": _in_both("cumulative.kv_skipping", of=added_speedup, versus="cumulative.halting"),
    "p4.stability.delta_ppl": tuple(
        one for step in ("halting", "kv_skipping", "fusion", "quantization") for one in _in_both(f"cumulative.{step}")
    ),
    "faq.domains.delta_ppl": AnsweredBy(
        *("continuation", _JOINT), note="of its three texts WikiText-103 has a ledger, and GLUE has scores (table tasks)"
    ),
}
ISOLATED_ANSWERS: dict[str, AnsweredBy | tuple[AnsweredBy, ...]] = {
    **{f"p4.isolated.{mechanism}": _in_both(f"isolated.{mechanism}") for mechanism in MECHANISMS},
    "e7.latency": _in_both("isolated.quantization"),
    "faq.generation": AnsweredBy("continuation", "isolated.fusion"),
    "c5.generation": AnsweredBy(
        *("continuation", "isolated.kv_skipping"),
        note="the sentence goes on: “correctness”, because the mask is causal; that order is kept here, and judged is perplexity",
    ),
    "figure7.degradation.lead_quality_points": AnsweredBy(
        "continuation", "isolated.halting", of=least_degrading, note="halting and fusion; intervals are added, not paired"
    ),
    **{f"section3.isolated.{mechanism}": _in_both(f"isolated.{mechanism}") for mechanism in ("halting", "fusion")},
}


# --- the figures ------------------------------------------------------------------------------------------------------------------
@artefact(partial(rows, "cumulative."), answers=CUMULATIVE_ANSWERS)
def figure06_cumulative_impact(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 6: cumulative impact of the four mechanisms on time, operations and perplexity."""
    return _figure(outcomes, name, "Figure 6: cumulative impact", "Each bar adds one mechanism to the bar on its left.")


@artefact(partial(rows, "isolated."), answers=ISOLATED_ANSWERS)
def figure07_isolated_impact(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 7: isolated impact of each mechanism on time, operations and perplexity."""
    return _figure(outcomes, name, "Figure 7: isolated impact", "Each bar is one mechanism alone.")


def _figure(outcomes: Sequence[Outcome], name: str, title: str, sentence: str) -> Figure:
    """Three measures (rows) under both protocols (columns), a bar for each row of Table 11 that is not dense inference."""
    frame = drawn(outcomes)
    with style():
        drawing, axes = panels(len(MEASURES), len(PROTOCOLS), size=(8.5, 6.4), sharex="col")
        for column, (panel, heading) in enumerate(PROTOCOLS.items()):
            members = frame[frame["panel"] == panel].to_dict("records")
            for plot, measure in zip(axes[:, column], MEASURES, strict=True):
                _bars(plot, members, measure)
                low, high = plot.get_ylim()  # room for the numbers on the bars, in both directions, and for markers at 0
                plot.set_ylim(low - (0.12 if low < 0 else 0.05) * (high - low), high + 0.16 * (high - low))
                _reasons(plot, members, measure)
            axes[0, column].set_title(heading)
            axes[-1, column].set_xticks(range(len(members)), [draw.folded(row["technique"], 12) for row in members], rotation=0)
        for (first, *_), (_, label) in zip(axes, MEASURES.values(), strict=True):
            first.set_ylabel(label)
        said = "measured, 95% interval; of time: quartiles or range"
        handles = [
            Patch(facecolor=PALETTE[2], edgecolor="black", linewidth=0.5, label=said),
            Line2D([], [], **_DIAMOND, label="the paper (GPT-2 774M, A100)"),
            Line2D([], [], **_NULL, label="the same counts, on random tokens"),
            Patch(facecolor=_FLOOR, label="noise floor of the clock"),
        ]
        drawing.set_layout_engine("constrained", rect=(0, 0, 1, 0.93))  # room for the legend
        drawing.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.07, 1.0), ncols=2, borderaxespad=0)
    caption = (
        f"{sentence} A mechanism that looks ahead is refused where every position is scored.",
        "Time: decrease of the wall clock of one batch against dense inference, which alternates with it; below 0 it takes longer. Operations: "
        "decrease in the paper's ledger (Appendix J), the one that its numbers are of. Perplexity: increase in percent of dense perplexity; the "
        f"paper's are taken in percent of its {reported()['table3.baseline'].values['ppl']:g}.",
        *(
            f"{heading[0].upper()}{heading[1:]}: {' '.join(notes([one for one in outcomes if one.row.panel == panel]))}"
            for panel, heading in PROTOCOLS.items()
        ),
    )
    there, finding = frame[frame["panel"].eq("continuation") & frame["delta_ppl_pct"].notna()], ""
    if len(there):
        together = there.iloc[-1]["key"] == _JOINT
        row = there.iloc[-1] if together else there.loc[there["delta_ppl_pct"].idxmax()]
        who = "All four together add" if together else f"{row['technique'].removeprefix('+ ')} adds most:"
        most = there["reported_delta_ppl_pct"].max()
        finding = f"{who} {row['delta_ppl_pct']:+.0f}% perplexity (continuation); the paper reports at most {most:+.1f}%"
    return Figure(name, title, frame, drawing, caption, finding=finding)


def drawn(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """A row a bar: what was measured with its interval, what the paper says, or why there is no record."""
    frame = comparison.frame(outcomes)
    dense_ppl, added = reported()["table3.baseline"].values["ppl"], frame["reported_delta_ppl"].astype(float)
    frame = frame.assign(reported_delta_ppl_pct=100 * added / dense_ppl)[frame["key"] != "baseline"]
    columns = ["panel", "key", "technique", "status"]
    for measure, (stated, _) in MEASURES.items():
        columns += [*(f"{measure}{end}" for end in ENDS if f"{measure}{end}" in frame), stated]
    columns += [*(f"null_delta_ppl_pct{end}" for end in ENDS), "noise_floor_pct", "executed_flops_saved_pct"]
    columns += ["simulated", "record", "dense_record"]
    return frame[columns].reset_index(drop=True)


def _bars(axes: Axes, members: Sequence[Mapping[str, Any]], measure: str) -> None:
    draw.horizontal(axes, 0)
    for place, row in enumerate(members):
        stated, floor = number(row, MEASURES[measure][0]), number(row, "noise_floor_pct")
        value, low, high = numbers(row, measure)
        if value is not None:
            if floor is not None and measure == "speedup_pct":
                axes.bar(place, 2 * floor, 0.9, bottom=-floor, color=_FLOOR, zorder=0.5)
            hatch = HATCHES[1 + place % (len(HATCHES) - 1)]
            axes.bar(place, value, 0.55, color=PALETTE[2], edgecolor="white", hatch=hatch, linewidth=0.5)
            axes.bar(place, value, 0.55, facecolor="none", edgecolor="black", linewidth=0.5)
            end = value
            if low is not None and high is not None:
                end = high if value >= 0 else low
                look: dict[str, Any] = {"color": "black", "linewidth": 1, "capsize": 2, "marker": "", "linestyle": ""}
                draw.with_halo(draw.intervals(axes, place, row, measure, **look))
            look = {"textcoords": "offset points", "ha": "center", "va": "bottom" if value >= 0 else "top"}
            axes.annotate(f"{value:+.1f}", (place, end), xytext=(0, 3 if value >= 0 else -6), weight="bold", **look)
        if measure == "delta_ppl_pct" and None not in numbers(row, "null_delta_ppl_pct"):
            draw.intervals(axes, place - 0.38, row, "null_delta_ppl_pct", capsize=2, **_NULL)
        if stated is not None:
            axes.plot(place + 0.36, stated, markersize=4.5, zorder=4, **_DIAMOND)
    axes.set_xlim(-0.6, len(members) - 0.4)
    axes.grid(visible=False, axis="x")


def _reasons(axes: Axes, members: Sequence[Mapping[str, Any]], measure: str) -> None:
    """Why there is no bar, where neither the marker of the paper nor the line at 0 is. Limits of `axes` must be final."""
    low, high = axes.get_ylim()
    look: dict[str, Any] = {"ha": "center", "va": "center", "color": "#6a6a6a", "style": "italic"}
    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for place, row in enumerate(members):
        if number(row, measure) is None:
            missing = "simulated: not timed" if row["simulated"] is True else "not measured"
            why = missing if row["status"] == comparison.MEASURED else str(row["status"])
            taken = [(at - low) / (high - low) for at in (0.0, number(row, MEASURES[measure][0])) if at is not None]
            height = max((0.5, 0.22, 0.35, 0.65, 0.78), key=lambda middle: min(0.2, *(abs(middle - one) for one in taken)))
            axes.text(place, height, textwrap.fill(why, 12), transform=axes.get_xaxis_transform(), **look)
