"""A sweep: many runs under one name, what becomes of each, and making them.

results/sweeps/NAME/
    manifest.json   the runs: overrides, which of them differ, fingerprints. Written once, before the first run
    taken/          one lease a run that a process has begun with, before its record is in the making
    at_work/        one lease a process that makes runs
    failed/         one file a run that failed, with the reason; gone once the run is tried again
    index.html      the table of the runs, written anew whenever one begins or ends
    workers/        log files of launchers that write some

The store knows which runs are done and which are in the making. So the state of a sweep is right whoever was killed when, and several
processes, on several machines, work through one manifest (`claimed`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import secrets
import shlex
import statistics
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from quicksilver.files import fingerprint_of, own_path
from quicksilver.measure.measurement import decoded
from quicksilver.records import lease
from quicksilver.records.store import Store, read_object
from quicksilver.runs.choices import config_dir, no_such_choice
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_json

SCHEMA_VERSION = 1
FOLDER, MANIFEST, PAGE, TAKEN, AT_WORK, FAILED = "sweeps", "manifest.json", "index.html", "taken", "at_work", "failed"
HEAD = "head.lock"  # of the command that launches the runs
_NAME = re.compile(r"[\w][\w.+-]{0,99}")

State = Literal["done", "running", "failed", "waiting"]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its number from 1, its overrides, those in which the runs of the sweep differ, and its record (None: it could not be
    planned)."""

    number: int
    overrides: tuple[str, ...]
    differing: tuple[str, ...]
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"a run has the number {self.number}")
        if self.fingerprint is not None:
            fingerprint_of(self.fingerprint)

    @property
    def identity(self) -> Any:
        """Equal for equal runs."""
        return self.fingerprint or self.overrides

    @property
    def failure(self) -> str:
        """Path of its failure below the sweep's folder."""
        return f"{FAILED}/{self.number:04d}.json"


@dataclass(frozen=True)
class Manifest:
    """What a sweep is.

    Attributes:
        words: the command line behind `quicksilver run`, to resume the sweep.
        extra_dirs: folders with the user's yaml files.
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

    @property
    def command(self) -> str:
        """What makes it, or resumes it."""
        folders = (f"--config-dir={folder}" for folder in self.extra_dirs)
        workers = (f"workers={self.workers}",) if self.launcher != "basic" else ()
        return shlex.join(("quicksilver", "run", *folders, *self.words, *workers, f"name={self.name}"))

    def label(self, run: SweepRun) -> str:
        """`[17/200] tau_drift=p40`, the run's name everywhere."""
        # The last part of a key, unless another key ends in the same word.
        last = [text.partition("=")[0].rpartition(".")[2] for text in run.differing]
        pairs = zip(last, run.differing, strict=True)
        short = (f"{word}={text.partition('=')[2]}" if last.count(word) == 1 else text for word, text in pairs)
        return " ".join((f"[{run.number}/{self.total or len(self.runs)}]", *short))

    @property
    def axes(self) -> tuple[str, ...]:
        """Keys in which the runs differ."""
        return tuple(dict.fromkeys(text.partition("=")[0] for run in self.runs for text in run.differing))

    def check_same(self, there: Manifest, folder: Path, fixed: Sequence[str], drawn: Sequence[str] = ()) -> None:
        """Raises ConfigError: the manifest of that name in `folder` has other runs, or draws other keys."""
        how = ""
        if self.total is not None:  # runs are drawn: all have the same fixed overrides
            rests = [[word for word in run.overrides if word not in run.differing] for run in there.runs]
            keys = [[word.partition("=")[0] for word in run.differing] for run in there.runs]
            same = there.total is not None and all(rest == [*fixed] for rest in rests) and all(one == [*drawn] for one in keys)
        else:
            pairs = list(zip(there.runs, self.runs, strict=False))
            other = next((pair for pair in pairs if pair[0].identity != pair[1].identity), None)
            same = len(there.runs) == len(self.runs) and other is None and self.records == there.records
            if len(there.runs) != len(self.runs):
                how = f" ({len(there.runs)} of them, and now {len(self.runs)})"
            elif pairs:
                one, two = other or pairs[0]
                was, now = (" ".join(w for w in a.overrides if w not in b.overrides) for a, b in ((one, two), (two, one)))
                how = f" (run {one.number} had {was or 'another text, model or version'}{now and f', and now {now}'})"
        if not same:
            said = f"name={self.name}: there is a sweep of that name with other runs{how}."
            raise ConfigError(f"{said} Give another name=…, or remove {folder}; its records stay.")


@dataclass(frozen=True)
class RunState:
    """What became of one run.

    Attributes:
        making: the processes that make it and the progress of each (`Store.at_work`).
        failure: of a failed run: its `error`, and the `host` and `time` of it.
    """

    run: SweepRun
    state: State
    folder: Path | None = None
    making: tuple[tuple[lease.Holder, Mapping[str, Any]], ...] = ()
    failure: Mapping[str, Any] = field(default_factory=dict)


# --- what is swept --------------------------------------------------------------------------------------------------------------
def expanded(words: Sequence[str], params: Sequence[str], loader: Any = None) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The runs of a sweep in Hydra's order, each as its overrides and those of them that differ. Raises ConfigError: a range
    without steps. HydraException: a word that is no override.

    Args:
        words: of the command line, `seed=0,1`.
        params: of an experiment's `hydra.sweeper.params`, where the command line does not say otherwise.
        loader: Hydra's config loader, which `glob(*)` asks for the choices.
    """
    parse = OverridesParser.create(config_loader=loader).parse_override
    given, axes = {parse(word).key_or_group for word in words}, []
    for word in (*(param for param in params if parse(param).key_or_group not in given), *words):
        override = parse(word)
        if not override.is_sweep_override():
            axes.append([word])
        elif override.is_discrete_sweep():
            axes.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            raise ConfigError(f"{word}: a sweep needs single values: give choice(…) or range(…).")
    return [(run, tuple(text for text, axis in zip(run, axes, strict=True) if len(axis) > 1)) for run in itertools.product(*axes)]


def sweep_jobs(experiment: str) -> list[tuple[str, ...]]:
    """The jobs of `quicksilver run -m experiment=NAME`, each as overrides, in Hydra's order.
    Raises ConfigError: there is no such experiment, or it sweeps nothing."""
    path = config_dir() / "experiment" / f"{experiment}.yaml"
    if not path.is_file():
        raise ConfigError(no_such_choice("experiment", experiment))
    return list(_sweep_jobs(path, path.stat().st_mtime_ns))


@lru_cache
def _sweep_jobs(path: Path, _changed_ns: int) -> tuple[tuple[str, ...], ...]:
    if not (params := OmegaConf.select(OmegaConf.load(path), "hydra.sweeper.params")):
        raise ConfigError(f"{path} sweeps nothing: it has no hydra.sweeper.params.")
    axes = [f"{key!s}={values}" for key, values in params.items()]
    return tuple((f"experiment={path.stem}", *run) for run, _ in expanded((), axes))


def check_name(name: str) -> str:
    """The name of a sweep, which is that of its folder. Raises ConfigError: no folder can be called so."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name={name!r}: the name of a sweep is a folder: letters, digits, and . _ + - between them.")
    return name


def default_name(runs: Sequence[SweepRun], experiment: str | None) -> str:
    """A name that only the same runs get."""
    digest = hashlib.sha256(json.dumps([run.identity for run in runs]).encode()).hexdigest()[:6]
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
        """Raises ConfigError: there is no sweep of that name; those there are are named. Or its manifest is damaged."""
        folder = Path(results_dir) / FOLDER / check_name(name)
        try:
            return cls(results_dir, _read(folder / MANIFEST))
        except FileNotFoundError:
            there = names(results_dir)
            hint = f"There are: {', '.join(there)}." if there else "There is none: quicksilver run -m … makes one."
            raise ConfigError(f"There is no sweep {name} in {Path(results_dir) / FOLDER}. {hint}") from None

    def create(self, fixed: Sequence[str] = (), drawn: Sequence[str] = ()) -> None:
        """Write the manifest, or find it: the same command resumes its sweep, with the runs that were drawn before.
        Raises ConfigError: there is a sweep of that name with other runs; of one whose runs are drawn, with other `fixed`
        overrides, or other `drawn` keys."""
        with suppress(FileNotFoundError):
            there = _read(self.folder / MANIFEST)
            self.manifest.check_same(there, self.folder, fixed, drawn)
            if self.manifest.total is not None:
                self.manifest = replace(self.manifest, runs=there.runs, created=there.created)
        self._write_manifest()

    def _write(self, relative: str, content: Mapping[str, Any]) -> None:
        self.store.write_json(f"{FOLDER}/{self.manifest.name}/{relative}", content)

    def _write_manifest(self) -> None:
        self._write(MANIFEST, {"schema_version": SCHEMA_VERSION, **asdict(self.manifest)})

    def draw(self, overrides: tuple[str, ...], differing: tuple[str, ...], fingerprint: str | None) -> SweepRun:
        """The run with these overrides, in place of one that was drawn before."""
        runs = {run.overrides: run for run in self.manifest.runs}
        new = SweepRun(len(runs) + 1, overrides, differing)
        before = runs.get(overrides, new)
        runs[overrides] = replace(before, fingerprint=fingerprint or before.fingerprint)
        self.manifest = replace(self.manifest, runs=tuple(runs.values()))
        self._write_manifest()
        return runs[overrides]

    @contextmanager
    def driver_lock(self) -> Iterator[None]:
        """Within, this process is the only one that launches the runs of the sweep. Raises ConfigError: another one lives."""
        path, name = self.folder / HEAD, self.manifest.name
        if (held := self.store.take(path)) is None:
            who = lease.holder(path)
            where = f"process {who.pid} of {who.host} since {who.since}" if who is not None else "another process"
            look = f"`quicksilver list sweep {name} results_dir={self.store.root}`"
            raise ConfigError(f"name={name}: this sweep runs already ({where}). Look at it with {look}, or give another name=…")
        with held:
            try:
                yield
            finally:
                _remove_abandoned(self.folder / TAKEN)
                self.forget_dead_workers()

    def take(self, run: SweepRun) -> lease.Lease | None:
        """The lease that says that a process has begun with the run; None: a living one has.
        Without it, two workers that are free at the same moment begin with the same run, and one waits until it is made."""
        return self.store.take(self.folder / TAKEN / f"{run.number:04d}.lock")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within, this process is one of those that make the runs of the sweep."""
        folder = self.folder / AT_WORK
        self.forget_dead_workers()
        try:
            with self.store.wait(folder / f"{os.getpid()}-{secrets.token_hex(4)}.lock"):
                yield
        finally:
            _remove_empty(folder)

    def forget_dead_workers(self) -> int:
        """Remove the leases of dead processes that were `at_work`; returns how many there were."""
        return _remove_abandoned(self.folder / AT_WORK)

    def workers(self) -> list[lease.Holder]:
        """The living processes that are `at_work`."""
        found = (lease.holder(path) for path in sorted((self.folder / AT_WORK).glob("*.lock")))
        return [who for who in found if who is not None]

    def open_of(self, runs: Iterable[SweepRun]) -> list[SweepRun]:
        """Those that have no record and have not failed, by one look at the folders."""
        there, failed = self.store.folders(), {f"{FAILED}/{path.name}" for path in (self.folder / FAILED).glob("*.json")}
        return [run for run in runs if run.fingerprint not in there and run.failure not in failed]

    def is_open(self, run: SweepRun) -> bool:
        """Whether the run is still to be made: it has no record and has not failed."""
        done = run.fingerprint is not None and self.store.has(run.fingerprint)
        return not done and not (self.folder / run.failure).exists()

    def states(self) -> list[RunState]:
        """What became of each run, right now."""
        making: dict[str | None, list[tuple[lease.Holder, Mapping[str, Any]]]] = {}
        for fingerprint, who, said in self.store.at_work():
            making.setdefault(fingerprint, []).append((who, said))
        there = self.store.folders()  # after `making`: a run that has ended since has its record by now
        failed = {f"{FAILED}/{path.name}": path for path in (self.folder / FAILED).glob("*.json")}

        def state(run: SweepRun) -> RunState:
            if run.fingerprint in there:
                return RunState(run, "done", there[run.fingerprint])
            if run.fingerprint in making:
                return RunState(run, "running", making=tuple(making[run.fingerprint]))
            failure = read_object(failed[run.failure]) if run.failure in failed else {}
            return RunState(run, "failed", failure=failure) if failure else RunState(run, "waiting")

        return [state(run) for run in self.manifest.runs]

    def failed(self, run: SweepRun, error: Exception) -> None:
        """Keep why a run failed."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._write(run.failure, {"error": str(error) or repr(error), "host": lease.host_name(), "time": now})

    def forget_failures(self) -> None:
        """All of them are to be tried again."""
        for run in self.manifest.runs:
            own_path(self.folder, run.failure).unlink(missing_ok=True)
        _remove_empty(self.folder / FAILED)


def _remove_abandoned(folder: Path) -> int:
    """Remove leases of dead processes, and the folder if it is empty then; returns how many there were."""
    removed = sum(map(lease.remove_abandoned, folder.glob("*.lock")))
    _remove_empty(folder)
    return removed


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


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
        manifest = decoded(Manifest, content)
        if content.get("schema_version") != SCHEMA_VERSION:
            raise ValueError("another version wrote it")
        if manifest.name != path.parent.name:
            raise ValueError(f"it is of a sweep named {manifest.name!r}")
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): remove its folder, and repeat the command; records stay.") from error
    return manifest


def time_left_s(left: int, seconds: Sequence[float], workers: int = 1) -> float | None:
    """Until the last of `left` runs is done, from the lower median of the `seconds` of those that are, made by so many `workers`; None: fewer
    than two say. A first run is no guide: it loads, calibrates and predicts densely for all."""
    if not left:
        return 0.0
    return statistics.median_low(seconds) * left / max(1, min(workers, left)) if len(seconds) > 1 else None


# --- making its runs ------------------------------------------------------------------------------------------------------------
def claimed(
    sweep: Sweep, wanted: Collection[int], on_poll: Callable[[], None] = lambda: None, nap_s: float = 0.2, shard: bool = False
) -> Generator[tuple[SweepRun, int], None, None]:
    """The runs that have no record, one after the other, each held by a lease while it is made, and how many are open with it.

    Where no run is free, one that another process makes is given: its windows may be shared (`make`), and it is taken over if that process
    dies.

    Args:
        wanted: numbers of runs; all others are left alone.
        on_poll: called between two looks at runs that others make.
        nap_s: between these looks.
        shard: every run is given, in order, also one that others make: all workers share its windows.
    """
    numbers = set(wanted)
    left = [run for run in sweep.manifest.runs if run.number in numbers]
    given: set[int] = set()  # once each, whatever came of it
    while left := [run for run in sweep.open_of(left) if run.number not in given]:
        begun, of_others = False, []
        for place, run in enumerate(left):  # all workers go in this order: those before are taken or done
            if not sweep.is_open(run):
                continue
            in_the_making = not shard and run.fingerprint in sweep.store.in_the_making()
            taken = None if in_the_making else sweep.take(run)
            if taken is None and not shard:
                of_others.append(run)
                continue
            with taken or nullcontext():
                if sweep.is_open(run):  # still
                    begun = True
                    given.add(run.number)
                    yield run, len(left) - place
        # The process of such a run may still make the dense run before it, whose windows are shared as well.
        if not begun and of_others and sweep.store.in_the_making():
            given.add(of_others[0].number)
            yield of_others[0], len(left)
        elif not begun:
            time.sleep(nap_s)  # other processes make all that is left
            on_poll()
