"""Table 7 and the picture of it by layer: where the time of a pass goes, dense, with the mechanisms together, and halting by attention.

One pass over a batch of prompts, taken apart in a pass of its own; the rows below the sum say how far that is from the untouched pass.
The paper's seven rows are measured as it defines them where it does (App. K); what it leaves out is listed below them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from quicksilver.measure.components import BreakdownResult
from quicksilver.records.record import Record
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, HATCHES, PALETTE, Figure, legend_below, panels, style
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number, signed, time_difference_cell

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


def saved(record: Record, component: str, floor_pct: float) -> tuple[float, float] | None:
    """Percent of a component's dense time that is gone, and how much of that is noise: the A/A floor of the whole pass, pooled over the runs, or
    half of the two interquartile ranges where that is more. None where one of the two has no such component."""
    dense, run = (breakdown(record, who).components.get(component) for who in ("dense", "run"))
    if dense is None or run is None or not dense.median_ms:
        return None
    spread = 100 * (dense.iqr_ms + run.iqr_ms) / 2 / dense.median_ms
    return 100 * (1 - run.median_ms / dense.median_ms), max(floor_pct, spread)


# --- Table 7 ----------------------------------------------------------------------------------------------------------------------


def _runs(outcomes: Sequence[Outcome]) -> tuple[dict[str, Record], dict[str, dict[str, Any]]]:
    """The records of the runs, and their A/A floors, pooled."""
    there = costs.by_key(outcomes)
    records = {run: there[key] for run, key in RUNS.items() if key in there}
    floors = {
        run: {"record": one.fingerprint, comparison.FLOOR: costs.components(one).noise_floor_pct} for run, one in records.items()
    }
    comparison.pool_noise([*floors.values()])
    return records, floors


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row a component: what the paper reports, medians with interquartile ranges, percent saved with its noise."""
    return pd.DataFrame(_rows(*_runs(outcomes)))


def simulated(run: str, record: Record) -> dict[str, Any]:
    """What stands in the place of its times where they are of simulated widths."""
    return {f"{run}_method": costs.SIMULATED} if record.simulated else {}


def _rows(records: Mapping[str, Record], floors: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
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
            found |= simulated(run, record)
            if not record.simulated and (gone := saved(record, component, floor)) is not None:
                found |= {f"{run}_is_own": gone[1] > floor, f"{run}_saved_pct": gone[0], f"{run}_noise_pct": gone[1]}
        yield found
    for key, technique in ((TOTAL, "Total: the untouched pass"), (SUM, "Sum of the above")):
        found = row("All of it", key, technique)
        for run, record in records.items():
            dense, mine = (
                one.headline_ms if key == TOTAL else one.sum_ms for one in (breakdown(record, "dense"), breakdown(record, run))
            )
            found.setdefault("dense_ms", dense)
            if record.simulated:
                found |= simulated(run, record)
                continue
            pass_ratio = costs.components(record).run_ratio
            ratio = pass_ratio.median if key == TOTAL and pass_ratio is not None else mine / dense
            floor = floors[run][comparison.FLOOR]
            found |= {f"{run}_ms": mine, f"{run}_saved_pct": 100 * (1 - ratio), f"{run}_noise_pct": floor}
        yield found
    found = row("All of it", "residual", "Sum off by %")
    for run, record in records.items():
        found |= simulated(run, record) or {f"{run}_residual_pct": breakdown(record, run).residual_pct}
        found.setdefault("dense_residual_pct", breakdown(record, "dense").residual_pct)
    yield found


def _ms(key: str, row: Mapping[str, Any]) -> Lines:
    if row.get(f"{key}_method") == costs.SIMULATED:
        return (costs.SIMULATED,)
    residual, value, around = (number(row, f"{key}_{part}") for part in ("residual_pct", "ms", "iqr_ms"))
    if residual is not None or value is None:
        return (NO_VALUE if residual is None else f"{signed(residual)}%",)
    return (f"{value:.1f}",) if around is None else (f"{value:.1f}", f"± {around / 2:.1f}")


def _saved_cell(run: str, row: Mapping[str, Any]) -> Lines:
    found = time_difference_cell(number(row, f"{run}_saved_pct"), number(row, f"{run}_noise_pct"))
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
                return Estimate(*[found.headline_ms] * 3)
            if (part := found.components.get(component)) is None:
                return None
            return Estimate(part.median_ms, part.median_ms - part.iqr_ms / 2, part.median_ms + part.iqr_ms / 2)
        whole = costs.components(record)
        if component == TOTAL:
            assert whole.run_ratio is not None  # of a run with modules
            return costs.time_saved(whole.run_ratio, floor)
        gone = saved(record, component, floor)
        return None if gone is None else Estimate(gone[0], gone[0] - gone[1], gone[0] + gone[1], gone[1])

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
        Column("paper reports, ms", "dense", partial(_ms, "reported_dense"), expendable=3),
        Column("paper reports, ms", "QuickSilver", partial(_ms, "reported_quicksilver"), expendable=3),
        Column("paper reports, ms", "saved %", "{reported_speedup_pct:+.1f}", expendable=2),
        Column("measured, ms", "dense", partial(_ms, "dense")),
    ]
    for run, key in RUNS.items():
        heading = HEADINGS[key]
        columns += [Column(heading, "ms", partial(_ms, run)), Column(heading, "saved %", partial(_saved_cell, run))]
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
    floors = _runs(outcomes)[1].values()
    notes = (*comparison.noise_note(floors, "a prompt's time"), *provenance.notes(outcomes))
    panel = Panel(costs.PANEL, "One pass over a batch of prompts", tuple(columns), notes)
    return Table(name, "Table 7: latency by component, reported beside measured", frame(outcomes), (panel,), legend)


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
    found = costs.components(record)
    ours, dense = found.ours.layers_ms, found.dense.layers_ms
    n_layers = len(next(iter(dense.values())))
    rows = []
    for layer in range(n_layers):
        whole = sum(times[layer] for times in dense.values())
        for group, members in GROUPS.items():
            ms = sum(ours[one][layer] for one in members if one in ours)
            row = {"run": key, "group": group, "layer": layer + 1, "ms": ms, "dense_layer_ms": whole}
            rows.append(row | {"pct_of_dense": 100 * ms / whole})
    return pd.DataFrame(rows)


@artefact(partial(costs.rows, *LAYERED))
def figure_layer_times(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure layer-times: where the time of each layer goes, dense, with the paper's mechanisms, and halting by attention (App. K, layerwise).

    Every record is set against the dense pass of its own.
    """
    records = costs.by_key(outcomes)
    there = [key for key in LAYERED if key in records and not records[key].simulated]
    found = pd.concat([layers(records[key], key) for key in there], ignore_index=True)
    totals = {str(key): 100 * mine["ms"].sum() / _dense_ms(mine) for key, mine in found.groupby("run")}
    with style():
        drawing, axes = panels(1, len(there), size=(8.6, 3.2), sharey=True)
        for plot, key in zip(axes.flat, there, strict=True):
            mine = found[found["run"] == key].pivot(index="layer", columns="group", values="pct_of_dense")
            bottom = 0 * mine.iloc[:, 0]
            for place, group in enumerate(GROUPS):
                look = {"color": PALETTE[place], "hatch": HATCHES[place], "edgecolor": "white", "linewidth": 0.2}
                plot.bar(mine.index, mine[group], bottom=bottom, width=0.8, label=group, **look)
                bottom = bottom + mine[group]
            plot.axhline(100, color=GREY, linewidth=0.8, linestyle="-", marker="")
            plot.set_title(LAYERED[key] if key == costs.DENSE else f"{LAYERED[key]}:\n{totals[key]:.0f}% of its own dense pass")
            plot.set_xlabel("layer")
            plot.set_xticks(sorted({1, *range(4, len(mine) + 1, 4), len(mine)}))
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


def _dense_ms(found: pd.DataFrame) -> float:
    """All layers of the dense pass."""
    return float(found.drop_duplicates("layer")["dense_layer_ms"].sum())
