"""A panel of a written table, laid out for a page: cells as HTML, headings over several columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup, escape

from quicksilver.report.written import Lines, PrintedPanel

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
        groups: headings over neighbouring columns with the number of them; empty text for none.
        headers: heading of each column.
        right: whether a column is aligned to the right.
        lines: the rows.
    """

    groups: tuple[tuple[Markup, int], ...]
    headers: tuple[Markup, ...]
    right: tuple[bool, ...]
    lines: tuple[Line, ...]


def grid(panel: PrintedPanel) -> Grid:
    """The panel's columns and rows."""
    groups = tuple((prose(group), len(list(run))) for group, run in groupby(column.group for column in panel.columns))
    lines = []
    for section in panel.sections:
        if section.title:
            lines.append(Line((), prose(section.title)))
        lines += [Line(tuple(map(_cell, row.cells))) for row in section.rows]
    right = tuple(column.align == "right" for column in panel.columns)
    return Grid(groups, tuple(prose(column.header) for column in panel.columns), right, tuple(lines))


def prose(text: str) -> Markup:
    """Words as HTML: what stands between backticks is code, everything else stays as it is."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def _cell(lines: Lines) -> Markup:
    return Markup("<br>").join(map(prose, lines))
