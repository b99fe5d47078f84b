"""Public calls × arguments of the wrong kind: one line, and no traceback of Python's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny

from quicksilver.measure.perplexity import Protocol
from quicksilver.modules import Halting, Replay, Schedule
from quicksilver.runs.config import compose
from quicksilver.runtime import QuickSilverError, Trace, apply

WRONG: list[Any] = ["0.2", "abc", None, float("nan"), -1, True, {}, object()]
CALLS: dict[str, Callable[[Any], object]] = {
    "from_preset of a share": lambda value: Halting.from_preset(tiny.load("gpt2"), save=value),
    "from_preset of a length": lambda value: Halting.from_preset(tiny.load("gpt2"), save=0.2, prompt_tokens=value),
    "from_preset of a model": lambda value: Halting.from_preset(value, save=0.2),
    "a model": lambda value: apply(value, []),
    "an execution": lambda value: apply(tiny.load("gpt2"), [], execution=value),
    "a trace": Replay,
    "a file": Trace.load,
    "a schedule": lambda value: Schedule(value, 0.1, 3),
    "a protocol": Protocol,
    "a length": lambda value: Protocol("all", window_tokens=value),
    "overrides": compose,
    "an override": lambda value: compose([value]),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_the_wrong_kind_is_refused_in_one_line(call: str) -> None:
    for value in WRONG:
        with pytest.raises(QuickSilverError) as raised:
            CALLS[call](value)
        assert "\n" not in str(raised.value)
