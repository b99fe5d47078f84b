"""One noise floor for what is compared: pooled over runs, and a noisy run stays noisy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.report import comparison


@given(floors=st.lists(st.floats(0.1, 50), min_size=1, max_size=6))
def test_no_run_is_judged_by_less_than_its_own_floor_or_the_pooled_one(floors) -> None:
    rows = [{"record": str(number), comparison.FLOOR: floor} for number, floor in enumerate(floors)]
    comparison.pool_noise([*rows, *(dict(row) for row in rows)])  # a record in two rows counts once
    (pooled,) = {row[comparison.POOLED] for row in rows}
    assert pooled == pytest.approx(math.sqrt(sum(floor**2 for floor in floors) / len(floors)))
    assert [row[comparison.FLOOR] for row in rows] == [max(floor, pooled) for floor in floors]


def test_the_sentence_says_the_floor_what_was_timed_and_the_noisiest_run() -> None:
    rows = [{"record": "a", comparison.FLOOR: 1.0}, {"record": "b", comparison.FLOOR: 7.0}, {"record": "c"}]
    comparison.pool_noise(rows)
    (said,) = comparison.noise_note(rows, "a token's time")
    assert "5.0% of a token's time" in said
    assert "in 2 runs" in said
    assert "at most 7.0%" in said
    assert comparison.POOLED not in rows[2]
    assert comparison.noise_note([{"record": "c"}], "a token's time") == ()
