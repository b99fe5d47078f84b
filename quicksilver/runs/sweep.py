"""A sweep: many runs under one name, what becomes of each, and making them.

results/sweeps/NAME/
    manifest.json   the runs: overrides, which of them differ, fingerprints. Written once, before the first run
    taken/          one lease a run that a process has begun with, before its record is in the making
    at_work/        one lease a process that makes runs
    failed/         one file a run that failed, with the reason; gone once the run is tried again
    index.html      the table of the runs, written anew whenever one begins or ends
    workers/        log files of launchers that write some

Whether a run is done is not written here: its record is, in the store, and which runs are in the making the store knows as well. So the state
of a sweep is right whoever was killed when, and several processes, on several machines, work through one manifest (`claimed`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from quicksilver.files import fingerprint_of, own_path
from quicksilver.records import lease
from quicksilver.records.store import Store
from quicksilver.runs.choices import config_dir, no_such_choice
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_json

SCHEMA_VERSION = 1
FOLDER, MANIFEST, PAGE, TAKEN, AT_WORK = "sweeps", "manifest.json", "index.html", "taken", "at_work"
_NAME = re.compile(r"[\w][\w.+-]{0,99}")

State = Literal["done", "running", "failed", "waiting"]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        number: from 1.
        overrides: the run.
        differing: those of them in which the runs of the sweep differ.
        fingerprint: of its record; None: it could not be planned.
    """

    number: int
    overrides: tuple[str, ...]
    differing: tuple[str, ...]
    fingerprint: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What a sweep is.

    Attributes:
        words: the command line behind `quicksilver run`, for whoever wants to go on with it.
        extra_dirs: folders with yaml files of the user's own.
        launcher: of conf/hydra/launcher; workers: processes that make runs at once.
        records: which records count, as `Store` has it.
        total: of a sweep whose runs are drawn while it runs, how many there will be; None: they are all here.
    """

    name: str
    words: tuple[str, ...]
    runs: tuple[SweepRun, ...]
    extra_dirs: tuple[str, ...] = ()
    launcher: str = "basic"
    workers: int = 1
    records: str = "any"
    total: int | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def same_runs(self, other: Manifest) -> bool:
        """Whether both are of the same runs, however they are launched."""
        return [_what(run) for run in self.runs] == [_what(run) for run in other.runs] and self.records == other.records

    def label(self, run: SweepRun) -> str:
        """`[17/200] tau_drift=p40`, the run's name everywhere."""
        return " ".join(
            (f"[{run.number}/{self.total or len(self.runs)}]", *(_short(text, run.differing) for text in run.differing))
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """Keys in which the runs differ."""
        return tuple(dict.fromkeys(text.partition("=")[0] for run in self.runs for text in run.differing))


def _what(run: SweepRun) -> Any:
    return run.fingerprint or run.overrides


def _short(text: str, beside: Sequence[str]) -> str:
    """`modules.halting.tau_drift=p10` as `tau_drift=p10`, unless another of them ends in the same word."""
    key, _, value = text.partition("=")
    last = key.rpartition(".")[2]
    alone = sum(other.partition("=")[0].rpartition(".")[2] == last for other in beside) == 1
    return f"{last if alone else key}={value}"


@dataclass(frozen=True)
class RunState:
    """What became of one run.

    Attributes:
        folder: its record; None: there is none.
        where: of a run in the making: host and process, and since when; of a failed one, where it failed.
        making: of a run in the making, the processes that make it and what each says of how far it is (`Store.at_work`).
        error: of a failed run.
    """

    run: SweepRun
    state: State
    folder: Path | None = None
    where: str | None = None
    since: str | None = None
    error: str | None = None
    making: tuple[tuple[lease.Holder, Mapping[str, Any]], ...] = ()


# --- what is swept --------------------------------------------------------------------------------------------------------------


def expanded(words: Sequence[str], params: Sequence[str], loader: Any = None) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The runs of a sweep in Hydra's order, each as its overrides and those of them that differ.

    Args:
        words: of the command line, `seed=0,1`.
        params: of an experiment's `hydra.sweeper.params`, where the command line does not say otherwise.
        loader: Hydra's config loader, which `glob(*)` asks for the choices.

    Raises:
        ConfigError: a range without steps.
        HydraException: a word that is no override.
    """
    parser = OverridesParser.create(config_loader=loader)
    given = {parser.parse_override(word).key_or_group for word in words}
    axes = []
    for word in (*(param for param in params if parser.parse_override(param).key_or_group not in given), *words):
        override = parser.parse_override(word)
        if not override.is_sweep_override():
            axes.append([word])
        elif override.is_discrete_sweep():
            axes.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            raise ConfigError(f"{word}: a sweep needs single values: give choice(…) or range(…).")
    swept = [len(axis) > 1 for axis in axes]
    return [
        (tuple(run), tuple(text for text, varies in zip(run, swept, strict=True) if varies)) for run in itertools.product(*axes)
    ]


def sweep_jobs(experiment: str) -> list[tuple[str, ...]]:
    """The jobs of `quicksilver run -m experiment=NAME`, each as overrides, in Hydra's order.

    Raises:
        ConfigError: there is no such experiment, or it sweeps nothing.
    """
    path = config_dir() / "experiment" / f"{experiment}.yaml"
    if not path.is_file():
        raise ConfigError(no_such_choice("experiment", experiment))
    return list(_sweep_jobs(path, path.stat().st_mtime_ns))


@lru_cache
def _sweep_jobs(path: Path, changed_ns: int) -> tuple[tuple[str, ...], ...]:
    """`changed_ns`: when the file was, so that one that changes is read again."""
    params = OmegaConf.select(OmegaConf.load(path), "hydra.sweeper.params")
    if not params:
        raise ConfigError(f"{path} sweeps nothing: it has no hydra.sweeper.params.")
    return tuple(
        (f"experiment={path.stem}", *run) for run, _ in expanded((), [f"{key!s}={values}" for key, values in params.items()])
    )


def check_name(name: str) -> str:
    """The name of a sweep, which is that of its folder.

    Raises:
        ConfigError: no folder can be called so.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name={name!r}: the name of a sweep is a folder: letters, digits, and . _ + - between them.")
    return name


def default_name(runs: Sequence[SweepRun], experiment: str | None) -> str:
    """A name that only the same runs get."""
    digest = hashlib.sha256(json.dumps([_what(run) for run in runs]).encode()).hexdigest()[:6]
    return f"{experiment or 'sweep'}-{digest}"


# --- where it lies --------------------------------------------------------------------------------------------------------------


class Sweep:
    """A manifest in a results folder, and the state of its runs."""

    def __init__(self, results_dir: Path | str, manifest: Manifest) -> None:
        self.manifest = manifest
        self.store = Store(results_dir, manifest.records)
        self.folder = own_path(self.store.root / FOLDER, check_name(manifest.name))

    @classmethod
    def load(cls, results_dir: Path | str, name: str) -> Sweep:
        """
        Raises:
            ConfigError: there is no sweep of that name; those there are are named. Or its manifest is damaged.
        """
        folder = Path(results_dir) / FOLDER / check_name(name)
        try:
            return cls(results_dir, _read(folder / MANIFEST))
        except FileNotFoundError:
            there = names(results_dir)
            hint = f"There are: {', '.join(there)}." if there else "There is none: quicksilver run -m … makes one."
            raise ConfigError(f"There is no sweep {name} in {Path(results_dir) / FOLDER}. {hint}") from None

    def create(self, fixed: Sequence[str] = ()) -> None:
        """Write the manifest, or find it: the same command goes on with its sweep, and with the runs that were drawn before.

        Args:
            fixed: of a sweep whose runs are drawn, overrides of every run.

        Raises:
            ConfigError: there is a sweep of that name with other runs.
        """
        drawn = self.manifest.total is not None
        with suppress(FileNotFoundError):
            there = _read(self.folder / MANIFEST)
            same, how = (
                there.same_runs(self.manifest),
                f" ({_difference(there, self.manifest)})" if there.runs and not drawn else "",
            )
            if drawn:
                rests = ([word for word in run.overrides if word not in run.differing] for run in there.runs)
                same = there.total is not None and all(rest == [*fixed] for rest in rests)
            if not same:
                raise ConfigError(
                    f"name={self.manifest.name}: there is a sweep of that name with other runs{how}. Give another name=…, or remove "
                    f"{self.folder}; its records stay."
                )
            if drawn:
                self.manifest = replace(self.manifest, runs=there.runs, created=there.created)
        self._write()

    def _write(self) -> None:
        content = {"schema_version": SCHEMA_VERSION, **asdict(self.manifest)}
        self.store.write_json(f"{FOLDER}/{self.manifest.name}/{MANIFEST}", content)

    def draw(self, overrides: tuple[str, ...], differing: tuple[str, ...]) -> SweepRun:
        """The run with these overrides, taken up if it was not drawn before."""
        there = (one for one in self.manifest.runs if one.overrides == overrides)
        return next(there, None) or self.add(SweepRun(len(self.manifest.runs) + 1, overrides, differing))

    def add(self, run: SweepRun) -> SweepRun:
        """Take up a run that was drawn, in place of one with its number."""
        others = (one for one in self.manifest.runs if one.number != run.number)
        self.manifest = replace(self.manifest, runs=tuple(sorted((*others, run), key=lambda one: one.number)))
        self._write()
        return run

    @contextmanager
    def driver_lock(self) -> Iterator[None]:
        """Within, this process is the head of the sweep: the only one that launches its runs.

        Raises:
            ConfigError: another one lives.
        """
        path = self.folder / "head.lock"
        with self.store.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            held = lease.take(path)
        if held is None:
            who = lease.holder(path)
            where = f"process {who.pid} of {who.host} since {who.since}" if who is not None else "another process"
            raise ConfigError(
                f"name={self.manifest.name}: this sweep runs already ({where}). Look at it with "
                f"`quicksilver list sweep {self.manifest.name} results_dir={self.store.root}`, or give another name=…"
            )
        try:
            yield
        finally:
            with suppress(OSError):
                (self.folder / TAKEN).rmdir()  # empty, unless workers go on without their head
            held.release()

    def take(self, run: SweepRun) -> lease.Lease | None:
        """The lease that says that a process has begun with the run; None: a living one has.

        Two workers that are free at the same moment would otherwise begin with the same run, and one of them wait until it is made.
        """
        with self.store.writing():
            (self.folder / TAKEN).mkdir(parents=True, exist_ok=True)
            return lease.take(self.folder / TAKEN / f"{run.number:04d}.lock")

    def open_of(self, runs: Iterable[SweepRun]) -> list[SweepRun]:
        """Those that have no record and have not failed, by one look at the folders."""
        there, failed = self.store.folders(), {path.stem for path in (self.folder / "failed").glob("*.json")}
        return [run for run in runs if run.fingerprint not in there and f"{run.number:04d}" not in failed]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within, this process is one of those that make the runs of the sweep."""
        folder = self.folder / AT_WORK
        with self.store.writing():
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("*.lock"):
                lease.remove_abandoned(path)
            held = lease.wait(folder / f"{os.getpid()}-{secrets.token_hex(4)}.lock")
        try:
            yield
        finally:
            held.release()
            with suppress(OSError):
                folder.rmdir()  # others are at work

    def workers(self) -> list[lease.Holder]:
        """The living processes that are `at_work`."""
        found = (lease.holder(path) for path in sorted((self.folder / AT_WORK).glob("*.lock")))
        return [who for who in found if who is not None]

    def states(self) -> list[RunState]:
        """What became of each run, right now."""
        making: dict[str | None, list[tuple[lease.Holder, Mapping[str, Any]]]] = {}
        for fingerprint, who, said in self.store.at_work():
            making.setdefault(fingerprint, []).append((who, said))
        there = self.store.folders()  # after `making`: a run that has ended since has its record by now
        failed = {path.stem: path for path in (self.folder / "failed").glob("*.json")}
        return [
            self._state(run, there.get(run.fingerprint or ""), making.get(run.fingerprint, []), failed.get(f"{run.number:04d}"))
            for run in self.manifest.runs
        ]

    def _state(
        self, run: SweepRun, folder: Path | None, making: Sequence[tuple[lease.Holder, Mapping[str, Any]]], failed: Path | None
    ) -> RunState:
        if folder is not None:
            return RunState(run, "done", folder)
        if making:
            who = making[0][0]
            return RunState(run, "running", where=f"{who.host}, process {who.pid}", since=who.since, making=tuple(making))
        if failed is not None:
            with suppress(OSError, ValueError, KeyError):
                said = read_json(failed)
                return RunState(run, "failed", where=said["host"], since=said["time"], error=said["error"])
        return RunState(run, "waiting")

    def failed(self, run: SweepRun, error: Exception) -> None:
        """Keep why a run failed."""
        about = {
            "error": str(error) or repr(error),
            "host": lease.host_name(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self.store.write_json(f"{FOLDER}/{self.manifest.name}/failed/{run.number:04d}.json", about)

    def forget_failures(self) -> None:
        """All of them are to be tried again."""
        for run in self.manifest.runs:
            with suppress(FileNotFoundError):
                own_path(self.folder, f"failed/{run.number:04d}.json").unlink()
        with suppress(OSError):
            (self.folder / "failed").rmdir()  # not ours alone


def names(results_dir: Path | str) -> list[str]:
    """The sweeps of a results folder."""
    return sorted(path.parent.name for path in (Path(results_dir) / FOLDER).glob(f"*/{MANIFEST}"))


def labels(results_dir: Path | str) -> dict[str, str]:
    """Of every run of every sweep, `NAME [17/200] tau_drift=p40` by fingerprint; of a run that several have, the first by name."""
    found: dict[str, str] = {}
    for name in names(results_dir):
        with suppress(ConfigError, FileNotFoundError):
            manifest = _read(Path(results_dir) / FOLDER / name / MANIFEST)
            for run in manifest.runs:
                if run.fingerprint is not None:
                    found.setdefault(run.fingerprint, f"{name} {manifest.label(run)}")
    return found


def _read(path: Path) -> Manifest:
    try:
        content = read_json(path)
        if content.pop("schema_version") != SCHEMA_VERSION:
            raise ValueError("another version wrote it")
        runs = tuple(
            SweepRun(run["number"], tuple(run["overrides"]), tuple(run["differing"]), run["fingerprint"])
            for run in content.pop("runs")
        )
        for run in runs:
            if not isinstance(run.number, int) or run.number < 1:
                raise ValueError(f"a run has the number {run.number!r}")
            if run.fingerprint is not None:
                fingerprint_of(run.fingerprint)
        if content["name"] != path.parent.name:
            raise ValueError(f"it is of a sweep named {content['name']!r}")
        lists: dict[str, Any] = {key: tuple(content.pop(key)) for key in ("words", "extra_dirs")}
        return Manifest(**content, **lists, runs=runs)
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove its folder, and repeat the command; records stay.") from error


def _difference(there: Manifest, here: Manifest) -> str:
    if len(there.runs) != len(here.runs):
        return f"{len(there.runs)} of them, and now {len(here.runs)}"
    pairs = zip(there.runs, here.runs, strict=True)
    old, new = next(((old, new) for old, new in pairs if _what(old) != _what(new)), (there.runs[0], here.runs[0]))
    was, now = (
        " ".join(word for word in one.overrides if word not in other.overrides) for one, other in ((old, new), (new, old))
    )
    return f"run {old.number} had {was or 'another text, model or version'}" + (f", and now {now}" if now else "")


def time_left_s(left: int, seconds: Sequence[float], workers: int = 1) -> float | None:
    """Until the last of `left` runs is done, from the mean of those that are; None: none is.

    Args:
        seconds: of runs that are done.
        workers: how many are made at once.
    """
    if not left:
        return 0.0
    return sum(seconds) / len(seconds) * left / max(1, min(workers, left)) if seconds else None


# --- making its runs ------------------------------------------------------------------------------------------------------------


def claimed(
    sweep: Sweep, wanted: Collection[int], on_poll: Callable[[], None] = lambda: None, nap_s: float = 0.2
) -> Generator[SweepRun, None, None]:
    """The runs that have no record, one after the other, each held by a lease while it is made. Where none is free, one that another process makes: its
    windows may be shared (`make`), and it is taken over if that process dies.

    Args:
        wanted: numbers of runs; all others are left alone.
        on_poll: called between two looks at runs that others make.
        nap_s: between these looks.
    """
    numbers = set(wanted)
    left = [run for run in sweep.manifest.runs if run.number in numbers]
    given: set[int] = set()  # once each, whatever came of it
    while left := [run for run in sweep.open_of(left) if run.number not in given]:
        begun = False
        for run in left:  # each is looked at once on the way, by whoever comes there
            if run.fingerprint in sweep.store.in_the_making() or not is_open(sweep, run):
                continue
            taken = sweep.take(run)
            if taken is None:
                continue
            try:
                if is_open(sweep, run):  # still
                    begun = True
                    given.add(run.number)
                    yield run
            finally:
                taken.release()
        making = {} if begun else sweep.store.in_the_making()
        if (others := next((run for run in left if run.fingerprint in making), None)) is not None:
            given.add(others.number)
            yield others
        elif not begun:
            time.sleep(nap_s)  # all that is left is being made elsewhere
            on_poll()


def is_open(sweep: Sweep, run: SweepRun) -> bool:
    """Whether the run is still to be made: it has no record and has not failed."""
    if run.fingerprint is not None and sweep.store.folder(run.fingerprint).exists():
        return False
    return not (sweep.folder / "failed" / f"{run.number:04d}.json").exists()
