"""Figures 8 and 15: inference time against existing acceleration methods, over that of quantization, and what that time costs.

Above the frontier of time and perplexity; below the bars of the paper's figures, with its one number that its text repeats: 0.40 of a
quantized baseline. `table_peers` prints the same records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import reported
from quicksilver.report.claims.verdicts import Estimate
from quicksilver.report.figure import GREY, HATCHES, MARKERS, PALETTE, Figure, panels, style

from . import methods

SECTIONS = (methods.DENSE, methods.WORK, methods.CACHE, methods.FORMAT, methods.OURS)


def rows() -> list[Row]:
    """Dense, the peers, ours."""
    return methods.rows()


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """The frontier, and the bars."""
    frame = methods.frame(outcomes)
    frame["number"] = [str(1 + place) for place in range(len(frame))]
    with style():
        drawing, plots = panels(2, 1, size=(7.2, 8.0), gridspec_kw={"height_ratios": [1.25, 1]})
        _frontier(plots[0, 0], frame)
        _bars(plots[1, 0], frame)
    said = (
        "Above: time of the prompt over that of the dense model (median; bars: quartiles of rounds in turns) and Δ perplexity of the tokens "
        "after it (bars: 95% intervals), linear below 1% and logarithmic above. Numbers: the "
        "names below. Ringed and joined: the frontier, where no other row is as "
        "fast for no more loss; a speedup within the noise floor and a Δ whose interval has 0 in it count as 0. Below: the same times over "
        "that of dynamic int8, as in the paper's figures.",
    )
    return Figure(
        name,
        "Peers and ours: time against perplexity",
        frame,
        drawing,
        (*said, *methods.findings(frame), *provenance.notes(outcomes)),
    )


def _frontier(plot: Any, frame: pd.DataFrame) -> None:
    timed = frame.dropna(subset=["prompt_time_ratio"])
    for place, section in enumerate(SECTIONS):
        points = timed[timed["section"] == section]
        y = points["delta_ppl_pct"].fillna(0.0)
        spread = [(y - points["delta_ppl_pct_low"]).fillna(0.0), (points["delta_ppl_pct_high"] - y).fillna(0.0)]
        x = points["prompt_time_ratio"]
        low, high = (1 - points[f"prompt_speedup_pct_{end}"] / 100 for end in ("high", "low"))
        sideways = [(x - low).clip(lower=0).fillna(0.0), (high - x).clip(lower=0).fillna(0.0)]
        plot.errorbar(
            x, y, xerr=sideways, yerr=spread, linestyle="", marker=MARKERS[place], color=PALETTE[place], elinewidth=0.7, capsize=1.5,
            label=section,
        )  # fmt: skip
    for place, (_, row) in enumerate(timed.sort_values("prompt_time_ratio").iterrows()):
        loss = row["delta_ppl_pct"] if pd.notna(row["delta_ppl_pct"]) else 0.0
        aside = ((5, 4), (5, -9), (-9, 4), (-9, -9))[place % 4]  # neighbours in time do not write over each other
        plot.annotate(row["number"], (row["prompt_time_ratio"], loss), xytext=aside, textcoords="offset points", size=6.5)
    best = timed[timed["front"]].sort_values("prompt_time_ratio")
    plot.plot(
        best["prompt_time_ratio"], best["delta_ppl_pct"].fillna(0.0), linestyle=(0, (4, 2)), linewidth=0.9, color="black", marker="o",
        markersize=9, markerfacecolor="none", label="frontier",
    )  # fmt: skip
    plot.set_yscale("symlog", linthresh=1.0)
    plot.set_xscale("log")
    low, high = timed["prompt_time_ratio"].min(), timed["prompt_time_ratio"].max()
    plot.set_xticks(
        shown := [tick for tick in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0) if 0.8 * low < tick < 1.2 * high], map(str, shown)
    )
    plot.set_xticks([], minor=True)
    plot.axhline(0, color=GREY, linewidth=0.8, linestyle="-", marker="")
    plot.axvline(1, color=GREY, linewidth=0.8, linestyle="-", marker="")
    plot.set_xlabel("time of the prompt, × dense float32")
    plot.set_ylabel("Δ perplexity after it, % of dense")
    plot.legend(loc="upper right")


def _bars(plot: Any, frame: pd.DataFrame) -> None:
    timed = frame.dropna(subset=["versus_int8"]).sort_values("versus_int8", ascending=False)
    for place, section in enumerate(SECTIONS):
        chosen = timed["section"] == section
        plot.barh(
            [i for i, one in enumerate(chosen) if one], timed.loc[chosen, "versus_int8"], color=PALETTE[place], edgecolor="white",
            hatch=HATCHES[place], height=0.7,
        )  # fmt: skip
    for i, value in enumerate(timed["versus_int8"]):
        plot.text(value, i, f" {value:.2f}", va="center", size=6)
    claimed = reported()[methods.CLAIM].values["time_ratio"]
    plot.axvline(
        claimed, color="black", linewidth=1.0, linestyle=(0, (4, 2)), marker="", label=f"QuickSilver in the paper: {claimed:.2f}"
    )
    plot.set_yticks(range(len(timed)), timed["technique"] + "  (" + timed["number"] + ")")
    plot.set_xlabel("time of the prompt, × dynamic int8")
    plot.grid(axis="y", visible=False)
    plot.legend(loc="upper right")


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


# The paper's own four mechanisms, not our best: that is what its figure shows.
ANSWERS = {
    f"{methods.CLAIM}.time_ratio": AnsweredBy(
        methods.PANEL,
        methods.FOUR,
        of=_versus_int8(methods.FOUR),
        note="the paper's four mechanisms; the prompt, over dynamic int8",
    )
}
