"""Runs on gold annotation, and what fuses: four ways to halt, fusion at the paper's three depths, Precision@Fusion on gold trees (Tables 9 and 13).

Percentiles are chosen so that about as many tokens have halted at half of the depth as in the paper's table (37.8%, by its counts). “A constituent
holds both” is true of every pair, because the root holds the whole sentence. So three stricter definitions are published. The paper speaks of
phrases, so the smallest common constituent being one answers its claims, by its difference from random neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from quicksilver.measure.words import PAIRS, WORDS, ConstituentsResult, Fused, inside
from quicksilver.records.record import TRACE, Record
from quicksilver.records.stats import bootstrap
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, PALETTE, Figure, legend_below, panels, percent_of_shares, style
from quicksilver.report.table import ENDS, Column, Panel, Table, interval_columns, with_ends
from quicksilver.runtime.errors import ConfigError

from .. import drawing as draw
from ..ablation.techniques import options

TREEBANK = ("dataset=gum",)  # unless a person names another
PAPER_DEPTHS = {12: 0.4, 15: 0.5, 20: 2 / 3}  # layer of the paper's 30 -> fraction of the depth
# What a page that shows a run word by word needs.
_OF_WORDS = ("window", "slot", "word", "class", "sentence", "joint_label", "joint_words")
WORD_BY_WORD = (TRACE, *(f"{WORDS}:{column}" for column in _OF_WORDS))
HALTING, FUSION = "halting", "fusion"
MAIN = "drift_entropy"  # the paper's rule, with thresholds of this model

_PERCENTILES = ("modules.halting.tau_drift=p42", "modules.halting.tau_entropy=p42", "measure.word_signals.enabled=true")
# key -> what is printed, protocol, module, further overrides
_HALTING: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    MAIN: ("Drift and entropy, calibrated", "all", "halting", _PERCENTILES),
    "drift": ("Drift alone, calibrated", "all", "halting", options("halting", tau_drift="p10", tau_entropy="null")),
    "attention": ("Least attended (ours)", "continuation", "halting_attention", ()),
    "paper_b2": ("The paper's constants (B.2)", "all", "halting_paper_b2", ()),
}


def halting(*keys: str) -> list[Row]:
    """Those of the ways to halt, or all of them."""
    found = []
    for key, (technique, protocol, module, more) in _HALTING.items():
        words = (f"protocol={protocol}", f"modules=[{module}]", *more, "measure=words")
        found.append(Row(HALTING, "", key, technique, words, defaults=TREEBANK))
    return [row for row in found if not keys or row.key in keys]


def fusion() -> list[Row]:
    """The closest 15% of neighbours (D.3), fused at each of the paper's depths."""
    found = []
    for layer, depth in PAPER_DEPTHS.items():
        fusing = ("protocol=continuation", "modules=[token_fusion]", f"modules.token_fusion.start={depth:.3f}")
        overrides = (*fusing, "measure=words", "measure.constituents.enabled=true")
        found.append(Row(FUSION, "", f"layer{layer}", f"Fused at {depth:.0%} of the depth", overrides, defaults=TREEBANK))
    return found


def records(outcomes: Sequence[Outcome]) -> list[Record]:
    """What a figure is drawn from: the records there are, at least one.
    Raises ConfigError: no run has one; says why the first has none."""
    found = [outcome.record for outcome in outcomes if outcome.record is not None]
    if not found:
        raise ConfigError(f"no run has a record ({outcomes[0].reason}), and there is nothing to draw without one")
    return found


def failed(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Which runs have no record, and why."""
    return tuple(f"{outcome.row.technique}: {outcome.reason}." for outcome in outcomes if outcome.record is None)


def whose_tags(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Where tags are not gold: who tagged the text, and how many words of a held-out treebank are right."""
    sources = {outcome.record.data.source for outcome in outcomes if outcome.record is not None}
    parts = (one.partition("; ") for one in sorted(sources))
    return tuple(f"Tags are not gold: the text is {said}." for _, mark, said in parts if mark)


# --- are fused neighbours constituents? -----------------------------------------------------------------------------------------
# Notebook 4 computes the table again.
_OF_PAIRS = ("words_apart", "sentence", "kind", "tags", "label", "words", "fused_after", "rank_8")
DEFINITIONS = {
    "short": "A common constituent of at most six words",
    "phrase": "The smallest common constituent is a phrase, no clause",
    "np_vp": "The smallest common constituent is an NP or a VP",
    "any": "Any common constituent, the paper's definition read literally",
}


def result(record: Record) -> ConstituentsResult:
    """What was measured."""
    return record.measured("constituents", ConstituentsResult)


def fused(record: Record) -> Fused | None:
    """The one layer of a run in which it fused; None where no two words were joined."""
    return next((one for one in result(record).fused if one.precision), None)


# --- claims -----------------------------------------------------------------------------------------------------------------------
_PHRASE = "the smallest common constituent is a phrase, no clause; gold trees"
_D3 = "fusion alone with D.3's threshold, at half of the depth; the percentile was taken on other text"


def _answer(key: str, of: Callable[[Fused], Any], beyond: Callable[[Fused], Any], note: str = _PHRASE) -> AnsweredBy:
    """Shares of the fused neighbours of that run, in percent."""

    def percent(what: Callable[[Fused], Any]) -> Callable[[Record], Estimate | None]:
        return lambda record: None if (one := fused(record)) is None else Estimate.of(what(one), 100)

    return AnsweredBy(FUSION, key, of_record=percent(of), beyond_chance=percent(beyond), note=note)


def _precision(key: str, definition: str = "phrase", note: str = _PHRASE) -> AnsweredBy:
    """Precision, and how far it is from that of random neighbours."""
    beyond = lambda one: one.nulls[definition]["random"].beyond
    return _answer(key, lambda one: one.precision[definition], beyond, note)


def _random(key: str) -> AnsweredBy:
    """Precision of as many random neighbours, and how far it is from that of the fused ones."""
    beyond = lambda one: Estimate.of(one.nulls["phrase"]["random"].beyond, -1)
    return _answer(key, lambda one: one.nulls["phrase"]["random"].chance, beyond)


def _deeper(outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """Points of precision from the paper's layer 15 to its 20, paired by sentence: both runs choose among the same pairs."""
    sums = []
    for record in (outcomes[f"layer{layer}"].record for layer in (15, 20)):
        if record is None or fused(record) is None:
            return None
        pairs = pd.read_parquet(record.path / PAIRS, columns=["sentence", "kind", "label", "words", "fused_after"])
        pairs = pairs[pairs["kind"] == "two words"]
        chosen = pairs["fused_after"].to_numpy() > 0
        for weights in (chosen & inside(pairs)["phrase"], chosen):
            sums.append(np.bincount(pairs["sentence"], weights=weights.astype(float)))
    return Estimate.of(bootstrap(lambda a, b, c, d: 100 * (c.sum(-1) / d.sum(-1) - a.sum(-1) / b.sum(-1)), *sums))


def _fused_share(record: Record) -> Estimate:
    from ..inside.trace_counts import fused_share  # reads traces, with torch: who plans or lists does not wait for it

    return fused_share(record)


def _answers() -> dict[str, AnsweredBy]:
    found: dict[str, AnsweredBy] = {}
    for layer in PAPER_DEPTHS:
        key = f"layer{layer}"
        for entry in (f"table9.{key}", f"table13.{key}"):
            if entry in reported():
                found |= {f"{entry}.precision_pct": _precision(key), f"{entry}.random_precision_pct": _random(key)}
    deepest, chosen = f"layer{max(PAPER_DEPTHS)}", "D.3's 15th percentile fuses about 15% of the neighbours"
    return found | {
        "d5.phrases.precision_pct": _precision(deepest, "np_vp", "the smallest common constituent is an NP or a VP"),
        "s2.phrases.precision_pct": _precision(deepest),
        "s2.phrases.random_precision_pct": _random(deepest),
        "s2.deeper.precision_gained_points": AnsweredBy(FUSION, "layer20", of=_deeper, note="paired by sentence"),
        "k.fused.fused_share_pct": AnsweredBy(FUSION, "layer15", of_record=_fused_share, note=_D3, by_definition=chosen),
    }


# --- Tables 9 and 13 --------------------------------------------------------------------------------------------------------------
LEGEND = (
    "fused: of the neighbours that were joined and are two words of one sentence, those inside one constituent, with Wilson's 95% interval "
    "clustered by sentence. beyond random, beyond the same tags: percentage points above or below what neighbours drawn by chance give, any or with "
    "the same two Penn tags, with 95% intervals clustered by sentence. Chance is exact, nothing is drawn.",
    "all joined pairs: every two tokens that came to be carried together, up to eight apart, against pairs of as many words apart.",
    "left out: of the joined neighbours, those inside one word, and those of two sentences or beside white space: neither can be inside or outside "
    "of a constituent.",
)
SIGNED = ">+.1f"  # a zero, too
_COLUMNS = (
    Column("", "", "{technique}", align="left"),
    Column("the paper", "fused", "{reported_pct:,.1f}"),
    Column("the paper", "random", "{reported_random_pct:,.1f}"),
    Column("measured", "fused", with_ends("precision_pct")),
    Column("measured", "random", "{random_pct:,.1f}"),
    Column("measured", "beyond random", with_ends("beyond_random", SIGNED)),
    Column("measured", "beyond the same tags", with_ends("beyond_tags", SIGNED)),
    Column("all joined pairs", "inside", "{grouped_pct:,.1f}", expendable=2),
    Column("all joined pairs", "beyond as far apart", with_ends("beyond_apart", SIGNED), expendable=2),
    Column("", "pairs", "{eligible:,.0f}", expendable=1),
    Column("left out, %", "within a word", "{within_word_pct:,.1f}", expendable=3),
    Column("left out, %", "elsewhere", "{elsewhere_pct:,.1f}", expendable=3),
)


@artefact(fusion, (*WORD_BY_WORD, *(f"{PAIRS}:{column}" for column in _OF_PAIRS)), _answers())
def table09_13_fusion_and_constituents(outcomes: Sequence[Outcome], name: str) -> Table:
    """Tables 9 and 13: are fused neighbours constituents? Precision@Fusion on gold trees, by three definitions, beside chance."""
    frame = pd.DataFrame([row for definition in DEFINITIONS for one in outcomes for row in _rows(one, definition)])
    notes = (*_counted(outcomes), *failed(outcomes), *provenance.notes(outcomes))
    panel = Panel("precision", "Fused neighbours inside one constituent, %", _COLUMNS, notes)
    return Table(name, "Tables 9 and 13: fusion against constituents", frame, (panel,), LEGEND)


def _rows(outcome: Outcome, definition: str) -> Iterator[dict[str, Any]]:
    record, key = outcome.record, outcome.row.key
    one = fused(record) if record is not None else None
    if record is None or one is None:
        return
    claim, nulls = reported()[f"table9.{key}"].values, one.nulls[definition]
    technique = f"{outcome.row.technique} (layer {one.layer} of {record.model.layers})"
    row = {
        **{"panel": "precision", "section": DEFINITIONS[definition], "key": f"{key}.{definition}", "technique": technique},
        **{"layer": one.layer, "reported_pct": claim["precision_pct"], "reported_random_pct": claim["random_precision_pct"]},
        **{"pairs": one.pairs, "eligible": one.eligible, "within_word_pct": 100 * one.within_word / one.pairs},
        "elsewhere_pct": 100 * (one.across_sentences + one.no_word) / one.pairs,
        **interval_columns("precision_pct", one.precision[definition], 100),
        **interval_columns("random_pct", nulls["random"].chance, 100),
        **interval_columns("beyond_random", nulls["random"].beyond, 100),
        **interval_columns("beyond_tags", nulls["same tags"].beyond, 100),
        **dict.fromkeys(("grouped_pct", *(f"beyond_apart{end}" for end in ENDS))),
    }
    grouped = next((group for group in result(record).grouped if group.layer == one.layer and group.precision), None)
    if grouped is not None:
        row["grouped_pct"] = 100 * grouped.precision[definition].value
        row |= interval_columns("beyond_apart", grouped.nulls[definition]["words apart"].beyond, 100)
    yield row | {"record": record.fingerprint}


def _counted(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for record in [one.record for one in outcomes if one.record is not None][:1]:
        counted = result(record).counted
        yield (
            f"{counted.sentences} sentences with gold trees ({counted.cut_sentences} cut by a prompt's end, {counted.long_sentences} longer than a "
            f"window and skipped), {counted.words} words, {counted.tokens} tokens; {100 * counted.split_words:.0f}% of the words are several tokens."
        )


# --- over depth -------------------------------------------------------------------------------------------------------------------
DRAWN = ("short", "phrase", "np_vp")
_NULLS = {"random": (GREY, ":", "random neighbours"), "same tags": (PALETTE[3], "--", "neighbours with the same tags")}


@artefact(fusion)
def figure_fusion_and_constituents(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Precision@Fusion over depth on gold trees: the closest neighbours of every layer against random ones and ones with the same tags."""
    there = records(outcomes)
    frames = []
    with style():
        drawing, axes = panels(1, 3, size=(10, 3.4), sharey=True)
        for axis, definition in zip(axes[0], DRAWN, strict=True):
            frames.append(_over_depth(axis, there, definition))
            axis.set(title=DEFINITIONS[definition].replace("constituent ", "constituent\n", 1), xlabel="layer")
        axes[0, 0].set(ylabel="inside one constituent, %", ylim=(25, 100))
        legend_below(drawing, axes[0, 0].get_legend_handles_labels()[0], ncols=3)
    first, *_, last = result(there[0]).closest
    within, until = (100 * one.within_word / one.pairs for one in (first, last))
    frame = pd.concat(frames)
    caption = (
        f"Pairs of two words of one sentence. Bands: 95% range of as many random pairs; bars: 95% intervals clustered by sentence. A case is one of {len(DRAWN)} "
        f"definitions in one of {len(frame) // len(DRAWN)} layers. It counts where the whole interval lies above the band of random neighbours. "
        f"Left out of the closest, from the first layer to layer {last.layer}: {within:.0f} to {until:.0f}% are pairs inside one word.",
        *provenance.notes(outcomes),
    )
    better = int((frame["closest_pct_low"] > frame["random_pct_high"]).sum())
    finding = f"The closest neighbours lie in one constituent more often than random ones in {better} of {len(frame)} cases"
    return Figure(name, "Precision@Fusion over depth, gold trees", frame, drawing, caption, finding=finding)


def _over_depth(axis: Axes, records: Sequence[Record], definition: str) -> pd.DataFrame:
    found = result(records[0])
    chosen = [one for one in found.closest if one.precision]
    layers = np.array([one.layer for one in chosen])
    frame = pd.DataFrame({"definition": definition, "layer": layers})
    frame[[f"closest_pct{end}" for end in ENDS]] = 100 * np.array([astuple(one.precision[definition]) for one in chosen])
    for null, (colour, dash, label) in _NULLS.items():
        band = percent_of_shares([astuple(one.nulls[definition][null].chance) for one in chosen])
        axis.fill_between(layers, band[:, 1], band[:, 2], color=colour, alpha=0.3, linewidth=0)
        draw.line(axis, layers, band[:, 0], color=colour, linestyle=dash, label=label)
        frame[[f"{null.replace(' ', '_')}_pct{end}" for end in ENDS]] = band
    look: dict[str, Any] = {"color": PALETTE[1], "linestyle": "-", "marker": "o", "capsize": 2, "elinewidth": 0.8}
    draw.intervals(axis, layers, frame, "closest_pct", label=f"the closest {found.share:.0%} of neighbours", **look)
    marked = [(one.layer, 100 * one.precision[definition].value) for one in map(fused, records) if one is not None]
    if marked:
        look = {"color": "black", "marker": "D", "markersize": 6, "markerfacecolor": "none", "label": "really fused there"}
        draw.points(axis, *zip(*marked, strict=True), **look)
    if definition == "short":
        at = [fraction * records[0].model.layers for fraction in PAPER_DEPTHS.values()]
        for quantity, label, marker, size in (("precision_pct", "fused", "*", 9), ("random_precision_pct", "random", "x", 6)):
            stated = [reported()[f"table9.layer{layer}"].values[quantity] for layer in PAPER_DEPTHS]
            draw.points(axis, at, stated, color="black", label=f"the paper, {label}", marker=marker, markersize=size)
    return frame
