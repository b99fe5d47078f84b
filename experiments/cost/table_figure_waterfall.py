"""Table and figure waterfall: how much of what a mechanism promises arrives: operations, kernel time, wall clock, joules.

Nominal operations are what a perfect implementation would run, executed ones what ran; the policy is priced alone (everything decided,
everything executed); kernel time is that of the model's own parts; then the clock, and the energy. All of the prompt, but for joules, which are
of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from quicksilver.measure.components import KERNELS
from quicksilver.records.record import Record
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome
from quicksilver.report.table import ENDS, NO_VALUE, Column, Lines, Panel, Table, number, numbers, plain_cell, signed, time_cell

from . import costs

if TYPE_CHECKING:  # a table needs no matplotlib
    from matplotlib.axes import Axes

    from quicksilver.report.figure import Figure

# column of the frame -> heading of a group, of the column, name in the picture
STAGES = {
    "nominal_saved_pct": ("operations", "nominal", "nominal"),
    "executed_saved_pct": ("operations", "executed", "executed"),
    "kernel_saved_pct": ("time", "kernels", "kernels"),
    "wall_saved_pct": ("time", "wall clock", "clock"),
    "joules_saved_pct": ("energy", "joules", "joules"),
}
COLUMNS = [
    *("panel", "section", "key", "technique", "status", *STAGES, "policy_pct", "policy_pct_low", "policy_pct_high"),
    *("wall_saved_pct_low", "wall_saved_pct_high", comparison.FLOOR, comparison.POOLED),
    *("joules_resolution_pct", "realization", "method", "record"),
]
rows = costs.rows


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row a run: percent of dense inference saved at each stage, what deciding alone costs, and the realization ratio."""
    found = costs.measured(outcomes, _stages)
    for row in found:
        if comparison.FLOOR in row:
            row["realization"] = realization(row["wall_saved_pct"], row["executed_saved_pct"], row[comparison.FLOOR])
    return pd.DataFrame(found, columns=COLUMNS)


def _stages(record: Record) -> dict[str, Any]:
    found = costs.components(record)
    policy, wall = found.decide_ratio, found.run_ratio
    if policy is None or wall is None:  # of dense inference
        return {}
    row: dict[str, Any] = {
        "nominal_saved_pct": record.flops_saved_pct("prompt_nominal"),
        "executed_saved_pct": record.flops_saved_pct("prompt_executed"),
        "kernel_saved_pct": kernel_saved_pct(record),
        **comparison.time_saved("wall_saved_pct", wall),
        **{f"policy_pct{end}": 100 * (one - 1) for end, one in zip(ENDS, (policy.median, policy.low, policy.high), strict=True)},
        **{comparison.FLOOR: found.noise_floor_pct, "method": costs.method(record)},
    }
    if (joules := costs.joules_saved(record)) is not None:
        row["joules_saved_pct"], row["joules_resolution_pct"] = joules
    return row


def kernel_saved_pct(record: Record) -> float | None:
    """Percent gone of the time that the model's own parts take, whatever happens around them."""
    found = costs.components(record)
    dense, run = (
        sum(one.components[name].median_ms for name in KERNELS if name in one.components) for one in (found.dense, found.ours)
    )
    return 100 * (1 - run / dense) if run else None


def realization(time_saved_pct: float, flops_saved_pct: float, noise_pct: float) -> float | None:
    """Time saved over executed FLOPs saved. None where either is no larger than the noise of the clock (a ratio of noise is no ratio), and
    where no operation was saved: then there is nothing to realize."""
    if abs(time_saved_pct) <= noise_pct or flops_saved_pct <= noise_pct:
        return None
    return time_saved_pct / flops_saved_pct


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Percent of dense inference saved at each stage."""
    found = frame(outcomes)
    stages = [Column(group, heading, partial(_cell, stage)) for stage, (group, heading, _) in STAGES.items()]
    columns = (
        Column("", "technique", lambda row: (row["technique"],), align="left"),
        *stages[:2],
        Column("time", "policy costs", lambda row: time_cell(number(row, "policy_pct"), number(row, comparison.FLOOR))),
        *stages[2:],
        Column("", "realized", plain_cell("realization", 2)),
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
    notes = (*comparison.noise_note(found.to_dict("records"), "a prompt's time"), *provenance.notes(outcomes))
    panel = Panel(costs.PANEL, "Saved against dense inference, stage by stage", columns, notes)
    return Table(name, "Waterfall: from operations to joules", found, (panel,), legend)


def _cell(stage: str, row: Mapping[str, Any]) -> Lines:
    """A stage; times and joules with what they cannot be told from."""
    value = number(row, stage)
    if stage in ("kernel_saved_pct", "wall_saved_pct"):
        return time_cell(value, number(row, comparison.FLOOR))
    if stage != "joules_saved_pct":
        return (signed(value),)
    if not isinstance(row["method"], str):
        return (NO_VALUE,)
    resolution = number(row, "joules_resolution_pct")
    refused = value is None or resolution is None or abs(value) <= resolution
    return (costs.BELOW if refused else signed(value), row["method"])


_COLUMNS = 3


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """One small waterfall a run."""
    from quicksilver.report.figure import Figure, panels, style

    found = frame(outcomes)
    # Halting alone is also the first of the steps: the same run, drawn once.
    members = found[~found["key"].isin([costs.DENSE, "cumulative.halting"])].to_dict("records")
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
            lowest.set_xticks(range(len(STAGES)), [short for _, _, short in STAGES.values()])
            lowest.tick_params(labelbottom=True)
    caption = (
        "What is left of dense inference (100) at each stage: nominal operations (the dense formula on active tokens), executed operations (what "
        "ran), kernels (time of the model's own parts), wall clock with its quartiles, net joules. Dark cap on the clock: what deciding costs. "
        "Hatched: a difference that is no larger than the noise of the instrument.",
        "All of the prompt; joules of the prompt and the tokens after it. The cost of deciding was measured by a run that decides and computes "
        "every token all the same. realized: time saved over executed operations saved; no number where one of the two is within the noise.",
        *comparison.noise_note(found.to_dict("records"), "a prompt's time"),
        costs.energy_note(outcomes),
        *provenance.notes(outcomes),
    )
    return Figure(name, "What is left of dense inference, from operations to joules", found, drawing, caption)


def _falls(plot: Axes, row: Mapping[str, Any]) -> None:
    from quicksilver.report.figure import GREY, HATCHES, PALETTE, whiskers

    own, resolution = number(row, comparison.FLOOR), number(row, "joules_resolution_pct")
    floors = {"kernel_saved_pct": own, "wall_saved_pct": own, "joules_saved_pct": resolution}
    for place, stage in enumerate(STAGES):
        saved, low, high = numbers(row, stage)
        if saved is None:
            missing = f"{costs.BELOW} ({row['method']})" if stage == "joules_saved_pct" else "not measured"
            why = missing if row["status"] == comparison.MEASURED else row["status"]
            plot.annotate(why, (place, 3), ha="center", va="bottom", size=6.5, rotation=90)
            continue
        floor = floors.get(stage)
        refused = floor is not None and abs(saved) <= floor
        look: dict[str, Any] = {"color": "white", "hatch": HATCHES[1]} if refused else {"color": PALETTE[place]}
        plot.bar(place, 100 - saved, width=0.7, edgecolor="black", linewidth=0.5, **look)
        top, policy = 100 - saved, number(row, "policy_pct") or 0.0
        if stage == "wall_saved_pct" and own is not None and policy > own:
            plot.bar(place, min(policy, top), bottom=max(0.0, top - policy), width=0.7, color=PALETTE[0], linewidth=0)
        if low is not None and high is not None:
            spread = whiskers(top, 100 - high, 100 - low)
            plot.errorbar(place, top, yerr=spread, color="black", elinewidth=0.8, capsize=2, marker="")
            top = 100 - low
        look = {"textcoords": "offset points", "ha": "center", "size": 7, "zorder": 5}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the line at 100 must not strike it out
        plot.annotate("noise" if refused else f"{100 - saved:.0f}", (place, top), (0, 3), bbox=box, **look)
    plot.axhline(100, color=GREY, linewidth=0.8, linestyle="-", marker="", zorder=0.5)
    ratio = number(row, "realization")
    realized = "" if ratio is None or np.isnan(ratio) else f", realized {ratio:.2f}"
    plot.set_title(f"{row['technique']}{' alone' * (row['section'] == 'Isolated')}{realized}", size=8)
    plot.margins(y=0.15)
    plot.grid(axis="x", visible=False)
