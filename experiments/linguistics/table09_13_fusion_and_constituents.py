"""Tables 9 and 13: are fused neighbours constituents? Precision@Fusion on gold trees, by three definitions, beside chance.

"A constituent holds both" is true of every pair, because the root holds the whole sentence. So three stricter definitions are published. The
paper speaks of phrases, so the smallest common constituent being one answers its claims, by its difference from random neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from quicksilver.measure.words import PAIRS, ConstituentsResult, Fused
from quicksilver.records.record import Record
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.table import Column, Panel, Table

from . import runs
from .runs import percent, plain, with_ends

READS = (
    *runs.WORD_BY_WORD,
    *(f"{PAIRS}:{column}" for column in ("words_apart", "sentence", "kind", "tags", "label", "words", "fused_after", "rank_8")),
)  # pairs: notebook 4 computes the table again
DEFINITIONS = {
    "short": "A common constituent of at most six words",
    "phrase": "The smallest common constituent is a phrase, no clause",
    "np_vp": "The smallest common constituent is an NP or a VP",
    "any": "Any common constituent, the paper's definition read literally",
}


def rows() -> list[Row]:
    """Fusion at the paper's three depths."""
    return runs.fusion()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A section a definition."""
    found = [row for definition in DEFINITIONS for outcome in outcomes for row in _rows(outcome, definition)]
    failed = tuple(f"{outcome.row.technique}: {outcome.reason}." for outcome in outcomes if outcome.record is None)
    panel = Panel(
        "precision",
        "Fused neighbours inside one constituent, %",
        _columns(),
        (*_counted(outcomes), *failed, *provenance.notes(outcomes)),
    )
    frame = pd.DataFrame(found, columns=COLUMNS)
    return Table(name, "Tables 9 and 13: fusion against constituents", frame, (panel,), LEGEND)


LEGEND = (
    "fused: of the neighbours that were joined and are two words of one sentence, those inside one constituent, with Wilson's 95% interval "
    "clustered by sentence. beyond random, beyond the same tags: percentage points above or below what neighbours drawn by chance give, any or with "
    "the same two Penn tags, with 95% intervals clustered by sentence. Chance is exact, nothing is drawn.",
    "all joined pairs: every two tokens that came to be carried together, up to eight apart, against pairs of as many words apart.",
    "left out: of the joined neighbours, those inside one word, and those of two sentences or beside white space: neither can be inside or outside "
    "of a constituent.",
)
COLUMNS = [
    *("panel", "section", "key", "technique", "layer", "reported_pct", "reported_random_pct", "pairs", "eligible"),
    *(
        "within_word_pct",
        "elsewhere_pct",
        "precision_pct",
        "precision_pct_low",
        "precision_pct_high",
        "random_pct",
        "random_pct_low",
    ),
    *(
        "random_pct_high",
        "beyond_random",
        "beyond_random_low",
        "beyond_random_high",
        "beyond_tags",
        "beyond_tags_low",
        "beyond_tags_high",
    ),
    *("grouped_pct", "beyond_apart", "beyond_apart_low", "beyond_apart_high", "record"),
]


def result(record: Record) -> ConstituentsResult:
    """What was measured."""
    return record.measured("constituents", ConstituentsResult)


def fused(record: Record) -> Fused | None:
    """The one layer of a run in which it fused; None where no two words were joined."""
    found = [one for one in result(record).fused if one.precision]
    return found[0] if found else None


def _rows(outcome: Outcome, definition: str) -> Iterator[dict[str, Any]]:
    one = fused(outcome.record) if outcome.record is not None else None
    if outcome.record is None or one is None:
        return
    claim = reported()[f"table9.{outcome.row.key}"].values
    row: dict[str, Any] = {
        "panel": "precision", "section": DEFINITIONS[definition], "key": f"{outcome.row.key}.{definition}",
        "technique": f"{outcome.row.technique} (layer {one.layer} of {outcome.record.model.layers})", "layer": one.layer,
        "reported_pct": claim["precision_pct"], "reported_random_pct": claim["random_precision_pct"], "pairs": one.pairs,
        "eligible": one.eligible, "within_word_pct": 100 * one.within_word / one.pairs,
        "elsewhere_pct": 100 * (one.across_sentences + one.no_word) / one.pairs, "record": outcome.record.fingerprint,
    }  # fmt: skip
    share, nulls = one.precision[definition], one.nulls[definition]
    random = nulls["random"]
    row |= percent("precision_pct", share.value, share.low, share.high)
    row |= percent("random_pct", random.expected, random.low, random.high)
    grouped = next((group for group in result(outcome.record).grouped if group.layer == one.layer and group.precision), None)
    beyond = {"random": random, "tags": nulls["same tags"]}
    if grouped is not None:
        row["grouped_pct"] = 100 * grouped.precision[definition].value
        beyond["apart"] = grouped.nulls[definition]["words apart"]
    for name, against in beyond.items():
        row |= percent(f"beyond_{name}", against.excess, against.excess_low, against.excess_high)
    yield row


def _counted(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    there = runs.measured(outcomes)
    if not there or there[0].record is None:
        return ()
    counted = result(there[0].record).counted
    return (
        f"{counted.sentences} sentences with gold trees ({counted.cut_sentences} cut by a prompt's end, {counted.long_sentences} longer than a "
        f"window and skipped), {counted.words} words, {counted.tokens} tokens; {100 * counted.split_words:.0f}% of the words are several tokens.",
    )


def _columns() -> tuple[Column, ...]:
    return (
        Column("", "", lambda row: (str(row["technique"]),), align="left"),
        Column("the paper", "fused", plain("reported_pct")),
        Column("the paper", "random", plain("reported_random_pct")),
        Column("measured", "fused", with_ends("precision_pct", sign=False)),
        Column("measured", "random", plain("random_pct")),
        Column("measured", "beyond random", with_ends("beyond_random", sign=True)),
        Column("measured", "beyond the same tags", with_ends("beyond_tags", sign=True)),
        Column("all joined pairs", "inside", plain("grouped_pct"), expendable=2),
        Column("all joined pairs", "beyond as far apart", with_ends("beyond_apart", sign=True), expendable=2),
        Column("", "pairs", plain("eligible", 0), expendable=1),
        Column("left out, %", "within a word", plain("within_word_pct"), expendable=3),
        Column("left out, %", "elsewhere", plain("elsewhere_pct"), expendable=3),
    )


# --- claims -----------------------------------------------------------------------------------------------------------------------


def _precision(key: str, definition: str, note: str) -> AnsweredBy:
    """Precision, in percent, and how far it is from that of random neighbours."""

    def precision(record: Record) -> Estimate | None:
        one = fused(record)
        return None if one is None else Estimate.of(one.precision[definition], 100)

    def beyond(record: Record) -> Estimate | None:
        one = fused(record)
        null = None if one is None else one.nulls[definition]["random"]
        return None if null is None else Estimate(100 * null.excess, 100 * null.excess_low, 100 * null.excess_high)

    return AnsweredBy(runs.FUSION, key, of_record=precision, beyond_chance=beyond, note=note)


def _random(key: str) -> AnsweredBy:
    def of(record: Record) -> Estimate | None:
        """Precision of as many random neighbours, in percent."""
        one = fused(record)
        null = None if one is None else one.nulls["phrase"]["random"]
        return None if null is None else Estimate(100 * null.expected, 100 * null.low, 100 * null.high)

    return AnsweredBy(runs.FUSION, key, of_record=of, note=_NOTE)


_NOTE = "the smallest common constituent is a phrase, no clause; gold trees"
_DEEPEST = f"layer{max(runs.PAPER_DEPTHS)}"
ANSWERS = {
    f"{entry}.{quantity}": answer
    for key in (f"layer{layer}" for layer in runs.PAPER_DEPTHS)
    for entry in (f"table9.{key}", f"table13.{key}")
    if entry in reported()
    for quantity, answer in (("precision_pct", _precision(key, "phrase", _NOTE)), ("random_precision_pct", _random(key)))
} | {
    "d5.phrases.precision_pct": _precision(_DEEPEST, "np_vp", "the smallest common constituent is an NP or a VP"),
    "s2.phrases.precision_pct": _precision(_DEEPEST, "phrase", _NOTE),
    "s2.phrases.random_precision_pct": _random(_DEEPEST),
}
