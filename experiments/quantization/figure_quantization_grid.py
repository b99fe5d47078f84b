"""Figure quantization_grid: what each pair of entropy thresholds saves, costs and is worth (E.9).

Drawn from the records of `table_quantization_grid`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome
from quicksilver.report.figure import Figure, style

from . import table_quantization_grid as threshold_grid

rows = threshold_grid.SWEEP.rows


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Three heatmaps over the thresholds and the plane of saving and cost with its front."""
    found = threshold_grid.utilities(outcomes, sweeps.frame(outcomes, (threshold_grid.SWEEP,)))
    with style():
        drawing = threshold_grid.draw(found)
    shown = [
        *threshold_grid.SWEEP.axes(),
        "delta_flops",
        "base_delta_ppl",
        "base_delta_ppl_low",
        "base_delta_ppl_high",
        "utility",
        "front",
        "record",
    ]
    caption = (*threshold_grid.legend(found), *sweeps.notes(outcomes, name))
    return Figure(name, "Grid of entropy thresholds for bit-widths (E.9)", found[["key", *shown]], drawing, caption)
