"""Table fusion_and_constituents_llama: Tables 9 and 13 on reference-llama, at the same fractions of its depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Table

from . import runs
from . import table09_13_fusion_and_constituents as ours


def rows() -> list[Row]:
    """Fusion at each of the paper's depths."""
    return runs.on_llama(ours.rows())


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """The panels of Tables 9 and 13."""
    return replace(ours.table(outcomes, name), title="Fused pairs inside constituents, reference-llama")
