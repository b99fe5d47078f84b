"""Table halting_by_class_llama: Tables 2, 8 and 12 on reference-llama: the same runs, with thresholds of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Table

from . import runs
from . import table02_08_12_halting_by_class as ours


def rows() -> list[Row]:
    """Four ways to halt."""
    return runs.on_llama(ours.rows())


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """The panels of Tables 2, 8 and 12."""
    return replace(ours.table(outcomes, name), title="Halting by part of speech, reference-llama")
