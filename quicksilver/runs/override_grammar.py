"""Overrides as a shell hands them on, made readable for Hydra's grammar, which knows no é, ~, # or apostrophe outside of quotes."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from functools import lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from quicksilver.runs.choices import GROUPS
from quicksilver.runtime.errors import ConfigError

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
