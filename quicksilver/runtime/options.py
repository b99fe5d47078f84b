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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, Union, get_args, get_origin

from quicksilver.runtime.errors import ConfigError

Check = Callable[[str, Any], object]  # of an option's name and value; raises ConfigError


class Options:
    """Base of dataclasses whose annotations are checked when an instance is made.

    A `Literal` is a choice; `Annotated[type, check]` calls `check(name, value)`, and a tuple that it returns takes the value's place.
    Other types are what they say: no text for a flag, no flag for a number. None needs an annotation that has it.
    Fields that are no argument (`init=False`) and types that only the type checker imports are left alone.

    Attributes:
        prefix: what stands before an option's name in messages, such as `schedule.`.

    Raises:
        ConfigError: an option of another type, out of range, or none of its choices.
    """

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, check in checks_of(typing.cast(Hashable, type(self))):
            checked = check(self.prefix + name, getattr(self, name))
            if isinstance(checked, tuple):
                object.__setattr__(self, name, checked)


@functools.cache
def checks_of(cls: Any) -> list[tuple[str, Check]]:
    """The check of every argument of a dataclass, by its annotation; none for a type that only the type checker imports."""
    arguments, found = {field.name for field in fields(cls) if field.init}, {}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules[base.__module__])
        for name in arguments.intersection(vars(base).get("__annotations__", ())):
            annotated = types.SimpleNamespace(__annotations__={name: base.__annotations__[name]})
            try:
                found[name] = _check_of(typing.get_type_hints(annotated, names, include_extras=True)[name])
            except (NameError, AttributeError):  # a type that was imported for the type checker alone
                found.pop(name, None)
    return [(field.name, found[field.name]) for field in fields(cls) if field.name in found]


def _check_of(hint: Any) -> Check:
    """The check of one annotation; it returns what may take the value's place."""
    if get_origin(hint) in (Union, types.UnionType):
        return functools.partial(_check_union, alternatives=get_args(hint))
    if get_origin(hint) is Literal:
        return functools.partial(check_choice, choices=get_args(hint))
    if get_origin(hint) is Annotated:
        return functools.partial(_check_all, checks=[extra for extra in hint.__metadata__ if callable(extra)])
    return functools.partial(_check_type, hint=hint)


def _check_all(name: str, value: object, checks: Sequence[Check]) -> object:
    for check in checks:
        checked = check(name, value)
        value = checked if isinstance(checked, tuple) else value
    return value


def _check_union(name: str, value: object, alternatives: Sequence[Any]) -> object:
    others = [one for one in alternatives if one is not types.NoneType]
    if value is None and len(others) < len(alternatives):
        return None
    if len(others) == 1:
        return _check_of(others[0])(name, value)
    for other in others:
        try:
            return _check_of(other)(name, value)
        except ConfigError as error:
            if get_origin(other) in (Literal, Annotated) and not isinstance(value, str):
                raise error from None
    raise ConfigError(f"{name}={value!r} must be {_any_of(alternatives)}.")


def _check_type(name: str, value: object, hint: Any) -> object:
    origin = get_origin(hint) or hint
    if origin is float:
        check_number(name, value)
    elif origin is int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ConfigError(f"{name}={value!r} must be {_name_of(hint)}.")
    elif isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str:
        if not is_list(value):
            raise ConfigError(f"{name}={value!r} must be {_name_of(hint)}.")
        if inner := get_args(hint)[:1]:
            for i, one in enumerate(value):
                _check_of(inner[0])(f"{name}[{i}]", one)
    elif isinstance(origin, type) and not isinstance(value, origin):
        raise ConfigError(f"{name}={value!r} must be {_name_of(hint)}.")
    return value


def _any_of(hints: Sequence[Any]) -> str:
    return " or ".join(_name_of(one) for one in hints if not (one is str and Path in hints))


def _name_of(hint: Any) -> str:
    """What a message calls a type."""
    names = {bool: "true or false", str: "text", int: "a whole number", float: "a number", Path: "a path", types.NoneType: "null"}
    origin = get_origin(hint) or hint
    if origin in (Union, types.UnionType):
        return _any_of(get_args(hint))
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str:
        return f"a list, each {_name_of(get_args(hint)[0])}" if get_args(hint) else "a list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    return names.get(origin) or f"a {getattr(origin, '__name__', origin)}"


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """True for a sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


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
        meant = (  # one of a list is written without brackets
            f"{name.removesuffix('[0]')}={share / 100:g} for {share:g}%"
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


def check_percent(name: str, value: object) -> float:
    """A percentage above 0 and below 100; raises ConfigError."""
    percent = check_number(name, value)
    if not 0 < percent < 100:
        raise ConfigError(f"{name}={value!r} is out of range: give more than 0 and less than 100 percent.")
    return percent


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
    if not is_list(value):
        raise ConfigError(f"{name}={value!r} must be a list of token ids, such as [50256].")
    return tuple(check_count(f"{name}[{i}]", v) for i, v in enumerate(value))


def check_fractions(name: str, value: object) -> tuple[float, float]:
    """Two fractions of depth, (first, last), in order; raises ConfigError."""
    if not is_list(value) or len(value) != 2:
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
Percent = Annotated[float, check_percent]
InnerShare = Annotated[float, check_share]  # neither 0 nor 1
Fractions = Annotated[tuple[float, float], check_fractions]  # of the depth
TokenIds = Annotated[Sequence[int], check_token_ids]
