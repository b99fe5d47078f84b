"""One run or a sweep, and lm-evaluation-harness under runtime modules: commands whose options are others'."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

from hydra._internal.utils import get_args_parser

from quicksilver.cli.arguments import Command, SweepOptions, searching
from quicksilver.cli.main import help_of, say
from quicksilver.cli.progress import needing, summary, watched
from quicksilver.models import parallel
from quicksilver.runs.config import RunConfig, compose, hydra_started, quoted, searched, with_settings
from quicksilver.runs.tracker import sync_hint
from quicksilver.runtime.errors import ConfigError

_MAY_SWEEP = ("experiment=", "hydra.mode=")  # without -m
_ANSWERED_BY_HYDRA = ("help", "hydra_help", "cfg", "info")
_REFUSED = ("config_path", "config_name", "experimental_rerun", "shell_completion")  # conf/ and its schema are the only ones


@dataclass
class Run(SweepOptions):
    """
    quicksilver run model=reference-gpt2 dataset=python-docs modules=[halting,kv_skipping] protocol=continuation
    quicksilver run -m modules=[halting] modules.halting.tau_drift=p10,p25,p40
    quicksilver run --cfg job modules=[halting]     prints the composed config
    quicksilver run --help                          prints the groups and their choices

    A run that has its record is not repeated. A sweep (-m) takes further keys: name=NAME, limit=20, workers=4, shard=true
    (docs/sweeps-and-budgets.md). `quicksilver list sweep NAME` says how far it is. plan=true says what would run, and how long it would take
    (docs/recipes.md). What takes more than an hour starts with yes=true.
    """

    takes = "all"
    own_help: ClassVar[bool] = True  # Hydra's: it lists the choices

    def main(self) -> int:
        try:
            return self._answer()
        except ConfigError as error:
            raise ConfigError(f"{error}{_how_to_sweep(self.overrides, str(error))}") from error

    def _answer(self) -> int:
        given = _options(searching(self.overrides))
        extra_dirs, overrides = searched(quoted(given.overrides))
        given.overrides = overrides
        if any(getattr(given, name) for name in _ANSWERED_BY_HYDRA):
            return _ask_hydra(given, extra_dirs)
        if given.multirun or self.plan or any(word.startswith(_MAY_SWEEP) for word in overrides):
            from quicksilver.cli import sweeping

            swept = given.multirun or sweeping.is_sweep(overrides, extra_dirs)
            if self.plan and not swept:
                compose(overrides, extra_dirs)  # refuses what the run would refuse: several values without -m
            if self.plan or swept:
                return sweeping.main(overrides, extra_dirs, self)
        if (self.name, self.limit, self.workers, self.shard) != (None, None, None, False):
            raise ConfigError("name, limit, workers and shard are keys of a sweep: quicksilver run -m …")
        return self._make(compose(overrides, extra_dirs))

    def _make(self, config: RunConfig) -> int:
        """Make or find the record of one config and print what it says."""
        from quicksilver.runs.estimate import check_time
        from quicksilver.runs.run import check_shared, make, plan

        if parallel.processes() > 1 and config.model.parallel is None:
            check_shared([config], f"torchrun started {parallel.processes()} processes")
            parallel.take_device()
        check_time([config], self.yes)
        planned = plan([config])
        if (made := planned.wanted[0].record) is not None:
            say(f"This run has its record already, of {made.finished[:16].replace('T', ' ')}: it is shown, nothing was run.")
        with watched(planned.steps) as progress:
            (record,) = make(planned, progress=progress)
        print(summary(record), flush=True)
        if hint := sync_hint(config.tracker, config.results_dir, [record.fingerprint]):
            say(hint)
        return 0


@dataclass
class LmEval(Command):
    """
    quicksilver lm_eval --model_args pretrained=reference-gpt2,modules=halting_attention --tasks lambada_openai
    quicksilver lm_eval --model_args pretrained=gpt2,modules=halting_attention,modules.halting.halted_share=0.3 --tasks boolq --batch_size 8

    Everything after the command is lm-eval's own: `quicksilver lm_eval run --help`. Without --model, the model is `quicksilver`. docs/lm-eval.md
    says what --model_args takes. It needs pip install 'quicksilver-lm[lm-eval]'.
    """

    takes = "all"
    own_help: ClassVar[bool] = True  # lm-eval's, of each of its commands

    def main(self) -> int:
        words = self.overrides
        if words in (["-h"], ["--help"], []):
            print(help_of("lm_eval"))
            return 0 if words else 2
        with needing("lm_eval", "lm-eval"):
            import quicksilver.lm_eval  # noqa: F401  registers the model
        from lm_eval.__main__ import cli_evaluate

        named = any(word.split("=")[0] in ("--model", "-M") for word in words)
        model = [] if named or words[0] in ("ls", "validate") else ["--model", "quicksilver"]
        before, sys.argv = sys.argv, ["lm_eval", *words, *model]
        try:
            cli_evaluate()
        except SystemExit as stop:  # argparse's
            return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
        finally:
            sys.argv = before
        return 0


def _how_to_sweep(words: Sequence[str], said: str) -> str:
    """Of a list where the message wants a number: the sweep that was perhaps meant."""
    for key, _, value in (word.partition("=") for word in words if "=[" in word):
        listed = re.search(rf"\b{re.escape(key.rpartition('.')[2])}(=\[|\[\d+\]=).* (whole|a) number", said)
        if listed:
            return f" Several values are a sweep: quicksilver run -m {key}={value.strip('[]')}"
    return ""


def _options(words: Sequence[str]) -> argparse.Namespace:
    """The words as Hydra reads its options, in any order."""
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
