"""`quicksilver run -m`: the runs of a sweep in one process, or handed to a launcher's workers.

Hydra's own multirun composes every run twice, starts from nothing for each, and knows no sweep once it is over. Here the words of the command
line and of conf/ mean the same, and a sweep has a manifest in the results folder (runs/sweep.py).
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from quicksilver.cli.arguments import SweepOptions
from quicksilver.cli.main import Terminated, say
from quicksilver.cli.progress import SAYS_EVERY_S, gc_disabled, log, progress_bar, show_fault, summary, width
from quicksilver.models import parallel
from quicksilver.models.loading import check_fits
from quicksilver.models.spec import ModelConfig
from quicksilver.records import lease
from quicksilver.report.sweep_status import Board
from quicksilver.runs import optuna_sweep as studies
from quicksilver.runs.choices import explain
from quicksilver.runs.config import RunConfig, check_words, compose, hydra_started, is_swept, modules_of, with_settings
from quicksilver.runs.context import RunContext, asks_for_calibration
from quicksilver.runs.estimate import check_time, duration, estimates, table, without_record
from quicksilver.runs.launchers import HERE, SERIAL, check_launcher, launch, launcher_name, workers_of
from quicksilver.runs.parts import build_modules
from quicksilver.runs.run import Plan, Progress, check_shared, make, parts_of, plan
from quicksilver.runs.sweep import Manifest, Sweep, SweepRun, check_name, claimed, default_name, expanded, time_left_s
from quicksilver.runs.tracker import check_tracker, sync_hint
from quicksilver.runtime.errors import ConfigError, QuickSilverError

_ALIKE = 3  # failures of one kind in a row end a sweep
_FAILURES = 5  # of drawn runs end one start
_AGAIN = 50  # draws in a row of runs that are there, too
PlanOf = Callable[[SweepRun], Plan]
Words = tuple[str, ...]


def is_sweep(overrides: Sequence[str], extra_dirs: Sequence[Path]) -> bool:
    """Whether the words are of a sweep without saying -m: an experiment may."""
    with hydra_started(extra_dirs):
        return str(_settings(overrides, extra_dirs).mode).endswith("MULTIRUN")


def main(overrides: Sequence[str], extra_dirs: Sequence[Path], asked: SweepOptions) -> int:
    """Make the runs of a sweep; returns the exit code: 1 where one failed."""
    if asked.name is not None:
        check_name(asked.name)
    with hydra_started(extra_dirs):
        settings = _settings(overrides, extra_dirs)
        sweeper, launcher = str(settings.runtime.choices["hydra/sweeper"]), launcher_name(settings)
        if parallel.processes() > 1 and (sweeper, launcher) != ("basic", SERIAL):
            why = "the processes of torchrun make the runs of a sweep by themselves, one after the other"
            raise ConfigError(f"hydra/sweeper={sweeper} hydra/launcher={launcher}: {why}: leave out both.")
        if sweeper == "optuna":
            return optimise(overrides, settings, extra_dirs, asked)
        if asked.shard and launcher == SERIAL:
            raise ConfigError("shard=true: one process has nobody to share windows with. Add hydra/launcher=joblib, or drop it.")
        if asked.plan:
            return _print_plan(overrides, settings, extra_dirs, asked)
        with gc_disabled():
            composed = compose_runs(overrides, settings, extra_dirs, asked.yes)
        first = composed.configs[0]
        check_shared(composed.configs if asked.shard else (), "shard=true")
        if parallel.processes() > 1 and _joined(composed):
            return 0
        experiment = next((word.partition("=")[2] for word in overrides if word.startswith("experiment=")), None)
        manifest = Manifest(
            asked.name or default_name(composed.runs, experiment), ("-m", *overrides), tuple(composed.runs),
            tuple(str(folder.absolute()) for folder in extra_dirs), launcher,
            check_launcher(settings, composed.configs, Path(first.results_dir), asked.workers), first.records,
        )  # fmt: skip
        with _started(first, manifest) as board:
            for number, error in composed.errors.items():
                run = manifest.runs[number - 1]
                board.sweep.failed(run, error)
                say(_failure(manifest.label(run), error))
            trouble = _make(board, composed, asked, settings)
        board.write()
        states = [state.state for state in board.sweep.states()]
        print(f"\n{board.text(width())}", flush=True)
        _say_hint(board, first)
        if failed := states.count("failed"):
            runs = "One run" if failed == 1 else f"{failed} runs"
            say(f"{runs} of this sweep failed (above). The others have their records; the same command repeats only what failed.")
            if composed.errors:
                say("Where a value was wrong: correct it, and give the sweep another name=…. Finished runs are reused.")
        if trouble is not None:
            done = f"{states.count('done')} of {len(states)} runs have their records"
            say(f"{trouble} {done}. Once that is mended, the same command goes on.")
        return 1 if failed or trouble is not None else 0


def _print_plan(overrides: Sequence[str], settings: DictConfig, extra_dirs: Sequence[Path], asked: SweepOptions) -> int:
    """What the runs without a record would take, and which ones cannot be made; returns the exit code: 2 where there is such a run."""
    swept = runs_of(overrides, settings, extra_dirs)
    configs: dict[str, RunConfig] = {}
    for number, (words_of_run, differing) in enumerate(swept, start=1):
        label = " ".join(re.sub(r"^[^=]*\.", "", word) for word in differing) or str(number)
        try:
            config = compose(words_of_run, extra_dirs)
            for module in build_modules(config.modules):
                asks_for_calibration(module)  # refuses a threshold that is no percentile
        except ConfigError as error:
            say(_failure(f"[{number}/{len(swept)}] {label}", error))
        else:
            configs[label] = config
    left, absent = without_record([*configs.values()])
    unmade = {id(config) for config in left}
    if done := len(configs) - len(left):
        print(f"{done} of {len(swept)} runs {'have their records' if done > 1 else 'has its record'}.")
    launcher = launcher_name(settings)
    workers = 1 if launcher in HERE else workers_of(settings, asked.workers)  # those here share what was measured
    options = [label for label, config in configs.items() if id(config) in unmade]
    elsewhere = launcher not in HERE or any(config.model.device_map != "cpu" for config in left)
    if left or len(configs) == len(swept):
        print(table(estimates(left, differing=options), absent, workers, elsewhere))
        if launcher in HERE and launcher != SERIAL:
            print("The time is that of one process. Workers on this machine share its processors.")
    else:
        print("Nothing would run: what has no record is refused (above).")
    return 2 if len(configs) < len(swept) else 0


@contextmanager
def _started(first: RunConfig, manifest: Manifest, fixed: Sequence[str] = (), drawn: Sequence[str] = ()) -> Iterator[Board]:
    """The sweep of that manifest, new or resumed, launched by this process alone; `first`: the config of its first run."""
    sweep = Sweep(first.results_dir, manifest)
    with sweep.driver_lock():
        sweep.create(fixed, drawn)
        sweep.forget_failures()
        yield Board(sweep)


def _say_hint(board: Board, config: RunConfig) -> None:
    made = [str(state.run.fingerprint) for state in board.sweep.states() if state.state == "done"]
    if made and (hint := sync_hint(config.tracker, board.sweep.store.root, made)):
        say(hint)


def _joined(composed: Composed) -> bool:
    """Load the model whose parts the processes of torchrun have, if a run is to be made; from then on they hear each other. All but the first then
    make the runs that it names, in its order, until it names 0, and True is returned. A run that each would make by itself is a ConfigError."""
    for number, planned in composed.plans.items():
        if planned.wanted[0].config.model.parallel is None:
            each = f"each of the {parallel.processes()} processes of torchrun would make it"
            remedy = "sweep over other keys, with model.parallel=tensor in every run"
            raise ConfigError(f"Run {number} of the sweep has model.parallel=null, and {each}: {remedy}.")
    missing = next((planned for planned in composed.plans.values() if not planned.done), None)
    if missing is not None:
        missing.context.model(missing.wanted[0].config)
        while parallel.rank() > 0 and (number := parallel.broadcast_from_rank0(0)):
            make(composed.plans[number])
    return parallel.rank() > 0


# --- which runs -----------------------------------------------------------------------------------------------------------------


@dataclass
class Composed:
    """The runs of a sweep with their plans; of one that cannot be composed or planned, why."""

    runs: list[SweepRun]
    plans: dict[int, Plan]
    errors: dict[int, QuickSilverError]

    @property
    def configs(self) -> list[RunConfig]:
        """Of the runs that have a plan."""
        return [planned.wanted[0].config for planned in self.plans.values()]


def _settings(overrides: Sequence[str], extra_dirs: Sequence[Path]) -> DictConfig:
    """The section `hydra` of a sweep's config, composed of the words that are the same in every run."""
    check_words(overrides, extra_dirs)
    inside = tuple(f"{word.partition('=')[0]}." for word in overrides if is_swept(word))  # keys that some choices lack
    same = [word for word in overrides if not is_swept(word) and not word.lstrip("+~").startswith(inside)]
    settings: DictConfig = with_settings(same, extra_dirs).hydra
    return settings


def _of_runs(overrides: Sequence[str]) -> list[str]:
    """The words that are not Hydra's."""
    return [word for word in overrides if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]


def runs_of(overrides: Sequence[str], settings: DictConfig, extra_dirs: Sequence[Path]) -> list[tuple[Words, Words]]:
    """The runs of a sweep, each as its overrides and those in which the runs differ, within `hydra_started`.

    A run is without the options of modules that only others have. `modules=[halting_attention],[prompt_truncation]
    modules.halting.halted_share=0.1,0.2` are three runs.
    """
    params: Any = OmegaConf.to_container(settings.sweeper.get("params") or OmegaConf.create({}), resolve=True)
    loader = GlobalHydra.instance().config_loader()
    try:
        runs = expanded(_of_runs(overrides), [f"{key!s}={value}" for key, value in params.items()], loader)
        chosen = [modules_of(words, extra_dirs) for words, _ in runs]
    except HydraException as error:
        raise ConfigError(explain(error, overrides, extra_dirs)) from error
    known = set[str]().union(*(one or () for one in chosen))
    found: dict[Words, Words] = {}
    for (words, differing), own in zip(runs, chosen, strict=True):
        others = tuple(f"modules.{name}." for name in known - own) if own is not None else ()
        kept = tuple(word for word in words if not word.lstrip("+~").startswith(others or "="))
        found.setdefault(kept, tuple(word for word in differing if word in kept))
    return list(found.items())


def compose_runs(overrides: Sequence[str], settings: DictConfig, extra_dirs: Sequence[Path], yes: bool) -> Composed:
    """Compose and plan every run, within `hydra_started`. Loads no model."""
    swept = runs_of(overrides, settings, extra_dirs)
    place, configs, found = RunContext(), dict[int, RunConfig](), Composed([], {}, {})
    for number, (words_of_run, _) in enumerate(swept, start=1):
        try:
            configs[number] = compose(words_of_run, extra_dirs)
        except QuickSilverError as error:
            found.errors[number] = error
    if len({config.results_dir for config in configs.values()}) > 1:
        raise ConfigError("results_dir: a sweep has one results folder: its manifest lies there.")
    here = launcher_name(settings) in HERE
    if here and parallel.processes() == 1:
        check_time(list(configs.values()), yes)
    fitting: list[ModelConfig] = []
    for number, config in configs.items():
        try:
            check_tracker(config.tracker)
            planned = plan([config], place)
            if here and not planned.done and config.model not in fitting:
                check_fits(config.model, place.files(config)[0].folder)
                fitting.append(config.model)
            found.plans[number] = planned
        except QuickSilverError as error:
            found.errors[number] = error
    if not found.plans:
        raise found.errors[1]
    prints = {number: planned.wanted[0].fingerprint for number, planned in found.plans.items()}
    found.runs = [SweepRun(number, *run, prints.get(number)) for number, run in enumerate(swept, start=1)]
    return found


# --- making them ----------------------------------------------------------------------------------------------------------------


def _make(board: Board, composed: Composed, asked: SweepOptions, settings: DictConfig) -> QuickSilverError | None:
    """The runs that have no record; returns what went wrong with workers that were to make them."""
    sweep = board.sweep
    runs = sweep.manifest.runs
    wanted = [run.number for run in sweep.open_of(runs)][: asked.limit]
    done = sum(state.state == "done" for state in sweep.states())
    later = len(runs) - done - len(composed.errors) - len(wanted)
    rest = f", {later} later (limit={asked.limit})" if later else ""
    rest += f", {len(composed.errors)} cannot be made (above)" if composed.errors else ""
    counts = f"{len(runs)} runs, {done} with a record, {len(wanted)} to do{rest}"
    log(f"Sweep {sweep.manifest.name}: {counts}. {sweep.folder / 'index.html'}")
    board.write()
    if not wanted:
        return None
    if sweep.manifest.launcher == SERIAL:
        try:
            with sweep.at_work():
                given = claimed(sweep, wanted, board.catch_up)
                work_through(board, lambda run: composed.plans[run.number], given, len(wanted))
        except SameFailureError as error:
            return error
        return None
    asked_for = sweep.manifest.workers
    workers = min(asked_for, sum(parts_of(composed.plans[number].wanted[0].config) for number in wanted))
    if workers < asked_for:
        work = f"there is work for {workers} (a worker takes a run, or 32 windows of one)"
        log(f"workers={asked_for}: {work}, so {workers} start{'s' * (workers == 1)}.")
    backwards = [run for run in reversed(runs) if run.number in wanted]  # the last is open longest
    sweep.forget_dead_workers()  # of an earlier command
    worker = Worker(str(sweep.store.root.absolute()), sweep.manifest.name, tuple(wanted), asked.shard)
    logs, is_over = sweep.folder.absolute() / "workers", lambda: not any(map(sweep.is_open, backwards))
    try:
        with _watched(board):
            launch(settings, worker, workers, logs, is_over, lambda: bool(sweep.workers()))
    except QuickSilverError as error:
        return error
    if died := sweep.forget_dead_workers():
        say(f"{died} of {workers} workers died, killed by hand or for want of memory. The others made all runs.")
    return None


@dataclass(frozen=True)
class Worker:
    """What a launcher's worker does: it takes the runs of a sweep with the `wanted` numbers until none is left; `shard` as in `claimed`. Sent to it by
    its name and these values."""

    results_dir: str
    name: str
    wanted: tuple[int, ...]
    shard: bool = False

    def __call__(self, _: Any = None) -> None:
        try:
            sweep = Sweep.load(self.results_dir, self.name)
        except ConfigError as error:
            unseen = f"{lease.host_name()} cannot see {Path(self.results_dir) / 'sweeps' / self.name}"
            raise QuickSilverError(f"{unseen}: give a results_dir that all nodes share. ({error})") from error
        extra_dirs, place = [Path(folder) for folder in sweep.manifest.extra_dirs], RunContext()

        def plan_of(run: SweepRun) -> Plan:
            return plan([dataclasses.replace(compose(run.overrides, extra_dirs), results_dir=self.results_dir)], place)

        with _ends_with_its_job(), sweep.at_work():
            board = Board(sweep)
            # The model of the first open run is loaded before one is claimed. Workers that start at once would wait for the dense run of one of
            # them, and load theirs only then.
            first = next((run for run in sweep.manifest.runs if run.number in self.wanted and sweep.is_open(run)), None)
            with suppress(QuickSilverError), gc_disabled():  # what is wrong, the run says
                if first is not None and (config := plan_of(first).wanted[0].config).model.parallel is None:
                    place.model(config)
            runs = claimed(sweep, self.wanted, board.catch_up, shard=self.shard)
            work_through(board, plan_of, runs, len(self.wanted), shown=False)


@contextmanager
def _ends_with_its_job() -> Iterator[None]:
    """submitit's signal handler raises an Exception when the time of its job is over; the run or the import that it hits would seem to have failed.
    Within, it is `Terminated`, which nothing swallows, and then a QuickSilverError: what the worker was making is left to others."""
    number = getattr(signal, f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}", None)  # as submitit has it
    before = None if number is None else signal.getsignal(number)
    if number is None or not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        try:
            before(number, frame)
        except Exception as error:
            raise Terminated(str(error)) from error

    signal.signal(number, end)
    try:
        yield
    except Terminated as ended:
        raise QuickSilverError(f"The time of this worker's job was over. {ended}") from ended
    finally:
        signal.signal(number, before)


@contextmanager
def _watched(board: Board, every_s: float = 5.0) -> Iterator[None]:
    """Within, say on stderr how far workers are, whenever that has changed, and once a minute what each of them does."""
    over = threading.Event()
    labels = {run.number: board.sweep.manifest.label(run) for run in board.sweep.manifest.runs}

    def look() -> None:
        said, when = "", time.monotonic()
        while not over.wait(every_s):
            rows = board.rows()
            counts, minute = str(sorted(row["state"] for row in rows)), time.monotonic() - when >= SAYS_EVERY_S
            if counts != said or minute:
                said = counts
                log(board.headline(rows))
            if minute:
                when = time.monotonic()
                for row in (row for row in rows if row["state"] == "running"):
                    log(f"  {labels[row['number']]}: {row['where']}")

    watcher = threading.Thread(target=look, name="quicksilver-sweep", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


class SameFailureError(QuickSilverError):
    """Runs fail one after the other in the same way: the environment is broken, not the runs."""


def _failure(label: str, error: Exception) -> str:
    """What is said of a run that failed; many errors begin with the option by which its label names it."""
    number, _, option = label.rpartition("] ")
    return f"{number}] {error}" if number and str(error).startswith(f"{option}:") else f"{label}: {error}"


def _kind(error: Exception) -> str:
    """Equal for failures that differ in values, numbers and paths alone."""
    return re.sub(r"(?<==)[^\s,]+|\S*/\S*|[\d.]+", "", f"{type(error.__cause__ or error).__name__} {error}")


def _as_planned(run: SweepRun, planned: Plan) -> Plan:
    """The plan that a worker made of a run. Raises QuickSilverError: its record would be another one than the sweep waits for."""
    here = planned.wanted[0]
    if run.fingerprint in (None, here.fingerprint):
        return planned
    why = "Its text, weights, maps or code differ, or it measured other kernels or number formats as fastest: name those"
    raise QuickSilverError(
        f"The sweep waits for record {run.fingerprint}, and {lease.host_name()} would make {here.fingerprint}. {why}."
    )


def work_through(
    board: Board, plan_of: PlanOf, runs: Generator[tuple[SweepRun, int], None, None], total: int, *, shown: bool = True
) -> None:
    """Make runs one after the other, and say so. A run that fails leaves its reason in the sweep, and the others go on. Under torchrun the other
    processes are told of each, and the first failure is raised: after one, nobody knows where the others are.

    Args:
        runs: each with the number of runs that are open with it.
        total: how many runs there are.
        shown: what each record says goes to stdout.
    """
    sweep, together = board.sweep, parallel.processes() > 1
    seconds: list[float] = []
    alike: list[str] = []  # kinds of the failures since the last record, or of another kind
    with progress_bar() as bar, closing(runs):
        try:
            for run, left in runs:
                label, began = sweep.manifest.label(run), time.monotonic()
                left_s = time_left_s(left, seconds)
                if not sys.stderr.isatty():
                    shared = ", shared with another worker," if run.fingerprint in sweep.store.in_the_making() else ""
                    log(f"{label}{shared} begins{f', about {duration(left_s)} left for all' if left_s else ''}")
                if together:
                    parallel.broadcast_from_rank0(run.number)
                show = _shown(board, bar, total - left, total)
                try:
                    names, group = {run.fingerprint or "": label}, f"sweep {sweep.manifest.name}"
                    (record,) = make(_as_planned(run, plan_of(run)), progress=show, labels=names, group=group)
                except Exception as error:
                    sweep.failed(run, error)
                    if not isinstance(error, QuickSilverError):
                        show_fault(error)
                    elif not together:  # else the command ends with it
                        say(_failure(label, error))
                    if together:
                        raise
                    alike = [*(kind for kind in alike if kind == _kind(error)), _kind(error)]
                    if len(alike) == _ALIKE:
                        many = f"{_ALIKE} runs in a row failed in one way ({type(error.__cause__ or error).__name__})"
                        raise SameFailureError(f"{many}, and the next ones would, too: {error}") from error
                else:
                    alike = []
                    seconds.append(time.monotonic() - began)
                    if shown:
                        print(f"{label}\n{summary(record)}", flush=True)
                board.changed()
            if together:
                parallel.broadcast_from_rank0(0)
        finally:
            board.write()


def _shown(board: Board, bar: Callable[[Progress], None], place: int, runs: int) -> Callable[[Progress], None]:
    """Moves the bar of all `runs`, of which this is number `place`, and the page once the run has begun."""
    begun = False

    def show(now: Progress) -> None:
        nonlocal begun
        if not begun and now.phase != "wait":
            begun = True
            board.changed()  # its draft is there: the page says that it runs
        board.catch_up()
        bar(dataclasses.replace(now, run=place, runs=runs, fraction=(place + now.fraction) / runs))

    return show


# --- hydra/sweeper=optuna: runs that Optuna draws, one after the other -----------------------------------------------------------


def optimise(overrides: Sequence[str], settings: DictConfig, extra_dirs: Sequence[Path], asked: SweepOptions) -> int:
    """Draw and make as many runs as asked for, within `hydra_started`; returns the exit code: 1 where one failed."""
    config = studies.study_config(settings.sweeper)
    if asked.name is None and not asked.plan:
        raise ConfigError("hydra/sweeper=optuna needs name=…: under it the study is found again.")
    if asked.workers is not None or launcher_name(settings) != SERIAL:
        raise ConfigError("hydra/sweeper=optuna draws one run after the other: leave hydra/launcher and workers out.")
    if asked.shard:
        raise ConfigError("hydra/sweeper=optuna draws one run after the other: leave shard=true out.")
    space = studies.space_of(_of_runs(overrides), config.params)
    first = compose(space.least, extra_dirs)
    check_tracker(first.tracker)
    if asked.plan or asked.name is None:
        print(table(estimates([first])))
        print(f"Optuna draws {config.trials} runs (hydra.sweeper.trials); the one above has the smallest value of each key.")
        return 0
    check_time([first], asked.yes, config.trials if asked.limit is None else min(asked.limit, config.trials))
    place, extra = RunContext(), tuple(map(str, extra_dirs))
    plan([first], place)  # a model or a text that is not there is refused before anything is drawn
    manifest = Manifest(asked.name, ("-m", *overrides), (), extra, records=first.records, total=config.trials)
    with _started(first, manifest, space.fixed, tuple(space.drawn)) as board:
        study = studies.open_study(board.sweep.folder, asked.name, config)

        def plan_of(run: SweepRun) -> Plan:
            return plan([compose(run.overrides, extra_dirs)], place)

        with board.sweep.at_work():
            given = _drawn(board.sweep, study, space, config, plan_of, asked.limit)
            work_through(board, plan_of, given, config.trials)
    found, within = studies.front(study, config)
    by_words = {run.overrides: run for run in board.sweep.manifest.runs}
    best = list(dict.fromkeys(by_words[space.words(params)[0]] for params in found))
    label = board.sweep.manifest.label
    print(f"\n{board.text(width())}")
    if config.budget and not within:
        say(f"No run meets the budget {config.budget}: draw more (hydra.sweeper.trials), or wider.")
    elif config.budget:
        print(f"\nWithin the budget {config.budget}: {label(best[0])}\n  {' '.join(best[0].differing)}")
    goals = ", ".join(f"{name} ({direction})" for name, direction in config.objectives.items())
    print(f"\nNo other run{' within it' if config.budget else ''} beats these in all of {goals}:")
    rows, alike = {row["number"]: row for row in board.rows()}, dict[tuple[Any, ...], list[SweepRun]]()
    for run in best:
        found_by_it = tuple(rows[run.number].get(key) for key in ("ppl", "kl_nats", "executed_flops_saved_pct"))
        alike.setdefault(found_by_it, []).append(run)
    for one, *others in alike.values():
        equal = f" (equal: {', '.join(map(label, others))})" if others else ""
        print(f"  {label(one)}  {one.fingerprint}{equal}")
    _say_hint(board, first)
    return 1 if any(state.state == "failed" for state in board.sweep.states()) else 0


def _drawn(
    sweep: Sweep, study: Any, space: studies.Space, config: studies.StudyConfig, plan_of: PlanOf, limit: int | None
) -> Generator[tuple[SweepRun, int], None, None]:
    """Runs that the study draws, until it has as many as asked for; it is told what each gave. Values that compose to a run that it has are drawn
    again, and count as no trial."""
    from optuna.trial import TrialState

    prints = {run.overrides: run.fingerprint for run in sweep.manifest.runs}
    there = {prints.get(space.words(trial.params)[0]) for trial in studies.complete(study)}
    failed = made = again = 0
    while (done := len(studies.complete(study))) < config.trials and made != limit and failed < _FAILURES:
        trial = study.ask(dict(space.drawn))
        words, differing = space.words(trial.params)
        fingerprint = None
        with suppress(QuickSilverError):  # whoever makes it says why
            fingerprint = plan_of(SweepRun(1, words, differing)).wanted[0].fingerprint
        if fingerprint is not None and fingerprint in there:
            study.tell(trial, state=TrialState.FAIL)
            again += 1
            if again == _AGAIN:
                say(f"{_AGAIN} draws in a row gave runs that are there: {done} of {config.trials} are made. Take other values.")
                return
            continue
        again = 0
        made += 1
        run = sweep.draw(words, differing, fingerprint)
        yield run, config.trials - done
        record = None if run.fingerprint is None else sweep.store.get(run.fingerprint)
        if record is None:
            failed += 1
            study.tell(trial, state=TrialState.FAIL)
        else:
            there.add(run.fingerprint)
            study.tell(trial, studies.values_of(record, config.objectives))
