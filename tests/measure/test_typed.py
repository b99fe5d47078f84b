"""Reading json into dataclasses: whatever is written is read again, and what is not what it should be is named."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.measure.measurement import Mistyped, decoded, encoded


@dataclass(frozen=True)
class Inner:
    median: float
    samples: list[float] | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    count: int
    kind: Literal["a", "b"]
    net: float | Literal["below"]
    parts: dict[str, Inner]
    maybe: float | None
    positions: list[int] = field(default_factory=list)
    run: Inner | None = None


inner = st.builds(Inner, st.floats(allow_nan=False, allow_infinity=False), st.none() | st.lists(st.floats(-1, 1)))
outer = st.builds(
    Outer, st.text(), st.integers(), st.sampled_from(["a", "b"]), st.just("below") | st.floats(-9, 9),
    st.dictionaries(st.text(), inner, max_size=3), st.none() | st.floats(0, 1), st.lists(st.integers()), st.none() | inner,
)  # fmt: skip


@given(outer)
def test_what_is_written_is_read(one: Outer):
    assert decoded(Outer, json.loads(json.dumps(encoded(one)))) == one


GOOD = {"name": "x", "count": 1, "kind": "a", "net": 1.0, "parts": {"p": {"median": 2}}, "maybe": None}

BAD = {
    "name is 3, not text": {"name": 3},
    "count is 1.5, not a whole number": {"count": 1.5},
    "count is True, not a whole number": {"count": True},
    "kind is 'c', not one of 'a', 'b'": {"kind": "c"},
    "net is nan, not a finite number": {"net": float("nan")},
    "net is 'above', not a number": {"net": "above"},
    r"parts.p.median is inf, not a finite number": {"parts": {"p": {"median": float("inf")}}},
    r"parts.p is 3, not an object": {"parts": {"p": 3}},
    r"positions\[1\] is 'x', not a whole number": {"positions": [1, "x"]},
    r"run.median is missing": {"run": {}},
}


@pytest.mark.parametrize("says", BAD)
def test_what_is_not_what_it_should_be_is_named(says: str):
    with pytest.raises(Mistyped, match=says):
        decoded(Outer, GOOD | BAD[says])


def test_what_is_missing_is_named_and_what_is_more_is_left_alone():
    assert decoded(Outer, GOOD | {"further": 1}).parts["p"].median == 2.0
    with pytest.raises(Mistyped, match="kind is missing"):
        decoded(Outer, {key: value for key, value in GOOD.items() if key != "kind"})


def test_what_may_be_absent_is_left_out_and_what_may_be_none_is_said():
    assert encoded(Inner(1.0)) == {"median": 1.0}
    written = encoded(decoded(Outer, GOOD))
    assert written["maybe"] is None
    assert "run" not in written
