"""The paper's calibrations, the options of depth and of halted tokens: each panel is a Hydra multirun of conf/experiment.

What the paper calibrates on validation text is scored on the calibrating part here, so that the test part has seen none of it.

Claims: C.3's bound on perplexity; B.2's, G.2's and Figure 9's constants, which stand beside the percentiles they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.sweeps import PROMPT, Sweep
from quicksilver.report.table import Table

if TYPE_CHECKING:  # a table needs no matplotlib
    from quicksilver.report.figure import Figure

ALONE = {"halting alone": ("modules=[halting]",)}
KV_BYTES = ("kv_bytes_saved_pct", *PROMPT[:2])
OPTIONS = (
    Sweep("minimum_depth", "Between which fractions of the depth tokens may halt"),
    Sweep("resume_layers", "In how many last layers halted tokens take part again"),
    Sweep("missing_kv", "What later layers see of a halted token"),
    Sweep("decision_depth", "At which fraction of the depth bit-widths are decided", ("paper_flops_saved_pct", "executed_flops_saved_pct")),
)  # fmt: skip
CONSTANTS = {name: (f"modules=[halting_{name.replace('-', '_')}]",) for name in ("paper-b2", "paper-g2", "paper-fig9")}
KV_SKIPPING = Sweep(
    "c3_kv_skipping",
    "C.3: percentiles of the attention that halted tokens get; calibrating part",
    KV_BYTES,
    ALONE,
    "halting alone",
)
CALIBRATIONS = (
    Sweep("b2_halting", "B.2: percentiles of drift and entropy around the 25th; calibrating part", beside=CONSTANTS),
    Sweep("faq_tau_drift", "FAQ: τ in [0.9, 1.1] as threshold of the absolute drift, which alone decides; test part"),
    Sweep("faq_tau_entropy", "FAQ: τ in [0.9, 1.1] as threshold of the entropy in nats, drift below its median; test part"),
    KV_SKIPPING,
    Sweep("d3_fusion", "D.3: percentiles of the distance of neighbours at layers 10, 15 and 20 of 30; calibrating part", PROMPT),
)
DRAWN = (
    Sweep("b2_halting", "Percentile of drift, of entropy (B.2)"),
    Sweep("minimum_depth", "Layers in which tokens may halt"),
    Sweep("resume_layers", "Last layers that halted tokens rejoin"),
    Sweep("missing_kv", "Last layers rejoined, K/V of halted tokens"),
    Sweep("c3_kv_skipping", "KV skipping: percentile of attention (C.3)", KV_BYTES[:1], ALONE, "halting alone"),
    Sweep("d3_fusion", "Fusion: depth, percentile of distance (D.3)", PROMPT),
    Sweep("decision_depth", "Depth at which bit-widths are decided", ("paper_flops_saved_pct",)),
    Sweep("faq_tau_entropy", "Entropy threshold τ in nats (FAQ)"),
)


def jobs_of(*wanted: Sweep) -> Callable[[], list[Row]]:
    """What returns every job of these sweeps."""
    return lambda: [row for sweep in wanted for row in sweep.rows()]


@artefact(jobs_of(*OPTIONS))
def table_options(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table options: what depth and the treatment of halted tokens do: decision depth, minimum depth, resuming layers, missing K/V."""
    return sweeps.table(outcomes, name, "Depth, and what becomes of halted tokens: one option at a time", OPTIONS)


@artefact(jobs_of(*CALIBRATIONS), answers=sweeps.answers(KV_SKIPPING, "tau_kv=p95", "c3.kv_threshold"))
def table_calibrations(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table calibrations: the paper's calibrations repeated: halting (B.2, FAQ), KV skipping (C.3), fusion (D.3)."""
    legend = (
        "Where nothing is saved and Δppl is 0, no token met the threshold. A constant that suits one model's drift need not "
        "suit another's.",
        "C.3 asks for less than 0.05 of perplexity added by skipping: that is the difference against halting alone.",
    )
    return sweeps.table(outcomes, name, "Calibrations of the paper, repeated", CALIBRATIONS, legend=legend)


@artefact(jobs_of(*DRAWN))
def figure_sweeps(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure sweeps: what each calibration and option saves against what it costs, with the front of each sweep."""
    return sweeps.figure(outcomes, name, "Saving against cost, option by option", DRAWN)
