"""Make one record, or those of a sweep: model × dataset × modules × protocol × measure.

quicksilver run model=reference-gpt2 dataset=python-docs modules=[halting,kv_skipping] protocol=continuation
quicksilver run -m modules=[halting] modules.halting.tau_drift=p10,p25,p40
quicksilver run --cfg job modules=[halting]     prints the composed config
quicksilver run --help                          prints the groups and their choices

A run that has its record is not repeated.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quicksilver.cli.door import say
from quicksilver.harness.choices import config_dir
from quicksilver.harness.config import RunConfig, check_words, run_config
from quicksilver.harness.explain import explain
from quicksilver.harness.hydra_section import check_files, check_hydra, check_overrides
from quicksilver.harness.overrides import quoted
from quicksilver.runtime.errors import ConfigError, QuickSilverError

OWN_HELP = True  # Hydra's: it lists the choices


class JobFailed(Exception):
    """A job of a sweep failed and has said so; the others go on."""


class PastHydra(BaseException):
    """Carries what went wrong in a job past Hydra, which prints all words of the command line before it hands on an Exception."""

    def __init__(self, error: QuickSilverError) -> None:
        self.error = error


def job(cfg: DictConfig) -> None:
    """Make or find the record of one composed config and print what it says."""
    from quicksilver.cli.talk import watched
    from quicksilver.harness.terminal import summary

    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    # Unresolved: a word with ${…} in it may be what is wrong.
    task = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    overrides = [str(word) for word in task] if isinstance(task, list) else []
    try:
        from quicksilver.harness.run import ensure, plan
        from quicksilver.harness.workplace import Workplace

        check_hydra(HydraConfig.get())
        config = run_config(cfg, overrides)
        workplace = Workplace()
        steps = plan([config], workplace)
        if steps[-1].done:
            say(
                f"This run has its record already, of {_made(config.results_dir, steps[-1].fingerprint)}: it is shown, nothing was run."
            )
        with watched(steps) as progress:
            (record,) = ensure([config], progress=progress, workplace=workplace)
        print(summary(record), flush=True)
        _say_where_to_sync(config, record.fingerprint)
    except QuickSilverError as error:
        if not sweep:
            raise PastHydra(error) from error
        say(f"{' '.join(overrides)}: {error}")
        raise JobFailed from error


def _say_where_to_sync(config: RunConfig, fingerprint: str) -> None:
    if config.tracker.name == "wandb" and config.tracker.mode == "offline":
        there = sorted(Path(config.results_dir).glob(f"wandb/offline-run-*-{fingerprint}"))
        if there:
            say(f"W&B has it offline. To send it: wandb sync {shlex.quote(str(there[-1]))}")
        else:
            say("W&B has no run of it: its record was there before. To mirror all records: python -m quicksilver.report.wandb")


def _made(results_dir: str, fingerprint: str) -> str:
    from quicksilver.harness.store import Store

    record = Store(results_dir).get(fingerprint)
    return str(record.finished)[:16].replace("T", " ") if record is not None else "a moment ago"


def main(words: Sequence[str]) -> int:
    """Hand the words to Hydra; returns the exit code.

    Raises:
        ConfigError: a config that cannot be run.
        QuickSilverError: a run that failed.
    """
    # Hydra prints what it catches and exits by itself; with this it raises, and one readable message can be made of it.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    options, overrides = _split(words)
    overrides = quoted(overrides)
    before = sys.argv
    try:
        check_overrides(overrides)
        check_files(_extra_dirs(options))
        check_words(overrides, _extra_dirs(options))
        with tempfile.TemporaryDirectory(prefix="quicksilver-sweep-") as folder:
            # Hydra wants a folder for each sweep; what belongs to keep of one is in its records.
            sweep_dir = (
                [] if any(override.startswith("hydra.sweep.dir=") for override in overrides) else [f"hydra.sweep.dir={folder}"]
            )
            # argparse takes overrides on one side of the options only
            sys.argv = ["quicksilver run", *options, *overrides, *sweep_dir]
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="run")(job)()
    except JobFailed:
        say(
            "At least one job of this sweep failed (above). The others have their records; the same command repeats only "
            "what failed."
        )
        return 1
    except PastHydra as carrier:
        raise carrier.error from carrier
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides, _extra_dirs(options))) from error
    finally:
        sys.argv = before
    return 0


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


def _extra_dirs(options: list[str]) -> list[Path]:
    """Folders with yaml files of the user's own."""
    given = [Path(options[i + 1]).absolute() for i, word in enumerate(options) if word in ("--config-dir", "-cd")]
    return [folder for folder in given if folder.is_dir()]
