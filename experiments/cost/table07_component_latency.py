"""Table 7: latency by component, dense inference against all four mechanisms, and against halting by attention.

One pass over a batch of prompts, taken apart in a pass of its own; the rows below the sum say how far that is from the untouched pass.
The paper's seven rows are measured as it defines them where it does (App. K); what it leaves out is listed below them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.records.record import Record
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number, signed, time_difference_cell

from . import costs

RUNS = {"joint": costs.JOINT, "budget": costs.BUDGET}
HEADINGS = {"joint": "all four", "budget": "halting by attention"}
IN_THE_PAPER = ("embedding", "attention", "mlp", "kv_write", "quantization", "fusion")
TOTAL = "total"


def rows() -> list[Row]:
    """Dense inference, all four together, the attention budget."""
    return costs.rows((costs.DENSE, *RUNS.values()))


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """The paper's milliseconds beside measured ones, component by component."""
    columns = [
        Column("", "component", lambda row: (row["technique"],), align="left"),
        Column("paper reports, ms", "dense", _ms("reported_dense_ms"), expendable=3),
        Column("paper reports, ms", "QuickSilver", _ms("reported_quicksilver_ms"), expendable=3),
        Column("paper reports, ms", "saved %", lambda row: (signed(number(row, "reported_speedup_pct")),), expendable=2),
        Column("measured, ms", "dense", _ms("dense_ms", "dense_iqr_ms")),
    ]
    for run, heading in HEADINGS.items():
        columns += [Column(heading, "ms", _ms(f"{run}_ms", f"{run}_iqr_ms")), Column(heading, "saved %", _saved(run))]
    found = frame(outcomes)
    title = "Table 7: latency by component, reported beside measured"
    notes = (*comparison.noise_note(_floors(_records(outcomes)).values(), "a prompt's time"), *provenance.notes(outcomes))
    panel = Panel(costs.PANEL, "One pass over a batch of prompts", tuple(columns), notes)
    return Table(name, title, found, (panel,), _legend(outcomes))


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row a component: what the paper reports, medians with interquartile ranges, percent saved with its noise."""
    records = _records(outcomes)
    floors = {run: row[comparison.FLOOR] for run, row in _floors(records).items()}
    shown = [
        (component, "The paper's rows" if component in IN_THE_PAPER else "What the paper leaves out")
        for component in costs.COMPONENTS
    ]
    shown.sort(key=lambda one: one[0] not in IN_THE_PAPER)
    found = [_component(component, section, records, floors) for component, section in shown]
    whole = ((TOTAL, "Total: the untouched pass"), ("sum", "Sum of the above"))
    found += [_whole(key, technique, records, floors) for key, technique in whole]
    residual: dict[str, Any] = {"panel": costs.PANEL, "section": "All of it", "key": "residual", "technique": "Sum off by %"}
    for run, record in records.items():
        residual[f"{run}_residual_pct"] = costs.components(record).ours.residual_pct
        residual.setdefault("dense_residual_pct", costs.components(record).dense.residual_pct)
    return pd.DataFrame([*found, residual])


def _records(outcomes: Sequence[Outcome]) -> dict[str, Record]:
    return {run: record for run, key in RUNS.items() if (record := costs.by_key(outcomes).get(key)) is not None}


def _floors(records: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """The A/A floors of the runs, pooled."""
    rows = {
        run: {"record": one.fingerprint, comparison.FLOOR: costs.components(one).noise_floor_pct} for run, one in records.items()
    }
    comparison.pool_noise([*rows.values()])
    return rows


def _paper(component: str) -> dict[str, float]:
    entry = reported().get(f"table7.{component}")
    return {} if entry is None else {f"reported_{quantity}": value for quantity, value in entry.values.items()}


def _component(component: str, section: str, records: Mapping[str, Record], floors: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"panel": costs.PANEL, "section": section, "key": component, "technique": costs.COMPONENTS[component]}
    row |= _paper(component)
    for run, record in records.items():
        for who, prefix in (("dense", "dense"), ("run", run)):
            measured = costs.component_ms(record, who, component)
            if measured is not None and f"{prefix}_ms" not in row:
                row[f"{prefix}_ms"], row[f"{prefix}_iqr_ms"] = measured
        saved = costs.component_saved(record, component, floors[run])
        if saved is not None:
            row[f"{run}_is_own"] = saved[1] > floors[run]
            row[f"{run}_saved_pct"], row[f"{run}_noise_pct"] = saved
    return row


def _whole(key: str, technique: str, records: Mapping[str, Record], floors: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"panel": costs.PANEL, "section": "All of it", "key": key, "technique": technique}
    row |= _paper(key)
    for run, record in records.items():
        found = costs.components(record)
        dense, mine = found.dense, found.ours
        row.setdefault("dense_ms", dense.headline_ms if key == TOTAL else dense.sum_ms)
        row[f"{run}_ms"] = mine.headline_ms if key == TOTAL else mine.sum_ms
        ratio = found.run_ratio.median if key == TOTAL and found.run_ratio is not None else mine.sum_ms / dense.sum_ms
        row[f"{run}_saved_pct"] = 100 * (1 - ratio)
        row[f"{run}_noise_pct"] = floors[run]
    return row


def _ms(key: str, spread: str | None = None) -> Callable[[Mapping[str, Any]], Lines]:
    def cell(row: Mapping[str, Any]) -> Lines:
        residual = number(row, key.replace("_ms", "_residual_pct"))
        if residual is not None:
            return (f"{signed(residual)}%",)
        value, around = number(row, key), None if spread is None else number(row, spread)
        if value is None:
            return (NO_VALUE,)
        return (f"{value:.1f}",) if around is None else (f"{value:.1f}", f"± {around / 2:.1f}")

    return cell


def _saved(run: str) -> Callable[[Mapping[str, Any]], Lines]:
    def cell(row: Mapping[str, Any]) -> Lines:
        found = time_difference_cell(number(row, f"{run}_saved_pct"), number(row, f"{run}_noise_pct"))
        return found if row.get(f"{run}_is_own") is True else found[:1]

    return cell


def _legend(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    rounds = {record.config["measure"]["components"]["repeats"] for record in costs.by_key(outcomes).values()}
    return (
        f"Medians of {'/'.join(map(str, sorted(rounds)))} rounds in which all of it takes turns, ± half of the interquartile range. Every moment "
        "belongs to one component, the innermost.",
        "saved: percent of the dense component that is gone. ≈ 0: no larger than its noise. Noise is the noise floor below the table (A/A), or half "
        "of the component's two interquartile ranges where that is larger and printed in the cell.",
        "Sum off by: how far the sum of the components is from the untouched pass, which is timed in the same rounds. It is the "
        "cost of the timing marks, and noise.",
        "Attention includes K/V projected for halted tokens. Quantization is coding and decoding; products at fewer bits count "
        "for the component whose float product they replace. The dense column is that of the first run.",
        "The paper measured GPT-2 774M on an A100. Its milliseconds cannot be compared with another model or machine.",
    )


def _answer(component: str, quantity: str) -> AnsweredBy:
    def of(outcomes: Mapping[str, Outcome]) -> Estimate | None:
        record = outcomes[costs.JOINT].record
        if record is None:
            return None
        if quantity == "speedup_pct":
            if component == TOTAL:
                ratio = costs.components(record).run_ratio
                assert ratio is not None  # of a run with modules
                middle, low, high = (100 * (1 - end) for end in (ratio.median, ratio.high, ratio.low))
                return Estimate(middle, low, high, costs.components(record).noise_floor_pct)
            saved = costs.component_saved(record, component)
            return None if saved is None else Estimate(saved[0], saved[0] - saved[1], saved[0] + saved[1], saved[1])
        who = "dense" if quantity == "dense_ms" else "run"
        if component == TOTAL:
            ms = (costs.components(record).dense if who == "dense" else costs.components(record).ours).headline_ms
            return Estimate(ms, ms, ms)
        measured = costs.component_ms(record, who, component)
        return None if measured is None else Estimate(measured[0], measured[0] - measured[1] / 2, measured[0] + measured[1] / 2)

    return AnsweredBy(
        costs.PANEL,
        costs.JOINT,
        of=of,
        note=f"{costs.COMPONENTS.get(component, 'the whole pass')} of a prompt, all four together",
        by_definition="no mechanism touches the embedding" if (component, quantity) == ("embedding", "speedup_pct") else "",
    )


ANSWERS = {
    f"table7.{component}.{quantity}": _answer(component, quantity)
    for component in (*IN_THE_PAPER, TOTAL)
    for quantity in reported()[f"table7.{component}"].values
} | {"table7.caption.speedup_pct": _answer(TOTAL, "speedup_pct")}
