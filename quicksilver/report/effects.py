"""What one record says against dense inference, as one row of numbers, and how such numbers are written.

Every difference is paired: the same windows, the same machine, one run. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quicksilver.harness.record import Record
from quicksilver.harness.stats import PairedInterval, paired_records
from quicksilver.report.tables import Lines

LEDGERS = ("executed", "nominal", "paper", "prompt_executed")
NO_VALUE = "-"


def effects(record: Record, dense: Record) -> dict[str, Any]:
    """Everything a table prints about `record` against `dense`, the record of the same run without modules.

    Speedup and FLOPs saved are percentage decreases (as in the paper: 25 means that a quarter of it is gone), Δppl is perplexity
    minus dense perplexity with its 95% paired bootstrap interval, in perplexity and in percent. What was not measured is absent.

    Raises:
        ConfigError: the two records do not hold the same windows, or too few for an interval.
    """
    row: dict[str, Any] = {
        "record": record.fingerprint,
        "dense_record": dense.fingerprint,
        "lookahead": bool(record["lookahead"]),
        "execution": record["execution"],
        "tokens": record["tokens"],
        "windows": record["data"]["windows"],
        "ppl": record["ppl"],
        "bits_per_byte": record.get("bits_per_byte"),
        "dense_ppl": dense["ppl"],
        "audit_max_abs_logit_difference": (record.get("audit") or {}).get("max_abs_logit_difference"),
        "audit_masked_max_abs_logit_difference": (record.get("audit") or {}).get("masked_max_abs_logit_difference"),
    }
    if record.fingerprint != dense.fingerprint:
        row |= interval("delta_ppl", paired_records(record, dense))
        if record.get("null"):
            row["null_ppl"] = record["null"]["ppl"]
            row["null_kind"] = record["null"]["kind"]
            row |= interval("null_delta_ppl", paired_records(record, dense, column="null_nll_nats"))
            row |= interval("versus_null_ppl", paired_records(record, record, baseline_column="null_nll_nats"))
    for ledger in LEDGERS:
        row[f"{ledger}_flops"] = record.get(f"{ledger}_flops")
        row[f"{ledger}_flops_saved_pct"] = saved_pct(record, f"{ledger}_flops")
    row["kv_bytes_saved_pct"] = saved_pct(record, "kv_bytes_resident", "dense_kv_bytes")
    # A latency of masked execution says nothing: everything is computed there, then undone (docs/design.md §4).
    if record["execution"] == "compact":
        for phase in ("", "prompt_"):
            if record.get(f"{phase}latency_ms"):
                # Round by round against the dense model of the same run: neighbours in time share the machine's mood.
                ratio = record[f"{phase}latency_ratio"]
                row[f"{phase}latency_ms"] = record[f"{phase}latency_ms"]["median"]
                row[f"{phase}speedup_pct"] = 100 * (1 - ratio["median"])
                row[f"{phase}speedup_pct_low"], row[f"{phase}speedup_pct_high"] = (
                    100 * (1 - ratio["high"]),
                    100 * (1 - ratio["low"]),
                )
                row[f"{phase}noise_floor_pct"] = record[f"{phase}noise_floor_pct"]
    return {key: value for key, value in row.items() if value is not None}


def interval(name: str, paired: PairedInterval) -> dict[str, float]:
    """A difference as six numbers: in perplexity and in percent, each with the ends of its interval."""
    return {
        name: paired.difference,
        f"{name}_low": paired.low,
        f"{name}_high": paired.high,
        f"{name}_pct": paired.relative_pct,
        f"{name}_pct_low": paired.relative_pct_low,
        f"{name}_pct_high": paired.relative_pct_high,
    }


def saved_pct(record: Record, key: str, dense_key: str | None = None) -> float | None:
    """Percent of dense inference that is gone; None where the run has no such quantity (no prompt under `all`, no cache)."""
    value, dense = record.get(key), record.get(dense_key or f"dense_{key}")
    return 100 * (1 - value / dense) if value is not None and dense else None


def number(row: Mapping[str, Any], key: str) -> float | None:
    """The number under `key`; None where the row has none (a frame fills such holes with NaN)."""
    value = row.get(key)
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else float(value)


def signed(value: float | None, decimals: int = 1) -> str:
    """`+1.2`, `-0.3`, `0.0` without a sign; `-` for None."""
    if value is None:
        return NO_VALUE
    text = f"{value:+.{decimals}f}"
    return text[1:] if float(text) == 0 else text


def amount(value: float) -> str:
    """Three digits and the prefix of a power of 1000: `2.06T`."""
    value = float(f"{value:.3g}")
    digits = 0 if value < 1000 else min(5, int(math.log10(value)) // 3)
    return f"{value / 1000**digits:.3g}{'kMGTP'[digits - 1] if digits else ''}"


def interval_cell(row: Mapping[str, Any], name: str) -> Lines:
    """Two lines, `+0.52 [+0.40 +0.64]` in perplexity and `+5.2% [+4.0 +6.4]` in percent."""
    lines = []
    for key, unit in ((name, ""), (f"{name}_pct", "%")):
        values = [number(row, name_) for name_ in (key, f"{key}_low", f"{key}_high")]
        if values[0] is None:
            return (NO_VALUE,)
        size = max(abs(value) for value in values if value is not None)
        decimals = 3 if size < 0.1 else 2 if size < 10 else 1 if size < 100 else 0
        middle, low, high = (signed(value, decimals) for value in values)
        lines.append(f"{middle}{unit} [{low} {high}]")
    return tuple(lines)


def speedup_cell(row: Mapping[str, Any], key: str = "speedup_pct") -> Lines:
    """The speedup over the A/A noise floor; a difference that the same model shows against itself is no difference."""
    return refused(number(row, key), number(row, key.replace("speedup_pct", "noise_floor_pct")))


def refused(value: float | None, noise: float | None) -> Lines:
    """A difference of times as a cell: `within` where it is no larger than the noise, which is printed below it either way."""
    if value is None:
        return (NO_VALUE,)
    if noise is None:
        return (signed(value), "no floor")
    return ("within" if abs(value) <= noise else signed(value), f"noise {noise:.1f}")


def versus_null_cell(row: Mapping[str, Any]) -> Lines:
    """Whether choosing these tokens beat choosing any others at the same budget, by the paired interval of the difference."""
    low, high = number(row, "versus_null_ppl_low"), number(row, "versus_null_ppl_high")
    if low is None or high is None:
        return (NO_VALUE,)
    return ("better",) if high < 0 else ("worse",) if low > 0 else ("no diff.",)


def audit_cell(row: Mapping[str, Any]) -> Lines:
    """Largest logit movement when the tokens after a probe are replaced."""
    value = number(row, "audit_max_abs_logit_difference")
    masked = number(row, "audit_masked_max_abs_logit_difference")
    if value is None:
        return (NO_VALUE,)
    shown = f"{value:.0e}" if value else "0"
    return (shown,) if masked is None else (f"{masked:.0e}" if masked else "0", f"compact {shown}")
