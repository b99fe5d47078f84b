"""A panel of a written table, laid out for a page: cells as HTML, headings over several columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup, escape

from quicksilver.report.written import Lines, PrintedPanel

_FEWEST_LEFT = 2  # the name of the row and one more are not a table
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Line:
    """One row: its cells, or the name of the section that begins here."""

    cells: tuple[Markup, ...]
    section: Markup | None = None


@dataclass(frozen=True)
class Grid:
    """One table.

    Attributes:
        groups: headings over neighbouring columns with the number of them, and whether they are `reported`; empty text for none.
        headers: heading of each column.
        right: whether a column is aligned to the right.
        reported: whether a column has the paper's numbers and may be folded where there is no room, so that the measured ones stay in view.
        lines: the rows.
    """

    groups: tuple[tuple[Markup, int, bool], ...]
    headers: tuple[Markup, ...]
    right: tuple[bool, ...]
    reported: tuple[bool, ...]
    lines: tuple[Line, ...]


def grid(panel: PrintedPanel) -> Grid:
    """The panel's columns and rows."""
    reported = _reported(panel)
    groups, first = [], 0
    for group, run in groupby(column.group for column in panel.columns):
        groups.append((prose(group), span := len(list(run)), reported[first]))
        first += span
    lines = []
    for section in panel.sections:
        if section.title:
            lines.append(Line((), prose(section.title)))
        lines += [Line(tuple(map(_cell, row.cells))) for row in section.rows]
    right = tuple(column.align == "right" for column in panel.columns)
    headers = tuple(prose(column.header) for column in panel.columns)
    return Grid(tuple(groups), headers, right, reported, tuple(lines))


def _reported(panel: PrintedPanel) -> tuple[bool, ...]:
    """Columns under a heading such as `paper reports` or `the paper`; none where hardly another column would be left."""
    found = tuple("paper" in column.group.split() for column in panel.columns)
    return found if len(found) - sum(found) > _FEWEST_LEFT else (False,) * len(found)


def prose(text: str) -> Markup:
    """Words as HTML: what stands between backticks is code, everything else stays as it is."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def _cell(lines: Lines) -> Markup:
    return Markup("<br>").join(map(prose, lines))
