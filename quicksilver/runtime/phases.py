"""What the runtime is doing at a moment, for a measurement that takes a pass's time apart.

A function of the runtime that belongs to a phase is marked with `@phase(name)`. While an observer is registered by `observed`, it is
told when a phase begins and ends; phases nest. Without an observer a mark costs one look at a list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

PHASES: Mapping[str, str] = {
    "runtime": "everything around one decoder layer that is in no other phase: planning, masks, bookkeeping",
    "layer": "the model's own decoder layer",
    "halted_kv": "K/V of halted tokens, projected, copied or predicted",
    "gather": "packing the tokens that are computed",
    "scatter": "putting their states back",
    "decide": "asking the modules, their signals included",
    "fuse": "merging states of tokens, or entries of the cache",
    "write_kv": "planning and writing the cache",
    "quantize": "coding and decoding; not the products",
}
"""Name and meaning of each phase."""


class PhaseObserver(Protocol):
    """What is told: `enter` and `leave` come in pairs, the innermost phase last in and first out."""

    def enter(self, phase: str) -> None: ...

    def leave(self) -> None: ...


_observers: list[PhaseObserver] = []
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@contextmanager
def observed(observer: PhaseObserver) -> Iterator[None]:
    """Tell `observer` about the phases of every run in this process while the context is open."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def phase(name: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Mark a function as a phase of the runtime.

    Raises:
        KeyError: a name that is not in `PHASES`.
    """
    _ = PHASES[name]

    def marked(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def told(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            if not _observers:
                return function(*args, **kwargs)
            observers = list(_observers)
            for observer in observers:
                observer.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                for observer in observers:
                    observer.leave()

        return told

    return marked
