"""What the quick suite leaves to `make test-all`."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

whole = False  # whether slow tests run as well; set by conftest.py before any test is collected


def first(values: Iterable[Any], n: int = 1) -> list[Any]:
    """Values of a parametrized test, those after the first `n` marked slow: the quick suite sees that it holds, `make test-all` for which."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow if i >= n else ())
        for i, value in enumerate(values)
    ]


def diagonal(*axes: Iterable[Any], n: int | None = None) -> list[Any]:
    """Every combination of the axes' values, the quick ones first: `n` steps (the longest axis's) along all axes at once, each begun again at its end."""
    values = [list(axis) for axis in axes]
    steps = max(map(len, values)) if n is None else n
    quick = {tuple(i % len(axis) for axis in values) for i in range(steps)}
    places = sorted(itertools.product(*(range(len(axis)) for axis in values)), key=lambda place: place not in quick)
    return first((tuple(axis[i] for axis, i in zip(values, place, strict=True)) for place in places), len(quick))


def draws(n: int) -> int:
    """How many inputs a property draws: all `n` in `make test-all`, three of ten in the quick suite."""
    return n if whole else max(1, round(0.3 * n))
