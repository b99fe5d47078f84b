"""Figure 6: cumulative impact of the four mechanisms on time, operations and perplexity.

The records are those of Table 11's cumulative rows. What the paper says elsewhere about all four together is answered here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.comparison import against_dense
from quicksilver.report.figure import Figure

from . import bars

JOINT = "cumulative.quantization"


def rows() -> list[Row]:
    """Those of Table 11."""
    return bars.rows("cumulative.")


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Bars, one mechanism more at each step."""
    sentence = (
        "Each bar adds one mechanism to the bar on its left. A mechanism that looks ahead is refused where every position is "
        "scored."
    )
    return bars.figure(outcomes, name, "Figure 6: cumulative impact", sentence)


def worst(panel: Mapping[str, Outcome]) -> Estimate | None:
    """The composition that costs most perplexity, in percent of dense."""
    found = [against_dense(one.record, one.dense) for one in panel.values() if one.record is not None and one.dense is not None]
    costs = [row for row in found if "delta_ppl_pct" in row]
    if not costs:
        return None
    most = max(costs, key=lambda row: row["delta_ppl_pct"])
    return Estimate(most["delta_ppl_pct"], most["delta_ppl_pct_low"], most["delta_ppl_pct_high"])


def added_speedup(panel: Mapping[str, Outcome]) -> Estimate | None:
    """Points of time gone that KV skipping adds to halting; the intervals of both add up."""
    before, after = _speedup(panel["cumulative.halting"]), _speedup(panel["cumulative.kv_skipping"])
    if before is None or after is None:
        return None
    floor = max(before.floor, after.floor)
    return Estimate(after.value - before.value, after.low - before.high, after.high - before.low, floor)


def _speedup(outcome: Outcome) -> Estimate | None:
    if outcome.record is None or outcome.dense is None:
        return None
    row = against_dense(outcome.record, outcome.dense)
    if "speedup_pct" not in row:
        return None
    return Estimate(row["speedup_pct"], row["speedup_pct_low"], row["speedup_pct_high"], row["noise_floor_pct"])


_ALL_FOUR = AnsweredBy("continuation", JOINT)
ANSWERS: dict[str, AnsweredBy | tuple[AnsweredBy, ...]] = {
    **dict.fromkeys(
        ("figure6.joint", "section3.ablation", "abstract.joint", "conclusion.joint", "faq.joint", "p4.joint", "p4.half"),
        _ALL_FOUR,
    ),
    "f2.kv_skipping.added_speedup_pct": tuple(
        AnsweredBy(panel, "cumulative.kv_skipping", of=added_speedup) for panel in bars.PROTOCOLS
    ),
    "p4.stability.delta_ppl": (
        AnsweredBy("all", "cumulative.kv_skipping", of=worst, note="the worst of its compositions"),
        AnsweredBy("continuation", JOINT, of=worst, note="the worst of its compositions"),
    ),
}
