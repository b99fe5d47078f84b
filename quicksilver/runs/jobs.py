"""Rows of tables and figures on their way to records: remembered records are read, refusals give their reason, missing records are made.

`RecordIndex` remembers which record answers a command line, so that it is found without composing configs or importing torch. It covers models
of the package, and texts of the package or below data.root while no file there changes. Other files are looked at every time. Any change in the
package or in conf/ empties it.
The repository has such an index beside its records (`quicksilver dev keep`). Where no folder of data is named, that one also answers about
other texts: its records are all there is of them."""

from __future__ import annotations

import functools
import hashlib
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicksilver.data.spec import MADE_HERE
from quicksilver.records.record import Record
from quicksilver.records.store import KEPT, Store, read_object
from quicksilver.runs.choices import config_dir
from quicksilver.runtime.errors import ConfigError, QuickSilverError, UnavailableError

if TYPE_CHECKING:
    from quicksilver.runs.config import RunConfig
    from quicksilver.runs.context import RunContext
    from quicksilver.runs.run import Plan, Planned, Progress


REFUSED = "refused under all: looks ahead"
FAILED = "failed"
LOOKS_EVERY_S = 1.0
SHARE = 24  # runs that a worker takes at once: one with all 180 of a text would still work when the others have ended

# Shows how far a list of planned runs is, while the block lasts.
Watch = Callable[[Sequence["Planned"]], AbstractContextManager[Callable[["Progress"], None] | None]]


@dataclass
class Job:
    """One run and what became of it.

    Attributes:
        config: composed, where the run has to be planned; None: it is known already, or cannot be had.
        plan: of the config, once somebody made it.
        record: of the run; reason: why there is none; error: that made it fail.
    """

    name: str
    overrides: tuple[str, ...]
    config: RunConfig | None = None
    plan: Plan | None = field(default=None, repr=False)
    record: Record | None = None
    reason: str | None = None
    error: Exception | None = field(default=None, repr=False)

    def planned(self, context: RunContext) -> Plan:
        """Its plan, made if it has none, with that context.
        Raises QuickSilverError: model or text cannot be had, or a record is not whole."""
        from quicksilver.runs.run import plan

        assert self.config is not None
        self.plan = self.plan or plan([self.config], context)
        return self.plan

    def fail(self, error: Exception) -> None:
        """Keep the error. What this processor or model lacks is a reason in the row, and the table is whole."""
        self.reason, self.error = (error.reason, None) if isinstance(error, UnavailableError) else (FAILED, error)


def make_job(name: str, overrides: Sequence[str], answers: RecordIndex, *, to_run: bool = True) -> Job:
    """The job with its record where that is remembered; else with its config, or with the reason why there can be no record.

    Args:
        to_run: a missing record is going to be made. False: a run that is known to have none needs no config.
    """
    job = Job(name, tuple(overrides))
    known = answers.get(job.overrides)
    if known is not None and (any(known) or not to_run):
        job.record, job.reason = known
        return job
    from quicksilver.runs.config import compose
    from quicksilver.runs.parts import build_modules

    try:
        config = compose(job.overrides)
        modules = build_modules(config.modules)
    except ConfigError as error:
        job.fail(error)
        return job
    # Asked before anything runs: a refusal is part of the table, not a failure. The rule is quicksilver.measure's check_allowed.
    if config.protocol.name == "all" and not all(module.causal or module.lookahead for module in modules):
        job.reason = REFUSED
        answers.put(job.overrides, config, reason=REFUSED)
    else:
        job.config = config
    return job


def run_missing(
    jobs: Sequence[Job],
    answers: RecordIndex,
    *,
    shared: RunConfig | None = None,
    watch: Watch = lambda _: nullcontext(),
    on_fault: Callable[[Exception], None] = lambda _: None,
) -> None:
    """Give every job with a config its record, or its error. Raises QuickSilverError: what `shared`, or else the first run, needs
    (model, text) cannot be had; the others need it too.

    Args:
        shared: where the jobs have models and texts of their own: what most of them use.
        watch: shows progress.
        on_fault: told of every error once, those of a tracker included.
    """
    from quicksilver.runs.run import joined, make

    failed, wanted, plans = dict[str, Exception](), list[Job](), list["Plan"]()
    try:
        if not (missing := [job for job in jobs if job.config is not None]):
            return
        context = run_context(shared, jobs)
        for job in missing:
            try:
                plans.append(job.planned(context))
                wanted.append(job)
            except QuickSilverError as error:
                if shared is None and not wanted and all(other.record is None for other in jobs):
                    raise
                job.fail(error)
        if not wanted:
            return
        whole = joined(plans)
        with watch(whole.steps) as report:
            make(whole, progress=report, failed=failed)
        for fault in dict.fromkeys(failed.values()):
            on_fault(fault)
        for job, step in zip(wanted, whole.wanted, strict=True):
            try:
                if (record := step.record) is None:
                    job.fail(failed[step.fingerprint])
                    continue
                job.record = record
                answers.put(job.overrides, step.config, fingerprint=record.fingerprint)
            except QuickSilverError as error:
                job.fail(error)
    finally:
        answers.save()


def run_context(shared: RunConfig | None, jobs: Sequence[Job] = ()) -> RunContext:
    """That of the plans that jobs have, or a new one, at which the model and the text of `shared` can be had.
    Raises QuickSilverError: they cannot."""
    from quicksilver.runs.context import RunContext
    from quicksilver.runs.run import plan

    context = next((job.plan.context for job in jobs if job.plan is not None), None) or RunContext()
    if shared is not None:
        plan([shared], context)
    return context


# --- what is remembered ----------------------------------------------------------------------------------------------------------
_FILE = "cache/answers.json"
INDEX = f"{KEPT}/answers.json"
_PACKAGE = Path(__file__).resolve().parents[1]


class RecordIndex:
    """What is remembered below one results folder."""

    def __init__(self, results_dir: Path | str, records: str = "any") -> None:
        self._store = Store(results_dir, records)
        self._stamp = _stamp()
        self._known = self._read(_FILE)
        self._index = self._read(INDEX) if records == "any" else {}
        self._changed = False
        self._stamps: dict[tuple[str, ...], str] = {}

    def _read(self, name: str) -> dict[str, Any]:
        def is_whole(one: Any) -> bool:
            said = isinstance(one, dict) and isinstance(one.get("reason", one.get("fingerprint")), str)
            return said and isinstance(one.get("files", []), list)

        kept = read_object(self._store.root / name)
        entries = kept.get("answers") if kept.get("stamp") == self._stamp else None
        return {key: one for key, one in entries.items() if is_whole(one)} if isinstance(entries, dict) else {}

    def index(self) -> dict[str, Any]:
        """What the repository remembers: `INDEX`. A record that it lacks is there with its fingerprint, so that nobody looks again."""
        known = {}
        for key, one in self._known.items():  # where files lie, and when they were written, is of this machine
            known[key] = {name: one[name] for name in ("fingerprint", "reason") if name in one}
            known[key] |= {"outside": True} if one.get("outside") else {}
        return {"stamp": self._stamp, "answers": dict(sorted((self._index | known).items()))}

    def get(self, overrides: Sequence[str]) -> tuple[Record | None, str | None] | None:
        """What is remembered of a run with these overrides: its record, or the reason why it can have none; neither: nobody has made it. None: nothing
        is remembered, or the record is damaged, or its dense record is gone."""
        key = _key(overrides)
        kept = self._known.get(key)
        if kept is None or (kept.get("outside") and kept["outside"] != self._below(overrides, kept.get("files"))):
            kept = self._index.get(key)
            if kept is None or (kept.get("outside") and os.environ.get("QUICKSILVER_DATA")):
                return None
        if "reason" in kept:
            return None, kept["reason"]
        try:
            record = self._store.get(kept["fingerprint"])
            if record is not None:
                self._store.dense_of(record)
        except QuickSilverError:
            return None
        return record, None

    def put(
        self, overrides: Sequence[str], config: RunConfig, *, fingerprint: str | None = None, reason: str | None = None
    ) -> None:
        """Remember the fingerprint of a record, which need not be made, or the reason why there can be none. Where model, text or modules are not
        those of the package, for `index` alone."""
        entries, key = config.modules.values(), _key(overrides)
        ours = all(str(one.get("_target_", "")).startswith("quicksilver.") and not one.get("calibration") for one in entries)
        kept: dict[str, Any] = {"fingerprint": fingerprint} if fingerprint is not None else {"reason": reason}
        named = (entry.get(key) for entry in entries for key in ("schedule", "maps", "translator", "gates"))
        files = any(str(one).endswith((".yaml", ".safetensors")) for one in named)
        if files or any(word.startswith("hydra.searchpath") for word in overrides):
            ours = False  # files of the user's own, which no stamp knows
        if not (ours and config.model.path.startswith("embedded:")):
            kept["outside"] = True
        elif (dataset := config.dataset).reader not in MADE_HERE:
            splits = (dataset.task.train, dataset.task.validation) if dataset.task is not None else ()
            names = [*filter(None, vars(dataset.files).values()), *(name for split in splits for name in split.files)]
            kept |= {"outside": (dataset.tagger is None and self._below(overrides, names)) or True, "files": names}
        self._changed |= self._known.get(key) != kept
        self._known[key] = kept

    def _below(self, overrides: Sequence[str], names: Any) -> str | None:
        """The stamp of files below data.root; None: it is not set, or one of them is not there."""
        given = (word.partition("=")[2] for word in reversed(overrides) if word.startswith("data.root="))
        root = next(given, os.environ.get("QUICKSILVER_DATA"))
        if not (root and names) or not all((Path(root).expanduser() / str(name)).exists() for name in names):
            return None
        key = (root, *map(str, names))
        self._stamps[key] = self._stamps.get(key) or _stamp_below(*key)
        return self._stamps[key]

    def save(self) -> None:
        """Write what is new, where it can be written."""
        if self._changed:
            self._store.write_cache(_FILE, {"stamp": self._stamp, "answers": self._known})
            self._changed = False


def _stamp_below(root: str, *names: str) -> str:
    """A hash that changes with the place, size or time of any of these files of a folder, or of the files in a folder of it."""
    places = [Path(root).expanduser() / name for name in names]
    paths = [path for place in places for path in (sorted(place.rglob("*")) if place.is_dir() else [place]) if path.is_file()]
    seen = (f"{path.absolute()} {one.st_size} {one.st_mtime_ns} {one.st_ctime_ns}" for path in paths for one in [path.stat()])
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()


def _key(overrides: Sequence[str]) -> str:
    """The same whether the default of where records come from is typed or not."""
    return hashlib.sha256("\n".join(word for word in overrides if word != "records=any").encode()).hexdigest()[:20]


def _stamp() -> str:
    """A hash that changes with any file of the package or of conf/, and with Python's version, whose documentation is the embedded text; the
    same in every clone."""
    whole = hashlib.sha256(sys.version.encode())
    # What decides about an answer, weights included, by names that are the same wherever the package lies.
    places = ((_PACKAGE, "*.py"), (_PACKAGE / "models" / "reference", "*"), (config_dir(), "*.yaml"))
    paths = [(folder, path) for folder, pattern in places for path in folder.rglob(pattern) if path.is_file()]
    files = {f"{folder.name}/{path.relative_to(folder).as_posix()}": path for folder, path in paths}
    for name, path in sorted(files.items()):
        there = path.stat()
        whole.update(f"{name}\n".encode() + _content(path, there.st_size, there.st_mtime_ns))
    return whole.hexdigest()[:20]


@functools.cache
def _content(path: Path, size: int, mtime_ns: int) -> bytes:
    """The hash of a file of this size and time, read once in a process."""
    return hashlib.sha256(path.read_bytes()).digest()


# --- several processes -----------------------------------------------------------------------------------------------------------
def text_of(config: RunConfig) -> str:
    """Equal for runs whose model, windows and dense predictions are the same."""
    return repr((config.model, config.dataset, config.protocol, config.measure["batch_windows"]))


def groups(configs: Sequence[RunConfig]) -> list[list[int]]:
    """Numbers of the configs that may be made side by side, at most `SHARE` of one text together, those that score most windows first."""
    found: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        if not _alone(config):
            found.setdefault(text_of(config), []).append(number)
    shares = [numbers[first : first + SHARE] for numbers in found.values() for first in range(0, len(numbers), SHARE)]
    return sorted(shares, key=lambda numbers: -sum(configs[number].dataset.windows or math.inf for number in numbers))


def _alone(config: RunConfig) -> bool:
    """Whether a run has to be made by itself: a clock is read, threads were asked for, the model may be large, a tracker may refuse the record."""
    from quicksilver.runs.context import timed_measurements

    small = config.model.path.startswith("embedded:") and config.model.device_map == "cpu"
    return not small or config.threads is not None or config.tracker.name != "none" or bool(timed_measurements(config))


def make_side_by_side(jobs: Sequence[Job], workers: int | None, *, watch: Watch = lambda _: nullcontext()) -> None:
    """Make records of `jobs` that are missing and may be made side by side, in so many `workers` (None: one a core; 1: nothing is made here). What
    fails is left as it was: `run_missing` tries it again, and says why. Raises ConfigError: fewer than one worker."""
    from quicksilver.runs.run import Progress

    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers}: needs at least 1.")
    configured = [job for job in jobs if job.config is not None]
    together = groups([job.config for job in configured if job.config is not None])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(workers or cores, len(together))
    if count < 2:
        return
    context, work, steps = run_context(None, jobs), list[list[tuple[str, ...]]](), dict[str, "Planned"]()
    for numbers in together:
        words = []
        for job in (configured[number] for number in numbers):
            with suppress(QuickSilverError):
                if missing := {step.fingerprint: step for step in job.planned(context).steps if not step.done}:
                    words.append(job.overrides)
                    steps |= missing
        work += [words] if words else []
    count = min(count, len(work))
    if count < 2:
        return
    spawn = multiprocessing.get_context("spawn")
    with (
        watch(list(steps.values())) as report,
        ProcessPoolExecutor(count, mp_context=spawn, initializer=_end_with_the_parent) as pool,
    ):
        pending = {pool.submit(_make_all, words) for words in work}
        try:
            while pending:
                pending = wait(pending, timeout=LOOKS_EVERY_S, return_when=FIRST_COMPLETED).not_done
                left = [step for step in steps.values() if not step.done]
                if report is not None and left:
                    done = len(steps) - len(left)
                    phase = f"{count} workers, {done} of {len(steps)} runs done"
                    report(Progress(done, len(steps), left[0].config.label, phase, done / len(steps)))
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # records are whole or not there; the next call goes on
            raise


def _make_all(jobs: Sequence[tuple[str, ...]]) -> None:
    """In a worker: its share of the runs of one text. What fails is made again by the process that tells it."""
    import torch

    from quicksilver.runs.config import compose
    from quicksilver.runs.run import make, plan

    torch.set_num_threads(1)
    make(plan([compose(overrides) for overrides in jobs]), failed={})


def _end_with_the_parent() -> None:
    """In a worker: a parent that is killed takes it along; else it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
