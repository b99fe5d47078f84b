"""The claims ledger: every number of the paper beside what the records at hand say, with a verdict (docs/verdicts.md).

Which record answers which claim stands in the files of `experiments/`: `Row.reported`, and a mapping `ANSWERS`. Nothing is run here.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from quicksilver.measure.quality import NullResult
from quicksilver.records.record import Record, load_record
from quicksilver.records.stats import bootstrap, paired_records
from quicksilver.records.times import TimedProcess
from quicksilver.report.artefacts import Artefact, Outcome
from quicksilver.report.claims import reported as rule
from quicksilver.report.claims.reported import (
    Estimate,
    Quantity,
    Reported,
    Sense,
    Target,
    Verdict,
    contradictions,
    quantity,
    reported,
)
from quicksilver.report.comparison import FLOOR, adjusted_p, against_dense, pool_noise
from quicksilver.report.provenance import SHORT, timings
from quicksilver.report.table import FALSE_DISCOVERIES, Column, Lines, Panel, Table, decimals_for, number, numbers, versus_null
from quicksilver.runtime.errors import ConfigError, QuickSilverError

# The models that the paper's absolute numbers are of (App. J calls gpt2-medium's shape by gpt2-large's size), and its GPU.
PAPER_MODELS = ("gpt2-large", "gpt2-medium")
PAPER_GPU = "A100"
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "not reproduced", "undecided", "not comparable", "not measured")
# Of several rows of a claim the first of these is the claim's: it holds where it holds everywhere.
LEAST_FAVOURABLE = ("not reproduced", "partly", "reproduced", "undecided", "not measured", "not comparable")
BY_DEFINITION: Verdict = "by definition"  # no verdict to be counted
CONTRADICTIONS = "The paper against itself"
STATEMENT, SETTING, TUNED = "statement", "setting", "tuned"
_CHANCE = {-1: "better than chance", 0: "no better than chance", 1: "worse than chance"}
_ZERO = "dense inference itself: zero by definition"
COLUMNS = [
    *("panel", "section", "kind", "claim", "counted_as", "place", "quote", "reported", "target_low", "target_high", "unit"),
    *("measured", "measured_low", "measured_high", "noise_floor", "protocol", "execution", "lookahead", "versus_null", "verdict"),
    *("tuned", "elsewhere", "why", "note", "timed", "artefact", "command", "run", "model", "weights_digest", "data", "windows"),
    *("token_digest", "gpu", "record", "dense_record", "against"),
]
_NUMBERS = ("target_low", "target_high", "measured", "measured_low", "measured_high", "noise_floor", "lookahead")
_OF_RECORDS = (
    "protocol=all scores every position; protocol=continuation scores the tokens after a prompt, which it takes as known. tuned: the paper's "
    "mechanism with the setting that won on calibration text; the options in its command are the setting. noise: of the clock, as in the row's table. "
    "Brackets are 95% intervals; of a time the quartiles of its rounds, the range of its processes, or ± noise (parts in Table 7). "
    "FLOPs are the paper's formula over all tokens, `paper` in what `quicksilver show` prints. `executed` there counts what really ran, signals "
    "included: it can be below zero where the formula saves. Of KV skipping alone that formula counts nothing: its FLOPs are `nominal`. Times "
    "are of prompt and continuation, unless a row says otherwise. `show` prints the record's own, then those of each process. against: the "
    "record that it is compared with, instead of dense inference. Both times are shares of dense time: points subtract what is saved, × divides. `quicksilver claims … records=checked` judges what was measured here."
)
LEGEND = (
    "measured: with its 95% interval, a time with the quartiles of its rounds, the range of its processes, or ± noise (parts in Table 7); of several protocols each has its row. noise: of the clock, as in the row's table: pooled over its rows, or the run's own where that is larger; a difference inside it is none. Perplexity is compared in percent of dense perplexity, "
    "operations in the paper's ledger (of KV skipping alone in the nominal one), time in percent of dense inference in the same process.",
    "reproduced: the interval reaches the claim and rules out that it is wrong by nearly its whole size. partly: it rules that out and does "
    "not reach the claim. not reproduced: neither. A saving is judged no better than the quality claimed with it, by the same run: where that "
    "is not reproduced or undecided, neither is the saving reproduced. A quality is reproduced at the claimed saving only. not comparable: a "
    "setting, or an absolute number of another model or machine. undecided: an interval too wide to say. not measured: no record, or energy without a counter. by definition: it could "
    "not be otherwise; not counted. The whole rule: docs/verdicts.md.",
    "contradiction, consistent: computed from the paper's numbers alone; choice: the paper leaves it open.",
    "A verdict is about the model and the text that were measured: it does not say that the paper's number is wrong on its own. tuned: the "
    "verdict on the setting that won on calibration text (table fair_trial), and what it measured; not counted. elsewhere: the "
    "verdict on other models and texts, the least favourable of their rows. Headings count each outcome once, by its least favourable row.",
)


# --- what experiments declare -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class AnsweredBy:
    """The row (`panel`, `key`) of an experiment that answers a claim, and with which of its numbers.

    Attributes:
        column: of `against_dense`; None: the quantity's own.
        of, of_record: instead of a column, an estimate from the outcomes of the panel by key, or from the row's record; None: it has none.
        beyond_chance: of a share, its difference from what chance gives (percentage points), from the row's record.
        note: what is compared, where that is not plain.
        by_definition: why the number can be no other; then it is shown and not judged.
        tuned: the row has the setting that won on calibration text, not the paper's: its verdict stands in a column of its own.
        against: the row that what is claimed with it is a difference to, as its own number is; empty: dense inference.
        versus: the key of the row that its own number is compared with, or what finds it among the outcomes; empty: dense inference.
        own_time: its time is the record's own, of one process, though several timed the rows again.
    """

    panel: str
    key: str
    column: str | None = None
    of: Callable[[Mapping[str, Outcome]], Estimate | None] | None = None
    of_record: Callable[[Record], Estimate | None] | None = None
    beyond_chance: Callable[[Record], Estimate | None] | None = None
    note: str = ""
    by_definition: str = ""
    tuned: bool = False
    against: str = ""
    versus: str | Callable[[Mapping[str, Outcome]], str] = ""
    own_time: bool = False

    @property
    def is_computed(self) -> bool:
        """Whether a function of its own makes the estimate."""
        return self.of is not None or self.of_record is not None


@dataclass(frozen=True)
class Statement:
    """What another paper states without a number: a difference above 0. An experiment declares `STATEMENTS`, a function that returns them.

    Attributes:
        paper, quote: where it stands, and its words.
        compared, estimate: which difference was measured here, and the difference; None: it was not measured.
        why: what the interval is over, what else speaks for or against it, or the command that would measure it.
        fails: a condition of the statement does not hold here, whatever the difference; `why` says which.
    """

    id: str
    paper: str
    quote: str
    compared: str
    estimate: Estimate | None
    why: str
    fails: bool = False

    @property
    def verdict(self) -> str:
        """`reproduced` where the interval lies above 0, `not reproduced` below; `undecided` where it holds 0."""
        if self.estimate is None:
            return "not measured"
        if self.fails or self.estimate.high < 0:
            return "not reproduced"
        return "reproduced" if self.estimate.low > 0 else "undecided"


@dataclass(frozen=True)
class Source:
    """An experiment with the outcomes that are there, and the command that makes those that are not."""

    artefact: Artefact
    outcomes: Sequence[Outcome]
    command: str

    @cached_property
    def answers(self) -> list[tuple[str, AnsweredBy]]:
        """Claims (entry, or entry.quantity) with what answers them: those that rows name, then those that the file declares.
        Raises ConfigError: a claim that is not in reported*.yaml, a row that the experiment does not have."""
        rows, path = self.artefact.experiment.rows(), self.artefact.path
        named = [(row.reported, row) for row in rows if row.reported]
        times = Counter((claim, row.panel) for claim, row in named)
        notes = [row.section if times[claim, row.panel] > 1 else "" for claim, row in named]
        found = [(claim, AnsweredBy(row.panel, row.key, note=note)) for (claim, row), note in zip(named, notes, strict=True)]
        for claim, given in self.artefact.answered.items():
            found += [(claim, one) for one in ((given,) if isinstance(given, AnsweredBy) else given)]
        known = {f"{entry.id}.{name}" for entry in reported().values() for name in entry.quantities} | reported().keys()
        for claim, answer in found:
            if claim not in known:
                raise ConfigError(f"{path} answers {claim!r}, which is no claim of quicksilver/report/claims/reported*.yaml.")
            if not any((answer.panel, answer.key) == (row.panel, row.key) for row in rows):
                raise ConfigError(f"{path} answers {claim} by its row {answer.panel} {answer.key}, which it does not have.")
        return found

    @cached_property
    def processes(self) -> dict[str, tuple[TimedProcess, ...]]:
        """By panel, those that timed its runs again: its table prints their times."""
        return {panel: tuple(timings([*members.values()])) for panel, members in self.panels.items()}

    @cached_property
    def panels(self) -> dict[str, dict[str, Outcome]]:
        """The outcomes by panel and key."""
        found: dict[str, dict[str, Outcome]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.row.panel, {})[outcome.row.key] = outcome
        return found


def answers_claims(artefact: Artefact) -> bool:
    """Whether it has anything to say in the ledger; the records of others are not read for it."""
    stated = getattr(artefact.experiment, "STATEMENTS", list) is not list
    return stated or bool(artefact.answered) or any(row.reported for row in artefact.experiment.rows())


# --- one claim --------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Claim:
    """One number of the paper: the quantity `name` of `entry`."""

    entry: Reported
    name: str

    @property
    def id(self) -> str:
        return f"{self.entry.id}.{self.name}"

    @property
    def counted_as(self) -> str:
        """The claim that this one counts with: the first place where its number is printed."""
        first = self.entry.same_as
        if isinstance(first, Mapping):  # of some of its numbers
            return first.get(self.name, self.id)
        return self.id if first is None else f"{first}.{self.name}"

    @property
    def what(self) -> Quantity:
        return quantity(self.entry, self.name)

    @property
    def is_reference(self) -> bool:
        """Whether others are relative to it: it is an absolute number."""
        return self.id == f"{self.entry.against}.{self.what.base}"

    @property
    def absolute(self) -> str:
        """What is said of a number of the paper's own model."""
        return f"an absolute number of {self.entry.about.split(',')[0].split(' on ')[0]}"

    @property
    def stated(self) -> tuple[float | None, float | None]:
        """What is claimed as the paper has it, a single number within its rounding."""
        if self.name in self.entry.bounds:
            return self.entry.bounds[self.name]
        value, half = self.entry.values[self.name], self.entry.rounding[self.name]
        return value - half, value + half

    @property
    def printed(self) -> str:
        """`18`, `≤ 0.2`, `0.05 to 0.1`: the number as it is claimed."""
        if self.name in self.entry.values:
            return f"{self.entry.values[self.name]:.{max(0, -round(math.log10(2 * self.entry.rounding[self.name])))}f}"
        low, high = self.entry.bounds[self.name]
        return f"≤ {high:g}" if low is None else f"≥ {low:g}" if high is None else f"{low:g} to {high:g}"

    @property
    def target(self) -> Target:
        """What is claimed, in the unit in which it is compared: perplexities, times and emissions in percent of the paper's dense ones."""
        low, high = self.stated
        if self.what.of_dense is None or self.is_reference:
            return Target(low, high)
        base = reported()[self.entry.against or self.entry.id]
        dense, slack = base.values[self.what.base], base.rounding[self.what.base]
        if self.what.of_dense == "difference":
            return Target(*(None if end is None else 100 * end / dense for end in (low, high)))
        over = (100 * ((low or 0.0) / (dense + slack) - 1), 100 * ((high or 0.0) / (dense - slack) - 1))
        return Target(*over) if self.what.sense == "cost" else Target(-over[1], -over[0])

    @property
    def chance_pct(self) -> float | None:
        """What the paper says, or implies, that chance gives of a share; of random pairs, what fused ones give; of function words' layer, that
        of content words, a tenth later."""
        if self.name in rule.by_chance_pct():
            return rule.by_chance_pct()[self.name]
        if self.name == "halt_layer_of_30":
            return 1.1 * (self.stated[0] or 0.0)
        if self.name == "random_precision_pct":
            return self.entry.values.get("precision_pct", self.entry.bounds.get("precision_pct", (None,))[0])
        if self.name != "precision_pct":
            return None
        return self.entry.values.get("random_precision_pct", reported()["s2.phrases"].values["random_precision_pct"])

    @property
    def beside(self) -> _Claim | None:
        """The claim that it is made together with: of a saving a quality, of a quality the operations that it is claimed to save."""
        others = {name: quantity(self.entry, name) for name in self.entry.quantities}
        entry, name = self.entry, ""
        if self.what.kind in ("time", "work", "energy"):
            name = next((one for one, what in others.items() if (what.kind, what.sense) == ("quality", "cost")), "")
            if not name and entry.quality is not None:
                of, _, name = entry.quality.rpartition(".")
                entry = reported()[of]
        elif (self.what.kind, self.what.sense) == ("quality", "cost") and "flops_saved_pct" in others:
            name = "" if "flops_saved_pct" in entry.not_comparable else "flops_saved_pct"
        return _Claim(entry, name) if name and name not in entry.by_definition else None

    def is_answered(self, claim: str, answer: AnsweredBy) -> bool:
        """Whether an answer to `claim` is one to this: an answer to a whole entry by its own function or column, or the quantity's column."""
        whole = claim == self.entry.id and (answer.is_computed or answer.column is not None or self.what.column is not None)
        return claim == self.id or whole

    def estimate(
        self, answer: AnsweredBy, outcomes: Mapping[str, Outcome], processes: tuple[TimedProcess, ...] = ()
    ) -> Estimate | None:
        """What the records of `outcomes` say about it, and of time these processes, if any; None where they do not have it."""
        record, dense = outcomes[answer.key].record, outcomes[answer.key].dense
        if answer.of is not None:
            return answer.of(outcomes)
        if answer.of_record is not None:
            return None if record is None else answer.of_record(record)
        column = answer.column or ("ppl" if self.what.of_dense and self.is_reference else self.what.column)
        if record is None or dense is None or column is None or (column != "ppl" and record.fingerprint == dense.fingerprint):
            return None  # dense inference against itself is zero by definition
        asked = () if self.what.kind == "quality" else (processes,)
        found = _against_dense(record.path, dense.path, *asked)
        value, *ends = numbers(found, column)
        if value is None:
            return None
        counted = column.removesuffix("_saved_pct")
        if counted != column and counted in record.windows and counted in dense.windows:
            return saved_pct(record, dense, counted)
        low, high = (value if end is None else end for end in ends)
        floor = _floor(self.what.floor, record, outcomes, processes) if self.what.floor and answer.column is None else 0.0
        return Estimate(value, low, high, floor)

    def verdict(self, record: Record, found: Estimate, beside: tuple[str, Verdict, str] | None = None) -> tuple[Verdict, str]:
        """The verdict by one record and why; `beside`: the claim made with it, the verdict on that by this record, and what it measured."""
        what = self.what
        if self.name in self.entry.not_comparable:
            return "not comparable", self.entry.not_comparable[self.name]
        if what.sense == "level" or self.is_reference:
            if record.model.name not in PAPER_MODELS:
                return "not comparable", self.absolute
            if what.kind in ("time", "energy") and PAPER_GPU not in (record.environment.gpu or ""):
                return "not comparable", "an absolute number of the paper's GPU"
        if what.kind == "quality" and record.lookahead:
            return "not comparable", "looks ahead: it knows tokens that it is asked to predict"
        sense: Sense = "level" if self.is_reference else what.sense
        judged = rule.judge(sense, self.target, found)
        if beside is not None:
            lowered = (rule.with_its_saving if what.kind == "quality" else rule.with_its_quality)(judged, beside[1])
            if lowered != judged:
                return lowered, f"{judged} by itself, but {beside[0]}, claimed with it, is {beside[1]} in this run: {beside[2]}"
        gone, points = (1 - found.value, 100) if what.sense == "ratio" else (found.value, 1)
        if what.kind == "time" and abs(gone) <= found.floor:
            return judged, f"within the clock's noise of {points * found.floor:.1f}%"
        return judged, rule.by_the_rule(sense, self.target, found)


@cache
def _against_dense(folder: Path, dense_folder: Path, processes: tuple[TimedProcess, ...] | None = None) -> Mapping[str, Any]:
    """`against_dense`, once for all claims that a record answers: for its quality, or else by these processes without intervals of quality."""
    ours, dense = load_record(folder), load_record(dense_folder)
    return against_dense(ours, dense, processes or (), intervals="judged" if processes is None else False)


def _floor(column: str, record: Record, outcomes: Mapping[str, Outcome], processes: tuple[TimedProcess, ...]) -> float:
    """The clock's noise for a record as its table has it: pooled over the rows of its panel (`comparison.pool_noise`)."""
    pairs = [(one.record.path, one.dense.path) for one in outcomes.values() if one.record and one.dense]
    rows = [dict(_against_dense(*pair, processes)) for pair in pairs]
    pool_noise(rows, column.removesuffix(FLOOR))
    return next((number(row, column) for row in rows if row["record"] == record.fingerprint), None) or 0.0


def added_pct(record: Record, other: Record) -> Estimate:
    """Percent of perplexity that `record` has more than `other`."""
    paired = paired_records(record, other)
    return Estimate(paired.relative_pct, paired.relative_pct_low, paired.relative_pct_high)


def saved_pct(record: Record, dense: Record, column: str) -> Estimate:
    """What a run spared of a sum over windows (`paper_flops`), in percent of dense, with a paired bootstrap interval."""
    ours, theirs = (one.windows[["window", column]] for one in (record, dense))
    both = ours.merge(theirs, on="window", suffixes=("", "_dense"))
    return Estimate(*map(float, bootstrap(_spared_pct, both[column], both[f"{column}_dense"])))


def _spared_pct(ours: Any, theirs: Any) -> Any:  # has a name, so that `bootstrap` finds its intervals again
    return 100 * (1 - ours.sum(-1) / theirs.sum(-1))


# --- the ledger -------------------------------------------------------------------------------------------------------------------
def frame(sources: Sequence[Source]) -> pd.DataFrame:
    """The ledger: a row for each claim and each record that answers it, or one that says why there is none, then its tuned ones (`kind`);
    then what other papers state, and the contradictions."""
    claims = (_Claim(entry, name) for entry in reported().values() for name in entry.quantities)
    rows = [row for claim in claims for row in _rows(claim, sources)]
    adjusted = adjusted_p(rows)  # as in the tables, over all claims
    for row in rows:
        if "versus_null_p" in row and adjusted[row["record"]] > FALSE_DISCOVERIES:
            row["versus_null"] = _CHANCE[0]
    rows += [row for source in sources for row in _statements(source.artefact)]
    words = dict.fromkeys((name for name in COLUMNS if name not in _NUMBERS), "")
    return pd.DataFrame([words | row for row in (*rows, *_conflicts())], columns=COLUMNS)


def _rows(claim: _Claim, sources: Sequence[Source]) -> list[dict[str, Any]]:
    entry, what, (low, high) = claim.entry, claim.what, claim.stated
    base: dict[str, Any] = dict(panel=entry.group, section=entry.place, kind="claim", claim=claim.id, quote=entry.quote)
    base |= dict(counted_as=claim.counted_as, place="; ".join((entry.place, *entry.also)), reported=claim.printed)
    base |= dict(target_low=low, target_high=high, unit=what.unit)
    if what.sense == "setting":
        key = entry.config.get(claim.name)
        where = f", kept as conf/{key.replace('.', '.yaml: ', 1)}" if key else ""
        return [base | dict(kind=SETTING, verdict="not comparable", why=entry.not_measured or f"a setting, no outcome{where}")]
    if what.of_dense:
        base |= dict(unit="") if claim.is_reference else dict(target_low=claim.target.low, target_high=claim.target.high)
    given = [(source, answer) for source in sources for name, answer in source.answers if claim.is_answered(name, answer)]
    answers = [(source, answer) for source, answer in given if not answer.tuned]
    rows, reasons = _answered(claim, answers)
    tuned = [(answer.note, row) for source, answer in given if answer.tuned for row in _answered(claim, [(source, answer)])[0]]
    base["tuned"] = "; ".join(f"{row['verdict']}: {_measurement(base | row)[0]} {note}".rstrip() for note, row in tuned)
    # Tuned rows are not judged against chance: the ledger has no more tests than the tables.
    of_tuned = dict(kind=TUNED, panel=TUNED, tuned="", versus_null="")
    own = [base | row for row in rows or [_not_judged(claim, answers, reasons)]]
    return own + [{name: value for name, value in (base | row | of_tuned).items() if name != "versus_null_p"} for _, row in tuned]


def _answered(claim: _Claim, answers: Sequence[tuple[Source, AnsweredBy]]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each number that records give, each once: Figures 6 and 7 show the records of Table 11. And why others give none."""
    found: dict[Any, dict[str, Any]] = {}
    reasons: list[str] = []
    for source, answer in answers:
        outcome = source.panels.get(answer.panel, {}).get(answer.key)
        if outcome is None or outcome.record is None:
            reasons += [outcome.reason] if outcome is not None and outcome.reason else []
            continue
        record = outcome.record
        base = source.panels[answer.panel][answer.against].record if answer.against else outcome.dense
        if record.simulated and claim.what.kind in ("time", "energy") and claim.what.sense != "level":
            reasons.append("simulated, so no time: float products stand in for the quantised ones")
            continue
        try:
            measured = claim.estimate(answer, source.panels[answer.panel], source.processes[answer.panel])
        except QuickSilverError as error:
            reasons.append(str(error))
            continue
        number_of = measured and (measured.value, measured.low, measured.high)  # the first table's noise counts
        same = (record.protocol.name, record.model.weights_digest, record.data.token_digest, number_of)
        if measured is None:
            dense = outcome.dense is not None and record.fingerprint == outcome.dense.fingerprint
            reasons.append(_ZERO if dense else "its record does not have this number")
        elif same not in found:
            asked = [word for word in shlex.split(source.command) if "=" in word and not word.startswith("records=")]
            where = {"artefact": source.artefact.name, "command": source.command, "run": shlex.join(outcome.row.words(asked))}
            panel = source.panels[answer.panel]
            versus = answer.versus(panel) if callable(answer.versus) else answer.versus
            if versus and (other := panel[versus].record) is not None:
                where["against"] = other.fingerprint
            if claim.what.kind == "time" and not answer.own_time and (timed := source.processes[answer.panel]):
                where["timed"] = f"in {len(timed)} processes on {timed[-1].machine.split(',')[0]}"
            elif claim.what.kind == "time":
                where["timed"] = f"in one process on {record.environment.gpu or record.environment.cpu}"
            found[same] = _judged(claim, answer, outcome, base, measured) | where
    return list(found.values()), reasons


def _not_judged(claim: _Claim, answers: Sequence[tuple[Source, AnsweredBy]], reasons: Sequence[str]) -> dict[str, Any]:
    """What stands in the place of a verdict on a claim that no record answers."""
    entry, what = claim.entry, claim.what
    there = [(source.command, source.panels.get(answer.panel, {}).get(answer.key)) for source, answer in answers]
    unmade = (command for command, one in there if one is None or (one.record is None and not one.reason))
    command = next(unmade, "")
    why = f"no record: {command}" if command else "; ".join(dict.fromkeys(reasons))
    said = dict(why=why, command=command or answers[0][0].command, artefact=answers[0][0].artefact.name) if answers else {}
    said = said or {"why": entry.not_measured or "no experiment of this version asks"}
    fixed = next((answer.by_definition for _, answer in answers if answer.by_definition), entry.by_definition.get(claim.name, ""))
    if fixed or said["why"] == _ZERO:
        return {"verdict": BY_DEFINITION, **said, "why": fixed or _ZERO}
    made = any(one is not None and one.record is not None for _, one in there)
    if claim.name in entry.not_comparable or (what.sense == "level" and (what.kind == "tokens" or made)):
        why = entry.not_comparable.get(claim.name) or entry.not_measured or (claim.absolute if made else said["why"])
        return {"verdict": "not comparable", "why": why}
    return {"verdict": "not measured", **said}


def _judged(claim: _Claim, answer: AnsweredBy, outcome: Outcome, base: Record | None, found: Estimate) -> dict[str, Any]:
    record, dense, other, entry = outcome.record, outcome.dense, claim.beside, claim.entry
    assert record is not None
    beside = None  # the claim made together with this one, and the verdict on it alone by the same record
    if other is not None and base is not None:
        its = other.estimate(AnsweredBy(answer.panel, answer.key), {answer.key: replace(outcome, dense=base)})
        if its is not None:
            unit = "%" if other.what.of_dense else other.what.unit
            said = _measurement(dict(measured=its.value, measured_low=its.low, measured_high=its.high, unit=unit))
            beside = (other.id, other.verdict(record, its)[0], " ".join((*said, unit)[: -1 if unit == "%" else None]))
    fixed = answer.by_definition or ("" if answer.is_computed else entry.by_definition.get(claim.name, ""))
    verdict, why = (BY_DEFINITION, fixed) if fixed else claim.verdict(record, found, beside)
    beyond = None if answer.beyond_chance is None else answer.beyond_chance(record)
    from_chance = ""
    if beyond is not None and claim.chance_pct is not None:
        claimed = next(end for end in claim.stated if end is not None)
        verdict = rule.with_its_chance(verdict, rule.difference(claimed, claim.chance_pct, beyond))
        from_what = {"random_precision_pct": "points from fused pairs", "halt_layer_of_30": "layers from content words"}
        of = from_what.get(claim.name, "points from chance")
        from_chance = f"{beyond.value:+.1f} [{beyond.low:.1f} {beyond.high:.1f}] {of}, claimed {claimed - claim.chance_pct:+.1f}"
    modules = record.config.get("modules", {}).items()
    entries = [entry for name, entry in modules if name.startswith("adaptive_quantization")]
    by_formula = not answer.is_computed and claim.what.column == "paper_flops_saved_pct"  # it charges tokens by their width
    widths = by_formula and any(entry.get("beta", "bits_over_16") == "bits_over_16" for entry in entries)
    executed = record.flops_saved_pct("executed") if by_formula else None
    ran = "" if executed is None else f"executed FLOPs saved, of all tokens: {executed:.1f}%"
    row: dict[str, Any] = dict(measured=found.value, measured_low=found.low, measured_high=found.high, verdict=verdict)
    row["why"] = "; ".join(filter(None, (why, from_chance)))
    row["note"] = "; ".join(filter(None, (answer.note, "widths charged bits/16" if widths else "", ran)))
    if found.floor:
        row["noise_floor"] = found.floor
    if claim.what.kind == "quality" and dense is not None and record.found("null", NullResult) is not None:
        against = _against_dense(record.path, dense.path)
        if (sign := versus_null(against)) is not None:
            row |= dict(versus_null=_CHANCE[sign], versus_null_p=against["versus_null_p"])
    row |= dict(protocol=record.protocol.name, execution=record.execution, lookahead=record.lookahead)
    row |= dict(model=record.model.name, weights_digest=record.model.weights_digest[:SHORT])
    row |= dict(data=record.data.name, token_digest=record.data.token_digest[:SHORT], gpu=record.environment.gpu)
    row["windows"] = "" if answer.is_computed else str(record.data.windows)
    return row | dict(record=record.fingerprint, dense_record=dense.fingerprint if dense else None)


def _conflicts() -> Iterator[dict[str, Any]]:
    for row in contradictions():
        finding = row.finding()
        row_of = dict(panel=CONTRADICTIONS, kind="conflict", claim=f"conflict.{row.id}", quote=row.says, place=row.places)
        row_of |= dict(reported="" if row.conflict is None else f"#{row.conflict}", verdict=row.agreement)
        yield row_of | dict(why="; ".join(filter(None, (finding.text if finding else "", f"here: {row.ours}"))))


def _statements(artefact: Artefact) -> Iterator[dict[str, Any]]:
    """A row a statement of the experiment. They are not counted: the rule of docs/verdicts.md needs a number to compare with."""
    stated: Callable[[], list[Statement]] = getattr(artefact.experiment, "STATEMENTS", list)
    for one in stated():
        row: dict[str, Any] = dict(
            panel=one.paper, kind=STATEMENT, claim=one.id, place=one.paper, quote=one.quote, reported="> 0"
        )
        row |= dict(target_low=0.0, verdict=one.verdict, why=f"{one.compared}; {one.why}", artefact=artefact.name)
        if (found := one.estimate) is not None:
            row |= dict(measured=found.value, measured_low=found.low, measured_high=found.high)
        yield row


# --- as a table -------------------------------------------------------------------------------------------------------------------
def ledger(sources: Sequence[Source], name: str = "claims", others: Mapping[str, pd.DataFrame] | None = None) -> Table:
    """The ledger as a table, a panel for each group of claims. What `others`, ledgers of other models and texts by what they are called, say of
    a claim stands beside it."""
    rows = frame(sources)
    elsewhere = {label: standing(found) for label, found in (others or {}).items()}
    texts = {label: _other_texts(found) for label, found in (others or {}).items()}

    def beside(row: Any) -> str:
        claim = row.counted_as
        said = ((label, found[claim]) for label, found in elsewhere.items() if found.get(claim) in LEAST_FAVOURABLE[:4])
        return "; ".join(f"{texts[label].get(claim, label)}: {verdict}" for label, verdict in said)

    rows["elsewhere"] = [beside(row) if row.record and row.kind != TUNED else "" for row in rows.itertuples()]
    panels = [
        Panel(str(group), f"{group}: {_counts(members)}", _columns(str(group)), _notes(members))
        for group, members in rows[rows["kind"] != TUNED].groupby("panel", sort=False)
    ]
    outcomes = standing(rows)
    measured = rows[rows["record"] != ""]
    for row in measured[measured["model"] != measured["model"].mode().iat[0]].itertuples() if len(measured) else ():
        rows.loc[row.Index, "note"] = "; ".join(filter(None, (row.note, f"on {row.model}")))
    on = f" on {measured['model'].mode().iat[0]} and {measured['data'].mode().iat[0]}" if len(measured) else ""
    title = f"The claims of arXiv 2506.22396{on}: {len(outcomes)} outcomes, each counted once: {_said(outcomes.values())}"
    for label, found in elsewhere.items():
        title += f". {label}: {_said(verdict for claim, verdict in found.items() if claim in outcomes)}"
    if elsewhere:
        holds = [sum(found.get(claim) == VERDICTS[0] for found in (outcomes, *elsewhere.values())) for claim in outcomes]
        title += f". Reproduced on all {1 + len(elsewhere)} pairs of model and text: {holds.count(1 + len(elsewhere))}; on at least one: {sum(map(bool, holds))}"
    return Table(name, title, rows, tuple(panels), LEGEND)


def beginnings(asked: Sequence[str], artefacts: Sequence[Artefact]) -> list[str]:
    """What names of claims were asked to begin with, as names are written.
    Raises ConfigError: no claim's name begins so."""
    names = [f"{entry.id}.{name}" for entry in reported().values() for name in entry.quantities]
    names += [row["claim"] for row in (*_conflicts(), *(one for artefact in artefacts for one in _statements(artefact)))]
    begins = re.sub(r"\b(table|figure|section) +(?=\d)", r"\1", " ".join(asked).lower()).split()
    for one in begins:
        if not any(name.startswith(one) for name in names):
            heads = dict.fromkeys(name.rpartition(".")[0] for name in names)
            close = [head for head in heads if set(one.split(".")) <= set(head.split("."))][:3]
            words = list(dict.fromkeys(word for head in heads for word in head.split(".")))
            meant = difflib.get_close_matches(one, words, n=1, cutoff=0.7)  # one word of a name, misspelt
            close = close or [head for head in heads if meant and meant[0] in head.split(".")][:3]
            close = close or difflib.get_close_matches(one, heads, n=2, cutoff=0.4)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"{one}: no claim's name begins so.{hint} `quicksilver claims` prints all of them.")
    return begins


def told(rows: pd.DataFrame, begins: Sequence[str]) -> str:
    """All that the ledger says of claims whose names begin with one of these, with commands and records, for a terminal."""
    blocks: list[tuple[list[str], list[str]]] = []  # what the paper says of claims, and what is said of all of them
    for name, found in rows[rows["claim"].str.startswith(tuple(begins))].groupby("claim", sort=False):
        first = found.iloc[0]
        unit = first["unit"]
        if unit.startswith("% "):  # compared in another unit than the paper's
            low, high = (number(first, f"target_{end}") for end in ("low", "high"))
            unit = f"({'≤ ' if low is None else f'{low:.2f} to '}{high or 0:.2f}{unit})"
        number_of = "" if name.endswith(".stated") else f"{first['reported']} {unit}   "
        paper = [f"{name} ({first['place']})", f"  paper      {number_of}“{' '.join(first['quote'].split())}”"]
        said = [line for row in found.to_dict("records") for line in _said_of(row)]
        if (rows_of := int((found["kind"] == "claim").sum())) > 1 and (overall := standing(found)):
            verdict = next(iter(overall.values()))
            said.append(f"  overall    {verdict}: the least favourable of these {rows_of} rows, the tuned ones left out")
        said += [f"  elsewhere  {first['elsewhere']}"] if first["elsewhere"] else []
        if blocks and blocks[-1][1] == said:  # such as the words of one sentence
            blocks[-1][0].extend(paper)
        else:
            blocks.append((paper, said))
    lines = ["\n".join((*paper, *said)) for paper, said in blocks]
    if any("  record " in line for line in lines):
        lines.append(_OF_RECORDS)
    return "\n\n".join(lines)


def _said_of(row: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one row: what was measured, the verdict, and the commands that repeat it."""
    value, *more = _measurement(row)
    value += f" {row['unit']}" * (value != "-" and bool(re.match("[a-z×]", row["unit"])))
    lost = (number(row, "measured") or 0.0) < -(number(row, "noise_floor") or 0.0)
    if lost and row["claim"].endswith("speedup_pct"):
        value += " (slower)"
    measured = " ".join((value, *more))
    many = f"{row['windows']} windows of " * bool(row["windows"])
    on = f"{measured}, protocol={row['protocol']}, {row['model']} on {many}{row['data']}" if row["model"] else measured
    said = {TUNED if row["kind"] == TUNED else "measured": on, "note": row["note"], "verdict": row["verdict"], "why": row["why"]}
    corrected = ", corrected for all tests of this ledger" * (row["versus_null"] == _CHANCE[0])
    said |= {"selection": f"{row['versus_null']}{corrected}", "timed": row["timed"], "repeat": row["command"]}
    said["row alone"] = row["run"] and f"quicksilver run {row['run']} records=own"
    if " processes " in row["timed"]:
        said["timed"] += ": `show` of the record prints each, and its file"
        said["its time"] = row["command"].replace("quicksilver reproduce", "quicksilver time", 1)
    elif not row["command"] and (shown := re.match(r"(table|figure)(\d+)\.", row["claim"])):
        said["see"] = f"quicksilver reproduce {shown[1]} {shown[2]}"
    if row["record"] and not row["windows"] and row["kind"] != TUNED:
        said["computed"] = "from the record's files; the table and `show` may not print this number"
    place = re.search(r" results_dir=\S+", row["command"])
    for key in ("record", "against"):
        said[key] = row[key] and f"quicksilver show {row[key][:SHORT]}{place[0] if place else ''}"
    yield from (f"  {key:<10} {text}" for key, text in said.items() if text and text != "-")


def standing(rows: pd.DataFrame) -> dict[str, str]:
    """The verdict on each outcome, settings and what is so by definition left out: of its rows the least favourable, so that none is counted
    twice."""
    outcomes = rows[(rows["kind"] == "claim") & (rows["verdict"] != BY_DEFINITION)]
    verdicts = outcomes.groupby("counted_as", sort=False)["verdict"]
    return {str(claim): min(members, key=LEAST_FAVOURABLE.index) for claim, members in verdicts}


def _other_texts(rows: pd.DataFrame) -> dict[str, str]:
    """Outcomes that were not measured on the text that most were, such as annotated ones: `model · text` of each."""
    measured = rows[rows["record"] != ""]
    others = measured[measured["data"] != measured["data"].mode().iat[0]] if len(measured) else measured
    return {row.counted_as: f"{row.model} · {row.data}" for row in others.itertuples()}


def _counts(rows: pd.DataFrame) -> str:
    """Of one panel; an outcome counts where its number is printed first."""
    others = rows.loc[~rows["kind"].isin(("claim", SETTING)), "verdict"]
    return _said([*outcomes_of(rows), *others]) or f"{(rows['kind'] == SETTING).sum()} settings"


def outcomes_of(rows: pd.DataFrame) -> list[str]:
    """The verdicts on the outcomes whose number is printed first in one of these rows."""
    here = set(rows["claim"])
    return [verdict for claim, verdict in standing(rows).items() if claim in here]


def counted(verdicts: Iterable[str]) -> list[tuple[str, int]]:
    """How many there are of each, in the ledger's order."""
    counts = Counter(verdicts)
    return [(verdict, counts[verdict]) for verdict in dict.fromkeys((*VERDICTS, *counts)) if counts[verdict]]


def _said(verdicts: Iterable[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in counted(verdicts))


def _notes(rows: pd.DataFrame) -> tuple[str, ...]:
    measured = rows[rows["record"] != ""]
    if measured.empty:
        return ()
    on = measured[["model", "weights_digest", "data", "token_digest"]].drop_duplicates()
    models = "; ".join("{} (weights {}) on {} (tokens {})".format(*one) for one in on.itertuples(index=False))
    return (f"Measured on {models}.", f"Records: {', '.join(measured.drop_duplicates('record')['record'].str[:SHORT])}.")


def _columns(group: str) -> tuple[Column, ...]:
    verdict = Column("", "verdict", "{verdict}", align="left")
    if group == CONTRADICTIONS:
        return (
            Column("", "conflict", _words("claim", 26, "conflict."), align="left"),
            Column("", "#", lambda row: (row["reported"],), expendable=2),
            Column("", "the paper says", _words("quote", 44), align="left"),
            verdict,
            Column("", "computed; here", _words("why", 54), align="left"),
        )
    protocol = Column("", "protocol", lambda row: (row["protocol"] + " †" * (row["lookahead"] is True),), "left", 1)

    def claimed(row: Mapping[str, Any]) -> Lines:
        return (f"{row['reported']} {'' if row['unit'].startswith('% ') else row['unit']}".strip(),)

    def compared(row: Mapping[str, Any]) -> Lines:
        """The claim in the unit of the measurement, where that is another."""
        low, high = number(row, "target_low"), number(row, "target_high")
        said = f"≤ {high:.2f}%" if low is None else f"{(low + (high or 0.0)) / 2:+.2f}%"
        return (said if row["unit"].startswith("% ") else "",)

    return (
        Column("", "claim", _words("claim", 34), align="left"),
        Column("", "paper", claimed),
        Column("", "compared", compared, expendable=3),
        Column("", "measured", _measurement),
        protocol,
        verdict,
        Column("", "tuned", _words("tuned", 16), "left", 4),
        Column("", "elsewhere", _words("elsewhere", 26), "left", 2),
        Column("", "why", _words("why", 40), align="left"),
    )


def _words(column: str, width: int, without: str = "") -> Callable[[Mapping[str, Any]], Lines]:
    """A cell of wrapped words; commands are long words, and names break at their dots."""

    def cell(row: Mapping[str, Any]) -> Lines:
        text = str(row[column]).removeprefix(without)
        if column == "claim" and len(text) > width:
            head, _, tail = text.rpartition(".")
            return (f"{head}.", tail) if head else (tail,)
        if column == "why":
            text = "; ".join(filter(None, (text, row["note"], row["versus_null"] and f"selection {row['versus_null']}")))
        return tuple(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)) or ("",)

    return cell


def _measurement(row: Mapping[str, Any]) -> Lines:
    value, low, high = numbers(row, "measured")
    if value is None or low is None or high is None:
        return ("-",)
    decimals = decimals_for(max(abs(value), abs(low), abs(high)), least=1)
    text = f"{value:.{decimals}f}{'%' * row['unit'].startswith('%')}"
    floor = number(row, "noise_floor")
    noise = () if floor is None else (f"noise {floor:.{decimals}f}",)
    return (text, *(() if low == high else (f"[{low:.{decimals}f} {high:.{decimals}f}]",)), *noise)
