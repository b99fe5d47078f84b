"""A static site of everything that was written: verdicts, tables, figures, runs, tokens. Opens from a folder, asks no network.

It reads `tables/`, `figures/`, `claims.csv` and the records that those name, all below one results folder, and writes `report/`
beside them. The same files give the same bytes. What is missing is said on the page and in the list of problems, and the rest is
built all the same.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup
from PIL import Image

from quicksilver.harness.record import EVENTS, Record, load_record
from quicksilver.report import provenance
from quicksilver.report.artefacts import Artefact, Outcome, Row, artefacts
from quicksilver.report.cells import amount, signed
from quicksilver.report.claims.ledger import VERDICTS
from quicksilver.report.comparison import against_dense
from quicksilver.report.site import charts, explorer, markdown, tokens
from quicksilver.report.writing import write_files
from quicksilver.runtime.errors import ConfigError, QuickSilverError

_ASSETS = ("site.css", "site.js", "tokens.js", "explorer.js")
_PREFIX = re.compile(r"\b[0-9a-f]{12,20}\b")
_SVG_LIMIT_BYTES = 100_000  # above it, the pixels of the PNG are the smaller file by far, packed without loss
_DATA_LIMIT_BYTES = 30_000  # a larger frame stays where it was written
_PICTURES = ("gif", "html")


@dataclass(frozen=True)
class Problem:
    """Something that should be on the site and is not, and what to do."""

    where: str
    what: str
    remedy: str


@dataclass
class Piece:
    """One written table or figure, or one that should be written.

    Attributes:
        name: base name of its files and of its page.
        command: what makes it.
        prefixes: beginnings of the fingerprints of the records that it names.
        panels: fingerprints of the records in each panel of its frame.
    """

    name: str
    kind: str
    title: str
    command: str
    order: tuple[Any, ...]
    document: markdown.Document | None = None
    picture: str | None = None
    caption: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    data: Path | None = None
    prefixes: tuple[str, ...] = ()
    panels: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def carried_data(self) -> str | None:
        """Name of its frame, where the site has it too."""
        return self.data.name if self.data is not None and self.data.stat().st_size <= _DATA_LIMIT_BYTES else None

    @property
    def written(self) -> bool:
        return self.document is not None or self.picture is not None


@dataclass
class Run:
    """A record that a piece names, or the reason why it cannot be shown."""

    fingerprint: str
    record: Record | None
    dense: Record | None
    pieces: list[Piece]
    problems: list[Problem] = field(default_factory=list)
    row: Mapping[str, Any] = field(default_factory=dict)
    trace: str | None = None  # its page

    @property
    def label(self) -> str:
        return self.record["label"] if self.record is not None else "no record"


def make(results_dir: Path | str) -> tuple[Path, list[Problem]]:
    """Write the site below `results_dir`; returns its first page and what is missing in it.

    Raises:
        ConfigError: there is no such folder, or nothing was written in it yet.
    """
    site = Site(Path(results_dir))
    contents = site.contents()
    folder = site.root / "report"
    for name, content in contents.items():
        write_files((folder / name).parent, {Path(name).name: content})
    for path in sorted(folder.rglob("*")):
        # Pages of records that no table names any more: links to them are gone.
        if path.is_file() and path.relative_to(folder).as_posix() not in contents:
            path.unlink()
    return folder / "index.html", site.problems


class Site:
    """The pages of one results folder."""

    def __init__(self, root: Path):
        if not root.is_dir():
            raise ConfigError(f"{root} is not there: a report is made of what `make reproduce` writes into it.")
        self.root = root
        self.problems: list[Problem] = []
        self._words: dict[str, dict[int, list[str]]] = {}  # of shown windows, by script and window
        self.pieces = sorted(self._pieces(), key=lambda piece: piece.order)
        self.claims = self._claims()
        self.runs = self._runs()
        if not any(piece.written for piece in self.pieces) and self.claims is None:
            raise ConfigError(f"{root} has no table, figure or claim yet: make reproduce-table TABLE=11 writes one.")
        if self.runs and not any(run.record is not None for run in self.runs.values()):
            raise ConfigError(
                f"None of the {len(self.runs)} records that the tables and figures in {root} name is in {root / 'runs'}: a report of them "
                "would be empty, and one that is there was left as it is. make reproduce makes the records."
            )

    # --- what there is ------------------------------------------------------------------------------------------------------------

    def _pieces(self) -> Iterable[Piece]:
        known = artefacts()
        for artefact in known:
            yield self._piece(artefact.name, artefact)
        names = {artefact.name for artefact in known}
        written = {*self.root.glob("tables/*.md"), *self.root.glob("figures/*.svg")}
        for path in sorted(path for path in written if path.stem not in names and not path.name.startswith(".")):
            owner = next((one for one in known if path.stem.startswith(f"{one.name}-")), None)
            yield self._piece(path.stem, owner, kind="table" if path.suffix == ".md" else "figure")

    def _piece(self, name: str, artefact: Artefact | None, kind: str | None = None) -> Piece:
        kind = kind or (artefact.kind if artefact is not None else "table")
        command, title = "", name
        order: tuple[Any, ...] = (2, 0, name)
        if artefact is not None:
            command = f"make reproduce-{artefact.kind} {artefact.kind.upper()}={artefact.numbers[0]}"
            order = (*artefact.order, name)
            title = artefact.title[:1].upper() + artefact.title[1:]
            if artefact.is_numbered:
                title = f"{artefact.kind.capitalize()} {artefact.number}: {artefact.title}"
        piece = Piece(name, kind, title, command, order)
        if kind == "table":
            self._read_table(piece)
        else:
            self._read_figure(piece)
        if artefact is not None and name != artefact.name:
            piece.title += f" ({name.removeprefix(f'{artefact.name}-')})"  # of another model or text
        if not piece.written:
            self._problem([piece], piece.name, f"it was not made yet: there is no {kind}s/{name}.")
        return piece

    def _read_table(self, piece: Piece) -> None:
        path = self.root / "tables" / f"{piece.name}.md"
        if not path.is_file():
            return
        piece.document = markdown.parse(path.read_text(encoding="utf-8"))
        piece.title = piece.document.title or piece.title
        notes = "\n".join(block for block in piece.document.blocks if isinstance(block, str))
        self._read_data(piece, path.with_suffix(".csv"), notes)

    def _read_figure(self, piece: Piece) -> None:
        path = self.root / "figures" / f"{piece.name}.svg"
        if not path.is_file():
            return
        small = path.stat().st_size <= _SVG_LIMIT_BYTES or not path.with_suffix(".png").is_file()
        piece.picture = path.name if small else path.with_suffix(".webp").name
        title, piece.caption = _svg_words(path)
        piece.title = title or piece.title
        piece.extras = tuple(p.name for p in sorted(path.parent.glob(f"{piece.name}.*")) if p.suffix[1:] in _PICTURES)
        self._read_data(piece, path.with_suffix(".csv"), "\n".join(piece.caption))

    def _read_data(self, piece: Piece, path: Path, notes: str) -> None:
        """The records that the frame and the notes name, and rows of the frame that failed."""
        found = [match for part in re.findall(r"Records: [^<\n]*", notes) for match in _PREFIX.findall(part)]
        if path.is_file() and path.stat().st_size > 1:
            piece.data = path
            frame = pd.read_csv(path, dtype=str, keep_default_na=False)
            for column in frame.columns:
                if re.fullmatch(r"(\w+_)?(record|fingerprint)s?", str(column)):
                    found += [match for value in frame[column].unique() for match in _PREFIX.findall(value)]
            if {"panel", "record"} <= set(frame.columns):
                piece.panels = {str(key): sorted(set(rows["record"]) - {""}) for key, rows in frame.groupby("panel", sort=False)}
            if "status" in frame:
                failed = frame[frame["status"] == "failed"]
                for _, row in failed.iterrows():
                    which = " ".join(row.get(key, "") for key in ("panel", "key")).strip()
                    self._problem([piece], piece.name, f"the run of its row {which} failed when it was made.")
        whole = [one for one in found if len(one) == 20]
        short = [one for one in found if len(one) < 20 and not any(other.startswith(one) for other in whole)]
        piece.prefixes = tuple(sorted({*whole, *short}))

    def _runs(self) -> dict[str, Run]:
        """Every named record, and the dense record of each, by fingerprint."""
        named: dict[str, list[Piece]] = {}
        there = sorted(path.name for path in (self.root / "runs").glob("*") if not path.name.startswith("."))
        ledger = Piece("claims", "table", "the claims", "make claims", ())
        if self.claims is not None:
            ledger.prefixes = tuple(sorted(set(self.claims["record"]) - {""}))
        for piece in (*self.pieces, ledger):
            for prefix in piece.prefixes:
                fingerprint = next((name for name in there if name.startswith(prefix)), prefix)
                pieces = named.setdefault(fingerprint, [])
                if piece not in pieces:
                    pieces.append(piece)
        runs = {fingerprint: self._run(fingerprint, pieces) for fingerprint, pieces in sorted(named.items())}
        for run in list(runs.values()):
            needed = run.record.dense_fingerprint if run.record is not None else None
            if needed is not None and needed not in runs:
                runs[needed] = self._run(needed, run.pieces)
        for run in runs.values():
            if run.record is not None:
                run.dense = runs[run.record.dense_fingerprint or run.fingerprint].record
        for run in runs.values():
            if run.record is not None and run.dense is not None:
                try:
                    run.row = against_dense(run.record, run.dense)
                except QuickSilverError as error:
                    self._trouble(run, error)
        return dict(sorted(runs.items(), key=lambda item: (item[1].record is None, item[1].label, item[0])))

    def _run(self, fingerprint: str, pieces: list[Piece]) -> Run:
        path = self.root / "runs" / fingerprint
        names = ", ".join(piece.name for piece in pieces)
        try:
            if not path.is_dir():
                raise ConfigError(f"there is no such record, and {names} {'name it' if len(pieces) > 1 else 'names it'}.")
            return Run(fingerprint, load_record(path), None, pieces)
        except QuickSilverError as error:
            return Run(fingerprint, None, None, pieces, [self._problem(pieces, f"runs/{fingerprint}", str(error))])

    def _claims(self) -> pd.DataFrame | None:
        path = self.root / "claims.csv"
        if not path.is_file():
            self.problems.append(
                Problem("claims", f"the ledger was not made yet: there is no {path.name}.", "To make it: make claims")
            )
            return None
        return pd.read_csv(path, dtype=str, keep_default_na=False)

    def _trouble(self, run: Run, error: QuickSilverError) -> None:
        run.problems.append(self._problem(run.pieces, f"runs/{run.fingerprint}", str(error)))

    def _problem(self, pieces: Sequence[Piece], where: str, what: str, remedy: str = "") -> Problem:
        """Note what is missing, here and on the pages of `pieces`; the first one's command makes it, unless `remedy` is another."""
        # Where the results lie must not show on the pages.
        what = what.replace(f"{self.root}/", "")
        problem = Problem(where, what, f"To make it: {remedy or pieces[0].command}" if remedy or pieces[0].command else "")
        self.problems.append(problem)
        for piece in pieces:
            piece.problems.append(problem)
        return problem

    # --- pages ----------------------------------------------------------------------------------------------------------------------

    def contents(self) -> dict[str, bytes]:
        """Every file of the site by its path in it."""
        contents = {f"assets/{name}": files(__package__).joinpath("templates", name).read_bytes() for name in _ASSETS}
        contents["assets/bokeh.js"] = charts.script()
        for run in self.runs.values():
            contents |= self._run_pages(run)
        for script, words in self._words.items():
            contents[script] = f'"use strict";\nconst sharedWords = {_json(dict(sorted(words.items())))};\n'.encode()
        for piece in self.pieces:
            contents |= self._piece_pages(piece)
        traced = [run for run in self.runs.values() if run.trace is not None]
        sweeps = explorer.sweeps(self._panels())
        contents["explorer.html"] = self._page("explorer.html", sweeps=sweeps, charts=[charts.cost(sweep) for sweep in sweeps])
        contents["tokens.html"] = self._page("tokens_index.html", traced=traced)
        contents["runs.html"] = self._page("runs.html", runs=list(self.runs.values()))
        claims = self._page(
            "claims.html",
            claims=self._claim_rows("claim"),
            verdicts=self._verdicts(),
            conflicts=self._claim_rows("conflict"),
            findings=self._verdicts("conflict"),
        )
        contents["claims.html"] = claims
        contents["index.html"] = self._page(
            "index.html",
            verdicts=self._verdicts(),
            groups=self._groups(),
            about=self._about(),
            problems=self.problems,
        )
        return contents

    def _panels(self) -> Iterable[tuple[str, list[tuple[Record, Record]]]]:
        """The panels of every frame with the records in them that are there."""
        for piece in self.pieces:
            for panel, names in piece.panels.items():
                runs = [self.runs[name] for name in names if name in self.runs]
                pairs = [(run.record, run.dense) for run in runs if run.record is not None and run.dense is not None]
                yield f"{piece.title.partition(':')[0]}, {panel}", pairs

    def _piece_pages(self, piece: Piece) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        folder = self.root / f"{piece.kind}s"
        for name in filter(None, (piece.picture, piece.carried_data, *piece.extras)):
            packed = name.endswith(".webp")
            contents[f"files/{name}"] = _packed(folder / name) if packed else (folder / name).read_bytes()
        runs = [run for run in self.runs.values() if piece in run.pieces]
        place = self.pieces.index(piece)
        before = self.pieces[place - 1] if place else None
        after = next(iter(self.pieces[place + 1 :]), None)
        page = self._page("piece.html", piece=piece, runs=runs, linked=self._linked, before=before, after=after)
        contents[f"{piece.name}.html"] = page
        return contents

    def _run_pages(self, run: Run) -> dict[str, bytes]:
        contents = {}
        try:
            views = tokens.shown(run.record) if run.record is not None else []
        except QuickSilverError as error:
            self._trouble(run, error)
        else:
            if views and run.record is not None:
                run.trace = f"tokens/{run.fingerprint}.html"
                words = self._share(run.record["data"]["token_digest"], views)
                contents[run.trace] = self._page("tokens.html", base="../", run=run, views=views, words=words)
        details: dict[str, Any] | None = None
        try:
            details = self._run_details(run.record, run.dense) if run.record is not None else None
        except QuickSilverError as error:
            self._trouble(run, error)
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
        return {
            "notes": provenance.notes([outcome])[:-1],
            "passes": _passes(record),
            "config": _yaml({key: value for key, value in record["config"].items() if key not in _PLACES}),
            "environment": _yaml(record["environment"]),
            "measured": _flat({key: value for key, value in record.data.items() if key not in (*_SHOWN_APART, *_DESCRIBED)}),
            "described": _yaml({key: record[key] for key in _DESCRIBED if key in record.data}),
            "files": record["files"],
            "chart": charts.windows(record),
        }

    def _about(self) -> str:
        """What the records are of, by name; each page has the details of its own."""
        records = [run.record for run in self.runs.values() if run.record is not None]
        if not records:
            return ""

        def names(group: str) -> str:
            return ", ".join(sorted({str(record[group]["name"]) for record in records}))

        machines = ", ".join(sorted({record["environment"]["gpu"] or record["environment"]["cpu"] for record in records}))
        protocols = (
            f"under the protocols {names('protocol')}" if "," in names("protocol") else f"under the protocol {names('protocol')}"
        )
        return f"{len(records)} records of {names('model')} on {names('data')}, {protocols}, made on {machines}. Each page says which it shows."

    def _claim_rows(self, kind: str) -> list[dict[str, Any]]:
        return [] if self.claims is None else self.claims[self.claims["kind"] == kind].to_dict("records")

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
            name = next((name for name in self.runs if name.startswith(match[0])), None)
            return f'<a href="{base}runs/{name}.html"><code>{match[0]}</code></a>' if name is not None else match[0]

        return Markup(_PREFIX.sub(link, html))

    def _page(self, template: str, base: str = "", **values: Any) -> bytes:
        """`base` leads from the page to the first one."""
        page = self._environment.get_template(template).render(base=base, site=self, **values)
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
            "grouped": grouped,
        }
        return environment


_PLACES = ("data", "results_dir", "tracker")  # where things lie on the machine that made the record
_SHOWN_APART = ("config", "environment", "files", "schema_version", "fingerprint", "identity", "label", "texts")
_DESCRIBED = (
    *("dense_fingerprint", "modules", "execution", "protocol", "lookahead", "model", "data", "calibration", "package"),
    *("started", "finished", "seconds"),
)


def _packed(path: Path) -> bytes:
    """The picture that stands as PNG under this name, as WebP without loss."""
    content = io.BytesIO()
    Image.open(path.with_suffix(".png")).convert("RGB").save(content, "WEBP", lossless=True, quality=80, method=2)
    return content.getvalue()


def _yaml(entries: Mapping[str, Any]) -> str:
    return yaml.safe_dump(_without_folders(entries), sort_keys=False, allow_unicode=True, width=120)


def _without_folders(entry: Any) -> Any:
    """Local files by their names: where they lie is nobody else's business, and would make the page another one elsewhere."""
    if isinstance(entry, Mapping):
        return {key: _without_folders(value) for key, value in entry.items()}
    if isinstance(entry, list):
        return [_without_folders(value) for value in entry]
    return Path(entry).name if isinstance(entry, str) and Path(entry).is_absolute() else entry


def _svg_words(path: Path) -> tuple[str, tuple[str, ...]]:
    """Title and caption, which a picture carries as its metadata."""
    spaces = {"dc": "http://purl.org/dc/elements/1.1/"}
    try:
        tree = ElementTree.parse(path)
    except ElementTree.ParseError:
        return "", ()
    title, description = (tree.find(f".//dc:{name}", spaces) for name in ("title", "description"))
    lines = (description.text or "").splitlines() if description is not None else []
    return (title.text or "" if title is not None else ""), tuple(lines)


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


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def grouped(problems: Sequence[Problem]) -> list[tuple[str, list[str], str]]:
    """What is missing, where (each once), and the remedy: the same trouble of many records is one entry."""
    groups: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        groups.setdefault((problem.what, problem.remedy), []).append(problem.where)
    return [(what, list(dict.fromkeys(where)), remedy) for (what, remedy), where in groups.items()]


def describe(problems: Sequence[Problem]) -> str:
    """The problems for a terminal."""
    lines = []
    for what, where, remedy in grouped(problems):
        lines.append(f"{', '.join(where)}: {what}")
        if remedy:
            lines.append(f"  {remedy}")
    return "\n".join(lines)
