"""Table options: what depth and the treatment of halted tokens do: decision depth, minimum depth, resuming layers, missing K/V.

Each panel is a Hydra multirun of conf/experiment, one option at a time around the defaults of conf/modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.sweeps import Sweep
from quicksilver.report.table import Table

SWEEPS = (
    Sweep("minimum_depth", "Between which fractions of the depth tokens may halt"),
    Sweep("resume_layers", "In how many last layers halted tokens take part again"),
    Sweep("missing_kv", "What later layers see of a halted token"),
    Sweep(
        "decision_depth",
        "At which fraction of the depth bit-widths are decided",
        ("paper_flops_saved_pct", "executed_flops_saved_pct"),
    ),
)


def rows() -> list[Row]:
    """Every job of every sweep."""
    return [row for sweep in SWEEPS for row in sweep.rows()]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel an option."""
    return sweeps.table(outcomes, name, "Depth, and what becomes of halted tokens: one option at a time", SWEEPS)
