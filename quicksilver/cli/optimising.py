"""`quicksilver run -m hydra/sweeper=optuna`: a sweep whose runs Optuna draws, one after the other."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from quicksilver.cli.arguments import SweepOptions
from quicksilver.cli.main import say
from quicksilver.cli.progress import show_fault, width
from quicksilver.report.sweep_status import Board
from quicksilver.runs import optuna_sweep as studies
from quicksilver.runs.config import RunConfig, compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.run import make, plan
from quicksilver.runs.sweep import Manifest, Sweep, SweepRun, check_name
from quicksilver.runs.terminal import summary
from quicksilver.runs.tracker import check_tracker
from quicksilver.runtime.errors import ConfigError, QuickSilverError

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
    plan([first], place)  # a model or a text that is not there is refused before anything is drawn
    if asked.plan or asked.name is None:
        return _say_plan(first, config)
    manifest = Manifest(check_name(asked.name), ("-m", *overrides), (), tuple(map(str, extra_dirs)), records=first.records)
    sweep = Sweep(first.results_dir, dataclasses.replace(manifest, total=config.trials))
    with sweep.driver_lock():
        sweep.go_on(space.fixed)
        sweep.forget_failures()
        study = studies.open_study(sweep.folder, asked.name, config)
        board = Board(sweep)
        failed, made = 0, 0
        while studies.finished(study) < config.trials and made != asked.limit and failed < _FAILURES:
            made += 1
            trial = study.ask(dict(space.drawn))
            run = _run_of(sweep, *space.words(trial.params))
            label = sweep.manifest.label(run)
            print(label, file=sys.stderr, flush=True)
            try:
                planned = plan([compose(run.overrides, extra_dirs)], place)
                run = dataclasses.replace(run, fingerprint=planned.wanted[0].fingerprint)
                sweep.add(run)
                (record,) = make(planned, labels={str(run.fingerprint): label})
                values = studies.values_of(record, config.objectives)
            except Exception as error:
                failed += 1
                sweep.add(run)
                sweep.failed(run, error)
                study.tell(trial, state=TrialState.FAIL)
                say(f"{label}: {error}")
                if not isinstance(error, QuickSilverError):
                    show_fault(error)
            else:
                study.tell(trial, values)
                print(f"{label}\n{summary(record)}", flush=True)
            board.write()
    _close(board, study, space, config)
    return 1 if failed else 0


def _say_plan(first: RunConfig, config: studies.StudyConfig) -> int:
    from quicksilver.runs.estimate import estimates, table

    print(table(estimates([first])))
    print(
        f"Optuna draws {config.trials} runs as it goes (hydra.sweeper.trials); the one above has the smallest value of each key."
    )
    return 0


def _run_of(sweep: Sweep, overrides: tuple[str, ...], differing: tuple[str, ...]) -> SweepRun:
    """The run with these words: one that the sweep has, or its next."""
    there = next((run for run in sweep.manifest.runs if run.overrides == overrides), None)
    return there or SweepRun(len(sweep.manifest.runs) + 1, overrides, differing)


def _close(board: Board, study: Any, space: studies.Space, config: studies.StudyConfig) -> None:
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
