"""The runs behind tables and figures on gold annotation: four ways to halt, and fusion at the paper's three depths.

Percentiles are chosen so that about as many tokens have halted at half of the depth as in the paper's table (37.8%, by its counts).
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.measure.words import WORDS
from quicksilver.records.record import TRACE, Record
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.runtime.errors import ConfigError

TREEBANK = ("dataset=gum",)  # unless a person names another
PAPER_DEPTHS = {12: 0.4, 15: 0.5, 20: 2 / 3}  # layer of the paper's 30 -> fraction of the depth
# What a page that shows a run word by word needs.
WORD_BY_WORD = (
    TRACE,
    *(f"{WORDS}:{column}" for column in ("window", "slot", "word", "class", "sentence", "joint_label", "joint_words")),
)
HALTING, FUSION = "halting", "fusion"
MAIN = "drift_entropy"  # the paper's rule, with thresholds of this model

_PERCENTILES = ("modules.halting.tau_drift=p42", "modules.halting.tau_entropy=p42", "measure.word_signals.enabled=true")
# key -> what is printed, protocol, module, further overrides
_HALTING: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    MAIN: ("Drift and entropy, calibrated", "all", "halting", _PERCENTILES),
    "drift": (
        *("Drift alone, calibrated", "all", "halting"),
        ("modules.halting.tau_drift=p10", "modules.halting.tau_entropy=null"),
    ),
    "attention": ("Least attended (ours)", "continuation", "halting_attention", ()),
    "paper_b2": ("The paper's constants (B.2)", "all", "halting_paper_b2", ()),
}


def halting(*keys: str) -> list[Row]:
    """Those of the ways to halt, or all of them."""
    found = []
    for key, (technique, protocol, module, more) in _HALTING.items():
        overrides = (f"protocol={protocol}", f"modules=[{module}]", *more, "measure=words")
        found.append(Row(HALTING, "", key, technique, overrides, defaults=TREEBANK))
    return [row for row in found if not keys or row.key in keys]


def fusion() -> list[Row]:
    """The closest 15% of neighbours (D.3), fused at each of the paper's depths."""
    found = []
    for layer, depth in PAPER_DEPTHS.items():
        fusing = ("protocol=continuation", "modules=[token_fusion]", f"modules.token_fusion.start={depth:.3f}")
        overrides = (*fusing, "measure=words", "measure.constituents.enabled=true")
        found.append(Row(FUSION, "", f"layer{layer}", f"Fused at {depth:.0%} of the depth", overrides, defaults=TREEBANK))
    return found


def records(outcomes: Sequence[Outcome]) -> list[Record]:
    """What a figure is drawn from: the records there are, at least one.

    Raises:
        ConfigError: no run has one; says why the first has none.
    """
    found = [outcome.record for outcome in outcomes if outcome.record is not None]
    if not found:
        raise ConfigError(f"no run has a record ({outcomes[0].reason}), and there is nothing to draw without one")
    return found


def failed(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Which runs have no record, and why."""
    return tuple(f"{outcome.row.technique}: {outcome.reason}." for outcome in outcomes if outcome.record is None)


def whose_tags(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Where tags are not gold: who tagged the text, and how many words of a held-out treebank are right."""
    sources = {outcome.record.data.source for outcome in outcomes if outcome.record is not None}
    parts = (one.partition("; ") for one in sorted(sources))
    return tuple(f"Tags are not gold: the text is {said}." for _, mark, said in parts if mark)
