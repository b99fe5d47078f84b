"""Figures 8 and 15: inference time against existing acceleration methods, over that of quantization, and what that time costs.

Bars of time as in the paper's figures, with the one number that its text repeats, 0.40 of a quantized baseline; beside them what the time
costs. `table_peers` prints the same records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, HATCHES, MARKERS, PALETTE, Figure, legend_below, panels, style, whiskers

from . import methods

SECTIONS = (methods.OURS, methods.WORK, methods.CACHE, methods.FORMAT, methods.DENSE)
COLOURS = dict(zip(SECTIONS, (PALETTE[1], PALETTE[3], PALETTE[5], PALETTE[6], GREY), strict=True))  # ours stand out
HATCH = dict(zip(SECTIONS, HATCHES, strict=False))


def rows() -> list[Row]:
    """Dense, the peers, ours."""
    return methods.rows()


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """A row a method: time of the prompt, Δ perplexity."""
    frame = methods.frame(outcomes)
    shown = frame.dropna(subset=["prompt_time_ratio"]).sort_values("prompt_time_ratio", ascending=False).reset_index(drop=True)
    with style():
        drawing, plots = panels(1, 2, size=(9.6, 0.24 * len(shown) + 1.3), sharey=True, width_ratios=[1.5, 1])
        _times(plots[0, 0], shown)
        _losses(plots[0, 1], shown)
        plots[0, 0].set_yticks(range(len(shown)), shown["technique"])
        for label, best in zip(plots[0, 0].get_yticklabels(), shown["front"], strict=True):
            label.set_fontweight("bold" if best else "normal")
        handles = [
            Patch(facecolor=COLOURS[one], hatch=HATCH[one], edgecolor="white", label=one)
            for one in SECTIONS
            if one in set(shown["section"])
        ]
        legend_below(drawing, handles, ncols=3)
    said = (
        "Left: time of the prompt over that of the dense model in float32 (median; bars: quartiles of rounds in turns), the fastest on top. "
        "Right: perplexity added to the tokens after it (95% intervals), linear below 1% and logarithmic above. Bold and ringed: no other "
        "method is as fast for no more loss.",
        "A speedup within the noise floor and a Δ whose interval has 0 in it count as 0 for that.",
    )
    return Figure(
        name,
        "Existing methods and ours: time of a prompt and perplexity after it",
        frame,
        drawing,
        (*said, *methods.findings(frame), *provenance.notes(outcomes)),
    )


def _times(plot: Axes, shown: pd.DataFrame) -> None:
    x = shown["prompt_time_ratio"]
    low, high = (1 - shown[f"prompt_speedup_pct_{end}"] / 100 for end in ("high", "low"))
    ends = [pd.Series(end, x.index).fillna(0.0) for end in whiskers(x, low, high)]
    for section, rows in shown.groupby("section"):
        plot.barh(
            rows.index, x[rows.index], color=COLOURS[str(section)], hatch=HATCH[str(section)], edgecolor="white", height=0.72
        )
    plot.errorbar(x, shown.index, xerr=ends, linestyle="", marker="", color="black", elinewidth=0.7, capsize=1.5)
    for i, (value, end) in enumerate(zip(x, x + ends[1], strict=True)):
        plot.text(end, i, f" {value:.2f}", va="center", size=6)
    plot.axvline(1, color="black", linewidth=0.8, linestyle="-", marker="")
    quantised = shown.loc[shown["key"] == methods.QUANTISED, "prompt_time_ratio"]
    if len(quantised):
        claimed = reported()[methods.CLAIM].values["time_ratio"]
        paper = claimed * float(quantised.iloc[0])
        plot.axvline(paper, color="black", linewidth=1.0, linestyle=(0, (4, 2)), marker="", zorder=3)
        plot.text(
            paper, 1.0, f"the paper's QuickSilver:\n{claimed:.2f} of dynamic int8", transform=plot.get_xaxis_transform(), size=6, ha="center",
            va="bottom",
        )  # fmt: skip
    plot.text(1, 1.0, "dense", transform=plot.get_xaxis_transform(), size=6, ha="center", va="bottom")
    plot.set_xlim(0, 1.12 * max((x + ends[1]).max(), 1.0) if len(x) else None)
    plot.set_xlabel("time of the prompt, × dense float32")
    plot.grid(axis="y", visible=False)


def _losses(plot: Axes, shown: pd.DataFrame) -> None:
    y = shown["delta_ppl_pct"].fillna(0.0)
    ends = [pd.Series(end, y.index).fillna(0.0) for end in whiskers(y, shown["delta_ppl_pct_low"], shown["delta_ppl_pct_high"])]
    for place, (section, rows) in enumerate(shown.groupby("section")):
        at = rows.index
        plot.errorbar(
            y[at], at, xerr=[end[at] for end in ends], linestyle="", marker=MARKERS[place], color=COLOURS[str(section)], elinewidth=0.9, capsize=1.5,
        )  # fmt: skip
    best = shown.index[shown["front"]]
    plot.plot(y[best], best, linestyle="", marker="o", markersize=9, markerfacecolor="none", color="black")
    plot.axvline(0, color="black", linewidth=0.8, linestyle="-", marker="")
    plot.set_xscale("symlog", linthresh=1.0)
    least = float((y - ends[0]).min()) if len(y) else 0.0
    plot.set_xlim(1.5 * min(least, -0.5), None)  # no room for losses below zero that nobody has
    plot.set_xlabel("Δ perplexity after it, % of dense")
    plot.minorticks_off()


# --- claims ---------------------------------------------------------------------------------------------------------------------


def _versus_int8(key: str) -> Callable[[Mapping[str, Outcome]], Estimate | None]:
    def of(outcomes: Mapping[str, Outcome]) -> Estimate | None:
        """Time of the prompt over that of dynamic int8, both over dense; the ends of both intervals are set against each other."""
        records = outcomes[key].record, outcomes[methods.QUANTISED].record
        ours, theirs = (None if record is None else methods.prompt_timing(record) for record in records)
        if ours is None or theirs is None:
            return None
        a, b = ours.ratio, theirs.ratio
        floor = max(ours.noise_floor_pct, theirs.noise_floor_pct) / 100
        return Estimate(a.median / b.median, a.low / b.high, a.high / b.low, floor)

    return of


def _lead(outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """Percent of the time of the fastest method of others that the paper's four take less; the ends of both intervals against each other."""
    timed = {}
    for key, outcome in outcomes.items():
        timing = (
            None
            if outcome.record is None or outcome.row.section in (methods.DENSE, methods.OURS)
            else methods.prompt_timing(outcome.record)
        )
        if timing is not None:
            timed[key] = timing
    record = outcomes[methods.FOUR].record
    ours = None if record is None else methods.prompt_timing(record)
    if ours is None or not timed:
        return None
    best = min(timed.values(), key=lambda timing: timing.ratio.median)
    a, b = ours.ratio, best.ratio
    floor = max(ours.noise_floor_pct, best.noise_floor_pct)
    return Estimate(100 * (1 - a.median / b.median), 100 * (1 - a.high / b.low), 100 * (1 - a.low / b.high), floor)


# The paper's own four mechanisms, not our best: that is what its figure shows.
ANSWERS = {
    f"{methods.CLAIM}.time_ratio": AnsweredBy(
        methods.PANEL,
        methods.FOUR,
        of=_versus_int8(methods.FOUR),
        note="the paper's four mechanisms; the prompt, over dynamic int8",
    ),
    "section3.fastest.lead_pct": AnsweredBy(
        methods.PANEL,
        methods.FOUR,
        of=_lead,
        note="the paper's four mechanisms; the prompt, against the fastest method of others",
    ),
}
