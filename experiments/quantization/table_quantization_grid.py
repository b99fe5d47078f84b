"""Table quantization_grid: entropy thresholds five by five, with their utility (E.5, E.9), and the paper's three pairs of thresholds.

The grid is scored on the part of the text that calibrates, as the paper's is on validation text. Its thresholds are of min-max scaled
entropies (E.1), so it acts in prompts only, and what it saves is of the prompt. Utility is that of E.9, against a uniform 8 bits.

Claims: E.5 and E.9 (8.6% for 0.10 of perplexity), which name different pairs, neither on the grid's scale (docs/conflicts.md #18).
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Table

from . import threshold_grid

PAIRS = sweeps.Sweep(
    "quantization_thresholds",
    "The paper's pairs of thresholds, each on the entropies it is given for; test part",
    ("paper_flops_saved_pct", "prompt_paper_flops_saved_pct", "kv_bytes_saved_pct"),
    threshold_grid.SWEEP.beside,
    threshold_grid.UNIFORM,
)
# E.5 and E.9 compare with 8 bits, each with a pair of its own: (0.3, 0.6) on scaled entropies, and (1.0, 2.3).
ANSWERS = {
    **sweeps.answers(PAIRS, "modules=[adaptive_quantization_paper_e]", "e5.quantization", "prompt_paper_flops"),
    **sweeps.answers(PAIRS, "modules=[adaptive_quantization]", "e9.quantization", "prompt_paper_flops"),
}


def rows() -> list[Row]:
    """The grid with the uniform 8 bits it is measured against, then the pairs."""
    return [*threshold_grid.SWEEP.rows(), *PAIRS.rows()]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Every point of the grid with its utility; which λ chooses which point stands in the legend."""
    found = threshold_grid.utilities(outcomes, sweeps.frame(outcomes, (threshold_grid.SWEEP, PAIRS)))
    title = "Thresholds of adaptive quantization: the grid of E.9, and the paper's pairs"
    more = {threshold_grid.SWEEP.experiment: threshold_grid.COLUMNS}
    return sweeps.table(
        outcomes, name, title, (threshold_grid.SWEEP, PAIRS), rows=found, more=more, legend=threshold_grid.legend(found)
    )
