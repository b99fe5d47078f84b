"""The objects that a config names: runtime modules and measurements, each a class with its options.

A config may come from somebody else, so a name in it must not run anything: not by being called (`subprocess.Popen`), not by being imported.
The package's own files are imported. Of other files the source is read first: one is imported if it imports quicksilver and defines a class
of that name. The class must be a subclass of the base that is asked for, and each option is checked.

A module's defaults stand in its dataclass alone. They are read from the source: an import would bring torch, which a table made of records
does not need. Whatever yaml Hydra reads gets them here, so that every option of a module has its place in the config.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quicksilver.data.annotation import TOKEN_SETS, token_set
from quicksilver.measure.measurement import Measurement
from quicksilver.runs.choices import config_dir, explain, suggest
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import checks_of

if TYPE_CHECKING:
    from quicksilver.runtime.module import RuntimeModule


T = TypeVar("T")


def target_class(key: str, entry: Any, base: type[T]) -> type[T]:
    """The class behind the section `key` of a config, such as `modules.halting`, whose `_target_: package.module.Class` names it.
    Raises ConfigError: no `_target_`, or as `named_class`. Nothing was called then."""
    if not isinstance(entry, Mapping):
        kind = "measurement" if key.startswith("measure.") else "module"
        raise ConfigError(f"{key}={entry!r} is no {kind}: its yaml gives `_target_: package.Class` and the arguments.")
    if not isinstance(entry.get("_target_"), str):
        raise ConfigError(f"{key} has no class: its yaml lacks the line `_target_: package.module.Class`.")
    return named_class(f"{key}._target_", entry["_target_"], base)


def named_class(key: str, target: str, base: type[T]) -> type[T]:
    """The class that the option `key` names. Files in the present folder are found too, after all others.
    Raises ConfigError: nothing there, no class, or a class that is no subclass of `base`. Nothing was called then."""
    where = f"{key}={target}"
    module, _, name = target.rpartition(".")
    if not all(part.isidentifier() for part in target.split(".")) or not module:
        raise ConfigError(f"{where} is no name of a class: write package.module.Class.")
    if why := _why_foreign(module, name, base):
        raise ConfigError(f"{where} is not imported: {why}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        top = module.split(".")[0]
        start = f" Start in the folder of {top}.py." if isinstance(error, ModuleNotFoundError) and error.name == top else ""
        raise ConfigError(f"{where} cannot be imported: {error}.{start}") from error
    if not inspect.isclass(found):
        raise ConfigError(f"{where} is not a class.")
    if not issubclass(found, base):
        raise ConfigError(f"{where} is no subclass of {base.__module__}.{base.__qualname__}, so it cannot stand here.")
    if found is base or inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ()))) or "everything"
        raise ConfigError(f"{where} is abstract: it lacks {missing}. Name a class that has what is missing.")
    return found


def _why_foreign(module: str, name: str, base: type) -> str:
    """Why importing `module` for its `name` could do anything but define a class, a sentence; empty: it could not.
    A module that is not found is not foreign: importing it says why. One that was imported runs nothing when it is asked again."""
    top = module.split(".")[0]
    if top in sys.stdlib_module_names:
        return f"it is no {base.__name__} class of quicksilver or of a file of your own. A file that is called like a module of Python needs another name."
    if top == "quicksilver" or module in sys.modules or (path := source_of(module)) is None:
        return ""
    try:
        ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"{path.name}{line}: {type(error).__name__}: {error.args[0]}"
    if (found := _definition(module, name)) is None:
        classes = ", ".join(_read(path, path.stat().st_mtime_ns, module).classes) or "none"
        return f"{path.name} has no class {name}. Its classes: {classes}."
    if not found[1].bases:
        return f"{path.name}: {name} has no base. Write `class {name}({base.__name__})`."
    ours = any(other.split(".")[0] == "quicksilver" for other, _ in found[0].imports.values())
    needs = f"from {base.__module__} import {base.__name__}"
    return "" if ours else f"{path.name} imports nothing of quicksilver. Write `{needs}`."


# --- sources, read and not imported ---------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Source:
    """A file: the name of its module, its classes, and what it imports: name -> (module, the name there)."""

    module: str
    classes: dict[str, ast.ClassDef]
    imports: dict[str, tuple[str, str]]


def source_of(module: str) -> Path | None:
    """The file of a module, found without importing its packages, last in the present folder; None where there is none."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
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


def _definition(module: str, name: str) -> tuple[_Source, ast.ClassDef] | None:
    """The class `name` of `module` and the file that defines it; imports of it are followed."""
    seen = set()
    while module and (path := source_of(module)) is not None and (path, name) not in seen:
        seen.add((path, name))
        source = _read(path, path.stat().st_mtime_ns, module)
        if name in source.classes:
            return source, source.classes[name]
        module, name = source.imports.get(name, ("", ""))
    return None


@lru_cache(maxsize=256)
def _read(path: Path, _changed_ns: int, module: str) -> _Source:
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        nodes = []
    source = _Source(module, {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}, {})
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            source.imports.update({alias.name: (alias.name, "") for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*above, *filter(None, [node.module])])
            source.imports.update({alias.asname or alias.name: (whole, alias.name) for alias in node.names})
    return source


def option_defaults(target: str) -> dict[str, Any]:
    """The options of the dataclass `package.module.Class` and their defaults, as a yaml could say them.
    Left out are options without a default, masks (which are tensors), and defaults that are no literals."""
    module, _, name = target.rpartition(".")
    source, node = (_definition(module, name) if module else None) or (None, None)
    options: dict[str, Any] = {}
    if source is None or node is None:
        return options
    for base in (base.id for base in reversed(node.bases) if isinstance(base, ast.Name)):
        options |= option_defaults(f"{source.module}.{base}")
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    for field in node.body if is_dataclass else ():
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            options.pop(field.target.id, None)
            is_option = not field.target.id.endswith("_mask") and not ast.unparse(field.annotation).startswith("ClassVar")
            if field.value is not None and is_option:
                with suppress(ValueError):  # a call, such as field(init=False)
                    options[field.target.id] = _as_yaml(ast.literal_eval(field.value))
    return options


def _as_yaml(value: Any) -> Any:
    return [_as_yaml(one) for one in value] if isinstance(value, tuple | list) else value


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


# --- modules --------------------------------------------------------------------------------------------------------------------
def module_class(name: str, entry: Any) -> type[RuntimeModule]:
    """The class behind `modules.NAME`, named by its `_target_`; nothing is built.
    Raises ConfigError: no `_target_`, or no runtime module there."""
    from quicksilver.runtime.module import RuntimeModule

    return target_class(f"modules.{name}", entry, RuntimeModule)


def yaml_of(group: str, name: str) -> dict[str, Any]:
    """One yaml of a group of conf/ with what it inherits. Hydra takes a hundred times as long."""
    content = OmegaConf.load(config_dir() / group / f"{name}.yaml")
    assert isinstance(content, DictConfig)
    parents = content.pop("defaults", [])
    inherited = [yaml_of(group, parent.removesuffix("@_here_")) for parent in parents if parent != "_self_"]
    whole: Any = OmegaConf.to_container(OmegaConf.merge(*inherited, content))
    return dict(whole)


def module_entry(name: str) -> tuple[str, dict[str, Any]]:
    """One yaml of conf/modules: its name in `modules`, and its options."""
    text = (config_dir() / "modules" / f"{name}.yaml").read_text(encoding="utf-8")
    entry = yaml_of("modules", name)
    return text.splitlines()[0].removeprefix("# @package modules.").strip(), option_defaults(entry["_target_"]) | entry


def build_modules(entries: Mapping[str, Any], tokenizer: Any = None) -> list[Any]:
    """The runtime modules of a config, by name. Raises ConfigError: an argument that the class does not have (with a suggestion),
    a value of the wrong type, a word that is no token, or whatever the class refuses. `tokenizer` makes token ids of the words in
    options called `…_ids`; None leaves words out, which is enough to check the rest."""
    built = []
    # All are checked before the first is built. Sorted: whatever order they were selected in must not decide anything.
    classes = {name: module_class(name, entry) for name, entry in sorted(entries.items())}
    for name, cls in classes.items():
        _check_signatures(f"modules.{name}", cls)
        arguments = _arguments(f"modules.{name}", entries[name], cls)
        for key, value in arguments.items():
            if key.endswith("_ids") and isinstance(value, list):
                arguments[key] = _token_ids(f"modules.{name}.{key}", value, tokenizer)
        try:
            built.append(cls(**arguments))
            own: Any = cls
            if not cls.__module__.startswith("quicksilver.") and dataclasses.is_dataclass(own):
                # A `__post_init__` of one's own takes the place of the one that does this.
                for option, check in checks_of(cast("Any", own)):
                    check(option, getattr(built[-1], option))
        except ConfigError as error:
            raise ConfigError(f"modules.{name}: {error}") from error
        except (TypeError, ValueError) as error:
            shown = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
            raise ConfigError(f"modules.{name} cannot be built from {shown}: {error}") from error
    return built


def _check_signatures(key: str, cls: type) -> None:
    """Refuse methods of one's own that a run could not call; raises ConfigError."""
    ours = [base for base in cls.__mro__ if base.__module__ == "quicksilver.runtime.module"]
    for name, method in ((name, method) for base in ours for name, method in vars(base).items()):
        own = getattr(cls, name)
        if name.startswith("_") or not inspect.isfunction(method) or own is method or not inspect.isfunction(own):
            continue
        asked = inspect.signature(method)
        try:
            inspect.signature(own).bind(*asked.parameters)
        except TypeError:
            takes = ", ".join(asked.parameters)
            raise ConfigError(f"{key}: {cls.__name__}.{name}{inspect.signature(own)} must take ({takes}).") from None


def _arguments(key: str, entry: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """What the section `key` gives `cls`; raises ConfigError for an option that it does not have."""
    arguments = {name: value for name, value in entry.items() if name != "_target_"}
    parameters = inspect.signature(cls).parameters
    named = (one for one in parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
    if missing := [one.name for one in named if one.default is one.empty and one.name not in arguments]:
        needs = f"{key}: {cls.__name__} needs {' and '.join(missing)}"
        raise ConfigError(f"{needs}: give a default in the class, or a value in its yaml.")
    for name in (name for name in arguments if name not in parameters):
        raise ConfigError(f"{key}.{name}: {cls.__name__} has no such option. {suggest(name, list(parameters), 'Options')}")
    return arguments


def _token_ids(key: str, value: list[Any], tokenizer: Any) -> list[Any]:
    """`value` with every word replaced by the ids of the tokens that read like it, with or without a space around, and every `@set` by its ids."""
    named, ids = [one for one in value if isinstance(one, str)], [one for one in value if not isinstance(one, str)]
    words = {one.strip() for one in named if not one.startswith("@")}
    for name in (one for one in named if one.startswith("@")):
        if name not in TOKEN_SETS:
            raise ConfigError(f"{key}: {suggest(name, list(TOKEN_SETS), 'Sets of tokens')}")
        ids += token_set(name, tokenizer) if tokenizer is not None else []
    if not words or tokenizer is None:
        return ids
    found = [(number, tokenizer.decode([number]).strip()) for number in range(len(tokenizer))]
    if missing := sorted(words - {text for _, text in found}):
        raise ConfigError(f"{key}: {missing[0]!r} is no single token of this model. Give words that are, or token ids.")
    return ids + [number for number, text in found if text in words]


# --- measurements ---------------------------------------------------------------------------------------------------------------
PLAIN_KEYS = ("name", "batch_windows")  # of `measure`; all others are measurements


def is_on(name: str, entry: Any) -> bool:
    """Whether an entry of `measure` is a measurement that takes part.
    Raises ConfigError: neither a measurement nor switched off."""
    if name in PLAIN_KEYS or entry is None or entry is False:
        return False
    if entry is True:
        raise ConfigError(f"measure.{name}=true: switch it on with measure.{name}.enabled=true.")
    enabled = entry.get("enabled", True) if isinstance(entry, Mapping) else True
    if not isinstance(enabled, bool):
        raise ConfigError(f"measure.{name}.enabled={enabled}: needs true or false.")
    return enabled


def measurement_class(name: str, entry: Any) -> type[Measurement]:
    """The class behind `measure.NAME`. Raises ConfigError: no `_target_`, nothing importable there, or no measurement."""
    found = target_class(f"measure.{name}", entry, Measurement)  # type: ignore[type-abstract]
    if not dataclasses.is_dataclass(found):
        raise ConfigError(f"measure.{name}._target_={entry['_target_']} is no dataclass: its fields would be the options.")
    return found


def build_measurements(entries: Mapping[str, Any]) -> dict[str, Measurement]:
    """The measurements of a config that take part, by name and in their order; quality is the first.
    Raises ConfigError: an option that the class does not have (with a suggestion), a value of the wrong type."""
    return {name: _measurement(name, entry) for name, entry in entries.items() if is_on(name, entry)}


def _measurement(name: str, entry: Mapping[str, Any]) -> Measurement:
    cls = measurement_class(name, entry)
    arguments = _arguments(f"measure.{name}", {key: value for key, value in entry.items() if key != "enabled"}, cls)
    return copy.deepcopy(_built(name, cls, pickle.dumps(arguments)))


@lru_cache(maxsize=1024)  # a sweep builds the same ones for each of its runs, and OmegaConf takes a millisecond for each
def _built(name: str, cls: type[Measurement], arguments: bytes) -> Measurement:
    try:
        # Built by OmegaConf: values are checked against the annotations, and nested dataclasses stay dataclasses.
        return cast("Measurement", OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), pickle.loads(arguments))))
    except (OmegaConfBaseException, ConfigError) as error:
        said = explain(error) if isinstance(error, OmegaConfBaseException) else str(error)
        raise ConfigError(f"measure.{name}.{said}") from error
