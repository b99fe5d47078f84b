"""Table front: what the paper's mechanisms, bfloat16, truncation and this package's own schedule do to a prompt, in a few rows.

Paper's mechanisms as in Table 11, with more windows; README's first screen shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number, signed, speedup_cell, versus_null_cell

from .techniques import steps

PANEL = "continuation"
ALWAYS = ("protocol=continuation", "dataset.windows=128", "measure.null_control.seeds=3")
PAPER = {
    "isolated.halting": "Token halting",
    "isolated.kv_skipping": "KV skipping",
    "isolated.fusion": "Token fusion",
    "cumulative.quantization": "All four of the paper",
}
OURS = {
    "bfloat16": ("bfloat16 alone", "bfloat16"),
    "truncated": ("Oldest 40% cut, nothing else", "prompt_truncation"),
    "40": ("Predicted, 40% (ours)", "quicksilver"),
}


def rows() -> list[Row]:
    """Dense, the paper's mechanisms, two plain baselines, and what is ours."""
    found = [Row(PANEL, "", "dense", "Dense", (*ALWAYS, "modules=[]"))]
    for _, key, _, needs, overrides in steps():
        if key in PAPER:
            found.append(Row(PANEL, "", key, PAPER[key], (*ALWAYS, *overrides), needs))
    for key, (technique, module) in OURS.items():
        found.append(Row(PANEL, "", key, technique, (*ALWAYS, f"modules=[{module}]"), (module,)))
    return found


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Five columns, dense left out: everything is against it."""
    shown = [one for one in outcomes if one.row.key != "dense"]
    columns = (
        Column("", "technique", lambda row: (row["technique"],), align="left"),
        Column("saved of the prompt, %", "time", lambda row: speedup_cell(row, "prompt_speedup_pct")),
        Column("saved of the prompt, %", "FLOPs", lambda row: (signed(number(row, "prompt_executed_flops_saved_pct")),)),
        Column("", "Δ perplexity", _percent),
        Column("", "beats chance", _beats_chance),
    )
    legend = (
        "Saved: measured time and executed operations of a prompt of 448 tokens, signals included, in percent of dense inference; negative: "
        "it costs more. within: no more than the same model differs from itself. Decoding after the prompt is not faster.",
        "Δ perplexity of the 64 tokens after the prompt, in percent, with its 95% interval. Beats chance: better than the same decisions dealt "
        "to random tokens (mean of three draws), by a paired permutation test at 5% false discoveries over the rows.",
    )
    frame = comparison.frame(shown)
    panel = Panel(PANEL, "Protocol continuation", columns, (*provenance.notes(outcomes), *comparison.noise(frame, PANEL)))
    title = "What it saves, and what it costs"
    return Table(name, title, frame, (panel,), legend)


def _percent(row: Mapping[str, Any]) -> Lines:
    values = [number(row, f"delta_ppl_pct{end}") for end in ("", "_low", "_high")]
    if values[0] is None:
        return (NO_VALUE,)
    middle, low, high = (signed(value) for value in values)
    return (f"{middle}% [{low}, {high}]",)


def _beats_chance(row: Mapping[str, Any]) -> Lines:
    return ({"better": "yes", "worse": "worse", "no diff.": "no"}.get(versus_null_cell(row)[0], NO_VALUE),)
