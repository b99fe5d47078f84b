"""Figure 7: isolated impact of each mechanism on time, operations and perplexity.

The records are those of Table 11's isolated rows. What P.4 and Section 3.3 say about single mechanisms is answered here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quicksilver.measure.latency import LatencyResult
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.figure import Figure

from . import bars

ALONE = ("halting", "kv_skipping", "fusion", "quantization")


def rows() -> list[Row]:
    """Those of Table 11."""
    return bars.rows("isolated.")


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Bars, each mechanism by itself."""
    sentence = "Each bar is one mechanism alone. A mechanism that looks ahead is refused where every position is scored."
    return bars.figure(outcomes, name, "Figure 7: isolated impact", sentence)


def saved_ms(panel: Mapping[str, Outcome]) -> Estimate | None:
    """Milliseconds of a batch that quantization saves."""
    record = panel["isolated.quantization"].record
    latency = None if record is None else record.found("latency", LatencyResult)
    if latency is None:
        return None
    dense, ratio = latency.dense_latency_ms.median, latency.latency_ratio
    return Estimate(*(dense * (1 - end) for end in (ratio.median, ratio.high, ratio.low)))


def _alone(mechanism: str) -> tuple[AnsweredBy, ...]:
    return tuple(AnsweredBy(panel, f"isolated.{mechanism}") for panel in bars.PROTOCOLS)


ANSWERS: dict[str, AnsweredBy | tuple[AnsweredBy, ...]] = {f"p4.isolated.{mechanism}": _alone(mechanism) for mechanism in ALONE}
ANSWERS["e7.latency"] = tuple(AnsweredBy(panel, "isolated.quantization", of=saved_ms) for panel in bars.PROTOCOLS)
ANSWERS |= {f"section3.isolated.{mechanism}": _alone(mechanism) for mechanism in ("halting", "fusion")}
