"""Hydra's part of composing a run: its words and the files of conf/ become one config, not yet typed or checked.

Hydra merges every yaml anew for each run, a tenth of a second and more. So what the groups give (`model=gpt2-large`) is composed once and
remembered. The entries of `modules=[halting,kv_skipping]`, in which most runs differ, are read from their files into it, and words that only
give a value (`modules.halting.tau_drift=p10`) are set afterwards, as Hydra does. Whatever fails, Hydra composes from the start: its errors
are then of these very words.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from quicksilver.runs.choices import GROUPS, choices, config_dir, explain, no_such_choice
from quicksilver.runs.parts import module_entry
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_bytes

REFUSALS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
MOST_NODES = 100_000  # values of a yaml


@contextmanager
def hydra_started(extra_dirs: Sequence[Path] = ()) -> Iterator[Hydra]:
    """Inside the block, Hydra composes from conf/ and from folders of the user's own; a Hydra that ran before is back after it.
    Raises ConfigError: a folder that is not there, or a file in it that is no yaml."""
    for folder in extra_dirs:
        _check_folder(folder)
    Plugins.instance()  # finds the launchers that are installed
    # Their entries know neither `workers` nor `exclusive`: the files of conf/hydra stand in for those of the same name.
    store = ConfigStore.instance().repo.get("hydra", {})
    for file in (config_dir() / "hydra").glob("*/*.yaml"):
        store.get(file.parent.name, {}).pop(file.name, None)
    path = create_config_search_path(str(config_dir()))
    for folder in extra_dirs:
        path.prepend("command-line", f"file://{folder.absolute()}", anchor="schema")  # which stays last
    version.setbase("1.3")
    outer = GlobalHydra.instance().hydra  # a launcher's worker is started by a Hydra of its own
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(task_name="quicksilver", config_search_path=path)
    finally:
        GlobalHydra.instance().hydra = outer


def composed(overrides: Sequence[str], extra_dirs: Sequence[Path], stamp: int) -> DictConfig:
    """The config of one run as Hydra composes it, without the section `hydra`; the caller's own copy. Raises ConfigError: an
    unknown key or choice (with a suggestion), a value of the wrong type.

    Args:
        overrides: words that Hydra can read, as `quoted` makes them.
        extra_dirs: folders of the user's own that are searched before conf/.
        stamp: `files_stamp` of conf/ and of these folders, as they are now.
    """
    folders = tuple(extra_dirs)
    try:
        values = [override for override in map(parsed, overrides) if _is_value(override)]
        groups = tuple(text for text in overrides if not _is_value(parsed(text)))
        cfg: DictConfig = pickle.loads(_of_groups(groups, folders, stamp))
        for override in values:
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
        return cfg
    except REFUSALS:
        return by_hydra(overrides, folders)


def by_hydra(overrides: Sequence[str], extra_dirs: Sequence[Path] = ()) -> DictConfig:
    """All words in one go. Raises ConfigError: as `composed`."""
    with hydra_started(extra_dirs):
        cfg = with_settings(overrides, extra_dirs)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def with_settings(overrides: Sequence[str], extra_dirs: Sequence[Path]) -> DictConfig:
    """The same with the section `hydra`, within `hydra_started`. Hydra calls nothing while it composes, so what it would call is checked here.
    Raises ConfigError: as `composed`, or a class in the section `hydra` that is not Hydra's own."""
    check_words(overrides, extra_dirs)
    try:
        cfg = hydra_compose("run", list(overrides), return_hydra_config=True)
    except REFUSALS as error:
        raise ConfigError(explain(error, overrides, extra_dirs)) from error
    for key, target in _called(OmegaConf.to_container(cfg.hydra, resolve=False), "hydra"):
        if target.split(".")[0] not in ("hydra", "hydra_plugins", "logging", "colorlog"):
            raise ConfigError(f"{key}={target} is not called: only what comes with Hydra may stand there.")
    return cfg


def _called(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """What Hydra, and the logging that it configures, would call."""
    for name, child in node.items() if isinstance(node, Mapping) else ():
        if name in ("_target_", "class", "()") and isinstance(child, str):
            yield f"{key}.{name}", child
        yield from _called(child, f"{key}.{name}")


@lru_cache(maxsize=512)
def _of_groups(groups: tuple[str, ...], extra_dirs: tuple[Path, ...], stamp: int) -> bytes:
    """What Hydra composes of these groups, pickled: that is read six times as fast as a config is copied. `stamp`: changed files are read anew."""
    names = () if extra_dirs else _listed_modules(groups)
    if not names:
        return pickle.dumps(by_hydra(groups, extra_dirs))
    check_words(groups)
    rest = tuple(text for text in groups if parsed(text).key_or_group != "modules")
    cfg: DictConfig = pickle.loads(_of_groups(rest, extra_dirs, stamp))
    with open_dict(cfg.modules):
        cfg.modules.update(dict(map(module_entry, names)))
    return pickle.dumps(cfg)


def _listed_modules(groups: Sequence[str]) -> list[str]:
    """The names of `modules=[…]` where only groups are chosen beside it and none of them says anything about modules; else none."""
    read = [parsed(text) for text in groups]
    plain = all(one.type == OverrideType.CHANGE and one.package is None and one.key_or_group in GROUPS for one in read)
    lists = [one.value() for one in read if one.key_or_group == "modules"]
    if not plain or any(one.key_or_group == "experiment" for one in read) or len(lists) != 1 or not isinstance(lists[0], list):
        return []
    names = [str(name) for name in lists[0]]
    return names if len(set(names)) == len(names) and set(choices("modules")).issuperset(names) else []


# --- words ----------------------------------------------------------------------------------------------------------------------
# As a shell hands them on; Hydra's grammar knows no é, ~, # or apostrophe outside of quotes.

_KEY_AND_VALUE = re.compile(r"([+~]{0,2}[A-Za-z_][\w./@]*)=(.+)", re.DOTALL)
_TEMPLATE = re.compile(r"\{\w+(\[\w+\])?\}")  # a text that begins with a field: no mapping


def quoted(overrides: Sequence[str]) -> list[str]:
    """`overrides`, with the value of those in quotes that Hydra could not read without: `results_dir=/tmp/é` as `results_dir='/tmp/é'`.
    The keys of predicted_kv are those of its old name, which records have.

    Lists, mappings and interpolations stay as they are, but for a template, `{sentence} It was`; and so does what is no key=value.
    Raises ConfigError: a value without a key."""
    for override in overrides:
        if override.startswith("="):
            raise ConfigError(f"{override!r} is not an override: write key=value, for instance model=gpt2.")
    return [_readable(re.sub(r"^([+~]*modules)\.predicted_kv\b", r"\1.quicksilver", override)) for override in overrides]


def searched(overrides: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The folders of `hydra.searchpath=[file:///folder]`, and all other words.
    Raises ConfigError: no list of folders that are there."""
    folders, rest = list[Path](), list[str]()
    for word in overrides:
        if not word.startswith("hydra.searchpath="):
            rest.append(word)
            continue
        value: Any = None
        with suppress(HydraException):
            value = parsed(word).value()
        for place in value if isinstance(value, list) else [value]:
            folder = Path(str(place).removeprefix("file://"))
            if not isinstance(value, list) or "://" in str(folder) or not folder.is_dir():
                raise ConfigError(f"{word}: takes a list of folders that are there, [file:///folder]; or --config-dir /folder.")
            folders.append(folder.absolute())
    return folders, rest


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


@lru_cache(maxsize=4096)
def parsed(override: str) -> Override:
    """The override as Hydra reads it; nobody changes it. Raises HydraException where it is none."""
    return OverridesParser.create().parse_override(override)


def is_swept(override: str) -> bool:
    """Whether it gives several values, or says how to draw them; of what Hydra cannot read, composing says what is wrong."""
    try:
        return parsed(override).is_sweep_override()
    except HydraException:
        return False


def _is_value(override: Override) -> bool:
    """Whether it gives a value to a key that is there, and chooses nothing."""
    key = override.key_or_group
    plain = override.type == OverrideType.CHANGE and override.package is None and "/" not in key
    return plain and key not in GROUPS and not key.startswith("hydra.")


def check_words(overrides: Sequence[str], extra_dirs: Sequence[Path] = ()) -> None:
    """Refuse words that Hydra answers with a traceback (a group that is given a number or nothing) or wrongly (two modules with one key, which
    it would merge into one). Raises ConfigError: names the word."""
    for text in overrides:
        try:
            override = parsed(text)
        except HydraException:
            continue  # explained with all others
        group, given = override.key_or_group, override._value
        if group not in GROUPS or override.is_delete():
            continue
        for value in given if isinstance(given, list) else [given]:
            if value is None or isinstance(value, int | float):
                raise ConfigError(no_such_choice(group, None if value is None else str(value), extra_dirs))
        if group == "modules":
            for value in override.sweep_iterator() if override.is_sweep_override() else [override.value()]:
                names = value if isinstance(value, list) else str(value).strip("[]").split(",")
                _check_selected([str(name).strip() for name in names], [config_dir(), *extra_dirs])


def modules_of(words: Sequence[str], extra_dirs: Sequence[Path] = ()) -> set[str] | None:
    """The keys that the last `modules=[…]` of a run's words fills, such as `halting`; None: no word chooses modules."""
    chosen = [one.value() for one in map(parsed, words) if one.key_or_group == "modules"]
    if not chosen:
        return None
    names = chosen[-1] if isinstance(chosen[-1], list) else chosen[-1:]
    return {_filled_by(str(name), [config_dir(), *extra_dirs]) for name in names}


def _filled_by(name: str, folders: Sequence[Path]) -> str:
    path = next((path for folder in folders if (path := folder / "modules" / f"{name}.yaml").is_file()), None)
    header = path and re.search(r"^#\s*@package\s+modules\.(\S+)", path.read_text("utf-8", "replace"), re.MULTILINE)
    return header[1] if header else name


def _check_selected(selected: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse modules that fill the same key: what the yaml's `# @package` says, else its name."""
    names: dict[str, str] = {}
    for name, key in ((name, _filled_by(name, folders)) for name in selected):
        if selected.count(name) > 1:
            raise ConfigError(f"modules=[{','.join(selected)}] names {name} twice: name it once.")
        if names.setdefault(key, name) != name:
            both = f"modules=[{names[key]},{name}]: both are modules.{key}, so one would overwrite the other"
            ways = (
                f"Select one of them and change it with modules.{key}.OPTION=…; for two at once, copy one to a yaml of your own"
            )
            raise ConfigError(f"{both}. {ways} with `# @package modules.ANOTHER_NAME`.")


# --- files of the user's own ----------------------------------------------------------------------------------------------------
def _check_folder(folder: Path) -> None:
    """Check the yaml files of a folder of the user's own before Hydra reads them.
    Raises ConfigError: there is no such folder, or a file in it is no yaml."""
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: there is no such folder.")
    for path in sorted((*folder.rglob("*.yaml"), *folder.rglob("*.yml"))):
        where, content, why = str(path), None, _NO_KEYS
        try:
            check_yaml(path)
            content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            why = _of_no_use(path, folder, content) or why
        except (OSError, ValueError) as error:
            where, why = f"{path} cannot be read", str(error)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where += ("" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}") + " is no yaml"
            why = getattr(error, "problem", None) or str(error).splitlines()[0]
        if isinstance(content, dict):
            if not isinstance(content.get("defaults", []), list):
                why = "its `defaults` are no list"
            elif why == _NO_KEYS:
                continue
        raise ConfigError(f"{where}: {why}. Mend the file, or take it out of --config-dir.")


_NO_KEYS = "it is a list, not keys with values"


def _of_no_use(path: Path, folder: Path, content: Any) -> str:
    """Why Hydra would leave a file of a person's own unread, or take it for another; "": it would not."""
    group = path.parent.relative_to(folder).as_posix()
    if group not in GROUPS or folder.resolve() == config_dir().resolve():
        return ""
    known = choices(group)
    if path.stem in known:
        return f"the package has {group}={path.stem}, which would be taken: give the file another name"
    if isinstance(content, dict) and group in ("model", "dataset") and content.get("name") in known:
        return f"its name: {content['name']} is that of a {group} of the package: give it another"
    if not content:
        return f"it is empty but for comments; a module has _target_: {path.stem}.Class" if group == "modules" else "it is empty"
    has_header = re.search(r"^#\s*@package\s+", path.read_text("utf-8", "replace"), re.MULTILINE)
    needs_header = group == "modules" and isinstance(content, dict) and not has_header
    return f"it lacks its first line: # @package modules.{path.stem}" if needs_header else ""


def check_yaml(path: Path) -> None:
    """Refuse a yaml whose aliases stand for more than it has: a few lines may stand for terabytes.
    Raises OSError: as `read_bytes`. YAMLError, ValueError: it is no yaml in UTF-8, or far larger than it looks."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0  # of what has itself in it
            inside = node.value if isinstance(node, yaml.CollectionNode) else ()
            sizes[id(node)] = 1 + sum(map(size, chain.from_iterable(inside) if isinstance(node, yaml.MappingNode) else inside))
        return sizes[id(node)]

    root = yaml.compose(read_bytes(path).decode("utf-8"), Loader=yaml.SafeLoader)  # an alias and what it stands for are one node
    if root is not None and size(root) > MOST_NODES:
        raise ValueError(f"its aliases stand for more than {MOST_NODES:,} values")
