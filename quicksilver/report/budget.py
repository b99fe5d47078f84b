"""Budgets as a table: what was asked, where the dial stood, what that gave on the calibrating text, the test text, and other texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from quicksilver.harness.budget import Fit
from quicksilver.harness.record import Record
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.cells import interval_cell, number, signed, versus_null_cell
from quicksilver.report.table import Column, Lines, Panel, Table

LEGEND = (
    "asked, reached: percent of dense FLOPs saved, or of perplexity added. The dial was set on the calibrating text alone "
    "and did not change afterwards. Thresholds given as percentiles keep the numbers that they had on that text.",
    "Δppl: perplexity minus dense perplexity on the same windows with its 95% interval; below it the same in percent. Null: the same "
    "decisions dealt to random tokens; vs null: better, worse, or no difference.",
    "kept: whether the budget holds; `undecided` where the interval of a cost holds both answers.",
)


@dataclass(frozen=True)
class Report:
    """One budget, with the records of the frozen dial.

    Attributes:
        later: what it was used on after the search, and the record and its dense one: `test`, or the name of another text.
    """

    found: Fit
    later: Mapping[str, tuple[Record, Record]]


def outcomes(reports: Sequence[Report]) -> list[Outcome]:
    """A row for the calibrating text and one for each later text, a panel a budget."""
    rows = []
    for one in reports:
        fit = one.found
        there = {"calibrating": (fit.chosen.record, fit.chosen.dense), **one.later}
        for key, (record, dense) in there.items():
            panel = f"{fit.dial.name} {fit.budget.slug}"
            rows.append(Outcome(Row(panel, "", key, key, fit.dial.at(fit.chosen.value)), record, dense))
    return rows


def frame(reports: Sequence[Report]) -> pd.DataFrame:
    """What `comparison.frame` has of every outcome, and what was asked and reached."""
    there = outcomes(reports)
    rows = comparison.frame(there)
    asked = [one for one in reports for _ in range(1 + len(one.later))]
    rows.insert(4, "budget", [str(one.found.budget) for one in asked])
    rows.insert(5, "dial", [f"{key.rpartition('.')[2]}={value}" for key, value in map(_dial, asked)])
    rows.insert(6, "asked_pct", [one.found.budget.pct for one in asked])
    reached = [one.found.budget.reached(out.record, out.dense) for one, out in zip(asked, there, strict=True)]  # type: ignore[arg-type]
    rows.insert(7, "reached_pct", reached)
    rows.insert(8, "kept", [_kept(one, out) for one, out in zip(asked, there, strict=True)])
    rows["prompt_nominal_flops_saved_pct"] = [
        out.record.flops_saved_pct("prompt_nominal") if out.record else None for out in there
    ]
    return rows


def _dial(one: Report) -> tuple[str, str]:
    return one.found.dial.keys[0], one.found.dial.text(one.found.chosen.value)


def _kept(one: Report, outcome: Outcome) -> str:
    assert outcome.record is not None
    assert outcome.dense is not None
    budget = one.found.budget
    if budget.kind == "cost":
        from quicksilver.harness.stats import paired_records

        paired = paired_records(outcome.record, outcome.dense)
        if paired.relative_pct_low <= budget.pct < paired.relative_pct_high:
            return "undecided" if not budget.sure else "no"
    return "yes" if budget.met(budget.reached(outcome.record, outcome.dense)) else "no"


def table(reports: Sequence[Report], name: str) -> Table:
    """A panel a budget."""
    rows = frame(reports)
    panels = []
    for one in reports:
        key = f"{one.found.dial.name} {one.found.budget.slug}"
        there = [outcome for outcome in outcomes([one]) if outcome.row.panel == key]
        notes = (f"{len(one.found.steps)} positions of the dial tried on the calibrating text.", *provenance.notes(there))
        title = f"To {one.found.budget}, by {one.found.dial.name}"
        panels.append(Panel(key, title, COLUMNS, notes))
    marks = (comparison.LOOKAHEAD,) if rows["lookahead"].eq(True).any() else ()
    return Table(name, "Budgets: set on the calibrating text, used on others", rows, tuple(panels), (*LEGEND, *marks))


def _pct(key: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        return (signed(number(row, key)),)

    return cell


COLUMNS = (
    Column("", "text", lambda row: (row["technique"],), align="left"),
    Column("", "dial", lambda row: (row["dial"],), align="left"),
    Column("budget, %", "asked", lambda row: (f"{row['asked_pct']:g}",)),
    Column("budget, %", "reached", lambda row: (signed(number(row, "reached_pct"), 2),)),
    Column("budget, %", "kept", lambda row: (row["kept"],)),
    Column("saved, % of dense FLOPs", "exec", _pct("executed_flops_saved_pct")),
    Column("saved, % of dense FLOPs", "prompt", _pct("prompt_executed_flops_saved_pct"), expendable=2),
    Column("saved, % of dense FLOPs", "paper", _pct("paper_flops_saved_pct"), expendable=3),
    Column("perplexity against dense", "Δppl", lambda row: interval_cell(row, "delta_ppl")),
    Column("perplexity against dense", "Δppl of null", lambda row: interval_cell(row, "null_delta_ppl"), expendable=4),
    Column("perplexity against dense", "vs null", versus_null_cell, expendable=1),
)
