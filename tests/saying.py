"""What a text or a refusal says. Nothing here is a test."""

from collections.abc import Container, Iterator
from contextlib import contextmanager

import pytest

from quicksilver.runtime.errors import ConfigError


def unsaid(said: Container[str], *parts: str) -> list[str]:
    """Those of the parts that are not in it."""
    return [part for part in parts if part not in said]


@contextmanager
def refused_in_a_line(*parts: str, kind: type[Exception] = ConfigError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """What is called inside must be refused by an error of one line that has these parts."""
    with pytest.raises(kind) as caught:
        yield caught
    assert "\n" not in str(caught.value)
    assert unsaid(str(caught.value), *parts) == []
