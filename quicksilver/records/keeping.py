"""Records that the repository has: what its tables, figures and ledger name, small enough for git.

results/records/ holds what record.json and windows.parquet say of all of them in two files (archive.py), and in <fingerprint>/ what something is
made of beside. Parquet files are written again in a third of their bytes, arrays and traces are packed by xz; no number changes. What was left out is
named in the record, whose checksum is made anew; identity and fingerprint stay.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quicksilver.files import refuse_link
from quicksilver.records import archive
from quicksilver.records.record import CALIBRATIONS, CHECKSUM, PACKED, TRACE, WINDOWS, Record, checksum, load_record
from quicksilver.records.store import KEPT, Store, described
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import parse_json, read_json
from quicksilver.runtime.trace import pack

_INDEX = "answers.json"  # beside the records (answers.py)
ADDED = "added.json"  # beside them too: those that no table names, for the leaderboard
_LARGE_BYTES = 1_500_000  # of one file, as it would be kept


def commit_records(store: Store, wanted: Mapping[str, Collection[str]], renewed: Collection[str] | None = None) -> list[Path]:
    """Copy records from runs/ to records/, those they are compared with included; remove from there what is no longer wanted.
    Raises ConfigError: a record is not there, or not whole; records/ is a link, or has a file of somebody else. Nothing was
    changed.

    Args:
        wanted: fingerprint to what to keep beside record.json and windows.parquet: names of files, or `FILE:PATTERN` for the columns of a
            parquet file, or the arrays of a safetensors file, with such names. A record of which a file is still large is passed over.
        renewed: which of them are taken from runs/ although records/ has them; None: all that are there.

    Returns:
        Where they are: `load_record` reads each.
    """
    records: dict[str, tuple[Record, set[str]]] = {}
    old, missing, left = store.root / KEPT, dict[str, None](), [*wanted.items()][::-1]
    while left:
        fingerprint, parts = left.pop()
        made, there = store.path(fingerprint), archive.text(old, fingerprint) is not None
        if not made.exists() and not there:
            missing[fingerprint] = None
            continue
        stays = there and not (made.exists() and (renewed is None or fingerprint in renewed))
        record = load_record(old / fingerprint if stays else made)
        records.setdefault(fingerprint, (record, set()))[1].update(parts)
        if (dense := record.dense_fingerprint) is not None and dense not in records:
            left.append((dense, ()))
    if missing:
        copy = f"cp -r {' '.join(f'FOLDER/results/runs/{name}' for name in missing)} {store.runs}/"
        needs = f"A record needs the dense run that it is compared with: {copy}"
        raise ConfigError(f"{store.runs}: there is no run {', '.join(missing)}. {needs}")
    _check_own(old)
    with store.writing():
        aside = Path(tempfile.mkdtemp(prefix=f".{KEPT}-", dir=store.root))
    try:
        new = aside / "new"
        new.mkdir(mode=0o755)
        copied = {name: _copy(record, new / name, parts) for name, (record, parts) in sorted(records.items(), key=_alike)}
        lines = {name: line for name, line in copied.items() if line is not None}
        archive.write(new, [*lines.values()], {name: records[name][0].windows for name in lines})
        _copy_calibrations(store, [records[name][0] for name in sorted(lines)], new / CALIBRATIONS)
        with store.writing():
            if old.exists():
                old.rename(aside / "old")
            new.rename(old)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return [old / name for name in sorted(lines)]


def _check_own(folder: Path) -> None:
    """Refuse a folder that holds more than `keep` writes into it: all of it is about to be replaced."""
    refuse_link(folder)
    own = {archive.RECORDS, archive.WINDOWS, _INDEX, ADDED}
    for name in archive.names(folder):
        own |= {f"{name}/{file}" for file in parse_json(archive.text(folder, name) or "{}").get("files", ())}
    for place, folders, files in os.walk(folder):
        for path in sorted(Path(place) / name for name in (*files, *folders)):
            calibration = path.parent == folder / CALIBRATIONS and path.suffix == ".json"
            mine = path.is_dir() or calibration or path.relative_to(folder).as_posix() in own
            if path.is_symlink() or not mine:
                raise ConfigError(f"{path} is none of the repository's records, and {folder} is replaced whole: move it away.")


def _alike(item: tuple[str, tuple[Record, Any]]) -> tuple[str, ...]:
    """Order in which neighbours have most in common: what repeats is stored once."""
    fingerprint, (record, _) = item
    against = record.dense_fingerprint or fingerprint
    return (record.model.name, record.data.name, record.protocol.name, against, *record.modules, record.label, fingerprint)


def _copy(record: Record, folder: Path, parts: Collection[str]) -> dict[str, Any] | None:
    """Write further files of the record as they are kept; what its line says. None: a file of it is too large."""
    contents, left_out = {}, {*record.content.get("left_out", ())}
    for name in record.files:
        plain = name.removesuffix(PACKED)
        patterns = {pattern or "*" for file, _, pattern in (part.partition(":") for part in parts) if file == plain}
        if patterns:
            content, rest = _content(record, name, patterns)
            contents[plain + PACKED if plain.endswith(".safetensors") else name] = content
            left_out |= {f"{plain}:{one}" for one in rest}
        elif name != WINDOWS:
            left_out.add(plain)
    if any(len(content) > _LARGE_BYTES for content in contents.values()):
        return None
    for name, packed in contents.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(packed)
    files = {name: described(folder / name) for name in contents}
    more = {"files": files, archive.ENTRY: archive.described(record.windows), "left_out": sorted(left_out), "tuned": record.tuned}
    data = _without_places(record.content) | more
    return {**data, CHECKSUM: checksum(data)}


def _copy_calibrations(store: Store, records: Collection[Record], folder: Path) -> None:
    """Those that records of the package's own text were calibrated with: a first table need not measure them again."""
    made_with: dict[str, set[str]] = {}
    for record in records:
        if record.calibration is not None and record.config["dataset"]["reader"] == "pydoc":
            made_with.setdefault(_what_was_calibrated(record.calibration.provenance), set()).update(record.calibration.signals)
    folder.mkdir(parents=True)
    for place in (store.root / KEPT / CALIBRATIONS, store.root / CALIBRATIONS):
        for path in sorted(place.glob("*.json")):
            content = read_json(path)
            if content["percentiles"].keys() <= made_with.get(_what_was_calibrated(content["provenance"]), set()):
                content |= {"provenance": _without_folder(content["provenance"])}
                (folder / path.name).write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


def _what_was_calibrated(provenance: Mapping[str, Any]) -> str:
    named = ("model_digest", "dtype", "data_digest", "windows", "window_tokens", "numerics_version")
    return json.dumps([provenance.get(name) for name in named])


def _without_places(content: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of record.json without folders of the machine that made it, and without options of measurements that were not made: an eighth
    of a small record. The identity has none of them."""
    config, data, calibration = content["config"], content["data"], content.get("calibration")
    asked = config["measure"].items()
    measure = {name: one for name, one in asked if not (isinstance(one, Mapping) and one.get("enabled") is False)}
    kept = {key: entry for key, entry in content.items() if key != CHECKSUM}
    kept["config"] = config | {"results_dir": "results", "data": {"root": None}, "measure": measure}
    kept["data"] = data | {"source": _name(data["source"])}
    if calibration:
        named = {"text_source": _name(calibration["text_source"]), "provenance": _without_folder(calibration["provenance"])}
        kept["calibration"] = calibration | named
    return kept


def _without_folder(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of a calibration; its text by its name."""
    source = provenance.get("source", {})
    return {**provenance, "source": {**source, "text": _name(source["text"])}} if "text" in source else {**provenance}


def _name(source: str) -> str:
    parts = source.split(" + ")  # several files, one after another
    return " + ".join("/".join(Path(part).parts[-2:]) if Path(part).is_absolute() else part for part in parts)


def _content(record: Record, name: str, patterns: Collection[str]) -> tuple[bytes, list[str]]:
    """What is kept of a file, and the names of its columns or arrays that no pattern names."""
    path, plain = record.path / name, name.removesuffix(PACKED)
    if plain == TRACE:
        return pack(path), []
    if plain.endswith(".safetensors"):
        from safetensors.numpy import save

        arrays = record.arrays(plain)
        chosen, rest = _chosen(sorted(arrays), patterns)
        return lzma.compress(save({name: arrays[name] for name in chosen}), preset=9), rest
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        chosen, rest = _chosen(pq.read_schema(path).names, patterns)
        return archive.columns_of(path, chosen), rest
    return path.read_bytes(), []


def _chosen(names: Collection[str], patterns: Collection[str]) -> tuple[list[str], list[str]]:
    chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return chosen, [name for name in names if name not in chosen]
