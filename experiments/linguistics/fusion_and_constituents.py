"""Are fused neighbours constituents? Precision@Fusion on gold trees: Tables 9 and 13, and over depth as a figure.

"A constituent holds both" is true of every pair, because the root holds the whole sentence. So three stricter definitions are published. The
paper speaks of phrases, so the smallest common constituent being one answers its claims, by its difference from random neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from quicksilver.measure.strata import Share
from quicksilver.measure.words import PAIRS, ConstituentsResult, Fused, inside
from quicksilver.records.record import Record
from quicksilver.records.stats import bootstrap
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, PALETTE, Figure, legend_below, panels, percent_of_shares, style, whiskers
from quicksilver.report.table import Column, Panel, Table, interval_columns, with_ends

from .. import drawing as draw
from ..inside.trace_counts import fused_share
from . import runs

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


def _answer(
    key: str, of: Callable[[Fused], Any], beyond: Callable[[Fused], Any] | None = None, note: str = _PHRASE
) -> AnsweredBy:
    """Shares of the fused neighbours of that run, in percent."""

    def percent(what: Callable[[Fused], Any]) -> Callable[[Record], Estimate | None]:
        return lambda record: None if (one := fused(record)) is None else Estimate.of(what(one), 100)

    return AnsweredBy(runs.FUSION, key, of_record=percent(of), beyond_chance=percent(beyond) if beyond else None, note=note)


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
    records = [outcomes[f"layer{layer}"].record for layer in (15, 20)]
    if any(record is None or fused(record) is None for record in records):
        return None
    sums = []
    for record in records:
        assert record is not None
        pairs = pd.read_parquet(record.path / PAIRS, columns=["sentence", "kind", "label", "words", "fused_after"])
        pairs = pairs[pairs["kind"] == "two words"]
        chosen = pairs["fused_after"].to_numpy() > 0
        for weights in (chosen & inside(pairs)["phrase"], chosen):
            sums.append(np.bincount(pairs["sentence"], weights=weights.astype(float)))
    return Estimate.of(bootstrap(lambda a, b, c, d: 100 * (c.sum(-1) / d.sum(-1) - a.sum(-1) / b.sum(-1)), *sums))


def _answers() -> dict[str, AnsweredBy]:
    found: dict[str, AnsweredBy] = {}
    for layer in runs.PAPER_DEPTHS:
        key = f"layer{layer}"
        for entry in (f"table9.{key}", f"table13.{key}"):
            if entry in reported():
                found |= {f"{entry}.precision_pct": _precision(key), f"{entry}.random_precision_pct": _random(key)}
    deepest, chosen = f"layer{max(runs.PAPER_DEPTHS)}", "D.3's 15th percentile fuses about 15% of the neighbours"
    return found | {
        "d5.phrases.precision_pct": _precision(deepest, "np_vp", "the smallest common constituent is an NP or a VP"),
        "s2.phrases.precision_pct": _precision(deepest),
        "s2.phrases.random_precision_pct": _random(deepest),
        "s2.deeper.precision_gained_points": AnsweredBy(runs.FUSION, "layer20", of=_deeper, note="paired by sentence"),
        "k.fused.fused_share_pct": AnsweredBy(runs.FUSION, "layer15", of_record=fused_share, note=_D3, by_definition=chosen),
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
_SIGNED = ">+.1f"  # a zero, too
_COLUMNS = (
    Column("", "", "{technique}", align="left"),
    Column("the paper", "fused", "{reported_pct:,.1f}"),
    Column("the paper", "random", "{reported_random_pct:,.1f}"),
    Column("measured", "fused", with_ends("precision_pct")),
    Column("measured", "random", "{random_pct:,.1f}"),
    Column("measured", "beyond random", with_ends("beyond_random", _SIGNED)),
    Column("measured", "beyond the same tags", with_ends("beyond_tags", _SIGNED)),
    Column("all joined pairs", "inside", "{grouped_pct:,.1f}", expendable=2),
    Column("all joined pairs", "beyond as far apart", with_ends("beyond_apart", _SIGNED), expendable=2),
    Column("", "pairs", "{eligible:,.0f}", expendable=1),
    Column("left out, %", "within a word", "{within_word_pct:,.1f}", expendable=3),
    Column("left out, %", "elsewhere", "{elsewhere_pct:,.1f}", expendable=3),
)


@artefact(runs.fusion, (*runs.WORD_BY_WORD, *(f"{PAIRS}:{column}" for column in _OF_PAIRS)), _answers())
def table09_13_fusion_and_constituents(outcomes: Sequence[Outcome], name: str) -> Table:
    """Tables 9 and 13: are fused neighbours constituents? Precision@Fusion on gold trees, by three definitions, beside chance."""
    frame = pd.DataFrame([row for definition in DEFINITIONS for one in outcomes for row in _rows(one, definition)])
    notes = (*_counted(outcomes), *runs.failed(outcomes), *provenance.notes(outcomes))
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
        **{"pairs": one.pairs, "eligible": one.eligible, "within_word_pct": _within(one)},
        "elsewhere_pct": 100 * (one.across_sentences + one.no_word) / one.pairs,
        **interval_columns("precision_pct", one.precision[definition], 100),
        **interval_columns("random_pct", nulls["random"].chance, 100),
        **interval_columns("beyond_random", nulls["random"].beyond, 100),
        **interval_columns("beyond_tags", nulls["same tags"].beyond, 100),
        **dict.fromkeys(("grouped_pct", "beyond_apart", "beyond_apart_low", "beyond_apart_high")),
    }
    grouped = next((group for group in result(record).grouped if group.layer == one.layer and group.precision), None)
    if grouped is not None:
        row["grouped_pct"] = 100 * grouped.precision[definition].value
        row |= interval_columns("beyond_apart", grouped.nulls[definition]["words apart"].beyond, 100)
    yield row | {"record": record.fingerprint}


def _within(one: Any) -> float:
    """Share of the joined neighbours inside one word, %."""
    return 100 * one.within_word / one.pairs


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


@artefact(runs.fusion)
def figure_fusion_and_constituents(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Precision@Fusion over depth on gold trees: the closest neighbours of every layer against random ones and ones with the same tags.

    The distances of neighbours are in each of the records of fusion.
    """
    there = runs.records(outcomes)
    frames = []
    with style():
        drawing, axes = panels(1, 3, size=(10, 3.4), sharey=True)
        for axis, definition in zip(axes[0], DRAWN, strict=True):
            frames.append(_over_depth(axis, there, definition))
            title = DEFINITIONS[definition].replace("constituent ", "constituent\n", 1)
            axis.set_title(title)
            axis.set_xlabel("layer")
        axes[0, 0].set(ylabel="inside one constituent, %", ylim=(25, 100))
        legend_below(drawing, axes[0, 0].get_legend_handles_labels()[0], ncols=3)
    first, *_, last = result(there[0]).closest
    frame = pd.concat(frames)
    caption = (
        f"Pairs of two words of one sentence. Bands: 95% range of as many random pairs; bars: 95% intervals clustered by sentence. A case is one of {len(DRAWN)} "
        f"definitions in one of {len(frame) // len(DRAWN)} layers. It counts where the whole interval lies above the band of random neighbours. "
        f"Left out of the closest, from the first layer to layer {last.layer}: {_within(first):.0f} to {_within(last):.0f}% are pairs inside one word.",
        *provenance.notes(outcomes),
    )
    better = int((frame["closest_pct_low"] > frame["random_pct_high"]).sum())
    finding = f"The closest neighbours lie in one constituent more often than random ones in {better} of {len(frame)} cases"
    return Figure(name, "Precision@Fusion over depth, gold trees", frame, drawing, caption, finding=finding)


def _over_depth(axis: Axes, records: Sequence[Record], definition: str) -> pd.DataFrame:
    found = result(records[0])
    chosen = [one for one in found.closest if one.precision]
    layers = np.array([one.layer for one in chosen])
    share = 100 * np.array(list(map(_ends, (one.precision[definition] for one in chosen))))
    frame = pd.DataFrame({"definition": definition, "layer": layers})
    frame[["closest_pct", "closest_pct_low", "closest_pct_high"]] = share
    for null, (colour, dash, label) in _NULLS.items():
        band = percent_of_shares([_ends(one.nulls[definition][null].chance) for one in chosen])
        axis.fill_between(layers, band[:, 1], band[:, 2], color=colour, alpha=0.3, linewidth=0)
        draw.line(axis, layers, band[:, 0], color=colour, linestyle=dash, label=label)
        short = null.replace(" ", "_")
        frame[[f"{short}_pct", f"{short}_pct_low", f"{short}_pct_high"]] = band
    look: dict[str, Any] = {"color": PALETTE[1], "linestyle": "-", "marker": "o", "capsize": 2, "elinewidth": 0.8}
    axis.errorbar(layers, share[:, 0], yerr=whiskers(*share.T), label=f"the closest {found.share:.0%} of neighbours", **look)
    ours = [one for one in map(fused, records) if one is not None]
    marked = [(one.layer, 100 * one.precision[definition].value) for one in ours]
    _marks(axis, marked, "really fused there", marker="D", markersize=6, markerfacecolor="none")
    if definition == "short":
        for layer, fraction in runs.PAPER_DEPTHS.items():
            claim, at = reported()[f"table9.layer{layer}"].values, fraction * records[0].model.layers
            first = layer == next(iter(runs.PAPER_DEPTHS))
            _marks(axis, [(at, claim["precision_pct"])], "the paper, fused" if first else None, marker="*", markersize=9)
            _marks(axis, [(at, claim["random_precision_pct"])], "the paper, random" if first else None, marker="x", markersize=6)
    return frame


def _ends(share: Share) -> tuple[float, float, float]:
    return share.value, share.low, share.high


def _marks(axis: Axes, places: Sequence[tuple[float, float]], label: str | None, **look: Any) -> None:
    """Black marks, the first of them with the label."""
    for place, (x, y) in enumerate(places):
        draw.points(axis, [x], [y], color="black", label=label if place == 0 else None, **look)
