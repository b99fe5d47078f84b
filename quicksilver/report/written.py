"""What a written table or figure says, as data: the JSON beside its Markdown or picture. Pages, README, W&B and the ledger read this.

One schema for tables, figures and the ledger of claims. Nothing is parsed back from what people read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quicksilver.files import fingerprint_of, plain_name
from quicksilver.measure.typed import decoded
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd


SCHEMA_VERSION = 1
Value = str | int | float | bool | None
Lines = tuple[str, ...]  # what one cell shows, line by line
_RECORD_COLUMN = re.compile(r"(\w+_)?(record|fingerprint)s?")
_FINGERPRINT = re.compile(r"\b[0-9a-f]{20}\b")
_DIGITS = 8  # significant, as in the CSV


@dataclass(frozen=True)
class Heading:
    """One printed column: `group` stands above it and its neighbours of the same group."""

    group: str
    header: str
    align: Literal["left", "right"] = "right"


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
    """One panel of a table; `notes` say how it was measured."""

    key: str
    title: str
    columns: tuple[Heading, ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """A table or figure as it was written.

    Attributes:
        kind: table or figure.
        name: base name of its files.
        panels: of a table, as printed.
        legend: what the columns mean (table).
        caption: sentences below the picture (figure); how it was made stands in `legend`.
        columns, rows: the frame behind it, a value a column: text, number, truth, or None where there is none. No rows where a figure has more
            than 500: they stand in its CSV.
        records: fingerprints of the records that it is made of.
        claims: what the paper reports that is answered here: entries of reported*.yaml, or entry.quantity.
        pictures: names of the picture files beside it, the one to show first.
    """

    kind: Literal["table", "figure"]
    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    panels: tuple[PrintedPanel, ...] = ()
    legend: tuple[str, ...] = ()
    caption: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()

    @cached_property
    def entries(self) -> list[dict[str, Value]]:
        """The rows as column to value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def records_of_panels(self) -> dict[str, list[str]]:
        """Panel of the frame to the fingerprints in its column `record`, sorted; empty where the frame has no such columns."""
        found: dict[str, set[str]] = {}
        if {"panel", "record"} <= set(self.columns):
            for entry in self.entries:
                found.setdefault(str(entry["panel"]), set()).update(filter(None, (entry["record"],)))  # type: ignore[arg-type]
        return {panel: sorted(names) for panel, names in found.items()}

    def json(self) -> bytes:
        """The file's content: the same artefact gives the same bytes."""
        content = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}
        lines = [f"{json.dumps(key)}: {_dump(value)}" for key, value in content.items()]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _dump(value: Any) -> str:
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple | dict):
        return "[\n" + ",\n".join(map(_dump_line, value)) + "\n]"
    return _dump_line(value)


_dump_line = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def read(path: Path) -> Written:
    """Read what `Written.json` wrote.

    Raises:
        ConfigError: there is no such file, it is damaged, names what lies elsewhere, or another version wrote it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema_version"] != SCHEMA_VERSION:
            raise ConfigError(
                f"{path} has schema {content['schema_version']} and this version of QuickSilver reads schema {SCHEMA_VERSION}. "
                "Make it again."
            )
        if missing := sorted({field.name for field in dataclasses.fields(Written)} - content.keys()):
            raise KeyError(f"no {', '.join(missing)}")
        rows = tuple(map(tuple, content["rows"]))  # any plain values: not decoded one by one
        found = dataclasses.replace(decoded(Written, {**content, "rows": []}), rows=rows)
        if any(len(row) != len(found.columns) for row in rows):
            raise ValueError("a row has more or fewer values than there are columns")
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = "it is not there" if isinstance(error, FileNotFoundError) else f"it is damaged ({type(error).__name__}: {error})"
        raise ConfigError(f"{path} cannot be read: {why}. Make it again.") from error
    try:
        for name in (found.name, *found.pictures):
            plain_name(name, "the name of a table, figure or picture")
        for name in found.records:
            fingerprint_of(name)
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be read: {error} Make it again.") from error
    return found


def values(frame: pd.DataFrame) -> tuple[tuple[Value, ...], ...]:
    """The rows of a frame with plain types; numbers with 8 significant digits, None for what is missing or not finite."""
    return tuple(tuple(map(_value, row)) for row in frame.itertuples(index=False, name=None))


def _value(value: Any) -> Value:
    value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return None if type(value).__name__ in ("NAType", "NaTType") else str(value)


def named_records(frame: pd.DataFrame) -> Iterator[str]:
    """The fingerprints in those columns of a frame that name records."""
    for column in frame.columns:
        if _RECORD_COLUMN.fullmatch(str(column)):
            for value in frame[column].dropna().unique():
                yield from _FINGERPRINT.findall(str(value))


def sorted_once(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, sorted."""
    return tuple(sorted(set(names)))


# --- as Markdown ------------------------------------------------------------------------------------------------------------------


def markdown(written: Written, level: int = 2) -> str:
    """A table as GitHub-flavoured Markdown, its title a heading of `level`; lines of a cell are joined by `<br>`, sections are rows in bold."""
    parts = [f"{'#' * level} {_escaped(written.title)}"]
    for panel in written.panels:
        headings = [": ".join(filter(None, (column.group, column.header))) for column in panel.columns]
        rows = ["| " + " | ".join(map(_escaped, headings)) + " |"]
        rows.append("|" + "|".join(" :-- " if column.align == "left" else " --: " for column in panel.columns) + "|")
        for section in panel.sections:
            if section.title:
                rows.append("| " + " | ".join([f"**{_escaped(section.title)}**"] + [""] * (len(panel.columns) - 1)) + " |")
            rows += ["| " + " | ".join("<br>".join(map(_escaped, cell)) for cell in row.cells) + " |" for row in section.rows]
        parts += [f"{'#' * (level + 1)} {_escaped(panel.title)}", "\n".join(rows)]
        if panel.notes:
            parts.append("\n".join(f"- {_escaped(note)}" for note in panel.notes))
    if written.legend:
        parts += ["**How to read it**", "\n".join(f"- {_escaped(line)}" for line in written.legend)]
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Text that stays text: `](` is what makes a link or a picture of words in brackets, and a new line would begin a block."""
    text = " ".join(text.splitlines()) if "\n" in text or "\r" in text else text
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("](", "]\\(")


# --- texts ---------------------------------------------------------------------------------------------------------------------


def wrapped(lines: Sequence[str], width: int | None) -> list[str]:
    """Wrap at `width` (150 where there is none) with a hanging indent; never inside a word, so that a command can be copied."""
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, width or 150, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    ]


_FOLDERS = re.compile(r"(?<![\w./~-])(?:file://)?~?(?:/[^\s/'\"<>|,;:()\[\]{}]+)+/([^\s/'\"<>|,;:()\[\]{}]+)")


def without_folders(entry: Any) -> Any:
    """Local files by their names, also inside sentences: where they lie is nobody else's business, and would make a page another one elsewhere.

    Args:
        entry: text, or mappings and lists of it; anything else comes back as it is.
    """
    if isinstance(entry, Mapping):
        return {without_folders(key): without_folders(value) for key, value in entry.items()}
    if isinstance(entry, list | tuple):
        return type(entry)(map(without_folders, entry))
    if not isinstance(entry, str):
        return entry
    if entry.startswith("folder:/") and "\n" not in entry:
        return f"folder:{Path(entry).name}"
    return Path(entry).name if "\n" not in entry and Path(entry).is_absolute() else _FOLDERS.sub(r"\1", entry)
