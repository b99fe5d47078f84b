"""The static site: pages of verdicts, tables, figures, runs and tokens. Opens from a folder, asks no network.

The same files give the same bytes. It is written to `report/` below the results folder, which git ignores.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup, escape
from tqdm import tqdm

from quicksilver.files import publish
from quicksilver.measure.measurement import encoded
from quicksilver.records.archive import ENTRY
from quicksilver.records.record import EVENTS, Record, flat, frame_of
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import counted, outcomes_of
from quicksilver.report.site.collection import Collection, NamedRecord, Piece, Problem, grouped
from quicksilver.report.site.views import boards, bokeh_script, generated_texts, sweeps, token_views, windows_chart
from quicksilver.report.table import PrintedPanel, amount, signed, without_folders

T = TypeVar("T")

_ASSETS = ("site.css", "site.js", "charts.js", "tokens.js", "explorer.js", "runs.js")
# Page to template; the first page last, because pages note what is missing.
_PAGES = {"tokens": "tokens_index", "texts": "samples_index"}
_PAGES |= {name: name for name in ("explorer", "leaderboard", "claims", "index")}
ROWS = 500  # of a page of runs
MOST_WHOLE = 500  # of records that nothing names, so many have intervals, charts and tokens
_BETTER = {"Δppl": -1, "Δ perplexity": -1, "Δ far recall": -1, "KL × 100": -1} | dict.fromkeys(
    ("exec", "nominal", "exec, prompt", "FLOPs saved", "KV bytes", "speedup"), 1
)
_COMPACT: dict[str, Any] = dict(ensure_ascii=False, separators=(",", ":"), allow_nan=False)  # JSON in pages
_FEWEST_LEFT = 2  # the name of the row and one more are not a table
_PLACES = ("data", "results_dir", "tracker")  # where things lie on the machine that made the record
_DESCRIBED = (
    *("dense_fingerprint", "modules", "execution", "protocol", "lookahead", "model", "data", "calibration", "package"),
    *("started", "finished", "seconds"),
)
_NAMES = ("checksum", "config", "environment", "files", "schema_version", "fingerprint", "identity", "label", "texts")
_SHOWN_APART = {ENTRY, *_NAMES, *_DESCRIBED}


def make(results_dir: Path | str) -> tuple[Path, list[Problem]]:
    """Write the site below `results_dir`; returns its first page and what is missing in it.
    Raises ConfigError: there is no such folder, nothing was written in it yet, or `report` in it is not this command's."""
    site = Site(Collection(Path(results_dir), MOST_WHOLE))
    folder = site.there.root / "report"
    publish(folder, site.contents())  # pages of records that no table names any more go: nothing links to them
    return folder / "index.html", site.there.problems


class Site:
    """The pages of what is there."""

    def __init__(self, there: Collection):
        self.there = there
        self._words: dict[str, dict[int, list[str]]] = {}  # of shown windows, by script and window

    def contents(self) -> dict[str, bytes]:
        """Every file of the site by its path in it."""
        runs, pieces = list(self.there.runs.values()), self.there.pieces
        contents = {f"assets/{name}": files(__package__).joinpath("templates", name).read_bytes() for name in _ASSETS}
        contents["assets/bokeh.js"] = bokeh_script()
        for run in tqdm(runs, "Pages", leave=False, disable=None):  # a bar on a terminal only
            contents |= self._run_pages(run)
        for script, words in self._words.items():
            contents[script] = (
                f'"use strict";\nconst sharedWords = {json.dumps(dict(sorted(words.items())), **_COMPACT)};\n'.encode()
            )
        for before, piece, after in zip([None, *pieces], pieces, [*pieces[1:], None], strict=False):
            contents |= self._piece_pages(piece, before=before, after=after)
        panels = ((f"{one.title.partition(':')[0]}, {panel}", names) for one in pieces for panel, names in one.panels.items())
        named = ((title, [run for run in map(self.there.runs.get, names) if run is not None]) for title, names in panels)
        about = _about([run.record for run in runs if run.record is not None])
        shown = {"sweeps": without_folders(sweeps(named)), "boards": boards(runs), "about": about}
        contents["assets/records.parquet"] = self._frame()
        parts = [runs[first : first + ROWS] for first in range(0, len(runs), ROWS)] or [[]]
        names = ["runs.html", *(f"runs-{number}.html" for number in range(2, len(parts) + 1))]
        for name, part in zip(names, parts, strict=True):
            contents[name] = self._page("runs.html", runs=part, name=name, names=names)
        return contents | {f"{page}.html": self._page(f"{template}.html", **shown) for page, template in _PAGES.items()}

    def _frame(self) -> bytes:
        """A row a record, as `record_frame` has it, in types that parquet takes."""
        frame = frame_of([run.record for run in self.there.runs.values() if run.record is not None])
        for name in frame.select_dtypes(exclude=["number", "bool"]):
            if len({type(one) for one in frame[name] if one is not None and one == one}) > 1:
                frame[name] = frame[name].map(json.dumps, na_action="ignore")
            frame[name] = frame[name].map(without_folders, na_action="ignore")
        written = io.BytesIO()
        frame.to_parquet(written)
        return written.getvalue()

    def _piece_pages(self, piece: Piece, **around: Piece | None) -> dict[str, bytes]:
        pictures, written = piece.pictures, piece.written
        if written is not None and len(pictures) < len(written.pictures):
            self.there.note([piece], piece.name, f"a picture of it is not in {piece.kind}s.")
        carried = dict.fromkeys((*pictures, piece.shown if pictures else None, piece.carried_data))
        contents = {f"files/{name}": (piece.folder / name).read_bytes() for name in carried if name}
        runs = [run for run in self.there.runs.values() if piece in run.pieces]
        shown: dict[str, Any] = {"linked": self._linked, "selections": self.there.selections(piece), **around}
        return contents | {f"{piece.name}.html": self._page("piece.html", piece=piece, pictures=pictures, runs=runs, **shown)}

    def _run_pages(self, run: NamedRecord) -> dict[str, bytes]:
        contents = {}
        views = [] if run.brief else self._of(run, token_views) or []
        if views and run.record is not None:
            for view in views:
                view |= {key: without_folders(view[key]) for key in ("no_texts",) if key in view}
            run.trace = f"tokens/{run.fingerprint}.html"
            words = self._share(run.record.data.token_digest, views)
            contents[run.trace] = self._page("tokens.html", base="../", run=run, views=views, words=words)
        if samples := self._of(run, generated_texts):
            run.samples = f"texts/{run.fingerprint}.html"
            contents[run.samples] = self._page("samples.html", base="../", run=run, samples=samples)
        details = self._of(run, lambda record: _details(record, run.dense, run.brief))
        contents[f"runs/{run.fingerprint}.html"] = self._page("run.html", base="../", run=run, details=details)
        return contents

    def _of(self, run: NamedRecord, read: Callable[[Record], T]) -> T | None:
        """What `read` finds in the record; None: there is none, or it is damaged, which is noted."""
        try:
            return read(run.record) if run.record is not None else None
        except Exception as error:  # whatever a damaged record does: all other pages stay
            self.there.trouble(run, error)
            return None

    def _share(self, digest: str, views: Sequence[dict[str, Any]]) -> str:
        """Take the words of windows out of `views` into one script for all runs on the same tokens; returns its path."""
        script = f"assets/words-{digest[:12]}.js"
        for view in views:
            if "window" in view and view["texts"] is not None:
                self._words.setdefault(script, {})[view["window"]] = view["texts"]
                view["texts"] = "shared"
        self._words.setdefault(script, {})
        return script

    def _linked(self, html: str, base: str = "") -> Markup:
        """HTML with the fingerprints in it linked to their pages."""

        def link(match: re.Match[str]) -> str:
            name = next((name for name in self.there.runs if name.startswith(match[0])), None)
            return f'<a href="{base}runs/{name}.html"><code>{match[0]}</code></a>' if name is not None else match[0]

        return Markup(re.sub(r"\b[0-9a-f]{12,20}\b", link, html))

    def _page(self, template: str, base: str = "", **values: Any) -> bytes:
        """`base` leads from the page to the first one."""
        page = _environment().get_template(template).render(base=base, site=self.there, **values)
        return (re.sub(r"\n\s*\n+", "\n", page).strip() + "\n").encode()


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("quicksilver.report.site")
    options: dict[str, Any] = dict(trim_blocks=True, lstrip_blocks=True, autoescape=True, undefined=jinja2.StrictUndefined)
    environment = jinja2.Environment(loader=loader, **options)
    environment.policies["json.dumps_kwargs"] = _COMPACT
    environment.filters |= dict(
        signed=signed, digits=_digits, value=_value, prose=prose, lines=cell_lines, of_paper=of_paper, best=best
    )
    # Of rows of the ledger, how many have each verdict; and how many outcomes.
    environment.filters["counted"] = lambda rows: counted(row["verdict"] for row in rows)
    environment.filters["outcomes"] = lambda rows: counted(outcomes_of(pd.DataFrame(rows))) if rows else []
    environment.filters["slug"] = lambda text: re.sub(r"\W+", "-", text.lower()).strip("-")
    environment.filters["grouped"] = lambda problems: without_folders(grouped(problems))
    return environment


def _about(records: Sequence[Record]) -> str:
    """What the records are of, by name; each page has the details of its own."""
    if not records:
        return ""
    models, texts, protocols = (sorted({getattr(one, of).name for one in records}) for of in ("model", "data", "protocol"))
    machines = sorted({record.environment.gpu or record.environment.cpu for record in records})
    under = f"under the protocol{'s' if len(protocols) > 1 else ''} {', '.join(protocols)}, made on {', '.join(machines)}"
    return f"{len(records)} records of {', '.join(models)} on {', '.join(texts)}, {under}. Each page says which it shows."


# --- a run ------------------------------------------------------------------------------------------------------------------------
def _details(record: Record, dense: Record | None, brief: bool) -> dict[str, Any]:
    """What the page of a run shows of its record."""
    measured = flat({key: value for key, value in record.content.items() if key not in _SHOWN_APART})
    notes = provenance.notes([Outcome(Row("", "", "", "", ()), record, dense)])[:-1]
    shown: dict[str, Any] = without_folders({"notes": notes, "passes": _passes(record), "measured": list(measured.items())})
    texts = {
        "config": {key: value for key, value in record.config.items() if key not in _PLACES},
        "environment": encoded(record.environment),
        "described": {key: record.content[key] for key in _DESCRIBED if key in record.content},
    }
    chart = None if brief else windows_chart(record)
    return shown | {name: _yaml(of) for name, of in texts.items()} | {"files": record.files, "chart": chart}


def _yaml(entries: Mapping[str, Any]) -> str:
    return "".join(_dumped(json.dumps({key: entry})) for key, entry in entries.items())


@lru_cache(maxsize=4096)
def _dumped(entry: str) -> str:
    """An entry of a description as yaml. Most records of a folder have most entries alike, and yaml is slow."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the one in C where there is one: ten times as fast
    return yaml.dump(without_folders(json.loads(entry)), Dumper=dumper, sort_keys=False, allow_unicode=True, width=120)


def _passes(record: Record) -> list[dict[str, Any]]:
    """What happened when, from events.jsonl: seconds from the start, seconds until the next event."""
    path = record.path / EVENTS
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line] if path.is_file() else []
    times = [pd.Timestamp(event["time"]) for event in events]
    return [
        {
            "event": event["event"],
            "at_s": (time - times[0]).total_seconds(),
            "took_s": (after - time).total_seconds() if after is not None else None,
            "detail": ", ".join(f"{key}: {value}" for key, value in event.items() if key not in ("time", "event", "pid")),
        }
        for event, time, after in zip(events, times, [*times[1:], None], strict=bool(events))
    ]


# --- values in print --------------------------------------------------------------------------------------------------------------
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


def prose(text: str) -> Markup:
    """Words as HTML: what stands between backticks is code, everything else stays as it is."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def cell_lines(lines: Sequence[str]) -> Markup:
    """The lines of a cell as HTML."""
    return Markup("<br>").join(map(prose, lines))


def of_paper(panel: PrintedPanel) -> tuple[bool, ...]:
    """By column, whether it has the paper's numbers and may be folded away; none where hardly another column would be left."""
    found = tuple("paper" in column.group.split() for column in panel.columns)
    return found if len(found) - sum(found) > _FEWEST_LEFT else (False,) * len(found)


def best(panel: PrintedPanel) -> set[tuple[int, int]]:
    """(row, column) of the best measured value of each column that has a direction; rows count as in `PrintedRow.row`."""
    found: set[tuple[int, int]] = set()
    for at, column in enumerate(panel.columns):
        if (sign := _BETTER.get(column.header)) and "paper" not in column.group.split():
            rows = [
                row for one in panel.sections for row in one.rows if "†" not in "".join(row.cells[0])
            ]  # nothing that looks ahead
            cells = ((row.row, re.fullmatch(r"([+-]?\d[\d.]*)%?( \[.*)?", "".join(row.cells[at][:1]))) for row in rows)
            values = {row: sign * float(match[1]) for row, match in cells if match is not None}
            if len(set(values.values())) > 1 and (sign < 0 or max(values.values()) > 0):  # what saves nothing is not marked
                found |= {(row, at) for row, value in values.items() if value == max(values.values())}
    return found
