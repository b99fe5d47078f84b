"""Table and figure factorial: all 16 combinations of the four mechanisms, interactions and the synergy δ (Appendix P).

The mechanisms are those that stand alone in Table 11, and the same wherever they take part. Quality and operations only, nothing timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quicksilver.records.stats import bootstrap
from quicksilver.report import comparison, sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy, added_pct, saved_pct
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import HATCHES, PALETTE, Figure, panels, style, whiskers
from quicksilver.report.table import ENDS, Column, Panel, Table, signed, with_ends
from quicksilver.runtime.errors import QuickSilverError

from .. import drawing as draw

# letter of P -> module of conf/modules in the combinations, claim of P.4, name
FACTORS = {
    "H": ("halting", "halting", "Token halting"),
    "K": ("kv_skipping_attention", "kv_skipping", "KV skipping"),
    "F": ("token_fusion_capacity", "fusion", "Token fusion"),
    "Q": ("adaptive_quantization", "quantization", "Quantization"),
}
LETTERS = "".join(FACTORS)
SETS = tuple("".join(chosen) for size in range(len(LETTERS) + 1) for chosen in itertools.combinations(LETTERS, size))
# The FAQ: all four on a model that pruning made smaller.
PRUNED, ON_PRUNED = "channels pruned", "channels pruned, all four"
_ALL_FOUR = ",".join(module for module, _, _ in FACTORS.values())
BESIDE = {PRUNED: ("modules=[channel_pruning]",), ON_PRUNED: (f"modules=[channel_pruning,{_ALL_FOUR}]",)}
SWEEP = sweeps.Sweep("factorial", "All combinations", beside=BESIDE)
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
        if row.section:
            found.append(row)
            continue
        (word,) = row.overrides[1:]
        modules = [name for name in word.removeprefix("modules=").strip("[]").split(",") if name]
        letters = "".join(letter for letter, (module, _, _) in FACTORS.items() if module in modules)
        name = " + ".join(FACTORS[letter][2] for letter in letters) or "Dense inference"
        found.append(Row(SWEEP.experiment, "", letters or "dense", name, row.overrides, tuple(modules)))
    return found


def sums_of(outcomes: Sequence[Outcome]) -> NDArray[np.float64] | None:
    """(1 + 4 · 16, W) by window: the tokens; then of all combinations the nats, and the operations ledger by ledger.

    None where a combination has no record: a factorial with a hole has no interactions.
    """
    records = {outcome.row.key.replace("dense", ""): outcome.record for outcome in outcomes}
    frames = [record.windows.sort_values("window") for chosen in SETS if (record := records.get(chosen)) is not None]
    if len(frames) < len(SETS):
        return None
    columns = ("nll_nats", *(f"{ledger}_flops" for ledger in LEDGERS))
    return np.stack([frames[0]["tokens"], *(frame[column] for column in columns for frame in frames)]).astype(float)


def responses_of(sums: NDArray[np.float64]) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Nats per token, and by ledger what is saved in percent, of every combination; sums (65, …) as `sums_of` has them."""
    tokens, nats, *flops = sums[0], *np.split(sums[1:], 1 + len(LEDGERS))
    saved = {ledger: dict(zip(SETS, 100 * (1 - of / of[0]), strict=True)) for ledger, of in zip(LEDGERS, flops, strict=True)}
    return saved | {QUALITY: dict(zip(SETS, nats / tokens, strict=True))}


def contrast(response: Mapping[str, NDArray[np.float64]], chosen: str) -> NDArray[np.float64]:
    """The effect of the set `chosen`: what it makes together beyond its parts, averaged over the settings of all others.

    Args:
        response: combination -> any shape.
    """
    signed = [(-1) ** len(set(chosen) - set(some)) * response[some] for some in SETS]
    return np.sum(signed, axis=0) / 2 ** (len(LETTERS) - len(chosen))


def synergy(saved: Mapping[str, NDArray[np.float64]], chosen: str) -> NDArray[np.float64]:
    """δ of P.1: what a set saves minus the sum of what each of it saves alone, in points."""
    return saved[chosen] - sum(saved[letter] for letter in chosen)


def beyond_independence(saved: Mapping[str, NDArray[np.float64]], chosen: str) -> NDArray[np.float64]:
    """The same against what would be left if each took its share of what the others leave, 1 - Π(1 - s), in points."""
    return saved[chosen] - 100 * (1 - np.prod([1 - saved[letter] / 100 for letter in chosen], axis=0))


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Panel `factorial`: a row a combination. `effects`: a row a set of mechanisms. `synergy`: a row a set of at least two."""
    cells, sums = sweeps.frame(outcomes, (SWEEP,)).drop(columns=["modules", "front"]), sums_of(outcomes)
    if sums is None:
        return cells
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    intervals = bootstrap(lambda drawn: np.stack([*_numbers(drawn.sum(-1)).values()]), sums)
    for (panel, chosen, name), *found in zip(_numbers(sums.sum(-1)), *intervals, strict=True):
        section, between = (_SIZES[len(chosen)], " × ") if panel == EFFECTS else ("", " + ")
        technique = between.join(FACTORS[letter][2] for letter in chosen)
        row = rows.setdefault((panel, chosen), {"panel": panel, "section": section, "key": chosen, "technique": technique})
        row |= {f"{name}{end}": float(value) for end, value in zip(ENDS, found, strict=True)}
    rows[SYNERGY, LETTERS]["reported_synergy"] = reported_synergy()
    return pd.concat([cells, pd.DataFrame([*rows.values()])], ignore_index=True)


def _numbers(sums: NDArray[np.float64]) -> dict[tuple[str, str, str], NDArray[np.float64]]:
    """What the panels print, each (…), by panel, combination and column; sums (65, …) as `sums_of` has them."""
    responses = responses_of(sums)
    effects = itertools.product(SETS[1:], responses.items())
    found = {(EFFECTS, chosen, f"effect_{name}"): contrast(response, chosen) for chosen, (name, response) in effects}
    for chosen, ledger in itertools.product((some for some in SETS if len(some) > 1), LEDGERS):
        found[SYNERGY, chosen, f"synergy_{ledger}"] = synergy(responses[ledger], chosen)
        found[SYNERGY, chosen, f"beyond_{ledger}"] = beyond_independence(responses[ledger], chosen)
    return found


def worst(outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """Perplexity added by the combination that adds most, in percent of dense; None where one has no record."""
    found = []
    for key, one in outcomes.items():
        if key not in BESIDE:
            if one.record is None or one.dense is None:
                return None
            found += [added_pct(one.record, one.dense)] if key in SETS[1:] else []
    return max(found, key=lambda estimate: estimate.value, default=None)


def _interaction(name: str) -> Callable[[Mapping[str, Outcome]], Estimate | None]:
    """δ of a set of mechanisms in a ledger (`HK.nominal`), in points; `pairs`: all four beyond the sum of the best two, in the paper's ledger."""
    chosen, _, ledger = name.partition(".")

    def points(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
        saved = responses_of(drawn.sum(-1))[ledger or "paper"]
        if chosen != "pairs":
            return np.asarray(synergy(saved, chosen))
        return saved[LETTERS] - np.sort([saved[letter] for letter in LETTERS], axis=0)[-2:].sum(0)

    def of(outcomes: Mapping[str, Outcome]) -> Estimate | None:
        sums = sums_of([*outcomes.values()])
        return None if sums is None else Estimate.of(bootstrap(points, sums))

    return of


def _on_pruned(outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """Percent of the pruned model's operations, in the paper's ledger, that all four save on top."""
    ours, pruned = outcomes[ON_PRUNED].record, outcomes[PRUNED].record
    return None if ours is None or pruned is None else saved_pct(ours, pruned, "paper_flops")


def _reported() -> dict[str, Any]:
    """What the paper saves (P.4) with nothing, each mechanism alone, and all four, percent."""
    alone = {letter: reported()[f"p4.isolated.{claim}"].values["flops_saved_pct"] for letter, (_, claim, _) in FACTORS.items()}
    return {"": 0.0, **alone, LETTERS: reported()["p4.joint"].values["flops_saved_pct"]}


def reported_synergy() -> float:
    """δ of all four from the paper's own numbers (P.4), in points: 47.2 minus the sum of the isolated savings."""
    return float(synergy(_reported(), LETTERS))


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """The combinations, their effects and their synergy."""
    title = "All combinations, protocol continuation; a mechanism is the same wherever it takes part"
    panels = [sweeps.panel(SWEEP, outcomes, (*_COMBINATION, *sweeps.measured_columns(SWEEP)), title)]
    said: tuple[str, ...] = ("Not every combination has a record, so there are no interactions and no synergy.",)
    if sums_of(outcomes) is not None:
        panels += [Panel(EFFECTS, "Main effects and interactions", _EFFECTS), Panel(SYNERGY, "Synergy (P.1)", _SYNERGY)]
        said = legend(table=True)
    return Table(name, "Factorial of the four mechanisms", frame(outcomes), tuple(panels), (*said, *sweeps.LEGEND[:2]))


def legend(*, table: bool) -> tuple[str, ...]:
    """What effects and δ are, and what the paper's own numbers give."""
    said = "independent: the same, minus what the members would save if each took its share of what the others leave."
    return (
        "Effect of one mechanism: the mean change when it joins, over all settings of the other three. Effect of several: the "
        "change that they make together beyond their parts. Units: points of dense operations, and nats per token × 100, which "
        "is about percent of perplexity.",
        "δ: what the set saves together minus the sum of what each member saves alone (P.1), in points. Below 0 the savings "
        "overlap (sub-additive).",
        *([said] if table else []),
        f"The paper's own numbers (P.4) give δ = {reported_synergy():+.1f} points and {float(beyond_independence(_reported(), LETTERS)):+.1f} against "
        "independence: sub-additive, though the text there calls it super-additive (docs/conflicts.md #24).",
        "In the executed ledger δ is large where decisions are expensive: with fewer active tokens there is less to decide.",
        "Intervals: 95%, bootstrap over windows. One draw of windows serves all combinations.",
    )


_interval = partial(with_ends, spec="+.1f", between=" ")
_COMBINATION = (
    Column("", "", lambda row: (row["key"].replace("dense", ""),), align="left"),
    Column("", "technique", comparison.technique_cell, align="left"),
)
_EFFECTS = (
    Column("", "", lambda row: (" × ".join(row["key"]),), align="left"),
    *(Column("FLOPs saved, points", ledger, _interval(f"effect_{ledger}")) for ledger in LEDGERS),
    Column("perplexity", "nats × 100", _interval(f"effect_{QUALITY}", spec="100*+.1f")),
)
_SYNERGY = (
    Column("", "", lambda row: (" + ".join(row["key"]),), align="left"),
    Column("paper", "δ", "{reported_synergy:+.1f}"),
    *(Column("δ, points", ledger, _interval(f"synergy_{ledger}")) for ledger in LEDGERS),
    *(Column("against independent, points", one, _interval(f"beyond_{one}"), expendable=1) for one in ("nominal", "paper")),
)


def draw_effects(rows: pd.DataFrame) -> Any:
    """Main effects and pairs as matrices (operations, perplexity), and δ of every set. Call it inside `style()`."""
    drawing, plots = panels(1, 3, size=(11.6, 3.2), width_ratios=[1, 1, 1.4])
    effects = rows[rows["panel"] == EFFECTS].set_index("key")
    shown = (("nominal", 1.0, "nominal FLOPs saved, points"), (QUALITY, 100.0, "perplexity added, nats per token × 100"))
    for plot, (name, factor, title) in zip(plots[0], shown, strict=False):
        matrix = np.full((len(LETTERS), len(LETTERS)), np.nan)
        for i, j in itertools.combinations_with_replacement(range(len(LETTERS)), 2):
            matrix[j, i] = factor * effects.loc["".join(dict.fromkeys(LETTERS[i] + LETTERS[j])), f"effect_{name}"]
        draw.heatmap(drawing, plot, matrix, signed, [*LETTERS], [f"{FACTORS[letter][2]} {letter}" for letter in LETTERS])
        plot.set_title(f"Effects of one and of pairs:\n{title}")
    deltas = rows[rows["panel"] == SYNERGY]
    plot = plots[0][2]
    places = np.arange(len(deltas))
    for k, ledger in enumerate(("nominal", "paper")):
        middle = deltas[f"synergy_{ledger}"]
        spread = whiskers(middle, deltas[f"synergy_{ledger}_low"], deltas[f"synergy_{ledger}_high"])
        bars = {"color": PALETTE[(0, 4)[k]], "hatch": HATCHES[k], "edgecolor": "white", "label": f"{ledger} ledger"}
        plot.bar(places + 0.4 * k - 0.2, middle, 0.4, yerr=spread, error_kw={"elinewidth": 0.7}, **bars)
    plot.plot(places[-1], reported_synergy(), marker="D", linestyle="", color=PALETTE[1], label="the paper's numbers (P.4)")
    draw.horizontal(plot, 0)
    plot.set_xticks(places, deltas["key"], rotation=90)
    plot.set(xlabel="mechanisms together", ylabel="δ, points of dense FLOPs")
    plot.set_title("Synergy δ (P.1):\nbelow 0, savings overlap")
    plot.legend(loc="lower left")
    return drawing


def _finding(rows: pd.DataFrame) -> str:
    """What all four save together beside the sum of what each saves alone."""
    joint = rows[(rows["panel"] == SYNERGY) & (rows["key"] == LETTERS)]
    if joint.empty:
        return ""
    apart, paper = (float(joint[f"synergy_{ledger}"].iloc[0]) for ledger in ("nominal", "paper"))
    more, also = (f"{abs(one):.1f} points {'more' if one > 0 else 'less'}" for one in (apart, paper))
    return f"All four save {more} than the sum of what each saves alone, and {also} in the paper's ledger"


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Matrices of effects, bars of δ.
    Raises QuickSilverError: a combination has no record, so there are no interactions."""
    found = frame(outcomes)
    if not found["panel"].eq(EFFECTS).any():
        raise QuickSilverError("interactions need a record of every combination, and not every one has one.")
    with style():
        drawing = draw_effects(found)
    caption = (*legend(table=False), *sweeps.notes(outcomes, name))
    return Figure(name, "All combinations of the four mechanisms", found, drawing, caption, finding=_finding(found))


ANSWERS = {f"p4.isolated.{claim}": AnsweredBy("factorial", letter) for letter, (_, claim, _) in FACTORS.items()}
ANSWERS |= {"p4.joint": AnsweredBy("factorial", LETTERS), "p4.half": AnsweredBy("factorial", LETTERS)}
ANSWERS["p4.stability.delta_ppl"] = AnsweredBy("factorial", LETTERS, of=worst, note="the combination of the 15 that adds most")
_PRUNED_NOTE = "30% of the MLP channels left out, those of least weight, untrained; against the pruned model"
ANSWERS["faq.on_top_of_pruning.flops_saved_pct"] = AnsweredBy(
    "factorial", ON_PRUNED, of=_on_pruned, note=_PRUNED_NOTE, against=PRUNED
)
# What a claim says of a set: in the paper's ledger, which counts nothing that KV skipping saves, or in the nominal one.
_INTERACTIONS = {
    "p4.super_additive": (LETTERS, "δ of all four, beyond the sum of each alone"),
    "p4.beyond_pairs": ("pairs", "all four beyond the best two, each alone"),
    "f3.fusion_with_skipping": ("KF.nominal", "δ of the two in nominal operations"),
    "section3.skipping_with_halting": ("HK.nominal", "δ of the two in nominal operations"),
}
ANSWERS |= {
    f"{claim}.interaction_points": AnsweredBy("factorial", LETTERS, of=_interaction(name), note=note)
    for claim, (name, note) in _INTERACTIONS.items()
}
