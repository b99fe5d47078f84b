"""The records of the repository: all of them in two files that pandas opens as they are.

results/records/
    records.jsonl.xz    a line a record, which is what record.json is in a record of this machine
    windows.parquet     the windows of all records, one below the other; the column `record` says whose they are
    <fingerprint>/      further files of one record, where something is drawn of them

Of hundreds of small files most would be what they have in common: together they take a sixth. A line's `windows` names the columns that its
record has, with their types, and their digest; columns that other records have are empty in its rows.

    pandas.read_json("results/records/records.jsonl.xz", lines=True)
    pandas.read_parquet("results/records/windows.parquet")
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:  # a second to import, which no refusal should wait for
    import pandas as pd
    import pyarrow as pa

RECORDS, WINDOWS = "records.jsonl.xz", "windows.parquet"
ENTRY = "windows"  # of a line: which columns the record has, and their digest
_OF = "record"  # column of the file of windows
_FINGERPRINT = re.compile(rb'\{"fingerprint":"([0-9a-f]{20})"')
_State = tuple[int, int, int]
_PANDAS = b"pandas"  # key of what pandas says of its columns
_SAID_BY_PARQUET = ("int64", "float64", "object")


def write(folder: Path, contents: Sequence[Mapping[str, Any]], frames: Mapping[str, pd.DataFrame]) -> None:
    """Write both files, the same bytes for the same records: lines of `contents`, in an order in which neighbours are alike, and windows by
    fingerprint."""
    import pyarrow as pa

    lines = [json.dumps({"fingerprint": one["fingerprint"], **one}, allow_nan=False, separators=(",", ":")) for one in contents]
    (folder / RECORDS).write_bytes(packed("".join(f"{line}\n" for line in lines).encode()))
    named = (frames[one["fingerprint"]].assign(**{_OF: one["fingerprint"]}) for one in contents)
    tables = [pa.Table.from_pandas(frame, preserve_index=False) for frame in named]
    together = pa.concat_tables([table.replace_schema_metadata(None) for table in tables], promote_options="permissive")
    (folder / WINDOWS).write_bytes(_parquet(together.select([_OF, *(name for name in together.column_names if name != _OF)])))


def packed(lines: bytes) -> bytes:
    """As `RECORDS` holds them: half of what gzip leaves, whose window ends before a line repeats what the last one said."""
    return lzma.compress(lines, preset=9)


def columns_of(path: Path, names: Collection[str]) -> bytes:
    """Those columns of a parquet file, as `_parquet` writes them; pandas reads the same from both."""
    import pandas as pd
    import pyarrow.parquet as pq

    table, frame = pq.read_table(path, columns=[*names]), pd.read_parquet(path, columns=[*names])
    # Nullable integers, say, pandas reads right only where it is told; what it says of all columns is as long as the numbers.
    told = json.loads((table.schema.metadata or {}).get(_PANDAS, b"{}"))
    columns = [one for one in told.get("columns", ()) if one["numpy_type"] not in _SAID_BY_PARQUET and one["name"] in names]
    content = _parquet(table, {**told, "columns": columns, "index_columns": [], "column_indexes": []} if columns else {})
    if pd.read_parquet(io.BytesIO(content)).equals(frame):
        return content
    plain = io.BytesIO()
    frame.to_parquet(plain, index=False)
    return plain.getvalue()


def _parquet(table: pa.Table, told: Mapping[str, Any] | None = None) -> bytes:
    """The table in two thirds of pandas' bytes: numbers as streams of bytes, all else by dictionary, without statistics; with what pandas is `told`
    of its columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = [one.name for one in table.schema if pa.types.is_integer(one.type) or pa.types.is_floating(one.type)]
    content = pa.BufferOutputStream()
    with pq.ParquetWriter(
        content, table.schema.remove_metadata(), compression="zstd", compression_level=19, write_statistics=False, store_schema=False,
        use_dictionary=[name for name in table.column_names if name not in numbers],
        column_encoding={name: "BYTE_STREAM_SPLIT" for name in numbers},
    ) as writer:  # fmt: skip
        writer.write_table(table.replace_schema_metadata(None))
        if told:
            writer.add_key_value_metadata({_PANDAS: json.dumps(told).encode()})
    packed: bytes = content.getvalue().to_pybytes()
    return packed


def described(frame: pd.DataFrame) -> dict[str, Any]:
    """`ENTRY` of the record with these windows."""
    return {"columns": {str(name): str(kind) for name, kind in frame.dtypes.items()}, "sha256": _digest(frame)}


def names(folder: Path) -> list[str]:
    """Fingerprints of the records in `folder`; none where it has no archive. Raises ConfigError: the file is damaged."""
    return list(_lines_of(folder))


def text(folder: Path, fingerprint: str) -> str | None:
    """The record's line; None: it is not there. Raises ConfigError: the file is damaged."""
    line = _lines_of(folder).get(fingerprint)
    return None if line is None else line.decode()


def windows(folder: Path, fingerprint: str, entry: Mapping[str, Any]) -> pd.DataFrame:
    """The record's windows as the run wrote them; `entry` is its `ENTRY`.
    Raises ConfigError: the file is damaged, or its rows are not those of the record."""
    import pandas as pd

    path = folder / WINDOWS
    try:
        table, arrays, places = _windows_of(path, state(path))
        first, count = places[fingerprint]
        rows, columns = slice(first, first + count), {}
        for name, kind in entry["columns"].items():
            values, there = arrays[name]
            column = values[rows] if there[rows].all() else table[name].slice(first, count).to_pylist()
            # Only a column of another type is converted: that takes ten times as long. Of objects pandas would guess a type.
            is_other = kind == "object" or kind != str(getattr(column, "dtype", ""))
            columns[name] = pd.Series(column, dtype=kind) if is_other else column
        frame = pd.DataFrame(columns)
        whole = _digest(frame) == entry["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not whole:
        raise _damaged(path, f"the windows of {fingerprint} are not those that were recorded")
    return frame


def state(path: Path) -> _State | None:
    """What changes with the file; None: it is not there."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns, found.st_ino
    return None


def _lines_of(folder: Path) -> Mapping[str, bytes]:
    path = folder / RECORDS
    return {} if (now := state(path)) is None else _lines(path, now)


@lru_cache(maxsize=4)
def _lines(path: Path, _: _State) -> Mapping[str, bytes]:
    try:
        lines = lzma.decompress(path.read_bytes()).splitlines()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _damaged(path, str(error)) from error
    found = {}
    for number, line in enumerate(lines, 1):
        if (match := _FINGERPRINT.match(line)) is None:
            raise _damaged(path, f"line {number} is no record")
        found[match[1].decode()] = line
    return found


@lru_cache(maxsize=4)
def _windows_of(path: Path, _: _State | None) -> tuple[pa.Table, Mapping[str, tuple[Any, Any]], Mapping[str, tuple[int, int]]]:
    """The whole file; each column's values (zero where it has none), and where it has one; first row and number of rows of each record."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.ParquetFile(path).read().combine_chunks()
    arrays = {}
    for name in table.column_names:
        column = table[name]
        is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        values = pc.fill_null(column, 0) if is_number else column
        arrays[name] = values.to_numpy(), pc.is_valid(column).to_numpy()
    places: dict[str, tuple[int, int]] = {}
    for row, name in enumerate(table[_OF].to_pylist()):
        first, count = places.get(name, (row, 0))
        places[name] = (first, count + 1)
    return table, arrays, places


def _digest(frame: pd.DataFrame) -> str:
    import numpy as np

    whole = hashlib.sha256()
    for name, column in frame.items():
        numbers = isinstance(column.dtype, np.dtype) and column.dtype.kind in "iufb"
        whole.update(f"{name} {column.dtype} {len(column)} ".encode())
        whole.update(column.to_numpy().tobytes() if numbers else repr(column.tolist()).encode())
    return whole.hexdigest()


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {why}. Take it from the repository again: git checkout {path}")
