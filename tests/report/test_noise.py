"""One noise floor for what is compared: pooled over runs, and a noisy run stays noisy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.report import noise


@given(floors=st.lists(st.floats(0.1, 50), min_size=1, max_size=6))
def test_no_run_is_judged_by_less_than_its_own_floor_or_the_pooled_one(floors) -> None:
    rows = [{"record": str(number), noise.FLOOR: floor} for number, floor in enumerate(floors)]
    noise.pool([*rows, *(dict(row) for row in rows)])  # a record in two rows counts once
    (pooled,) = {row[noise.POOLED] for row in rows}
    assert pooled == pytest.approx(math.sqrt(sum(floor**2 for floor in floors) / len(floors)))
    assert [row[noise.FLOOR] for row in rows] == [max(floor, pooled) for floor in floors]


def test_the_sentence_says_the_floor_what_was_timed_and_the_noisiest_run() -> None:
    rows = [{"record": "a", noise.FLOOR: 1.0}, {"record": "b", noise.FLOOR: 7.0}, {"record": "c"}]
    noise.pool(rows)
    (said,) = noise.note(rows, "a token's time")
    assert "5.0% of a token's time" in said
    assert "in 2 runs" in said
    assert "at most 7.0%" in said
    assert noise.POOLED not in rows[2]
    assert noise.note([{"record": "c"}], "a token's time") == ()
