"""What a run costs in time, energy and memory, from records of `measure=cost`; the tables of deployment and memory.

Table 7, Figure 16, the waterfall and these tables read the same nine records: dense inference, the steps of the ablation, the attention budget.
Quantised tokens are multiplied as integers here, so that they have a time. Table 11 simulates them, with a scale for each group of values.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import sub
from typing import Any

import pandas as pd

from quicksilver.measure.components import ComponentsResult
from quicksilver.measure.deployment import DeploymentResult
from quicksilver.measure.energy import EnergyResult
from quicksilver.measure.latency import LatencyResult
from quicksilver.measure.measurement import Quartiles
from quicksilver.measure.memory import MemoryResult
from quicksilver.records.record import Record
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.table import Cell, Column, Panel, Table, filled, number, time_cell

from ..ablation.techniques import MECHANISMS, options, row_of, steps

PANEL = "continuation"
# Eight windows: quality stands in Table 11, over all of them.
OVERRIDES = (f"protocol={PANEL}", "measure=cost", "dataset.windows=8")
DENSE, JOINT, BUDGET = "baseline", "cumulative.quantization", "budget"
BELOW = "below resolution"
SIMULATED = "simulated"  # a processor without exact integer products: times and joules say nothing
QUANTIZATION = MECHANISMS["quantization"][0]
INTEGERS = options(QUANTIZATION, execution="int8")


def rows(*keys: str) -> list[Row]:
    """Dense inference, every mechanism alone, one after another, and the attention budget; or those of them in `keys`."""
    found = [
        row_of(PANEL, "", DENSE, "Dense baseline", "", *OVERRIDES),
        *(
            replace(row, overrides=(*row.overrides, *INTEGERS)) if QUANTIZATION in row.needs else row
            for row in steps(PANEL, *OVERRIDES)
        ),
        row_of(PANEL, "By attention", BUDGET, "Halting, least attention", "halting_attention", *OVERRIDES),
    ]
    return [row for row in found if not keys or row.key in keys]


def by_key(outcomes: Sequence[Outcome]) -> dict[str, Record]:
    """The records that there are, by the key of their row."""
    return {outcome.row.key: outcome.record for outcome in outcomes if outcome.record is not None}


def measured(outcomes: Sequence[Outcome], measure: Callable[[Record], dict[str, Any]]) -> list[dict[str, Any]]:
    """A line of a frame for each outcome: what every table has, and what `measure` finds in its record; noise floors are pooled."""
    found = [comparison.described(outcome) for outcome in outcomes]
    for row, outcome in zip(found, outcomes, strict=True):
        if outcome.record is not None and (more := measure(outcome.record)):
            row |= more | {"record": outcome.record.fingerprint}
    comparison.pool_noise(found)
    return found


def within(value: float, noise: float = 0.0) -> Estimate:
    """A number that is known to so much; differences of no more are none."""
    return Estimate(value, value - noise, value + noise, noise)


def time_saved(ratio: Quartiles, floor_pct: float) -> Estimate:
    """A ratio of times as percent saved, between its quartiles."""
    value, low, high = comparison.time_saved("", ratio).values()
    return Estimate(value, low, high, floor_pct)


def set_against(pairs: Sequence[tuple[Estimate, Estimate]], of: Callable[[float, float], float]) -> Estimate:
    """A difference or quotient of two estimates, their ends set against each other; of several processes, a pair each: the median, and the range."""
    each = [
        Estimate(of(one.value, other.value), of(one.low, other.high), of(one.high, other.low), max(one.floor, other.floor))
        for one, other in pairs
    ]
    value, floor = (statistics.median(getattr(one, name) for one in each) for name in ("value", "floor"))
    return Estimate(value, min(one.low for one in each), max(one.high for one in each), floor)


def of_a_batch(record: Record) -> Estimate:
    """Percent of a batch's time that is gone, its prompts and the tokens after them."""
    latency = record.measured("latency", LatencyResult)
    return time_saved(latency.latency_ratio, latency.noise_floor_pct)


def pooled(of: Callable[[Record], Estimate | None], key: str, outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """What `of` finds in that row's record, with the clock's noise as `measured` has it: pooled over the rows that were timed."""
    timed = {name: one.record for name, one in outcomes.items() if one.record is not None and one.record.modules}
    there = {name: record for name, record in timed.items() if not record.simulated}
    found = {name: (record.fingerprint, one) for name, record in there.items() if (one := of(record)) is not None}
    lines: dict[str, dict[str, Any]] = {name: {"record": run, comparison.FLOOR: one.floor} for name, (run, one) in found.items()}
    comparison.pool_noise([*lines.values()])
    return replace(found[key][1], floor=lines[key][comparison.FLOOR]) if key in found else None


def components(record: Record) -> ComponentsResult:
    """The batch taken apart."""
    return record.measured("components", ComponentsResult)


def energy(record: Record) -> EnergyResult:
    """Joules."""
    return record.measured("energy", EnergyResult)


# --- energy -----------------------------------------------------------------------------------------------------------------------
def method(record: Record) -> str:
    """RAPL, NVML …, or `estimate` where there was no counter: one word beside every number."""
    return energy(record).method if energy(record).measured else "estimate"


def joules_saved(record: Record) -> Estimate | None:
    """Percent of dense net joules that are gone, within the resolution of that; None: no net joules of one of the two."""
    found = energy(record)
    dense, run = found.dense.net_j_per_token, None if found.run is None else found.run.net_j_per_token
    if run is None or isinstance(dense, str) or isinstance(run, str):
        return None
    resolution = found.dense.resolution_j_per_token + found.ours.resolution_j_per_token
    return within(100 * (1 - run / dense), 100 * resolution / dense)


def energy_note(outcomes: Sequence[Outcome]) -> str:
    """How joules were measured, and what a gram is made of."""
    found = next((one for record in by_key(outcomes).values() if (one := record.found("energy", EnergyResult))), None)
    if found is None:
        return "Energy: not measured."
    how = (
        f"{found.method} ({'a counter' if found.measured else 'estimated from the clock'}); "
        f"{found.rest_w:.3g} W at rest subtracted; {found.grid_kg_per_kwh:.3g} kg CO₂ per kWh ({found.country_iso_code})"
    )
    return f"Energy: {how}. Grams of CO₂ are joules times the grid factor."


# --- deployment -------------------------------------------------------------------------------------------------------------------
def _served(record: Record) -> dict[str, Any]:
    if record.simulated:
        return {"method": SIMULATED}
    found = record.measured("deployment", DeploymentResult)
    mine = found.ours
    row: dict[str, Any] = {"first_token_ms": mine.first_token_ms.median, "first_token_iqr_ms": mine.first_token_ms.iqr}
    row |= {f"{percentile}_ms": ms for percentile, ms in vars(mine.per_token_ms).items()}
    row |= {key: getattr(mine, key) for key in ("tokens_per_s", "within_budget_pct", "tokens_timed")}
    if found.per_token_ratio is not None:
        row |= comparison.time_saved("saved_pct", found.per_token_ratio) | {comparison.FLOOR: found.noise_floor_pct}
    return row


def _largest(outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """Points of time gone under the lesser of halting and fusion, beyond the greater of the others; the ends are set against each other."""
    keys = (key for key in outcomes if key.startswith("isolated."))
    gone = {key.removeprefix("isolated."): one for key in keys if (one := pooled(of_a_batch, key, outcomes)) is not None}
    if set(gone) != set(MECHANISMS):
        return None
    ours = min((gone.pop(key) for key in ("halting", "fusion")), key=lambda one: one.value)
    best = max(gone.values(), key=lambda one: one.value)
    return set_against([(ours, best)], sub)


def _answers() -> dict[str, AnsweredBy | tuple[AnsweredBy, ...]]:
    """Time as the paper takes it (3.1, G.5), beside that of whole passes in Table 11, where quantised tokens are simulated."""

    def generated(record: Record) -> Estimate | None:
        served = record.measured("deployment", DeploymentResult)
        return None if served.per_token_ratio is None else time_saved(served.per_token_ratio, served.noise_floor_pct)

    note, integers = "tokens generated one by one, the prompt's time left out", "quantised tokens multiplied as integers"
    answers: dict[str, tuple[AnsweredBy, ...]] = {}
    for row in rows():
        if "." in row.key:
            quantised = QUANTIZATION in row.needs
            notes = {generated: f"{note}; {integers}" if quantised else note} | ({of_a_batch: integers} if quantised else {})
            answers[row.key] = tuple(
                AnsweredBy(PANEL, row.key, of=partial(pooled, of, row.key), note=said) for of, said in notes.items()
            )
    found: dict[str, AnsweredBy | tuple[AnsweredBy, ...]] = {f"table11.{key}.speedup_pct": one for key, one in answers.items()}
    found |= {f"section3.{key}.speedup_pct": answers[key] for key in ("isolated.halting", "isolated.fusion")}
    found |= dict.fromkeys(("figure6.joint.speedup_pct", "section3.ablation.speedup_pct"), answers[JOINT])
    note = "halting's or fusion's, a batch with the tokens after its prompts"
    largest = AnsweredBy(PANEL, "isolated.halting", of=_largest, note=note)
    return found | {"e7.latency.latency_saved_ms": answers["isolated.quantization"], "section3.largest.lead_points": largest}


def _or_simulated(cell: Cell | str) -> Cell:
    """A cell of a time, or `simulated`."""
    return lambda row: (SIMULATED,) if row.get("method") == SIMULATED else filled(cell, row)


def _time(value: str, floor: str) -> Cell:
    return _or_simulated(lambda row: time_cell(number(row, value), number(row, floor)))


@artefact(rows, answers=_answers())
def table_deployment(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table deployment: one prompt at a time, greedy decoding, time to the first token and per token (App. J, deployment simulation)."""
    found, of = measured(outcomes, _served), {one.row.key: one for one in outcomes}
    for row in found:
        if (batch := pooled(of_a_batch, row["key"], of)) is not None:
            row |= {"batch_saved_pct": batch.value, "batch_noise_floor_pct": batch.floor}
    columns = (
        Column("", "technique", "{technique}", align="left"),
        Column("ms to the first token", "median", _or_simulated("{first_token_ms:.1f}\n± {first_token_iqr_ms:0.5*.1f}")),
        *(Column("ms per token after it", percentile, f"{{{percentile}_ms:.1f}}") for percentile in ("p50", "p95", "p99")),
        Column("per token", "saved %", _time("saved_pct", comparison.FLOOR)),
        Column("a batch", "saved %", _time("batch_saved_pct", "batch_noise_floor_pct"), expendable=2),
        Column("", "tokens/s", "{tokens_per_s:.1f}"),
        Column("", "in budget %", "{within_budget_pct:.1f}", expendable=1),
    )
    served = [one for record in by_key(outcomes).values() if (one := record.found("deployment", DeploymentResult))]
    requests = sorted({(one.prompt_tokens, one.new_tokens, one.budget_ms) for one in served})
    said = "; ".join(f"a prompt of {prompt} tokens, {new} new ones, {budget:g} ms a token" for prompt, new, budget in requests)
    legend = (
        f"One request at a time through generate(), greedy: {said}. Run and dense take turns; the dense row is the dense record's own.",
        "saved: mean time per token, in percent of dense inference, round by round. A batch: the time of several prompts with the tokens after "
        f"them, all scored at once, with a noise floor of its own. {comparison.NOISE}",
        "p99: - where fewer than 100 tokens were timed. tokens/s: over the whole call, prompt included; it is not paired with dense, `saved` is.",
        "in budget: share of tokens made within that many ms. ±: half of the distance between the quartiles.",
    )
    floors = [row["batch_noise_floor_pct"] for row in found if "batch_noise_floor_pct" in row]
    of_batch = (f"Noise floor of a batch's time: {min(floors):.1f} to {max(floors):.1f}%, pooled likewise.",) if floors else ()
    notes = (*comparison.noise_note(found, "a token's time"), *of_batch, *provenance.notes(outcomes))
    panel = Panel(PANEL, "Batch 1, greedy", columns, notes)
    return Table(name, "Deployment: one request at a time", pd.DataFrame(found), (panel,), legend)


# --- memory -----------------------------------------------------------------------------------------------------------------------
def _memory(record: Record) -> Estimate:
    return within(-_stored(record)["peak_tensor_saved_pct"])


def _stored(record: Record) -> dict[str, Any]:
    found = record.measured("memory", MemoryResult)
    layers = found.kv_bytes_by_layer
    resident, dense = sum(layers.resident), sum(layers.dense)
    tensors, dense_tensors = found.peak_tensor_bytes, found.dense_peak_tensor_bytes
    if tensors is None or dense_tensors is None:  # on a GPU
        tensors, dense_tensors = found.peak_memory_bytes, found.dense_peak_memory_bytes
    row = {
        **{"kv_billed_bytes": sum(layers.billed), "kv_resident_bytes": resident, "kv_dense_bytes": dense},
        **{"peak_tensor_bytes": tensors, "dense_peak_tensor_bytes": dense_tensors},
        **{"peak_memory_bytes": found.peak_memory_bytes, "peak_memory_method": found.peak_memory_method},
    }
    if record.dense_fingerprint is not None and dense:
        row |= {"kv_saved_pct": 100 * (1 - resident / dense), "paper_saved_pct": 100 * sum(layers.paper_saved) / dense}
        row["kv_last_layer_saved_pct"] = 100 * (1 - layers.resident[-1] / layers.dense[-1])
        row["peak_tensor_saved_pct"] = 100 * (1 - tensors / dense_tensors)
    return row


def _cache_added(outcomes: Mapping[str, Outcome], key: str, base: str) -> Estimate | None:
    """K/V bytes that the cache of one row holds more than that of another, percent."""
    found = [one.found("memory", MemoryResult) if (one := outcomes[name].record) is not None else None for name in (key, base)]
    ours, theirs = (sum(one.kv_bytes_by_layer.resident) if one is not None else 0 for one in found)
    return within(100 * (ours / theirs - 1)) if ours and theirs else None


_PEAK, _CACHE = "most bytes in tensors during a batch, exact", "K/V bytes in the cache"
_MEMORY = {
    "b3.memory.memory_added_pct": AnsweredBy(PANEL, "isolated.halting", of_record=_memory, note=f"halting alone; {_PEAK}"),
    "section2.fusion_memory.memory_added_pct": AnsweredBy(PANEL, "isolated.fusion", of_record=_memory, note=f"fusion alone; {_PEAK}"),
    "section2.kv_memory.memory_added_pct": AnsweredBy(
        *(PANEL, "cumulative.kv_skipping"), of=partial(_cache_added, key="cumulative.kv_skipping", base="cumulative.halting"),
        note=f"halted tokens without K/V, beyond halting alone; {_CACHE}",
    ),
    "section3.quantization_memory.memory_added_pct": AnsweredBy(
        *(PANEL, "isolated.quantization"), of=partial(_cache_added, key="isolated.quantization", base="baseline"),
        note=f"quantization alone; {_CACHE}; the integer products of a CPU need more memory at their peak (table memory)",
    ),
}  # fmt: skip


@artefact(rows, answers=_MEMORY)
def table_memory(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table memory: KV cache and peak memory of a batch, and the ΔM of App. J beside what is really saved."""
    columns = (
        Column("", "technique", "{technique}", align="left"),
        Column("KV cache", "billed", "{kv_billed_bytes:amount}B"),
        Column("KV cache", "resident", "{kv_resident_bytes:amount}B"),
        Column("KV cache", "saved %", "{kv_saved_pct:+.1f}"),
        Column("KV cache", "ΔM %", "{paper_saved_pct:+.1f}"),
        Column("KV cache", "last layer %", "{kv_last_layer_saved_pct:+.1f}", expendable=1),
        Column("peak of tensors", "bytes", "{peak_tensor_bytes:amount}B"),
        Column("peak of tensors", "saved %", "{peak_tensor_saved_pct:+.1f}"),
        Column("", "peak of the process", "{peak_memory_bytes:amount}B", expendable=2),
    )
    legend = (
        "KV cache of one batch after its last token. billed: bytes that the decisions ask for; resident: bytes in the tensors; "
        "saved: of resident bytes, in percent of dense.",
        "last layer %: the same of the last layer alone.",
        "ΔM: what App. J's formula says is saved, N_halted · d_kv · h · 2 summed over layers. The formula leaves out two "
        "things: halted tokens that keep their K/V, and entries that are skipped, merged or stored in another format.",
        "peak of tensors: the most bytes that torch's allocator held during the batch, above what it held before (the weights); "
        "exact. On a GPU it is the allocator's own peak, weights included. peak of the process: says little about one batch, "
        "because a process keeps memory that it once had.",
    )
    panel = Panel(PANEL, "One batch: its prompts and the tokens after them", columns, provenance.notes(outcomes))
    return Table(name, "Memory: KV cache and peaks", pd.DataFrame(measured(outcomes, _stored)), (panel,), legend)
