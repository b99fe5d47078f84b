"""What the quick suite leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(values: Iterable[Any], n: int = 1) -> list[Any]:
    """Values of a parametrized test, those after the first `n` marked slow: the quick suite sees that it holds, `make test-all` for which."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow if i >= n else ())
        for i, value in enumerate(values)
    ]
