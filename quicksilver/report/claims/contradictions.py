"""Whether the paper agrees with itself: rows of `contradictions.yaml`, and the arithmetic on its own numbers that decides them.

Nothing measured enters here. A check is given the numbers of the claims that its row names and says what follows from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import Any, Literal

import yaml

from quicksilver.report.claims.reported import Reported, reported

Agreement = Literal["contradiction", "consistent", "choice"]
Bounds = tuple[float | None, float | None]

A100_WATTS = 400.0  # greatest board power of an A100, NVIDIA's data sheet
GPT2_VOCABULARY = 50_257


@dataclass(frozen=True)
class Computed:
    """What was computed, in words, and whether the paper's statement holds."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Contradiction:
    """One row of `contradictions.yaml`.

    Attributes:
        id: name of the row; `conflict`: its number in the project's list, None for one found later.
        says: what the paper says.
        claims: name to claim (id.quantity) or entry (id).
        check: name of a function of this module; None: there is nothing to compute.
        ours: what is done here instead.
    """

    id: str
    says: str
    ours: str
    conflict: int | None = None
    claims: Mapping[str, str] = field(default_factory=dict)
    check: str | None = None

    @property
    def places(self) -> str:
        """Where the claims stand."""
        return "; ".join(dict.fromkeys(_entry(claim)[0].place for claim in self.claims.values()))

    def finding(self) -> Computed | None:
        """What the paper's own numbers say; None where there is nothing to compute."""
        if self.check is None:
            return None
        return globals()[self.check](**{name: _given(claim) for name, claim in self.claims.items()})

    @property
    def agreement(self) -> Agreement:
        finding = self.finding()
        return "choice" if finding is None else "consistent" if finding.holds else "contradiction"


@cache
def contradictions() -> tuple[Contradiction, ...]:
    """Every row of `contradictions.yaml`."""
    content = yaml.safe_load(files(__package__).joinpath("contradictions.yaml").read_text(encoding="utf-8"))
    return tuple(Contradiction(**row) for row in content["contradictions"])


def _entry(claim: str) -> tuple[Reported, str | None]:
    """The entry that `claim` names, and the quantity where it names one."""
    if claim in reported():
        return reported()[claim], None
    name, _, quantity = claim.rpartition(".")
    return reported()[name], quantity


def _given(claim: str) -> Reported | float | Bounds:
    entry, quantity = _entry(claim)
    return entry if quantity is None else entry.values[quantity] if quantity in entry.values else entry.bounds[quantity]


def _number(value: Any) -> str:
    return f"{value:g}" if not isinstance(value, tuple) else f"{value[0]:g} to {value[1]:g}"


# --- checks: from numbers of the paper to a finding -----------------------------------------------------------------------------


def same(**stated: float | Bounds) -> Computed:
    """One quantity, stated several times."""
    spans = [value if isinstance(value, tuple) else (value, value) for value in stated.values()]
    low, high = max(span[0] or 0.0 for span in spans), min(span[1] or math.inf for span in spans)
    written = ", ".join(dict.fromkeys(_number(value) for value in stated.values()))
    apart = max(span[1] or 0.0 for span in spans) / min(span[0] or math.inf for span in spans)
    return Computed(f"{written}" + (f": a factor of {apart:.3g}" if low > high else ""), low <= high)


def at_least(halted: float, first: float) -> Computed:
    return Computed(f"layer {halted:g} against {first:g} at the earliest", halted >= first)


def model_size(parameters_millions: float, layers: float, width: float, heads: float) -> Computed:
    """12·L·d² in the layers (App. J's 4d² + 8d²), the rest in the embedding."""
    in_layers = 12 * layers * width**2 / 1e6
    vocabulary = (parameters_millions - in_layers) * 1e6 / width
    text = (
        f"12·L·d² is {in_layers:.0f} M; the other {parameters_millions - in_layers:.0f} M would be an embedding of {vocabulary:,.0f} "
        f"tokens (GPT-2 has {GPT2_VOCABULARY:,}); {width:g} / {heads:g} heads is {width / heads:.4g}"
    )
    return Computed(text, vocabulary <= 2 * GPT2_VOCABULARY and width % heads == 0)


def entropy_units(bits: float, nats: float) -> Computed:
    return Computed(f"{bits:g} bits are {bits * math.log(2):.3f} nats, not {nats:g}", math.isclose(bits * math.log(2), nats))


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


def inside_grid(low: float, high: float, low_grid: tuple[float, float], high_grid: tuple[float, float]) -> Computed:
    text = f"({low:g}, {high:g}) was found in {low_grid[0]:g}…{low_grid[1]:g} × {high_grid[0]:g}…{high_grid[1]:g}"
    return Computed(text, low_grid[0] <= low <= low_grid[1] and high_grid[0] <= high <= high_grid[1])


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


def beta_saves(beta: float, saved: float) -> Computed:
    """What a width saves is at most 1 − β, were it in force in every layer."""
    most = 100 * (1 - beta)
    return Computed(f"β = {beta:g} saves at most {most:g}%, reported are {saved:g}%", saved <= most)


def joint_beyond_alone(joint: float, alone: float) -> Computed:
    return Computed(f"{joint:g}% together, {alone:g}% alone: the other three would save nothing", joint > alone)


def superadditive(joint: float, **alone: float) -> Computed:
    total = sum(alone.values())
    text = f"{joint:g}% together, {' + '.join(f'{value:g}' for value in alone.values())} = {total:g}% apart: δ = {joint - total:+.3g} points"
    return Computed(text, joint > total)


def beyond_pairs(joint: float, **alone: float) -> Computed:
    best = max(map(sum, combinations(alone.values(), 2)))
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
    values = [dense, *after.values()]
    steps = {name: before - then for name, before, then in zip(after, values[:-1], values[1:], strict=True)}
    last = list(steps)[-1]
    others = max(step for name, step in steps.items() if name != last)
    text = "steps of " + ", ".join(f"{step:.2f} g ({name})" for name, step in steps.items())
    return Computed(text, steps[last] > others + 1e-9)


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


def milliseconds_are_percent(saved_ms: float, dense_ms: float, speedup: float) -> Computed:
    share = 100 * saved_ms / dense_ms
    return Computed(f"{saved_ms:g} of {dense_ms:g} ms are {share:.1f}%, not {speedup:g}%", abs(share - speedup) <= 1)


def within_bound(bound: Bounds, **values: float) -> Computed:
    most = bound[1] if bound[1] is not None else math.inf
    beyond = [f"{value:+.2f} ({name})" for name, value in values.items() if value > most]
    return Computed(f"Table 11 has {', '.join(beyond)}" if beyond else "Table 11 agrees", not beyond)


def saves_at_most_what_it_merges(merged: tuple[float, float], saved: float) -> Computed:
    """A token that is merged away saves at most its own share of the work, and only in the layers after."""
    return Computed(f"{merged[1]:g}% of the tokens are at most {merged[1]:g}% of the work, not {saved:g}%", saved <= merged[1])


def decay_and_halted_share(decay: tuple[float, float], layer: float, **classes: Reported) -> Computed:
    """Active tokens at a layer by the decay, and by the shares of the word classes that have halted there."""
    tokens = sum(entry.values["tokens"] for entry in classes.values())
    halted = sum(entry.values["halted_share_pct"] * entry.values["tokens"] for entry in classes.values()) / tokens
    least, most = (100 * math.exp(-rate * layer) for rate in (decay[1], decay[0]))
    text = f"active at layer {layer:g}: {least:.0f} to {most:.0f}% by the decay, {100 - halted:.1f}% by the word classes"
    return Computed(text, least <= 100 - halted <= most)


def weighted_share(bound: Bounds, **classes: Reported) -> Computed:
    tokens = sum(entry.values["tokens"] for entry in classes.values())
    share = sum(entry.values["halted_share_pct"] * entry.values["tokens"] for entry in classes.values()) / tokens
    least = bound[0] if bound[0] is not None else 0.0
    return Computed(f"by Table 2 they halt at {share:.1f}% ({tokens:,.0f} tokens)", share > least)
