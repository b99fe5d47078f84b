"""Figure 16, speedup and energy, and the waterfall: how much of what a mechanism promises arrives.

The method by which joules were had stands at every number; where there is no counter they are an estimate that follows the clock, and answer no
claim. Of the waterfall all is of the prompt, but for joules, which are of the whole batch: nominal operations are what a perfect implementation
would run, executed ones what ran; the policy is priced alone (everything decided, everything executed); kernel time is that of the model's own
parts; then the clock, and the energy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from quicksilver.measure.components import KERNELS
from quicksilver.measure.latency import LatencyResult
from quicksilver.records.record import Record
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, HATCHES, PALETTE, Figure, panels, style, whiskers
from quicksilver.report.table import ENDS, NO_VALUE, Column, Lines, Panel, Table, number, numbers, signed, time_cell
from quicksilver.runtime.errors import ConfigError

from .. import drawing as draw
from ..ablation.impact import folded
from . import costs

# row -> what F.2 says of it: (entry of the speedup, entry of the emissions); the full stack is the last step here
STEPS = {
    costs.DENSE: (None, None),
    "cumulative.halting": ("f2.halting", "f2.halting"),
    "cumulative.kv_skipping": (None, "f2.kv_skipping"),
    "cumulative.fusion": (None, "f2.fusion"),
    "cumulative.quantization": ("f2.joint", "f2.joint"),
}
_DENSE_G = reported()["f2.halting"].values["dense_g_per_token"]
STATED = {
    key: ({} if speed is None else {"reported_speedup_pct": reported()[speed].values["speedup_pct"]})
    | ({} if grams is None else {"reported_emissions_pct": 100 * reported()[grams].values["emissions_g_per_token"] / _DENSE_G})
    for key, (speed, grams) in STEPS.items()
}
ENERGY = ("net_j_per_token", "gross_j_per_token", "net_gco2_per_token", "resolution_j_per_token")
_COLUMNS_16 = [
    *("key", "technique", "status", "method", *ENERGY, "energy_pct", "record", "reported_speedup_pct", "reported_emissions_pct"),
    *("speedup_pct", "speedup_pct_low", "speedup_pct_high", comparison.FLOOR, "energy_resolution_pct", comparison.POOLED),
]
_DIAMOND: dict[str, Any] = {"marker": "D", "color": "white", "markeredgecolor": PALETTE[1], "linestyle": ""}  # the paper's number
_BAR: dict[str, Any] = {"width": 0.55, "edgecolor": "black", "linewidth": 0.5, "error_kw": {"elinewidth": 0.8, "capsize": 2}}


def _estimate(quantity: str, record: Record) -> Estimate | None:
    energy = costs.energy(record)
    if not energy.measured:
        raise ConfigError(f"energy was not measured, but estimated from the clock ({energy.method})")
    if quantity == "dense_g_per_token":
        grams = energy.dense.net_gco2_per_token
        return None if isinstance(grams, str) else Estimate(grams, grams, grams)
    saved = costs.joules_saved(record)  # in percent of dense joules, and so of emissions: the grid's factor cancels out
    return saved and Estimate(saved[0], saved[0] - saved[1], saved[0] + saved[1], saved[1])


_ENTRIES = {f"f2.{step.rpartition('.')[2]}": step for step in [*STEPS][1:]}
_ANSWERS = {
    f"{entry}.{quantity}": (
        AnsweredBy(costs.PANEL, key, of=partial(costs.pooled, costs.of_a_batch, key))
        if quantity == "speedup_pct"
        else AnsweredBy(costs.PANEL, key, of_record=partial(_estimate, quantity))
    )
    for entry, key in (_ENTRIES | {"f2.joint": costs.JOINT, "faq.energy": costs.JOINT}).items()
    for quantity in reported()[entry].quantities
    if quantity != "added_speedup_pct"
}


@artefact(partial(costs.rows, *STEPS), answers=_ANSWERS)
def figure16_speed_emissions(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 16: cumulative speedup with energy and emissions per token.

    Speed and energy are of the same batch: speedup on the left, energy in percent of dense on the right, the paper's numbers beside both.
    """
    frame = drawn(outcomes)
    members = frame.to_dict("records")
    with style():
        drawing, axes = panels(1, 2, size=(8.6, 3.6))
        _speed(axes[0, 0], members)
        _energy(axes[0, 1], members)
        for plot in axes.flat:
            plot.set_xticks(range(len(members)), [folded(row["technique"].replace("Quanti", "Quanti-"), 10) for row in members])
            plot.set_xlim(-0.6, len(members) - 0.4)
            plot.grid(axis="x", visible=False)
    caption = (
        "Each step has one mechanism more. Left: time of a batch, prompts and the tokens after them, saved against dense inference. The two take turns. "
        "Whiskers: quartiles; grey band: noise floor (A/A, pooled), within which nothing is a speedup. Right: net joules per token, and so emissions, in "
        "percent of dense ones of the same run; below it the method. No bar: below the resolution.",
        costs.energy_note(outcomes),
        *comparison.noise_note(members, "a batch's time"),
        "The paper: F.2, grams per token of GPT-2 774M on an A100, in percent of its dense 0.51 g.",
        *provenance.notes(outcomes),
    )
    timed = [(place, gone) for place, row in enumerate(members) if (gone := number(row, "speedup_pct")) is not None]
    finding, stated = "", number(members[-1], "reported_speedup_pct")
    if timed and stated is not None:
        place, gone = timed[-1]
        which = "All four mechanisms" if place == len(members) - 1 else f"The first {place} of the mechanisms"
        together = f"{which} together: {abs(gone):.0f}% {'less' if gone > 0 else 'more'} time for a batch"
        finding = f"{together}; the paper reports {stated:.0f}% less for all four"
    return Figure(name, "Figure 16: speedup and emissions, one mechanism after another", frame, drawing, caption, finding=finding)


def drawn(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """A row a step."""
    found = costs.measured(outcomes, _costs)
    for row in found:
        row |= STATED[row["key"]]
    return pd.DataFrame(found, columns=_COLUMNS_16)


def _costs(record: Record) -> dict[str, Any]:
    if record.simulated:  # the products of simulated widths are in float: their joules say nothing
        return {"method": costs.SIMULATED}
    energy = costs.energy(record)
    ours = energy.ours
    row: dict[str, Any] = {"method": costs.method(record)}
    row |= {name: getattr(ours, name) for name in ENERGY}
    if record.dense_fingerprint is None:
        return row if isinstance(energy.dense.net_j_per_token, str) else row | {"energy_pct": 100.0}
    latency = record.measured("latency", LatencyResult)
    row |= comparison.time_saved("speedup_pct", latency.latency_ratio) | {comparison.FLOOR: latency.noise_floor_pct}
    if (saved := costs.joules_saved(record)) is not None:
        row |= {"energy_pct": 100 - saved[0], "energy_resolution_pct": saved[1]}
    return row


def _speed(plot: Axes, members: Sequence[Mapping[str, Any]]) -> None:
    at: dict[str, Any] = {"textcoords": "offset points", "ha": "center"}
    for place, row in enumerate(members):
        (value, low, high), floor = numbers(row, "speedup_pct"), number(row, comparison.FLOOR)
        if value is not None and low is not None and high is not None and floor is not None:
            within = abs(value) <= floor
            plot.fill_between([place - 0.42, place + 0.42], -floor, floor, color="#e4e4e4", linewidth=0, zorder=0)
            look: dict[str, Any] = {"color": "white", "hatch": HATCHES[1]} if within else {"color": PALETTE[2]}
            plot.bar(place, value, yerr=whiskers(value, low, high), label="_", **look, **_BAR)
            below = value < 0 and not within
            end, va = (low, "top") if below else (max(high, 0), "bottom")
            plot.annotate("≈ 0\n(noise)" if within else f"{value:+.1f}", (place, end), (0, -4 if below else 4), va=va, **at)
        elif place:
            missing = "simulated:\nnot timed" if row.get("method") == costs.SIMULATED else "not timed"
            plot.annotate(missing if row["status"] == comparison.MEASURED else row["status"], (place, 0), (0, 4), **at)
        _beside(plot, place, row, "reported_speedup_pct")
    plot.axhline(0, color=GREY, linewidth=0.8, linestyle="-", marker="")
    plot.plot([], [], label="the paper", **_DIAMOND)
    plot.set(ylabel="time saved, % of dense", title="Time of a batch: below 0, slower than dense")
    plot.margins(y=0.18)
    plot.legend()


def _energy(plot: Axes, members: Sequence[Mapping[str, Any]]) -> None:
    at: dict[str, Any] = {"textcoords": "offset points", "ha": "center"}
    for place, row in enumerate(members):
        value, around = number(row, "energy_pct"), number(row, "energy_resolution_pct") or 0.0
        if row.get("method") == costs.SIMULATED:
            plot.annotate("simulated:\nno bar", (place, 0), (0, 4), **at)
        elif value is not None:
            plot.bar(place, value, color=PALETTE[4], yerr=around or None, **_BAR)
            plot.annotate(f"{value:.0f}%\n{row['method']}", (place, value + around), (0, 3), **at)
        elif isinstance(row.get("method"), str):
            plot.annotate(f"{costs.BELOW}\n{row['method']}", (place, 0), (0, 4), **at)
        _beside(plot, place, row, "reported_emissions_pct")
    plot.plot([], [], label="the paper, emissions", **_DIAMOND)
    plot.axhline(100, color=GREY, linewidth=0.8, linestyle="-", marker="")
    plot.set(ylabel="net energy per token, % of dense", title="Energy and emissions per token")
    plot.margins(y=0.3)
    plot.set_ylim(bottom=0)
    plot.legend(loc="upper left")


def _beside(plot: Axes, place: int, row: Mapping[str, Any], stated: str) -> None:
    if (value := number(row, stated)) is not None:
        plot.plot(place + 0.38, value, label="_", **_DIAMOND)


# --- the waterfall ----------------------------------------------------------------------------------------------------------------

# column of the frame -> heading of a group, of the column, name in the picture
STAGES = {
    "nominal_saved_pct": ("operations", "nominal", "nominal"),
    "executed_saved_pct": ("operations", "executed", "executed"),
    "kernel_saved_pct": ("time", "kernels", "kernels"),
    "wall_saved_pct": ("time", "wall clock", "clock"),
    "joules_saved_pct": ("energy", "net", "joules"),
}
TIMED = [*STAGES][2:]  # what simulated widths do not have
COLUMNS = [
    *("panel", "section", "key", "technique", "status", *STAGES, "policy_pct", "policy_pct_low", "policy_pct_high"),
    *("wall_saved_pct_low", "wall_saved_pct_high", comparison.FLOOR, comparison.POOLED),
    *("joules_resolution_pct", "realization", "method", "record"),
]


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
    }
    if record.simulated:
        return row | {"method": costs.SIMULATED}
    row |= {
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


@artefact(costs.rows)
def table_waterfall(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table and figure waterfall: how much of what a mechanism promises arrives: operations, kernel time, wall clock, joules."""
    found = frame(outcomes)
    stages = [Column(group, heading, partial(_cell, stage)) for stage, (group, heading, _) in STAGES.items()]
    columns = (
        Column("", "technique", "{technique}", align="left"),
        *stages[:2],
        Column("", "deciding takes", partial(_cell, "policy_pct")),
        *stages[2:],
        Column("", "realized", "{realization:.2f}"),
    )
    legend = (
        "Operations, time, energy: percent of dense inference that is saved, of a prompt (energy: of the prompt and the tokens "
        "after it). Nominal: the dense formula on active tokens. Executed: what ran, signals and modules included.",
        "deciding takes: time of deciding in percent of dense time, measured while every token is still computed. It is a cost.",
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
    if stage not in (*TIMED, "policy_pct"):
        return (signed(value),)
    if row.get("method") == costs.SIMULATED:
        return (costs.SIMULATED,)
    if stage != "joules_saved_pct":
        return time_cell(value, number(row, comparison.FLOOR))
    if not isinstance(row["method"], str):
        return (NO_VALUE,)
    resolution = number(row, "joules_resolution_pct")
    refused = value is None or resolution is None or abs(value) <= resolution
    return (costs.BELOW if refused else signed(value), row["method"])


_A_LINE = 4


@artefact(costs.rows)
def figure_waterfall(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Table and figure waterfall: how much of what a mechanism promises arrives: operations, kernel time, wall clock, joules."""
    found = frame(outcomes)
    # Halting alone is also the first of the steps: the same run, drawn once.
    members = found[~found["key"].isin([costs.DENSE, "cumulative.halting"])].to_dict("records")
    lines = -(-len(members) // _A_LINE)
    with style():
        drawing, axes = panels(lines, _A_LINE, size=(11.2, 2.5 * lines), sharex=True, sharey=True)
        for plot, row in zip(axes.flat, members, strict=False):
            _falls(plot, row)
        for plot in axes.flat[len(members) :]:
            plot.set_visible(False)
        for line in axes:
            line[0].set_ylabel("left of dense, %")
        for column in range(_A_LINE):
            # The lowest picture of a column has the labels, wherever the last line ends.
            lowest = [plot for plot in axes[:, column] if plot.get_visible()][-1]
            lowest.set_xticks(range(len(STAGES)), [short for _, _, short in STAGES.values()], rotation=30)
            lowest.tick_params(labelbottom=True)
    caption = (
        "What is left of dense inference (100) at each stage: nominal operations (the dense formula on active tokens), executed operations (what "
        "ran), kernels (time of the model's own parts), wall clock with its quartiles, net joules. Cross-hatched: what "
        "deciding costs. Hatched bars: a difference within the noise of the instrument.",
        "All is of the prompt alone; only joules are of the prompt and the tokens after it. The cost of deciding was measured by a run that decides and "
        "computes every token all the same. realized: time saved over executed operations saved; no number where one of the two is within the noise.",
        *comparison.noise_note(found.to_dict("records"), "a prompt's time"),
        costs.energy_note(outcomes),
        *provenance.notes(outcomes),
    )
    timed = [row for row in members if number(row, "wall_saved_pct") is not None]
    faster = sum((number(row, "wall_saved_pct") or 0.0) > (number(row, comparison.FLOOR) or 0.0) for row in timed)
    finding = f"Time is saved beyond noise in {faster} of the {len(timed)} combinations that have a time"
    return Figure(name, "What is left of dense inference, from operations to joules", found, drawing, caption, finding=finding)


def _falls(plot: Any, row: Mapping[str, Any]) -> None:
    own, resolution = number(row, comparison.FLOOR), number(row, "joules_resolution_pct")
    floors = {"kernel_saved_pct": own, "wall_saved_pct": own, "joules_saved_pct": resolution}
    for place, stage in enumerate(STAGES):
        saved, low, high = numbers(row, stage)
        if saved is None:
            missing = f"{costs.BELOW} ({row['method']})" if stage == "joules_saved_pct" else "not measured"
            missing = costs.SIMULATED if row["method"] == costs.SIMULATED else missing
            why = missing if row["status"] == comparison.MEASURED else row["status"]
            plot.annotate(why, (place, 3), ha="center", va="bottom", rotation=90)
            continue
        floor = floors.get(stage)
        refused = floor is not None and abs(saved) <= floor
        look: dict[str, Any] = {"color": "white", "hatch": HATCHES[1]} if refused else {"color": PALETTE[place]}
        plot.bar(place, 100 - saved, width=0.7, edgecolor="black", linewidth=0.5, **look)
        top, policy = 100 - saved, number(row, "policy_pct") or 0.0
        if stage == "wall_saved_pct" and own is not None and policy > own:
            look = {"color": PALETTE[place], "hatch": HATCHES[4], "edgecolor": "white", "linewidth": 0}
            plot.bar(place, min(policy, top), bottom=max(0.0, top - policy), width=0.7, **look)
        if low is not None and high is not None:
            spread = whiskers(top, 100 - high, 100 - low)
            draw.with_halo(plot.errorbar(place, top, yerr=spread, color="black", elinewidth=0.8, capsize=2, marker=""))
            top = 100 - low
        look = {"textcoords": "offset points", "ha": "center", "zorder": 5}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the line at 100 must not strike it out
        plot.annotate(f"{100 - saved:.0f}" + "\n(noise)" * refused, (place, top), (0, 3), bbox=box, **look)
    plot.axhline(100, color=GREY, linewidth=0.8, linestyle="-", marker="", zorder=0.5)
    ratio = number(row, "realization")
    realized = "" if ratio is None or np.isnan(ratio) else f", realized {ratio:.2f}"
    plot.set_title(f"{row['technique']}{' alone' * (row['section'] == 'Isolated')}{realized}", size=8)
    plot.margins(y=0.15)
    plot.grid(axis="x", visible=False)
