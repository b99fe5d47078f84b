"""Commands that show what is there: names, sweeps, work in progress, the site."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from quicksilver.cli.arguments import ResultsFolder
from quicksilver.cli.progress import beside, gc_disabled, needing, summary, width
from quicksilver.report.artefacts import artefacts, listing
from quicksilver.runs.choices import choices, config_dir
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.records.record import Record
    from quicksilver.records.store import Store

# Kind -> the folder of conf/ that has a file of each.
GROUPS = {
    "model": "model", "dataset": "dataset", "module": "modules", "peer": "modules", "protocol": "protocol", "measure": "measure",
    "experiment": "experiment", "budget": "budget",
}  # fmt: skip
KINDS = ("table", "figure", *GROUPS, "sweep")


@dataclass
class List(ResultsFolder):
    """
    quicksilver list                  every table and figure that `quicksilver reproduce` makes, then what a run can be made of
    quicksilver list module           one kind: table, figure, model, dataset, module, peer, protocol, measure, experiment, budget
    quicksilver list sweep            the sweeps of the results folder
    quicksilver list sweep NAME       one of them: what is done, running, failed and waiting, and what was found so far

    `quicksilver run -m …` makes a sweep. Its name is the one given as name=…, or the one it prints. The same table is a page:
    results/sweeps/NAME/index.html. It is written anew whenever a run begins or ends.
    """

    most_names: ClassVar[int] = len(KINDS)

    @classmethod
    def next_names(cls, given: Sequence[str]) -> list[str]:
        return [] if given else [*KINDS]

    def main(self) -> int:
        """Print the list; returns 1 where a run of the sweep that is asked for failed."""
        if self.names[:1] == ["sweep"] and len(self.names) <= 2:
            self.check_there()
            return self._sweeps()
        if unknown := [word for word in self.names if word not in KINDS[:-1]]:
            raise ConfigError(f"{unknown[0]}: quicksilver list takes {', '.join(KINDS)}, or nothing.")
        for kind in self.names or KINDS[:-1]:
            print(listed(kind))
        return 0

    def _sweeps(self) -> int:
        from quicksilver.report.sweep_status import Board
        from quicksilver.runs.sweep import Sweep, names

        for name in self.names[1:]:
            board = Board(Sweep.load(self.results_dir, name))
            with gc_disabled():
                print(board.text(width()))
            return 1 if any(state.state == "failed" for state in board.sweep.states()) else 0
        there = names(self.results_dir)
        for name in there:
            board = Board(Sweep.load(self.results_dir, name))
            print(board.headline(board.rows(most=50)))
        if not there:
            print(f"There is no sweep below {self.results_dir} yet: quicksilver run -m … makes one.")
        return 0


def listed(kind: str) -> str:
    """One line a name of this kind, with what its file says first."""
    if kind in ("table", "figure"):
        return listing([artefact for artefact in artefacts() if artefact.kind == kind])
    folder, lines = config_dir() / GROUPS[kind], []
    for name in choices(GROUPS[kind]):
        text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
        if kind in ("module", "peer") and ("_target_: quicksilver.baselines" in text) != (kind == "peer"):
            continue
        said = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#") and "@package" not in line]
        # All sentences that begin in the first line.
        whole = re.match(rf".{{{len(said[0]) - 1}}}.*?([.:](?= |$)|$)", " ".join(said)) if said else None
        lines.append(f"  {kind} {name}: {whole[0] if whole else f'see {folder / name}.yaml'}")
    return "\n".join(lines)


@dataclass
class Status(ResultsFolder):
    """
    quicksilver status
    quicksilver status results_dir=/folder

    Prints of each unfinished run: its window, windows a second, time left, host, process and Slurm job. The same stands in progress.json
    beside the unfinished record. `quicksilver list sweep NAME` is the table of one sweep.
    """

    def main(self) -> int:
        from quicksilver.report.sweep_status import status

        self.check_there()
        print(status(self.results_dir))
        return 0


@dataclass
class Show(ResultsFolder):
    """
    quicksilver show                  the newest record below the results folder
    quicksilver show 3d6278510c07     that record: its fingerprint, the beginning of it, or its folder
    quicksilver show 3d6278 8b2bc1    the first against the second, window by window
    """

    most_names: ClassVar[int] = 2

    def main(self) -> int:
        from quicksilver.records.times import timed_processes

        if len(self.names) == 2:
            ours, theirs = (self._record(name)[1] for name in self.names)
            print(beside(ours, theirs))
            if said := _differences(ours.config["modules"], theirs.config["modules"]):
                print(f"  options      {'; '.join(said)}")
            return 0
        store, record = self._record(self.names[0] if self.names else "")
        name, folder = record.fingerprint, record.path
        print(summary(record))
        for process in timed_processes(store.root):
            if (again := process.results.get(name)) is not None:
                print(f"  timed again  {again.line()}")
                print(f"{' ' * 15}on {process.machine.split(',')[0]}, {process.started[:10]}: {process.path(store.root)}")
        options = _options(record.config["modules"])
        options += [f"{key}={record.config[key]}" for key in ("decision_layers", "precision") if record.config.get(key)]
        if options:
            print(f"  options      {', '.join(options)}")
        if record.is_kept and store.path(name).is_dir():
            print(f"  care         this is the repository's record. Yours: quicksilver show {store.path(name)}")
        if folder.is_dir():
            sizes = [f"{path.name} ({path.stat().st_size:,} bytes)" for path in sorted(folder.iterdir())]
            print(f"  files        {', '.join(sizes)}")
        if record.dense_fingerprint:
            print(f"  dense record {record.dense_fingerprint}")
        page = store.root / "report" / "runs" / f"{name}.html"
        print(f"  page         {page if page.is_file() else 'not written yet: type quicksilver report'}")
        return 0

    def _record(self, name: str) -> tuple[Store, Record]:
        """A record and its store, by a folder, a fingerprint or the beginning of one; of no name the newest."""
        from quicksilver.records.record import RECORD, load_record
        from quicksilver.records.store import Store
        from quicksilver.runs.sweep import names

        store, begins = Store(self.results_dir), Path(name).name
        if begins in names(self.results_dir):
            raise ConfigError(f"{begins} is a sweep: quicksilver list sweep {begins} shows it, with the record of each run.")
        if begins and (own := (Path(name) / RECORD).absolute()).is_file():
            return Store(own.parents[2]), load_record(own.parent)
        self.check_there()
        if begins:
            return store, load_record(store.folder(store.named(begins)))
        found = {path.name: path for path in store.runs.glob("[!.]*")} or store.folders()
        if not found:
            raise ConfigError(f"results_dir={self.results_dir}: there is no record yet.")
        return store, load_record(max(found.values(), key=lambda one: one.stat().st_mtime if one.is_dir() else 0.0))


def _options(modules: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The options of a record's modules that are not their defaults; all of a module of the user's."""
    from quicksilver.runs.config import compose

    said = []
    for name, entry in modules.items():
        default: Mapping[str, Any] = {}
        with suppress(ConfigError):
            default = compose([f"modules=[{name}]"]).modules[name]
        new = (key for key, value in entry.items() if key != "_target_" and (key not in default or default[key] != value))
        said += [f"{name}.{key}={entry[key]}" for key in new]
    return said


def _differences(mine: Mapping[str, Mapping[str, Any]], its: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In which options the modules of two records differ."""
    both = [(name, key, value) for name in mine if name in its for key, value in mine[name].items()]
    said = [f"{name}.{key}={value} against {its[name].get(key)}" for name, key, value in both if value != its[name].get(key)]
    if mine.keys() != its.keys():
        alone = (_options({name: one[name] for name in one if name not in other}) for one, other in ((mine, its), (its, mine)))
        said.append(" against ".join(", ".join(options) or "defaults" for options in alone))
    return said


@dataclass
class Report(ResultsFolder):
    """
    quicksilver report
    quicksilver report results_dir=/folder
    """

    def main(self) -> int:
        """Write the site; say what is missing in it, and return 1 where something is damaged."""
        with needing("The report", "report,plots"):
            from quicksilver.report.site.collection import describe
            from quicksilver.report.site.pages import make
        page, problems = make(self.results_dir)
        print(f"Written: {page}\nOpen it in a browser: {page.resolve().as_uri()}")
        damaged = [one for one in problems if not one.absent]
        if damaged:
            print(f"Missing in it:\n{describe(damaged)}", file=sys.stderr)
        if absent := len(problems) - len(damaged):
            print(f"{absent} tables and figures are not made yet. All of them: quicksilver reproduce all")
        return 1 if damaged else 0
