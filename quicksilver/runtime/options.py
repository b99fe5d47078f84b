"""Options that are checked where they are made: the annotation of a dataclass's field says what it may be.

    @dataclass(kw_only=True)
    class Merging(TokenPolicy):                          # every runtime module, signal and measurement has `Options` as a base
        r: Share = 0.05                                  # 0 to 1
        metric: Literal["keys", "states"] = "keys"       # one of these
        every: Annotated[int, at_least(2)] | None = None

A class with a check of its own extends `__post_init__` and calls `super().__post_init__()` first. Light: no torch."""

from __future__ import annotations

import difflib
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from quicksilver.runtime.errors import ConfigError

Check = Callable[[str, Any], object]  # of an option's name and value; raises ConfigError


class Options:
    """Base of dataclasses whose annotations are checked when an instance is made.

    A `Literal` is a choice; `Annotated[type, check]` calls `check(name, value)`, and a tuple that it returns takes the value's place.
    None is let through where the annotation has it; fields that are no argument (`init=False`) are left alone.

    Attributes:
        prefix: what stands before an option's name in messages, such as `schedule.`.

    Raises:
        ConfigError: an option out of range, or none of its choices.
    """

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, checks in _checks(typing.cast(Hashable, type(self))):
            value = getattr(self, name)
            for check in checks if value is not None else ():
                checked = check(self.prefix + name, value)
                if isinstance(checked, tuple):
                    object.__setattr__(self, name, checked)


@functools.cache
def _checks(cls: Any) -> list[tuple[str, list[Check]]]:
    arguments, found = {field.name for field in fields(cls) if field.init}, {}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules[base.__module__])
        for name in arguments.intersection(vars(base).get("__annotations__", ())):
            annotated = types.SimpleNamespace(__annotations__={name: base.__annotations__[name]})
            try:
                found[name] = list(_checks_of(typing.get_type_hints(annotated, names, include_extras=True)[name]))
            except (NameError, AttributeError):  # a type that was imported for the type checker alone
                found[name] = []
    return [(field.name, found[field.name]) for field in fields(cls) if found.get(field.name)]


def _checks_of(hint: Any) -> Iterable[Check]:
    if get_origin(hint) in (Union, types.UnionType):
        for one in get_args(hint):
            yield from _checks_of(one)
    elif get_origin(hint) is Literal:
        yield functools.partial(check_choice, choices=get_args(hint))
    elif get_origin(hint) is Annotated:
        yield from (extra for extra in hint.__metadata__ if callable(extra))


def check_number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a float.

    Raises:
        ConfigError: not a number (True and "0.1" are not), not finite, or outside [low, high].
    """
    wanted = "any finite number" if (low, high) == (-math.inf, math.inf) else f"a number from {low:g} to {high:g}"
    if high == math.inf and low > -math.inf:
        wanted = f"a finite number of at least {low:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name}={value!r} is not a number; give {wanted}.")
    value = float(value)
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} is not finite; give {wanted}.")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value!r} is out of range; give {wanted}.")
    return value


def check_share(name: str, value: object) -> float:
    """A share above 0 and below 1; raises ConfigError, which for a percentage names the share that it is."""
    share = check_number(name, value)
    if not 0 < share < 1:
        meant = (
            f"{name}={share / 100:g} for {share:g}%"
            if 1 < share < 100
            else f"more than 0 and less than 1, such as {name}=0.4 for 40%"
        )
        raise ConfigError(f"{name}={value!r} is out of range: give {meant}.")
    return share


def check_positive(name: str, value: object) -> float:
    """A finite number above 0; raises ConfigError."""
    if not check_number(name, value) > 0:
        raise ConfigError(f"{name}={value!r} is out of range; give a finite number above 0.")
    return float(typing.cast(float, value))


def check_count(name: str, value: object, low: int = 0) -> int:
    """`value` as an int of at least `low`; raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {low}.")
    return int(value)


def check_odd(name: str, value: object) -> None:
    """An odd whole number of at least 1, which has a middle; raises ConfigError."""
    if check_count(name, value, 1) % 2 == 0:
        raise ConfigError(f"{name}={value!r} has no middle: give an odd number.")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises ConfigError, with the nearest choice, when `value` is none of them."""
    choices = list(choices)
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}.{hint}")


def check_token_ids(name: str, value: object) -> tuple[int, ...]:
    """A sequence of token ids; raises ConfigError."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}={value!r} must be a list of token ids, such as [50256].")
    return tuple(check_count(f"{name}[{i}]", v) for i, v in enumerate(value))


def check_fractions(name: str, value: object) -> tuple[float, float]:
    """Two fractions of depth, (first, last), in order; raises ConfigError."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ConfigError(f"{name}={value!r} must be two fractions of depth, such as [0.2, 0.8].")
    first, last = (check_number(f"{name}[{i}]", v, 0.0, 1.0) for i, v in enumerate(value))
    if first > last:
        raise ConfigError(
            f"{name}={list(value)!r} is empty: its first fraction is above its last. Give them in order, such as [0.2, 0.8]."
        )
    return first, last


def at_least(low: int) -> Check:
    """The check of a whole number of at least `low`."""
    return functools.partial(check_count, low=low)


def between(low: float, high: float = math.inf) -> Check:
    """The check of a number from `low` to `high`."""
    return functools.partial(check_number, low=low, high=high)


Count = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
Odd = Annotated[int, check_odd]
Share = Annotated[float, between(0.0, 1.0)]
InnerShare = Annotated[float, check_share]  # neither 0 nor 1
Fractions = Annotated[tuple[float, float], check_fractions]  # of the depth
TokenIds = Annotated[Sequence[int], check_token_ids]
