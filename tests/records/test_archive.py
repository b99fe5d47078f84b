"""Many records in two files: each is read back as it was written, and what was changed is not believed."""

from __future__ import annotations

import io
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.records import archive
from quicksilver.runtime.errors import ConfigError

KINDS = ("int64", "float64", "Int64", "object")


@st.composite
def frames(draw):
    """Windows of one record: columns that other records lack, or have with another type."""
    rows = draw(st.integers(1, 5))
    kinds = draw(st.dictionaries(st.sampled_from(["window", "nll_nats", "bytes", "note"]), st.sampled_from(KINDS), min_size=1))
    values = {
        "int64": st.integers(-(2**53), 2**53),
        "float64": st.floats(allow_infinity=False),
        "Int64": st.one_of(st.integers(-(2**53), 2**53), st.none()),
        "object": st.one_of(st.text(max_size=3), st.none()),
    }
    kinds = {name: "object" if name == "note" else kind.replace("object", "float64") for name, kind in kinds.items()}
    return pd.DataFrame(
        {name: pd.Series(draw(st.lists(values[kind], min_size=rows, max_size=rows)), dtype=kind) for name, kind in kinds.items()}
    )


def line(number: int, frame: pd.DataFrame) -> dict:
    return {"ppl": 2.5, "fingerprint": f"{number:020x}", archive.ENTRY: archive.described(frame)}


@given(drawn=st.lists(frames(), min_size=1, max_size=4))
def test_windows_are_read_back_to_the_last_digit(drawn, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("records")
    lines = [line(number, frame) for number, frame in enumerate(drawn)]
    archive.write(folder, lines, {one["fingerprint"]: frame for one, frame in zip(lines, drawn, strict=True)})
    assert archive.names(folder) == [one["fingerprint"] for one in lines]
    for one, frame in zip(lines, drawn, strict=True):
        entry = json.loads(archive.text(folder, one["fingerprint"]))[archive.ENTRY]
        assert entry == one[archive.ENTRY]
        pd.testing.assert_frame_equal(archive.windows(folder, one["fingerprint"], entry), frame, check_exact=True)


@pytest.fixture
def two(tmp_path):
    """A folder of two records, and their windows."""
    drawn = [pd.DataFrame({"window": range(size), "nll_nats": np.linspace(1, 2, size)}) for size in (3, 5)]
    lines = [line(number, frame) for number, frame in enumerate(drawn)]
    archive.write(tmp_path, lines, {one["fingerprint"]: frame for one, frame in zip(lines, drawn, strict=True)})
    return tmp_path, lines, drawn


def test_pandas_opens_both_files_alone(two) -> None:
    folder, lines, drawn = two
    records = pd.read_json(folder / archive.RECORDS, lines=True, dtype={"fingerprint": str})
    assert records["fingerprint"].tolist() == [one["fingerprint"] for one in lines]
    windows = pd.read_parquet(folder / archive.WINDOWS)
    assert windows.groupby("record").size().tolist() == [len(frame) for frame in drawn]


def test_a_folder_without_an_archive_has_no_records(tmp_path) -> None:
    assert archive.names(tmp_path) == []
    assert archive.text(tmp_path, "0" * 20) is None


def test_what_was_changed_or_damaged_is_said_with_the_remedy(two) -> None:
    folder, lines, drawn = two
    entry, name = lines[0][archive.ENTRY], lines[0]["fingerprint"]
    other = [drawn[0].assign(nll_nats=drawn[0]["nll_nats"] + 1e-9), drawn[1]]
    archive.write(folder, lines, {one["fingerprint"]: frame for one, frame in zip(lines, other, strict=True)})
    with pytest.raises(ConfigError, match=f"windows of {name} are not those that were recorded.*git checkout"):
        archive.windows(folder, name, entry)
    (folder / archive.WINDOWS).write_bytes(b"cut")
    with pytest.raises(ConfigError, match="windows.parquet is damaged"):
        archive.windows(folder, name, entry)
    (folder / archive.RECORDS).write_bytes(archive.packed(b"{}\n"))
    with pytest.raises(ConfigError, match="line 1 is no record"):
        archive.names(folder)
    (folder / archive.RECORDS).write_bytes(b"cut")
    with pytest.raises(ConfigError, match="records.jsonl.xz is damaged"):
        archive.text(folder, name)


@pytest.mark.parametrize("columns", [["count", "name", "truth", "steps", "value"], ["count", "value"]])
def test_columns_are_read_back_as_they_were_whatever_their_kind(columns, tmp_path) -> None:
    path = tmp_path / "odd.parquet"
    pd.DataFrame(
        {
            "count": pd.array([1, None, 3] * 20, dtype="Int64"), "name": ["a", "bb", None] * 20, "truth": [True, False, True] * 20,
            "steps": [[1, 2], [], [3]] * 20, "value": np.linspace(0, 1, 60, dtype="float32"),
        }
    ).to_parquet(path, index=False)  # fmt: skip
    content = archive.columns_of(path, columns)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(content)), pd.read_parquet(path)[columns])
    assert len(content) < path.stat().st_size
