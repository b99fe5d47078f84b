"""Make one record, or those of a sweep: model × dataset × modules × protocol × measure.

quicksilver run model=reference-gpt2 dataset=python-docs modules=[halting,kv_skipping] protocol=continuation
quicksilver run -m modules=[halting] modules.halting.tau_drift=p10,p25,p40
quicksilver run --cfg job modules=[halting]     prints the composed config
quicksilver run --help                          prints the groups and their choices

A run that has its record is not repeated. Of a sweep (-m), further keys: name=NAME, limit=20, workers=4 (docs/sweeps-and-budgets.md);
`quicksilver list sweep NAME` says how far it is. plan=true says what would run, and what it would take (docs/recipes.md); what would take
more than an hour starts with yes=true.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from quicksilver.cli.arguments import SweepOptions, split_own
from quicksilver.cli.main import say
from quicksilver.runs.composing import hydra_started, parsed, quoted, with_settings
from quicksilver.runs.config import RunConfig, compose
from quicksilver.runs.tracker import sync_hint
from quicksilver.runtime.errors import ConfigError

OWN_HELP = True  # Hydra's: it lists the choices
_SEARCHPATH = "hydra.searchpath="
_MAY_SWEEP = ("experiment=", "hydra.mode=")  # without -m
_ANSWERED_BY_HYDRA = ("help", "hydra_help", "cfg", "info")
_REFUSED = ("config_path", "config_name", "experimental_rerun", "shell_completion")  # conf/ and its schema are the only ones


def main(words: Sequence[str]) -> int:
    """Make one record or those of a sweep, or let Hydra answer; returns the exit code.

    Raises:
        ConfigError: a config that cannot be run.
        QuickSilverError: a run that failed.
    """
    asked, rest = split_own(words, SweepOptions)
    given = _options(rest)
    overrides = quoted(given.overrides)
    extra_dirs = [*([Path(given.config_dir).absolute()] if given.config_dir else []), *_searched(overrides)]
    if any(getattr(given, name) for name in _ANSWERED_BY_HYDRA):
        given.overrides = overrides
        return _ask_hydra(given, extra_dirs)
    overrides = [word for word in overrides if not word.startswith(_SEARCHPATH)]
    if given.multirun or asked.plan or any(word.startswith(_MAY_SWEEP) for word in overrides):
        from quicksilver.cli import sweeping

        if given.multirun or asked.plan or sweeping.is_sweep(overrides, extra_dirs):
            return sweeping.main(overrides, extra_dirs, asked)
    if asked != SweepOptions(yes=asked.yes):
        raise ConfigError("name, limit and workers are keys of a sweep: quicksilver run -m …")
    return _make(compose(overrides, extra_dirs), asked.yes)


def _make(config: RunConfig, yes: bool) -> int:
    """Make or find the record of one config and print what it says."""
    from quicksilver.cli.progress import summary, watched
    from quicksilver.runs.estimate import check_time
    from quicksilver.runs.run import make, plan

    check_time([config], yes)
    planned = plan([config])
    if (made := planned.wanted[0].record) is not None:
        say(f"This run has its record already, of {made.finished[:16].replace('T', ' ')}: it is shown, nothing was run.")
    with watched(planned.steps) as progress:
        (record,) = make(planned, progress=progress)
    print(summary(record), flush=True)
    if hint := sync_hint(config.tracker, config.results_dir, [record.fingerprint]):
        say(hint)
    return 0


def _options(words: Sequence[str]) -> argparse.Namespace:
    """The words as Hydra reads its options, in any order.

    Raises:
        ConfigError: an option that there is not, or one that names another config.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"quicksilver run: {message}. It takes key=value, -m, --config-dir /folder, --cfg job and --help.")

    parser.error = refuse  # type: ignore[method-assign]
    given = parser.parse_intermixed_args(words)
    for name in _REFUSED:
        if getattr(given, name):
            refuse(f"--{name.replace('_', '-')} is not supported")
    return given


def _ask_hydra(given: argparse.Namespace, extra_dirs: Sequence[Path]) -> int:
    with hydra_started(extra_dirs) as hydra:
        with_settings(given.overrides, extra_dirs)  # says what is wrong with them, and that Hydra may call what they name
        if given.help:
            hydra.app_help("run", get_args_parser(), given)
        elif given.hydra_help:
            hydra.hydra_help("run", get_args_parser(), given)
        elif given.cfg:
            hydra.show_cfg("run", given.overrides, given.cfg, given.package, given.resolve)
        else:
            hydra.show_info(given.info, "run", given.overrides)
    return 0


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
