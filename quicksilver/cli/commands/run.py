"""Make one record, or those of a sweep: model × dataset × modules × protocol × measure.

quicksilver run model=reference-gpt2 dataset=python-docs modules=[halting,kv_skipping] protocol=continuation
quicksilver run -m modules=[halting] modules.halting.tau_drift=p10,p25,p40
quicksilver run --cfg job modules=[halting]     prints the composed config
quicksilver run --help                          prints the groups and their choices

A run that has its record is not repeated. Of a sweep (-m), further keys: name=NAME, limit=20, workers=4 (docs/sweeps-and-budgets.md);
`quicksilver list sweep NAME` says how far it is. plan=true says what would run, and what it would take (docs/recipes.md).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quicksilver.cli.arguments import SweepOptions, split_own
from quicksilver.cli.main import say
from quicksilver.runs.choices import config_dir, explain
from quicksilver.runs.composing import check_files, check_hydra, check_overrides, check_words, parsed, quoted
from quicksilver.runs.config import RunConfig, run_config
from quicksilver.runtime.errors import ConfigError, QuickSilverError

OWN_HELP = True  # Hydra's: it lists the choices


class PastHydra(BaseException):
    """Carries what went wrong in a job past Hydra, which prints all words of the command line before it hands on an Exception."""

    def __init__(self, error: QuickSilverError) -> None:
        self.error = error


def job(cfg: DictConfig) -> None:
    """Make or find the record of one composed config and print what it says."""
    from quicksilver.cli.progress import watched
    from quicksilver.runs.terminal import summary

    # Unresolved: a word with ${…} in it may be what is wrong.
    task = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    overrides = [str(word) for word in task] if isinstance(task, list) else []
    try:
        from quicksilver.runs.run import make, plan

        check_hydra(HydraConfig.get())
        config = run_config(cfg, overrides)
        planned = plan([config])
        if (made := planned.wanted[0].record) is not None:
            say(f"This run has its record already, of {made.finished[:16].replace('T', ' ')}: it is shown, nothing was run.")
        with watched(planned.steps) as progress:
            (record,) = make(planned, progress=progress)
        print(summary(record), flush=True)
        _say_where_to_sync(config, record.fingerprint)
    except QuickSilverError as error:
        raise PastHydra(error) from error


def _say_where_to_sync(config: RunConfig, fingerprint: str) -> None:
    if config.tracker.name == "wandb" and config.tracker.mode == "offline":
        there = sorted(Path(config.results_dir).glob(f"wandb/offline-run-*-{fingerprint}"))
        if there:
            say(f"W&B has it offline. To send it: wandb sync {shlex.quote(str(there[-1]))}")
        else:
            say("W&B has no run of it: its record was there before. To mirror all records: python -m quicksilver.report.wandb")


def main(words: Sequence[str]) -> int:
    """Hand the words to Hydra; returns the exit code.

    Raises:
        ConfigError: a config that cannot be run.
        QuickSilverError: a run that failed.
    """
    asked, rest = split_own(words, SweepOptions)
    options, overrides = _split(rest)
    overrides = quoted(overrides)
    check_overrides(overrides)
    searched = _searched(overrides)
    extra_dirs = [*_extra_dirs(options, there=False), *searched]
    asks_hydra = [word for word in options if word.startswith(_ANSWERED_BY_HYDRA)]
    many = [word for word in options if word in ("-m", "--multirun")]
    if not asks_hydra and (many or asked.plan or any(word.startswith(_MAY_SWEEP) for word in overrides)):
        from quicksilver.cli import sweeping

        if many or asked.plan or sweeping.is_sweep([word for word in overrides if not word.startswith(_SEARCHPATH)], extra_dirs):
            return sweeping.main([word for word in overrides if not word.startswith(_SEARCHPATH)], extra_dirs, asked)
    if asked != SweepOptions():
        raise ConfigError("name, limit and workers are keys of a sweep: quicksilver run -m …")
    return _one_run(options, overrides, [*_extra_dirs(options), *searched])


def _one_run(options: list[str], overrides: list[str], extra_dirs: list[Path]) -> int:
    # Hydra prints what it catches and exits by itself; with this it raises, and one readable message can be made of it.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    before = sys.argv
    try:
        check_files(extra_dirs)
        check_words(overrides, extra_dirs)
        # argparse takes overrides on one side of the options only
        sys.argv = ["quicksilver run", *options, *overrides]
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="run")(job)()
    except PastHydra as carrier:
        raise carrier.error from carrier
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides, extra_dirs)) from error
    finally:
        sys.argv = before
    return 0


_SEARCHPATH = "hydra.searchpath="
_MAY_SWEEP = ("experiment=", "hydra.mode=")  # without -m
_ANSWERED_BY_HYDRA = ("--cfg", "-c", "--help", "-h", "--hydra-help", "--info", "-i", "--version", "--shell-completion", "-sc")
_TAKE_A_VALUE = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--package", "-p", "--cfg", "-c")


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's options with their values, and the overrides."""
    options, overrides = [], []
    waiting = iter(words)
    for word in waiting:
        if word.startswith("-"):
            options += [word, *([next(waiting, "")] if word in _TAKE_A_VALUE else [])]
        else:
            overrides.append(word)
    return options, overrides


def _extra_dirs(options: list[str], *, there: bool = True) -> list[Path]:
    """Folders with yaml files of the user's own; `there`: those that are."""
    words = [word for option in options for word in option.split("=", 1)] if any("=" in option for option in options) else options
    given = [Path(words[i + 1]).absolute() for i, word in enumerate(words[:-1]) if word in ("--config-dir", "-cd")]
    return [folder for folder in given if folder.is_dir() or not there]


def _searched(overrides: Sequence[str]) -> list[Path]:
    """The folders of `hydra.searchpath=[file:///folder]`.

    Raises:
        ConfigError: something else than folders, or one that is not there.
    """
    found = []
    for word in overrides:
        if not word.startswith(_SEARCHPATH):
            continue
        value = parsed(word).value()
        for place in value if isinstance(value, list) else [value]:
            folder = Path(str(place).removeprefix("file://"))
            if not isinstance(value, list) or "://" in str(folder) or not folder.is_dir():
                raise ConfigError(
                    f"{word}: takes a list of folders that are there, hydra.searchpath=[file:///folder]; or give --config-dir /folder."
                )
            found.append(folder.absolute())
    return found
