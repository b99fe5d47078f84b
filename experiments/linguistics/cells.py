"""Cells that the tables on gold annotation share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quicksilver.report.table import NO_VALUE, Lines, number

Cell = Callable[[Mapping[str, Any]], Lines]


def words(column: str) -> Cell:
    """The text of a column."""
    return lambda row: (str(row[column]),)


def plain(column: str, decimals: int = 1) -> Cell:
    """A number without a sign."""

    def cell(row: Mapping[str, Any]) -> Lines:
        value = number(row, column)
        return (NO_VALUE if value is None else f"{value:,.{decimals}f}",)

    return cell


def with_ends(column: str, *, sign: bool) -> Cell:
    """A number over its interval, which stands in `_low` and `_high`."""

    def cell(row: Mapping[str, Any]) -> Lines:
        ends = [number(row, f"{column}{end}") for end in ("", "_low", "_high")]
        if ends[0] is None:
            return (NO_VALUE,)
        value, low, high = (f"{end:{'+' if sign else ''}.1f}" for end in ends)
        return (value, f"[{low} {high}]")

    return cell


def percent(name: str, value: float, low: float, high: float) -> dict[str, float]:
    """A share with its ends as three columns, in percent."""
    return {name: 100 * value, f"{name}_low": 100 * low, f"{name}_high": 100 * high}
