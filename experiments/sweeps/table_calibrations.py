"""Table calibrations: the paper's calibrations repeated: halting (B.2, FAQ), KV skipping (C.3), fusion (D.3).

Each panel is a Hydra multirun of conf/experiment. What the paper calibrates on validation text is scored on the calibrating part here,
so that the test part has seen none of it.

Claims: C.3's bound on perplexity; B.2's, G.2's and Figure 9's constants, which stand beside the percentiles they came from.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.sweeps import PROMPT, Sweep
from quicksilver.report.table import Table

KV_SKIPPING = Sweep(
    "c3_kv_skipping",
    "C.3: percentiles of the attention that halted tokens get; calibrating part",
    ("kv_bytes_saved_pct", *PROMPT[:2]),
    {"halting alone": ("modules=[halting]",)},
    "halting alone",
)
SWEEPS = (
    Sweep(
        "b2_halting",
        "B.2: percentiles of drift and entropy around the 25th; calibrating part",
        beside={name: (f"modules=[halting_{name.replace('-', '_')}]",) for name in ("paper-b2", "paper-g2", "paper-fig9")},
    ),
    Sweep("faq_tau_drift", "FAQ: τ in [0.9, 1.1] as threshold of the absolute drift, which alone decides; test part"),
    Sweep("faq_tau_entropy", "FAQ: τ in [0.9, 1.1] as threshold of the entropy in nats, drift below its median; test part"),
    KV_SKIPPING,
    Sweep("d3_fusion", "D.3: percentiles of the distance of neighbours at layers 10, 15 and 20 of 30; calibrating part", PROMPT),
)
ANSWERS = sweeps.answers(KV_SKIPPING, "tau_kv=p95", "c3.kv_threshold")


def rows() -> list[Row]:
    """Every job of every sweep."""
    return [row for sweep in SWEEPS for row in sweep.rows()]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel a calibration."""
    legend = (
        "Where nothing is saved and Δppl is 0, no token met the threshold. A constant that suits one model's drift need not "
        "suit another's.",
        "C.3 asks for less than 0.05 of perplexity added by skipping: that is the difference against halting alone.",
    )
    return sweeps.table(outcomes, name, "Calibrations of the paper, repeated", SWEEPS, legend=legend)
