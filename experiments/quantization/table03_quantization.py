"""Table 3: entropy-aware quantization, uniform and by entropy, with the paper's thresholds and at the paper's mix.

Claims: the five rows of Table 3 (reported.yaml), which the paper prints again as Table 10.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.records.record import TRACE
from quicksilver.report.artefacts import Outcome
from quicksilver.report.table import Table

from . import strategies

READS = (TRACE,)

rows = strategies.rows
ANSWERS = strategies.answers()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Reported beside measured, a panel for each protocol."""
    return strategies.table(outcomes, name, "Table 3: entropy-aware quantization, reported beside measured")
