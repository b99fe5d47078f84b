"""Figure factorial: effects and interactions of the four mechanisms, and the synergy δ of every set of them (Appendix P).

Drawn from the records of `table_factorial`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome
from quicksilver.report.figure import Figure, style
from quicksilver.runtime.errors import QuickSilverError

from . import factorial

rows = factorial.rows


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Matrices of effects, bars of δ.

    Raises:
        QuickSilverError: a combination has no record, so there are no interactions.
    """
    found = factorial.frame(outcomes)
    if not found["panel"].eq(factorial.EFFECTS).any():
        raise QuickSilverError("interactions need a record of every combination, and not every one has one.")
    with style():
        drawing = factorial.draw(found)
    caption = (*factorial.legend(), *sweeps.notes(outcomes, name))
    return Figure(name, "All combinations of the four mechanisms", found, drawing, caption)
