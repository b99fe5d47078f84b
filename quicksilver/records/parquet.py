"""Tables as parquet, each column in whichever encoding is smallest. pandas reads back what was written, to the last digit."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

_LEVEL = 19  # of zstd: written once, read often
_PANDAS = b"pandas"
_PLAIN = ("int64", "float64", "object")  # parquet says as much
_DICTIONARY = "dictionary"
# Ways to write a column, by kind: which is smallest differs from column to column.
_WAYS = {
    "integer": ("PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", _DICTIONARY),
    "floating": ("PLAIN", "BYTE_STREAM_SPLIT", _DICTIONARY),
    "string": ("PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", _DICTIONARY),
    "other": ("PLAIN",),
}


def smallest(table: pa.Table, told: Mapping[str, Any] | None = None) -> bytes:
    """The table as parquet, as small as it gets; `told` is what pandas has to know of its columns beside (`description`)."""
    table = table.replace_schema_metadata(None)

    def way(name: str) -> str:
        return min(_ways(table, name), key=lambda one: len(_packed(table.select([name]), {name: one})))

    return _packed(table, {name: way(name) for name in table.column_names}, told)


def columns_of(path: Path, names: Collection[str]) -> bytes:
    """Those columns of a parquet file, as small as they get: small tables are mostly statistics, dictionaries and descriptions of themselves."""
    import pyarrow.parquet as pq

    table, frame = pq.read_table(path, columns=[*names]), pd.read_parquet(path, columns=[*names])
    packed = smallest(table, _description(table.schema.metadata, names))
    if pd.read_parquet(io.BytesIO(packed)).equals(frame):
        return packed
    content = io.BytesIO()
    frame.to_parquet(content, index=False)
    return content.getvalue()


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
