"""One grammar for every command: `quicksilver COMMAND [NAME …] key=value …`. A command is a dataclass whose fields are its keys."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Options, Positive


def key(shape: str, said: str, default: Any = None, *, factory: Callable[[], Any] | None = None, name: str | None = None) -> Any:
    """A key of a command: `name=shape` and what it says stand in the help. What is typed is `name`, where it is not the field's."""
    about = {"shape": shape, "said": said, "name": name}
    return field(default=default, metadata=about) if factory is None else field(default_factory=factory, metadata=about)


@dataclass
class Command(Options):
    """A command: the docstring is its help, the fields are its keys, and `main` does what was asked for.
    Raises ConfigError: a value of another type, or out of range."""

    # Words that are no key of its own: `keys`, none; `run`, keys of a run, which are checked; `all`, whatever there is.
    takes: ClassVar[Literal["keys", "run", "all"]] = "keys"
    most_names: ClassVar[int] = 0  # how many words that are no key=value it takes
    own_help: ClassVar[bool] = False  # `main` answers --help
    names: list[str] = field(init=False, default_factory=list)  # given words without =
    overrides: list[str] = field(init=False, default_factory=list)  # all others

    def main(self) -> int:
        """Do it; returns the exit code. Raises ConfigError: what is asked for makes no sense: something that is not there, or that is
        refused. QuickSilverError: a run failed, or something cannot be had."""
        raise NotImplementedError

    @classmethod
    def next_names(cls, given: Sequence[str]) -> list[str]:
        """The names that may follow `given`, for the shell's completion."""
        return []

    @classmethod
    def own_keys(cls) -> dict[str, dataclasses.Field[Any]]:
        """Its own keys, as they are typed."""
        return {one.metadata.get("name") or one.name: one for one in dataclasses.fields(cls) if one.init}

    @classmethod
    def parsed(cls, words: Sequence[str], command: str) -> Self:
        """The command with what `words` say.
        Raises ConfigError: a word that is no key=value, a key that neither the command nor a run has, a value of another type."""
        own, given = cls.own_keys(), dict[str, Any]()
        names, overrides = list[str](), list[str]()
        for word in searching(words) if cls.takes == "run" else words:
            name, equals, _ = word.partition("=")
            if name.removeprefix("--") in own and name.startswith("--"):
                raise ConfigError(f"{word}: write {name.removeprefix('--')}=VALUE.")
            if equals and name in own:
                given[own[name].name] = _read(own[name], word)
            elif not equals and word[:1] not in ("-", "~", "") and len(names) < cls.most_names:
                names.append(word)
            elif cls.takes == "all" or ((equals or word.startswith("~")) and first_part(word) in cls._run_keys()):
                overrides.append(word)  # composing says what it means, or what is wrong with it
            else:
                raise ConfigError(cls._refusal(word, command))
        made = cls(**given)
        made.names, made.overrides = names, overrides
        return made

    @classmethod
    def _run_keys(cls) -> list[str]:
        """The first parts of the keys that a run has, where the command takes them."""
        if cls.takes != "run":
            return []
        from quicksilver.runs.choices import GROUPS
        from quicksilver.runs.config import RunConfig

        return list(dict.fromkeys([*GROUPS, *(one.name for one in dataclasses.fields(RunConfig)), "hydra"]))

    @classmethod
    def _refusal(cls, word: str, command: str) -> str:
        name, equals, _ = word.partition("=")
        takes, run_keys = [cls._typed(one) for one in cls.own_keys()], cls._run_keys()
        close = difflib.get_close_matches(first_part(name), [*cls.own_keys(), *run_keys], n=2) if equals else []
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        takes += [f"the keys of a run: {', '.join(one for one in run_keys if one != 'hydra')}"] if run_keys else []
        what = "there is no such key" if equals else f"{word!r} is not key=value"
        return f"{word}: {what}.{hint} {command} takes {', '.join(takes) or 'no key'}."

    @classmethod
    def _typed(cls, name: str) -> str:
        return f"{name}={cls.own_keys()[name].metadata['shape']}"

    @classmethod
    def help(cls) -> str:
        """What `--help` says below the first line."""
        lines, own = [inspect.cleandoc(cls.__doc__ or "")], cls.own_keys()
        lines += ["", "Keys of its own:"] if own else []
        lines += [f"  {cls._typed(name):<19} {one.metadata['said']}" for name, one in own.items()]
        if cls.takes == "run":
            others = "All others" if own else "Keys"
            lines.append(f"{others} are those of `quicksilver run`: model, dataset, data.root, results_dir …")
        return "\n".join(lines)


@dataclass
class ResultsFolder(Command):
    """A command that asks for the folder of results."""

    results_dir: str = key(
        "FOLDER", "default: $QUICKSILVER_RESULTS, or results", factory=lambda: os.environ.get("QUICKSILVER_RESULTS", "results")
    )

    def check_there(self) -> None:
        """Refuse a folder that is not there: nothing can be shown of it."""
        if not Path(self.results_dir).is_dir():
            there = "that is a file" if Path(self.results_dir).exists() else "there is no such folder; the first run makes it"
            raise ConfigError(f"results_dir={self.results_dir}: {there}.")


@dataclass
class MakesRuns(Command):
    """A command that makes runs."""

    plan: bool = key("true", "only say what would run, and how long it would take on this machine (docs/recipes.md)", False)
    yes: bool = key("true", "start what is said to take more than an hour", False)
    workers: Positive | None = key("N", "processes at once; default: one a core, or as the launcher's yaml says")


@dataclass
class SweepOptions(MakesRuns):
    """Keys of `quicksilver run` that are no part of a run. Without `shard`, workers share windows once no run is free."""

    name: str | None = key("NAME", "of a sweep; default: that of its experiment")
    limit: Positive | None = key("20", "of a sweep: make no more than so many runs that have no record")
    shard: bool = key("true", "of a sweep: workers share the windows of each run, so that the first ends soonest", False)


def first_part(name: str) -> str:
    """The part of a key that says what it is of: `modules` of `+modules.halting.tau_drift`."""
    return re.split(r"[./@:=]", name.lstrip("+~"))[0]


def searching(words: Sequence[str]) -> list[str]:
    """The words, with each `--config-dir FOLDER` as Hydra's key for it, which a run is composed with.
    Raises ConfigError: there is no such folder."""
    found, left = list[str](), list(words)
    while left:
        option, equals, folder = left.pop(0).partition("=")
        if option not in ("--config-dir", "-cd"):
            found.append(option + equals + folder)
            continue
        folder = folder or (left.pop(0) if left else "")
        if not Path(folder or "?").is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder.")
        place = str(Path(folder).resolve()).replace("'", "\\'")
        found.append(f"hydra.searchpath=['file://{place}']")
    return found


def _read(about: dataclasses.Field[Any], word: str) -> Any:
    """The value in `word`, as yaml has it; a list may be given as its only entry: `save=0.3`, `save=[0.2,0.4]`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    text, kind = word.partition("=")[2], str(about.type).removesuffix(" | None")
    if not text:
        raise ConfigError(f"{word} needs a value.")
    if kind == "str":
        return text
    try:
        read: Mapping[Any, Any] = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))  # type: ignore[assignment]
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{word} cannot be read: {str(error).splitlines()[0]}.") from error
    value = read["value"]
    if not kind.startswith("list["):
        return value
    listed = value if isinstance(value, list) else [value]
    return [str(one) if kind == "list[str]" and isinstance(one, int | float) else one for one in listed]
