"""One run, or a sweep, from the command line.

    python -m quicksilver.run model=reference-gpt2 dataset=python-docs modules=[halting,kv_skipping] protocol=continuation
    python -m quicksilver.run -m modules=[halting] modules.halting.tau_drift=p10,p25,p40

A run that has its record is not repeated. `--cfg job` prints the composed config, `--help` the groups and their choices.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from quicksilver.harness.config import config_dir, explain, run_config
from quicksilver.runtime.errors import ConfigError, QuickSilverError


class JobFailed(Exception):
    """A job of a sweep failed and has said so; the others go on."""


def job(cfg: DictConfig) -> None:
    """Make or find the record of one composed config and print what it says."""
    from quicksilver.harness.terminal import progress_bar, summary

    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    overrides = list(HydraConfig.get().overrides.task)
    try:
        from quicksilver.harness.run import ensure

        config = run_config(cfg, overrides)
        with progress_bar() as progress:
            (record,) = ensure([config], progress=progress)
        print(summary(record), flush=True)
    except QuickSilverError as error:
        _say(f"{' '.join(overrides)}: {error}" if sweep else str(error))
        if sweep:
            raise JobFailed from error
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def main() -> None:
    """Parse the command line; exit 0 when every record is there, 2 for a config that cannot be run, 1 for a run that failed."""
    # Hydra prints what it catches and exits by itself; with this it raises, and one readable message can be made of it.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    options, overrides = _split(sys.argv[1:])
    sys.argv[1:] = [*options, *overrides]  # argparse takes overrides on one side of the options only
    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="run")(job)()
    except JobFailed:
        _say(
            "At least one job of this sweep failed (above). The others have their records; the same command repeats only "
            "what failed."
        )
        sys.exit(1)
    except (HydraException, OmegaConfBaseException) as error:
        _say(explain(error, overrides, _extra_dirs(options)))
        sys.exit(2)
    except QuickSilverError as error:
        _say(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        _say("Interrupted. Finished records stay; the same command goes on from there.")
        sys.exit(130)


_TAKE_A_VALUE = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--package", "-p", "--cfg", "-c")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
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


def _say(message: str) -> None:
    print(f"quicksilver: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
