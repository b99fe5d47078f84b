"""How numbers of a row are written: signs, intervals, and what cannot be told from noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quicksilver.report.table import Lines

NO_VALUE = "-"
FALSE_DISCOVERIES = 0.05  # among the verdicts of a table


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


def kl_cell(row: Mapping[str, Any]) -> Lines:
    """`2.55` and below it `[2.31 2.80]`: KL to the dense model in hundredths of a nat a token."""
    values = [number(row, f"kl_nats{end}") for end in ("", "_low", "_high")]
    if values[0] is None:
        return (NO_VALUE,)
    middle, low, high = (f"{100 * value:.3g}" if value is not None else NO_VALUE for value in values)
    return middle, f"[{low} {high}]"


def speedup_cell(row: Mapping[str, Any], key: str = "speedup_pct") -> Lines:
    """The speedup, or `within` where it is no larger than the A/A noise floor, which stands below the panel (`comparison.noise`)."""
    floor = number(row, key.replace("speedup_pct", "noise_floor_pct"))
    return time_cell(number(row, key), floor)


def time_cell(value: float | None, noise: float | None) -> Lines:
    """A difference of times as a cell: `within` where it is no larger than the noise floor, which stands below the panel."""
    found = time_difference_cell(value, noise)
    return found if noise is None else found[:1]


def time_difference_cell(value: float | None, noise: float | None) -> Lines:
    """A difference of times as a cell: `within` where it is no larger than the noise, which is printed below it either way."""
    if value is None:
        return (NO_VALUE,)
    if noise is None:
        return (signed(value), "no floor")
    return ("within" if abs(value) <= noise else signed(value), f"noise {noise:.1f}")


def versus_null_cell(row: Mapping[str, Any]) -> Lines:
    """Whether choosing these tokens beat choosing any others at the same budget, by the paired interval of the difference; where the table
    has tests of all its rows, also by the adjusted p value."""
    low, high = number(row, "versus_null_ppl_low"), number(row, "versus_null_ppl_high")
    if low is None or high is None:
        return (NO_VALUE,)
    p = number(row, "versus_null_p_adjusted")
    if p is not None and p > FALSE_DISCOVERIES:
        return ("no diff.",)
    return ("better",) if high < 0 else ("worse",) if low > 0 else ("no diff.",)


def audit_cell(row: Mapping[str, Any]) -> Lines:
    """Largest logit movement when the tokens after a probe are replaced."""
    value = number(row, "audit_max_abs_logit_difference")
    masked = number(row, "audit_masked_max_abs_logit_difference")
    if value is None:
        return (NO_VALUE,)
    shown = f"{value:.0e}" if value else "0"
    return (shown,) if masked is None else (f"{masked:.0e}" if masked else "0", f"compact {shown}")
