"""Records that the repository has: what its tables, figures and ledger name, small enough for git.

results/records/<fingerprint>/ holds record.json and windows.parquet, and of the larger files those that something is drawn from. Parquet files
are written again in two fifths of their bytes, traces are gzipped. What was left out is named in record.json, whose checksum is made anew;
identity and fingerprint stay.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from quicksilver.harness.record import CALIBRATIONS, CHECKSUM, EVENTS, PACKED_TRACE, RECORD, TRACE, Record, checksum, load_record
from quicksilver.harness.store import KEPT, Store, described
from quicksilver.runtime.trace import pack

_LARGE_BYTES = 1_500_000  # as it would be kept
_LEFT_OUT = {TRACE, PACKED_TRACE, EVENTS}  # unless something is drawn from them
_LEVEL = 19  # of zstd: written once, read often
_PANDAS = b"pandas"
_PLAIN = ("int64", "float64", "object")  # parquet says as much


def keep(store: Store, wanted: Mapping[str, Collection[str]]) -> list[Path]:
    """Copy records from runs/ to records/, those they are compared with included; remove from there what is no longer wanted.

    Args:
        wanted: fingerprint to the names of large files to keep as well; all that are small are kept. A record with another large file is
            passed over.

    Raises:
        ConfigError: a record is not there, or not whole.
    """
    records: dict[str, tuple[Record, set[str]]] = {}

    def add(record: Record, names: Collection[str]) -> None:
        small = {
            name for name, file in record.files.items() if name not in _LEFT_OUT and _is_small(record.path / name, file.bytes)
        }
        if small | _LEFT_OUT >= set(record.files):
            records.setdefault(record.fingerprint, (record, small))[1].update(names)

    for fingerprint, names in wanted.items():
        record = load_record(store.path(fingerprint) if store.path(fingerprint).exists() else store.root / KEPT / fingerprint)
        dense = record.dense_fingerprint
        add(record, names)
        if dense is not None and dense not in wanted and dense not in records:
            made = store.path(dense)
            add(load_record(made if made.exists() else store.root / KEPT / dense), names)
    new, old = store.root / f".{KEPT}-new", store.root / KEPT
    shutil.rmtree(new, ignore_errors=True)
    for fingerprint, (record, names) in records.items():
        _copy(record, new / fingerprint, names)
    _copy_calibrations(store, [record for record, _ in records.values()], new / CALIBRATIONS)
    with store.writing():
        shutil.rmtree(old, ignore_errors=True)
        new.rename(old)
    return [old / fingerprint for fingerprint in sorted(records)]


def _copy_calibrations(store: Store, records: Collection[Record], folder: Path) -> None:
    """Those that records of the package's own text were calibrated with: a first table need not measure them again."""
    made_with: dict[str, set[str]] = {}
    for record in records:
        if record.calibration is not None and record.config["dataset"]["reader"] == "pydoc":
            made_with.setdefault(_what_was_calibrated(record.calibration.provenance), set()).update(record.calibration.signals)
    folder.mkdir(parents=True)
    for place in (store.root / KEPT / CALIBRATIONS, store.root / CALIBRATIONS):
        for path in sorted(place.glob("*.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            provenance = content["provenance"]
            if content["percentiles"].keys() <= made_with.get(_what_was_calibrated(provenance), set()):
                source = {**provenance["source"], "text": _name(provenance["source"]["text"])}
                content |= {"provenance": provenance | {"source": source}}
                (folder / path.name).write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


def _what_was_calibrated(provenance: Mapping[str, Any]) -> str:
    named = ("model_digest", "dtype", "data_digest", "windows", "window_tokens", "numerics_version")
    return json.dumps([provenance.get(name) for name in named])


def _without_places(content: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of record.json without folders of the machine that made it; nothing of them is in the identity."""
    kept = {key: entry for key, entry in content.items() if key != CHECKSUM}
    kept["config"] = kept["config"] | {"results_dir": "results", "data": {"root": None}}
    kept["data"] = kept["data"] | {"source": _name(kept["data"]["source"])}
    if kept.get("calibration"):
        calibration = dict(kept["calibration"]) | {"text_source": _name(kept["calibration"]["text_source"])}
        provenance = dict(calibration.get("provenance") or {})
        if isinstance(source := provenance.get("source"), Mapping) and isinstance(source.get("text"), str):
            provenance["source"] = {**source, "text": _name(source["text"])}
        kept["calibration"] = calibration | {"provenance": provenance}
    return kept


def _name(source: str) -> str:
    parts = source.split(" + ")  # several files, one after another
    return " + ".join("/".join(Path(part).parts[-2:]) if Path(part).is_absolute() else part for part in parts)


def _copy(record: Record, folder: Path, names: Collection[str]) -> None:
    folder.mkdir(parents=True)
    files = {}
    for name in record.files:
        plain = TRACE if name == PACKED_TRACE else name
        if plain not in names:
            continue
        kept = folder / (PACKED_TRACE if plain == TRACE else name)
        if plain == TRACE:
            kept.write_bytes(pack(record.path / name))
        elif name.endswith(".parquet"):
            kept.write_bytes(_packed(record.path / name))
        else:
            shutil.copyfile(record.path / name, kept)
        files[kept.name] = described(kept)
    had = {TRACE if name == PACKED_TRACE else name for name in record.files}
    left_out = sorted({*record.content.get("left_out", ()), *(had - set(names))})
    content = _without_places(record.content) | {"files": files, "left_out": left_out}
    text = json.dumps({**content, CHECKSUM: checksum(content)}, allow_nan=False)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def _is_small(path: Path, size: int) -> bool:
    return size < _LARGE_BYTES or (path.suffix == ".parquet" and len(_packed(path)) < _LARGE_BYTES)


def _packed(path: Path) -> bytes:
    """The same table as parquet, as small as it gets: small tables are mostly statistics, dictionaries and descriptions of themselves."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, frame = pq.read_table(path), pd.read_parquet(path)
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    content = pa.BufferOutputStream()
    with pq.ParquetWriter(
        content, table.schema.remove_metadata(), compression="zstd", compression_level=_LEVEL, use_dictionary=False, write_statistics=False,
        store_schema=False, column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
    ) as writer:  # fmt: skip
        writer.write_table(table.replace_schema_metadata(None))
        if needed := _description(table.schema.metadata):
            writer.add_key_value_metadata({_PANDAS: json.dumps(needed).encode()})
    packed: bytes = content.getvalue().to_pybytes()
    return packed if pd.read_parquet(io.BytesIO(packed)).equals(frame) else path.read_bytes()


def _description(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """What pandas has to be told about a table that it would not read right by itself: nullable integers, say. It is as long as the numbers."""
    told = json.loads((metadata or {}).get(_PANDAS, b"{}"))
    columns = [column for column in told.get("columns", ()) if column["numpy_type"] not in _PLAIN]
    return {**told, "columns": columns, "index_columns": [], "column_indexes": []} if columns else {}
