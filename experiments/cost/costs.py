"""What a run costs in time, energy and memory, from records of `measure=cost`; the tables of deployment and memory.

Table 7, Figure 16, the waterfall and these tables read the same nine records: dense inference, the steps of the ablation, the attention budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from quicksilver.measure.components import ComponentsResult
from quicksilver.measure.deployment import DeploymentResult
from quicksilver.measure.energy import EnergyResult
from quicksilver.measure.measurement import Quartiles
from quicksilver.measure.memory import MemoryResult
from quicksilver.records.record import Record
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.table import Cell, Column, Panel, Table, filled, number, time_cell

from ..ablation.techniques import row_of, steps

PANEL = "continuation"
# Eight windows: quality stands in Table 11, over all of them.
OVERRIDES = (f"protocol={PANEL}", "measure=cost", "dataset.windows=8")
DENSE, JOINT, BUDGET = "baseline", "cumulative.quantization", "budget"
BELOW = "below resolution"
SIMULATED = "simulated"  # float products stand in for the quantised ones: times and joules say nothing


def rows(*keys: str) -> list[Row]:
    """Dense inference, every mechanism alone, one after another, and the attention budget; or those of them in `keys`."""
    found = [
        row_of(PANEL, "", DENSE, "Dense baseline", "", *OVERRIDES),
        *steps(PANEL, *OVERRIDES),
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


def time_saved(ratio: Quartiles, floor_pct: float) -> Estimate:
    """A ratio of times as percent saved, between its quartiles."""
    value, low, high = comparison.time_saved("", ratio).values()
    return Estimate(value, low, high, floor_pct)


def or_simulated(cell: Cell | str) -> Cell:
    """A cell of a time or of joules, or `simulated`."""
    return lambda row: (SIMULATED,) if row.get("method") == SIMULATED else filled(cell, row)


def components(record: Record) -> ComponentsResult:
    """The batch taken apart."""
    return record.measured("components", ComponentsResult)


def energy(record: Record) -> EnergyResult:
    """Joules."""
    return record.measured("energy", EnergyResult)


# --- energy -----------------------------------------------------------------------------------------------------------------------


def method(record: Record) -> str:
    """RAPL, NVML …, or `estimate` where there was no counter: one word beside every number."""
    found = energy(record)
    return found.method if found.measured else "estimate"


def joules_saved(record: Record) -> tuple[float, float] | None:
    """Percent of dense net joules that are gone, and the resolution of that in percent; None: no net joules of one of the two."""
    found = energy(record)
    dense, run = found.dense.net_j_per_token, None if found.run is None else found.run.net_j_per_token
    if run is None or isinstance(dense, str) or isinstance(run, str):
        return None
    resolution = found.dense.resolution_j_per_token + found.ours.resolution_j_per_token
    return 100 * (1 - run / dense), 100 * resolution / dense


def energy_note(outcomes: Sequence[Outcome]) -> str:
    """How joules were measured, and what a gram is made of."""
    found = next((one for record in by_key(outcomes).values() if (one := record.found("energy", EnergyResult))), None)
    if found is None:
        return "Energy: not measured."
    how = (
        f"{found.method} ({'a counter' if found.measured else 'an estimate: it follows the clock and knows nothing more'}); "
        f"{found.rest_w:.3g} W at rest subtracted; {found.grid_kg_per_kwh:.3g} kg CO₂ per kWh ({found.country_iso_code})"
    )
    return f"Energy: {how}. Joules per token processed come first; grams are joules times the grid factor."


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


def _generated(record: Record) -> Estimate | None:
    found = record.measured("deployment", DeploymentResult)
    return None if found.per_token_ratio is None else time_saved(found.per_token_ratio, found.noise_floor_pct)


def _answers() -> dict[str, AnsweredBy]:
    """Time as the paper takes it (3.1, G.5), beside that of whole passes in Table 11."""
    note = "tokens generated one by one, the prompt's time left out"
    found = {key: AnsweredBy(PANEL, key, of_record=_generated, note=note) for key in (row.key for row in rows()) if "." in key}
    answers = {f"table11.{key}.speedup_pct": answer for key, answer in found.items()}
    answers |= {f"section3.{key}.speedup_pct": found[key] for key in ("isolated.halting", "isolated.fusion")}
    return answers


@artefact(rows, answers=_answers())
def table_deployment(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table deployment: one prompt at a time, greedy decoding, time to the first token and per token (App. J, deployment simulation)."""
    found = measured(outcomes, _served)
    columns = (
        Column("", "technique", "{technique}", align="left"),
        Column("ms to the first token", "median", or_simulated("{first_token_ms:.1f}\n± {first_token_iqr_ms:0.5*.1f}")),
        *(Column("ms per token after it", percentile, f"{{{percentile}_ms:.1f}}") for percentile in ("p50", "p95", "p99")),
        Column(
            "per token", "saved %", or_simulated(lambda row: time_cell(number(row, "saved_pct"), number(row, comparison.FLOOR)))
        ),
        Column("", "tokens/s", "{tokens_per_s:.1f}"),
        Column("", "in budget %", "{within_budget_pct:.1f}", expendable=1),
    )
    served = [one for record in by_key(outcomes).values() if (one := record.found("deployment", DeploymentResult))]
    requests = {(one.prompt_tokens, one.new_tokens, one.budget_ms) for one in served}
    said = "; ".join(
        f"a prompt of {prompt} tokens, {new} new ones, {budget:g} ms a token" for prompt, new, budget in sorted(requests)
    )
    legend = (
        f"One request at a time through generate(), greedy: {said}. Run and dense take turns; the dense row is the dense record's own.",
        f"saved: mean time per token, in percent of dense inference, round by round. {comparison.NOISE} simulated: no time.",
        "p99: - where fewer than 100 tokens were timed. tokens/s: over the whole call, prompt included.",
    )
    notes = (*comparison.noise_note(found, "a token's time"), *provenance.notes(outcomes))
    panel = Panel(PANEL, "Batch 1, greedy", columns, notes)
    return Table(name, "Deployment: one request at a time", pd.DataFrame(found), (panel,), legend)


# --- memory -----------------------------------------------------------------------------------------------------------------------


def _stored(record: Record) -> dict[str, Any]:
    found = record.measured("memory", MemoryResult)
    layers = found.kv_bytes_by_layer
    dense = sum(layers.dense)
    tensors, dense_tensors = found.peak_tensor_bytes, found.dense_peak_tensor_bytes
    if tensors is None or dense_tensors is None:  # on a GPU
        tensors, dense_tensors = found.peak_memory_bytes, found.dense_peak_memory_bytes
    row = {
        **{"kv_billed_bytes": sum(layers.billed), "kv_resident_bytes": sum(layers.resident), "kv_dense_bytes": dense},
        **{"peak_tensor_bytes": tensors, "dense_peak_tensor_bytes": dense_tensors},
        **{"peak_memory_bytes": found.peak_memory_bytes, "peak_memory_method": found.peak_memory_method},
    }
    if record.dense_fingerprint is not None and dense:
        row["kv_saved_pct"] = 100 * (1 - sum(layers.resident) / dense)
        row["paper_saved_pct"] = 100 * sum(layers.paper_saved) / dense
        row["kv_last_layer_saved_pct"] = 100 * (1 - layers.resident[-1] / layers.dense[-1])
        row["peak_tensor_saved_pct"] = 100 * (1 - tensors / dense_tensors)
    return row


@artefact(rows)
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
        "ΔM: what App. J's formula says is saved, N_halted · d_kv · h · 2 summed over layers. The formula leaves out two "
        "things: halted tokens that keep their K/V, and entries that are skipped, merged or stored in another format.",
        "peak of tensors: the most bytes that torch's allocator held during the batch, above what it held before (the weights); "
        "exact. On a GPU it is the allocator's own peak, weights included. peak of the process: says little about one batch, "
        "because a process keeps memory that it once had.",
    )
    panel = Panel(PANEL, "One batch: its prompts and the tokens after them", columns, provenance.notes(outcomes))
    return Table(name, "Memory: KV cache and peaks", pd.DataFrame(measured(outcomes, _stored)), (panel,), legend)
