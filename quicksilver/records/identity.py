"""The identity of a run: what its record is of, and nothing about the code that made it. Its hash, the fingerprint, names the record.

    config        the parts that influence a number (RunConfig.identity)
    digests       sha256 of the scored text, of weights, architecture and tokenizer files, and of what calibrates the modules
    sources       sha256 of the files of modules that are not this package's own
    numerics      the version of the numbers that this package computes (`quicksilver.numerics`), guarded by the golden run

Files of this package are in none of them: they may be moved and rewritten, and as long as the golden run gives the same numbers
every record stays what it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quicksilver.runtime.errors import ConfigError

DIGITS = 20  # hexadecimal: 80 bits
_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Identity:
    """What decides the result of a run: its config's part, digests of texts, weights and calibration files, sources of the user's modules by module
    name, and the version of the numbers."""

    config: Mapping[str, Any]
    digests: Mapping[str, str]
    sources: Mapping[str, str]
    numerics_version: int

    def to_json(self) -> dict[str, Any]:
        """As record.json has it."""
        return canonical(dataclasses.asdict(self))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, allow_nan=False).encode()).hexdigest()[:DIGITS]


def spelled_at_first(entry: Any) -> Any:
    """The options of a module as the first records have them, whatever they are called now and wherever the class has moved: a share to save
    was a percentage, and a class stood in a file of its name."""
    if not isinstance(entry, Mapping) or not str(entry.get("_target_", "")).startswith(f"{_PACKAGE}."):
        return entry
    found = dict(entry)
    room, *file, name = str(found["_target_"]).removeprefix(f"{_PACKAGE}.").split(".")
    if file:
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        found["_target_"] = f"{_PACKAGE}.{room}.{snake}.{name}"
    if "save" in found:
        save = found.pop("save")
        found["saves_pct"] = round(100 * save, 6) if isinstance(save, int | float) else save
    return found


def canonical(value: Any) -> Any:
    """The same value in one spelling: 1.0 as 1, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(k): canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def foreign_sources(classes: Iterable[type]) -> dict[str, str]:
    """sha256 of the files that define `classes` and what they inherit from, by module name, this package's and Python's own left out.

    Raises:
        ConfigError: a class without source, typed at a prompt for instance: nothing would tell its next version from this one.
    """
    found = {}
    for cls in dict.fromkeys(base for one in classes for base in one.__mro__):
        top = cls.__module__.partition(".")[0]
        if top == _PACKAGE or (top in sys.stdlib_module_names and top != "__main__"):
            continue
        try:
            content = Path(inspect.getfile(cls)).read_bytes()
        except (OSError, TypeError):
            try:
                content = inspect.getsource(cls).encode()  # of a notebook's cell
            except (OSError, TypeError):
                raise ConfigError(
                    f"{cls.__module__}.{cls.__qualname__} has no source file, so its records could not be told from those of another "
                    "version: put the class into a file."
                ) from None
        found[cls.__module__] = hashlib.sha256(content).hexdigest()
    return dict(sorted(found.items()))
