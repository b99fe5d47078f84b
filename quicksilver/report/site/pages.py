"""The static site: pages of verdicts, tables, figures, runs and tokens. Opens from a folder, asks no network.

The same files give the same bytes. It is written to `report/` below the results folder, which git ignores.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup, escape

from quicksilver.files import publish
from quicksilver.harness.archive import ENTRY
from quicksilver.harness.record import EVENTS, Record
from quicksilver.measure.typed import encoded
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import VERDICTS
from quicksilver.report.site import explorer
from quicksilver.report.site.collection import Collection, NamedRecord, Piece, Problem, grouped
from quicksilver.report.site.views import generated_texts, token_views
from quicksilver.report.table import amount, signed
from quicksilver.report.written import Lines, PrintedPanel, without_folders

_ASSETS = ("site.css", "site.js", "tokens.js", "explorer.js", "runs.js")
_PREFIX = re.compile(r"\b[0-9a-f]{12,20}\b")


def make(results_dir: Path | str) -> tuple[Path, list[Problem]]:
    """Write the site below `results_dir`; returns its first page and what is missing in it.

    Raises:
        ConfigError: there is no such folder, nothing was written in it yet, or `report` in it is not this command's.
    """
    site = Site(Collection(Path(results_dir)))
    contents = site.contents()
    folder = site.there.root / "report"
    publish(folder, contents)  # pages of records that no table names any more go: nothing links to them
    return folder / "index.html", site.there.problems


class Site:
    """The pages of what is there."""

    def __init__(self, there: Collection):
        self.there = there
        self._words: dict[str, dict[int, list[str]]] = {}  # of shown windows, by script and window

    def contents(self) -> dict[str, bytes]:
        """Every file of the site by its path in it."""
        contents = {f"assets/{name}": files(__package__).joinpath("templates", name).read_bytes() for name in _ASSETS}
        contents["assets/bokeh.js"] = explorer.bokeh_script()
        for run in self.there.runs.values():
            contents |= self._run_pages(run)
        for script, words in self._words.items():
            contents[script] = f'"use strict";\nconst sharedWords = {_json(dict(sorted(words.items())))};\n'.encode()
        for piece in self.there.pieces:
            contents |= self._piece_pages(piece)
        traced = [run for run in self.there.runs.values() if run.trace is not None]
        sweeps = without_folders(explorer.sweeps(self._panels()))
        contents["explorer.html"] = self._page(
            "explorer.html", sweeps=sweeps, charts=[explorer.cost_chart(sweep) for sweep in sweeps]
        )
        contents["tokens.html"] = self._page("tokens_index.html", traced=traced)
        written = [run for run in self.there.runs.values() if run.samples is not None]
        contents["texts.html"] = self._page("samples_index.html", written=written)
        contents["runs.html"] = self._runs_page()
        claims = self._page(
            "claims.html",
            claims=self._claim_rows("claim"),
            verdicts=self._verdicts(),
            statements=self._claim_rows("statement"),
            stated=self._verdicts("statement"),
            conflicts=self._claim_rows("conflict"),
            findings=self._verdicts("conflict"),
        )
        contents["claims.html"] = claims
        contents["index.html"] = self._page(
            "index.html",
            verdicts=self._verdicts(),
            groups=self._groups(),
            about=self._about(),
            problems=self.there.problems,
        )
        return contents

    def _runs_page(self) -> bytes:
        runs = list(self.there.runs.values())
        records = [run.record for run in runs if run.record is not None]
        filters = {
            "model": sorted({record.model.name for record in records}),
            "text": sorted({record.data.name for record in records}),
            "protocol": sorted({record.protocol.name for record in records}),
        }
        settings = {run.fingerprint: dict(run.settings) for run in runs if run.record is not None}
        return self._page("runs.html", runs=runs, filters=filters, settings=settings)

    def _panels(self) -> Iterable[tuple[str, list[tuple[Record, Record]]]]:
        """The panels of every frame with the records in them that are there."""
        for piece in self.there.pieces:
            for panel, names in piece.panels.items():
                runs = [self.there.runs[name] for name in names if name in self.there.runs]
                pairs = [(run.record, run.dense) for run in runs if run.record is not None and run.dense is not None]
                yield f"{piece.title.partition(':')[0]}, {panel}", pairs

    def _piece_pages(self, piece: Piece) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        folder = self.there.root / f"{piece.kind}s"
        pictures = [name for name in piece.written.pictures if _is_plain_file(folder / name)] if piece.written is not None else []
        if piece.written is not None and len(pictures) < len(piece.written.pictures):
            self.there.note([piece], piece.name, f"a picture of it is not in {piece.kind}s.")
        for name in filter(None, (*pictures, piece.carried_data)):
            contents[f"files/{name}"] = (folder / name).read_bytes()
        runs = [run for run in self.there.runs.values() if piece in run.pieces]
        place = self.there.pieces.index(piece)
        before = self.there.pieces[place - 1] if place else None
        after = next(iter(self.there.pieces[place + 1 :]), None)
        values: dict[str, Any] = {
            "piece": piece,
            "pictures": pictures,
            "runs": runs,
            "linked": self._linked,
            "selections": self.there.selections(piece),
            "before": before,
            "after": after,
        }
        page = self._page("piece.html", **values)
        contents[f"{piece.name}.html"] = page
        return contents

    def _run_pages(self, run: NamedRecord) -> dict[str, bytes]:
        contents = {}
        try:
            views = token_views(run.record) if run.record is not None else []
        except Exception as error:  # whatever a damaged record does: all other pages stay
            self.there.trouble(run, error)
        else:
            for view in views:
                view |= {key: without_folders(view[key]) for key in ("no_texts",) if key in view}
            if views and run.record is not None:
                run.trace = f"tokens/{run.fingerprint}.html"
                words = self._share(run.record.data.token_digest, views)
                contents[run.trace] = self._page("tokens.html", base="../", run=run, views=views, words=words)
        try:
            written = generated_texts(run.record) if run.record is not None else {}
        except Exception as error:  # as above
            self.there.trouble(run, error)
        else:
            if written:
                run.samples = f"texts/{run.fingerprint}.html"
                contents[run.samples] = self._page("samples.html", base="../", run=run, samples=written)
        details: dict[str, Any] | None = None
        try:
            details = self._run_details(run.record, run.dense) if run.record is not None else None
        except Exception as error:  # as above
            self.there.trouble(run, error)
        contents[f"runs/{run.fingerprint}.html"] = self._page("run.html", base="../", run=run, details=details)
        return contents

    def _share(self, digest: str, views: Sequence[dict[str, Any]]) -> str:
        """Take the words of windows out of `views` into one script for all runs on the same tokens; returns its path."""
        script = f"assets/words-{digest[:12]}.js"
        shared = self._words.setdefault(script, {})
        for view in views:
            if "window" in view and view["texts"] is not None:
                shared[view["window"]] = view["texts"]
                view["texts"] = "shared"
        return script

    def _run_details(self, record: Record, dense: Record | None) -> dict[str, Any]:
        outcome = Outcome(Row("", "", "", "", ()), record, dense)
        shown: dict[str, Any] = without_folders(
            {
                "notes": provenance.notes([outcome])[:-1],
                "passes": _passes(record),
                "measured": _flat(
                    {key: value for key, value in record.content.items() if key not in (*_SHOWN_APART, *_DESCRIBED)}
                ),
            }
        )
        return shown | {
            "config": _yaml({key: value for key, value in record.config.items() if key not in _PLACES}),
            "environment": _yaml(encoded(record.environment)),
            "described": _yaml({key: record.content[key] for key in _DESCRIBED if key in record.content}),
            "files": record.files,
            "chart": explorer.windows_chart(record),
        }

    def _about(self) -> str:
        """What the records are of, by name; each page has the details of its own."""
        records = [run.record for run in self.there.runs.values() if run.record is not None]
        if not records:
            return ""

        def names(group: str) -> str:
            return ", ".join(sorted({getattr(record, group).name for record in records}))

        machines = ", ".join(sorted({record.environment.gpu or record.environment.cpu for record in records}))
        protocols = (
            f"under the protocols {names('protocol')}" if "," in names("protocol") else f"under the protocol {names('protocol')}"
        )
        return f"{len(records)} records of {names('model')} on {names('data')}, {protocols}, made on {machines}. Each page says which it shows."

    def _claim_rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.there.claims or () if row["kind"] == kind]

    def _verdicts(self, kind: str = "claim") -> list[tuple[str, int]]:
        """How many rows of the ledger have each verdict, in the ledger's order."""
        counts = Counter(row["verdict"] for row in self._claim_rows(kind))
        return [(verdict, counts[verdict]) for verdict in dict.fromkeys((*VERDICTS, *counts)) if counts[verdict]]

    def _groups(self) -> list[tuple[str, Counter[str]]]:
        """Verdicts by group of claims, in the ledger's order."""
        groups: dict[str, Counter[str]] = {}
        for row in self._claim_rows("claim"):
            groups.setdefault(row["panel"], Counter())[row["verdict"]] += 1
        return list(groups.items())

    def _linked(self, html: str, base: str = "") -> Markup:
        """HTML with the fingerprints in it linked to their pages."""

        def link(match: re.Match[str]) -> str:
            name = next((name for name in self.there.runs if name.startswith(match[0])), None)
            return f'<a href="{base}runs/{name}.html"><code>{match[0]}</code></a>' if name is not None else match[0]

        return Markup(_PREFIX.sub(link, html))

    def _page(self, template: str, base: str = "", **values: Any) -> bytes:
        """`base` leads from the page to the first one."""
        page = self._environment.get_template(template).render(base=base, site=self.there, **values)
        return (re.sub(r"\n\s*\n+", "\n", page).strip() + "\n").encode()

    @cached_property
    def _environment(self) -> jinja2.Environment:
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("quicksilver.report.site"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
            lstrip_blocks=True,
        )  # fmt: skip
        environment.filters |= {
            "signed": signed,
            "json": _json,
            "slug": _slug,
            "digits": _digits,
            "value": _value,
            "grouped": lambda problems: without_folders(grouped(problems)),
            "grid": grid,
            "prose": prose,
        }
        return environment


_PLACES = ("data", "results_dir", "tracker")  # where things lie on the machine that made the record
_SHOWN_APART = (
    ENTRY,
    "checksum",
    "config",
    "environment",
    "files",
    "schema_version",
    "fingerprint",
    "identity",
    "label",
    "texts",
)
_DESCRIBED = (
    *("dense_fingerprint", "modules", "execution", "protocol", "lookahead", "model", "data", "calibration", "package"),
    *("started", "finished", "seconds"),
)


def _yaml(entries: Mapping[str, Any]) -> str:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the one in C where there is one: ten times as fast
    return yaml.dump(without_folders(entries), Dumper=dumper, sort_keys=False, allow_unicode=True, width=120)


def _passes(record: Record) -> list[dict[str, Any]]:
    """What happened when, from events.jsonl: seconds from the start, seconds until the next event."""
    path = record.path / EVENTS
    if not path.is_file():
        return []
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    times = [pd.Timestamp(event["time"]) for event in events]
    return [
        {
            "event": event["event"],
            "at_s": (time - times[0]).total_seconds(),
            "took_s": (after - time).total_seconds() if after is not None else None,
            "detail": ", ".join(f"{key}: {value}" for key, value in event.items() if key not in ("time", "event", "pid")),
        }
        for event, time, after in zip(events, times, [*times[1:], None], strict=True)
    ]


def _flat(entries: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in entries.items():
        if isinstance(value, Mapping) and value:
            flat += _flat(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", value))
    return flat


def _value(value: Any, key: str = "") -> str:
    """One entry of a record in print: numbers with 6 digits, large counts with their prefix beside them, long lists cut."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int) and abs(value) >= 10_000 and key.endswith(("_flops", "_bytes", "parameters")):
        return f"{value} ({amount(value)})"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = ", ".join(_value(one) for one in value[:8])
        return f"[{shown}{', …' if len(value) > 8 else ''}]" + (f" ({len(value)})" if len(value) > 8 else "")
    return str(value) if value != {} else "none"


def _digits(value: Any) -> str:
    """A number of a ledger in print, empty where there is none."""
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)


def _json(data: Any) -> Markup:
    """For a `<script type="application/json">`: nothing in it can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()  # what a link leads to was not written here


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-")


# --- panels as HTML ------------------------------------------------------------------------------------------------------------


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
