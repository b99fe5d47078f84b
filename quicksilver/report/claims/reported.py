"""What the paper reports: its numbers (`reported*.yaml`), what its quantities are, the rule that judges a claim, and the paper against itself.

Nothing measured enters here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import yaml

Sense = Literal["gain", "cost", "ratio", "match", "level", "setting"]
Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Reported:
    """What one place of the paper reports: the fields are explained at the top of reported.yaml.

    `rounding` is half a unit of the last digit that a value is printed with; `bounds` are (low, high), None where a side is open.
    """

    id: str
    place: str
    quote: str
    values: Mapping[str, float]
    rounding: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    group: str = ""
    about: str = ""
    against: str | None = None
    same_as: str | Mapping[str, str] | None = None
    quality: str | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    not_measured: str | None = None
    column: Mapping[str, str] = field(default_factory=dict)
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
    base: str = "ppl"


SETTING = Quantity("setting", says="setting")
_SHARED = ("group", "about", "against", "quality", "not_measured")  # given once for a file


# libyaml's, a tenth of the time, where the package was built with it.
_SAFE, _BASE = (getattr(yaml, f"C{name}", getattr(yaml, name)) for name in ("SafeLoader", "BaseLoader"))


def _content(name: str, loader: Any = _SAFE) -> Any:
    return yaml.load(files(__package__).joinpath(name).read_text(encoding="utf-8"), loader)


@cache
def reported() -> Mapping[str, Reported]:
    """Every entry of the files by id, in their order: `reported.yaml` first, the others by length and name."""
    found: dict[str, Reported] = {}
    names = (path.name for path in files(__package__).iterdir() if re.fullmatch(r"reported.*\.yaml", path.name))
    for name in sorted(names, key=lambda name: (len(name), name)):
        # Numbers as they are written, because their last digit says how they were rounded.
        content = _content(name, _BASE)
        shared = {key: content[key] for key in _SHARED if key in content}
        for entry in content["claims"]:
            assert entry["id"] not in found, f"{entry['id']} of {name} stands twice"
            values = entry.get("values", {})
            bounds = entry.get("bounds", {}).items()
            numbers: dict[str, Any] = {
                "values": {name: float(text) for name, text in values.items()},
                "rounding": {name: 0.5 * 10.0 ** int(Decimal(text).as_tuple().exponent) for name, text in values.items()},
                "bounds": {name: tuple(None if end == "null" else float(end) for end in ends) for name, ends in bounds},
            }
            found[entry["id"]] = Reported(**shared | entry | numbers | {"also": tuple(entry.get("also", ()))})
    return MappingProxyType(found)


@cache
def quantities() -> Mapping[str, Quantity]:
    """Every entry of `quantities.yaml`."""
    return {name: Quantity(**entry) for name, entry in _content("quantities.yaml").items()}


def quantity(entry: Reported, name: str) -> Quantity:
    """What the quantity `name` of `entry` is; everything in the group of settings is one."""
    if entry.group == "Settings":
        return SETTING
    found = quantities()[name]
    return replace(found, column=entry.column[name]) if name in entry.column else found


# --- the rule of docs/verdicts.md ----------------------------------------------------------------------------------------------
Verdict = Literal["reproduced", "partly", "not reproduced", "undecided", "not comparable", "not measured", "by definition"]

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

    @classmethod
    def of(cls, interval: Any, times: float = 1.0) -> Estimate:
        """Of anything with `value`, `low` and `high`; `times=100` makes a share a percentage, `times=-1` turns its sign."""
        return cls(float(times * interval.value), *sorted(float(times * end) for end in (interval.low, interval.high)))


def judge(sense: Sense, target: Target, estimate: Estimate) -> Verdict:
    """The verdict on a claim of this sense: `gain`, `cost`, `ratio`, or `match` (also for levels that may be compared).

    Two questions. Does the interval reach what is claimed? Does it rule out that the claim is wrong by nearly its whole size: next to no
    effect for a gain, nearly twice the claimed cost, next to nothing or nearly twice the claimed number for a description?
    """
    (reaches, _), (rules_out, _) = _questions(sense, target, estimate)
    if reaches:  # an interval that contains the claim and its opposite is inconclusive
        return "reproduced" if rules_out else "undecided"
    return "partly" if rules_out else "not reproduced"


def by_the_rule(sense: Sense, target: Target, estimate: Estimate) -> str:
    """Which of the two questions have the answer no, in words; empty: none."""
    (reaches, missed), (rules_out, no_more) = _questions(sense, target, estimate)
    if missed == no_more:  # a claimed zero
        return "" if reaches else missed
    if missed.endswith("(0)") and no_more.endswith("(0)"):  # a claim without a size: one question, not two
        no_more, rules_out = no_more.replace("a tenth of ", "").replace("nearly twice ", ""), rules_out or not reaches
    said = [words for answer, words in ((reaches, missed), (rules_out, no_more)) if not answer]
    return f"the interval {' and '.join(said)}" if said else ""


def _questions(sense: Sense, target: Target, estimate: Estimate) -> tuple[tuple[bool, str], tuple[bool, str]]:
    """The answer to each question, and what the interval does where it is no."""
    low, high, floor = target.low, target.high, estimate.floor
    if sense == "ratio":  # of a time: 0.40 is a gain of 0.60
        gain = Target(*(None if end is None else 1 - end for end in (high, low)))
        found = Estimate(1 - estimate.value, 1 - estimate.high, 1 - estimate.low, floor)
        (reaches, _), (rules_out, _) = _questions("gain", gain, found)
        assert high is not None
        least = max(floor, (1 - NEARLY) * (1 - high))
        name = "1 less the noise" if least == floor else "1 less a tenth of the gain"
        return (reaches, f"begins above the claim ({high:.3g})"), (rules_out, f"ends above {name} ({1 - least:.3g})")
    if sense == "cost" or (low is None and sense != "gain"):
        assert high is not None
        twice = (1 + NEARLY) * high
        missed, no_more = f"begins above the claim ({high:.3g})", f"ends above nearly twice the claim ({twice:.3g})"
        return (estimate.low <= high, missed), (estimate.high < twice, no_more)
    assert low is not None
    if high is not None and low <= 0 <= high:
        # A claimed zero has no size: it is right when there is nothing beyond its rounding, or beyond the floor.
        most = max(-low, high, floor)
        return ((-most <= estimate.value <= most, f"the value is not within {most:.3g} of 0"),) * 2
    if sense == "gain" or high is None:
        least = max(floor, (1 - NEARLY) * low)
        name = "the noise" if least == floor > 0 else "a tenth of the claim"
        # Where the noise is as large as the claim, a difference inside it does not say that the claim is missed.
        reaches = estimate.high >= low or (abs(estimate.value) <= floor and floor >= low)
        return (reaches, f"ends below the claim ({low:.3g})"), (estimate.low > least, f"begins below {name} ({least:.3g})")
    size = high if high > 0 else low
    nothing, twice = sorted(((1 - NEARLY) * size, (1 + NEARLY) * size))
    overlaps, sized = estimate.low <= high and estimate.high >= low, nothing < estimate.low and estimate.high < twice
    return (overlaps, "does not overlap the claim"), (sized, "is not within a tenth of the claim and 1.9 times it")


def with_its_quality(saving: Verdict, quality: Verdict) -> Verdict:
    """The verdict on a saving, given that on the quality it is claimed with in the same run: no better than that quality. Where that is
    undecided, so is the saving; where it failed or cannot be compared nothing is left of it: leaving work out is easy."""
    if saving == "undecided":
        return "not reproduced" if quality == "not reproduced" else saving
    if saving not in ("reproduced", "partly") or quality in ("reproduced", "by definition"):
        return saving
    return quality if quality in ("partly", "undecided") else "not reproduced"


def with_its_chance(share: Verdict, beyond: Verdict) -> Verdict:
    """The verdict on a share, given that on its difference from chance: no better than that, because chance alone gives a share."""
    return max(share, beyond, key=("reproduced", "partly", "undecided", "not reproduced").index)


def difference(claimed: float, chance: float, found: Estimate) -> Verdict:
    """The verdict on how far a share is from chance: claimed and found in percent, with the sign that the claim has."""
    if claimed < chance:
        found = Estimate.of(found, -1)
    return judge("gain", Target(abs(claimed - chance), None), found)


@cache
def by_chance_pct() -> Mapping[str, float]:
    """What the paper's numbers say of any token of Table 2: whether it halts (its classes' shares, weighted by their tokens), and whether it is a
    function word."""
    classes = {one.id: one for one in reported().values() if one.id.startswith("table2.") and "tokens" in one.values}
    halted, tokens = _halted(classes.values())
    content = classes["table2.content_words"].values["tokens"]
    return {"halted_share_pct": halted, "halted_function_share_pct": 100 * (1 - content / tokens)}


def _halted(classes: Iterable[Reported]) -> tuple[float, float]:
    """The halted share of several classes in percent, and how many tokens they have."""
    members = [one.values for one in classes]
    tokens = sum(one["tokens"] for one in members)
    return sum(one["halted_share_pct"] * one["tokens"] for one in members) / tokens, tokens


def with_its_saving(quality: Verdict, saving: Verdict) -> Verdict:
    """The verdict on a quality, given that on the operations it is claimed to save: quality at a smaller saving is *partly*."""
    return "partly" if quality == "reproduced" and saving in ("partly", "not reproduced", "undecided") else quality


# --- the paper against itself: rows of `contradictions.yaml`, and the arithmetic on its own numbers that decides them -------------
A100_WATTS = 400.0  # greatest board power of an A100, NVIDIA's data sheet
GPT2_VOCABULARY = 50_257


class Computed(NamedTuple):
    """What was computed, in words, and whether the paper's statement holds."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Contradiction:
    """One row of `contradictions.yaml`: the fields are explained at its top."""

    id: str
    says: str
    ours: str
    conflict: int | None = None
    claims: Mapping[str, str] = field(default_factory=dict)
    check: str | None = None

    @property
    def places(self) -> str:
        """Where the claims stand."""
        return "; ".join(dict.fromkeys(_entry(claim).place for claim in self.claims.values()))

    def finding(self) -> Computed | None:
        """What the paper's own numbers say; None where there is nothing to compute."""
        given = {name: _given(claim) for name, claim in self.claims.items()}
        return None if self.check is None else check_of(self.check)(**given)

    @property
    def agreement(self) -> Literal["contradiction", "consistent", "choice"]:
        """`choice` where there is nothing to compute."""
        finding = self.finding()
        return "choice" if finding is None else "consistent" if finding.holds else "contradiction"


@cache
def contradictions() -> tuple[Contradiction, ...]:
    """Every row of `contradictions.yaml`."""
    return tuple(Contradiction(**row) for row in _content("contradictions.yaml")["contradictions"])


def _entry(claim: str) -> Reported:
    """The entry that `claim` names, or of which it names a quantity."""
    return reported()[claim] if claim in reported() else reported()[claim.rpartition(".")[0]]


def _given(claim: str) -> Reported | float | Bounds:
    entry, quantity = _entry(claim), claim.rpartition(".")[2]
    return entry if claim == entry.id else entry.values[quantity] if quantity in entry.values else entry.bounds[quantity]


def _number(value: Any) -> str:
    return f"{value:g}" if not isinstance(value, tuple) else f"{value[0]:g} to {value[1]:g}"


# --- checks: from numbers of the paper to a finding -----------------------------------------------------------------------------
def same(**stated: float | Bounds) -> Computed:
    """One quantity, stated several times."""
    spans = [value if isinstance(value, tuple) else (value, value) for value in stated.values()]
    low, high = max(span[0] or 0.0 for span in spans), min(span[1] or math.inf for span in spans)
    apart = max(span[1] or 0.0 for span in spans) / min(span[0] or math.inf for span in spans)
    written = ", ".join(dict.fromkeys(_number(value) for value in stated.values()))
    return Computed(written + (f": a factor of {apart:.3g}" if low > high else ""), low <= high)


def model_size(parameters_millions: float, layers: float, width: float, heads: float) -> Computed:
    """12·L·d² in the layers (App. J's 4d² + 8d²), the rest in the embedding."""
    in_layers = 12 * layers * width**2 / 1e6
    vocabulary = (parameters_millions - in_layers) * 1e6 / width
    text = (
        f"12·L·d² is {in_layers:.0f} M; the other {parameters_millions - in_layers:.0f} M would be an embedding of {vocabulary:,.0f} "
        f"tokens (GPT-2 has {GPT2_VOCABULARY:,}); {width:g} / {heads:g} heads is {width / heads:.4g}"
    )
    return Computed(text, vocabulary <= 2 * GPT2_VOCABULARY and width % heads == 0)


def table5_kv(**rows: Reported) -> Computed:
    """Whether the printed inequalities are true, and whether one side of a threshold is written and the other skipped."""
    false, differences = [], dict[str, list[float]](Write=[], Skip=[])
    for row in rows.values():
        match = re.search(r"KV diff ([\d.]+) ([<>]) ([\d.]+) -> (Write|Skip)", row.quote)
        assert match is not None, row.quote
        left, right = float(match[1]), float(match[3])
        differences[match[4]].append(left)
        if not (left < right if match[2] == "<" else left > right):
            false.append(f"{match[1]} {match[2]} {match[3]}")
    written, skipped = differences["Write"], differences["Skip"]
    text = (
        f"false as printed: {', '.join(false) or 'none'}; written at differences of {min(written):g} to {max(written):g}, skipped at "
        f"{min(skipped):g} to {max(skipped):g}: the least change is written, the most skipped"
    )
    return Computed(text, not false and max(skipped) < min(written))


def strictly_below(bound: Bounds, **values: float) -> Computed:
    text = ", ".join(f"{value:g} ({name})" for name, value in values.items())
    return Computed(f"{text} against under {bound[1]:g}", bound[1] is None or max(values.values()) < bound[1])


def table5_widths(low: float, high: float, **rows: Reported) -> Computed:
    """The widths of Table 5 beside those that the thresholds give its entropies (2.5)."""
    apart = []
    for word, row in rows.items():
        entropy, bits = row.values["entropy"], row.values["bits"]
        ruled = 8 if entropy > high else 4 if entropy >= low else 2
        if ruled != bits:
            apart.append(f"“{word}” ({entropy:.2f}) has {bits:g} bits and should have {ruled}")
    return Computed("; ".join(apart) or "the widths follow", not apart)


def on_the_scale(scale: tuple[float, float], **entropies: float) -> Computed:
    beyond = {word: value for word, value in entropies.items() if not scale[0] <= value <= scale[1]}
    text = ", ".join(f"“{word}” has {value:.2f}" for word, value in beyond.items())
    return Computed(f"{text}, on a scale from {scale[0]:g} to {scale[1]:g}" if beyond else "all on the scale", not beyond)


def superadditive(joint: float, **alone: float) -> Computed:
    total = sum(alone.values())
    text = f"{joint:g}% together, {' + '.join(f'{value:g}' for value in alone.values())} = {total:g}% apart: δ = {joint - total:+.3g} points"
    return Computed(text, joint > total)


def beyond_pairs(joint: float, **alone: float) -> Computed:
    best = sum(sorted(alone.values())[-2:])
    return Computed(f"{joint:g}% together, the best pair adds up to {best:g}%", joint > best)


def energy_of_a_token(grams: float, grid: float, dense_ms: float, tokens: float) -> Computed:
    """Joules of a token by its emissions, and the power that the paper's own time for it would take."""
    joules = grams / (grid * 1000) * 3.6e6
    watts = joules / (dense_ms / 1000 / tokens)
    text = f"{joules / 1000:.2g} kJ a token; at {dense_ms:g} ms for {tokens:g} tokens {watts / 1e6:.3g} MW, where an A100 draws {A100_WATTS:g} W"
    return Computed(text, watts <= A100_WATTS)


def emissions_arithmetic(dense: float, halting: float, halting_pct: float, joint: float, joint_pct: float) -> Computed:
    ours = [100 * (1 - after / dense) for after in (halting, joint)]
    agree = all(abs(computed - stated) <= 0.05 for computed, stated in zip(ours, (halting_pct, joint_pct), strict=True))
    return Computed(f"{ours[0]:.1f}% and {ours[1]:.1f}%", agree)


def steepest_is_last(dense: float, **after: float) -> Computed:
    """Which step of a falling series is the steepest; the claim is that it is the last."""
    steps = {name: before - then for (name, then), before in zip(after.items(), (dense, *after.values()), strict=False)}
    *others, last = steps.values()
    text = "steps of " + ", ".join(f"{step:.2f} g ({name})" for name, step in steps.items())
    return Computed(text, last > max(others) + 1e-9)


def quantized_baseline(ratio: float, speedup: float, quantization: float) -> Computed:
    """What the quantized baseline takes of the dense time, by the ratio to it and by its own speedup."""
    implied, stated = (1 - speedup / 100) / ratio, 1 - quantization / 100
    text = f"then the quantized baseline takes {implied:.2f} of the dense time, and by Table 11 quantization takes {stated:.2f}"
    return Computed(text, implied <= 1)


def table7_arithmetic(total: Reported, **parts: Reported) -> Computed:
    """Sums and percentages, each within what the rounding of the printed times allows."""
    wrong, sums = [], []
    for column in ("dense_ms", "quicksilver_ms"):
        stated = [part for part in parts.values() if column in part.values]
        computed = sum(part.values[column] for part in stated)
        sums.append(f"{computed:.1f}")
        if abs(computed - total.values[column]) > sum(part.rounding[column] for part in stated) + total.rounding[column]:
            wrong.append(f"{column} adds up to {computed:.1f}, not {total.values[column]:g}")
    for name, part in {**parts, "total": total}.items():
        if "speedup_pct" in part.values and part.values["dense_ms"]:
            dense, ours, half = part.values["dense_ms"], part.values["quicksilver_ms"], part.rounding["dense_ms"]
            least, most = 100 * (1 - (ours + half) / (dense - half)), 100 * (1 - (ours - half) / (dense + half))
            slack = part.rounding["speedup_pct"]
            if not least - slack <= part.values["speedup_pct"] <= most + slack:
                wrong.append(f"{name}: {part.values['speedup_pct']:g}% is not within {least:.1f} to {most:.1f}%")
    return Computed("; ".join(wrong) or f"sums of {' and '.join(sums)} ms and all percentages agree within rounding", not wrong)


def within_bound(bound: Bounds, **values: float) -> Computed:
    beyond = [f"{value:+.2f} ({name})" for name, value in values.items() if bound[1] is not None and value > bound[1]]
    return Computed(f"Table 11 has {', '.join(beyond)}" if beyond else "Table 11 agrees", not beyond)


def decay_and_halted_share(decay: tuple[float, float], layer: float, **classes: Reported) -> Computed:
    """Active tokens at a layer by the decay, and by the shares of the word classes that have halted there."""
    active = 100 - _halted(classes.values())[0]
    least, most = (100 * math.exp(-rate * layer) for rate in (decay[1], decay[0]))
    text = f"active at layer {layer:g}: {least:.0f} to {most:.0f}% by the decay, {active:.1f}% by the word classes"
    return Computed(text, least <= active <= most)


def milliseconds_are_percent(saved_ms: float, dense_ms: float, speedup: float) -> Computed:
    share = 100 * saved_ms / dense_ms
    return Computed(f"{saved_ms:g} of {dense_ms:g} ms are {share:.1f}%, not {speedup:g}%", abs(share - speedup) <= 1)


def check_of(name: str) -> Callable[..., Computed]:
    """The check of `contradictions.yaml` that has this name: one formula of `FORMULAS`, or a function above."""
    return FORMULAS[name] if name in FORMULAS else globals()[name]


FORMULAS: dict[str, Callable[..., Computed]] = {
    "at_least": lambda layer, first: Computed(f"layer {layer:g} against {first:g} at the earliest", layer >= first),
    "all_skipped": lambda **rows: Computed(
        ", ".join(f"“{word}”: {row.quote.split()[-1]}" for word, row in rows.items()),
        all(row.quote.endswith("Skip") for row in rows.values()),
    ),
    # Bits rise with entropy; where noise falls with bits, error falls with entropy.
    "falls_with_bits": lambda r, noise: Computed(
        f"r is {r:+g}; by these rules error falls as entropy rises, so r is below 0", (r < 0) == (noise[1] < 1)
    ),
    "entropy_units": lambda bits, nats: Computed(
        f"{bits:g} bits are {bits * math.log(2):.3f} nats, not {nats:g}", math.isclose(bits * math.log(2), nats)
    ),
    "more_bits_cost_no_more": lambda fewer, more: Computed(
        f"{fewer:g} with 2-bit tokens, {more:g} with 4 bits in their place", more <= fewer
    ),
    "below": lambda guided, static: Computed(f"{guided:g} against {static:g}", guided < static),
    "not_the_largest": lambda fusion, **others: Computed(
        f"{fusion:g}, and the others {', '.join(f'{one:g}' for one in others.values())}", fusion < max(others.values())
    ),
    "inside_grid": lambda low, high, low_grid, high_grid: Computed(
        f"({low:g}, {high:g}) was found in {low_grid[0]:g}…{low_grid[1]:g} × {high_grid[0]:g}…{high_grid[1]:g}",
        low_grid[0] <= low <= low_grid[1] and high_grid[0] <= high <= high_grid[1],
    ),
    "beyond_uniform": lambda stated, guided, uniform: Computed(
        f"{uniform:g}% and {guided:g}% saved: {100 * (1 - (100 - guided) / (100 - uniform)):.1f}% beyond 8 bits, not {stated:g}%",
        abs(100 * (1 - (100 - guided) / (100 - uniform)) - stated) < 0.5,
    ),
    # What a width saves is at most 1 − β, were it in force in every layer.
    "beta_saves": lambda beta, saved: Computed(
        f"β = {beta:g} saves at most {100 * (1 - beta):g}%, reported are {saved:g}%", saved <= 100 * (1 - beta)
    ),
    "joint_beyond_alone": lambda joint, alone: Computed(
        f"{joint:g}% together, {alone:g}% alone: the other three would save nothing", joint > alone
    ),
    # A token that is merged away saves at most its own share of the work, and only in the layers after.
    "saves_at_most_what_it_merges": lambda merged, saved: Computed(
        f"{merged[1]:g}% of the tokens are at most {merged[1]:g}% of the work, not {saved:g}%", saved <= merged[1]
    ),
}
