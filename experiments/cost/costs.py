"""What a run costs in time, energy and memory, from records of `measure=cost`: Table 7, Figure 16, the waterfall and the deployment table.

All of them read the same nine records: dense inference, the steps of the ablation, and the attention budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.measure.components import KERNELS, ComponentsResult
from quicksilver.measure.energy import EnergyResult
from quicksilver.records.record import Record
from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import NO_VALUE, Lines, number, signed, time_cell

from ..ablation.techniques import steps

PANEL = "continuation"
# Eight windows: quality stands in Table 11, over all of them.
OVERRIDES = (f"protocol={PANEL}", "measure=cost", "dataset.windows=8")
DENSE, JOINT, BUDGET = "baseline", "cumulative.quantization", "budget"
COMPONENTS = {  # as `quicksilver.measure.components` names them -> what is printed
    "embedding": "Token embedding",
    "attention": "Self-attention",
    "mlp": "Feed-forward network",
    "kv_write": "KV cache write",
    "quantization": "Quantization overhead",
    "fusion": "Fusion: deciding, merging",
    "decisions": "Signals, other decisions",
    "gather_scatter": "Gather and scatter",
    "runtime": "Masks, bookkeeping",
    "norms": "Norms, residual sums",
    "output_head": "Output head",
    "model": "Rest of the model",
}
BELOW = "below resolution"


def rows(keys: Sequence[str] | None = None) -> list[Row]:
    """Dense inference, every mechanism alone, one after another, and the attention budget; or those of them in `keys`."""
    found = [Row(PANEL, "", DENSE, "Dense baseline", (*OVERRIDES, "modules=[]"))]
    for section, key, technique, needs, overrides in steps():
        found.append(Row(PANEL, section, key, technique, (*OVERRIDES, *overrides), needs))
    attention = (*OVERRIDES, "modules=[halting_attention]")
    found.append(Row(PANEL, "By attention", BUDGET, "Halting, least attention", attention, ("halting_attention",)))
    return found if keys is None else [row for row in found if row.key in keys]


def by_key(outcomes: Sequence[Outcome]) -> dict[str, Record]:
    """The records that there are, by the key of their row."""
    return {outcome.row.key: outcome.record for outcome in outcomes if outcome.record is not None}


def components(record: Record) -> ComponentsResult:
    """The batch taken apart."""
    return record.measured("components", ComponentsResult)


def energy(record: Record) -> EnergyResult:
    """Joules."""
    return record.measured("energy", EnergyResult)


# --- time -----------------------------------------------------------------------------------------------------------------------


def component_ms(record: Record, who: str, component: str) -> tuple[float, float] | None:
    """Median and interquartile range of a component of `who` (dense or run); None where it does not occur."""
    breakdown = components(record).dense if who == "dense" else components(record).run
    found = None if breakdown is None else breakdown.components.get(component)
    return None if found is None else (found.median_ms, found.iqr_ms)


def component_saved(record: Record, component: str, floor_pct: float | None = None) -> tuple[float, float] | None:
    """Percent of a component's dense time that is gone, and how much of that is noise: the A/A floor of the whole pass, or half of the
    two interquartile ranges where that is more. None where dense inference has no such component.

    Args:
        floor_pct: the floor, pooled with that of other runs; None: of this run alone.
    """
    dense, run = component_ms(record, "dense", component), component_ms(record, "run", component)
    if dense is None or run is None or not dense[0]:
        return None
    spread = 100 * (dense[1] + run[1]) / 2 / dense[0]
    floor = components(record).noise_floor_pct if floor_pct is None else floor_pct
    return 100 * (1 - run[0] / dense[0]), max(floor, spread)


def kernel_saved_pct(record: Record) -> float | None:
    """Percent gone of the time that the model's own parts take, whatever happens around them."""
    total = {}
    for who in ("dense", "run"):
        parts = [component_ms(record, who, component) for component in KERNELS]
        total[who] = sum(part[0] for part in parts if part is not None)
    return 100 * (1 - total["run"] / total["dense"]) if total["run"] else None


# --- energy ---------------------------------------------------------------------------------------------------------------------


def method(record: Record) -> str:
    """RAPL, NVML …, or `estimate` where there was no counter: one word beside every number."""
    found = energy(record)
    return found.method if found.measured else "estimate"


def j_per_token(record: Record, who: str) -> float | None:
    """Net joules per token of `who` (dense or run); None: below the resolution, or there is no such run."""
    found = energy(record).dense if who == "dense" else energy(record).run
    return None if found is None or isinstance(found.net_j_per_token, str) else found.net_j_per_token


def joules_saved(record: Record) -> tuple[float, float] | None:
    """Percent of dense net joules that are gone, and the resolution of that in percent; None: no net joules of one of the two."""
    dense, run = j_per_token(record, "dense"), j_per_token(record, "run")
    if dense is None or run is None:
        return None
    found = energy(record)
    resolution = found.dense.resolution_j_per_token + found.ours.resolution_j_per_token
    return 100 * (1 - run / dense), 100 * resolution / dense


def energy_note(outcomes: Sequence[Outcome]) -> str:
    """How joules were measured, and what a gram is made of."""
    found = next((one for outcome in outcomes if outcome.record and (one := outcome.record.found("energy", EnergyResult))), None)
    if found is None:
        return "Energy: not measured."
    how = (
        f"{found.method} ({'a counter' if found.measured else 'an estimate: it follows the clock and knows nothing more'}); "
        f"{found.rest_w:.3g} W at rest subtracted; {found.grid_kg_per_kwh:.3g} kg CO₂ per kWh ({found.country_iso_code})"
    )
    return f"Energy: {how}. Joules per token processed come first; grams are joules times the grid factor."


def joules(value: float) -> str:
    """`2.48 mJ`."""
    for scale, unit in ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.2g} J"


# --- the waterfall --------------------------------------------------------------------------------------------------------------

STAGES = {  # column of the frame -> what the stage is
    "nominal_saved_pct": "nominal FLOPs",
    "executed_saved_pct": "executed FLOPs",
    "kernel_saved_pct": "kernel time",
    "wall_saved_pct": "wall clock",
    "joules_saved_pct": "joules",
}


def waterfall(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row a run: percent of dense inference saved at each stage, what deciding alone costs, and the realization ratio.

    All of the prompt, but for joules, which are of the whole batch.
    """
    found = []
    for outcome in outcomes:
        row: dict[str, Any] = {
            **{"panel": outcome.row.panel, "section": outcome.row.section, "key": outcome.row.key},
            **{"technique": outcome.row.technique, "status": outcome.reason or comparison.MEASURED},
        }
        if outcome.record is not None and outcome.record.dense_fingerprint is not None:
            row |= _stages(outcome.record)
        found.append(row)
    comparison.pool_noise(found)
    for row in found:
        if comparison.FLOOR in row:
            row["realization"] = realization(row["wall_saved_pct"], row["executed_saved_pct"], row[comparison.FLOOR])
    columns = ["panel", "section", "key", "technique", "status", *STAGES, *_BESIDE, "method", "record"]
    return pd.DataFrame(found, columns=columns)


_BESIDE = (
    *(
        "policy_pct",
        "policy_pct_low",
        "policy_pct_high",
        "wall_saved_pct_low",
        "wall_saved_pct_high",
        comparison.FLOOR,
        comparison.POOLED,
    ),
    *("joules_resolution_pct", "realization"),
)


def _stages(record: Record) -> dict[str, Any]:
    found = components(record)
    policy, wall, executed = found.decide_ratio, found.run_ratio, record.flops_saved_pct("prompt_executed")
    assert policy is not None and wall is not None and executed is not None  # noqa: PT018  (of a run with modules, under `continuation`)
    joules_and_resolution = joules_saved(record)
    row = {
        "nominal_saved_pct": record.flops_saved_pct("prompt_nominal"),
        "executed_saved_pct": executed,
        "kernel_saved_pct": kernel_saved_pct(record),
        "wall_saved_pct": 100 * (1 - wall.median),
        "wall_saved_pct_low": 100 * (1 - wall.high),
        "wall_saved_pct_high": 100 * (1 - wall.low),
        "policy_pct": 100 * (policy.median - 1),
        "policy_pct_low": 100 * (policy.low - 1),
        "policy_pct_high": 100 * (policy.high - 1),
        comparison.FLOOR: found.noise_floor_pct,
        "method": method(record),
        "record": record.fingerprint,
    }
    if joules_and_resolution is not None:
        row["joules_saved_pct"], row["joules_resolution_pct"] = joules_and_resolution
    return row


def realization(time_saved_pct: float, flops_saved_pct: float, noise_pct: float) -> float | None:
    """Time saved over executed FLOPs saved. None where either is no larger than the noise of the clock (a ratio of noise is no ratio), and
    where no operation was saved: then there is nothing to realize."""
    if abs(time_saved_pct) <= noise_pct or flops_saved_pct <= noise_pct:
        return None
    return time_saved_pct / flops_saved_pct


def stage_cell(row: Mapping[str, Any], stage: str) -> Lines:
    """A stage of a waterfall as a cell; times and joules with what they cannot be told from."""
    value = number(row, stage)
    if stage == "joules_saved_pct":
        if row["method"] is None or (isinstance(row["method"], float)):
            return (NO_VALUE,)
        resolution = number(row, "joules_resolution_pct")
        if value is None or resolution is None or abs(value) <= resolution:
            return (BELOW, row["method"])
        return (signed(value), row["method"])
    if stage in ("kernel_saved_pct", "wall_saved_pct"):
        return time_cell(value, number(row, comparison.FLOOR))
    return (signed(value),)
