"""`quicksilver run -m`: the runs of a sweep in one process, or handed to a launcher's workers.

Hydra's own multirun composes every run twice, starts from nothing for each, and knows no sweep once it is over. Here the words of the command
line and of conf/ mean the same, and a sweep has a manifest in the results folder (runs/sweep.py).
"""

from __future__ import annotations

import dataclasses
import gc
import math
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
from quicksilver.cli.progress import SAYS_EVERY_S, progress_bar, show_fault, summary, width
from quicksilver.models import parallel
from quicksilver.models.loading import check_fits
from quicksilver.models.spec import ModelConfig
from quicksilver.records import lease
from quicksilver.report.sweep_status import Board, duration
from quicksilver.runs import optuna_sweep as studies
from quicksilver.runs.choices import explain
from quicksilver.runs.composing import check_words, hydra_started, is_swept, with_settings
from quicksilver.runs.config import RunConfig, TrackerConfig, compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.launchers import SERIAL, check_launcher, launch, launcher_name
from quicksilver.runs.run import Plan, Progress, make, parts_of, plan
from quicksilver.runs.sweep import Manifest, Sweep, SweepRun, check_name, claimed, default_name, expanded, is_open, time_left_s
from quicksilver.runs.tracker import check_tracker, sync_hint
from quicksilver.runtime.errors import ConfigError, QuickSilverError


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


def is_sweep(overrides: Sequence[str], extra_dirs: Sequence[Path]) -> bool:
    """Whether the words are of a sweep without saying -m: an experiment may."""
    with hydra_started(extra_dirs):
        return str(_settings(overrides, extra_dirs).mode).endswith("MULTIRUN")


def main(overrides: Sequence[str], extra_dirs: Sequence[Path], asked: SweepOptions) -> int:
    """Make the runs of a sweep; returns the exit code: 1 where one failed.

    Raises:
        ConfigError: nothing of it can be run.
    """
    if asked.name is not None:
        check_name(asked.name)
    with hydra_started(extra_dirs):
        settings = _settings(overrides, extra_dirs)
        sweeper = str(settings.runtime.choices["hydra/sweeper"])
        if parallel.processes() > 1 and (sweeper, launcher_name(settings)) != ("basic", SERIAL):
            raise ConfigError(
                f"hydra/sweeper={sweeper} hydra/launcher={launcher_name(settings)}: the processes of torchrun make the runs of a sweep by "
                "themselves, one after the other: leave out both."
            )
        if sweeper == "optuna":
            return optimise(overrides, settings, extra_dirs, asked)
        if asked.plan:
            return say_plan(overrides, settings, extra_dirs)
        with gc_disabled():
            composed = compose_runs(overrides, settings, extra_dirs, asked.yes)
        first = composed.configs[0]
        if parallel.processes() > 1:
            _join(composed)
            if parallel.rank() > 0:
                return _follow(composed)
        experiment = next((word.partition("=")[2] for word in overrides if word.startswith("experiment=")), None)
        manifest = Manifest(
            name=asked.name or default_name(composed.runs, experiment),
            words=("-m", *overrides),
            runs=tuple(composed.runs),
            extra_dirs=tuple(str(folder.absolute()) for folder in extra_dirs),
            launcher=launcher_name(settings),
            records=first.records,
        )
        workers = check_launcher(settings, composed.configs, Path(first.results_dir), asked.workers)
        sweep = Sweep(first.results_dir, dataclasses.replace(manifest, workers=workers))
        with sweep.driver_lock():
            sweep.create()
            sweep.forget_failures()
            for number, error in composed.errors.items():
                sweep.failed(manifest.runs[number - 1], error)
                say(f"{manifest.label(manifest.runs[number - 1])}: {error}")
            board = Board(sweep)
            trouble = _make(board, composed, asked, settings)
        return _close(board, trouble, first.tracker)


def _join(composed: Composed) -> None:
    """Under torchrun: load the model whose parts the processes have, if a run is to be made; from then on they hear each other.

    Raises:
        ConfigError: a run that each process would make by itself.
    """
    for number, planned in composed.plans.items():
        if planned.wanted[0].config.model.parallel is None:
            raise ConfigError(
                f"Run {number} of the sweep has model.parallel=null, and each of the {parallel.processes()} processes of torchrun would make it: "
                "sweep over other keys, with model.parallel=tensor in every run."
            )
    missing = [planned for planned in composed.plans.values() if not planned.done]
    if missing:
        missing[0].context.model(missing[0].wanted[0].config)


def _follow(composed: Composed) -> int:
    """What the other processes of torchrun do: the runs that the first one says, in its order, until it says 0. Returns the exit code."""
    if all(planned.done for planned in composed.plans.values()):
        return 0
    while number := parallel.broadcast_from_rank0(0):
        make(composed.plans[number])
    return 0


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Within, Python looks for no garbage: importing torch and transformers makes half a million objects that all stay, and looking through them
    again and again takes a seventh of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def say_plan(overrides: Sequence[str], settings: DictConfig, extra_dirs: Sequence[Path]) -> int:
    """Print what would run and what it would take, within `hydra_started`; loads nothing.

    Raises:
        ConfigError: a run that cannot be composed, or whose model or text is not known.
    """
    from quicksilver.runs.estimate import estimates, table

    print(table(estimates([compose(words, extra_dirs) for words, _ in runs_of(overrides, settings, extra_dirs)])))
    return 0


def _settings(overrides: Sequence[str], extra_dirs: Sequence[Path]) -> DictConfig:
    """The section `hydra` of a sweep's config, composed of the words that are the same in every run."""
    check_words(overrides, extra_dirs)
    settings: DictConfig = with_settings([word for word in overrides if not is_swept(word)], extra_dirs).hydra
    return settings


def runs_of(
    overrides: Sequence[str], settings: DictConfig, extra_dirs: Sequence[Path]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The runs of a sweep, each as its overrides and those in which the runs differ, within `hydra_started`.

    Raises:
        ConfigError: a word that is no override.
    """
    params = OmegaConf.to_container(settings.sweeper.get("params") or OmegaConf.create({}), resolve=True)
    assert isinstance(params, dict)
    words = [word for word in overrides if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]
    loader = GlobalHydra.instance().config_loader()
    try:
        return expanded(words, [f"{key!s}={value}" for key, value in params.items()], loader)
    except HydraException as error:
        raise ConfigError(explain(error, overrides, extra_dirs)) from error


def compose_runs(overrides: Sequence[str], settings: DictConfig, extra_dirs: Sequence[Path], yes: bool) -> Composed:
    """Compose and plan every run, within `hydra_started`. Loads no model.

    Raises:
        ConfigError: not one of them can be run; the first says why. More than an hour of runs here without `yes`.
    """
    from quicksilver.runs.estimate import check_time

    swept = runs_of(overrides, settings, extra_dirs)
    place = RunContext()
    configs: dict[int, RunConfig] = {}
    plans: dict[int, Plan] = {}
    errors: dict[int, QuickSilverError] = {}
    for number, (words_of_run, _) in enumerate(swept, start=1):
        try:
            configs[number] = compose(words_of_run, extra_dirs)
        except QuickSilverError as error:
            errors[number] = error
    if len({config.results_dir for config in configs.values()}) > 1:
        raise ConfigError("results_dir: a sweep has one results folder: its manifest lies there.")
    here = launcher_name(settings) in (SERIAL, "joblib", "submitit_local")
    if here and parallel.processes() == 1:
        check_time(list(configs.values()), yes)
    fitting: list[ModelConfig] = []
    runs = []
    for number, (words_of_run, differing) in enumerate(swept, start=1):
        fingerprint = None
        if number in configs:
            try:
                check_tracker(configs[number].tracker)
                planned = plan([configs[number]], place)
                fingerprint = planned.wanted[0].fingerprint
                if here and not planned.done:
                    model, files = configs[number].model, place.files(configs[number])[0]
                    if model not in fitting:
                        check_fits(model, files.folder)
                        fitting.append(model)
                plans[number] = planned
            except QuickSilverError as error:
                errors[number] = error
        runs.append(SweepRun(number, words_of_run, differing, fingerprint))
    if not plans:
        raise errors[1]
    return Composed(runs, plans, errors)


def _make(board: Board, composed: Composed, asked: SweepOptions, settings: DictConfig) -> QuickSilverError | None:
    """The runs that have no record; returns what went wrong with workers that were to make them."""
    sweep = board.sweep
    wanted = [run.number for run in sweep.open_of(sweep.manifest.runs)][: asked.limit]
    done = sum(state.state == "done" for state in sweep.states())
    later = len(sweep.manifest.runs) - done - len(composed.errors) - len(wanted)
    print(
        f"Sweep {sweep.manifest.name}: {len(sweep.manifest.runs)} runs, {done} with a record, {len(wanted)} to do"
        f"{f', {later} later (limit={asked.limit})' if later else ''}. {sweep.folder / 'index.html'}",
        file=sys.stderr,
        flush=True,
    )
    board.write()
    if not wanted:
        return None
    parts = sum(parts_of(composed.plans[number].wanted[0].config) for number in wanted)
    workers = min(sweep.manifest.workers, parts)
    if workers < sweep.manifest.workers:
        print(
            f"workers={sweep.manifest.workers}: the runs have {parts} blocks of windows, so {workers} start.",
            file=sys.stderr,
            flush=True,
        )
    task = Worker(str(sweep.store.root.absolute()), sweep.manifest.name, tuple(wanted))
    try:
        if sweep.manifest.launcher == SERIAL:
            with sweep.at_work():
                work_through(sweep, composed.plans.__getitem__, wanted, board)
            return None
        with _watched(board):
            runs = [run for run in reversed(sweep.manifest.runs) if run.number in wanted]  # the last is open longest
            launch(
                settings, task, workers, sweep.folder.absolute() / "workers", lambda: not any(is_open(sweep, run) for run in runs)
            )
    except QuickSilverError as error:
        if sweep.manifest.launcher == SERIAL and not isinstance(error, SameFailureError):
            raise
        return error
    return None


@dataclass(frozen=True)
class Worker:
    """What a launcher's worker does: it takes runs of a sweep until none is left. Sent to it by its name and these values.

    Attributes:
        wanted: numbers of the runs.
    """

    results_dir: str
    name: str
    wanted: tuple[int, ...]

    def __call__(self, _: Any = None) -> int:
        """Returns how many runs the sweep has left.

        Raises:
            QuickSilverError: the manifest cannot be seen from here.
        """
        try:
            sweep = Sweep.load(self.results_dir, self.name)
        except ConfigError as error:
            raise QuickSilverError(
                f"{lease.host_name()} cannot see {Path(self.results_dir) / 'sweeps' / self.name}: give a results_dir that all nodes share. ({error})"
            ) from error
        extra_dirs = [Path(folder) for folder in sweep.manifest.extra_dirs]

        place = RunContext()

        def plan_of(number: int) -> Plan:
            config = compose(sweep.manifest.runs[number - 1].overrides, extra_dirs)
            return plan([dataclasses.replace(config, results_dir=self.results_dir)], place)

        with _ends_with_its_job(), sweep.at_work():
            self._load(sweep, plan_of)
            work_through(sweep, plan_of, self.wanted, Board(sweep), shown=False)
        return sum(state.state in ("waiting", "running") for state in sweep.states())

    def _load(self, sweep: Sweep, plan_of: Callable[[int], Plan]) -> None:
        """Load the model of the first open run before one is claimed: workers that start at once would wait for the dense run of one of them, and
        load theirs only then."""
        first = next((run.number for run in sweep.manifest.runs if run.number in self.wanted and is_open(sweep, run)), None)
        if first is None:
            return
        with suppress(QuickSilverError), gc_disabled():  # what is wrong, the run says
            planned = plan_of(first)
            config = planned.wanted[0].config
            if config.model.parallel is None:
                planned.context.model(config)


@contextmanager
def _ends_with_its_job() -> Iterator[None]:
    """What submitit's signal handler raises when its job's time is over, an Exception, would be taken for the failure of the run or the import that it
    hits. Within, it is `Terminated`, which nothing swallows.

    Raises:
        QuickSilverError: that happened; what the worker was making is left to others.
    """
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
    over, said, when = threading.Event(), "", time.monotonic()

    def look() -> None:
        nonlocal said, when
        while not over.wait(every_s):
            rows = board.rows()
            counts, minute = str(sorted(row["state"] for row in rows)), time.monotonic() - when >= SAYS_EVERY_S
            if counts != said or minute:
                said = counts
                print(board.headline(rows), file=sys.stderr, flush=True)
            if minute:
                when = time.monotonic()
                running = [row for row in rows if row["state"] == "running"]
                print("".join(f"  run {row['number']}: {row['where']}\n" for row in running), end="", file=sys.stderr, flush=True)

    watcher = threading.Thread(target=look, name="quicksilver-sweep", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


_ALIKE = 3


class SameFailureError(QuickSilverError):
    """Runs fail one after the other in the same way: the environment is broken, not the runs."""


def _kind(error: Exception) -> str:
    """Equal for failures that differ in values, numbers and paths alone."""
    return re.sub(r"(?<==)[^\s,]+|\S*/\S*|[\d.]+", "", f"{type(error.__cause__ or error).__name__} {error}")


@dataclass
class _Ended:
    """How many of the runs have ended, asked before each: by a look at the folders, for at most a twentieth of the time, else one more."""

    sweep: Sweep
    wanted: frozenset[int]
    count: int = 0
    looked: float = -math.inf
    took_s: float = 0.0

    def __call__(self) -> int:
        began = time.monotonic()
        self.count += 1
        if began - self.looked >= 20 * self.took_s:
            there = [run for run in self.sweep.manifest.runs if run.number in self.wanted]
            self.count = len(there) - len(self.sweep.open_of(there))
            self.looked = time.monotonic()
            self.took_s = self.looked - began
        return self.count


def work_through(
    sweep: Sweep,
    plan_of: Callable[[int], Plan],
    wanted: Sequence[int],
    board: Board,
    *,
    runs: Generator[SweepRun, None, None] | None = None,
    shown: bool = True,
) -> None:
    """Make runs one after the other, and say so. A run that fails leaves its reason in the sweep, and the others go on. Under torchrun the other
    processes are told of each, and the first failure is raised: after one, nobody knows where the others are.

    Args:
        plan_of: the plan of a run, by its number.
        wanted: numbers of the runs.
        runs: they, one after the other; None: those that no other process makes.
        shown: what each record says goes to stdout.

    Raises:
        SameFailureError: `_ALIKE` runs in a row failed in one way, and the next ones would, too.
    """
    seconds: list[float] = []
    alike: list[str] = []  # of the failures since the last record, or of another kind
    together = parallel.processes() > 1
    ends = _Ended(sweep, frozenset(wanted))
    with progress_bar() as bar, closing(runs or claimed(sweep, wanted, board.catch_up)) as given:
        try:
            for run in given:
                label, began = sweep.manifest.label(run), time.monotonic()
                ended = ends()
                left = time_left_s(len(wanted) - ended, seconds)
                if not sys.stderr.isatty():
                    print(f"{label}{f', about {duration(left)} left' if left else ''}", file=sys.stderr, flush=True)
                if together:
                    parallel.broadcast_from_rank0(run.number)
                names = {} if run.fingerprint is None else {run.fingerprint: label}
                show = _shown(board, bar, ended, len(wanted))
                try:
                    (record,) = make(plan_of(run.number), progress=show, labels=names, group=f"sweep {sweep.manifest.name}")
                except Exception as error:
                    sweep.failed(run, error)
                    if not isinstance(error, QuickSilverError):
                        show_fault(error)
                    elif not together:  # else it is what the command ends with
                        say(f"{label}: {error}")
                    if together:
                        raise
                    alike = [*(kind for kind in alike if kind == _kind(error)), _kind(error)]
                    if len(alike) == _ALIKE:
                        raise SameFailureError(
                            f"{_ALIKE} runs in a row failed in one way ({type(error.__cause__ or error).__name__}), and the next ones would, too: {error}"
                        ) from error
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


def _close(board: Board, trouble: QuickSilverError | None, tracker: TrackerConfig) -> int:
    """Say how it ended; returns the exit code."""
    board.write()
    states = [state.state for state in board.sweep.states()]
    print(f"\n{board.text(width())}", flush=True)
    _say_hint(board, tracker)
    failed = states.count("failed")
    if failed:
        run_or_runs = "One run of this sweep" if failed == 1 else f"{failed} runs of this sweep"
        say(f"{run_or_runs} failed (above). The others have their records; the same command repeats only what failed.")
    if trouble is not None:
        say(f"{trouble} {states.count('done')} of {len(states)} runs have their records; the same command goes on.")
    return 1 if failed or trouble is not None else 0


def _say_hint(board: Board, tracker: TrackerConfig) -> None:
    made = [str(state.run.fingerprint) for state in board.sweep.states() if state.state == "done"]
    if made and (hint := sync_hint(tracker, board.sweep.store.root, made)):
        say(hint)


# --- hydra/sweeper=optuna: runs that Optuna draws, one after the other -----------------------------------------------------------------

_FAILURES = 5  # of one start: what they have in common is worth a look


def optimise(overrides: Sequence[str], settings: DictConfig, extra_dirs: Sequence[Path], asked: SweepOptions) -> int:
    """Draw and make runs until there are as many as asked for, within `hydra_started`; returns the exit code: 1 where one failed.

    Raises:
        ConfigError: nothing is drawn, optuna is not installed, no name, or a launcher with workers.
    """
    from optuna.trial import TrialState

    config = studies.study_config(settings.sweeper)
    if asked.name is None and not asked.plan:
        raise ConfigError("hydra/sweeper=optuna needs name=…: under it the study is found again.")
    if asked.workers is not None or str(settings.runtime.choices["hydra/launcher"]) != "basic":
        raise ConfigError("hydra/sweeper=optuna draws one run after the other: leave hydra/launcher and workers out.")
    words = [word for word in overrides if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]
    space = studies.space_of(words, config.params)
    place = RunContext()
    low = {key: getattr(one, "low", None) for key, one in space.drawn.items()}
    least = {key: value if value is not None else space.drawn[key].choices[0] for key, value in low.items()}
    first = compose(space.words(least)[0], extra_dirs)
    check_tracker(first.tracker)
    from quicksilver.runs.estimate import check_time, estimates, table

    if asked.plan or asked.name is None:
        print(table(estimates([first])))
        print(
            f"Optuna draws {config.trials} runs as it goes (hydra.sweeper.trials); the one above has the smallest value of each key."
        )
        return 0
    check_time([first], asked.yes)
    plan([first], place)  # a model or a text that is not there is refused before anything is drawn
    manifest = Manifest(check_name(asked.name), ("-m", *overrides), (), tuple(map(str, extra_dirs)), records=first.records)
    sweep = Sweep(first.results_dir, dataclasses.replace(manifest, total=config.trials))
    with sweep.driver_lock():
        sweep.create(space.fixed)
        sweep.forget_failures()
        study = studies.open_study(sweep.folder, asked.name, config)
        board = Board(sweep)

        def plan_of(number: int) -> Plan:
            return plan([compose(sweep.manifest.runs[number - 1].overrides, extra_dirs)], place)

        def drawn() -> Generator[SweepRun, None, None]:
            failed = made = 0
            while studies.finished(study) < config.trials and made != asked.limit and failed < _FAILURES:
                made += 1
                trial = study.ask(dict(space.drawn))
                run = sweep.draw(*space.words(trial.params))
                with suppress(QuickSilverError):  # whoever makes it says why
                    run = sweep.add(dataclasses.replace(run, fingerprint=plan_of(run.number).wanted[0].fingerprint))
                yield run
                record = None if run.fingerprint is None else sweep.store.get(run.fingerprint)
                failed += record is None
                if record is None:
                    study.tell(trial, state=TrialState.FAIL)
                else:
                    study.tell(trial, studies.values_of(record, config.objectives))

        with sweep.at_work():
            work_through(sweep, plan_of, range(1, config.trials + 1), board, runs=drawn())
    _close_study(board, study, space, config)
    _say_hint(board, first.tracker)
    return 1 if any(state.state == "failed" for state in sweep.states()) else 0


def _close_study(board: Board, study: Any, space: studies.Space, config: studies.StudyConfig) -> None:
    """Say what was found."""
    found = list(dict.fromkeys(space.words(params)[0] for params in studies.front(study, config)))
    by_words = {run.overrides: run for run in board.sweep.manifest.runs}
    print(f"\n{board.text(width())}")
    goals = ", ".join(f"{name} ({direction})" for name, direction in config.objectives.items())
    if config.budget and not studies.within_budget(study, config):
        say(f"No run meets the budget {config.budget}: draw more (hydra.sweeper.trials), or wider.")
    elif config.budget:
        best = by_words[found[0]]
        print(f"\nWithin the budget {config.budget}: {board.sweep.manifest.label(best)}\n  {' '.join(best.differing)}")
    print(f"\nNo other run{' within it' if config.budget else ''} beats these in all of {goals}:")
    for words in found:
        print(f"  {board.sweep.manifest.label(by_words[words])}  {by_words[words].fingerprint}")
