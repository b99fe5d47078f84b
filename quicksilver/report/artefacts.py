"""What a file of `experiments/` declares, and how the files are found: by their names, there is no list to keep."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, cast

from quicksilver.harness.record import Record
from quicksilver.report.tables import Table
from quicksilver.runtime.errors import ConfigError

_FILE_NAME = re.compile(r"(table|figure)(\d+[a-z]?)_\w+\.py")


@dataclass(frozen=True)
class Row:
    """One printed row: the run behind it, and the claim beside it.

    Attributes:
        panel: the panel it is printed in.
        section: heading above it inside the panel; rows of one section follow each other.
        key: name of the row in the written frame, unique in its panel.
        technique: what is printed.
        overrides: the run, as words of the command line of `quicksilver.run`; model and dataset are the user's.
        needs: modules (names in conf/modules) without which this version cannot make the row.
        reported: id in reported.yaml of what the paper says; None where it says nothing.
    """

    panel: str
    section: str
    key: str
    technique: str
    overrides: tuple[str, ...]
    needs: tuple[str, ...] = ()
    reported: str | None = None


@dataclass(frozen=True)
class Outcome:
    """A row with its record and that of the same run without modules, or with the reason why there is none."""

    row: Row
    record: Record | None = None
    dense: Record | None = None
    reason: str | None = None


class Experiment(Protocol):
    """What a file of `experiments/` provides."""

    def rows(self) -> Sequence[Row]:
        """The rows, in printed order."""
        ...

    def table(self, outcomes: Sequence[Outcome], name: str) -> Table:
        """The table called `name`, from one outcome a row."""
        ...


@dataclass(frozen=True)
class Artefact:
    """One table or figure of the paper and the file that makes it."""

    kind: str
    number: str
    path: Path

    @property
    def name(self) -> str:
        """`table11`: base name of what is written."""
        return f"{self.kind}{int(self.number):02d}" if self.number.isdecimal() else f"{self.kind}{self.number}"

    @cached_property
    def title(self) -> str:
        """First line of the file's docstring, without `Table 11:`."""
        docstring = ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or self.path.stem
        return re.sub(r"^(Table|Figure) \w+: ", "", docstring.splitlines()[0]).rstrip(".")

    @cached_property
    def experiment(self) -> Experiment:
        """The file, imported."""
        spec = importlib.util.spec_from_file_location(f"quicksilver_{self.path.stem}", self.path)
        assert spec is not None  # a .py file always has a loader
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return cast(Experiment, module)


def experiments_folder() -> Path:
    """`experiments/` of a clone, or the copy inside an installed package."""
    package = Path(__file__).resolve().parent.parent
    clone = package.parent / "experiments"
    return clone if clone.is_dir() else package / "experiments"


def artefacts(folder: Path | None = None) -> list[Artefact]:
    """Every table and figure that there is, tables first, by number."""
    found = []
    for path in sorted((folder or experiments_folder()).iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match:
            found.append(Artefact(match[1], match[2].lstrip("0") or "0", path))
    return sorted(
        found, key=lambda artefact: (artefact.kind != "table", int(re.sub(r"\D", "", artefact.number)), artefact.number)
    )


def find(kind: str, number: str) -> Artefact:
    """The artefact `kind` `number`.

    Raises:
        ConfigError: there is none; names those that there are.
    """
    there = artefacts()
    for artefact in there:
        if (artefact.kind, artefact.number) == (kind, number.strip().lower().lstrip("0")):
            return artefact
    listing = "\n".join(f"  {artefact.kind} {artefact.number}: {artefact.title}" for artefact in there)
    raise ConfigError(f"There is no {kind} {number} in this version. There is:\n{listing}")
