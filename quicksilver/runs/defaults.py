"""The options that a yaml of conf/modules leaves out: the defaults of the class that it names.

A module's defaults stand in its dataclass, and nowhere else. They are read from the source and not by an import, which would bring torch: seconds
that a table made of records does not need. Whatever yaml Hydra reads passes here, so that every option of a module has its place in the config.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from quicksilver.runs.targets import source_of


def option_defaults(target: str) -> dict[str, Any]:
    """The options of the dataclass `package.module.Class` and their defaults, as a yaml could say them.

    Left out are options without a default, masks (which are tensors), and defaults that are no literals.
    """
    module, _, name = target.rpartition(".")
    source = source_of(module) if module else None
    return {} if source is None else copy.deepcopy(_defaults(source, source.stat().st_mtime_ns, name))


def filled(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `modules` with every option of its class; what it says itself goes before the defaults."""
    target = entry.get("_target_")
    return {**(option_defaults(target) if isinstance(target, str) else {}), **{str(key): value for key, value in entry.items()}}


@lru_cache(maxsize=256)
def _defaults(source: Path, changed_ns: int, name: str) -> dict[str, Any]:
    """`changed_ns`: when the file was, so that one that changes is read again."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
        found_in = [
            f"{node.module}.{alias.name}" for node in imports for alias in node.names if (alias.asname or alias.name) == name
        ]
        return option_defaults(found_in[0]) if found_in else {}
    found: dict[str, Any] = {}
    for base in reversed(classes[name].bases):
        if isinstance(base, ast.Name):
            found |= copy.deepcopy(_defaults(source, changed_ns, base.id))
    if any("dataclass" in ast.unparse(decorator) for decorator in classes[name].decorator_list):
        for statement in classes[name].body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found.pop(statement.target.id, None)
                found |= _option(statement.target.id, statement)
    return found


def _option(name: str, field: ast.AnnAssign) -> dict[str, Any]:
    """The option that a field of a dataclass is, with its default; empty where it is none or has none."""
    if field.value is None or name.endswith("_mask") or ast.unparse(field.annotation).startswith("ClassVar"):
        return {}
    try:
        return {name: _as_yaml(ast.literal_eval(field.value))}
    except ValueError:
        return {}  # a call, such as field(init=False)


def _as_yaml(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_as_yaml(one) for one in value]
    return {key: _as_yaml(one) for key, one in value.items()} if isinstance(value, dict) else value


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's own, which fills up what names a runtime module. It has the name of the one that it stands for: Hydra refuses another."""

    def load_config(self, config_path: str) -> ConfigResult:
        """The file, with every option of the class in it."""
        found = super().load_config(config_path)
        if config_path.startswith("modules/") and isinstance(found.config, DictConfig) and "_target_" in found.config:
            target = found.config._get_node("_target_")
            found.config = OmegaConf.merge(option_defaults(str(target)), found.config)
        return found


SourcesRegistry.instance().types[FileConfigSource.scheme()] = FileConfigSource
