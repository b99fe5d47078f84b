"""The runs behind tables and figures on gold annotation: four ways to halt, and fusion at the paper's three depths.

Percentiles are chosen so that about as many tokens have halted at half of the depth as in the paper's table (37.8%, by its counts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quicksilver.measure.words import WORDS
from quicksilver.records.record import TRACE, Record
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import NO_VALUE, Lines, number
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

_HALTING: dict[str, tuple[str, tuple[str, ...]]] = {
    MAIN: (
        "Drift and entropy, calibrated",
        ("protocol=all", "modules=[halting]", "modules.halting.tau_drift=p42", "modules.halting.tau_entropy=p42",
         "measure.word_signals.enabled=true"),
    ),
    "drift": ("Drift alone, calibrated", ("protocol=all", "modules=[halting]", "modules.halting.tau_drift=p10", "modules.halting.tau_entropy=null")),
    "attention": ("Least attended (ours)", ("protocol=continuation", "modules=[halting_attention]")),
    "paper_b2": ("The paper's constants (B.2)", ("protocol=all", "modules=[halting_paper_b2]")),
}  # fmt: skip


def halting(*keys: str) -> list[Row]:
    """Those of the ways to halt, or all of them."""
    return [
        Row(HALTING, "", key, technique, (*overrides, "measure=words"), defaults=TREEBANK)
        for key, (technique, overrides) in _HALTING.items()
        if not keys or key in keys
    ]


def fusion() -> list[Row]:
    """The closest 15% of neighbours (D.3), fused at each of the paper's depths."""
    return [
        Row(
            FUSION, "", f"layer{layer}", f"Fused at {fraction:.0%} of the depth",
            ("protocol=continuation", "modules=[token_fusion]", f"modules.token_fusion.start={fraction:.3f}", "measure=words",
             "measure.constituents.enabled=true"),
            defaults=TREEBANK,
        )
        for layer, fraction in PAPER_DEPTHS.items()
    ]  # fmt: skip


def measured(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that have a record."""
    return [outcome for outcome in outcomes if outcome.record is not None]


def records(outcomes: Sequence[Outcome]) -> list[Record]:
    """What a figure is drawn from: the records there are, at least one.

    Raises:
        ConfigError: no run has one; says why the first has none.
    """
    found = [outcome.record for outcome in outcomes if outcome.record is not None]
    if not found:
        raise ConfigError(f"no run has a record ({outcomes[0].reason}), and there is nothing to draw without one")
    return found


def whose_tags(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Where tags are not gold: who tagged the text, and how many words of a held-out treebank are right."""
    sources = {outcome.record.data.source for outcome in measured(outcomes) if outcome.record is not None}
    return tuple(
        f"Tags are not gold: the text is {said}." for _, mark, said in (one.partition("; ") for one in sorted(sources)) if mark
    )


Cell = Callable[[Mapping[str, Any]], Lines]


def words(column: str) -> Cell:
    """The text of a column."""
    return lambda row: (str(row[column]),)


def plain(column: str, decimals: int = 1) -> Cell:
    """A number without a sign."""

    def cell(row: Mapping[str, Any]) -> Lines:
        value = number(row, column)
        return (NO_VALUE if value is None else f"{value:,.{decimals}f}",)

    return cell


def with_ends(column: str, *, sign: bool) -> Cell:
    """A number over its interval, which stands in `_low` and `_high`."""

    def cell(row: Mapping[str, Any]) -> Lines:
        ends = [number(row, f"{column}{end}") for end in ("", "_low", "_high")]
        if ends[0] is None:
            return (NO_VALUE,)
        value, low, high = (f"{end:{'+' if sign else ''}.1f}" for end in ends)
        return (value, f"[{low} {high}]")

    return cell


def percent(name: str, value: float, low: float, high: float) -> dict[str, float]:
    """A share with its ends as three columns, in percent."""
    return {name: 100 * value, f"{name}_low": 100 * low, f"{name}_high": 100 * high}
