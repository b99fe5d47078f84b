"""Table and figure factorial: all 16 combinations of the four mechanisms, interactions and the synergy δ (Appendix P).

The mechanisms are those that stand alone in Table 11, and the same wherever they take part. Quality and operations only, nothing timed.

Claims: P.4's isolated and joint savings, the sign of their synergy, and that no composition adds more than 0.2 of perplexity.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quicksilver.records.stats import bootstrap, paired_records
from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number, signed
from quicksilver.runtime.errors import QuickSilverError

if TYPE_CHECKING:  # a table needs no matplotlib
    from matplotlib.figure import Figure as Drawing

    from quicksilver.report.figure import Figure

# letter of P -> module of conf/modules in the combinations, claim of P.4, name
FACTORS = {
    "H": ("halting", "halting", "Token halting"),
    "K": ("kv_skipping_attention", "kv_skipping", "KV skipping"),
    "F": ("token_fusion_capacity", "fusion", "Token fusion"),
    "Q": ("adaptive_quantization", "quantization", "Quantization"),
}
LETTERS = "".join(FACTORS)
SETS = tuple("".join(chosen) for size in range(len(LETTERS) + 1) for chosen in itertools.combinations(LETTERS, size))
SWEEP = sweeps.Sweep("factorial", "All combinations")
LEDGERS = ("nominal", "executed", "paper")
QUALITY = "nats"
EFFECTS, SYNERGY = "effects", "synergy"
_SIZES = {
    1: "Main effects",
    2: "Two together, beyond each",
    3: "Three together, beyond their pairs",
    4: "All four, beyond their threes",
}


def rows() -> list[Row]:
    """A row a combination, its key the letters of what takes part (empty: dense inference)."""
    found = []
    for row in SWEEP.rows():
        (word,) = row.overrides[1:]
        modules = [name for name in word.removeprefix("modules=").strip("[]").split(",") if name]
        letters = "".join(letter for letter, (module, _, _) in FACTORS.items() if module in modules)
        name = " + ".join(FACTORS[letter][2] for letter in letters) or "Dense inference"
        found.append(Row(SWEEP.experiment, "", letters or "dense", name, row.overrides, tuple(modules)))
    return found


@dataclass(frozen=True)
class Responses:
    """What every combination gives, by window.

    Attributes:
        nats: combination -> (W,) negative log-likelihood.
        tokens: (W,) scored.
        flops: ledger -> combination -> (W,) operations.
    """

    nats: Mapping[str, NDArray[np.float64]]
    tokens: NDArray[np.float64]
    flops: Mapping[str, Mapping[str, NDArray[np.float64]]]

    def by_window(self) -> NDArray[np.float64]:
        """(1 + 4 · 16, W): the tokens; then of all combinations the nats, and the operations ledger by ledger."""
        of_all = (self.nats, *(self.flops[ledger] for ledger in LEDGERS))
        return np.stack([self.tokens, *(of[chosen] for of in of_all for chosen in SETS)])


def responses_of(sums: NDArray[np.float64]) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Nats per token, and by ledger what is saved in percent, of every combination; sums (65, …) as `Responses.by_window` has them."""
    tokens, nats, *flops = sums[0], *np.split(sums[1:], 1 + len(LEDGERS))
    saved = {ledger: dict(zip(SETS, 100 * (1 - of / of[0]), strict=True)) for ledger, of in zip(LEDGERS, flops, strict=True)}
    return saved | {QUALITY: dict(zip(SETS, nats / tokens, strict=True))}


def responses(outcomes: Sequence[Outcome]) -> Responses | None:
    """None where a combination has no record: a factorial with a hole has no interactions."""
    records = {outcome.row.key.replace("dense", ""): outcome.record for outcome in outcomes}
    frames = {name: record.windows.sort_values("window") for name in SETS if (record := records.get(name)) is not None}
    if len(frames) < len(SETS):
        return None

    def column(name: str) -> dict[str, NDArray[np.float64]]:
        return {chosen: frame[name].to_numpy(float) for chosen, frame in frames.items()}

    return Responses(column("nll_nats"), column("tokens")[""], {ledger: column(f"{ledger}_flops") for ledger in LEDGERS})


def contrast(response: Mapping[str, NDArray[np.float64]], chosen: str) -> NDArray[np.float64]:
    """The effect of the set `chosen`: what it makes together beyond its parts, averaged over the settings of all others.

    Args:
        response: combination -> any shape.
    """
    others = [letter for letter in LETTERS if letter not in chosen]
    settings = [set(some) for size in range(len(others) + 1) for some in itertools.combinations(others, size)]
    total = np.zeros_like(response[""])
    for setting in settings:
        for size in range(len(chosen) + 1):
            for part in itertools.combinations(chosen, size):
                total = total + (-1) ** (len(chosen) - size) * response[_in_order(setting | set(part))]
    return total / len(settings)


def _in_order(letters: set[str]) -> str:
    return "".join(letter for letter in LETTERS if letter in letters)


def synergy(saved: Mapping[str, NDArray[np.float64]], chosen: str) -> NDArray[np.float64]:
    """δ of P.1: what a set saves minus the sum of what each of it saves alone, in points."""
    return saved[chosen] - sum(saved[letter] for letter in chosen)


def beyond_independence(saved: Mapping[str, NDArray[np.float64]], chosen: str) -> NDArray[np.float64]:
    """The same against what would be left if each took its share of what the others leave, 1 - Π(1 - s), in points."""
    left = np.ones_like(saved[""])
    for letter in chosen:
        left = left * (1 - saved[letter] / 100)
    return saved[chosen] - 100 * (1 - left)


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Panel `factorial`: a row a combination. `effects`: a row a set of mechanisms. `synergy`: a row a set of at least two."""
    cells = sweeps.frame(outcomes, (SWEEP,)).drop(columns=["modules", "front"])
    found = responses(outcomes)
    return cells if found is None else pd.concat([cells, pd.DataFrame(_derived(found))], ignore_index=True)


def _derived(found: Responses) -> Iterator[dict[str, Any]]:
    windows = found.by_window()
    names = list(_numbers(windows.sum(-1)))
    intervals = bootstrap(lambda drawn: np.stack([*_numbers(drawn.sum(-1)).values()]), windows)
    numbers: dict[tuple[str, str], dict[str, float]] = {}
    for (panel, chosen, name), value, low, high in zip(names, *intervals, strict=True):
        row = numbers.setdefault((panel, chosen), {})
        row |= {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}
    for chosen in SETS[1:]:
        named = {"key": chosen, "technique": " × ".join(FACTORS[letter][2] for letter in chosen)}
        yield {"panel": EFFECTS, "section": _SIZES[len(chosen)], **named, **numbers[EFFECTS, chosen]}
    for chosen in SETS:
        if len(chosen) > 1:
            named = {"key": chosen, "technique": " + ".join(FACTORS[letter][2] for letter in chosen)}
            said = {"reported_synergy": reported_synergy()} if chosen == LETTERS else {}
            yield {"panel": SYNERGY, "section": "", **named, **numbers[SYNERGY, chosen], **said}


def _numbers(sums: NDArray[np.float64]) -> dict[tuple[str, str, str], NDArray[np.float64]]:
    """What the panels print, each (…), by panel, combination and column; sums (65, …) as `Responses.by_window` has them."""
    responses = responses_of(sums)
    found = {
        (EFFECTS, chosen, f"effect_{name}"): contrast(response, chosen)
        for chosen in SETS[1:]
        for name, response in responses.items()
    }
    for chosen in SETS:
        if len(chosen) > 1:
            for ledger in LEDGERS:
                found[SYNERGY, chosen, f"synergy_{ledger}"] = synergy(responses[ledger], chosen)
                found[SYNERGY, chosen, f"beyond_{ledger}"] = beyond_independence(responses[ledger], chosen)
    return found


def worst(outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """Perplexity added by the combination that adds most, in percent of dense; None where one has no record."""
    found = []
    for key, outcome in outcomes.items():
        if outcome.record is None or outcome.dense is None:
            return None
        if key != "dense":
            paired = paired_records(outcome.record, outcome.dense)
            found.append(Estimate(paired.relative_pct, paired.relative_pct_low, paired.relative_pct_high))
    return max(found, key=lambda estimate: estimate.value, default=None)


def reported_synergy() -> float:
    """δ of all four from the paper's own numbers (P.4), in points: 47.2 minus the sum of the isolated savings."""
    alone = sum(reported()[f"p4.isolated.{claim}"].values["flops_saved_pct"] for _, claim, _ in FACTORS.values())
    return reported()["p4.joint"].values["flops_saved_pct"] - alone


def reported_beyond_independence() -> float:
    """The same of `beyond_independence`."""
    left = 1.0
    for _, claim, _ in FACTORS.values():
        left *= 1 - reported()[f"p4.isolated.{claim}"].values["flops_saved_pct"] / 100
    return reported()["p4.joint"].values["flops_saved_pct"] - 100 * (1 - left)


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """The combinations, their effects and their synergy."""
    title = "All combinations, protocol continuation; a mechanism is the same wherever it takes part"
    named = (Column("", "", _letters, align="left"), Column("", "technique", _technique, align="left"))
    panels = [sweeps.panel(SWEEP, outcomes, (*named, *sweeps.measured_columns(SWEEP)), title)]
    said: tuple[str, ...] = ("Not every combination has a record, so there are no interactions and no synergy.",)
    if responses(outcomes) is not None:
        panels.append(Panel(EFFECTS, "Main effects and interactions", _effect_columns()))
        panels.append(Panel(SYNERGY, "Synergy (P.1)", _synergy_columns()))
        said = legend()
    return Table(name, "Factorial of the four mechanisms", frame(outcomes), tuple(panels), (*said, *sweeps.LEGEND[:2]))


def legend() -> tuple[str, ...]:
    """What effects and δ are, and what the paper's own numbers give."""
    return (
        "Effect of one mechanism: the mean change when it joins, over all settings of the other three. Effect of several: the "
        "change that they make together beyond their parts. Units: points of dense operations, and nats per token × 100, which "
        "is about percent of perplexity.",
        "δ: what the set saves together minus the sum of what each member saves alone (P.1), in points. Below 0 the savings "
        "overlap (sub-additive). independent: the same, minus what the members would save if each took its share of what the "
        "others leave.",
        f"The paper's own numbers (P.4) give δ = {reported_synergy():+.1f} points and {reported_beyond_independence():+.1f} against "
        "independence: sub-additive, though the text there calls it super-additive (docs/conflicts.md #24).",
        "In the executed ledger δ is large where decisions are expensive: with fewer active tokens there is less to decide.",
        "Intervals: 95%, bootstrap over windows. One draw of windows serves all combinations.",
    )


def _letters(row: Mapping[str, Any]) -> Lines:
    return ("" if row["key"] == "dense" else row["key"],)


def _technique(row: Mapping[str, Any]) -> Lines:
    return (row["technique"],) if row["status"] == "measured" else (row["technique"], row["status"])


def _cell(key: str, *, factor: float = 1.0, decimals: int = 1) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        values = [number(row, f"{key}{end}") for end in ("", "_low", "_high")]
        if None in values:
            return (NO_VALUE,)
        middle, low, high = (signed(factor * value, decimals) for value in values if value is not None)
        return (f"{middle} [{low} {high}]",)

    return cell


def _effect_columns() -> tuple[Column, ...]:
    return (
        Column("", "", lambda row: (" × ".join(row["key"]),), align="left"),
        *(Column("FLOPs saved, points", ledger, _cell(f"effect_{ledger}")) for ledger in LEDGERS),
        Column("perplexity", "nats × 100", _cell(f"effect_{QUALITY}", factor=100)),
    )


def _synergy_columns() -> tuple[Column, ...]:
    return (
        Column("", "", lambda row: (" + ".join(row["key"]),), align="left"),
        Column("paper", "δ", lambda row: (signed(number(row, "reported_synergy")),)),
        *(Column("δ, points", ledger, _cell(f"synergy_{ledger}")) for ledger in LEDGERS),
        *(
            Column("against independent, points", ledger, _cell(f"beyond_{ledger}"), expendable=1)
            for ledger in ("nominal", "paper")
        ),
    )


def draw(rows: pd.DataFrame) -> Drawing:
    """Main effects and pairs as matrices (operations, perplexity), and δ of every set. Call it inside `style()`."""
    from quicksilver.report.figure import HATCHES, PALETTE, heat_look, panels, whiskers, write_cells

    drawing, plots = panels(1, 3, size=(11.0, 3.4), width_ratios=[1, 1, 1.25])
    effects = rows[rows["panel"] == EFFECTS].set_index("key")
    shown = (("nominal", 1.0, "nominal FLOPs saved, points"), (QUALITY, 100.0, "perplexity added, nats per token × 100"))
    for plot, (name, factor, title) in zip(plots[0], shown, strict=False):
        matrix = np.full((len(LETTERS), len(LETTERS)), np.nan)
        for i, j in itertools.combinations_with_replacement(range(len(LETTERS)), 2):
            matrix[j, i] = factor * effects.loc["".join(dict.fromkeys(LETTERS[i] + LETTERS[j])), f"effect_{name}"]
        drawing.colorbar(plot.imshow(matrix, **heat_look(matrix)), ax=plot)
        there = zip(*np.nonzero(~np.isnan(matrix)), strict=True)
        write_cells(plot, matrix, {(int(j), int(i)): signed(matrix[j, i]) for j, i in there}, 8)
        plot.set_xticks(range(len(LETTERS)), LETTERS)
        plot.set_yticks(range(len(LETTERS)), [f"{FACTORS[letter][2]} {letter}" for letter in LETTERS])
        plot.set_title(f"Effects and interactions of pairs:\n{title}", fontsize=8)
        plot.grid(False)
    deltas = rows[rows["panel"] == SYNERGY]
    plot = plots[0][2]
    places = np.arange(len(deltas))
    for k, ledger in enumerate(("nominal", "paper")):
        middle = deltas[f"synergy_{ledger}"]
        spread = whiskers(middle, deltas[f"synergy_{ledger}_low"], deltas[f"synergy_{ledger}_high"])
        bars = {"color": PALETTE[(0, 4)[k]], "hatch": HATCHES[k], "edgecolor": "white", "label": f"{ledger} ledger"}
        plot.bar(places + 0.4 * k - 0.2, middle, 0.4, yerr=spread, error_kw={"elinewidth": 0.7}, **bars)
    plot.plot(places[-1], reported_synergy(), marker="D", linestyle="", color=PALETTE[1], label="the paper's numbers (P.4)")
    plot.axhline(0, color="black", linewidth=0.8, linestyle="-", marker="")
    plot.set_xticks(places, deltas["key"], rotation=90)
    plot.set_xlabel("mechanisms together")
    plot.set_ylabel("δ, points of dense FLOPs")
    plot.set_title("Synergy δ (P.1): below 0, savings overlap", fontsize=8)
    plot.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=2)
    return drawing


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Matrices of effects, bars of δ.

    Raises:
        QuickSilverError: a combination has no record, so there are no interactions.
    """
    from quicksilver.report.figure import Figure, style

    found = frame(outcomes)
    if not found["panel"].eq(EFFECTS).any():
        raise QuickSilverError("interactions need a record of every combination, and not every one has one.")
    with style():
        drawing = draw(found)
    caption = (*legend(), *sweeps.notes(outcomes, name))
    return Figure(name, "All combinations of the four mechanisms", found, drawing, caption)


ANSWERS = {f"p4.isolated.{claim}": AnsweredBy("factorial", letter) for letter, (_, claim, _) in FACTORS.items()}
ANSWERS |= {"p4.joint": AnsweredBy("factorial", LETTERS), "p4.half": AnsweredBy("factorial", LETTERS)}
ANSWERS["p4.stability.delta_ppl"] = AnsweredBy("factorial", LETTERS, of=worst, note="the combination of the 15 that adds most")
