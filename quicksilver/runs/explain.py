"""What a person is told when a config cannot be composed: one line with the key, the value and what to write."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quicksilver.runs.choices import GROUPS, choices, config_dir

_OVERRIDE = "write key=value, for instance model=gpt2 or modules.halting.resume_layers=4."


def explain(error: Exception, overrides: Sequence[str], extra_dirs: Sequence[Path] = ()) -> str:
    """One readable message for what Hydra or OmegaConf raised while composing `overrides`."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException:
            return f"{text!r} is not an override: {_OVERRIDE}"
    parsed = [o for o in parsed if not o.key_or_group.startswith("hydra")]
    for override in parsed:
        if override.key_or_group in GROUPS:
            group = override.key_or_group
            known = choices(group, extra_dirs)
            chosen = _chosen(override)
            if not chosen and (group != "modules" or override._value is None):
                return f"{override.input_line} names nothing. Choices: {', '.join(known)}."
            unknown = [c for c in chosen if c not in known]
            if unknown:
                return (
                    f"{group}={unknown[0]}: there is no such {group.removesuffix('s')}. {suggest(unknown[0], known, 'Choices')}"
                )
    return _explain_keys(parsed, extra_dirs) or explain_value(error, overrides)


def _chosen(override: Override) -> list[str]:
    """Names that a group override, swept or not, picks."""
    values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    flat: list[str] = []
    for value in values:
        # sweep_iterator gives a list of names as the text "[a,b]"
        text = ",".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
        flat += [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    return flat


def _explain_keys(parsed: Sequence[Override], extra_dirs: Sequence[Path]) -> str | None:
    groups = [o for o in parsed if o.key_or_group in GROUPS]
    selected = [
        f"{o.key_or_group}=[{','.join(_chosen(o))}]" if o.key_or_group == "modules" else f"{o.key_or_group}={_chosen(o)[0]}"
        for o in groups
        if _chosen(o)
    ]
    if extra_dirs:
        selected.append(f"hydra.searchpath=[{','.join(f'file://{d}' for d in extra_dirs)}]")
    outer = GlobalHydra.instance().hydra  # of a sweep that is being composed
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            base = hydra_compose("run", [word for word in selected if "${" not in word])
    finally:
        GlobalHydra.instance().hydra = outer  # the context left another instance
    for override in parsed:
        if override in groups or override.is_add() or override.is_force_add():
            continue
        node: Any = base
        parts = override.key_or_group.split(".")
        for depth, part in enumerate(parts):
            here = list(node) if OmegaConf.is_dict(node) else []
            if part in here:
                node = OmegaConf.select(node, part, throw_on_missing=False)
                continue
            where = ".".join(parts[:depth])
            if where == "modules":
                known = choices("modules", extra_dirs)
                if part in known:
                    wanted = ",".join([*here, part])
                    return f"{override.key_or_group}: the module {part} is not selected. Add it: modules=[{wanted}]."
                return f"{override.key_or_group}: there is no module {part}. {suggest(part, known, 'Choices')}"
            if not here:
                return f"{override.key_or_group}: {where} is a value, not a section."
            prefix, of = (f"{where}.", f" of {where}") if where else ("", "")
            close = " or ".join(prefix + key for key in _close(part, [str(key) for key in here]))
            hint = f"Did you mean {close}? " if close else ""
            return f"{prefix}{part}: there is no such key. {hint}Keys{of}: {', '.join(map(str, here))}."
    return None


_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "str": "text"}


def explain_value(error: Exception, overrides: Sequence[str]) -> str:
    said = explain_type(error) or plain(error)
    interpolated = next((text for text in overrides if "${" in text), None)
    if interpolated is not None and "nterpolation" in said:
        return f"{interpolated}: {said}. ${{…}} stands for another key, ${{model.name}}, or for a variable, ${{oc.env:NAME,otherwise}}."
    return said


def explain_type(error: Exception) -> str | None:
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if not isinstance(cause, OmegaConfBaseException) or not cause.full_key:
        return None
    text = str(cause).splitlines()[0]
    converted = re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", text)
    if converted:
        return f"{cause.full_key}={converted[1]}: needs {_TYPES.get(converted[2], converted[2])}."
    if "is not a valid bool" in text:
        return f"{cause.full_key}={text.split(chr(39))[1]}: needs true or false."
    if "is not in struct" in text:
        return f"{cause.full_key}: there is no such key in at least one job of this sweep; sweep those jobs apart."
    if "is not Optional" in text:
        return f"{cause.full_key}=null: needs a value."
    return f"{cause.full_key}: {text}"


def plain(error: Exception) -> str:
    lines = [str(error).splitlines()[0]]
    if error.__cause__ is not None:
        lines.append(str(error.__cause__).splitlines()[0])
    return " ".join(lines)


def _close(word: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(word, known, n=2, cutoff=0.6)


def suggest(word: str, known: Sequence[str], noun: str) -> str:
    close = _close(word, known)
    return (f"Did you mean {' or '.join(close)}? " if close else "") + f"{noun}: {', '.join(known)}."
