"""A frame of numbers as a table: text for a terminal, Markdown, CSV, LaTeX, and JSON that pages, README, W&B and the ledger read.

The frame is the result; everything printed is derived from it. The same frame gives the same bytes in every format.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import string
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quicksilver.files import fingerprint_of, plain_name, write_files
from quicksilver.measure.latency import LOUD
from quicksilver.measure.measurement import decoded
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_json

if TYPE_CHECKING:
    import pandas as pd

Lines = tuple[str, ...]  # what one cell shows, line by line
Cell = Callable[[Mapping[str, Any]], Lines]  # from a row of the frame
Align = Literal["left", "right"]
Value = str | int | float | bool | None
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Column:
    """One printed column: `group` stands above neighbours of the same group.

    Args:
        cell: a function of the row, or its lines as a form (see `filled`): `{ppl:.2f}\\n± {spread:.1f}`.
        expendable: a terminal that is too narrow leaves out the highest first; 0 always stays.
    """

    group: str
    header: str
    cell: Cell | str
    align: Align = "right"
    expendable: int = 0


@dataclass(frozen=True)
class Panel:
    """The rows of the frame whose `panel` is `key`; `notes` (how it was measured, from which records) stand below them."""

    key: str
    title: str
    columns: tuple[Column, ...]
    notes: Lines = ()


@dataclass(frozen=True)
class Table:
    """A titled frame with the panels that show it.

    Attributes:
        name: base name of the files, for example `table11`.
        frame: one row a printed row; needs the columns `panel` and `section`.
        legend: what the columns mean, one sentence a line.
        records, claims: fingerprints of the records that it is made of beside those that the frame names, and what the paper reports
            that it answers; `Artefact.build` fills them in.
    """

    name: str
    title: str
    frame: pd.DataFrame
    panels: tuple[Panel, ...]
    legend: Lines = ()
    records: Lines = ()
    claims: Lines = ()

    def written(self) -> Written:
        """What is written, as data: the panels with their cells, in the frame's order."""
        rows, panels = list(enumerate(self.frame.to_dict("records"))), []
        for panel in self.panels:
            columns = self.columns_of(panel)
            members = groupby((one for one in rows if one[1]["panel"] == panel.key), key=lambda one: one[1]["section"])
            sections = tuple(
                Section(str(title), tuple(PrintedRow(at, tuple(filled(one.cell, row) for one in columns)) for at, row in some))
                for title, some in members
            )
            headings = tuple(Heading(column.group, column.header, column.align) for column in columns)
            panels.append(PrintedPanel(panel.key, panel.title, headings, sections, tuple(panel.notes)))
        return written_of("table", self, values(self.frame), panels=tuple(panels), legend=tuple(self.legend))

    def columns_of(self, panel: Panel) -> list[Column]:
        """Its columns that say something in a row: a column of dashes takes the place of one that does."""
        rows = self.frame[self.frame["panel"] == panel.key].to_dict("records")
        silent = {"", "-", "–"}.issuperset
        return [one for one in panel.columns if not rows or not all(silent(filled(one.cell, row)) for row in rows)]

    def text(self, width: int | None = None) -> str:
        """For a terminal of `width` columns; None: as wide as it needs."""
        parts = [self.title, "=" * min(len(self.title), width or 100)]
        for panel, printed in zip(self.panels, self.written().panels, strict=True):
            rows = _text(printed, [column.expendable for column in self.columns_of(panel)], width)
            parts += ["", panel.title, "-" * len(panel.title), "", *rows, "", *wrapped(panel.notes, width)]
        return "\n".join([*parts, "", *wrapped(self.legend, width)]) + "\n"

    def contents(self) -> dict[str, str]:
        """The files by suffix: md, csv, tex (needs the packages booktabs and graphicx) and json."""
        written = self.written()
        return {"md": markdown(written), "csv": csv(self.frame), "tex": latex(written), "json": written.json().decode()}

    def write(self, folder: Path, *suffixes: str) -> list[Path]:
        """Write `<name>.md`, `.csv`, `.tex` and `.json` into `folder`, or only `suffixes`; each file appears whole or not at all."""
        contents = self.contents()
        return write_files(folder, {f"{self.name}.{suffix}": contents[suffix].encode() for suffix in suffixes or contents})


# --- what is written, as data -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Heading:
    """A `Column` as data."""

    group: str
    header: str
    align: Align = "right"


@dataclass(frozen=True)
class PrintedRow:
    """Cells in print; `row` is the place of their values in `Written.rows`."""

    row: int
    cells: tuple[Lines, ...]


@dataclass(frozen=True)
class Section:
    """Rows under one heading; an empty title for none."""

    title: str
    rows: tuple[PrintedRow, ...]


@dataclass(frozen=True)
class PrintedPanel:
    """A `Panel` as data."""

    key: str
    title: str
    columns: tuple[Heading, ...]
    sections: tuple[Section, ...]
    notes: Lines = ()

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Headings over neighbouring columns, with how many columns each has."""
        return [(group, len(list(members))) for group, members in groupby(column.group for column in self.columns)]


COLOUR_MAP = "colour map"  # in the metadata of a PNG whose colours are numbers


@dataclass(frozen=True)
class Written:
    """A table, a figure or the ledger of claims as it was written: the JSON beside its Markdown or picture.

    Attributes:
        panels: of a table, as printed.
        legend: what the columns mean (table), or how it was made (figure). caption: sentences below the picture (figure).
        columns, rows: the frame behind it, a value a column. No rows where a figure has more than 500: they stand in its CSV.
        records: fingerprints of the records that it is made of.
        claims: what the paper reports that is answered here: entries of reported*.yaml, or entry.quantity.
        pictures: names of the picture files beside it, the one to show first.
    """

    kind: Literal["table", "figure"]
    name: str
    title: str
    columns: Lines
    rows: tuple[tuple[Value, ...], ...]
    panels: tuple[PrintedPanel, ...] = ()
    legend: Lines = ()
    caption: Lines = ()
    records: Lines = ()
    claims: Lines = ()
    pictures: Lines = ()

    @cached_property
    def entries(self) -> list[dict[str, Value]]:
        """The rows as column to value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def records_of_panels(self) -> dict[str, list[str]]:
        """Panel of the frame to the fingerprints in its column `record`, sorted; empty where the frame has no such columns."""
        found: dict[str, set[str]] = {}
        for entry in self.entries if {"panel", "record"} <= set(self.columns) else ():
            found.setdefault(str(entry["panel"]), set()).update([str(entry["record"])] if entry["record"] else [])
        return {panel: sorted(names) for panel, names in found.items()}

    def json(self) -> bytes:
        """The file's content: the same artefact gives the same bytes."""
        content = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}
        return ("{\n" + ",\n".join(f"{json.dumps(key)}: {_dump(value)}" for key, value in content.items()) + "\n}\n").encode()


_dump_line = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _dump(value: Any) -> str:
    rows = isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple | dict)
    return "[\n" + ",\n".join(map(_dump_line, value)) + "\n]" if rows else _dump_line(value)


def written_of(kind: Literal["table", "figure"], made: Any, rows: tuple[tuple[Value, ...], ...], **more: Any) -> Written:
    """What is written of a `Table` or `Figure`, whose records are those that it was given and those that its frame names."""
    records = tuple(sorted({*made.records, *named_records(made.frame)}))
    columns = tuple(map(str, made.frame.columns))
    return Written(kind, made.name, made.title, columns, rows, records=records, claims=made.claims, **more)


def read(path: Path) -> Written:
    """Read what `Written.json` wrote.
    Raises ConfigError: there is no such file, it is damaged, names what lies elsewhere, or another version wrote it."""
    try:
        content = read_json(path)
        if (version := content["schema_version"]) != SCHEMA_VERSION:
            raise ConfigError(f"it has schema {version} and this version of QuickSilver reads schema {SCHEMA_VERSION}.")
        if missing := sorted({field.name for field in dataclasses.fields(Written)} - content.keys()):
            raise KeyError(f"no {', '.join(missing)}")
        rows = tuple(map(tuple, content["rows"]))  # any plain values: not decoded one by one
        found = dataclasses.replace(decoded(Written, {**content, "rows": []}), rows=rows)
        if any(len(row) != len(found.columns) for row in rows):
            raise ValueError("a row has more or fewer values than there are columns")
        for name in (found.name, *found.pictures):
            plain_name(name, "the name of a table, figure or picture")
        for name in found.records:
            fingerprint_of(name)
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be read: {error} Make it again.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = "it is not there" if isinstance(error, FileNotFoundError) else f"it is damaged ({type(error).__name__}: {error})"
        raise ConfigError(f"{path} cannot be read: {why}. Make it again.") from error
    return found


def csv(frame: pd.DataFrame) -> str:
    """A frame with 8 significant digits, empty where there is no number."""
    return frame.to_csv(index=False, float_format="%.8g", lineterminator="\n")


def values(frame: pd.DataFrame) -> tuple[tuple[Value, ...], ...]:
    """The rows of a frame with plain types; numbers with 8 significant digits, None for what is missing or not finite."""
    return tuple(tuple(map(_value, row)) for row in frame.itertuples(index=False, name=None))


def _value(value: Any) -> Value:
    value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(f"{value:.8g}") if math.isfinite(value) else None
    return None if type(value).__name__ in ("NAType", "NaTType") else str(value)


def named_records(frame: pd.DataFrame) -> Iterator[str]:
    """The fingerprints in those columns of a frame that name records."""
    for column in frame.columns:
        if re.fullmatch(r"(\w+_)?(record|fingerprint)s?", str(column)):
            for value in frame[column].dropna().unique():
                yield from re.findall(r"\b[0-9a-f]{20}\b", str(value))


# --- as Markdown ------------------------------------------------------------------------------------------------------------------
def markdown(written: Written, level: int = 2) -> str:
    """A table as GitHub-flavoured Markdown, its title a heading of `level`; lines of a cell are joined by `<br>`, sections are rows in bold."""
    parts = [f"{'#' * level} {_escaped(written.title)}"]
    for panel in written.panels:
        headings = [": ".join(filter(None, (column.group, column.header))) for column in panel.columns]
        rows = [[_escaped(heading) for heading in headings]]
        for section in panel.sections:
            if section.title:
                rows.append([f"**{_escaped(section.title)}**", *[""] * (len(headings) - 1)])
            rows += [["<br>".join(map(_escaped, cell)) for cell in row.cells] for row in section.rows]
        head, *body = ("| " + " | ".join(row) + " |" for row in rows)
        rule = "|" + "|".join(" :-- " if column.align == "left" else " --: " for column in panel.columns) + "|"
        parts += [f"{'#' * (level + 1)} {_escaped(panel.title)}", "\n".join((head, rule, *body)), _bullets(panel.notes)]
    parts += ["**How to read it**", _bullets(written.legend)] if written.legend else []
    return "\n\n".join(filter(None, parts)) + "\n"


def _bullets(lines: Lines) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    """Text that stays text: `](` makes a link or a picture of words in brackets, and a new line would begin a block."""
    text = " ".join(text.splitlines()) if "\n" in text or "\r" in text else text
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("](", "]\\(")


# --- in a terminal ----------------------------------------------------------------------------------------------------------------
_GAP = "  "


def _text(panel: PrintedPanel, expendable: Sequence[int], width: int | None) -> Iterator[str]:
    columns, blocks = panel.columns, []
    for section in panel.sections:
        lines = []
        for row in section.rows:
            for place, (first, *others) in enumerate(zip_longest(*row.cells, fillvalue="")):
                # Rows under a heading are indented, and further lines of a first cell once more.
                lines.append((_GAP * (bool(section.title) + bool(place)) * bool(first) + first, *others))
        blocks.append((section.title, lines))
    shown = list(range(len(columns)))
    widths = [max(map(len, (columns[i].header, *(line[i] for _, lines in blocks for line in lines)))) for i in shown]

    def total(members: Sequence[int]) -> int:
        return sum(widths[i] for i in members) + len(_GAP) * (len(members) - 1)

    def groups() -> list[tuple[str, list[int]]]:
        return [(group, list(members)) for group, members in groupby(shown, key=lambda i: columns[i].group)]

    while True:
        for group, members in groups():  # a heading must fit over the columns that are left below it
            widths[members[0]] += max(0, len(group) + 2 - total(members)) if group else 0
        if width is None or total(shown) <= width or not any(expendable[i] for i in shown):
            break
        shown.remove(max(shown, key=lambda i: expendable[i]))

    def line(cells: Sequence[str]) -> str:
        return _GAP.join(f"{cells[i]:{'<' if columns[i].align == 'left' else '>'}{widths[i]}}" for i in shown).rstrip()

    rule = "-" * total(shown)
    heads = ((f" {group} " if group else "").center(total(members), "-" if group else " ") for group, members in groups())
    yield from (_GAP.join(heads).rstrip(), line([column.header for column in columns]), rule)
    for number, (title, lines) in enumerate(blocks):
        yield from [*[""] * bool(number), *[title] * bool(title), *map(line, lines)]
    yield rule
    if hidden := ", ".join(f"{one.group} {one.header}".strip() for i, one in enumerate(columns) if i not in shown):
        yield from wrapped([f"Narrow terminal: left out {hidden}. The written files have every column."], width)


def wrapped(lines: Sequence[str], width: int | None) -> list[str]:
    """Wrap at `width` (150 where there is none) with a hanging indent; never inside a word, so that a command can be copied."""
    options: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return [part for line in lines for part in textwrap.wrap(line, width or 150, **options)]


_FOLDERS = re.compile(r"(?<![\w./~-])(?:file://)?~?(?:/[^\s/'\"<>|,;:()\[\]{}]+)+/([^\s/'\"<>|,;:()\[\]{}]+)")


def without_folders(entry: Any) -> Any:
    """Local files by their names, also inside sentences: a page must not tell where they lie, nor differ by it. Text, or mappings and lists of
    it, is changed; anything else comes back as it is."""
    if not isinstance(entry, str):
        if isinstance(entry, Mapping):
            return {without_folders(key): without_folders(value) for key, value in entry.items()}
        return type(entry)(map(without_folders, entry)) if isinstance(entry, list | tuple) else entry
    if "/" not in entry:
        return entry
    if entry.startswith("folder:/") and "\n" not in entry:
        return f"folder:{Path(entry).name}"
    return Path(entry).name if "\n" not in entry and entry.startswith("/") else _FOLDERS.sub(r"\1", entry)


# --- as LaTeX ---------------------------------------------------------------------------------------------------------------------
_TEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}", "–": "--", "—": "---"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "Δ": r"$\Delta$", "†": r"$\dagger$", "±": r"$\pm$", "×": r"$\times$"}
    | {"≤": r"$\leq$", "≥": r"$\geq$"}
    | {character: "\\" + character for character in "&%$#_{}"}
)


def latex(written: Written) -> str:
    """One `table*` a panel; needs the packages booktabs and graphicx."""
    return "\n".join(_latex(written, panel) for panel in written.panels)


def _latex(table: Written, panel: PrintedPanel) -> str:
    def tex(text: str) -> str:
        return text.translate(_TEX)

    groups, rules, body, first = [], [], [], 1
    for group, span in panel.groups:
        groups.append(rf"\multicolumn{{{span}}}{{c}}{{{tex(group)}}}")
        rules += [rf"\cmidrule(lr){{{first}-{first + span - 1}}}"] if group else []
        first += span
    for section in panel.sections:
        title = rf"\multicolumn{{{len(panel.columns)}}}{{l}}{{\textit{{{tex(section.title)}}}}} \\"
        body += [r"\midrule", *[title] * bool(section.title)]
        for row in section.rows:
            above, *below = (list(map(tex, line)) for line in zip_longest(*row.cells, fillvalue=""))
            # Further lines belong to the first: smaller, and set apart from the next row.
            smaller = ([rf"\footnotesize {text}" if text else "" for text in line] for line in below)
            body += [" & ".join(above) + r" \\", *(" & ".join(line) + r" \\[2pt]" for line in smaller)]
    caption = " ".join(map(tex, (f"{table.title}. {panel.title}.", *panel.notes, *table.legend)))
    lines = [
        r"\begin{table*}[t]", r"\centering", r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{''.join(column.align[0] for column in panel.columns)}}}", r"\toprule",
        " & ".join(groups) + r" \\", " ".join(rules), " & ".join(tex(column.header) for column in panel.columns) + r" \\",
        *body, r"\bottomrule", r"\end{tabular}}", rf"\caption{{{caption}}}", rf"\label{{tab:{table.name}-{panel.key}}}", r"\end{table*}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


# --- cells: signs, intervals, and what cannot be told from noise ------------------------------------------------------------------
NO_VALUE = "-"
FALSE_DISCOVERIES = 0.05  # among the verdicts of a table
ENDS = ("", "_low", "_high")  # behind a column's name: the value, and its 95% interval


class _Form(string.Formatter):
    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = kwargs.get(str(key))
        if value is None or value == "" or value != value:  # NaN fills the holes of a frame
            raise LookupError(key)
        return value

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "amount":
            return amount(value)
        factor, _, spec = format_spec.rpartition("*")
        text = format(float(factor) * value if factor else value, spec)
        return text[1:] if spec.startswith("+") and float(text) == 0 else text


_FORM = _Form()


def filled(cell: Cell | str, row: Mapping[str, Any]) -> Lines:
    """The lines of a cell: those of a function, or a form with the row's values.

    In a form, `{a:+.1f}` is `signed`, `{a:100*.1f}` shows a hundredfold, `{a:amount}` is `amount`. A line whose value the row lacks is left
    out; where that is the first line, `-` stands for all of them.
    """
    if not isinstance(cell, str):
        return tuple(cell(row))
    lines: list[str] = []
    for line in cell.split("\n"):
        try:
            lines.append(_FORM.vformat(line, (), row))
        except LookupError:
            if not lines:
                return (NO_VALUE,)
    return tuple(lines)


def with_ends(column: str, spec: str = ".1f", between: str = "\n") -> str:
    """The form of a number over its interval, or `between` them what is given; the ends stand in `_low` and `_high`."""
    value, low, high = (f"{{{column}{end}:{spec}}}" for end in ENDS)
    return f"{value}{between}[{low} {high}]"


KL_CELL = with_ends("kl_nats", "100*.3g")  # to the dense model, in hundredths of a nat a token


def interval_columns(column: str, interval: Any, times: float = 1.0) -> dict[str, float]:
    """Three columns of anything with `value`, `low` and `high`; `times=100` makes shares percentages."""
    return {f"{column}{end}": times * getattr(interval, end.lstrip("_") or "value") for end in ENDS}


def number(row: Mapping[str, Any], key: str) -> float | None:
    """The number under `key`; None where the row has none (a frame fills such holes with NaN)."""
    value = row.get(key)
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else float(value)


def numbers(row: Mapping[str, Any], key: str) -> list[float | None]:
    """The number under `key` and the ends of its interval."""
    return [number(row, f"{key}{end}") for end in ENDS]


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


def decimals_for(size: float, least: int = 0) -> int:
    """Decimals of a number of this size, three digits or so: 3 below 0.1, 2 below 10, 1 below 100, else `least`."""
    return 3 if size < 0.1 else 2 if size < 10 else 1 if size < 100 else least


def interval_cell(row: Mapping[str, Any], name: str) -> Lines:
    """Two lines, `+0.52 [+0.40 +0.64]` in perplexity and `+5.2% [+4.0 +6.4]` in percent."""
    lines = []
    for key, unit in ((name, ""), (f"{name}_pct", "%")):
        ends = numbers(row, key)
        if ends[0] is None:
            return (NO_VALUE,)
        decimals = decimals_for(max(abs(value) for value in ends if value is not None))
        middle, low, high = (signed(value, decimals) for value in ends)
        lines.append(f"{middle}{unit} [{low} {high}]")
    return tuple(lines)


def speedup_cell(row: Mapping[str, Any], key: str = "speedup_pct") -> Lines:
    """The speedup, or `≈ 0` where it is no larger than the A/A noise floor, printed below the panel (`comparison.noise_note`)."""
    return time_cell(number(row, key), number(row, key.replace("speedup_pct", "noise_floor_pct")))


def time_cell(value: float | None, noise: float | None) -> Lines:
    """A difference of times as a cell: `≈ 0` where it is no larger than the noise floor, printed below the panel. Where that floor is `LOUD`, a
    zero would say too much: `±43`."""
    lines = time_difference_cell(value, noise)[: 2 if noise is None else 1]
    return (f"±{noise:.0f}",) if lines == ("≈ 0",) and noise is not None and noise > LOUD else lines


def time_difference_cell(value: float | None, noise: float | None) -> Lines:
    """A difference of times as a cell: `≈ 0` where it is no larger than the noise, printed below it either way."""
    if value is None:
        return (NO_VALUE,)
    if noise is None:
        return (signed(value), "no floor")
    return ("≈ 0" if abs(value) <= noise else signed(value), f"noise {noise:.1f}")


def versus_null(row: Mapping[str, Any]) -> int | None:
    """Sign of the difference to the null, by its paired interval: -1 better, 1 worse, 0 no difference; None: there is no null."""
    low, high = number(row, "versus_null_ppl_low"), number(row, "versus_null_ppl_high")
    return None if low is None or high is None else -1 if high < 0 else int(low > 0)


def versus_null_cell(row: Mapping[str, Any]) -> Lines:
    """`better`, `worse` or `same` against random tokens at the same budget; by the adjusted p value too where the table has one."""
    sign, p = versus_null(row), number(row, "versus_null_p_adjusted")
    if sign is None:
        return (NO_VALUE,)
    return ({-1: "better", 1: "worse"}.get(sign, "same") if p is None or p <= FALSE_DISCOVERIES else "same",)


def audit_cell(row: Mapping[str, Any]) -> Lines:
    """Largest logit movement when the tokens after a probe are replaced."""
    shown, masked = (
        None if value is None else f"{value:.0e}" if value else "0"
        for value in (number(row, f"audit_{kind}max_abs_logit_difference") for kind in ("", "masked_"))
    )
    if shown is None:
        return (NO_VALUE,)
    return (shown,) if masked is None else (masked, f"compact {shown}")
