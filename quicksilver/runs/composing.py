"""Hydra's part of composing a run: its words and the files of conf/ become one config, not yet typed or checked.

Hydra reads and merges every yaml anew for each run, a tenth of a second and more. Here what the groups give (`model=gpt2-large`) is composed
once. The entries of `modules=[halting,kv_skipping]`, which is what most runs differ in, are read from their files into a copy of it, and words
that only give a value (`modules.halting.tau_drift=p10`) are set there, as Hydra does after its groups. What is none of these, and whatever
goes wrong, Hydra composes from the start, so that its errors are of these very words.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from quicksilver.runs.choices import GROUPS, choices, config_dir, explain, no_such_choice
from quicksilver.runs.parts import module_entry
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_bytes


@contextmanager
def hydra_started(extra_dirs: Sequence[Path] = ()) -> Iterator[None]:
    """Inside the block, Hydra composes from conf/ and from folders of the user's own; a Hydra that ran before is back after it.

    Raises:
        ConfigError: a folder that is not there, or a file in it that is no yaml.
    """
    for folder in extra_dirs:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder.")
    check_files(extra_dirs)
    Plugins.instance()  # finds the launchers that are installed
    drop_plugin_schemas()
    outer = GlobalHydra.instance().hydra  # a launcher's worker is started by a Hydra of its own
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            path: ConfigSearchPath = GlobalHydra.instance().config_loader().get_search_path()
            for folder in extra_dirs:
                # The schema stays last.
                path.prepend("command-line", f"file://{folder.absolute()}", anchor="schema")
            if extra_dirs:  # the loader keeps the sources it found
                _search_again(path)
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def _search_again(path: ConfigSearchPath) -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    hydra.config_loader = ConfigLoaderImpl(config_search_path=path)


def composed(overrides: Sequence[str], extra_dirs: Sequence[Path], stamp: int) -> DictConfig:
    """The config of one run as Hydra composes it, without the section `hydra`; the caller's own copy.

    Args:
        overrides: words that Hydra can read, as `quoted` makes them.
        extra_dirs: folders of the user's own that are searched before conf/.
        stamp: `files_stamp` of conf/ and of these folders, as they are now.

    Raises:
        ConfigError: an unknown key or choice (with a suggestion), a value of the wrong type.
    """
    check_words(overrides, extra_dirs)
    folders = tuple(extra_dirs)
    try:
        try:
            read = [parsed(text) for text in overrides]
            groups = tuple(text for text, override in zip(overrides, read, strict=True) if not is_value(override))
            return with_values(_of_groups(groups, folders, stamp), read)
        except (HydraException, OmegaConfBaseException, YAMLError):
            return _by_hydra(overrides, folders)  # in one go, so that the error is of these very words
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain(error, overrides, extra_dirs)) from error


@lru_cache(maxsize=512)
def _of_groups(groups: tuple[str, ...], extra_dirs: tuple[Path, ...], stamp: int) -> bytes:
    """What Hydra composes of these groups, pickled: reading it again is six times as fast as copying. `stamp`, that of the files, is there so
    that changed files are read anew."""
    names = () if extra_dirs else _listed_modules(groups)
    if not names:
        return pickle.dumps(_by_hydra(groups, extra_dirs))
    rest = tuple(text for text in groups if parsed(text).key_or_group != "modules")
    cfg: DictConfig = pickle.loads(_of_groups(rest, extra_dirs, stamp))
    with open_dict(cfg.modules):
        for name in names:
            key, entry = module_entry(name)
            cfg.modules[key] = entry
    return pickle.dumps(cfg)


def _listed_modules(groups: Sequence[str]) -> tuple[str, ...]:
    """The names of `modules=[…]` where only groups are chosen beside it and none of them says anything about modules; else none."""
    listed: tuple[str, ...] = ()
    for override in map(parsed, groups):
        if override.type != OverrideType.CHANGE or override.package is not None:
            return ()
        if override.key_or_group not in GROUPS or override.key_or_group == "experiment":
            return ()
        if override.key_or_group == "modules":
            value = override.value()
            if listed or not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                return ()
            listed = tuple(map(str, value))
    known = set(choices("modules"))
    return listed if len(set(listed)) == len(listed) and known.issuperset(listed) else ()


def _by_hydra(overrides: Sequence[str], extra_dirs: tuple[Path, ...]) -> DictConfig:
    with hydra_started(extra_dirs):
        cfg = hydra_compose("run", list(overrides), return_hydra_config=True)
    check_hydra(cfg.hydra)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def check_words(overrides: Sequence[str], extra_dirs: Sequence[Path] = ()) -> None:
    """Refuse words that Hydra answers with a traceback (a group that is given a number or nothing) or wrongly (two modules with one key, which
    it would merge into one).

    Raises:
        ConfigError: names the word.
    """
    for text in overrides:
        try:
            override = parsed(text)
        except HydraException:
            continue  # explained with all others
        values = override._value if isinstance(override._value, list) else [override._value]
        unnamed = any(value is None or isinstance(value, int | float) for value in values) and not override.is_delete()
        if override.key_or_group in GROUPS and unnamed:
            wrong = next(value for value in values if value is None or isinstance(value, int | float))
            raise ConfigError(no_such_choice(override.key_or_group, None if wrong is None else str(wrong), extra_dirs))
        if override.key_or_group == "modules" and not override.is_delete():
            for value in override.sweep_iterator() if override.is_sweep_override() else [override.value()]:
                names = value if isinstance(value, list) else str(value).strip("[]").split(",")
                check_selected([str(name).strip() for name in names], [config_dir(), *extra_dirs])


# --- words ----------------------------------------------------------------------------------------------------------------------
# As a shell hands them on; Hydra's grammar knows no é, ~, # or apostrophe outside of quotes.

_KEY_AND_VALUE = re.compile(r"([+~]{0,2}[A-Za-z_][\w./@]*)=(.+)", re.DOTALL)
_TEMPLATE = re.compile(r"\{\w+(\[\w+\])?\}")  # a text that begins with a field: no mapping


def quoted(overrides: Sequence[str]) -> list[str]:
    """`overrides`, with the value of those in quotes that Hydra could not read without: `results_dir=/tmp/é` as `results_dir='/tmp/é'`.

    Lists, mappings and interpolations stay as they are, but for a template, `{sentence} It was`; and so does what is no key=value: composing says what is wrong with it.

    Raises:
        ConfigError: a value without a key.
    """
    for override in overrides:
        if override.startswith("="):
            raise ConfigError(f"{override!r} is not an override: write key=value, for instance model=gpt2.")
    return [_readable(override) for override in overrides]


@lru_cache(maxsize=4096)
def parsed(override: str) -> Override:
    """The override as Hydra reads it; nobody changes it.

    Raises:
        HydraException: it is none.
    """
    return OverridesParser.create().parse_override(override)


def is_value(override: Override) -> bool:
    """Whether it gives a value to a key that is there, and chooses nothing."""
    key = override.key_or_group
    plain = override.type == OverrideType.CHANGE and override.package is None and "/" not in key
    return plain and key not in GROUPS and not key.startswith("hydra.")


def with_values(base: bytes, overrides: Sequence[Override]) -> DictConfig:
    """What the groups compose, with the values that `overrides` give set in it, as Hydra sets them after its groups.

    Args:
        base: the config pickled, in this process: it is read again six times as fast as a config is copied.

    Raises:
        OmegaConfBaseException: a key that is not there, a value of another type.
    """
    cfg: DictConfig = pickle.loads(base)
    for override in overrides:
        if is_value(override):
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
    return cfg


def _readable(override: str) -> str:
    try:
        parsed(override)
    except HydraException:
        match = _KEY_AND_VALUE.fullmatch(override)
        if match is None or "${" in match[2] or (match[2].lstrip()[0] in "[{\"'" and not _TEMPLATE.match(match[2].lstrip())):
            return override
        # In quotes, a backslash means something before a quote alone, and at the end, where a quote follows.
        value = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), match[2])
        return f"{match[1]}='{value}'"
    return override


# --- what Hydra would do without being asked: classes that it calls while it starts, modules that it merges into one ------------

MOST_NODES = 100_000  # values of a yaml
_CALLS = ("_target_", "class", "()")  # the last two in a logging configuration
_HARMLESS = ("hydra", "hydra_plugins", "logging", "colorlog")


def check_hydra(settings: Any) -> None:
    """Refuse classes that are not Hydra's own: it would call them.

    Args:
        settings: the section `hydra` of a composed config.

    Raises:
        ConfigError: names the key and the class.
    """
    _refuse_calls(OmegaConf.to_container(settings, resolve=False), "hydra")


def check_files(folders: Sequence[Path]) -> None:
    """Check the yaml files of folders of the user's own, and what they say of Hydra, before Hydra reads them and calls what they name.

    Raises:
        ConfigError: a file that is no yaml, or a class that is not Hydra's own.
    """
    for folder in folders:
        for path in sorted((*folder.rglob("*.yaml"), *folder.rglob("*.yml"))):
            try:
                check_yaml(path)
                loaded = OmegaConf.load(path)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path} cannot be read: {error}. Mend the file, or take it out of --config-dir.") from error
            except yaml.YAMLError as error:
                mark = getattr(error, "problem_mark", None)
                where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
                why = getattr(error, "problem", None) or str(error).splitlines()[0]
                raise ConfigError(f"{path}{where} is no yaml: {why}. Mend the file, or take it out of --config-dir.") from error
            content = OmegaConf.to_container(loaded, resolve=False)
            defaults = content.get("defaults", []) if isinstance(content, dict) else []
            if not isinstance(content, dict) or not isinstance(defaults, list):
                kind = "its `defaults` are no list" if isinstance(content, dict) else "it is a list, not keys with values"
                raise ConfigError(f"{path}: {kind}. Mend the file, or take it out of --config-dir.")
            top = path.relative_to(folder).parts[0]
            if top == "hydra":
                _refuse_calls(content, str(path))
            else:
                _refuse_calls(content.get("hydra"), f"{path}: hydra")


def check_yaml(path: Path) -> None:
    """Refuse a yaml whose aliases stand for more than it has: a few lines may stand for terabytes.

    Raises:
        OSError: as `read_bytes`. YAMLError, ValueError: it is no yaml in UTF-8, or far larger than it looks.
    """
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(read_bytes(path).decode("utf-8"), Loader=yaml.SafeLoader):
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((anchor, 0))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
        elif isinstance(event, yaml.AliasEvent):
            anchor, size = None, sizes.get(event.anchor, 0)
        if anchor is not None:
            sizes[anchor] = size
        outer, before = open_nodes[-1]
        open_nodes[-1] = (outer, before + size)
        if before + size > MOST_NODES:
            raise ValueError(f"its aliases stand for more than {MOST_NODES:,} values")


def check_overrides(overrides: Sequence[str]) -> None:
    """The same for the words of a command line.

    Raises:
        ConfigError: names the word.
    """
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key.split(".")[0].split("/")[0] == "hydra" and key.split(".")[-1] in _CALLS and not _is_harmless(value):
            raise ConfigError(f"{text}: only what comes with Hydra may stand there.")


def _refuse_calls(node: Any, where: str) -> None:
    for key, target in _called(node, where):
        if not _is_harmless(target):
            raise ConfigError(f"{key}={target} is not called: only what comes with Hydra may stand there.")


def _is_harmless(target: str) -> bool:
    return target.split(".")[0] in _HARMLESS


def _called(node: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for name, child in node.items():
            if name in _CALLS and isinstance(child, str):
                yield f"{key}.{name}", child
            yield from _called(child, f"{key}.{name}")


def check_selected(selected: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse modules that fill the same key: Hydra would merge them into one.

    Args:
        selected: names of yaml files.
        folders: where the group `modules` may have them.

    Raises:
        ConfigError: names the two and what to do.
    """
    names: dict[str, str] = {}
    for name in selected:
        key = _package_of(name, folders)
        if names.setdefault(key, name) != name:
            raise ConfigError(
                f"modules=[{names[key]},{name}]: both are modules.{key}, so one would overwrite the other. Select one of them and change it "
                f"with modules.{key}.OPTION=…; for two at once, copy one to a yaml of your own with `# @package modules.ANOTHER_NAME`."
            )


def _package_of(name: str, folders: Sequence[Path]) -> str:
    """The key below `modules` that the yaml `name` fills: what its `# @package` says, else its name."""
    for folder in folders:
        path = folder / "modules" / f"{name}.yaml"
        if path.is_file():
            header = re.search(r"^#\s*@package\s+modules\.(\S+)", path.read_text("utf-8", "replace"), re.MULTILINE)
            return header[1] if header else name
    return name


def drop_plugin_schemas() -> None:
    """Take the plugins' own entries out of Hydra's store where a file of conf/hydra has the same name: Hydra would hold the file against them,
    and they know neither `workers` nor `exclusive`. The yaml is the schema."""
    store = ConfigStore.instance().repo.get("hydra", {})
    for path in (config_dir() / "hydra").glob("*/*.yaml"):
        store.get(path.parent.name, {}).pop(path.name, None)
