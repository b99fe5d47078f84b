"""Table detection: learned token halting on a detector of cars and pedestrians, beside random halting, feature norm and static depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number, signed

from . import results

PANEL = "detection"

rows = results.no_rows


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A section for each way to choose."""
    found = results.summary()
    if found.empty:
        found = pd.DataFrame(columns=["panel", "section", "technique"])
    else:
        found.insert(0, "panel", PANEL)
        for place, (column, of) in enumerate({"section": results.section, "technique": results.said}.items(), 1):
            found.insert(place, column, [of(one.detector, one.policy) for one in found.itertuples()])
        fewer = found["seeds"] < found["seeds"].max()
        found.loc[fewer, "technique"] += " (seeds: " + found.loc[fewer, "seeds"].astype(str) + ")"
    notes = (*results.note(), *(line for clock, said in results.CLOCKS.items() for line in _noise(found, clock, said)))
    panel = Panel(PANEL, "Rotated boxes found, mean of cars (IoU 0.5) and pedestrians (IoU 0.3)", COLUMNS, notes)
    return Table(name, "Token halting on a detector", found, (panel,), LEGEND)


def _ap(key: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        return f"{row[key]:.3f}", f"{row[f'{key}_low']:.3f} to {row[f'{key}_high']:.3f}"

    return cell


def _difference(key: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        value = number(row, key)
        if value is None:
            return (NO_VALUE,)
        return (f"{signed(value, 3)} [{signed(number(row, f'{key}_low'), 3)} {signed(number(row, f'{key}_high'), 3)}]",)

    return cell


def _noise(found: pd.DataFrame, clock: str, said: str) -> tuple[str, ...]:
    """The noise floor of a clock, one for all rows."""
    floor = f"{clock}_{comparison.FLOOR}"
    rows = [
        row | {"record": f"{row['detector']} {row['dial']}", comparison.FLOOR: row[floor]}
        for row in found.to_dict("records")
        if number(row, floor) is not None
    ]
    comparison.pool_noise(rows)
    return comparison.noise_note(rows, f"a scene's time, {said}")


def _realized(clock: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        share, saved = number(row, f"{clock}_realized"), row[f"{clock}_flops_saved_pct"]
        return (NO_VALUE,) if share is None or saved <= 0 else (f"{share:.2f}", f"of {signed(saved)}%")

    return cell


def _technique(row: Mapping[str, Any]) -> Lines:
    dials = {"learned": "p < {:g}", "random": "rates of p < {:g}", "norm": "rates of p < {:g}", "static": "depth {:g}"}
    return (row["technique"], *(form.format(row["dial"]) for policy, form in dials.items() if policy == row["policy"]))


COLUMNS = (
    Column("", "technique", _technique, align="left"),
    Column("computed %", "token-layers", results.cell("tokens", "{:.0f}", scale=100)),
    Column("computed %", "in boxes, last layer", results.cell("kept_in_box", "{:.0f}", scale=100), expendable=3),
    Column("", "FLOPs saved %", lambda row: (signed(row["executed_flops_saved_pct"]),)),
    Column("AP", "recycled", _ap("ap")),
    Column("AP", "not recycled", _ap("ap_unrecycled")),
    Column("difference of AP", "to dense", _difference("vs_dense")),
    Column("difference of AP", "to dense, trained longer", _difference("vs_longer")),
    Column("difference of AP", "to random", _difference("vs_random"), expendable=1),
    Column("difference of AP", "to random, not recycled", _difference("vs_random_unrecycled"), expendable=1),
    *(
        column
        for clock, said in results.CLOCKS.items()
        for column in (
            Column(said, "time ÷ dense", results.cell(f"{clock}_latency_ratio", "{:.2f}"), expendable=2),
            Column(said, "time ÷ FLOPs saved", _realized(clock), expendable=2),
        )
    ),
)

LEGEND = (
    "AP: average precision at forty recalls, mean of two classes and of all seeds; below it the least and the greatest of the seeds.",
    "recycled: the head reads the frozen states of halted tokens; not recycled: it sees nothing of them. The detectors were trained with recycling.",
    "p < 0.5 is the paper's rule; the other thresholds turn the same gates. Random and norm: as many tokens halt after each layer as under "
    "the gates with box weights, and the detector was trained further under that rule, for as many steps as all others.",
    "Differences are paired by scene and seed, with 95% bootstrap intervals over scenes. Dense means trained as long, without halting.",
    "FLOPs: executed, of encoder and head, mean of all scenes and seeds.",
    "Time: one scene a pass, in turns with the dense detector. Encoder: embedded pillars in, states out, what the "
    "paper accelerates. Points to boxes: with features, embedding, head, decoding and suppression, which no halting shortens. Time ÷ FLOPs saved: how "
    "much of the operations that each clock's own part saves, in the scenes that were timed (below), is saved of its time.",
    "Gates alone: trained on the dense detector, whose weights stay. At a tenth of the rate: from there on both are trained, for as many steps again; trained longer "
    "is the dense detector with these steps.",
    "Gates that only read: the derivative of a score goes to the gate's weights and not on into the detector's states.",
)
