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
    Sweep("b2_halting", "B.2: percentiles of drift, entropy"),
    Sweep("minimum_depth", "Window of depth for halting"),
    Sweep("resume_layers", "Layers in which halted tokens resume"),
    Sweep("missing_kv", "Layers that resume, K/V of halted tokens"),
    Sweep("c3_kv_skipping", "C.3: percentile of attention", ("kv_bytes_saved_pct",), ALONE, "halting alone"),
    Sweep("d3_fusion", "D.3: depth, percentile of distance", PROMPT),
    Sweep("decision_depth", "Depth at which widths are decided", ("paper_flops_saved_pct",)),
    Sweep("faq_tau_entropy", "FAQ: τ as entropy's threshold, nats"),
)


def rows() -> list[Row]:
    """Every job of every sweep."""
    return [row for sweep in SWEEPS for row in sweep.rows()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """One plot a sweep."""
    return sweeps.figure(outcomes, name, "Saving against cost in the sweeps", SWEEPS)
