"""Where the time of a pass goes (Table 7, by layer), Figure 16 (speed and energy), and the waterfall: how much of what a mechanism promises arrives.

One pass over a batch of prompts is taken apart in a pass of its own; the rows below the sum say how far that is from the untouched pass. The
paper's seven rows are measured as it defines them where it does (App. K); what it leaves out is listed below them. The method by which joules were
had stands at every number; where there is no counter they are an estimate that follows the clock, and answer no claim. Of the waterfall all is of
the prompt, but for joules, which are of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from quicksilver.measure.components import KERNELS, BreakdownResult
from quicksilver.measure.latency import LatencyResult
from quicksilver.records.record import Record
from quicksilver.report import comparison, provenance
from quicksilver.report import table as tables
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, HATCHES, PALETTE, Figure, legend_below, panels, style, whiskers
from quicksilver.report.table import NO_VALUE, Column, Panel, Table, filled, number, numbers, signed, time_cell
from quicksilver.runtime.errors import ConfigError

from .. import drawing as draw
from . import costs

COMPONENTS = {  # as `quicksilver.measure.components` names them -> what is printed
    "embedding": "Token embedding",
    "attention": "Self-attention",
    "mlp": "Feed-forward network",
    "kv_write": "KV cache write",
    "quantization": "Quantization overhead",
    "fusion": "Fusion: deciding, merging",
    "decisions": "Signals, other decisions",
    "gather_scatter": "Gather and scatter",
    "runtime": "Masks, bookkeeping",
    "norms": "Norms, residual sums",
    "output_head": "Output head",
    "model": "Rest of the model",
}
IN_THE_PAPER = [*COMPONENTS][:6]
HEADINGS = {costs.JOINT: "all four", costs.BUDGET: "halting by attention"}
RUNS = {"joint": costs.JOINT, "budget": costs.BUDGET}
TOTAL, SUM = "total", "sum"


def breakdown(record: Record, who: str) -> BreakdownResult:
    """The pass of the run taken apart, or that of dense inference."""
    found = costs.components(record)
    return found.dense if who == "dense" else found.ours


def saved(record: Record, component: str, floor_pct: float) -> Estimate | None:
    """Percent of a component's dense time that is gone, within its noise: the A/A floor of the whole pass, pooled over the runs, or half of the two
    interquartile ranges where that is more. None where one of the two has no such component."""
    dense, run = (breakdown(record, who).components.get(component) for who in ("dense", "run"))
    if dense is None or run is None or not dense.median_ms:
        return None
    spread = 100 * (dense.iqr_ms + run.iqr_ms) / 2 / dense.median_ms
    return costs.within(100 * (1 - run.median_ms / dense.median_ms), max(floor_pct, spread))


# --- Table 7 ----------------------------------------------------------------------------------------------------------------------
def _runs(outcomes: Sequence[Outcome]) -> tuple[dict[str, Record], dict[str, dict[str, Any]]]:
    """The records of the runs, and their A/A floors, pooled."""
    there = costs.by_key(outcomes)
    records = {run: there[key] for run, key in RUNS.items() if key in there}
    own = {run: costs.components(record).noise_floor_pct for run, record in records.items()}
    floors = {run: {"record": record.fingerprint, comparison.FLOOR: own[run]} for run, record in records.items()}
    comparison.pool_noise([*floors.values()])
    return records, floors


def _rows(records: Mapping[str, Record], floors: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row a component: what the paper reports, medians with interquartile ranges, percent saved with its noise."""
    # What stands in the place of times where they are of simulated widths.
    simulated: dict[str, dict[str, Any]] = {
        run: {f"{run}_method": costs.SIMULATED} if record.simulated else {} for run, record in records.items()
    }

    def row(section: str, key: str, technique: str) -> dict[str, Any]:
        entry = reported().get(f"table7.{key}")
        stated = {} if entry is None else {f"reported_{quantity}": value for quantity, value in entry.values.items()}
        return {"panel": costs.PANEL, "section": section, "key": key, "technique": technique, **stated}

    for component, technique in COMPONENTS.items():
        found = row("The paper's rows" if component in IN_THE_PAPER else "What the paper leaves out", component, technique)
        for run, record in records.items():
            for who in ("dense", run):
                part = breakdown(record, who).components.get(component)
                if part is not None and f"{who}_ms" not in found and (who == "dense" or not record.simulated):
                    found[f"{who}_ms"], found[f"{who}_iqr_ms"] = part.median_ms, part.iqr_ms
            floor = floors[run][comparison.FLOOR]
            found |= simulated[run]
            if not record.simulated and (gone := saved(record, component, floor)) is not None:
                found |= {f"{run}_is_own": gone.floor > floor, f"{run}_saved_pct": gone.value, f"{run}_noise_pct": gone.floor}
        yield found
    for key, technique in ((TOTAL, "Total: the untouched pass"), (SUM, "Sum of the above")):
        found = row("All of it", key, technique)
        for run, record in records.items():
            passes = (breakdown(record, who) for who in ("dense", run))
            dense, mine = (one.headline_ms if key == TOTAL else one.sum_ms for one in passes)
            found.setdefault("dense_ms", dense)
            pass_ratio, floor = costs.components(record).run_ratio, floors[run][comparison.FLOOR]
            ratio = pass_ratio.median if key == TOTAL and pass_ratio is not None else mine / dense
            timed = {f"{run}_ms": mine, f"{run}_saved_pct": 100 * (1 - ratio), f"{run}_noise_pct": floor}
            found |= simulated[run] or timed
        yield found
    found = row("All of it", "residual", "Sum off by %")
    for run, record in records.items():
        found |= simulated[run] or {f"{run}_residual_pct": breakdown(record, run).residual_pct}
        found.setdefault("dense_residual_pct", breakdown(record, "dense").residual_pct)
    yield found


def _ms(key: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    if row.get(f"{key}_method") == costs.SIMULATED:
        return (costs.SIMULATED,)
    residual = number(row, f"{key}_residual_pct") is not None
    return filled(f"{{{key}_residual_pct:+.1f}}%" if residual else f"{{{key}_ms:.1f}}\n± {{{key}_iqr_ms:0.5*.1f}}", row)


def _saved_cell(run: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    found = tables.time_difference_cell(number(row, f"{run}_saved_pct"), number(row, f"{run}_noise_pct"))
    return found if row.get(f"{run}_is_own") is True else found[:1]


def _answer(component: str, quantity: str) -> AnsweredBy:
    def of(outcomes: Mapping[str, Outcome]) -> Estimate | None:
        records, floors = _runs([*outcomes.values()])
        if (record := records.get("joint")) is None:
            return None
        floor = floors["joint"][comparison.FLOOR]
        if quantity != "speedup_pct":
            found = breakdown(record, "dense" if quantity == "dense_ms" else "run")
            if component == TOTAL:
                return costs.within(found.headline_ms)
            if (part := found.components.get(component)) is None:
                return None
            return Estimate(part.median_ms, part.median_ms - part.iqr_ms / 2, part.median_ms + part.iqr_ms / 2)
        whole = costs.components(record)
        if component == TOTAL:
            assert whole.run_ratio is not None  # of a run with modules
            return costs.time_saved(whole.run_ratio, floor)
        return saved(record, component, floor)

    what = f"{COMPONENTS.get(component, 'the whole pass')} of a prompt, all four together"
    note = f"{what}, in the rounds that time its parts: `latency` in the record has rounds of its own"
    return AnsweredBy(costs.PANEL, costs.JOINT, of=of, note=note)


ANSWERS = {
    f"table7.{component}.{quantity}": _answer(component, quantity)
    for component in (*IN_THE_PAPER, TOTAL)
    for quantity in reported()[f"table7.{component}"].values
} | {"table7.caption.speedup_pct": _answer(TOTAL, "speedup_pct")}


@artefact(partial(costs.rows, costs.DENSE, *RUNS.values()), answers=ANSWERS)
def table07_component_latency(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table 7: latency by component, dense inference against all four mechanisms, and against halting by attention."""
    columns = [
        Column("", "component", "{technique}", align="left"),
        Column("paper reports, ms", "dense", "{reported_dense_ms:.1f}", expendable=3),
        Column("paper reports, ms", "QuickSilver", "{reported_quicksilver_ms:.1f}", expendable=3),
        Column("paper reports, ms", "saved %", "{reported_speedup_pct:+.1f}", expendable=2),
        Column("measured, ms", "dense", partial(_ms, "dense")),
    ]
    for run, key in RUNS.items():
        columns.append(Column(HEADINGS[key], "ms", partial(_ms, run)))
        columns.append(Column(HEADINGS[key], "saved %", partial(_saved_cell, run)))
    records, floors = _runs(outcomes)
    rounds = {record.config["measure"]["components"]["repeats"] for record in costs.by_key(outcomes).values()}
    legend = (
        f"Medians of {'/'.join(map(str, sorted(rounds)))} rounds in which all of it takes turns, ± half of the interquartile range. Every moment "
        "belongs to one component, the innermost.",
        "saved: percent of the dense component that is gone. ≈ 0: no larger than its noise. Noise is the noise floor below the table (A/A), or half "
        "of the component's two interquartile ranges where that is larger and printed in the cell.",
        "Sum off by: how far the sum of the components is from the untouched pass, which is timed in the same rounds. It is the "
        "cost of the timing marks, and noise.",
        "Attention includes K/V projected for halted tokens. Quantization is coding and decoding; products at fewer bits count "
        "for the component whose float product they replace. Each run is compared with the dense pass of its own rounds; the dense column is that of "
        "all four, so saved does not follow from it for the other run.",
        "The paper measured GPT-2 774M on an A100. Its milliseconds cannot be compared with another model or machine.",
    )
    notes = (*comparison.noise_note(floors.values(), "a prompt's time"), *provenance.notes(outcomes))
    panel = Panel(costs.PANEL, "One pass over a batch of prompts", tuple(columns), notes)
    title = "Table 7: latency by component, reported beside measured"
    return Table(name, title, pd.DataFrame(_rows(records, floors)), (panel,), legend)


# --- by layer ---------------------------------------------------------------------------------------------------------------------
GROUPS = {
    "attention": ("attention",),
    "MLP": ("mlp",),
    "norms": ("norms",),
    "KV write": ("kv_write",),
    "signals, decisions, fusion": ("decisions", "fusion"),
    "quantizing": ("quantization",),
    "gather, masks": ("gather_scatter", "runtime"),
}
LAYERED = {costs.DENSE: "Dense", costs.JOINT: "All four mechanisms", costs.BUDGET: "Halting by attention"}


def layers(record: Record, key: str) -> pd.DataFrame:
    """Time by group and layer (from 1) of a record, in milliseconds and in percent of that layer in the dense pass of the same record, which
    takes turns with it: other records were timed on a machine that was busy otherwise."""
    found, rows = costs.components(record), []
    ours, dense = found.ours.layers_ms, found.dense.layers_ms
    for layer in range(len(next(iter(dense.values())))):
        whole = sum(times[layer] for times in dense.values())
        for group, members in GROUPS.items():
            ms = sum(ours[one][layer] for one in members if one in ours)
            row = {"run": key, "group": group, "layer": layer + 1, "ms": ms, "dense_layer_ms": whole}
            rows.append(row | {"pct_of_dense": 100 * ms / whole})
    return pd.DataFrame(rows)


@artefact(partial(costs.rows, *LAYERED))
def figure_layer_times(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure layer-times: where the time of each layer goes, dense, with the paper's mechanisms, and halting by attention (App. K, layerwise)."""
    records = costs.by_key(outcomes)
    there = [key for key in LAYERED if key in records and not records[key].simulated]
    found = pd.concat([layers(records[key], key) for key in there], ignore_index=True)
    totals = {
        str(key): 100 * mine["ms"].sum() / float(mine.drop_duplicates("layer")["dense_layer_ms"].sum())
        for key, mine in found.groupby("run")
    }
    with style():
        drawing, axes = panels(1, len(there), size=(8.6, 3.2), sharey=True)
        for plot, key in zip(axes.flat, there, strict=True):
            mine = found[found["run"] == key].pivot(index="layer", columns="group", values="pct_of_dense")
            bottom = 0 * mine.iloc[:, 0]
            for place, group in enumerate(GROUPS):
                look = {"color": PALETTE[place], "hatch": HATCHES[place], "edgecolor": "white", "linewidth": 0.2}
                plot.bar(mine.index, mine[group], bottom=bottom, width=0.8, label=group, **look)
                bottom = bottom + mine[group]
            draw.horizontal(plot, 100, color=GREY)
            plot.set_title(LAYERED[key] if key == costs.DENSE else f"{LAYERED[key]}:\n{totals[key]:.0f}% of its own dense pass")
            plot.set(xlabel="layer", xticks=sorted({1, *range(4, len(mine) + 1, 4), len(mine)}))
            plot.grid(axis="x", visible=False)
        axes[0, 0].set_ylabel("time, % of the same layer's\nin the record's dense pass")
        legend_below(drawing, axes[0, 0].get_legend_handles_labels()[0], ncols=len(GROUPS))
    caption = (
        "Medians over rounds of one pass over a batch of prompts, without the tokens after them. Each record is compared with the dense pass that took turns with it. Grey line: "
        "that pass. Embedding and output head belong to no layer.",
        "The components are timed in a pass of their own; Table 7 compares their sum with an untouched pass.",
        *provenance.notes(outcomes),
    )
    said = {costs.JOINT: "with all four mechanisms", costs.BUDGET: "with halting by attention"}
    parts = [f"{totals[key]:.0f}% {words}" for key, words in said.items() if key in totals]
    finding = f"The layers take, of their own dense pass: {', '.join(parts)}" if parts else ""
    return Figure(name, "Where the time of each layer goes", found, drawing, caption, finding=finding)


# --- speed and energy (Figure 16) -----------------------------------------------------------------------------------------------
# row -> what F.2 says of it; the full stack is the last step here
STEPS = {
    "cumulative.halting": reported()["f2.halting"].values,
    "cumulative.kv_skipping": reported()["f2.kv_skipping"].values,
    "cumulative.fusion": reported()["f2.fusion"].values,
    costs.JOINT: reported()["f2.joint"].values,
}
_DENSE_G = STEPS["cumulative.halting"]["dense_g_per_token"]
ENERGY = ("net_j_per_token", "gross_j_per_token", "net_gco2_per_token", "resolution_j_per_token")
_COLUMNS_16 = [
    *("key", "technique", "status", "method", *ENERGY, "energy_pct", "record", "reported_speedup_pct", "reported_emissions_pct"),
    *("speedup_pct", "speedup_pct_low", "speedup_pct_high", comparison.FLOOR, "energy_resolution_pct", comparison.POOLED),
]
_DIAMOND: dict[str, Any] = {"marker": "D", "color": "white", "markeredgecolor": PALETTE[1], "linestyle": ""}  # the paper's number
_BAR: dict[str, Any] = {"width": 0.55, "edgecolor": "black", "linewidth": 0.5, "error_kw": {"elinewidth": 0.8, "capsize": 2}}
_AT: dict[str, Any] = {"textcoords": "offset points", "ha": "center"}


def _estimate(quantity: str, record: Record) -> Estimate | None:
    energy = costs.energy(record)
    if not energy.measured:
        raise ConfigError(f"energy was not measured, but estimated from the clock ({energy.method})")
    if quantity == "dense_g_per_token":
        grams = energy.dense.net_gco2_per_token
        return None if isinstance(grams, str) else costs.within(grams)
    return costs.joules_saved(record)  # in percent of dense joules, and so of emissions: the grid's factor cancels out


_ENTRIES = {f"f2.{step.rpartition('.')[2]}": step for step in STEPS}
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


@artefact(partial(costs.rows, costs.DENSE, *STEPS), answers=_ANSWERS)
def figure16_speed_emissions(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 16: cumulative speedup with energy and emissions per token."""
    found = costs.measured(outcomes, _costs)
    for row in found:
        if (said := STEPS.get(row["key"])) is not None:
            row["reported_speedup_pct"] = said.get("speedup_pct")
            row["reported_emissions_pct"] = 100 * said["emissions_g_per_token"] / _DENSE_G
    frame = pd.DataFrame(found, columns=_COLUMNS_16)
    members = frame.to_dict("records")
    with style():
        drawing, axes = panels(1, 2, size=(8.6, 3.6))
        _speed(axes[0, 0], members)
        _energy(axes[0, 1], members)
        for plot in axes.flat:
            plot.set_xticks(
                range(len(members)), [draw.folded(row["technique"].replace("Quanti", "Quanti-"), 10) for row in members]
            )
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


def _costs(record: Record) -> dict[str, Any]:
    if record.simulated:  # the products of simulated widths are in float: their joules say nothing
        return {"method": costs.SIMULATED}
    energy = costs.energy(record)
    row: dict[str, Any] = {"method": costs.method(record)} | {name: getattr(energy.ours, name) for name in ENERGY}
    if record.dense_fingerprint is None:
        return row if isinstance(energy.dense.net_j_per_token, str) else row | {"energy_pct": 100.0}
    latency = record.measured("latency", LatencyResult)
    row |= comparison.time_saved("speedup_pct", latency.latency_ratio) | {comparison.FLOOR: latency.noise_floor_pct}
    if (saved := costs.joules_saved(record)) is not None:
        row |= {"energy_pct": 100 - saved.value, "energy_resolution_pct": saved.floor}
    return row


def _speed(plot: Any, members: Sequence[Mapping[str, Any]]) -> None:
    for place, row in enumerate(members):
        (value, low, high), floor = numbers(row, "speedup_pct"), number(row, comparison.FLOOR)
        if value is not None and low is not None and high is not None and floor is not None:
            within = abs(value) <= floor
            plot.fill_between([place - 0.42, place + 0.42], -floor, floor, color="#e4e4e4", linewidth=0, zorder=0)
            look: dict[str, Any] = {"color": "white", "hatch": HATCHES[1]} if within else {"color": PALETTE[2]}
            plot.bar(place, value, yerr=whiskers(value, low, high), label="_", **look, **_BAR)
            below = value < 0 and not within
            end, va = (low, "top") if below else (max(high, 0), "bottom")
            plot.annotate("≈ 0\n(noise)" if within else f"{value:+.1f}", (place, end), (0, -4 if below else 4), va=va, **_AT)
        elif place:
            missing = "simulated:\nnot timed" if row.get("method") == costs.SIMULATED else "not timed"
            plot.annotate(missing if row["status"] == comparison.MEASURED else row["status"], (place, 0), (0, 4), **_AT)
        _beside(plot, place, row, "reported_speedup_pct")
    draw.horizontal(plot, 0, color=GREY)
    plot.plot([], [], label="the paper", **_DIAMOND)
    plot.set(ylabel="time saved, % of dense", title="Time of a batch: below 0, slower than dense")
    plot.margins(y=0.18)
    plot.legend()


def _energy(plot: Any, members: Sequence[Mapping[str, Any]]) -> None:
    for place, row in enumerate(members):
        value, around, method = number(row, "energy_pct"), number(row, "energy_resolution_pct") or 0.0, row.get("method")
        if method == costs.SIMULATED:
            plot.annotate("simulated:\nno bar", (place, 0), (0, 4), **_AT)
        elif value is not None:
            plot.bar(place, value, color=PALETTE[4], yerr=around or None, **_BAR)
            plot.annotate(f"{value:.0f}%\n{method}", (place, value + around), (0, 3), **_AT)
        elif isinstance(method, str):
            plot.annotate(f"{costs.BELOW}\n{method}", (place, 0), (0, 4), **_AT)
        _beside(plot, place, row, "reported_emissions_pct")
    plot.plot([], [], label="the paper, emissions", **_DIAMOND)
    draw.horizontal(plot, 100, color=GREY)
    plot.set(ylabel="net energy per token, % of dense", title="Energy and emissions per token")
    plot.margins(y=0.3)
    plot.set_ylim(bottom=0)
    plot.legend(loc="upper left")


def _beside(plot: Any, place: int, row: Mapping[str, Any], stated: str) -> None:
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
    row: dict[str, Any] = {f"{one}_saved_pct": record.flops_saved_pct(f"prompt_{one}") for one in ("nominal", "executed")}
    if record.simulated:
        return row | {"method": costs.SIMULATED}
    dense, run = (  # what the model's own parts take, whatever happens around them
        sum(one.components[name].median_ms for name in KERNELS if name in one.components) for one in (found.dense, found.ours)
    )
    row |= {"kernel_saved_pct": 100 * (1 - run / dense) if run else None, **comparison.time_saved("wall_saved_pct", wall)}
    deciding = {"policy_pct": policy.median, "policy_pct_low": policy.low, "policy_pct_high": policy.high}
    row |= {name: 100 * (ratio - 1) for name, ratio in deciding.items()}
    row |= {comparison.FLOOR: found.noise_floor_pct, "method": costs.method(record)}
    if (joules := costs.joules_saved(record)) is not None:
        row |= {"joules_saved_pct": joules.value, "joules_resolution_pct": joules.floor}
    return row


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
    stages = STAGES.items()
    columns = (
        Column("", "technique", "{technique}", align="left"),
        *(Column(group, heading, f"{{{stage}:+.1f}}") for stage, (group, heading, _) in stages if stage not in TIMED),
        Column("", "deciding takes", partial(_cell, "policy_pct")),
        *(Column(group, heading, partial(_cell, stage)) for stage, (group, heading, _) in stages if stage in TIMED),
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


def _cell(stage: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """A stage that takes time or energy, with what it cannot be told from."""
    value = number(row, stage)
    if row.get("method") == costs.SIMULATED:
        return (costs.SIMULATED,)
    if stage != "joules_saved_pct":
        return time_cell(value, number(row, comparison.FLOOR))
    resolution = number(row, "joules_resolution_pct")
    refused = value is None or resolution is None or abs(value) <= resolution
    return (costs.BELOW if refused else signed(value), row["method"]) if isinstance(row["method"], str) else (NO_VALUE,)


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
        floor, top, policy = floors.get(stage), 100 - saved, number(row, "policy_pct") or 0.0
        refused = floor is not None and abs(saved) <= floor
        look: dict[str, Any] = {"color": "white", "hatch": HATCHES[1]} if refused else {"color": PALETTE[place]}
        plot.bar(place, top, width=0.7, edgecolor="black", linewidth=0.5, **look)
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
    draw.horizontal(plot, 100, color=GREY, zorder=0.5)
    ratio = number(row, "realization")
    realized = "" if ratio is None else f", realized {ratio:.2f}"
    plot.set_title(f"{row['technique']}{' alone' * (row['section'] == 'Isolated')}{realized}", size=8)
    plot.margins(y=0.15)
    plot.grid(axis="x", visible=False)
