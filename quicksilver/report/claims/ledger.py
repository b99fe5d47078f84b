"""The claims ledger: every number of the paper beside what the records at hand say, with a verdict (docs/verdicts.md). How it is printed is
in `quicksilver.report.claims.ledger`.

Which record answers which claim stands in the files of `experiments/`: `Row.reported`, and a mapping `ANSWERS`. Nothing is run here.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from quicksilver.harness.record import Record, load_record
from quicksilver.harness.stats import bootstrap
from quicksilver.measure.null import NullResult
from quicksilver.report.artefacts import Artefact, Outcome
from quicksilver.report.claims.contradictions import contradictions
from quicksilver.report.claims.reported import (
    Estimate,
    Reported,
    Target,
    Verdict,
    judge,
    quantity,
    reported,
    with_its_quality,
    with_its_saving,
)
from quicksilver.report.comparison import against_dense
from quicksilver.report.provenance import SHORT
from quicksilver.report.table import Column, Lines, Panel, Table, number
from quicksilver.runtime.errors import ConfigError, QuickSilverError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# The models that the paper's absolute numbers are of (App. J calls gpt2-medium's shape by gpt2-large's size), and its GPU.
PAPER_MODELS = ("gpt2-large", "gpt2-medium")
PAPER_GPU = "A100"
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "not reproduced", "not comparable", "not measured")
BY_DEFINITION: Verdict = "by definition"  # no verdict to be counted
CONTRADICTIONS = "The paper against itself"
_ZERO = "dense inference itself: zero by definition"


@dataclass(frozen=True)
class AnsweredBy:
    """Which row of an experiment answers a claim, and with which of its numbers.

    Attributes:
        panel, key: the row whose record is asked.
        column: of `against_dense`; None: the quantity's own.
        of: instead of a column, from the outcomes of the panel by key to an estimate; None where these do not have it.
        note: what is compared, where that is not plain.
        by_definition: why the number can be no other; then it is shown and not judged.
    """

    panel: str
    key: str
    column: str | None = None
    of: Callable[[Mapping[str, Outcome]], Estimate | None] | None = None
    note: str = ""
    by_definition: str = ""


@dataclass(frozen=True)
class Source:
    """An experiment with the outcomes that are there, and the command that makes those that are not."""

    artefact: Artefact
    outcomes: Sequence[Outcome]
    command: str

    @cached_property
    def answers(self) -> list[tuple[str, AnsweredBy]]:
        """Claims (entry, or entry.quantity) with what answers them: those that rows name, then those that the file declares.

        Raises:
            ConfigError: a claim that is not in reported*.yaml, a row that the experiment does not have.
        """
        named = [(row.reported, AnsweredBy(row.panel, row.key)) for row in self.artefact.experiment.rows() if row.reported]
        declared: Mapping[str, AnsweredBy | tuple[AnsweredBy, ...]] = getattr(self.artefact.experiment, "ANSWERS", {})
        found = [*named, *((claim, one) for claim, given in declared.items() for one in _several(given))]
        rows = {(row.panel, row.key) for row in self.artefact.experiment.rows()}
        for claim, answer in found:
            if claim not in reported() and not _is_claim(claim):
                raise ConfigError(
                    f"{self.artefact.path} answers {claim!r}, which is no claim of quicksilver/report/claims/reported*.yaml."
                )
            if (answer.panel, answer.key) not in rows:
                raise ConfigError(
                    f"{self.artefact.path} answers {claim} by its row {answer.panel} {answer.key}, which it does not have."
                )
        return found

    def panel(self, name: str) -> dict[str, Outcome]:
        """The outcomes of one panel by key."""
        return {outcome.row.key: outcome for outcome in self.outcomes if outcome.row.panel == name}


def _several(given: AnsweredBy | tuple[AnsweredBy, ...]) -> tuple[AnsweredBy, ...]:
    return (given,) if isinstance(given, AnsweredBy) else given


def _is_claim(name: str) -> bool:
    entry, _, of = name.rpartition(".")
    return entry in reported() and of in reported()[entry].quantities


# --- one claim, one answer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Judged:
    """An answer with a record: the row of the ledger in the making."""

    source: Source
    answer: AnsweredBy
    outcome: Outcome
    estimate: Estimate


def target(entry: Reported, name: str) -> Target:
    """What is claimed, in the unit in which it is compared: perplexities in percent of the paper's dense one."""
    low, high = _stated(entry, name)
    what = quantity(entry, name)
    if what.of_dense is None or _is_reference(entry):
        return Target(low, high)
    base = reported()[entry.against or entry.id]
    dense, slack = base.values["ppl"], base.rounding["ppl"]
    if what.of_dense == "difference":
        return Target(*(None if end is None else 100 * end / dense for end in (low, high)))
    assert low is not None
    assert high is not None
    return Target(100 * (low / (dense + slack) - 1), 100 * (high / (dense - slack) - 1))


def _is_reference(entry: Reported) -> bool:
    """Whether others are relative to it: its perplexity is an absolute number."""
    return entry.id == entry.against


def _stated(entry: Reported, name: str) -> tuple[float | None, float | None]:
    if name in entry.bounds:
        return entry.bounds[name]
    return entry.values[name] - entry.rounding[name], entry.values[name] + entry.rounding[name]


def estimate(entry: Reported, name: str, answer: AnsweredBy, outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """What the records of `outcomes` say about one claim; None where they do not have it."""
    if answer.of is not None:
        return answer.of(outcomes)
    outcome, what = outcomes[answer.key], quantity(entry, name)
    if outcome.record is None or outcome.dense is None:
        return None
    column = answer.column or ("ppl" if what.of_dense and _is_reference(entry) else what.column)
    if column is None or (column != "ppl" and outcome.record.fingerprint == outcome.dense.fingerprint):
        return None  # dense inference against itself is zero by definition
    found = _against_dense(outcome.record.path, outcome.dense.path)
    value = number(found, column)
    if value is None:
        return None
    counted = column.removesuffix("_saved_pct")
    if counted != column and counted in outcome.record.windows and counted in outcome.dense.windows:
        return saved_pct(outcome.record, outcome.dense, counted)
    low, high = number(found, f"{column}_low"), number(found, f"{column}_high")
    floor = number(found, what.floor) if what.floor and answer.column is None else None
    return Estimate(value, value if low is None else low, value if high is None else high, floor or 0.0)


@cache
def _against_dense(folder: Path, dense_folder: Path) -> Mapping[str, Any]:
    """`against_dense`, once for all claims that a record answers."""
    return against_dense(load_record(folder), load_record(dense_folder))


def saved_pct(record: Record, dense: Record, column: str) -> Estimate:
    """What a run spared of a sum over windows (`paper_flops`), in percent of dense, with a paired bootstrap interval."""
    both = record.windows[["window", column]].merge(dense.windows[["window", column]], on="window", suffixes=("", "_dense"))
    return Estimate(*map(float, bootstrap(_spared_pct, both[column], both[f"{column}_dense"])))


def _spared_pct(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    return 100 * (1 - ours.sum(-1) / theirs.sum(-1))


def verdict(
    entry: Reported, name: str, record: Record, found: Estimate, beside: tuple[str, Verdict] | None = None
) -> tuple[Verdict, str]:
    """The verdict on one claim by one record and why, where the rule alone does not say it.

    Args:
        beside: of a saving, the quality that it is claimed with, of a quality, the operations that it is claimed to save: the claim and the
            verdict on it by the same record; None where there is none.
    """
    what = quantity(entry, name)
    if name in entry.not_comparable:
        return "not comparable", entry.not_comparable[name]
    if what.sense == "level" or _is_reference(entry):
        if record.model.name not in PAPER_MODELS:
            return "not comparable", f"an absolute number of {entry.about.split(',')[0].split(' on ')[0]}"
        if what.kind in ("time", "energy") and PAPER_GPU not in (record.environment.gpu or ""):
            return "not comparable", "an absolute number of the paper's GPU"
    if what.kind == "quality" and record.lookahead:
        return "not comparable", "looks ahead: it knows tokens that it is asked to predict"
    judged = judge("level" if _is_reference(entry) else what.sense, target(entry, name), found)
    if beside is not None:
        lowered = with_its_saving(judged, beside[1]) if what.kind == "quality" else with_its_quality(judged, beside[1])
        if lowered != judged:
            decided = "undecided" if beside[1] == "not measured" else beside[1]
            return lowered, f"{judged} by itself; claimed together with {beside[0]}, which is {decided}"
    if judged == "not measured":
        return judged, "the interval holds both the claim and its opposite: more windows or rounds would tell"
    gone, points = (1 - found.value, 100) if what.sense == "ratio" else (found.value, 1)
    if what.kind == "time" and abs(gone) <= found.floor:
        return judged, f"within the clock's noise of {points * found.floor:.1f}%"
    return judged, ""


# --- the ledger -----------------------------------------------------------------------------------------------------------------

COLUMNS = [
    *("panel", "section", "kind", "claim", "place", "quote", "reported", "target_low", "target_high", "unit"),
    *("measured", "measured_low", "measured_high", "protocol", "execution", "lookahead", "versus_null", "verdict", "why"),
    *("artefact", "command", "model", "weights_digest", "data", "token_digest", "gpu", "record", "dense_record"),
]


_NUMBERS = ("target_low", "target_high", "measured", "measured_low", "measured_high", "lookahead")


def frame(sources: Sequence[Source]) -> pd.DataFrame:
    """The ledger: a row for each claim and each record that answers it, or one that says why there is none; then what other papers state,
    and the contradictions."""
    rows = [row for entry in reported().values() for name in entry.quantities for row in _rows(entry, name, sources)]
    rows += [row for source in sources for row in _statements(source.artefact)]
    words = dict.fromkeys((name for name in COLUMNS if name not in _NUMBERS), "")
    return pd.DataFrame([words | row for row in (*rows, *_conflicts())], columns=COLUMNS)


def _rows(entry: Reported, name: str, sources: Sequence[Source]) -> Iterator[dict[str, Any]]:
    what = quantity(entry, name)
    low, high = _stated(entry, name)
    base: dict[str, Any] = {
        **{"panel": entry.group, "section": entry.place, "kind": "claim", "claim": f"{entry.id}.{name}", "quote": entry.quote},
        **{"place": "; ".join((entry.place, *entry.also)), "reported": _reported(entry, name)},
        **{"target_low": low, "target_high": high, "unit": what.unit},
    }
    if what.sense == "setting":
        key = entry.config.get(name)
        where = f", kept as conf/{key.replace('.', '.yaml: ', 1)}" if key else ""
        yield {**base, "verdict": "not comparable", "why": f"a setting, no outcome{where}"}
        return
    if what.of_dense and not _is_reference(entry):
        ends = target(entry, name)
        base |= {"target_low": ends.low, "target_high": ends.high}
    elif what.of_dense:
        base["unit"] = ""
    measured = list(_measured(entry, name, sources))
    if measured:
        for one in measured:
            yield {**base, **_judged_row(entry, name, one)}
    else:
        said = _unmeasured(entry, name, sources)
        if said["why"] == _ZERO:
            yield {**base, "verdict": BY_DEFINITION, **said}
        elif name in entry.not_comparable or (what.sense == "level" and what.kind == "tokens"):
            yield {
                **base,
                "verdict": "not comparable",
                "why": entry.not_comparable.get(name) or entry.not_measured or said["why"],
            }
        else:
            yield {**base, "verdict": "not measured", **said}


def _answers(entry: Reported, name: str, sources: Sequence[Source]) -> Iterator[tuple[Source, AnsweredBy]]:
    for source in sources:
        for claim, answer in source.answers:
            if claim == f"{entry.id}.{name}" or (claim == entry.id and _has(entry, name, answer)):
                yield source, answer


def _has(entry: Reported, name: str, answer: AnsweredBy) -> bool:
    """Whether an answer to a whole entry is one to this quantity: by its own function, or by the quantity's column."""
    return answer.of is not None or answer.column is not None or quantity(entry, name).column is not None


def _measured(entry: Reported, name: str, sources: Sequence[Source]) -> Iterator[_Judged]:
    seen = set()
    for source, answer in _answers(entry, name, sources):
        outcome = source.panel(answer.panel).get(answer.key)
        if outcome is None or outcome.record is None:
            continue
        try:
            found = estimate(entry, name, answer, source.panel(answer.panel))
        except QuickSilverError:
            continue  # said where the claim is left without a number
        if found is None:
            continue
        # Figures 6 and 7 show the records of Table 11, and other measurements repeat its runs: one row is enough.
        record = outcome.record
        same = (record.protocol.name, record.model.weights_digest, record.data.token_digest, found)
        if same not in seen:
            seen.add(same)
            yield _Judged(source, answer, outcome, found)


def _judged_row(entry: Reported, name: str, one: _Judged) -> dict[str, Any]:
    record, found = one.outcome.record, one.estimate
    assert record is not None
    why_fixed = one.answer.by_definition or (entry.by_definition.get(name, "") if one.answer.of is None else "")
    judged, why = (BY_DEFINITION, why_fixed) if why_fixed else verdict(entry, name, record, found, _beside(entry, name, one))
    if one.answer.of is None and quantity(entry, name).column == "paper_flops_saved_pct" and _charges_widths(record):
        why = "; ".join(filter(None, (why, "widths charged bits/16")))
    null = _versus_null(one.outcome) if quantity(entry, name).kind == "quality" else ""
    return {
        **{"measured": found.value, "measured_low": found.low, "measured_high": found.high, "verdict": judged},
        **{"why": "; ".join(filter(None, (why, one.answer.note))), "versus_null": null},
        **{"protocol": record.protocol.name, "execution": record.execution, "lookahead": record.lookahead},
        **{"artefact": one.source.artefact.name, "model": record.model.name, "data": record.data.name},
        "weights_digest": record.model.weights_digest[:SHORT],
        "token_digest": record.data.token_digest[:SHORT],
        "gpu": record.environment.gpu,
        "record": record.fingerprint,
        "dense_record": one.outcome.dense.fingerprint if one.outcome.dense else None,
    }


def _charges_widths(record: Record) -> bool:
    """Whether its paper ledger charges tokens by their bit-width."""
    entries = (entry for name, entry in record.config.get("modules", {}).items() if name.startswith("adaptive_quantization"))
    return any(entry.get("beta", "bits_over_16") == "bits_over_16" for entry in entries)


def _beside(entry: Reported, name: str, one: _Judged) -> tuple[str, Verdict] | None:
    """The claim that `name` of `entry` is made together with, and the verdict on it alone by the same record."""
    if one.outcome.record is None or one.outcome.dense is None:
        return None
    if quantity(entry, name).kind in ("time", "work", "energy"):
        own = (
            f"{entry.id}.{other}"
            for other in entry.quantities
            if (quantity(entry, other).kind, _cost(entry, other)) == ("quality", True)
        )
        claim = next(own, entry.quality)
    elif quantity(entry, name).kind == "quality" and _cost(entry, name):
        claim = next((f"{entry.id}.{other}" for other in entry.quantities if other == "flops_saved_pct"), None)
    else:
        return None
    if claim is None:
        return None
    judged_entry, _, of = claim.rpartition(".")
    other = reported()[judged_entry]
    if of in other.by_definition or (quantity(other, of).kind == "work" and of in other.not_comparable):
        return None
    found = estimate(other, of, AnsweredBy(one.answer.panel, one.answer.key), {one.answer.key: one.outcome})
    return None if found is None else (claim, verdict(other, of, one.outcome.record, found)[0])


def _cost(entry: Reported, name: str) -> bool:
    return quantity(entry, name).sense == "cost"


def _versus_null(outcome: Outcome) -> str:
    """Whether the run beat its null: its tokens chosen by chance, at the same budget."""
    if outcome.record is None or outcome.dense is None or outcome.record.found("null", NullResult) is None:
        return ""
    found = _against_dense(outcome.record.path, outcome.dense.path)
    low, high = number(found, "versus_null_ppl_low"), number(found, "versus_null_ppl_high")
    if low is None or high is None:
        return ""
    return "better than chance" if high < 0 else "worse than chance" if low > 0 else "no better than chance"


def _unmeasured(entry: Reported, name: str, sources: Sequence[Source]) -> dict[str, str]:
    """Why there is no number, and the command that makes one."""
    reasons, commands, names = [], [], []
    for source, answer in _answers(entry, name, sources):
        outcome = source.panel(answer.panel).get(answer.key)
        names.append(source.artefact.name)
        if outcome is not None and outcome.record is not None:
            dense = outcome.dense is not None and outcome.record.fingerprint == outcome.dense.fingerprint
            reason = _ZERO if dense else "its record does not have this number"
            try:
                estimate(entry, name, answer, source.panel(answer.panel))
            except QuickSilverError as error:
                reason = str(error)
            reasons.append(reason)
        elif outcome is not None and outcome.reason:
            reasons.append(outcome.reason)
        else:
            reasons.append("no record")
            commands.append(source.command)
    if commands:
        return {"why": f"no record: {commands[0]}", "command": commands[0], "artefact": names[0]}
    if reasons:
        return {"why": "; ".join(dict.fromkeys(reasons)), "artefact": names[0]}
    return {"why": entry.not_measured or "no experiment of this version asks"}


def _reported(entry: Reported, name: str) -> str:
    """`18`, `≤ 0.2`, `0.05 to 0.1`: the number as it is claimed."""
    if name in entry.values:
        value, half = entry.values[name], entry.rounding[name]
        return f"{value:.{max(0, -round(math.log10(2 * half)))}f}"
    low, high = entry.bounds[name]
    return f"≤ {high:g}" if low is None else f"≥ {low:g}" if high is None else f"{low:g} to {high:g}"


def _conflicts() -> Iterator[dict[str, Any]]:
    for row in contradictions():
        finding = row.finding()
        yield {
            **{"panel": CONTRADICTIONS, "section": "", "kind": "conflict", "claim": f"conflict.{row.id}", "quote": row.says},
            **{"place": row.places, "reported": "" if row.conflict is None else f"#{row.conflict}", "verdict": row.agreement},
            "why": "; ".join(filter(None, (finding.text if finding else "", f"here: {row.ours}"))),
        }


# --- what another paper states without a number --------------------------------------------------------------------------------


STATEMENT = "statement"


@dataclass(frozen=True)
class Statement:
    """A statement that a difference is above 0.

    Attributes:
        id: dotted name. paper: where it stands. quote: its words.
        compared: which difference was measured here.
        estimate: the difference; None: it was not measured.
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


def _statements(artefact: Artefact) -> Iterator[dict[str, Any]]:
    """Rows of the ledger: one a statement of the experiment, none where it declares none."""
    stated: Callable[[], list[Statement]] | None = getattr(artefact.experiment, "STATEMENTS", None)
    for one in stated() if stated is not None else ():
        row: dict[str, Any] = {
            "panel": one.paper,
            "section": "",
            "kind": STATEMENT,
            "claim": one.id,
            "place": one.paper,
            "quote": one.quote,
        }
        row |= {
            "reported": "> 0",
            "target_low": 0.0,
            "verdict": one.verdict,
            "why": f"{one.compared}; {one.why}",
            "artefact": artefact.name,
        }
        if one.estimate is not None:
            row |= {"measured": one.estimate.value, "measured_low": one.estimate.low, "measured_high": one.estimate.high}
        yield row


# --- as a table ----------------------------------------------------------------------------------------------------------------


LEGEND = (
    "measured: with its 95% interval, a time with the quartiles of its rounds; of several protocols each has its row. Perplexity is compared in percent of dense perplexity, "
    "operations in the paper's ledger, time in percent of dense inference in the same process.",
    "reproduced: the interval reaches the claim and rules out that it is wrong by nearly its whole size. partly: it rules that out and does "
    "not reach the claim. not reproduced: neither. A saving is judged no better than the quality claimed with it, by the same run: where that "
    "is not reproduced or undecided, neither is the saving reproduced. A quality is reproduced at the claimed saving only. not comparable: a "
    "setting, or an absolute number of another model or machine. not measured: no record, or an interval too wide. by definition: it could "
    "not be otherwise; not counted. The whole rule: docs/verdicts.md.",
    "contradiction, consistent: computed from the paper's numbers alone; choice: the paper leaves it open.",
    "A verdict is about the model and the text that were measured: it does not say that the paper's number is wrong on its own.",
)


def ledger(sources: Sequence[Source], name: str = "claims") -> Table:
    """The ledger as a table, a panel for each group of claims."""
    rows = frame(sources)
    panels = [
        Panel(str(group), f"{group}: {_counts(members)}", _columns(str(group)), _notes(members))
        for group, members in rows.groupby("panel", sort=False)
    ]
    claims = rows[rows["kind"] == "claim"]
    title = f"The claims of arXiv 2506.22396: {claims['claim'].nunique()} numbers in {len(claims)} rows, {_counts(claims)}"
    return Table(name, title, rows, tuple(panels), LEGEND)


def _counts(rows: pd.DataFrame) -> str:
    counts = Counter(rows["verdict"])
    order = [*VERDICTS, *(word for word in counts if word not in (*VERDICTS, BY_DEFINITION))]
    return ", ".join(f"{counts[word]} {word}" for word in order if counts[word])


def _notes(rows: pd.DataFrame) -> tuple[str, ...]:
    measured = rows[rows["record"] != ""]
    if measured.empty:
        return ()
    on = measured[["model", "weights_digest", "data", "token_digest"]].drop_duplicates()
    models = "; ".join(
        f"{one.model} (weights {one.weights_digest}) on {one.data} (tokens {one.token_digest})" for one in on.itertuples()
    )
    names = measured.drop_duplicates("record")["record"].str[:SHORT]
    return (f"Measured on {models}.", f"Records: {', '.join(names)}.")


def _columns(group: str) -> tuple[Column, ...]:
    if group == CONTRADICTIONS:
        return (
            Column("", "conflict", _words("claim", 26, "conflict."), align="left"),
            Column("", "#", lambda row: (row["reported"],), expendable=2),
            Column("", "the paper says", _words("quote", 44), align="left"),
            Column("", "verdict", lambda row: (row["verdict"],), align="left"),
            Column("", "computed; here", _words("why", 54), align="left"),
        )
    return (
        Column("", "claim", _words("claim", 34), align="left"),
        Column("", "paper", lambda row: (f"{row['reported']} {'' if row['unit'].startswith('% ') else row['unit']}".strip(),)),
        Column("", "compared", _compared, expendable=3),
        Column("", "measured", _measurement),
        Column("", "protocol", _protocol, align="left", expendable=1),
        Column("", "verdict", lambda row: (row["verdict"],), align="left"),
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
            text = "; ".join(filter(None, (text, row["versus_null"])))
        return tuple(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)) or ("",)

    return cell


def _compared(row: Mapping[str, Any]) -> Lines:
    """The claim in the unit of the measurement, where that is another."""
    if not row["unit"].startswith("% "):
        return ("",)
    low, high = number(row, "target_low"), number(row, "target_high")
    if low is None:
        return (f"≤ {high:.2f}%",)
    middle = (low + (high or 0.0)) / 2
    return (f"{middle:+.2f}%",)


def _measurement(row: Mapping[str, Any]) -> Lines:
    value, low, high = (number(row, name) for name in ("measured", "measured_low", "measured_high"))
    if value is None or low is None or high is None:
        return ("-",)
    size = max(abs(value), abs(low), abs(high))
    decimals = 3 if size < 0.1 else 2 if size < 10 else 1
    unit = "%" if row["unit"].startswith("%") else ""
    text = f"{value:.{decimals}f}{unit}"
    return (text,) if low == high else (text, f"[{low:.{decimals}f} {high:.{decimals}f}]")


def _protocol(row: Mapping[str, Any]) -> Lines:
    return (
        (f"{row['protocol']} †" if row["lookahead"] is True else row["protocol"],) if isinstance(row["protocol"], str) else ("",)
    )
