"""A frame of numbers as a table: plain text for a terminal, Markdown, CSV, LaTeX.

The frame is the result; everything printed is derived from it. The same frame gives the same bytes in every format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from quicksilver.files import write_files
from quicksilver.report.written import (
    Heading,
    PrintedPanel,
    PrintedRow,
    Section,
    Written,
    markdown,
    named_records,
    sorted_once,
    values,
    wrapped,
)
from quicksilver.report.written import (
    Lines as Lines,
)


@dataclass(frozen=True)
class Column:
    """One printed column.

    Attributes:
        group: heading over several neighbouring columns, empty for none.
        header: heading of this column.
        cell: from a row of the frame to the lines of the cell (one or two).
        expendable: left out of a terminal that is too narrow, the highest number first; 0 always stays.
    """

    group: str
    header: str
    cell: Callable[[Mapping[str, Any]], Lines]
    align: Literal["left", "right"] = "right"
    expendable: int = 0


@dataclass(frozen=True)
class Panel:
    """The rows of the frame whose `panel` is `key`; `notes` (how it was measured, from which records) stand below them."""

    key: str
    title: str
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()

    def cells(self, row: Mapping[str, Any]) -> tuple[Lines, ...]:
        """A row of the frame in print."""
        return tuple(tuple(column.cell(row)) for column in self.columns)


@dataclass(frozen=True)
class Table:
    """A titled frame with the panels that show it.

    Attributes:
        name: base name of the files, for example `table11`.
        frame: one row a printed row; needs the columns `panel` and `section`.
        legend: what the columns mean, one sentence a line.
        records, claims: fingerprints of the records that it is made of, and what the paper reports that it answers; `Artefact.build`
            fills them in. Records that the frame names are known without.
    """

    name: str
    title: str
    frame: pd.DataFrame
    panels: tuple[Panel, ...]
    legend: tuple[str, ...] = field(default=())
    records: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()

    @property
    def printed(self) -> tuple[PrintedPanel, ...]:
        """The panels with their cells, in the frame's order."""
        found, numbered = [], list(enumerate(self.frame.to_dict("records")))
        for panel in self.panels:
            rows = groupby((one for one in numbered if one[1]["panel"] == panel.key), key=lambda one: one[1]["section"])
            sections = tuple(
                Section(str(title), tuple(PrintedRow(place, panel.cells(row)) for place, row in members))
                for title, members in rows
            )
            headings = tuple(Heading(column.group, column.header, column.align) for column in panel.columns)
            found.append(PrintedPanel(panel.key, panel.title, headings, sections, tuple(panel.notes)))
        return tuple(found)

    def text(self, width: int | None = None) -> str:
        """For a terminal of `width` columns; None: as wide as it needs."""
        parts = [self.title, "=" * len(self.title)]
        for panel, printed in zip(self.panels, self.printed, strict=True):
            parts += [
                "",
                panel.title,
                "-" * len(panel.title),
                "",
                *_text(panel, printed, width),
                "",
                *wrapped(panel.notes, width),
            ]
        return "\n".join([*parts, "", *wrapped(self.legend, width)]) + "\n"

    def written(self) -> Written:
        """What is written, as data."""
        return Written(
            "table", self.name, self.title, tuple(map(str, self.frame.columns)), values(self.frame), self.printed, tuple(self.legend),
            records=sorted_once((*self.records, *named_records(self.frame))), claims=self.claims,
        )  # fmt: skip

    def markdown(self) -> str:
        """GitHub-flavoured Markdown; the lines of a cell are joined by `<br>`, sections are rows in bold."""
        return markdown(self.written())

    def csv(self) -> str:
        """The whole frame, all digits that matter (8 significant), empty where there is no number."""
        return self.frame.to_csv(index=False, float_format="%.8g", lineterminator="\n")

    def latex(self) -> str:
        """One `table*` a panel; needs the packages booktabs and graphicx."""
        return "\n".join(_latex(self, panel) for panel in self.printed)

    def write(self, folder: Path) -> list[Path]:
        """Write `<name>.md`, `.csv`, `.tex` and `.json` (see `written`) into `folder`; each file appears whole or not at all."""
        written = self.written()
        contents = {"md": markdown(written), "csv": self.csv(), "tex": self.latex(), "json": written.json().decode()}
        return write_files(folder, {f"{self.name}.{suffix}": content.encode() for suffix, content in contents.items()})


# --- in a terminal ----------------------------------------------------------------------------------------------------------------

_GAP = _INDENT = "  "


def _text(panel: Panel, printed: PrintedPanel, width: int | None) -> Iterator[str]:
    columns, shown = panel.columns, list(range(len(panel.columns)))
    # What stands under a heading is set in, and what continues a cell further.
    sections = [
        (section.title, [(_set_in(row.cells[0], bool(section.title)), *row.cells[1:]) for row in section.rows])
        for section in printed.sections
    ]
    widths = _widths(columns, [row for _, rows in sections for row in rows])
    while width is not None and _total(shown, widths) > width and any(columns[i].expendable for i in shown):
        shown.remove(max(shown, key=lambda i: columns[i].expendable))

    def line(cells: Sequence[str]) -> str:
        padded = (f"{cells[i]:{'<' if columns[i].align == 'left' else '>'}{widths[i]}}" for i in shown)
        return _GAP.join(padded).rstrip()

    groups = []
    for group, members in groupby(shown, key=lambda i: columns[i].group):
        span = _total(list(members), widths)
        groups.append(f" {group} ".center(span, "-") if group else " " * span)
    rule = "-" * _total(shown, widths)
    yield from (_GAP.join(groups).rstrip(), line([column.header for column in columns]), rule)
    for number, (title, rows) in enumerate(sections):
        yield from [""] * bool(number) + [title] * bool(title)
        for row in rows:
            yield from map(line, zip_longest(*row, fillvalue=""))
    yield rule
    hidden = ", ".join(" ".join(filter(None, (one.group, one.header))) for i, one in enumerate(columns) if i not in shown)
    if hidden:
        yield from wrapped([f"Narrow terminal: left out {hidden}. The written files have every column."], width)


def _set_in(lines: Lines, under_heading: bool) -> Lines:
    return tuple(_INDENT * (under_heading + (k > 0)) + text for k, text in enumerate(lines))


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Lines]]) -> list[int]:
    widths = [max(map(len, (column.header, *(text for row in rows for text in row[i])))) for i, column in enumerate(columns)]
    # A heading over several columns must fit over them: what it needs more goes to the first.
    for group, run in groupby(range(len(columns)), key=lambda i: columns[i].group):
        members = list(run)
        widths[members[0]] += max(0, len(group) + 2 - _total(members, widths)) if group else 0
    return widths


def _total(members: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[i] for i in members) + len(_GAP) * (len(members) - 1)


# --- as LaTeX ---------------------------------------------------------------------------------------------------------------------

_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
_TEX |= {character: "\\" + character for character in "&%$#_{}"}
_TEX |= {"Δ": r"$\Delta$", "†": r"$\dagger$", "±": r"$\pm$", "×": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$"}
_TEX |= {"–": "--", "—": "---", "<": r"\textless{}", ">": r"\textgreater{}"}
_TEX_TABLE = str.maketrans(_TEX)


def _tex(text: str) -> str:
    return text.translate(_TEX_TABLE)


def _latex(table: Table, panel: PrintedPanel) -> str:
    groups, rules, first = [], [], 1
    for group, run in groupby(panel.columns, key=lambda column: column.group):
        span = len(list(run))
        groups.append(rf"\multicolumn{{{span}}}{{c}}{{{_tex(group)}}}")
        rules += [rf"\cmidrule(lr){{{first}-{first + span - 1}}}"] if group else []
        first += span
    body = []
    for section in panel.sections:
        body.append(r"\midrule")
        if section.title:
            body.append(rf"\multicolumn{{{len(panel.columns)}}}{{l}}{{\textit{{{_tex(section.title)}}}}} \\")
        for row in section.rows:
            above, *below = ([_tex(text) for text in line] for line in zip_longest(*row.cells, fillvalue=""))
            body.append(" & ".join(above) + r" \\")
            # Further lines belong to the first: smaller, and set apart from the next row.
            body += [" & ".join(rf"\footnotesize {text}" if text else "" for text in line) + r" \\[2pt]" for line in below]
    caption = " ".join(_tex(part) for part in (f"{table.title}. {panel.title}.", *panel.notes, *table.legend))
    lines = [
        r"\begin{table*}[t]", r"\centering", r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{''.join(column.align[0] for column in panel.columns)}}}", r"\toprule",
        " & ".join(groups) + r" \\", " ".join(rules), " & ".join(_tex(column.header) for column in panel.columns) + r" \\",
        *body, r"\bottomrule", r"\end{tabular}}", rf"\caption{{{caption}}}", rf"\label{{tab:{table.name}-{panel.key}}}", r"\end{table*}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


# --- cells: signs, intervals, and what cannot be told from noise ------------------------------------------------------------------

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
    return time_difference_cell(value, noise)[: 2 if noise is None else 1]


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
