"""Modules against dense inference: what one record says as one row of numbers, and such rows as a frame, printed beside the paper's.

Every difference is paired: the same windows, the same machine, one run. Nothing is measured here. Tables 3 and 11 have this shape.
"""

from __future__ import annotations

import io
import shutil
import statistics
import subprocess
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from quicksilver.measure.audit import AuditResult
from quicksilver.measure.energy import EmissionsResult
from quicksilver.measure.latency import LOUD, LatencyResult
from quicksilver.measure.measurement import Quartiles
from quicksilver.measure.quality import NullResult
from quicksilver.records import stats
from quicksilver.records.record import Record
from quicksilver.records.times import TimedProcess, over
from quicksilver.report import provenance
from quicksilver.report import table as tables
from quicksilver.report.artefacts import Outcome
from quicksilver.report.claims.reported import reported
from quicksilver.report.provenance import SHORT
from quicksilver.report.table import ENDS, NO_VALUE, Cell, Column, Lines, Panel, Table, filled, number, signed, time_cell

_MEASUREMENTS: dict[str, Any] = {"audit": AuditResult, "null": NullResult, "latency": LatencyResult, "emissions": EmissionsResult}
AUDIT = ("audit_max_abs_logit_difference", "audit_masked_max_abs_logit_difference")
LEDGERS = ("executed", "nominal", "paper", "prompt_executed")
MEASURED = "measured"  # status of a row that has a record; any other status is the reason why it has none

NOISE = (
    "≈ 0: no larger than the noise floor below the table (A/A: the dense model against itself, median over the runs, and no less than what the "
    f"dense row differs from itself). Noisier runs use their own noise floor; above {LOUD}% it is printed, as in ±43: no smaller difference could be seen."
)
VERSUS_RANDOM = (
    "better, worse: the interval of the difference excludes 0, and a permutation test agrees at 5% false discoveries over the panel "
    "(Benjamini-Hochberg). same: otherwise."
)
# A column, and what is said where a row has it.
LEGEND = {
    "executed_flops": "Saved is a decrease in percent of dense inference: 25 means a quarter less. The dense row shows what it has: operations "
    "(G = 10⁹), milliseconds a batch.",
    "speedup_pct": "speedup: wall clock of one batch, under continuation of its prompt as well. It is the median of rounds that alternate with "
    f"the dense model. {NOISE} simulated: no time, because the quantization is simulated in float.",
    "co2_saved_pct": "CO₂e: grams that CodeCarbon charges a token, saved in percent. The dense row shows micrograms a token. Without an energy "
    "counter they are power × time, so the share saved is that of the time. It is ≈ 0 or ±43 where the time is, or where it is itself within that noise.",
    "nominal_flops": "FLOPs saved has three ledgers. exec: operations that ran, signals and modules included. nominal: the dense formula on "
    "active tokens. paper: Appendix J's formula, comparable with the paper's column only. Of KV skipping alone it counts nothing, so that claim "
    "is judged by nominal. It charges a bit-width bits/16; App. J's own β saves less (Table 3 shows both). prompt: exec, of the prompt alone.",
    "delta_ppl": "Δppl: perplexity minus dense perplexity on the same windows, with its 95% interval; below it in percent.",
    "versus_null_ppl": "Δppl of null: the same counts on random tokens, against dense. vs random: the run against that null. "
    f"{VERSUS_RANDOM}",
    "kl_nats": "KL × 100: from the dense model's next-token distribution to the run's, in hundredths of a nat a scored token, with its 95% "
    "interval. Δppl near 0: the right token is as likely as before. KL near 0: every token is.",
    "audit_max_abs_logit_difference": "audit: the largest change of a logit when later tokens are replaced. 0, or rounding, means no look-ahead. With coarse codes the "
    "first line is masked execution; the second is compact execution, which magnifies rounding.",
    "reported_speedup_pct": "The paper measured GPT-2 774M on an A100. Its numbers are shown for comparison, not as targets for another model or "
    "machine.",
}
LOOKAHEAD = "† marks results that look ahead: decisions read the tokens to be predicted (the paper's variant, lookahead=true)."


def against_dense(
    record: Record, dense: Record, processes: Sequence[TimedProcess] = (), *, intervals: bool | Literal["judged"] = True
) -> dict[str, Any]:
    """Everything a table prints about `record` against `dense`, the record of the same run without modules.

    Speedup and FLOPs saved are percentage decreases (as in the paper: 25 means that a quarter of it is gone), Δppl is perplexity
    minus dense perplexity with its 95% paired bootstrap interval, in perplexity and in percent. What was not measured is absent.

    Args:
        intervals: without them no window is read, and of quality Δppl in percent is the only difference. `judged`: of Δppl and of the
            difference from the null, which verdicts go by, and no other.
        processes: those that timed it again, if any: their times are taken.

    Raises:
        ConfigError: the two records do not hold the same windows, or too few for an interval.
    """
    quality = record.quality
    row: dict[str, Any] = dict(record=record.fingerprint, dense_record=dense.fingerprint, lookahead=bool(record.lookahead))
    row |= dict(execution=record.execution, simulated=record.simulated, tokens=quality.tokens, windows=record.data.windows)
    row |= dict(ppl=quality.ppl, bits_per_byte=quality.bits_per_byte, dense_ppl=dense.quality.ppl)
    audit, null, latency, emissions = (record.found(name, result) for name, result in _MEASUREMENTS.items())
    if audit is not None:
        row |= {key: getattr(audit, key.removeprefix("audit_")) for key in AUDIT}
    if record.fingerprint != dense.fingerprint:
        plain = {"delta_ppl_pct": 100 * (quality.ppl / dense.quality.ppl - 1)}
        row |= _quality(record, dense, null, intervals) if intervals else plain
    for ledger in LEDGERS:
        row |= {f"{ledger}_flops": record.flops(ledger), f"{ledger}_flops_saved_pct": record.flops_saved_pct(ledger)}
    if record.dense is not None and record.dense.kv_bytes:
        row["kv_bytes_saved_pct"] = 100 * (1 - quality.kv_bytes_resident / record.dense.kv_bytes)
    for phase in ("", "prompt_") if provenance.has_time(record) else ():
        own = None if latency is None else latency.timing(prompt=bool(phase))
        timing = over(processes, record.fingerprint, prompt=bool(phase)) if processes else own
        if timing is not None:
            row |= {f"{phase}latency_ms": timing.run_ms.median, f"{phase}noise_floor_pct": timing.noise_floor_pct}
            # Round by round against the dense model of the same run: both were timed under the same load of the machine.
            row |= time_saved(f"{phase}speedup_pct", timing.ratio)
    if emissions is not None and record.execution == "compact" and not record.simulated:
        row["gco2_per_token"] = emissions.gco2_per_token
        if not emissions.measured:  # power × time: what is saved is time, and that was timed in turns
            row["co2_saved_pct"] = row.get("speedup_pct")
        elif emissions.dense_gco2_per_token > 0:
            row["co2_saved_pct"] = 100 * (1 - emissions.gco2_per_token / emissions.dense_gco2_per_token)
    return {key: value for key, value in row.items() if value is not None}


def time_saved(name: str, ratio: Quartiles) -> dict[str, float]:
    """A ratio of times as percent saved: its median, and behind the names of the ends its quartiles."""
    return {f"{name}{end}": 100 * (1 - one) for end, one in zip(ENDS, (ratio.median, ratio.high, ratio.low), strict=True)}


def check_against_dense(record: Record, dense: Record) -> None:
    """Raise what `against_dense` would, without drawing an interval."""
    _, null, *_ = (record.found(name, result) for name, result in _MEASUREMENTS.items())
    if record.fingerprint != dense.fingerprint:
        stats.check_pairs(record, dense)
        if null is not None:
            stats.check_pairs(record, record, baseline_column="null_nll_nats")


def _quality(record: Record, dense: Record, null: NullResult | None, intervals: bool | Literal["judged"]) -> dict[str, Any]:
    """Perplexity and KL to dense and to the null, and how the added loss lies over windows: `delta_nats` a token, `delta_nats_median` of the
    windows, and `worst5_share_pct`, what the five windows that lose most have of the sum; absent where the run loses nothing."""
    nats, tokens, dense_nats, dense_tokens = stats.pairs_of(record, dense)
    added = np.sort(nats - dense_nats)
    row: dict[str, Any] = interval("delta_ppl", stats.paired_records(record, dense))
    row["delta_nats"] = float(added.sum() / tokens.sum())
    row["delta_nats_median"] = float(np.median(nats / tokens - dense_nats / dense_tokens))
    if added.sum() > 0:
        row["worst5_share_pct"] = 100 * float(added[-5:].sum() / added.sum())
    if intervals is True and record.quality.kl_nats is not None and "kl_nats" in record.windows:
        kl = stats.bootstrap(stats.mean, record.windows["kl_nats"])
        row |= dict(kl_nats=record.quality.kl_nats, kl_nats_low=kl.low, kl_nats_high=kl.high)
        row["top1_agreement"] = record.quality.top1_agreement
    if null is not None:
        row |= dict(null_kl_nats=null.kl_nats, null_ppl=null.ppl, null_kind=null.kind)
        if intervals is True:
            row |= interval("null_delta_ppl", stats.paired_records(record, dense, column="null_nll_nats"))
        row |= interval("versus_null_ppl", stats.paired_records(record, record, baseline_column="null_nll_nats"))
        row["versus_null_p"] = stats.sign_flip_p(record.windows["nll_nats"] - record.windows["null_nll_nats"])
        if (seeds := null.seed_ppl) is not None:
            row |= dict(null_seeds=len(seeds), null_ppl_low=min(seeds), null_ppl_high=max(seeds))
    return row


def adjusted_p(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """By record, the p value of its test against the null, adjusted over all of them; a record that stands in several rows is one test."""
    tested = {row["record"]: row["versus_null_p"] for row in rows if "versus_null_p" in row}
    return dict(zip(tested, stats.false_discovery(list(tested.values())), strict=True))


def interval(name: str, paired: stats.PairedInterval) -> dict[str, float]:
    """A difference as six numbers: in perplexity and in percent, each with the ends of its interval."""
    found = (paired.difference, paired.low, paired.high, paired.relative_pct, paired.relative_pct_low, paired.relative_pct_high)
    return dict(zip(with_interval(name), found, strict=True))


def with_interval(name: str) -> list[str]:
    """The columns of `interval`."""
    return [f"{name}{unit}{end}" for unit in ("", "_pct") for end in ENDS]


# --- as a table --------------------------------------------------------------------------------------------------------------
def described(outcome: Outcome) -> dict[str, Any]:
    """The columns that every row has: `panel`, `section`, `key`, `technique`, and `status`, why there is no record or `measured`."""
    return {name: getattr(outcome.row, name) for name in COLUMNS[:4]} | {"status": outcome.reason or MEASURED}


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row an outcome, with the columns `COLUMNS`: what is reported, what was measured (see `against_dense`), and on what."""
    rows, members = [], dict[str, list[Outcome]]()
    for outcome in outcomes:
        members.setdefault(outcome.row.panel, []).append(outcome)
    processes = {panel: provenance.timings(those) for panel, those in members.items()}
    for outcome in outcomes:
        row = described(outcome)
        if outcome.row.reported is not None:
            row |= {f"reported_{quantity}": value for quantity, value in reported()[outcome.row.reported].values.items()}
        if outcome.record is not None and outcome.dense is not None:
            model, data = outcome.record.model, outcome.record.data
            row |= dict(model=tables.without_folders(model.name), weights_digest=model.weights_digest[:SHORT], dtype=model.dtype)
            row |= dict(data=data.name, token_digest=data.token_digest[:SHORT])
            row |= against_dense(outcome.record, outcome.dense, processes[outcome.row.panel])
        rows.append(row)
    for panel in members:
        mine = [row for row in rows if row["panel"] == panel]
        adjusted = adjusted_p(mine)
        for row in mine:
            if row.get("record") in adjusted:
                row["versus_null_p_adjusted"] = adjusted[row["record"]]
        for phase in ("", "prompt_"):
            pool_noise(mine, phase)
    return pd.DataFrame(rows, columns=COLUMNS)


def table(
    outcomes: Sequence[Outcome],
    name: str,
    title: str,
    panels: Mapping[str, str],
    *,
    rows: pd.DataFrame | None = None,
    said: Mapping[str, Sequence[str]] | None = None,
    more: Sequence[str] = (),
    cautious: bool = True,
) -> Table:
    """A table with the usual columns, cautions, notes and legend.

    Args:
        panels: panel to its title.
        rows: `frame(outcomes)`, where it is known; said: sentences before cautions and notes of a panel; more: behind the legend.
        cautious: whether `cautions` stand below the panels.
    """
    rows, made = frame(outcomes) if rows is None else rows, []
    for key, heading in panels.items():
        mine = [one for one in outcomes if one.row.panel == key]
        prompt = "protocol=all" not in mine[0].row.overrides
        cautioned = cautions(rows, key) if cautious else ()
        notes = (*(said or {}).get(key, ()), *cautioned, *provenance.notes(mine))
        made.append(Panel(key, heading, columns(prompt=prompt), notes))
    return Table(name, title, rows, tuple(made), (*legend(rows), *more))


def legend(rows: pd.DataFrame) -> tuple[str, ...]:
    """What the columns mean."""
    return (*(said for column, said in LEGEND.items() if rows[column].notna().any()), *marks(rows))


def marks(rows: pd.DataFrame) -> Iterator[str]:
    """What holds of some rows: only fused neighbours are random, draws are several, decisions look ahead."""
    if "null_kind" in rows and rows["null_kind"].eq("random neighbours").any():
        yield "Null of a run that fuses: the same run with random neighbours fused; its other decisions stay."
    drawn = rows.reindex(columns=["null_seeds", "null_ppl_low", "null_ppl_high"]).dropna().astype(float)
    if len(drawn):
        times = " or ".join(f"{seeds:g}" for seeds in sorted(set(drawn["null_seeds"])))
        apart = 100 * (drawn["null_ppl_high"] / drawn["null_ppl_low"] - 1).max()
        yield f"Null: the mean of {times} random draws. The perplexities of a row's draws differ by at most {apart:.1f}%."
    if rows["lookahead"].eq(True).any():
        yield LOOKAHEAD


def columns(*, prompt: bool) -> tuple[Column, ...]:
    """The printed columns; `prompt` adds the shares of the prompt's own time and work that were saved."""
    ledgers = [("exec", "executed", 0), ("nominal", "nominal", 4), ("paper", "paper", 3)]
    if prompt:
        ledgers.append(("prompt", "prompt_executed", 2))
    paper, measured, quality = "paper reports", "measured", "perplexity against dense"
    return (
        Column("", "technique", marked_technique_cell, align="left"),
        Column(paper, "speed", "{reported_speedup_pct:+.0f}", expendable=7),
        Column(paper, "FLOPs", "{reported_flops_saved_pct:+.0f}", expendable=7),
        Column(paper, "Δppl", "{reported_delta_ppl:+.2f}", expendable=7),
        Column(measured, "speedup", _speedup()),
        *([Column(measured, "of the prompt", _speedup("prompt_"), expendable=3)] if prompt else []),
        Column(measured, "CO₂e", _or_dense("{gco2_per_token:1e6*.2g} µg", _emissions_cell), expendable=8),
        *(
            Column("FLOPs saved %", one, _or_dense(f"{{{key}_flops:amount}}", f"{{{key}_flops_saved_pct:+.1f}}"), expendable=rank)
            for one, key, rank in ledgers
        ),
        Column(quality, "Δppl", delta_ppl_cell),
        Column(quality, "KL × 100", tables.KL_CELL, expendable=4),
        Column(quality, "Δppl of null", lambda row: tables.interval_cell(row, "null_delta_ppl"), expendable=5),
        Column(quality, "vs random", tables.versus_null_cell, expendable=1),
        Column("", "audit", tables.audit_cell, expendable=6),
    )


def technique_cell(row: Mapping[str, Any]) -> Lines:
    """What is printed of a row; below it the reason why it has no record."""
    return (row["technique"], *[row["status"]] * (row["status"] != MEASURED))


def marked_technique_cell(row: Mapping[str, Any]) -> Lines:
    """What is printed of a row, † where it looks ahead; below it the reason why it has no record."""
    if row["status"] == MEASURED:
        return (f"{row['technique']}{' †' * bool(row['lookahead'])}",)
    return (row["technique"], *textwrap.wrap(row["status"], 20))


def _emissions_cell(row: Mapping[str, Any]) -> Lines:
    """Emissions saved; `≈ 0` where that, or the time, is no larger than the noise of the clock."""
    saved, noise = number(row, "co2_saved_pct"), number(row, "noise_floor_pct")
    if saved is None or noise is None:
        return (NO_VALUE if saved is None else signed(saved),)
    time = tables.speedup_cell(row)
    return time if time[0].startswith(("≈", "±")) else time_cell(saved, noise)


def _speedup(phase: str = "") -> Cell:
    def others(row: Mapping[str, Any]) -> Lines:
        return ("simulated",) if row["simulated"] is True else tables.speedup_cell(row, f"{phase}speedup_pct")

    return _or_dense(f"{{{phase}latency_ms:.0f}} ms", others)


def _or_dense(own: str, others: Cell | str) -> Cell:
    """A cell of `others`; the dense row, with which all are compared, has the absolute number `own` instead, where it has it."""

    def cell(row: Mapping[str, Any]) -> Lines:
        is_dense = row["status"] == MEASURED and row["record"] == row["dense_record"]
        shown = filled(own, row)
        return shown if is_dense and shown != (NO_VALUE,) else filled(others, row)

    return cell


delta_ppl_cell = _or_dense("ppl {ppl:.2f}", lambda row: tables.interval_cell(row, "delta_ppl"))

COLUMNS = [
    *("panel", "section", "key", "technique", "status"),
    *("reported_speedup_pct", "reported_flops_saved_pct", "reported_delta_ppl"),
    *("speedup_pct", "speedup_pct_low", "speedup_pct_high", "noise_floor_pct", "pooled_noise_floor_pct"),
    *("prompt_speedup_pct", "prompt_speedup_pct_low", "prompt_speedup_pct_high"),
    *("prompt_noise_floor_pct", "prompt_pooled_noise_floor_pct"),
    *("executed_flops_saved_pct", "nominal_flops_saved_pct", "paper_flops_saved_pct", "prompt_executed_flops_saved_pct"),
    *("kv_bytes_saved_pct", "ppl", "dense_ppl", *with_interval("delta_ppl")),
    *("delta_nats", "delta_nats_median", "worst5_share_pct"),
    *("kl_nats", "kl_nats_low", "kl_nats_high", "top1_agreement", "null_kl_nats"),
    *("null_kind", "null_ppl", *with_interval("null_delta_ppl"), *with_interval("versus_null_ppl")),
    *("versus_null_p", "versus_null_p_adjusted", "null_seeds", "null_ppl_low", "null_ppl_high"),
    *(*AUDIT, "lookahead", "execution", "simulated", "bits_per_byte"),
    *("latency_ms", "prompt_latency_ms", "executed_flops", "nominal_flops", "paper_flops", "prompt_executed_flops"),
    *("gco2_per_token", "co2_saved_pct"),
    *("model", "weights_digest", "dtype", "data", "token_digest", "windows", "tokens", "record", "dense_record"),
]


# --- one noise floor for all rows ----------------------------------------------------------------------------------------------
FLOOR, POOLED = "noise_floor_pct", "pooled_noise_floor_pct"


def pool_noise(rows: Sequence[dict[str, Any]], phase: str = "") -> None:
    """Pool the rows' floors: the median over their runs, which one disturbed run does not move, and no less than what the dense row differs from
    itself. A noisier run keeps its own floor.

    `PHASEnoise_floor_pct` is replaced, and `PHASEpooled_noise_floor_pct` added. A record that stands in several rows counts once. Rows without
    a time stay as they are.
    """
    floor, pooled, speedup = f"{phase}{FLOOR}", f"{phase}{POOLED}", f"{phase}speedup_pct"
    itself = [abs(row.get(speedup) or 0.0) for row in rows if row.get("record") and row.get("record") == row.get("dense_record")]
    own = {row["record"]: row[floor] for row in rows if row.get(floor) is not None}
    for row in rows:
        if row.get("record") in own:
            row[pooled] = max(statistics.median(own.values()), *itself, 0.0)
            row[floor] = max(row[pooled], own[row["record"]])


def cautions(rows: pd.DataFrame, panel: str) -> tuple[str, ...]:
    """The sentences below a panel of `frame`: its A/A floor where runs were timed, and rows whose loss lies in a few windows."""
    members = rows[rows["panel"] == panel].to_dict("records")
    few = [
        f"{row['technique']} {row['worst5_share_pct']:.0f}% (mean {signed(100 * row['delta_nats'], 2)}, "
        f"median {signed(100 * row['delta_nats_median'], 2)} nats × 100)"
        for row in members
        if (number(row, "worst5_share_pct") or 0) > 50 and row["delta_ppl_low"] > 0
    ]
    said = (f"Five windows hold more than half of the loss of: {'; '.join(few)}.",) if few else ()
    return (*noise_note(members, "a batch's time"), *said)


def noise_note(rows: Iterable[Mapping[str, Any]], of: str) -> tuple[str, ...]:
    """The sentence below a panel on the pooled floor of its rows (after `pool_noise`), none where no run was timed. `of`: what was, `a batch's time`."""
    timed = {row["record"]: row for row in rows if number(row, FLOOR) is not None and number(row, POOLED) is not None}
    if not timed:
        return ()
    pooled = next(row[POOLED] for row in timed.values())
    of_prompts = (row[f"prompt_{POOLED}"] for row in timed.values() if number(row, f"prompt_{POOLED}") is not None)
    prompt = next((f", {one:.1f}% of a prompt's" for one in of_prompts), "")
    worst = max(number(row, key) or 0.0 for row in timed.values() for key in (FLOOR, f"prompt_{FLOOR}"))
    return (
        f"Noise floor of the clock (A/A): {pooled:.1f}% of {of}{prompt}, pooled over the dense model's "
        f"differences from itself in {len(timed)} run{'s' if len(timed) > 1 else ''}. Noisier runs use their own noise floor (at most "
        f"{worst:.1f}%).",
    )


# --- how far from the committed one --------------------------------------------------------------------------------------------
_SAME = ("model", "weights_digest", "dtype", "data", "token_digest", "windows", "tokens", "execution")
# Names of quantities that belong to the machine and the moment.
_OF_THE_MACHINE = ("_ms", "_j", "speedup", "latency", "seconds", "gco2", "noise_floor", "load_average", "memory_bytes", "record")


class Committed(NamedTuple):
    """The frame of a committed table and where it was read."""

    frame: pd.DataFrame
    origin: str


def committed(csv: Path) -> Committed | None:
    """The version of `csv` in git's HEAD; outside a git tree that of the clone that the package lies in, or the file as it stands. None: there is
    none of them."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=csv.parent, capture_output=True, text=True, encoding="utf-8")

    if csv.parent.is_dir() and shutil.which("git") and git("rev-parse", "--is-inside-work-tree").returncode == 0:
        shown = git("show", f"HEAD:./{csv.name}")
        return Committed(pd.read_csv(io.StringIO(shown.stdout)), f"{csv} at HEAD") if shown.returncode == 0 else None
    clone = Path(__file__).resolve().parents[2] / "results" / csv.parent.name / csv.name
    if clone.is_file():
        return Committed(pd.read_csv(clone), str(clone))
    return Committed(pd.read_csv(csv), f"{csv} as it stood") if csv.is_file() else None


def distance(made: pd.DataFrame, reference: Committed | None, name: str) -> str:
    """One sentence: how far apart at most, over how many rows, or why there is nothing to compare. What a clock says is left out."""
    if reference is None:
        return f"There is no committed {name} to compare with."
    # As text and back, because that is how the committed one was kept.
    here, there = pd.read_csv(io.StringIO(tables.csv(made))), reference.frame
    against = f"Against {reference.origin}: "
    if list(here.columns) != list(there.columns):
        return f"{against}not comparable, other rows or columns."
    if {"panel", "key", "status", *_SAME} <= set(here.columns):  # one run a row: those that were measured in both
        here, there = (frame[frame["status"] == MEASURED].set_index(["panel", "key"]) for frame in (here, there))
        both = here.index.intersection(there.index)
        here, there = here.loc[both], there.loc[both]
    if len(here) != len(there):
        return f"{against}not comparable, other rows or columns ({len(here)} rows here, {len(there)} there)."
    if here.empty:
        return f"{against}no row was measured in both."
    apart: dict[str, float] = {}
    for column in (column for column in here if not any(word in str(column) for word in _OF_THE_MACHINE)):
        ours, theirs = here[column], there[column]
        numbers = column not in _SAME and all(map(pd.api.types.is_numeric_dtype, (ours, theirs)))
        other_words = (ours.astype(str) != theirs.astype(str)) & ~(ours.isna() & theirs.isna())
        unlike = ours.isna() != theirs.isna() if numbers else other_words
        if len(other := unlike.to_numpy().nonzero()[0]):
            row = other[0]
            return f"{against}not comparable, {column} is {ours.iloc[row]} here and {theirs.iloc[row]} there (row {here.index[row]})."
        if numbers:
            apart[column] = float((ours.astype(float) - theirs.astype(float)).abs().fillna(0.0).max())
    worst = max(apart, key=lambda column: apart[column], default=None)
    found = f"at most {apart[worst]:.2g} apart ({worst})" if worst is not None and apart[worst] > 0 else "no difference"
    return f"{against}{len(here)} rows compared, {found}."
