"""Table 10: the rows of Table 3 again, with Appendix O's own thresholds on entropies over log V.

Claims: those of Table 3; Appendix O prints its rows above another rule, (0.25, 0.65) on normalised entropies (docs/conflicts.md #18).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quicksilver.records.record import TRACE
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.table import Table

from ..inside import trace_counts
from . import strategies

READS = (TRACE,)

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


def two_bits(panel: Mapping[str, Outcome]) -> Estimate | None:
    """Tokens at 2 bits in the layers that hold widths, by Appendix O's rule."""
    record = panel["appendix_o"].record
    if record is None:
        return None
    layers = trace_counts.by_layer(record)
    deep = layers[layers["bits_2"] + layers["bits_4"] + layers["bits_8"] > 0].groupby("window").sum(numeric_only=True)
    return trace_counts.share_pct(deep["bits_2"], deep["active"])


ANSWERS = {
    "o.two_bits.two_bit_share_pct": tuple(
        AnsweredBy(panel, "appendix_o", of=two_bits, note="by Appendix O's rule, of the tokens in the layers after the decision")
        for panel in strategies.PANELS
    )
}


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Reported beside measured, a panel for each protocol."""
    legend = (
        "The rows above Appendix O's rule are its table. That table uses the thresholds of Table 3, not those of the rule.",
    )
    return strategies.table(outcomes, name, "Table 10: entropy-aware quantization again, reported beside measured", legend)
