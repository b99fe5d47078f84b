"""Small tables as parquet: what was written is read back, in fewer bytes."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest

from quicksilver.records.parquet import columns_of


@pytest.mark.parametrize("columns", [["count", "name", "truth", "steps", "value"], ["count", "value"]])
def test_columns_are_read_back_as_they_were_whatever_their_kind(columns, tmp_path) -> None:
    path = tmp_path / "odd.parquet"
    pd.DataFrame(
        {
            "count": pd.array([1, None, 3] * 20, dtype="Int64"), "name": ["a", "bb", None] * 20, "truth": [True, False, True] * 20,
            "steps": [[1, 2], [], [3]] * 20, "value": np.linspace(0, 1, 60, dtype="float32"),
        }
    ).to_parquet(path, index=False)  # fmt: skip
    content = columns_of(path, columns)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(content)), pd.read_parquet(path)[columns])
    assert len(content) < path.stat().st_size
