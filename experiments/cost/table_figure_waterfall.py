"""Table and figure waterfall: how much of what a mechanism promises arrives: operations, kernel time, wall clock, joules.

Nominal operations are what a perfect implementation would run, executed ones what ran; the policy is priced alone (everything decided,
everything executed); kernel time is that of the model's own parts; then the clock, and the energy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import NO_VALUE, Column, Panel, Table, number, time_cell

from . import costs

if TYPE_CHECKING:  # a table needs no matplotlib
    from matplotlib.axes import Axes

    from quicksilver.report.figure import Figure

HEADINGS = {
    "nominal_saved_pct": ("operations", "nominal"),
    "executed_saved_pct": ("operations", "executed"),
    "kernel_saved_pct": ("time", "kernels"),
    "wall_saved_pct": ("time", "wall clock"),
    "joules_saved_pct": ("energy", "joules"),
}


def rows() -> list[Row]:
    """Every mechanism alone, one after another, and the attention budget."""
    return costs.rows()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Percent of dense inference saved at each stage."""
    frame = costs.waterfall(outcomes)
    stages = [
        Column(group, heading, lambda row, stage=stage: costs.stage_cell(row, stage))  # type: ignore[misc]
        for stage, (group, heading) in HEADINGS.items()
    ]
    columns = (
        Column("", "technique", lambda row: (row["technique"],), align="left"),
        *stages[:2],
        Column("time", "policy costs", lambda row: time_cell(number(row, "policy_pct"), number(row, comparison.FLOOR))),
        *stages[2:],
        Column("", "realized", lambda row: (NO_VALUE if (ratio := number(row, "realization")) is None else f"{ratio:.2f}",)),
    )
    legend = (
        "Operations, time, energy: percent of dense inference that is saved, of a prompt (energy: of the prompt and the tokens "
        "after it). Nominal: the dense formula on active tokens. Executed: what ran, signals and modules included.",
        "policy costs: what deciding takes, in percent of dense time, measured with every token computed all the same.",
        "kernels: time of embedding, attention, MLP, norms and head, without what the runtime adds around them.",
        "realized: wall clock saved over executed operations saved; 1: every operation not executed is time not spent. "
        f"{NO_VALUE} where one of the two is within the noise of the clock, or no operation was saved.",
        f"{comparison.NOISE} below resolution: idle windows differ by as much.",
        costs.energy_note(outcomes),
    )
    title = "Waterfall: from operations to joules"
    notes = (*comparison.noise_note(frame.to_dict("records"), "a prompt's time"), *provenance.notes(outcomes))
    panel = Panel(costs.PANEL, "Saved against dense inference, stage by stage", columns, notes)
    return Table(name, title, frame, (panel,), legend)


_COLUMNS = 3
_SHORT = ("nominal", "executed", "kernels", "clock", "joules")


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """One small waterfall a run."""
    from quicksilver.report.figure import Figure, panels, style

    frame = costs.waterfall(outcomes)
    members = frame[frame["key"] != costs.DENSE].to_dict("records")
    # Halting alone is also the first of the steps: the same run, drawn once.
    members = [row for row in members if row["key"] != "cumulative.halting"]
    lines = -(-len(members) // _COLUMNS)
    with style():
        drawing, axes = panels(lines, _COLUMNS, size=(8.6, 2.3 * lines), sharex=True, sharey=True)
        for plot, row in zip(axes.flat, members, strict=False):
            _falls(plot, row)
        for plot in axes.flat[len(members) :]:
            plot.set_visible(False)
        for line in axes:
            line[0].set_ylabel("left of dense, %")
        for column in range(_COLUMNS):
            # The lowest picture of a column has the labels, wherever the last line ends.
            lowest = [plot for plot in axes[:, column] if plot.get_visible()][-1]
            lowest.set_xticks(range(len(_SHORT)), _SHORT)
            lowest.tick_params(labelbottom=True)
    caption = (
        "What is left of dense inference (100) at each stage: nominal operations (the dense formula on active tokens), executed operations (what "
        "ran), kernels (time of the model's own parts), wall clock with its quartiles, net joules. Dark cap on the clock: what deciding costs. "
        "Hatched: a difference that is no larger than the noise of the instrument.",
        "All of the prompt; joules of the prompt and the tokens after it. The cost of deciding was measured by a run that decides and computes "
        "every token all the same. realized: time saved over executed operations saved; no number where one of the two is within the noise.",
        *comparison.noise_note(frame.to_dict("records"), "a prompt's time"),
        costs.energy_note(outcomes),
        *provenance.notes(outcomes),
    )
    return Figure(name, "What is left of dense inference, from operations to joules", frame, drawing, caption)


def _falls(plot: Axes, row: Mapping[str, Any]) -> None:
    from quicksilver.report.figure import GREY, HATCHES, PALETTE, whiskers

    own, resolution = number(row, comparison.FLOOR), number(row, "joules_resolution_pct")
    floors = {"kernel_saved_pct": own, "wall_saved_pct": own, "joules_saved_pct": resolution}
    for place, stage in enumerate(costs.STAGES):
        saved = number(row, stage)
        if saved is None:
            plot.annotate(_why(row, stage), (place, 3), ha="center", va="bottom", size=6.5, rotation=90)
            continue
        floor = floors.get(stage)
        refused = floor is not None and abs(saved) <= floor
        plot.bar(
            place, 100 - saved, width=0.7, color="white" if refused else PALETTE[place], edgecolor="black", linewidth=0.5,
            hatch=HATCHES[1] if refused else "",
        )  # fmt: skip
        top = 100 - saved
        if stage == "wall_saved_pct":
            low, high = number(row, "wall_saved_pct_low"), number(row, "wall_saved_pct_high")
            policy = number(row, "policy_pct") or 0.0
            if own is not None and policy > own:
                plot.bar(place, min(policy, top), bottom=max(0.0, top - policy), width=0.7, color=PALETTE[0], linewidth=0)
            if low is not None and high is not None:
                spread = whiskers(top, 100 - high, 100 - low)
                plot.errorbar(place, top, yerr=spread, color="black", elinewidth=0.8, capsize=2, marker="")
                top = 100 - low
        plot.annotate(
            "noise" if refused else f"{100 - saved:.0f}", (place, top), (0, 3), textcoords="offset points", ha="center", size=7,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, zorder=5,  # the line at 100 must not strike it out
        )  # fmt: skip
    plot.axhline(100, color=GREY, linewidth=0.8, linestyle="-", marker="", zorder=0.5)
    ratio = number(row, "realization")
    realized = "" if ratio is None or np.isnan(ratio) else f", realized {ratio:.2f}"
    alone = " alone" if row["section"] == "Isolated" else ""
    plot.set_title(f"{row['technique']}{alone}{realized}", size=8)
    plot.margins(y=0.15)
    plot.grid(axis="x", visible=False)


def _why(row: Mapping[str, Any], stage: str) -> str:
    if row["status"] != "measured":
        return str(row["status"])
    return f"{costs.BELOW} ({row['method']})" if stage == "joules_saved_pct" else "not measured"
