"""One grammar for every command: `key=value`. Some keys are the command's own, all others are overrides of a run."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Options, Positive

Own = TypeVar("Own", bound=Options)


@dataclass
class ResultsFolder(Options):
    """The keys of a command that asks for nothing but the folder of results."""

    results_dir: str = field(default_factory=lambda: os.environ.get("QUICKSILVER_RESULTS", "results"))


@dataclass
class SweepOptions(Options):
    """Keys of `quicksilver run` that are no part of a run, most of them of a sweep.

    Attributes:
        name: of the sweep; None: of its experiment, and what only the same runs get.
        limit: make no more than so many runs that have no record; the others wait for the same command without it.
        workers: processes at once, of a launcher that has several; None: as the launcher's yaml says.
        plan: only say what would run and what it would take; of a single run as well.
        yes: start what is said to take more than an hour; of a single run as well.
    """

    name: str | None = None
    limit: Positive | None = None
    workers: Positive | None = None
    plan: bool = False
    yes: bool = False


def split(words: Sequence[str], options: type[Own], command: str) -> tuple[Own, list[str]]:
    """The command's own keys as an instance of the dataclass `options`, and the overrides of the run.

    A field that is a list takes one value or several: `save=30`, `save=[20,40]`.

    Raises:
        ConfigError: a word that is no key=value, a key that neither the command nor a run has, a value of another type.
    """
    found, overrides = split_own(words, options)
    own = [field.name for field in dataclasses.fields(cast(Any, options))]
    for word in overrides:
        key, equals, _ = word.partition("=")
        if not equals and not key.startswith("~"):
            raise ConfigError(f"{word!r} is not key=value. Keys of {command}: {', '.join(own)}, and those of `quicksilver run`.")
        _check_known(key, own, command)
    return found, overrides


def split_own(words: Sequence[str], options: type[Own]) -> tuple[Own, list[str]]:
    """`split`, but all other words are left as they are: they may be options of Hydra's.

    Raises:
        ConfigError: a value of another type, out of range, or none.
    """
    own = {field.name: field for field in dataclasses.fields(cast(Any, options))}
    given, rest = {}, []
    for word in words:
        key, equals, value = word.partition("=")
        if key.startswith("--") and key.removeprefix("--") in own:
            raise ConfigError(f"{word}: write {key.removeprefix('--')}=VALUE.")
        if not equals or key not in own:
            rest.append(word)
        elif not value:
            raise ConfigError(f"{word} needs a value.")
        else:
            given[key] = value
    return _typed(options, given, own), rest


def check_overrides(words: Sequence[str], command: str) -> list[str]:
    """`words` of a command that has no keys of its own.

    Raises:
        ConfigError: a word that is no key=value.
    """
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"{word!r} is not key=value: quicksilver {command} model=gpt2-large dataset=wikitext103 …")
    return list(words)


def run_keys() -> list[str]:
    """The first parts of the keys that a run has."""
    from quicksilver.runs.choices import GROUPS
    from quicksilver.runs.config import RunConfig

    return list(dict.fromkeys([*GROUPS, *(field.name for field in dataclasses.fields(RunConfig)), "hydra"]))


def _check_known(key: str, own: list[str], command: str) -> None:
    known = run_keys()
    first = re.split(r"[./@:]", key.lstrip("+~"))[0]
    if first in known:
        return  # whether the rest of it is there, composing says
    close = difflib.get_close_matches(first, [*own, *known], n=2)
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    of_its_own = f"Keys of {command}: {', '.join(own)}; of" if own else "Keys of"
    raise ConfigError(f"{key}: there is no such key. {hint}{of_its_own} the run: {', '.join(k for k in known if k != 'hydra')}.")


def _typed(options: type[Own], given: dict[str, str], own: dict[str, dataclasses.Field[Any]]) -> Own:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    read: dict[str, Any] = {}
    for key, value in given.items():
        kind = str(own[key].type).removesuffix(" | None")
        try:
            read[key] = value if kind == "str" else OmegaConf.to_container(OmegaConf.create(f"value: {value}"))["value"]  # type: ignore[index,call-overload]
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"{key}={value} cannot be read: {str(error).splitlines()[0]}.") from error
        if kind.startswith("list[") and not isinstance(read[key], list):
            read[key] = [read[key]]
        if kind == "list[str]":
            read[key] = [str(one) if isinstance(one, int | float) else one for one in read[key]]
    return options(**read)
