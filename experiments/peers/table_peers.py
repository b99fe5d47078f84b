"""Table peers: published methods and ours in the same run: quality, executed FLOPs, time and K/V at matched budgets.

Figures 8 and 15 are drawn from the same records.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Panel, Table

from . import methods


def rows() -> list[Row]:
    """Dense, the peers, ours."""
    return methods.rows()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A section for what a method saves."""
    frame = methods.frame(outcomes)
    title = "Protocol continuation: modules may look ahead inside the prompt; only the tokens after it are scored"
    panel = Panel(
        methods.PANEL, title, methods.columns(), (*comparison.cautions(frame, methods.PANEL), *provenance.notes(outcomes))
    )
    return Table(name, "Peers and ours in the same run", frame, (panel,), (*methods.findings(frame), *methods.LEGEND))
