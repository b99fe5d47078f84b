"""Reading JSON into dataclasses and writing them, strictly: a number is a number, it is finite, and what is missing is named.

Light: a record is read without torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

T = TypeVar("T")


class Mistyped(ValueError):
    """What was read is not what the dataclass says; the text names the place."""


def decoded(cls: type[T], content: Any, where: str = "") -> T:
    """`content`, as json gives it, as a dataclass. Further keys are left alone.

    Raises:
        Mistyped: a value of another type, one that is not finite, or one that is missing.
    """
    if not isinstance(content, Mapping):
        raise Mistyped(f"{where or cls.__name__} is {_shown(content)}, not an object")
    of: Any = cls
    types_of, arguments = _types(of), {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        place = f"{where}.{field.name}" if where else field.name
        if field.name in content:
            arguments[field.name] = value(types_of[field.name], content[field.name], place)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise Mistyped(f"{place} is missing")
    try:
        return cls(**arguments)
    except ValueError as error:  # what the dataclass itself refuses
        raise Mistyped(f"{where or cls.__name__}: {error}") from error


@functools.cache
def _types(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def value(kind: Any, content: Any, where: str) -> Any:
    """`content` as a value of the annotated type `kind`."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return content
    if origin in (Union, types.UnionType):
        return _one_of(inner, content, where)
    if origin is Literal:
        if content in inner:
            return content
        raise Mistyped(f"{where} is {_shown(content)}, not one of {', '.join(map(repr, inner))}")
    if origin in (list, tuple, Sequence):
        if not isinstance(content, list):
            raise Mistyped(f"{where} is {_shown(content)}, not a list")
        read = [value(inner[0], one, f"{where}[{i}]") for i, one in enumerate(content)]
        return tuple(read) if origin is tuple else read
    if origin in (dict, Mapping):
        if not isinstance(content, Mapping):
            raise Mistyped(f"{where} is {_shown(content)}, not an object")
        return {key: value(inner[1], one, f"{where}.{key}") for key, one in content.items()}
    if kind in (dict, Mapping):
        return value(Mapping[str, Any], content, where)
    if dataclasses.is_dataclass(kind):
        return decoded(typing.cast(type, kind), content, where)
    return _plain(kind, content, where)


def _one_of(kinds: Sequence[Any], content: Any, where: str) -> Any:
    if content is None and type(None) in kinds:
        return None
    reasons = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return value(kind, content, where)
            except Mistyped as error:
                reasons.append(str(error))
    raise Mistyped(reasons[0])


def _plain(kind: Any, content: Any, where: str) -> Any:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if kind is float and isinstance(content, int | float) and not isinstance(content, bool):
        if not math.isfinite(content):
            raise Mistyped(f"{where} is {content}, not a finite number")
        return float(content)
    if isinstance(content, kind) and not (kind is int and isinstance(content, bool)):
        return content
    raise Mistyped(f"{where} is {_shown(content)}, not {names.get(kind, kind.__name__)}")


def _shown(content: Any) -> str:
    text = repr(content)
    return text if len(text) <= 40 else f"{text[:37]}…"


def encoded(instance: Any) -> dict[str, Any]:
    """A dataclass as json takes it. A field that is None and may be left out is left out."""
    entries = {}
    for field in dataclasses.fields(instance):
        content = getattr(instance, field.name)
        if content is not None or field.default is not None:
            entries[field.name] = _encoded(content)
    return entries


def _encoded(content: Any) -> Any:
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        return encoded(content)
    if isinstance(content, Mapping):
        return {str(key): _encoded(one) for key, one in content.items()}
    return [_encoded(one) for one in content] if isinstance(content, list | tuple) else content
