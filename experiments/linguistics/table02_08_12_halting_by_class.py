"""Tables 2, 8 and 12: halting by part of speech on gold tags, beside what explains it without grammar.

The paper prints the same numbers three times. Here they are one measurement on one treebank: the paper's rule with thresholds of this model
and with those it prints, drift alone, and the rule of ours. The second panel asks what is left of a class's rate beyond words of the same
frequency, position or spelling; the third what a model of position and frequency explains before it is told the class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from quicksilver.measure.words import WORDS, WordClassesResult
from quicksilver.records.record import Record
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.table import Column, Panel, Table

from . import runs
from .runs import percent, plain, with_ends, words

READS = (*runs.WORD_BY_WORD, WORDS)  # all of the words: notebook 4 deals the decisions anew
# class here -> what is printed, entry of reported_tasks.yaml
CLASSES: dict[str, tuple[str, str | None]] = {
    "determiner": ("Determiners (DT)", "table2.determiners"),
    "preposition": ("Prepositions (IN)", "table2.prepositions"),
    "conjunction": ("Conjunctions (CC)", "table2.conjunctions"),
    "pronoun": ("Pronouns (PRP, PRP$)", "table2.pronouns"),
    "auxiliary": ("Auxiliaries", "table2.auxiliaries"),
    "content": ("Content words", "table2.content_words"),
    "other": ("Others, marks", None),
    "all": ("All", None),
}
NULLS = {
    "random": "any token", "frequency": "as frequent", "position": "at the same place", "word start": "as whole a word",
    "frequency × position": "as frequent, same place", "token": "the same token",
}  # fmt: skip
_DEPTHS = (0.25, 0.5, 0.75)


def rows() -> list[Row]:
    """Four ways to halt."""
    return runs.halting()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Rates, what is left of them beyond chance, and the model."""
    found = [row for outcome in outcomes for row in _rows(outcome)]
    notes = provenance.notes(outcomes)
    counted = _counted(outcomes)
    failed = tuple(f"{outcome.row.technique}: {outcome.reason}." for outcome in outcomes if outcome.record is None)
    panels = (
        Panel("rates", "Tokens halted by half of the depth, %", _rate_columns(), (*counted, *runs.whose_tags(outcomes), *failed, *notes)),
        Panel("nulls", "Percentage points above or below what chance gives among tokens that are alike", _null_columns(),
              ("Each with its 95% interval, clustered by sentence.",)),
        Panel("model", "Share of the deviance of “has halted” that a logistic model explains", _model_columns(),
              ("Terms are added from left to right; what class adds is the last step.",)),
    )  # fmt: skip
    return Table(name, "Tables 2, 8 and 12: halting by part of speech", pd.DataFrame(found, columns=COLUMNS), panels, LEGEND)


LEGEND = (
    "A token has the class of its word, by gold tags; auxiliary: what the treebank's universal tag calls AUX. by the paper's tags: the same tokens "
    "classed as its table says, DT, IN, CC, PRP and PRP$, MD with VBZ and VBP, NN with VB, JJ and RB. Intervals: Wilson's at the "
    "number of independent tokens that sentences leave (design effect).",
    "first, last, any: words instead of tokens, a word halting with its first, its last, or any of its tokens. The paper's percentages are at layer "
    "15 of 30; 25%, 75%: the same of other depths.",
    "Chance is computed exactly: the same counts, on random tokens that are as frequent (ten bins), at the same place of the window, as whole a word "
    "(whole, first or later part), both, or of the same spelling, where only words of two classes can differ.",
)
COLUMNS = [
    *("panel", "section", "key", "class", "reported_pct", "reported_tokens", "halted_pct", "halted_pct_low", "halted_pct_high"),
    *("paper_tags_pct", "paper_tags_pct_low", "paper_tags_pct_high", "first_pct", "last_pct", "any_pct"),
    *(f"at_{round(100 * depth)}_pct" for depth in _DEPTHS),
    *("tokens", "words", "sentences"),
    *(f"{null}{end}" for null in NULLS for end in ("", "_low", "_high", "_expected")),
    *("position_explained", "frequency_explained", "start_explained", "class_explained", "class_adds", "class_alone", "record"),
]


def result(record: Record) -> WordClassesResult:
    """What was measured."""
    return record.measured("word_classes", WordClassesResult)


def _rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    if outcome.record is None:
        return
    found, section = result(outcome.record), outcome.row.technique
    names = {(one.name, one.reading) for one in found.classes}
    shared = {"section": section, "record": outcome.record.fingerprint}
    for name, (title, claim) in CLASSES.items():
        if (name, "ours") not in names or (name != "all" and not found.model):
            continue  # where all tokens halted, or none, the classes have nothing to say
        one = found.of(name)
        row: dict[str, Any] = {**shared, "panel": "rates", "key": f"{outcome.row.key}.{name}", "class": title}
        if claim is not None:
            values = reported()[claim].values
            row |= {"reported_pct": values["halted_share_pct"], "reported_tokens": values["tokens"]}
        row |= percent("halted_pct", one.halted.value, one.halted.low, one.halted.high)
        if (name, "paper") in names:
            paper = found.of(name, "paper").halted
            row |= percent("paper_tags_pct", paper.value, paper.low, paper.high)
        row |= {f"{rule}_pct": 100 * share for rule, share in one.halted_words.items()}
        layers = len(one.by_layer)
        row |= {f"at_{round(100 * depth)}_pct": 100 * one.by_layer[max(0, round(depth * layers) - 1)] for depth in _DEPTHS}
        yield row | {"tokens": one.tokens, "words": one.words, "sentences": one.sentences}
        if one.nulls and found.model:
            beyond = {
                key: value
                for null, against in one.nulls.items()
                for key, value in {
                    **percent(null, against.excess, against.excess_low, against.excess_high),
                    f"{null}_expected": 100 * against.expected,
                }.items()
            }
            yield {**row, "panel": "nulls", **beyond}
    if found.model:
        explained = {tuple(one.terms): one.deviance_explained for one in found.model}
        ordered = sorted((terms for terms in explained if terms[0] == "position"), key=len)
        names_of = ("position_explained", "frequency_explained", "start_explained", "class_explained")
        steps = dict(zip(names_of, (explained[terms] for terms in ordered), strict=True))
        adds = steps["class_explained"] - steps["start_explained"]
        yield {**shared, "panel": "model", "section": "", "key": outcome.row.key, "class": section, **steps, "class_adds": adds, "class_alone": explained["class",]}  # fmt: skip


def _counted(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    there = runs.measured(outcomes)
    if not there or there[0].record is None:
        return ()
    found = result(there[0].record)
    counted = found.counted
    return (
        f"{there[0].row.technique}: {counted.sentences} sentences ({counted.cut_sentences} cut by a window's end, {counted.long_sentences} longer "
        f"than a window and skipped), {counted.words} words, {counted.tokens} tokens; {100 * counted.split_words:.0f}% of the words are several "
        f"tokens, {100 * counted.tokens_of_two_words:.1f}% of the tokens touch two words. Halted by layer {found.layer}.",
    )


# --- printed ----------------------------------------------------------------------------------------------------------------------


def _rate_columns() -> tuple[Column, ...]:
    return (
        Column("", "class", words("class"), align="left"),
        Column("the paper", "halted", plain("reported_pct")),
        Column("the paper", "tokens", plain("reported_tokens", 0), expendable=1),
        Column("measured", "halted", with_ends("halted_pct", sign=False)),
        Column("measured", "by the paper's tags", with_ends("paper_tags_pct", sign=False), expendable=2),
        *(Column("as words", rule, plain(f"{rule}_pct"), expendable=4) for rule in ("first", "last", "any")),
        *(Column("at depth", f"{round(100 * depth)}%", plain(f"at_{round(100 * depth)}_pct"), expendable=3) for depth in _DEPTHS),
        Column("", "tokens", plain("tokens", 0), expendable=1),
    )


def _null_columns() -> tuple[Column, ...]:
    columns = [
        Column("points beyond", header, with_ends(null, sign=True), expendable=i)
        for i, (null, header) in enumerate(NULLS.items())
    ]
    return (Column("", "class", words("class"), align="left"), Column("", "halted", plain("halted_pct")), *columns)


def _model_columns() -> tuple[Column, ...]:
    steps = (("position", "position_explained"), ("+ log frequency", "frequency_explained"), ("+ word start", "start_explained"))
    return (
        Column("", "rule", words("class"), align="left"),
        *(Column("deviance explained", header, plain(column, 3)) for header, column in steps),
        Column("deviance explained", "+ class", plain("class_explained", 3)),
        Column("", "class adds", plain("class_adds", 3)),
        Column("", "class alone", plain("class_alone", 3)),
    )


# --- claims -----------------------------------------------------------------------------------------------------------------------


def _answer(*names: str, note: str = "") -> AnsweredBy:
    """The lowest rate of these classes by the paper's tags, in percent, and how far it is from that of any tokens."""

    def lowest(record: Record) -> str:
        return min(names, key=lambda name: result(record).of(name, "paper").halted.value)

    def rate(record: Record) -> Estimate:
        return Estimate.of(result(record).of(lowest(record), "paper").halted, 100)

    def beyond(record: Record) -> Estimate | None:
        null = result(record).of(lowest(record)).nulls.get("random")
        return None if null is None else Estimate(100 * null.excess, 100 * null.excess_low, 100 * null.excess_high)

    said = "; ".join(filter(None, ("drift and entropy, calibrated, half of the depth", note)))
    return AnsweredBy(runs.HALTING, runs.MAIN, of_record=rate, beyond_chance=beyond, note=said)


_LOWEST = "the lowest of determiners, prepositions and conjunctions"
ANSWERS = {f"{claim}.halted_share_pct": _answer(name) for name, (_, claim) in CLASSES.items() if claim is not None} | {
    "section2.function_words.halted_share_pct": _answer("determiner", "preposition", "conjunction", note=_LOWEST),
    "s1.function_words.halted_share_pct": _answer("determiner", "preposition", "conjunction", note=_LOWEST),
    "m.content_words.halted_share_pct": _answer("content"),
}
