"""The rule by which a claim is judged (docs/verdicts.md), without any claim in it: two questions to an interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quicksilver.report.claims.reported import Sense

Verdict = Literal["reproduced", "partly", "not reproduced", "not comparable", "not measured", "by definition"]

NEARLY = 0.9  # a claim that is wrong by this share of its size is wrong altogether


@dataclass(frozen=True)
class Target:
    """What is claimed: from `low` to `high`, None where a side is open. A single number is claimed within its rounding."""

    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        assert (self.low, self.high) != (None, None)
        assert self.low is None or self.high is None or self.low <= self.high


@dataclass(frozen=True)
class Estimate:
    """What was measured: a value with its interval. Differences up to `floor` are none (the noise floor of a clock)."""

    value: float
    low: float
    high: float
    floor: float = 0.0

    def __post_init__(self) -> None:
        assert self.low <= self.high, (self.low, self.high)


def judge(sense: Sense, target: Target, estimate: Estimate) -> Verdict:
    """The verdict on a claim of this sense: `gain`, `cost`, `ratio`, or `match` (also for levels that may be compared).

    Two questions. Does the interval reach what is claimed? Does it rule out that the claim is wrong by nearly its whole size: next to no
    effect for a gain, nearly twice the claimed cost, next to nothing or nearly twice the claimed number for a description?
    """
    reaches, rules_out = _questions(sense, target, estimate)
    if reaches:
        # An interval that holds both the claim and its opposite has not decided anything.
        return "reproduced" if rules_out else "not measured"
    return "partly" if rules_out else "not reproduced"


def _questions(sense: Sense, target: Target, estimate: Estimate) -> tuple[bool, bool]:
    if sense == "ratio":  # of a time: 0.40 is a gain of 0.60
        low, high = (None if end is None else 1 - end for end in (target.high, target.low))
        gone = Estimate(1 - estimate.value, 1 - estimate.high, 1 - estimate.low, estimate.floor)
        return _questions("gain", Target(low, high), gone)
    if sense != "cost" and target.low is not None and target.high is not None and target.low <= 0 <= target.high:
        # A claimed zero has no size: it is right when there is nothing beyond its rounding, or beyond the floor.
        most = max(-target.low, target.high, estimate.floor)
        return (-most <= estimate.value <= most,) * 2
    if sense == "gain":
        assert target.low is not None
        return estimate.high >= target.low, estimate.low > max(estimate.floor, (1 - NEARLY) * target.low)
    if sense == "cost":
        assert target.high is not None
        return estimate.low <= target.high, estimate.high < (1 + NEARLY) * target.high
    assert sense in ("match", "level"), sense
    low, high = target.low, target.high
    if high is None:
        return _questions("gain", target, estimate)
    if low is None:
        return _questions("cost", target, estimate)
    size = high if high > 0 else low
    nothing, twice = sorted(((1 - NEARLY) * size, (1 + NEARLY) * size))
    return estimate.low <= high and estimate.high >= low, nothing < estimate.low and estimate.high < twice


def with_its_quality(saving: Verdict, quality: Verdict) -> Verdict:
    """The verdict on a saving, given that on the quality it is claimed with in the same run: no better than that quality. Quality that
    failed, is undecided or cannot be compared leaves nothing of a saving: leaving work out is easy."""
    if saving not in ("reproduced", "partly") or quality in ("reproduced", "by definition"):
        return saving
    return "partly" if quality == "partly" else "not reproduced"


def with_its_saving(quality: Verdict, saving: Verdict) -> Verdict:
    """The verdict on a quality, given that on the operations it is claimed to save: quality at a smaller saving is *partly*."""
    return "partly" if quality == "reproduced" and saving in ("partly", "not reproduced", "not measured") else quality
