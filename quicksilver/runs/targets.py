"""The class that a yaml names as its `_target_`: found, checked and only then imported.

A config may come from somebody else, so a name in it must not run anything: not by being called (`subprocess.Popen`), not by being
imported. The package's own files are imported; of other files the source is read first, and only one that defines or imports a class of
that name is imported. What comes out must be a subclass of the base that is asked for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from quicksilver.runtime.errors import ConfigError

_OURS = "quicksilver"
T = TypeVar("T")


def target_class(key: str, entry: Any, base: type[T]) -> type[T]:
    """The class behind the section `key` of a config.

    Args:
        key: what the section is called, for messages: `modules.halting`.
        entry: its content, with `_target_: package.module.Class`.
        base: what the class must be a subclass of.

    Raises:
        ConfigError: no `_target_`, nothing there, no class, or a class that is no `base`. Nothing was called then.
    """
    if not isinstance(entry, Mapping) or not isinstance(entry.get("_target_"), str):
        kind = "measurement" if key.startswith("measure.") else "module"
        raise ConfigError(f"{key}={entry!r} is no {kind}: its yaml gives `_target_: package.Class` and the arguments.")
    return named_class(f"{key}._target_", entry["_target_"], base)


def named_class(key: str, target: str, base: type[T]) -> type[T]:
    """The class that the option `key` names; see `target_class`. Files in the present folder are found too, after all others.

    Raises:
        ConfigError: nothing there, no class, or a class that is no `base`. Nothing was called then.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    where = f"{key}={target}"
    module, _, name = target.rpartition(".")
    if not all(part.isidentifier() for part in target.split(".")) or not module:
        raise ConfigError(f"{where} is no name of a class: write package.module.Class.")
    if _foreign(module, name):
        raise ConfigError(f"{where} is not imported: it is no {base.__name__} class of quicksilver or of a file of your own.")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"{where} cannot be imported: {error}.") from error
    if not inspect.isclass(found):
        raise ConfigError(f"{where} is not a class.")
    if not issubclass(found, base):
        raise ConfigError(f"{where} is no subclass of {base.__module__}.{base.__qualname__}, so it cannot stand here.")
    if found is base or inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ()))) or "everything"
        raise ConfigError(f"{where} is abstract: it lacks {missing}. Name a class that has what is missing.")
    return found


def _foreign(module: str, name: str) -> bool:
    """Whether importing `module` for its `name` could do anything but define a class: it is Python's own, or its source has no such class.

    A module that is not found is not foreign: importing it says why.
    """
    top = module.split(".")[0]
    if top == _OURS:
        return False
    if top in sys.stdlib_module_names:
        return True
    if module in sys.modules:
        return False  # nothing is run by asking it again
    source = source_of(module)
    return source is not None and not _defines(source, name)


def source_of(module: str) -> Path | None:
    """The file of a module, found without importing its packages; None where there is none."""
    where: list[str] | None = None
    origin = None
    for depth, _ in enumerate(parts := module.split("."), 1):
        try:  # an editable install has a finder of its own for the package, and PathFinder does not ask it
            spec = find_spec(parts[0]) if depth == 1 else PathFinder.find_spec(".".join(parts[:depth]), where)
        except ValueError:  # __main__, which has no spec
            return None
        if spec is None:
            return None
        origin = spec.origin if spec.has_location else None  # a frozen module has no file
        where = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return Path(origin) if origin is not None else None


def _defines(source: Path, name: str) -> bool:
    """Whether a Python file has a class statement with a base, or an import, of that name."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name and node.bases:
            return True
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return True
    return False
