"""Cells that several tables of experiments share, and columns of a value with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quicksilver.report.table import ENDS, NO_VALUE, Lines, number, numbers

Cell = Callable[[Mapping[str, Any]], Lines]


def words(column: str) -> Cell:
    """The text of a column."""
    return lambda row: (str(row[column]),)


def plain(column: str, decimals: int = 1) -> Cell:
    """A number without a sign."""
    return lambda row: (NO_VALUE if (value := number(row, column)) is None else f"{value:,.{decimals}f}",)


def with_ends(column: str, decimals: int = 1, *, sign: bool = False) -> Cell:
    """A number over its interval, which stands in `_low` and `_high`."""

    def cell(row: Mapping[str, Any]) -> Lines:
        found = [f"{end:{'+' if sign else ''}.{decimals}f}" for end in numbers(row, column) if end is not None]
        return (found[0], f"[{found[1]} {found[2]}]") if found else (NO_VALUE,)

    return cell


def ends(column: str, interval: Any, times: float = 1.0) -> dict[str, float]:
    """Three columns of anything with `value`, `low` and `high`; `times=100` makes shares percentages."""
    return {f"{column}{end}": times * getattr(interval, end.lstrip("_") or "value") for end in ENDS}
