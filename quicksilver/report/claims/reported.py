"""The numbers that the paper reports, from `reported*.yaml`, and what its quantities are, from `quantities.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, get_args

import yaml

Sense = Literal["gain", "cost", "ratio", "match", "level", "setting"]


@dataclass(frozen=True)
class Reported:
    """What one place of the paper reports.

    Attributes:
        id: dotted name, for example `table11.isolated.halting`.
        place: where it stands; `also`: where else the same numbers are printed.
        quote: the paper's wording, tabs between the cells of a table row.
        values: quantity (unit in its name) to number; `rounding`: half a unit of the last digit that is printed.
        bounds: quantity to (low, high), None where a side is open.
        group: heading in the ledger; `about`: model, data and machine that the numbers are of.
        against: id of the entry whose perplexity a perplexity is relative to.
        quality: the claim (id.quantity) about quality that a saving is claimed with, where the entry has none.
        config: quantity to the key of conf/ that holds a setting, as `file.key`.
        not_measured: why nothing here measures it, where that is known beforehand.
        not_comparable: quantity to the reason why what is measured here is no answer to it.
        by_definition: quantity to the reason why its column can have no other value here.
    """

    id: str
    place: str
    quote: str
    values: Mapping[str, float]
    rounding: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    group: str = ""
    about: str = ""
    against: str | None = None
    quality: str | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    not_measured: str | None = None
    not_comparable: Mapping[str, str] = field(default_factory=dict)
    by_definition: Mapping[str, str] = field(default_factory=dict)

    @property
    def quantities(self) -> tuple[str, ...]:
        """Each is one claim, `id.quantity`."""
        return (*self.values, *self.bounds)


@dataclass(frozen=True)
class Quantity:
    """What a quantity is and how a claim about it is judged (docs/verdicts.md); `column` and `floor` are columns of `against_dense`."""

    sense: Sense
    kind: str = ""
    says: str = ""
    unit: str = ""
    column: str | None = None
    floor: str | None = None
    of_dense: Literal["difference", "level"] | None = None

    def __post_init__(self) -> None:
        assert self.sense in get_args(Sense), self.sense


SETTING = Quantity("setting", says="setting")
_SHARED = ("group", "about", "against", "quality", "not_measured")  # given once for a file


@cache
def reported() -> Mapping[str, Reported]:
    """Every entry of the files by id, in their order: `reported.yaml` first, the others by name."""
    found = [path for path in files(__package__).iterdir() if path.name.startswith("reported") and path.name.endswith(".yaml")]
    entries = [
        entry for path in sorted(found, key=lambda path: (len(path.name), path.name)) for entry in _read(path.read_text("utf-8"))
    ]
    assert len({entry.id for entry in entries}) == len(entries), "an id of reported*.yaml stands twice"
    return MappingProxyType({entry.id: entry for entry in entries})


def _read(text: str) -> Iterator[Reported]:
    content = yaml.load(text, yaml.BaseLoader)  # numbers as they are written, because their last digit says how they were rounded
    shared = {key: content[key] for key in _SHARED if key in content}
    for entry in content["claims"]:
        values = entry.get("values", {})
        given: dict[str, Any] = {
            **shared,
            **entry,
            "values": MappingProxyType({name: float(text) for name, text in values.items()}),
            "rounding": MappingProxyType({name: _half_a_digit(text) for name, text in values.items()}),
            "bounds": MappingProxyType({name: _bounds(*ends) for name, ends in entry.get("bounds", {}).items()}),
            "also": tuple(entry.get("also", ())),
        }
        yield Reported(**given)


def _half_a_digit(text: str) -> float:
    exponent = Decimal(text).as_tuple().exponent
    assert isinstance(exponent, int), text
    return 0.5 * 10.0**exponent


def _bounds(low: str, high: str) -> tuple[float | None, float | None]:
    return None if low == "null" else float(low), None if high == "null" else float(high)


@cache
def quantities() -> Mapping[str, Quantity]:
    """Every entry of `quantities.yaml`."""
    content = yaml.safe_load(files(__package__).joinpath("quantities.yaml").read_text(encoding="utf-8"))
    return MappingProxyType({name: Quantity(**entry) for name, entry in content.items()})


def quantity(entry: Reported, name: str) -> Quantity:
    """What the quantity `name` of `entry` is; everything in the group of settings is one."""
    return SETTING if entry.group == "Settings" else quantities()[name]


# --- the rule of docs/verdicts.md ----------------------------------------------------------------------------------------------


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
