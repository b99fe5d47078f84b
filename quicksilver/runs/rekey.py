"""Give existing records the identity that this version asks for, where it computes the same numbers.

    quicksilver rekey results_dir=results

A record's name hashes its identity. When the form of identities changes (an option is renamed, a section moves) while the numbers do
not, the records are good and their names are not. The golden run says that numbers did not change. Then each record.json is written
anew beside the old one and put in its place in one rename, and the folder is renamed; nothing else in it is touched. Killed in between,
the same command goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from quicksilver import numerics
from quicksilver.records.identity import Identity, canonical, foreign_sources
from quicksilver.records.record import CHECKSUM, RECORD, SCHEMA_VERSION, checksum, load_record, record_of
from quicksilver.records.store import Store
from quicksilver.runs.config import RunConfig
from quicksilver.runs.parts import module_class
from quicksilver.runtime.errors import ConfigError

# Records of schema 1 hashed the source files of the passes. These digests are of the code whose numbers are version 1.
_SOURCES_OF_VERSION_1 = ("dbb605a4e8084a8ac514",)


@dataclass
class Rekeyed:
    """What became of the records of a store.

    Attributes:
        renamed: new fingerprints by old ones.
        kept: records that had the right identity already.
        left: why a folder was left as it is, by its name.
    """

    renamed: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


class _Left(Exception):
    """This record stays as it is; the text says why."""


def rekey(results_dir: Path | str) -> Rekeyed:
    """Re-key every record below `results_dir`. The caller has made sure of the golden run.

    Raises:
        QuickSilverError: the folder cannot be written.
    """
    store, done = Store(results_dir), Rekeyed()
    if not store.runs.is_dir():
        return done
    with store.turn("rekey"):
        found: dict[str, dict[str, Any]] = {}
        for folder in sorted(p for p in store.runs.iterdir() if p.is_dir() and not p.name.startswith(".")):
            try:
                found[folder.name] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                done.left[folder.name] = f"{RECORD} cannot be read: {error}"
        # Dense records last: those that are compared with them are recognised by them.
        for name in sorted(found, key=lambda name: found[name].get("dense_fingerprint") is None):
            try:
                data = _with_new_identity(found[name], found)
                new = data["fingerprint"]
                if new == name and data == found[name]:
                    done.kept.append(name)
                    continue
                if new != name and store.path(new).exists():
                    raise _Left(f"there is a record of that identity, {new}")
                _move(store, store.runs / name, store.path(new), data)
                done.renamed[name] = new
            except _Left as reason:
                done.left[name] = str(reason)
    return done


def _move(store: Store, old: Path, new: Path, data: Mapping[str, Any]) -> None:
    try:
        record_of(old, data)
    except ConfigError as error:
        raise _Left(str(error)) from error
    store.write_json(str((old / RECORD).relative_to(store.root)), data)
    with store.writing():
        os.rename(old, new)
    load_record(new)


def _with_new_identity(data: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The content of record.json under its new identity; `records` are all there are, by name of their folder."""
    try:
        if data["schema_version"] == 1:
            data = _from_schema_1(data, records)
        if data["schema_version"] == 2:
            data = _from_schema_2(data)
        if data["schema_version"] == 3:
            data = _from_schema_3(data)
        elif data.get(CHECKSUM) != checksum(data):
            raise _Left(f"{RECORD} is not as it was written: its checksum is another")
        if data["schema_version"] != SCHEMA_VERSION:
            raise _Left(f"it is a record of schema {data['schema_version']}")
        of = data["identity"]
        if of["numerics_version"] != numerics.VERSION:
            raise _Left(f"its numbers are of version {of['numerics_version']}, this version's are of {numerics.VERSION}")
        config = _config(data["config"])
        identity = Identity(config.identity(), of["digests"], of["sources"], of["numerics_version"])
        dense = None
        if config.modules:
            digests = {name: of["digests"][name] for name in ("text", "annotation", "weights") if name in of["digests"]}
            dense = Identity(config.dense().identity(), digests, {}, of["numerics_version"]).fingerprint
    except (KeyError, TypeError, AttributeError) as error:
        raise _Left(f"{RECORD} is not what this version reads: {error}") from error
    named = {"fingerprint": identity.fingerprint, "dense_fingerprint": dense, "identity": identity.to_json()}
    content = {**data, **named}
    return {**content, CHECKSUM: checksum(content)}


def _config(content: Mapping[str, Any]) -> RunConfig:
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), dict(content)))
    except Exception as error:
        raise _Left(f"its config is not one of this version: {str(error).splitlines()[0]}") from error
    assert isinstance(config, RunConfig)
    return config


def _from_schema_1(data: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Schema 1 had no identity in the record, and hashed source files."""
    dense = data if data["dense_fingerprint"] is None else records.get(data["dense_fingerprint"])
    if dense is None:
        raise _Left("its dense record is not there, so the code that made it is unknown")
    if dense["package"]["source_digest"] not in _SOURCES_OF_VERSION_1:
        raise _Left(f"it was made by other code (source digest {dense['package']['source_digest']})")
    digests = {"text": data["data"]["digest"], "weights": data["model"]["weights_digest"]}
    if data["calibration"] is not None:
        digests["calibration_text"] = data["calibration"]["text_digest"]
    identity = _identity_of_schema_1(data["config"])
    for name, entry in identity["modules"].items():
        path = entry.get("calibration")
        if isinstance(path, str):
            try:
                digests[f"calibration.{name}"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            except OSError as error:
                raise _Left(f"its calibration file {path} cannot be read: {error.strerror}") from error
            identity["modules"][name] = {k: v for k, v in entry.items() if k != "calibration"}
    package = data["package"]
    content = {"config": identity, "digests": digests, "package": package["version"], "source": package["source_digest"]}
    hashed = hashlib.sha256(json.dumps(canonical(content), sort_keys=True, allow_nan=False).encode()).hexdigest()[:20]
    if hashed != data["fingerprint"]:
        raise _Left(
            "its configuration and digests do not give its fingerprint: something in it, or its calibration file, changed"
        )
    try:
        foreign = foreign_sources(module_class(name, entry) for name, entry in data["config"]["modules"].items())
    except ConfigError as error:
        raise _Left(str(error)) from error
    if foreign:
        raise _Left(f"whether {', '.join(foreign)} changed since cannot be known")
    named = {"config": identity, "digests": digests, "sources": {}, "numerics_version": 1}
    return {**data, "schema_version": 2, "identity": named, "package": {**package, "numerics_version": 1}}


def _identity_of_schema_1(config: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: dict(config[name]) for name in ("model", "dataset", "modules", "protocol", "measure")}
    idle = {"model": ["path", "revision"], "dataset": ["files", "hub", "reader", "part"], "protocol": [], "measure": ["name"]}
    measure = parts["measure"]
    if not parts["modules"]:
        idle["dataset"].append("calibration_windows")
    if parts["protocol"]["name"] == "all":
        idle["protocol"].append("prompt_tokens")
    if not (measure["latency"] or measure["components"] or measure["deployment"]):
        idle["measure"] += ["warmup", "repeats"]
    for on, keys in {
        "components": (),
        "energy": ("energy_window_s", "energy_rounds", "country_iso_code"),
        "deployment": ("deployment_prompt_tokens", "deployment_new_tokens", "budget_ms"),
        "signals": ("sentences", "signal_windows", "attribution"),
    }.items():
        if not measure[on]:
            idle["measure"] += [on, *keys]
    for section, unused in idle.items():
        parts[section] = {key: value for key, value in parts[section].items() if key not in unused}
    return {**parts, "execution": config["execution"], "seed": config["seed"], "threads": config["threads"]}


# Before schema 3 `measure` was flat: switches, and options that several passes shared.
_MEASUREMENTS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {  # today's key: class, yesterday's switch, today's options
    "quality": ("quality.Quality", "", {}),
    "null_control": ("null.Null", "null_control", {}),
    "audit": ("audit.Audit", "", {"probes": "probes"}),
    "flops": ("flops.Flops", "flops", {}),
    "latency": ("latency.Latency", "latency", {"warmup": "warmup", "repeats": "repeats"}),
    "memory": ("memory.Memory", "memory", {}),
    "components": ("components.Components", "components", {"warmup": "warmup", "repeats": "repeats"}),
    "energy": (
        "energy.Energy",
        "energy",
        {"country_iso_code": "country_iso_code", "window_s": "energy_window_s", "rounds": "energy_rounds"},
    ),
    "deployment": (
        "deployment.Deployment",
        "deployment",
        {
            "prompt_tokens": "deployment_prompt_tokens",
            "new_tokens": "deployment_new_tokens",
            "budget_ms": "budget_ms",
            "warmup": "warmup",
            "repeats": "repeats",
        },
    ),
    "signals": (
        "signals.Signals",
        "signals",
        {"sentences": "sentences", "windows": "signal_windows", "attribution": "attribution"},
    ),
}


def _from_schema_2(data: Mapping[str, Any]) -> dict[str, Any]:
    """Schema 2 had measurements as switches, warnings of two passes at the top, and entries for what was not measured."""
    flat = data["config"]["measure"]
    measure = {"name": flat["name"], "batch_windows": flat["batch_windows"]}
    for name, (target, switch, options) in _MEASUREMENTS.items():
        if not switch or flat[switch] not in (False, "none"):
            chosen = {today: flat[before] for today, before in options.items()}
            measure[name] = {"_target_": f"quicksilver.measure.{target}", **chosen}
    moved = {**data, "schema_version": 3, "config": {**data["config"], "measure": measure}}
    for name in ("components", "deployment"):
        warnings = moved.pop(f"{name}_timing_warnings", None)
        if name in moved:
            moved[name] = {**moved[name], "timing_warnings": warnings or []}
    return {
        key: value for key, value in moved.items() if not (key == "null" and value is None) and not (key == "texts" and not value)
    }


def _from_schema_3(data: Mapping[str, Any]) -> dict[str, Any]:
    """Schema 3 had no checksum."""
    content = {**data, "schema_version": 4}
    return {**content, CHECKSUM: checksum(content)}
