"""Hydra's part of composing a run: its words and the files of conf/ become one config, not yet typed or checked.

Hydra reads and merges every yaml anew for each run, a tenth of a second and more. Here what the groups give (`model=gpt2-large`) is composed
once. The entries of `modules=[halting,kv_skipping]`, which is what most runs differ in, are read from their files into a copy of it, and words
that only give a value (`modules.halting.tau_drift=p10`) are set there, as Hydra does after its groups. What is none of these, and whatever
goes wrong, Hydra composes from the start, so that its errors are of these very words.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from quicksilver.runs.choices import GROUPS, choices, config_dir
from quicksilver.runs.explain import explain
from quicksilver.runs.hydra_section import check_files, check_hydra, check_selected, drop_plugin_schemas
from quicksilver.runs.override_grammar import is_value, parsed, with_values
from quicksilver.runs.parts import module_entry
from quicksilver.runtime.errors import ConfigError


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
        overrides: words that Hydra can read, as `overrides.quoted` makes them.
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
            raise ConfigError(explain(ConfigError(text), [text], extra_dirs))
        if override.key_or_group == "modules" and not override.is_delete():
            for value in override.sweep_iterator() if override.is_sweep_override() else [override.value()]:
                names = value if isinstance(value, list) else str(value).strip("[]").split(",")
                check_selected([str(name).strip() for name in names], [config_dir(), *extra_dirs])
