"""Table 4: GLUE and SuperGLUE under the paper's rules, ours, and controls: score lost, paired by example, and operations saved.

A causal model that was fine-tuned on label words answers by the likeliest of them. The paper names no model, prompt, head or split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import reported
from quicksilver.report.comparison import MEASURED
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number, signed

from . import scores

READS = scores.READ
LEGEND = (
    "score: accuracy, of CoLA Matthews' correlation, in points (× 100); below it that of the most frequent answer. A task on which the dense "
    "model is not above it (McNemar, of CoLA the bootstrap, 5%) says `chance`: there is nothing to lose, and its claim has no verdict.",
    "lost: dense score minus score with its 95% interval, paired by example; below it the smallest loss that so many examples show four times "
    "in five. p: McNemar's, exact; below it how many answers changed.",
    "saved: executed operations of prompts and choices, signals included, in percent of dense; below it by the paper's ledger (Appendix J).",
    "depth: layers that the last token of a prompt goes through, mean: the token that decides.",
    "Ours, the oldest and random tokens: 45% of a prompt's tokens stop at a fifth of the depth and are dropped; only who stops differs.",
    "The paper: its model, prompt, head and split are not named; its caption says under 1%, its text under 2%, and its CoLA is −1.0.",
    "Prompts of equal length go together (at most 8), so nothing is padding; the paper pads to the longest of a batch. No time is given: "
    "prompts of a few dozen tokens are dominated by what a call costs, whatever is halted.",
)


def rows() -> list[Row]:
    """Every task under every system."""
    return scores.rows()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A section for each task."""
    frame = scores.frame(outcomes)
    for quantity in ("dense_score", "quicksilver_score", "score_drop"):
        frame[f"reported_{quantity}"] = [reported()[scores.TASKS[task][1]].values[quantity] for task in frame["task"]]
    columns = (
        Column(
            "",
            "system",
            lambda row: (row["technique"],) if row["status"] == MEASURED else (row["technique"], row["status"]),
            align="left",
        ),
        Column("paper reports", "score", _reported, expendable=3),
        Column("measured", "score", _score),
        Column("measured", "lost", _lost),
        Column("measured", "p", _p, expendable=2),
        Column("saved %", "operations", _saved),
        Column("", "depth", _depth, expendable=1),
    )
    title = "The likeliest label word after the prompt; modules may look ahead inside it"
    panel = Panel(scores.PANEL, title, columns, (*_splits(outcomes), *provenance.notes(outcomes)))
    return Table(name, "Tasks of GLUE and SuperGLUE under adaptive inference", frame, (panel,), (*findings(frame), *LEGEND))


def _reported(row: Mapping[str, Any]) -> Lines:
    if row["system"] not in (scores.DENSE, "paper"):
        return ("",)
    key = "reported_dense_score" if row["system"] == scores.DENSE else "reported_quicksilver_score"
    return (f"{row[key]:.1f}",)


def _score(row: Mapping[str, Any]) -> Lines:
    score, majority = number(row, "score"), number(row, "majority")
    if score is None or majority is None:
        return (NO_VALUE,)
    if row["system"] != scores.DENSE:
        return (f"{score:.1f}",)
    return (f"{score:.1f}", f"majority {majority:.1f}" if row["above_chance"] else f"chance {majority:.1f}")


def _lost(row: Mapping[str, Any]) -> Lines:
    value, low, high, smallest = (number(row, name) for name in ("lost", "lost_low", "lost_high", "smallest_seen"))
    if value is None or smallest is None:
        return (f"{row['examples']:.0f} examples",) if number(row, "examples") is not None else (NO_VALUE,)
    return (f"{signed(value)} [{signed(low)} {signed(high)}]", f"seen from {smallest:.1f}")


def _p(row: Mapping[str, Any]) -> Lines:
    p, flipped = number(row, "mcnemar_p"), number(row, "flipped")
    if p is None or flipped is None:
        return ("",)
    return ("<0.001" if p < 0.001 else f"{p:.3f}", f"{flipped:.0f} changed")


def _saved(row: Mapping[str, Any]) -> Lines:
    executed, paper = number(row, "executed_flops_saved_pct"), number(row, "paper_flops_saved_pct")
    if executed is None:
        total = number(row, "executed_flops")
        return (NO_VALUE,) if total is None else (f"{total / 1e9:.2f} G",)
    return (signed(executed), f"paper {signed(paper)}")


def _depth(row: Mapping[str, Any]) -> Lines:
    depth, layers = number(row, "deciding_depth"), number(row, "layers")
    return (NO_VALUE,) if depth is None or layers is None else (f"{depth:.1f} of {layers:.0f}",)


def _splits(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """How many rows of what were answered."""
    said = {}
    for outcome in outcomes:
        if outcome.record is not None:
            task = outcome.row.key.split(".")[0]
            count = len(scores.examples(outcome.record.path))
            truncated = int(scores.examples(outcome.record.path)["truncated"].sum())
            said[task] = f"{outcome.row.section} {count}" + (
                f" ({truncated} cut on the left to fit the context)" if truncated else ""
            )
    if not said:
        return ()
    return (f"Labelled rows that nothing was trained on: {', '.join(said.values())}. MNLI is read from the hub (dataset=mnli).",)


def findings(frame: pd.DataFrame) -> tuple[str, ...]:
    """What the rows say together, of the tasks that can lose something."""
    rows = frame[(frame["status"] == MEASURED) & (frame["system"] != scores.DENSE) & (frame["above_chance"] == True)]  # noqa: E712
    dense = frame[(frame["status"] == MEASURED) & (frame["system"] == scores.DENSE)]
    chance = [section for section, above in zip(dense["section"], dense["above_chance"], strict=True) if not above]
    said = []
    for technique, members in rows.groupby("technique", sort=False):
        parts = [
            f"{one.section} {signed(-one.lost)} [{signed(-one.lost_high)} {signed(-one.lost_low)}] at {one.executed_flops_saved_pct:.0f}% saved"
            for one in members.itertuples()
        ]
        said.append(f"{technique}: {', '.join(parts)}.")
    if chance:
        said.append(f"Not above chance here, and so without a verdict: {', '.join(chance)}.")
    return tuple(said)


def _answers() -> dict[str, tuple[AnsweredBy, ...]]:
    """What a task loses, and its score, are answered by the paper's four rules together; its dense score by dense inference."""
    found: dict[str, tuple[AnsweredBy, ...]] = {}
    for task, (title, claim, _) in scores.TASKS.items():
        technique, key = scores.SYSTEMS["paper"][0], f"{task}.paper"
        found[f"{claim}.score_drop"] = (AnsweredBy(scores.PANEL, key, of=scores.loss_of(key), note=f"{title}: {technique}"),)
        for quantity, system in (("dense_score", scores.DENSE), ("quicksilver_score", "paper")):
            technique, key = scores.SYSTEMS[system][0], f"{task}.{system}"
            found[f"{claim}.{quantity}"] = (AnsweredBy(scores.PANEL, key, of=scores.score_of(key), note=f"{title}: {technique}"),)
    return found  # what the paper says of most or of all tasks has no answer here: one task alone is above chance


ANSWERS = _answers()
