"""Where conf/ is, what may be chosen from it, and what a person is told when a config cannot be composed."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from quicksilver.runtime.errors import ConfigError

GROUPS = ("model", "dataset", "modules", "protocol", "measure", "tracker", "experiment")


def config_dir() -> Path:
    """The folder of yaml files: `quicksilver/conf` in an installed package, `conf` beside the package in a clone.
    Raises ConfigError: neither is there; the installation is incomplete."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "conf", package.parent / "conf")
    found = next((place for place in places if (place / "run.yaml").is_file()), None)
    if found is None:
        raise ConfigError(f"no configuration: neither {places[0]} nor {places[1]} has a run.yaml; install quicksilver again.")
    return found


def choices(group: str, extra_dirs: Sequence[Path] = ()) -> list[str]:
    """Names that may follow `group=`, sorted: the yaml files of that group."""
    return sorted({path.stem for root in (config_dir(), *extra_dirs) for path in (root / group).glob("*.yaml")})


def files_stamp(extra_dirs: Sequence[Path] = ()) -> int:
    """Changes with any yaml file of conf/ and of the user's own folders: with its path, its time in ns or its bytes."""
    folders = (walked for root in (config_dir(), *extra_dirs) for walked in os.walk(root, followlinks=True))
    paths = (os.path.join(folder, name) for folder, _, names in folders for name in names if name.endswith((".yaml", ".yml")))
    stats = ((path, os.stat(path)) for path in paths)
    return hash(frozenset((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats))


def explain(error: Exception, overrides: Sequence[str] = (), extra_dirs: Sequence[Path] = ()) -> str:
    """One line for what Hydra or OmegaConf raised over `overrides`: the key, the value and what to write."""
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is not an override: write key=value, such as model=gpt2 or modules.halting.resume_layers=4."
    if (unknown := re.search(r"Could not find 'hydra/(launcher|sweeper)/([^']+)'", str(error))) is not None:
        what, name = unknown.groups()
        known = sorted({"basic", *(path.stem for path in (config_dir() / "hydra" / what).glob("*.yaml"))})
        return f"hydra/{what}={name}: there is no such {what}. {suggest(name, known, 'Choices')}"
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").partition("/")
        return no_such_choice(group, name, extra_dirs) if group in GROUPS else _plain(error)
    if str(error).strip().startswith("Ambiguous value for argument"):
        word = next((one for one in overrides if "," in one and one in str(error)), "KEY=A,B")
        key, _, given = word.partition("=")
        listed = f" One list is written {key}=[{given}]." if re.fullmatch(r"[\d.,eE+-]+", given) else ""
        return f"{word}: these are several values. A sweep takes them: quicksilver run -m {shlex.join(overrides)}.{listed}"
    # Of a yaml that does not fit Hydra raises its own error, with OmegaConf's as the context alone.
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    said = _explain_key(cause, extra_dirs) if isinstance(cause, OmegaConfBaseException) and cause.full_key else _plain(error)
    if (file := re.match(r"In '([^']+)': ", str(error))) is not None and cause is not None:
        said = f"{file[1]}.yaml: {said}"
    interpolated = next((text for text in overrides if "${" in text), None)
    if interpolated is not None and "nterpolation" in said:
        return f"{interpolated}: {said}. ${{…}} stands for another key, ${{model.name}}, or for a variable, ${{oc.env:NAME,otherwise}}."
    return said


def no_such_choice(group: str, name: str | None, extra_dirs: Sequence[Path] = ()) -> str:
    """That `group=name` chooses nothing, a sentence with the choices."""
    known = choices(group, extra_dirs)
    if not name:
        return f"{group}={'null' if name is None else name} names nothing. Choices: {', '.join(known)}."
    here = Path(group) / f"{name}.yaml"
    own = f" {here} is read with --config-dir ." if here.is_file() else " One of your own needs --config-dir FOLDER."
    if extra_dirs:
        bare = [str(folder) for folder in extra_dirs if not (folder / group).is_dir()]
        own = f" --config-dir {bare[0]} has no folder {group}/." if bare else ""
    return f"{group}={name}: there is no such {group.removesuffix('s')}. {suggest(name, known, 'Choices')}{own}"


_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "str": "text"}


def _explain_key(error: OmegaConfBaseException, extra_dirs: Sequence[Path]) -> str:
    """What is wrong with the key that OmegaConf names."""
    key, text = str(error.full_key), str(error).splitlines()[0]
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return _unknown_key(key, [str(name) for name in error.parent_node or () if name != "hydra"], extra_dirs)
    converted = re.match(r"Value '(.*)' of type '(.*)' could not be converted to (\w+)", text)
    if (converted and converted[2] == "dict") or text.startswith("Cannot convert 'dict'"):
        return f"{key} is a value, not a section."
    if converted:
        return f"{key}={converted[1]}: needs {_TYPES.get(converted[3], converted[3])}."
    if "is not a valid bool" in text:
        return f"{key}={text.split(chr(39))[1]}: needs true or false."
    return f"{key}=null: needs a value." if "is not Optional" in text else f"{key}: {text}"


def _unknown_key(key: str, here: Sequence[str], extra_dirs: Sequence[Path]) -> str:
    where, _, last = key.rpartition(".")
    if where == "modules":
        known = choices("modules", extra_dirs)
        if last in known:
            return f"{key}: the module {last} is not selected. Add it: modules=[{','.join([*here, last])}]."
        return f"{key}: there is no module {last}. {suggest(last, known, 'Choices')}"
    if not here and where:
        return f"{where} is a value, not a section."
    options = [name for name in here if name != "_target_"]
    if not options and where.startswith("modules."):
        return f"{key}: {where} has no options. They are the fields of its class, with @dataclass above it."
    close = " or ".join(f"{where}.{name}" if where else name for name in close_to(last, options))
    hint = f"Did you mean {close}? " if close else ""
    return f"{key}: there is no such key. {hint}Keys{f' of {where}' if where else ''}: {', '.join(options)}."


def _plain(error: Exception) -> str:
    return " ".join(str(one).splitlines()[0] for one in (error, error.__cause__) if one is not None)


def close_to(word: str, known: Sequence[str]) -> list[str]:
    """At most two of `known` that `word` may stand for."""
    return difflib.get_close_matches(word, known, n=2, cutoff=0.6)


def suggest(word: str, known: Sequence[str], noun: str) -> str:
    """`Did you mean gpt2? Choices: gpt2, …`"""
    close = close_to(word, known)
    return (f"Did you mean {' or '.join(close)}? " if close else "") + f"{noun}: {', '.join(known)}."
