"""Records that the repository has: what its tables, figures and ledger name, small enough for git.

results/records/<fingerprint>/ holds record.json and windows.parquet, and of the further files what something is made of. Parquet files are
written again in a third of their bytes, arrays and traces are gzipped; no number changes. What was left out is named in record.json, whose
checksum is made anew; identity and fingerprint stay.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from quicksilver.harness.record import CALIBRATIONS, CHECKSUM, PACKED, RECORD, TRACE, WINDOWS, Record, checksum, load_record
from quicksilver.harness.store import KEPT, Store, described
from quicksilver.runtime.trace import pack

if TYPE_CHECKING:
    import pyarrow as pa

_LARGE_BYTES = 1_500_000  # of one file, as it would be kept
_LEVEL = 19  # of zstd: written once, read often
_PANDAS = b"pandas"
_PLAIN = ("int64", "float64", "object")  # parquet says as much
_DICTIONARY = "dictionary"
# Ways to write a column, by kind: which is smallest differs from column to column, and small files are all that is kept.
_WAYS = {
    "integer": ("PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", _DICTIONARY),
    "floating": ("PLAIN", "BYTE_STREAM_SPLIT", _DICTIONARY),
    "string": ("PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", _DICTIONARY),
    "other": ("PLAIN",),
}


def keep(store: Store, wanted: Mapping[str, Collection[str]]) -> list[Path]:
    """Copy records from runs/ to records/, those they are compared with included; remove from there what is no longer wanted.

    Args:
        wanted: fingerprint to what to keep beside record.json and windows.parquet: names of files, or `FILE:PATTERN` for the columns of a
            parquet file, or the arrays of a safetensors file, with such names. A record of which a file is still large is passed over.

    Raises:
        ConfigError: a record is not there, or not whole.
    """
    records: dict[str, tuple[Record, set[str]]] = {}

    def add(fingerprint: str, parts: Collection[str]) -> Record:
        made = store.path(fingerprint)
        record = load_record(made if made.exists() else store.root / KEPT / fingerprint)
        records.setdefault(fingerprint, (record, {WINDOWS}))[1].update(parts)
        return record

    for fingerprint, parts in wanted.items():
        dense = add(fingerprint, parts).dense_fingerprint
        if dense is not None:
            add(dense, ())
    new, old = store.root / f".{KEPT}-new", store.root / KEPT
    shutil.rmtree(new, ignore_errors=True)
    kept = [fingerprint for fingerprint, (record, parts) in sorted(records.items()) if _copy(record, new / fingerprint, parts)]
    _copy_calibrations(store, [records[fingerprint][0] for fingerprint in kept], new / CALIBRATIONS)
    with store.writing():
        shutil.rmtree(old, ignore_errors=True)
        new.rename(old)
    return [old / fingerprint for fingerprint in kept]


def _copy(record: Record, folder: Path, parts: Collection[str]) -> bool:
    """Write the record as it is kept; False: a file of it is too large."""
    contents, left_out = {}, {*record.content.get("left_out", ())}
    for name in record.files:
        plain = name.removesuffix(PACKED)
        patterns = {pattern or "*" for file, _, pattern in (part.partition(":") for part in parts) if file == plain}
        if patterns:
            content, rest = _content(record.path / name, patterns)
            contents[plain + PACKED if plain.endswith(".safetensors") else name] = content
            left_out |= {f"{plain}:{one}" for one in rest}
        else:
            left_out.add(plain)
    if any(len(content) > _LARGE_BYTES for content in contents.values()):
        return False
    folder.mkdir(parents=True)
    for name, packed in contents.items():
        (folder / name).write_bytes(packed)
    files = {name: described(folder / name) for name in contents}
    data = _without_idle(_without_places(record.content)) | {"files": files, "left_out": sorted(left_out)}
    text = json.dumps({**data, CHECKSUM: checksum(data)}, allow_nan=False, separators=(",", ":"))
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")
    return True


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


def _without_idle(content: dict[str, Any]) -> dict[str, Any]:
    """The same without the options of measurements that were not made: an eighth of a small record, and nothing is of them."""
    config = content["config"]
    measure = {
        name: one for name, one in config["measure"].items() if not (isinstance(one, Mapping) and one.get("enabled") is False)
    }
    return content | {"config": config | {"measure": measure}}


def _name(source: str) -> str:
    parts = source.split(" + ")  # several files, one after another
    return " + ".join("/".join(Path(part).parts[-2:]) if Path(part).is_absolute() else part for part in parts)


# --- files ------------------------------------------------------------------------------------------------------------------------


def _content(path: Path, patterns: Collection[str]) -> tuple[bytes, list[str]]:
    """What is kept of a file, and the names of the columns or arrays that are not."""
    plain = path.name.removesuffix(PACKED)
    if plain == TRACE:
        return pack(path), []
    if plain.endswith(".safetensors"):
        return _arrays(path, patterns)
    return _table(path, patterns) if path.suffix == ".parquet" else (path.read_bytes(), [])


def _chosen(names: Iterable[str], patterns: Collection[str]) -> tuple[list[str], list[str]]:
    """Those that a pattern names, and the others."""
    split: tuple[list[str], list[str]] = ([], [])
    for name in names:
        split[not any(fnmatchcase(name, pattern) for pattern in patterns)].append(name)
    return split


def _arrays(path: Path, patterns: Collection[str]) -> tuple[bytes, list[str]]:
    from safetensors.numpy import load, save

    content = path.read_bytes()
    arrays = load(gzip.decompress(content) if path.suffix == PACKED else content)
    chosen, rest = _chosen(sorted(arrays), patterns)
    return gzip.compress(save({name: arrays[name] for name in chosen}), mtime=0), rest


def _table(path: Path, patterns: Collection[str]) -> tuple[bytes, list[str]]:
    """The same columns as parquet, as small as they get: small tables are mostly statistics, dictionaries and descriptions of themselves."""
    import pyarrow.parquet as pq

    chosen, rest = _chosen(pq.read_schema(path).names, patterns)
    table, frame = pq.read_table(path, columns=chosen), pd.read_parquet(path, columns=chosen)
    told = _description(table.schema.metadata, chosen)
    table = table.replace_schema_metadata(None)

    def smallest(name: str) -> str:
        return min(_ways(table, name), key=lambda way: len(_packed(table.select([name]), {name: way})))

    ways = {name: smallest(name) for name in chosen}
    packed = _packed(table, ways, told)
    if pd.read_parquet(io.BytesIO(packed)).equals(frame):
        return packed, rest
    content = io.BytesIO()
    frame.to_parquet(content, index=False)
    return content.getvalue(), rest


def _ways(table: pa.Table, name: str) -> tuple[str, ...]:
    import pyarrow as pa

    kind = table.schema.field(name).type
    is_string = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return _WAYS[
        "integer"
        if pa.types.is_integer(kind)
        else "floating"
        if pa.types.is_floating(kind)
        else "string"
        if is_string
        else "other"
    ]


def _packed(table: pa.Table, ways: Mapping[str, str], told: Mapping[str, Any] | None = None) -> bytes:
    """Parquet with each column written its way; columns of lists are written plainly."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    nested = {field.name for field in table.schema if pa.types.is_nested(field.type)}
    content = pa.BufferOutputStream()
    with pq.ParquetWriter(
        content, table.schema, compression="zstd", compression_level=_LEVEL, write_statistics=False, store_schema=False,
        use_dictionary=[name for name, way in ways.items() if way == _DICTIONARY],
        column_encoding={name: way for name, way in ways.items() if way != _DICTIONARY and name not in nested},
    ) as writer:  # fmt: skip
        writer.write_table(table)
        if told:
            writer.add_key_value_metadata({_PANDAS: json.dumps(told).encode()})
    packed: bytes = content.getvalue().to_pybytes()
    return packed


def _description(metadata: Mapping[bytes, bytes] | None, names: Collection[str]) -> dict[str, Any]:
    """What pandas has to be told about columns that it would not read right by itself: nullable integers, say. It is as long as the numbers."""
    told = json.loads((metadata or {}).get(_PANDAS, b"{}"))
    columns = [one for one in told.get("columns", ()) if one["numpy_type"] not in _PLAIN and one["name"] in names]
    return {**told, "columns": columns, "index_columns": [], "column_indexes": []} if columns else {}
