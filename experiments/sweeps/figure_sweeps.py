"""Figure sweeps: what each calibration and option saves against what it costs, with the front of each sweep.

Drawn from the records of `table_calibrations` and `table_options`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import Figure
from quicksilver.report.sweeps import PROMPT, Sweep

ALONE = {"halting alone": ("modules=[halting]",)}
SWEEPS = (
    Sweep("b2_halting", "Percentile of drift, of entropy (B.2)"),
    Sweep("minimum_depth", "Layers in which tokens may halt"),
    Sweep("resume_layers", "Last layers that halted tokens rejoin"),
    Sweep("missing_kv", "Last layers rejoined, K/V of halted tokens"),
    Sweep("c3_kv_skipping", "KV skipping: percentile of attention (C.3)", ("kv_bytes_saved_pct",), ALONE, "halting alone"),
    Sweep("d3_fusion", "Fusion: depth, percentile of distance (D.3)", PROMPT),
    Sweep("decision_depth", "Depth at which bit-widths are decided", ("paper_flops_saved_pct",)),
    Sweep("faq_tau_entropy", "Entropy threshold τ in nats (FAQ)"),
)


def rows() -> list[Row]:
    """Every job of every sweep."""
    return [row for sweep in SWEEPS for row in sweep.rows()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """One plot a sweep."""
    return sweeps.figure(outcomes, name, "Saving against cost, option by option", SWEEPS)
