"""What a file of `experiments/` declares, and how they are found: by names of files and functions, there is no list to keep."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from quicksilver.report.table import without_folders
from quicksilver.runtime.errors import ConfigError, installing

if TYPE_CHECKING:  # matplotlib is for who draws, pandas for who reads records: a list of what there is needs neither
    from quicksilver.records.record import Record
    from quicksilver.report.claims.ledger import AnsweredBy, Statement
    from quicksilver.report.figure import Figure
    from quicksilver.report.table import Table

# `table11_ablation.py`, `figure08_15_speed.py`; `table_front.py` has no number in the paper and is asked for by its name;
# `table_figure_factorial.py` makes the table and the figure of that name, of the same rows.
_NAME = r"(?:(\d+[a-z]?(?:_\d+[a-z]?)*)_[a-z]\w*|_([a-z]\w*))"
_FILE_NAME = re.compile(rf"(table_figure|table|figure){_NAME}\.py")
# In a file of any other name, a function `table11_ablation` under `@artefact(…)` is one of the several artefacts of a family.
_FUNCTION = re.compile(rf"^@artefact\((?:.*\n)+?def ((table|figure){_NAME})\(", re.MULTILINE)
_AFTER_THE_NUMBERED = 1000
_NAMED = 3  # models, texts: more do not fit above a figure
_PACKAGE = Path(__file__).resolve().parent.parent
_ROOT = _PACKAGE.parent if (_PACKAGE.parent / "experiments").is_dir() else _PACKAGE


@dataclass(frozen=True)
class Row:
    """One printed row: the run behind it, and the claim beside it.

    Attributes:
        panel: the panel it is printed in.
        section: heading above it inside the panel; rows of one section follow each other.
        key: name of the row in the written frame, unique in its panel.
        technique: what is printed.
        overrides: the run, as `quicksilver run` takes it; model and dataset are the user's.
        needs: modules (names in conf/modules) that the row is of.
        reported: id in reported.yaml of what the paper says; None where it says nothing.
        defaults: overrides that hold where the user gives none of that key, such as the model that an experiment is about.
        of_model: name of a model -> what stands there in the place of `overrides`, such as settings that were searched for it.
    """

    panel: str
    section: str
    key: str
    technique: str
    overrides: tuple[str, ...]
    needs: tuple[str, ...] = ()
    reported: str | None = None
    defaults: tuple[str, ...] = ()
    of_model: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def words(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """The run as `quicksilver run` takes it, with the overrides of a person: theirs count more than `defaults`, and less than `overrides`."""
        given = {key: value for key, _, value in (override.lstrip("+~").partition("=") for override in overrides)}
        words = self.of_model.get(given.get("model", ""), self.overrides)
        own = {override.partition("=")[0] for override in words}
        theirs = [override for override in overrides if override.partition("=")[0] not in own]
        return (*(one for one in self.defaults if one.partition("=")[0] not in given.keys() | own), *theirs, *words)


@dataclass(frozen=True)
class Outcome:
    """A row with its record and that of the same run without modules, or with the reason why there is none."""

    row: Row
    record: Record | None = None
    dense: Record | None = None
    reason: str | None = None

    @property
    def records(self) -> list[Record]:
        """Those that are there: its own, and the dense one."""
        return [record for record in (self.record, self.dense) if record is not None]


class Experiment(Protocol):
    """What a file of `experiments/` provides: the runs, and `table`, `figure` or both, as its name says."""

    def rows(self) -> Sequence[Row]:
        """The rows, in printed order; none for what is data alone."""

    def table(self, outcomes: Sequence[Outcome], name: str) -> Table:
        """The table called `name`, from one outcome a row."""

    def figure(self, outcomes: Sequence[Outcome], name: str) -> Figure:
        """The figure called `name`, from one outcome a row."""


Maker = Callable[[Sequence[Outcome], str], Any]


def artefact(
    rows: Callable[[], Sequence[Row]],
    reads: Sequence[str] = (),
    answers: Mapping[str, AnsweredBy | tuple[AnsweredBy, ...]] | None = None,
    statements: Callable[[], list[Statement]] = list,
) -> Callable[[Maker], Maker]:
    """Declare the function below, `table11_ablation` or `figure_front`, the maker of that table or figure; its docstring begins with the title.

    Args:
        rows, reads, answers, statements: what a file with one artefact calls `rows`, `READS`, `ANSWERS` and `STATEMENTS`.
    """

    def declared(make: Maker) -> Maker:  # an `Experiment`, as such a file is
        own = {"rows": rows, "READS": tuple(reads), "ANSWERS": answers or {}, "STATEMENTS": statements}
        vars(make).update(own, table=make, figure=make)
        return make

    return declared


@dataclass(frozen=True)
class Artefact:
    """One table or figure of the paper, or several that one picture answers, and the file that makes it.

    Attributes:
        kind: table or figure.
        numbers: its numbers in the paper, without leading zeros: `("8", "15")`, `("2b",)`; or the one name it has instead.
        path: the file.
        function: the function that makes it, in a file with several.
    """

    kind: str
    numbers: tuple[str, ...]
    path: Path
    function: str | None = None

    @property
    def number(self) -> str:
        """`8/15`: for people."""
        return "/".join(self.numbers)

    @property
    def name(self) -> str:
        """`table11`, `figure08_15`, `table_factorial`: base name of what is written."""
        if not self.is_numbered:
            return f"{self.kind}_{self.numbers[0]}"
        return self.kind + "_".join(f"{_digits(number):02d}{number.lstrip('0123456789')}" for number in self.numbers)

    @property
    def is_numbered(self) -> bool:
        """Whether the paper has it."""
        return self.numbers[0][0].isdecimal()

    @property
    def order(self) -> tuple[bool, int, str]:
        """Tables first, then by number, then by name."""
        first = self.numbers[0]
        return self.kind != "table", _digits(first) if self.is_numbered else _AFTER_THE_NUMBERED, first

    def answers(self, number: str) -> bool:
        """Whether it is asked for by `number`: one of its own, or a part of one (`2b` of figure 2)."""
        part = self.kind == "figure" and self.is_numbered and number[-1:] in "abcd" and number[:-1] in self.numbers
        return number in self.numbers or part

    def build(self, outcomes: Sequence[Outcome], name: str) -> Table | Figure:
        """The table or figure called `name`, with the records that it is made of and the claims that it answers."""
        with self._with_libraries():
            made: Table | Figure = getattr(self.experiment, self.kind)(outcomes, name)
        found = (record.fingerprint for one in outcomes for record in one.records)
        title = made.title if self.kind == "table" else made.title + _measured_on(outcomes)
        return dataclasses.replace(made, title=title, records=tuple(sorted(set(found))), claims=self.claims)

    @property
    def claims(self) -> tuple[str, ...]:
        """What the paper reports that is answered here: entries of reported*.yaml, or entry.quantity."""
        named = (row.reported for row in self.experiment.rows() if row.reported)
        return tuple(dict.fromkeys((*named, *self.answered)))

    @property
    def answered(self) -> Mapping[str, AnsweredBy | tuple[AnsweredBy, ...]]:
        """Claims to what answers them (`ANSWERS` in the file). They are the table's where a file makes a table and a figure."""
        if self.kind == "figure" and self.path.name.startswith("table_figure_"):
            return {}
        return getattr(self.experiment, "ANSWERS", {})

    @property
    def reads(self) -> tuple[str, ...]:
        """What it, or a page about its runs, is made of beside record.json and windows.parquet (`READS` in the file): names of the record's files,
        or `FILE:PATTERN` for the columns or arrays of such names. `quicksilver dev keep` keeps that much of a record."""
        return tuple(getattr(self.experiment, "READS", ()))

    @cached_property
    def title(self) -> str:
        """First line of the docstring of the file or function, without `Table 11:`."""
        docstring = _docstrings(self.path, self.path.stat().st_mtime_ns)[self.function] or self.path.stem
        return re.sub(r"^(Table|Figure)s? [^:]+: ", "", docstring.splitlines()[0]).rstrip(".")

    @contextmanager
    def _with_libraries(self) -> Iterator[None]:
        """Say how to install a library that is missing inside the block."""
        try:
            yield
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "quicksilver":
                raise
            why = f"which is not installed: {installing('plots')}."
            raise ConfigError(f"{self.kind} {self.number} needs {error.name}, {why}") from error

    @cached_property
    def experiment(self) -> Experiment:
        """The file, imported, or its function that makes this artefact.
        Raises ConfigError: it needs a library that is not installed."""
        with self._with_libraries():
            module = _imported(self.path)
        return cast(Experiment, getattr(module, self.function) if self.function else module)


@cache  # parsing takes longer than all else that a list of artefacts needs
def _docstrings(path: Path, changed_ns: int) -> dict[str | None, str | None]:
    """Docstrings of the functions of a file by name; under None its own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    return {None: ast.get_docstring(tree), **{one.name: ast.get_docstring(one) for one in functions}}


def _measured_on(outcomes: Sequence[Outcome]) -> str:
    """` (reference-gpt2; python-docs; protocol all)`: a table says so below each of its panels, a figure in its title."""
    records = [one.record for one in outcomes if one.record is not None]
    if not records:
        return ""
    models, texts, protocols = (
        dict.fromkeys(str(without_folders(getattr(one, of).name)) for one in records) for of in ("model", "data", "protocol")
    )
    counted = ((models, "models"), (texts, "texts"))
    named = [", ".join(found) if len(found) <= _NAMED else f"{len(found)} {what}" for found, what in counted]
    return f" ({'; '.join(named)}; protocol {' and '.join(protocols)})"


def experiments_folder() -> Path:
    """`experiments/` of a clone, or the copy inside an installed package."""
    return _ROOT / "experiments"


def _imported(path: Path) -> ModuleType:
    """The module in this file: one of `quicksilver.experiments` or `quicksilver.studies`, or a single file that lies elsewhere."""
    for folder in (_ROOT / "experiments", _ROOT / "studies"):
        if path.is_relative_to(folder):
            package = f"quicksilver.{folder.name}"
            if package not in sys.modules:  # in a clone that is not installed it stands beside the package
                _loaded(package, folder / "__init__.py", [str(folder)])
            return importlib.import_module(".".join((package, *path.relative_to(folder).with_suffix("").parts)))
    return _loaded(f"quicksilver_{path.stem}", path)


def _loaded(name: str, path: Path, folders: list[str] | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses ask for the module they are in
    spec.loader.exec_module(module)
    return module


def artefacts(folder: Path | None = None) -> list[Artefact]:
    """Every table and figure of experiments/ and studies/, or of `folder`: tables first, by number."""
    folders = [folder] if folder else [experiments_folder(), experiments_folder().parent / "studies"]
    found = []
    for path in (path for each in folders for path in each.rglob("*.py")):
        match = _FILE_NAME.fullmatch(path.name)
        several = [("", *match.groups(""))] if match else _FUNCTION.findall(path.read_text(encoding="utf-8"))
        for function, kinds, numbers, name in several:
            called = (name,) if name else tuple(map(_plain, numbers.split("_")))
            found += [Artefact(kind, called, path, function or None) for kind in kinds.split("_")]
    return sorted(found, key=lambda artefact: artefact.order)


def find(kind: str, number: str) -> Artefact:
    """The artefact `kind` `number`; `2`, `02` and `2b` find figure 2, `8`, `15` and `8/15` figure 8/15, a name what has that name.
    Raises ConfigError: there is none; names those of that kind that there are."""
    there = artefacts()
    number = number.strip().lower()
    asked = [_plain(part) for part in re.split(r"[/_,]", number)] if number[:1].isdecimal() else [number.replace("-", "_")]
    # A file of its own for `2b` comes before the one of all of figure 2.
    for artefact in sorted(there, key=lambda artefact: not set(asked) <= set(artefact.numbers)):
        if artefact.kind == kind and all(map(artefact.answers, asked)):
            return artefact
    known = ", ".join(artefact.number for artefact in there if artefact.kind == kind)
    other = next((artefact for artefact in there if all(map(artefact.answers, asked))), None)
    hint = "" if other is None else f"There is a {other.kind} {other.number}. "
    if close := difflib.get_close_matches(number, [artefact.number for artefact in there if artefact.kind == kind], n=2):
        hint += f"Did you mean {' or '.join(close)}? "
    hint += f"{kind.capitalize()}s: {known}; `list` says what each is."
    raise ConfigError(f"There is no {kind} {number} in this version. {hint}")


def listing(there: Sequence[Artefact]) -> str:
    """One line an artefact."""
    return "\n".join(f"  {artefact.kind} {artefact.number}: {artefact.title}" for artefact in there)


def _plain(number: str) -> str:
    return number.lstrip("0") or "0"


def _digits(number: str) -> int:
    return int(re.sub(r"\D", "", number))
