"""Everything that was written below one results folder: tables, figures, the ledger, and the records that those name.

It reads the JSON beside `tables/`, `figures/` and `claims.md`, and `runs/`. What is missing or damaged is noted where it belongs, and the
rest is there all the same.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from quicksilver.files import fingerprint_of, plain_name
from quicksilver.records import archive
from quicksilver.records.record import Record, flat
from quicksilver.records.stats import MIN_WINDOWS
from quicksilver.records.store import KEPT, Store
from quicksilver.report.artefacts import Artefact, artefacts
from quicksilver.report.comparison import against_dense
from quicksilver.report.reproduction import DEFAULT, LOCAL_SUFFIX, command_of, of_name
from quicksilver.report.table import COLOUR_MAP, Value, Written, read, without_folders
from quicksilver.runs.sweep import labels
from quicksilver.runtime.errors import ConfigError, QuickSilverError

_DATA_LIMIT_BYTES = 30_000  # a larger frame stays where it was written


class Problem(NamedTuple):
    """Something that should be there and is not, and what to do; `absent`: only because nobody made it yet."""

    where: str
    what: str
    remedy: str = ""
    absent: bool = False


@dataclass
class Piece:
    """One written table or figure, or one that should be written.

    Attributes:
        name: base name of its files and of its page.
        command: what makes it.
        written: what it says; None: it was not made yet, or its file is damaged.
        variant: the selection that it is of, where it is a variant of the piece called `of`; "": the default.
    """

    name: str
    kind: str
    folder: Path
    title: str = ""
    command: str = ""
    order: tuple[Any, ...] = ()
    written: Written | None = None
    problems: list[Problem] = field(default_factory=list)
    of: str = ""
    variant: str = ""

    def has(self, name: str) -> bool:
        """Whether its folder has this file; what a link leads to was not written here."""
        path = self.folder / name
        return path.is_file() and not path.is_symlink()

    @property
    def data(self) -> Path | None:
        """Its frame as CSV, where there is one that is not empty."""
        path = self.folder / f"{self.name}.csv"
        return path if self.written and self.has(path.name) and path.stat().st_size > 1 else None

    @property
    def carried_data(self) -> str | None:
        """Name of its frame, where a site has it too."""
        return self.data.name if self.data is not None and self.data.stat().st_size <= _DATA_LIMIT_BYTES else None

    @property
    def pictures(self) -> list[str]:
        """Names of its pictures that are there."""
        return [name for name in self.written.pictures if self.has(name)] if self.written is not None else []

    @property
    def has_colour_map(self) -> bool:
        """Whether its picture says that it has a colour map, which must not be turned around."""
        return any(COLOUR_MAP.encode() in (self.folder / name).read_bytes()[:2000] for name in self.pictures)

    @property
    def shown(self) -> str:
        """The picture that a page shows: vector graphics, which zoom, where they were written beside the others."""
        return vector if self.has(vector := f"{self.name}.svg") else self.pictures[0]

    @property
    def panels(self) -> dict[str, list[str]]:
        """Panel to fingerprints of its records."""
        return self.written.records_of_panels() if self.written is not None else {}


@dataclass
class NamedRecord:
    """A record, or the reason why it cannot be shown.

    Attributes:
        pieces: that name it.
        brief: one of many that nothing names: its pages have no interval, chart or token.
        row: what `against_dense` says of it.
        trace, samples: its pages of tokens and of generated texts.
        settings: of its configuration, what is not the same in every run.
        varied: keys of those in which runs with the same label differ.
        sweep: `NAME [17/200] tau_drift=p40`.
    """

    fingerprint: str
    record: Record | None
    pieces: list[Piece]
    dense: Record | None = None
    problems: list[Problem] = field(default_factory=list)
    row: Mapping[str, Any] = field(default_factory=dict)
    trace: str | None = None
    samples: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    varied: tuple[str, ...] = ()
    sweep: str | None = None
    brief: bool = False

    @property
    def label(self) -> str:
        if self.record is None:
            return "no record"
        return f"{without_folders(self.record.label)}{', the calibrating part' * (self.record.data.part == 'calibration')}"

    @property
    def differing(self) -> str:
        """`tau_drift=p40, resume_layers=4`: what tells it from runs of the same label; "": nothing."""
        return ", ".join(f"{key.rpartition('.')[2]}={self.settings[key]}" for key in self.varied if key in self.settings)


class Collection:
    """What one results folder has.

    Args:
        most_whole: of records that were made here and that nothing names, so many have intervals, charts and tokens; of more, none has.

    Raises:
        ConfigError: there is no such folder, nothing was written in it yet, or none of the records that are named.
    """

    def __init__(self, root: Path, most_whole: int = sys.maxsize):
        if not root.is_dir():
            raise ConfigError(f"{root} is not there: a report is made of what `quicksilver reproduce all` writes into it.")
        self.root = root
        self.problems: list[Problem] = []
        self._ledger = Piece("claims", "table", root, "the claims", "quicksilver claims")
        self.pieces = sorted(self._pieces(), key=lambda piece: piece.order)
        self.claims = self._claims()
        made = sorted({*(path.parent.name for path in root.glob("runs/[!.]*/record.json")), *self._committed()})
        if not any(piece.written for piece in self.pieces) and self.claims is None:  # nobody has made a table here
            self.problems.clear()
            if not made:
                begin = "quicksilver reproduce table 11 writes some."
                raise ConfigError(f"{root} has no record, table, figure or claim yet: {begin}")
        self.runs = self._runs(made, most_whole)
        if self.runs and not any(run.record is not None for run in self.runs.values()):
            raise ConfigError(
                f"None of the {len(self.runs)} records that the tables and figures in {root} name is in {root / 'runs'}: a report of them "
                "would be empty, and one that is there was left as it is. quicksilver reproduce all makes the records."
            )

    # --- tables, figures, the ledger ----------------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[Piece]:
        known = {artefact.name: artefact for artefact in artefacts()}
        yield from (self._piece(name, artefact, artefact.kind) for name, artefact in known.items())
        for path in sorted((*self.root.glob("tables/*.json"), *self.root.glob("figures/*.json"))):
            if path.stem in known or path.name.startswith("."):
                continue
            try:
                name = plain_name(path.stem, "the name of a table or figure")
            except ConfigError as error:
                self.problems.append(Problem(f"{path.parent.name}/{path.name}", str(error)))
                continue
            owner = next((one for one in known.values() if name.startswith(f"{one.name}-")), None)
            yield self._piece(name, owner, path.parent.name.removesuffix("s"))

    def _piece(self, name: str, artefact: Artefact | None, kind: str) -> Piece:
        piece = Piece(name, kind, self.root / f"{kind}s", name, order=(2, 0, name))
        if artefact is not None:
            title = artefact.title[:1].upper() + artefact.title[1:]
            piece.title = f"{artefact.kind.capitalize()} {artefact.number}: {artefact.title}" if artefact.is_numbered else title
            variant = of_name(name, artefact.name)
            piece.of, piece.variant = (artefact.name, variant.title) if variant is not None else ("", "")
            piece.command = command_of(artefact, variant.overrides if variant is not None else ())
            piece.order = (*artefact.order, name)
        path = piece.folder / f"{name}.json"
        try:
            if not path.is_file():
                self.note([piece], name, f"it was not made yet: there is no {kind}s/{path.name}.", absent=True)
                return piece
            piece.written = read(path)
        except ConfigError as error:
            self.note([piece], name, str(error))
            return piece
        piece.title = piece.written.title or piece.title
        says_its_own = kind == "figure" and bool(piece.variant)  # model and text
        if artefact is not None and name != artefact.name and not says_its_own:
            piece.title += f" ({name.removeprefix(f'{artefact.name}-')})"
        for entry in piece.written.entries:
            if entry.get("status") == "failed" and not name.endswith(LOCAL_SUFFIX):  # one of this machine says it in its row
                which = " ".join(str(entry.get(key) or "") for key in ("panel", "key")).strip()
                self.note([piece], name, f"the run of its row {which} failed when it was made.")
        return piece

    @property
    def findings(self) -> list[tuple[str, Piece]]:
        """The heading of each finding in findings.md, and the figure below it; none where there is no such file."""
        path = self.root / "findings.md"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = re.findall(r"^## \d+\. (.*?)$.*?\(figures/(\w+)\.", text, re.MULTILINE | re.DOTALL)
        return [(title, piece) for title, name in found for piece in self.pieces if piece.name == name and piece.pictures]

    def selections(self, piece: Piece) -> list[tuple[str, Piece]]:
        """The piece and its variants that were written, each with the selection it is of; none where there is only one."""
        name = piece.of or piece.name
        same = [(one.variant or DEFAULT, one) for one in self.pieces if one.written and name in (one.name, one.of)]
        return same if len(same) > 1 else []

    def _claims(self) -> list[dict[str, Value]] | None:
        """The rows of the ledger, empty text where there is no value; None: there is no ledger, or it is damaged."""
        path = self.root / "claims.json"
        try:
            if not path.is_file():
                self.note([self._ledger], "claims", f"the ledger was not made yet: there is no {path.name}.", absent=True)
                return None
            entries = read(path).entries
            found: list[dict[str, Value]] = [{key: "" if one is None else one for key, one in row.items()} for row in entries]
            for check, column in ((fingerprint_of, "record"), (plain_name, "artefact")):
                for name in filter(None, (row.get(column) for row in found)):
                    check(name, f"the {column} of a claim")
        except ConfigError as error:
            self.note([self._ledger], "claims", str(error))
            return None
        return found

    # --- records ------------------------------------------------------------------------------------------------------------------

    def _committed(self) -> list[str]:
        """Fingerprints of the repository's records; no table names those of methods that others added."""
        try:
            return archive.names(self.root / KEPT)
        except ConfigError as error:
            self.note([], KEPT, str(error))
            return []

    def _runs(self, made: Sequence[str], most_whole: int) -> dict[str, NamedRecord]:
        """Every record that was made here, is committed or is named, and the dense record of each, by fingerprint."""
        named: dict[str, list[Piece]] = {fingerprint: [] for fingerprint in made}
        judged = sorted({str(row["record"]) for row in self.claims or () if row.get("record")})
        for piece, names in (*((one, one.written.records) for one in self.pieces if one.written), (self._ledger, judged)):
            for name in dict.fromkeys(names):
                named.setdefault(name, []).append(piece)
        bar = tqdm(sorted(named.items()), "Records", leave=False, disable=None)
        runs = {fingerprint: self._run(fingerprint, pieces) for fingerprint, pieces in bar}
        for run in list(runs.values()):
            needed = run.record.dense_fingerprint if run.record is not None else None
            if needed is not None and needed not in runs:
                runs[needed] = self._run(needed, run.pieces)
            elif needed is not None and not runs[needed].pieces:
                runs[needed].pieces = run.pieces
        for run in runs.values():
            run.dense = runs[run.record.dense_fingerprint or run.fingerprint].record if run.record is not None else None
        unnamed = [run for run in runs.values() if not run.pieces]
        for run in unnamed if len(unnamed) > most_whole else ():
            run.brief = True
        for run in runs.values():
            try:
                if run.record is not None and run.dense is not None:
                    enough = run.record.data.windows >= MIN_WINDOWS
                    run.row = against_dense(run.record, run.dense, intervals=enough and not run.brief)
            except Exception as error:  # whatever a damaged record does: it is left out, and the others stay
                self.trouble(run, error)
                run.record = run.record if isinstance(error, QuickSilverError) else None
        self._tell_apart(list(runs.values()))
        return dict(sorted(runs.items(), key=lambda item: (item[1].record is None, item[1].label, item[1].differing, item[0])))

    def _run(self, fingerprint: str, pieces: list[Piece]) -> NamedRecord:
        run = NamedRecord(fingerprint, None, pieces)
        try:
            run.record = Store(self.root).get(fingerprint)
            if run.record is None:
                names = ", ".join(piece.name for piece in pieces)
                named = f"named by {names}" if names else "the dense run of another record; copy its folder here"
                raise ConfigError(f"there is no such record ({named}).")
        except Exception as error:  # as above
            self.trouble(run, error)
        return run

    def _tell_apart(self, runs: Sequence[NamedRecord]) -> None:
        """Give each run the settings that are its own, and its place in a sweep."""
        places = labels(self.root)
        config = {run.fingerprint: printed(run.record.identity.config) for run in runs if run.record is not None}
        own = varied(config.values())
        same: dict[str, list[NamedRecord]] = {}
        for run in runs:
            run.sweep = places.get(run.fingerprint)
            if run.record is not None:
                found = config[run.fingerprint]
                run.settings = {key: str(without_folders(found[key])) for key in own if key in found}
                same.setdefault(run.label, []).append(run)
        for group in same.values():
            # Measurements and seeds tell runs apart only where nothing of the run itself does.
            keys = varied([config[run.fingerprint] for run in group])
            for run in group:
                said = tuple(key for key in keys if not key.startswith("measure.") and not key.endswith("._target_"))
                run.varied = said or keys

    # --- what is missing ----------------------------------------------------------------------------------------------------------

    def trouble(self, run: NamedRecord, error: Exception) -> None:
        """Note on the pages of `run` and of what names it why it cannot be shown, whole or in part."""
        known = isinstance(error, QuickSilverError)
        what = str(error) if known else f"the record is damaged ({type(error).__name__}: {error})"
        run.problems.append(self.note(run.pieces, f"runs/{run.fingerprint}", what))

    def note(self, pieces: Sequence[Piece], where: str, what: str, *, absent: bool = False) -> Problem:
        """Note what is missing, here and on the pages of `pieces`; the first one's command makes it."""
        remedy = f"To make it: {pieces[0].command}" if pieces and pieces[0].command else ""
        what = what.replace(f"{self.root}/", "")  # where results lie must not show on the pages
        problem = Problem(where, what, remedy, absent)
        for problems in (self.problems, *(piece.problems for piece in pieces)):
            problems.append(problem)
        return problem


def printed(config: Mapping[str, Any]) -> dict[str, str]:
    """A configuration as one level, its values in print."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(config).items()}


def varied(settings: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Keys that not all have with the same value, sorted."""
    found = list(settings)
    keys = sorted({key for one in found for key in one})
    return tuple(key for key in keys if len({one.get(key) for one in found}) > 1)


def grouped(problems: Sequence[Problem]) -> list[tuple[str, list[str], str]]:
    """What is missing, where (each once), and the remedy: the same trouble of many records is one entry."""
    groups: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        groups.setdefault((problem.what, problem.remedy), []).append(problem.where)
    return [(what, list(dict.fromkeys(where)), remedy) for (what, remedy), where in groups.items()]


def describe(problems: Sequence[Problem]) -> str:
    """The problems for a terminal."""
    lines = [(f"{', '.join(where)}: {what}", remedy and f"  {remedy}") for what, where, remedy in grouped(problems)]
    return "\n".join(line for pair in lines for line in pair if line)
