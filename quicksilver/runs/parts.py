"""The objects that a config names: runtime modules and measurements, each a class with its options.

hydra.utils.instantiate would hand nested dataclasses on as configs and import whatever `_target_` says; here each class is checked, and so is
each option.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quicksilver.data.annotation.function_words import TOKEN_SETS, token_set
from quicksilver.measure.measurement import Measurement
from quicksilver.runs.choices import config_dir
from quicksilver.runs.defaults import filled
from quicksilver.runs.explain import explain_type, plain, suggest
from quicksilver.runs.targets import target_class
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.runtime.module import RuntimeModule


def module_class(name: str, entry: Any) -> type[RuntimeModule]:
    """The class behind `modules.NAME`, named by its `_target_`; nothing is built.

    Raises:
        ConfigError: no `_target_`, or no runtime module there.
    """
    from quicksilver.runtime.module import RuntimeModule

    return target_class(f"modules.{name}", entry, RuntimeModule)


def module_entry(name: str) -> tuple[str, dict[str, Any]]:
    """One yaml of conf/modules with what it inherits: its name in `modules`, and its options. Hydra, which composes whole runs, takes a hundred
    times as long."""
    text = (config_dir() / "modules" / f"{name}.yaml").read_text(encoding="utf-8")
    content = OmegaConf.create(text)
    assert isinstance(content, DictConfig)
    parents = content.pop("defaults", [])
    inherited = [module_entry(parent.removesuffix("@_here_"))[1] for parent in parents if parent != "_self_"]
    merged = OmegaConf.to_container(OmegaConf.merge(*inherited, content))
    assert isinstance(merged, dict)
    return text.splitlines()[0].removeprefix("# @package modules.").strip(), filled(
        {str(key): value for key, value in merged.items()}
    )


def build_modules(entries: Mapping[str, Any], tokenizer: Any = None) -> list[Any]:
    """The runtime modules of a config, by name.

    Args:
        tokenizer: makes token ids of the words in options called `…_ids`; None leaves words out, which is enough to check the rest.

    Raises:
        ConfigError: an argument that the class does not have (with a suggestion), a value of the wrong type, a word that is no token,
            or whatever the class refuses.
    """
    built = []
    # All are checked before the first is built. Sorted: whatever order they were selected in must not decide anything.
    classes = {name: module_class(name, entry) for name, entry in sorted(entries.items())}
    for name, cls in classes.items():
        entry = entries[name]
        arguments = {k: v for k, v in entry.items() if k != "_target_"}
        known = list(inspect.signature(cls).parameters)
        for key in arguments:
            if key not in known:
                raise ConfigError(f"modules.{name}.{key}: {cls.__name__} has no such option. {suggest(key, known, 'Options')}")
            if key.endswith("_ids") and isinstance(arguments[key], list):
                arguments[key] = _token_ids(f"modules.{name}.{key}", arguments[key], tokenizer)
        try:
            built.append(cls(**arguments))
        except ConfigError as error:
            raise ConfigError(f"modules.{name}: {error}") from error
        except (TypeError, ValueError) as error:
            shown = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
            raise ConfigError(f"modules.{name} cannot be built from {shown}: {error}") from error
    return built


def _token_ids(key: str, value: list[Any], tokenizer: Any) -> list[Any]:
    """`value` with every word replaced by the ids of the tokens that read like it, with or without a space around, and every `@set` by
    those that belong to it."""
    words = {entry.strip() for entry in value if isinstance(entry, str) and not entry.startswith("@")}
    ids = [entry for entry in value if not isinstance(entry, str)]
    for name in (entry for entry in value if isinstance(entry, str) and entry.startswith("@")):
        if name not in TOKEN_SETS:
            raise ConfigError(f"{key}: {suggest(name, list(TOKEN_SETS), 'Sets of tokens')}")
        ids += token_set(name, tokenizer) if tokenizer is not None else []
    if not words or tokenizer is None:
        return ids
    found = [(number, tokenizer.decode([number]).strip()) for number in range(len(tokenizer))]
    missing = sorted(words - {text for _, text in found})
    if missing:
        raise ConfigError(f"{key}: {missing[0]!r} is no single token of this model. Give words that are, or token ids.")
    return ids + [number for number, text in found if text in words]


# --- measurements ---------------------------------------------------------------------------------------------------------------

PLAIN_KEYS = ("name", "batch_windows")  # of `measure`; all others are measurements


def is_on(name: str, entry: Any) -> bool:
    """Whether an entry of `measure` is a measurement that takes part.

    Raises:
        ConfigError: neither a measurement nor switched off.
    """
    if name in PLAIN_KEYS or entry is None or entry is False:
        return False
    if entry is True:
        raise ConfigError(f"measure.{name}=true: switch it on with measure.{name}.enabled=true.")
    enabled = entry.get("enabled", True) if isinstance(entry, Mapping) else True
    if not isinstance(enabled, bool):
        raise ConfigError(f"measure.{name}.enabled={enabled}: needs true or false.")
    return enabled


def measurement_class(name: str, entry: Any) -> type[Measurement]:
    """The class behind `measure.NAME`.

    Raises:
        ConfigError: no `_target_`, nothing importable there, or no measurement.
    """
    found = target_class(f"measure.{name}", entry, Measurement)  # type: ignore[type-abstract]
    if not dataclasses.is_dataclass(found):
        raise ConfigError(f"measure.{name}._target_={entry['_target_']} is no dataclass: its fields would be the options.")
    return found


def build_measurements(entries: Mapping[str, Any]) -> dict[str, Measurement]:
    """The measurements of a config that take part, by name and in their order; quality is the first.

    Raises:
        ConfigError: an option that the class does not have (with a suggestion), a value of the wrong type.
    """
    return {name: _measurement(name, entry) for name, entry in entries.items() if is_on(name, entry)}


_built: dict[tuple[type, str, bytes], Measurement] = {}


def _measurement(name: str, entry: Mapping[str, Any]) -> Measurement:
    cls = measurement_class(name, entry)
    arguments = {key: value for key, value in entry.items() if key not in ("_target_", "enabled")}
    known = [option.name for option in dataclasses.fields(cls)]
    for key in arguments:
        if key not in known:
            raise ConfigError(f"measure.{name}.{key}: {cls.__name__} has no such option. {suggest(key, known, 'Options')}")
    # A sweep builds the same measurements for each of its runs, and OmegaConf takes a millisecond for each.
    options = (cls, name, pickle.dumps(arguments))
    if options not in _built:
        try:
            # Built by OmegaConf: values are checked against the annotations, and nested dataclasses stay dataclasses.
            built = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), arguments))
        except OmegaConfBaseException as error:
            raise ConfigError(f"measure.{name}.{explain_type(error) or plain(error)}") from error
        assert isinstance(built, Measurement)
        _built[options] = built
    return copy.deepcopy(_built[options])
