"""Records: everything one run produced, as one directory that pandas alone can read.

results/runs/<fingerprint>/
    record.json         config, environment, protocol, all scalars with their units in the names
    windows.parquet     per window: tokens, bytes, nll_nats, FLOPs …
    trace.safetensors   every decision (absent in a dense record)
    signals.safetensors what happened to each token of a few texts, layer by layer (with measure.signals)
    events.jsonl        what happened when
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quicksilver.measure.measurement import Result
from quicksilver.measure.typed import Mistyped
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:  # a second to import, which no refusal should wait for
    import pandas as pd

R = TypeVar("R", bound=Result)

SCHEMA_VERSION = 3
RECORD, WINDOWS, TRACE, EVENTS = "record.json", "windows.parquet", "trace.safetensors", "events.jsonl"
SIGNALS = "signals.safetensors"


@dataclass(frozen=True)
class Record:
    """One finished run, read only.

    `record["ppl"]`, `record["latency_ms"]["median"]`, `record.get("null")`: the entries of record.json.
    """

    path: Path
    data: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        if key not in self.data:
            raise ConfigError(
                f"{self.path / RECORD} has no entry {key!r}: it was not measured in this run "
                f"(measure={self.config_name('measure')})."
            )
        return self.data[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)

    def measured(self, name: str, result: type[R]) -> R:
        """What a measurement found, typed.

        Args:
            name: of the measurement in the config.
            result: the class of its result.

        Raises:
            ConfigError: it was not measured in this run, or what is there is not what the class says.
        """
        section = name if result.section is None else result.section
        content = self.data if section == "" else self[section]
        try:
            return result.from_json(content)
        except Mistyped as error:
            raise _corrupt(self.path, f"{RECORD}, {section or name}: {error}") from error

    def config_name(self, group: str) -> str:
        return self.data["config"][group]["name"]

    @property
    def fingerprint(self) -> str:
        return self.data["fingerprint"]

    @property
    def dense_fingerprint(self) -> str | None:
        """The record every difference of this one is against; None: this is a dense record."""
        return self.data["dense_fingerprint"]

    @property
    def trace_path(self) -> Path | None:
        path = self.path / TRACE
        return path if path.is_file() else None

    @property
    def events_path(self) -> Path:
        return self.path / EVENTS

    @cached_property
    def windows(self) -> pd.DataFrame:
        """windows.parquet.

        Raises:
            ConfigError: the file is damaged.
        """
        import pandas as pd

        path = self.path / WINDOWS
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.data["files"][WINDOWS]["sha256"]:
            raise _corrupt(self.path, f"{WINDOWS} is not the file that was recorded")
        return pd.read_parquet(path)

    def signals(self, text: int = 0) -> pd.DataFrame:
        """What happened inside one of the record's texts (`record["texts"]`): a row a layer and token.

        Columns: `layer` (0: before the first), `slot`, `token`, then the signals of `measure.inside.Inside`: those of the run under their
        own names, those of the dense model as `dense_…`, the components as `pca_0` …; of a dense record, its own. `active` and `kv` are
        booleans, `bits` and `carrier` whole numbers. `nll_nats` and `dense_nll_nats` repeat in every layer.

        Raises:
            ConfigError: the run looked into no text, not into that many, or the file is damaged.
        """
        import pandas as pd
        from safetensors.numpy import load_file

        texts = self.get("texts") or []
        if not texts:
            raise ConfigError(f"{self.path} has no signals: make the run with measure=signals.")
        if not 0 <= text < len(texts):
            raise ConfigError(f"{self.path} looked into {len(texts)} texts; there is no text {text}.")
        path = self.path / SIGNALS
        if hashlib.sha256(path.read_bytes()).hexdigest() != self.data["files"][SIGNALS]["sha256"]:
            raise _corrupt(self.path, f"{SIGNALS} is not the file that was recorded")
        prefix = f"{text}."
        arrays = {name.removeprefix(prefix): array for name, array in load_file(path).items() if name.startswith(prefix)}
        tokens = texts[text]["tokens"]
        rows = next(len(array) for array in arrays.values() if array.ndim == 2)
        columns: dict[str, Any] = {
            "layer": np.repeat(np.arange(rows), len(tokens)),
            "slot": np.tile(np.arange(len(tokens)), rows),
            "token": np.tile(np.array(tokens, dtype=object), rows),
        }
        of_run = any(name.startswith("run.") for name in arrays)
        for name, array in sorted(arrays.items()):
            variant, signal = name.split(".")
            column = signal if variant == "run" or not of_run else f"dense_{signal}"
            if array.ndim == 3:
                columns |= {f"{column}_{i}": array[..., i].reshape(-1) for i in range(array.shape[-1])}
            else:
                columns[column] = np.broadcast_to(array, (rows, len(tokens))).reshape(-1)
        kinds = {"active": bool, "kv": bool, "bits": int, "carrier": int}
        return pd.DataFrame(columns).astype({name: kind for name, kind in kinds.items() if name in columns})


def load_record(folder: Path | str) -> Record:
    """Read one record directory.

    Raises:
        ConfigError: it is not a whole record of this schema; the message names the path and the remedy. Nothing is changed on
            disk.
    """
    folder = Path(folder)
    try:
        data = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _corrupt(folder, f"it has no {RECORD}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _corrupt(folder, f"{RECORD} is damaged: {error}") from error
    except OSError as error:
        raise ConfigError(f"{folder / RECORD} cannot be read: {error.strerror}.") from error
    if not isinstance(data, dict) or "schema_version" not in data:
        raise _corrupt(folder, f"{RECORD} has no schema_version")
    if data["schema_version"] != SCHEMA_VERSION:
        older = isinstance(data["schema_version"], int) and data["schema_version"] < SCHEMA_VERSION
        update = f"Bring it up to date with `quicksilver rekey results_dir={folder.parents[1]}`. " if older else ""
        raise ConfigError(
            f"{folder} is a record of schema {data['schema_version']} and this version of QuickSilver reads schema {SCHEMA_VERSION}. "
            f"{update}Move that folder away to have the run made again, or read it with the version that wrote it."
        )
    missing = [key for key in ("fingerprint", "dense_fingerprint", "identity", "config", "files") if key not in data]
    if missing:
        raise _corrupt(folder, f"{RECORD} has no {missing[0]}")
    if data["fingerprint"] != folder.name:
        raise _corrupt(folder, f"{RECORD} belongs to the run {data['fingerprint']}")
    for name, described in data["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != described["bytes"]:
            raise _corrupt(folder, f"{name} is {'cut short or changed' if path.is_file() else 'missing'}")
    return Record(folder, data)


def check_files(record: Record) -> None:
    """Compare every file of a record with the digest that was written with it.

    Raises:
        ConfigError: one is not the file that was recorded.
    """
    for name, described in record.data["files"].items():
        if hashlib.sha256((record.path / name).read_bytes()).hexdigest() != described["sha256"]:
            raise _corrupt(record.path, f"{name} is not the file that was recorded")


def _corrupt(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"{folder} is not a whole record: {why}. Move that folder away (or remove it) to have the run made again.")


def record_frame(results_dir: Path | str) -> pd.DataFrame:
    """All records below `results_dir`, one row each.

    Nested entries are joined with dots (`latency_ms.median`, `config.model.name`), lists are left out, and so is `identity`, which
    repeats the configuration. The index is the
    fingerprint, rows are in order of their start.

    Raises:
        ConfigError: a directory there is not a whole record.
    """
    import pandas as pd

    runs = Path(results_dir) / "runs"
    folders = sorted(p for p in runs.iterdir() if p.is_dir() and not p.name.startswith(".")) if runs.is_dir() else []
    rows = [dict(_flatten({k: v for k, v in load_record(folder).data.items() if k != "identity"})) for folder in folders]
    if not rows:
        return pd.DataFrame(index=pd.Index([], name="fingerprint"))
    return pd.DataFrame(rows).sort_values("started", kind="stable").set_index("fingerprint")


def _flatten(entries: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in entries.items():
        if isinstance(value, Mapping):
            flat += _flatten(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            flat.append((f"{prefix}{key}", value))
    return flat
