"""Table 10: the rows of Table 3 again, with Appendix O's own thresholds on entropies over log V.

Claims: those of Table 3; Appendix O prints its rows above another rule, (0.25, 0.65) on normalised entropies (docs/conflicts.md #18).
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Table

from . import strategies

SECTION = "The rule of Appendix O: 0.25 and 0.65 of log V"
MODULE = "adaptive_quantization_paper_o"


def rows() -> list[Row]:
    """The rows of Table 3, and in each panel that of Appendix O."""
    found = []
    for panel in strategies.PANELS:
        found += [row for row in strategies.rows() if row.panel == panel]
        overrides = (f"protocol={panel}", "measure=quick", f"modules=[{MODULE}]")
        found.append(Row(panel, SECTION, "appendix_o", "Entropy-aware 2/4/8", overrides, (MODULE,)))
    return found


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Reported beside measured, a panel for each protocol."""
    legend = (
        "The rows above Appendix O's rule are its table. That table uses the thresholds of Table 3, not those of the rule.",
    )
    return strategies.table(outcomes, name, "Table 10: entropy-aware quantization again, reported beside measured", legend)
