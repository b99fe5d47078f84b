"""The frontier inside a prompt: what is saved of its work against what that costs the tokens after it, technique by technique.

Every technique has one dial, and nothing else differs: which tokens leave, after the same layer. The null is `random`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.reported import reported
from quicksilver.report.sweeps import front

PANEL = "frontier"
SHARES = (0.23, 0.34, 0.453, 0.566)  # of the prompt's tokens that leave after a fifth of the depth
# Without looking: all tokens of the prompt but its last stop at that depth.
DEPTHS = (0.8, 0.7, 0.6, 0.5)
THRESHOLDS = (0.5,)  # of trained gates, whose budget is 40% at ½


@dataclass(frozen=True)
class Technique:
    """One line of the frontier.

    Attributes:
        name: what is printed.
        overrides: of a value of the dial.
        dial: its values.
    """

    name: str
    overrides: Callable[[float], tuple[str, ...]]
    dial: tuple[float, ...] = SHARES


def _halting(*more: str) -> Callable[[float], tuple[str, ...]]:
    return lambda share: ("modules=[halting_attention]", *more, f"modules.halting.halted_share={share}")


def _static(depth: float) -> tuple[str, ...]:
    where = "modules.static_depth"
    return ("modules=[static_depth]", f"{where}.depth={depth}", f"{where}.protect_last=1", f"{where}.missing_kv=drop")


def _truncated(share: float) -> tuple[str, ...]:
    return ("modules=[prompt_truncation]", f"modules.prompt_truncation.keep={share}")


def _predicted(pct: float) -> tuple[str, ...]:
    return ("modules=[quicksilver]", f"modules.quicksilver.save={pct / 100:g}")


def _learned(threshold: float) -> tuple[str, ...]:
    return ("modules=[learned_halting]", f"modules.learned_halting.threshold={threshold:g}")


TECHNIQUES = {
    "predicted": Technique("Dropped, then predicted (budget)", _predicted, (40, 50)),
    "learned": Technique("Learned (p below)", _learned, THRESHOLDS),
    "fused": Technique(
        "Fusion of the least attended",
        lambda share: ("modules=[token_fusion_attention]", f"modules.token_fusion.fused_share={share}"),
    ),
    "position": Technique("Halting, oldest", _halting("modules.halting.signal=position")),
    "attention": Technique("Halting, least attended", _halting()),
    "drift": Technique("Halting, least drift (paper)", _halting("modules.halting.signal=drift")),
    "random": Technique("Halting, random", _halting("modules.halting.signal=random")),
    "truncated": Technique("Truncation, newest kept", _truncated, DEPTHS),
    "static": Technique("Static depth", _static, DEPTHS),
}


def paper_bar() -> tuple[float, float]:
    """What the abstract says, in percent: FLOPs saved, and perplexity lost of that of Table 3's baseline."""
    joint = reported()["abstract.joint"]
    _, most = joint.bounds["delta_ppl"]
    assert most is not None  # "≤ 0.2"
    return joint.values["flops_saved_pct"], 100 * most / reported()["table3.baseline"].values["ppl"]


def rows() -> list[Row]:
    """A row a technique and value of its dial."""
    always = ("protocol=continuation", "measure=sweep", "dataset.windows=64")
    return [
        Row(PANEL, technique.name, f"{key}.{value:g}", f"{value:g}", (*always, *technique.overrides(value)))
        for key, technique in TECHNIQUES.items()
        for value in technique.dial
    ]


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """`comparison.frame`; `front`: no row saves as much or more of the prompt's work for a smaller Δ perplexity."""
    rows = comparison.frame(outcomes)
    rows["front"] = front(rows["prompt_executed_flops_saved_pct"], rows["delta_ppl"])
    return rows
