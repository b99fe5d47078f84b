"""What Hydra does without asking, refused: classes that it would call while it starts, and modules that it would merge into one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from quicksilver.runs.choices import config_dir
from quicksilver.runtime.errors import ConfigError

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
                loaded = OmegaConf.load(path)
            except (OSError, UnicodeDecodeError) as error:
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
            header = re.search(r"^#\s*@package\s+modules\.(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            return header[1] if header else name
    return name


def drop_plugin_schemas() -> None:
    """Take the plugins' own entries out of Hydra's store where a file of conf/hydra has the same name: Hydra would hold the file against them,
    and they know neither `workers` nor `exclusive`. The yaml is the schema."""
    store = ConfigStore.instance().repo.get("hydra", {})
    for path in (config_dir() / "hydra").glob("*/*.yaml"):
        store.get(path.parent.name, {}).pop(path.name, None)
