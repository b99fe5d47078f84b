"""Table bounds: the paper's bounds on what halting and fusion do to a state, tested as inequalities on real states (B.4, D.4, H, N).

The paper bounds errors by Lipschitz constants that it does not give. With constants that are measured the table says how often each bound holds
and how many times larger than the error it is; with all constants 1 it says what the drift alone would promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.measure.bounds import CONSTANTS, INEQUALITIES, BoundsResult
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number

# inequality -> what is printed, its claims
SAID = {
    "halting": ("error at the last layer ≤ Σ L_j · last drift (B.4, H, P)", ("b4.bound", "h.bound")),
    "fusion": ("error after one layer ≤ L · half the distance of the pair (D.4)", ("d4.bound",)),
    "fusion, end": ("error at the last layer ≤ Σ L_k · distance of the pair (N)", ("n.bound",)),
}
NAMES = {"measured": "measured", "one": "all 1"}
# panel -> title, further overrides
PANELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "asked": ("The model and text that were asked for", ()),
    "llama": ("reference-llama", ("model=reference-llama",)),
}
KEY = "dense"


def rows() -> list[Row]:
    """The dense model, and reference-llama."""
    always = ("protocol=all", "measure=bounds", "dataset.windows=8", "modules=[]")
    return [Row(panel, "", KEY, title, (*always, *more)) for panel, (title, more) in PANELS.items()]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel a model, a section an inequality."""
    frame = pd.DataFrame([row for outcome in outcomes for row in _rows(outcome)], columns=COLUMNS)
    columns = (
        Column("", "after layer", lambda row: (f"{row['layer']}",), align="left"),
        Column("", "constants", lambda row: (NAMES[row["constants"]],), align="left"),
        Column("the bound holds", "%", _holds),
        Column("bound ÷ error", "median", lambda row: (_times(number(row, "bound_ratio")),)),
        Column("bound ÷ error", "5% to 95%", _range, expendable=1),
        Column("", "cases", lambda row: (f"{row['cases']:,}",), expendable=2),
    )
    panels = tuple(
        Panel(key, title, columns, tuple(_notes([one for one in outcomes if one.row.panel == key])))
        for key, (title, _) in PANELS.items()
    )
    return Table(name, "The paper's bounds, tested on dense states", frame, panels, LEGEND)


COLUMNS = [
    *("panel", "section", "key", "inequality", "layer", "constants", "cases", "holds_pct", "holds_pct_low", "holds_pct_high"),
    *("bound_ratio", "bound_ratio_low", "bound_ratio_high", "record"),
]
LEGEND = (
    "Error: how far the state of a token that halts after that layer, or is replaced by the mean of itself and the token before it, is from its "
    "dense state. Every token of the texts is halted; the fused ones are spread evenly over them.",
    "Constants: L_j is how much layer j stretches a small change of one token's own state, in the direction that it stretches most; the largest over the "
    "tokens that are followed. The paper gives none. all 1: layers that stretch nothing.",
    "D.4 is Lipschitz continuity itself, so it holds wherever the constant is large enough for the pair; how much larger the bound is than the error is what can be "
    "learned. B.4 and N add constants up where continuity alone would multiply them: that they hold is a finding.",
    "the bound holds: of the cases, with its 95% interval clustered by window. bound ÷ error: below 1 it fails; far above 1 it promises little.",
)


def result(outcome: Outcome) -> BoundsResult | None:
    """What was measured; None: there is no record."""
    return None if outcome.record is None else outcome.record.measured("bounds", BoundsResult)


def _rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    found = result(outcome)
    if found is None or outcome.record is None:
        return
    for inequality in INEQUALITIES:
        for one in found.held:
            if one.inequality == inequality:
                yield {
                    "panel": outcome.row.panel, "section": SAID[inequality][0], "key": f"{inequality}.{one.layer}.{one.constants}",
                    "inequality": inequality, "layer": one.layer, "constants": one.constants, "cases": one.cases,
                    "holds_pct": 100 * one.holds.value, "holds_pct_low": 100 * one.holds.low, "holds_pct_high": 100 * one.holds.high,
                    "bound_ratio": one.bound_ratio, "bound_ratio_low": one.bound_ratio_low, "bound_ratio_high": one.bound_ratio_high,
                    "record": outcome.record.fingerprint,
                }  # fmt: skip


def _notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        found = result(outcome)
        if found is None:
            yield f"{outcome.row.technique}: {outcome.reason}."
        else:
            gains = ", ".join(f"{gain:.1f}" for gain in found.gains)
            yield f"L_j of the layers, from the first: {gains}."
    yield from provenance.notes(outcomes)


def _holds(row: Mapping[str, Any]) -> Lines:
    value, low, high = (number(row, f"holds_pct{end}") for end in ("", "_low", "_high"))
    return (NO_VALUE,) if value is None else (f"{value:.1f}", f"[{low:.1f} {high:.1f}]")


def _times(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _range(row: Mapping[str, Any]) -> Lines:
    low, high = number(row, "bound_ratio_low"), number(row, "bound_ratio_high")
    return (f"{_times(low)} to {_times(high)}",)


# --- claims -----------------------------------------------------------------------------------------------------------------------


def _least(panel: str, inequality: str) -> Callable[[Mapping[str, Outcome]], Estimate | None]:
    def of(outcomes: Mapping[str, Outcome]) -> Estimate | None:
        """Share of the cases in which the bound holds with measured constants, at the layer where that is least."""
        found = result(outcomes[KEY])
        if found is None:
            return None
        each = [one.holds for one in found.held if (one.inequality, one.constants) == (inequality, CONSTANTS[0])]
        least = min(each, key=lambda share: share.value)
        return Estimate(least.value, least.low, least.high)

    return of


# Fusion's bounds are Lipschitz continuity with constants that are taken from these states: they could not be broken.
BY_DEFINITION = "its constants were measured on these very states"
ANSWERS = {
    f"{claim}.bound_holds_share": tuple(
        AnsweredBy(
            panel,
            KEY,
            of=_least(panel, inequality),
            note="constants measured; the layer where it holds least",
            by_definition=BY_DEFINITION if inequality.startswith("fusion") else "",
        )
        for panel in PANELS
    )
    for inequality, (_, claims) in SAID.items()
    for claim in claims
}
