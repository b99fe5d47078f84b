"""What a measurement is: options, a check, a pass of its own, a typed result. The harness knows none of them by name.

    @dataclass
    class Slowest(Measurement):
        share = 0.02

        def run(self, bench: Bench) -> SlowestResult: ...

A yaml of conf/measure puts it into runs, `slowest: {_target_: my_file.Slowest}`; its result stands in record.json under that name.
Light: what a record holds can be read without torch. docs/adding-a-measurement.md has an example, whole."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Options

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench


T = TypeVar("T")


class Mistyped(ValueError):
    """What was read is not what the dataclass says; the text names the place."""

    @classmethod
    def at(cls, where: str, content: Any, wanted: str) -> Mistyped:
        text = repr(content)
        return cls(f"{where} is {text if len(text) <= 40 else f'{text[:37]}…'}, not {wanted}")


def decoded(cls: type[T], content: Any, where: str = "") -> T:
    """`content`, as json gives it, as a dataclass. Further keys are left alone. Raises Mistyped: a value of another type, one
    that is not finite, or one that is missing."""
    if not isinstance(content, Mapping):
        raise Mistyped.at(where or cls.__name__, content, "an object")
    of: Any = cls
    arguments = {}
    for name, kind, required in _fields(of):
        if name in content:
            arguments[name] = value(kind, content[name], f"{where}.{name}" if where else name)
        elif required:
            raise Mistyped(f"{f'{where}.{name}' if where else name} is missing")
    try:
        return cls(**arguments)
    except ValueError as error:  # what the dataclass itself refuses
        raise Mistyped(f"{where or cls.__name__}: {error}") from error


@functools.cache
def _fields(cls: Any) -> list[tuple[str, Any, bool]]:
    """Name, type, and whether there is no default."""
    kinds, unset = typing.get_type_hints(cls), dataclasses.MISSING
    return [(one.name, kinds[one.name], one.default is unset and one.default_factory is unset) for one in dataclasses.fields(cls)]


@functools.cache
def _shape(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Of `list[int]`: list and (int,)."""
    return get_origin(kind) or kind, get_args(kind)


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def value(kind: Any, content: Any, where: str) -> Any:
    """`content` as a value of the annotated type `kind`."""
    if kind is Any or (kind in (int, str, bool) and type(content) is kind):
        return content
    origin, inner = _shape(kind)
    if origin in (Union, types.UnionType):
        return _one_of(inner, content, where)
    if origin is Literal:
        if content in inner:
            return content
        raise Mistyped.at(where, content, f"one of {', '.join(map(repr, inner))}")
    if origin in (list, tuple, Sequence):
        if not isinstance(content, list):
            raise Mistyped.at(where, content, "a list")
        read = [value(inner[0] if inner else Any, one, f"{where}[{i}]") for i, one in enumerate(content)]
        return tuple(read) if origin is tuple else read
    if origin in (dict, Mapping):
        if not isinstance(content, Mapping):
            raise Mistyped.at(where, content, "an object")
        return {key: value(inner[1] if inner else Any, one, f"{where}.{key}") for key, one in content.items()}
    if dataclasses.is_dataclass(kind):
        return decoded(typing.cast(type, kind), content, where)
    if (isinstance(content, bool) and kind in (int, float)) or not isinstance(content, (int, float) if kind is float else kind):
        raise Mistyped.at(where, content, _NAMES.get(kind, kind.__name__))
    if kind is float and not math.isfinite(content):
        raise Mistyped(f"{where} is {content}, not a finite number")
    return float(content) if kind is float else content


def _one_of(kinds: Sequence[Any], content: Any, where: str) -> Any:
    if content is None and type(None) in kinds:
        return None
    reasons = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return value(kind, content, where)
            except Mistyped as error:
                reasons.append(error)
    raise reasons[0]


def encoded(instance: Any) -> dict[str, Any]:
    """A dataclass as json takes it. A field that is None and may be left out is left out."""
    fields = {field.name: (getattr(instance, field.name), field.default) for field in dataclasses.fields(instance)}
    return {name: _encoded(content) for name, (content, default) in fields.items() if content is not None or default is not None}


def _encoded(content: Any) -> Any:
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        return encoded(content)
    if isinstance(content, Mapping):
        return {str(key): _encoded(one) for key, one in content.items()}
    return [_encoded(one) for one in content] if isinstance(content, list | tuple) else content


class Described:
    """Base of classes whose attributes may stand in their first line: `class Audit(Measurement, share=0.08)`."""

    def __init_subclass__(cls, **attributes: Any) -> None:
        super().__init_subclass__()
        for name, content in attributes.items():
            setattr(cls, name, content)


@dataclass(frozen=True)
class Result(Described):
    """What a measurement found: a dataclass of numbers, texts, lists and further dataclasses, with units in the names of its fields.

    Attributes:
        section: where it stands in record.json; None: under the measurement's name in the config; "": its fields stand beside each other
            at the top.
    """

    section: ClassVar[str | None] = None

    def line(self) -> str | None:
        """One line for a person, without the measurement's name; None: nothing to say by itself."""
        return None


@dataclass(frozen=True)
class Setting:
    """What of a run's configuration a measurement may depend on, before anything is loaded. `annotated`: the dataset has gold tags."""

    protocol: str
    window_tokens: int
    prompt_tokens: int
    execution: str
    annotated: bool = False

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raises ConfigError where the beginning of a window is no prompt of that many tokens."""
        if prompt_tokens > self.window_tokens:
            raise ConfigError(
                f"prompt_tokens={prompt_tokens}: a prompt is the beginning of a window, and a window has "
                f"protocol.window_tokens={self.window_tokens}."
            )


@dataclass
class Measurement(Options, Described, ABC):
    """One pass over a model, its windows and its modules. The options are the fields of the dataclass, checked by their annotations.

    Attributes:
        share: rough share of a run's time, beside the others' shares.
        timed: a clock is read, which `masked` execution makes worthless.
        windows_speak: windows whose scores come out alike twice say that all of it would.
        in_blocks: what it does is score all windows, in blocks that several processes may share.
        in_identity: a record without it is another record. False: no number of the others depends on it, and records that lack it count.
        of_ranks: right where a model is cut among several processes, each of which makes this pass.
        reads: folders beside the model whose files decide what is found.
        of_dense: in the dense run that other runs are compared with `always`; `never`; or `alone`: only where the dense run was asked for.
        recorded_as: the `_target_` that records name, where the class has moved since.
    """

    share: ClassVar[float] = 0.05
    timed: ClassVar[bool] = False
    windows_speak: ClassVar[bool] = False
    in_blocks: ClassVar[bool] = False
    in_identity: ClassVar[bool] = True
    of_ranks: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()
    of_dense: ClassVar[Literal["always", "alone", "never"]] = "always"
    recorded_as: ClassVar[str | None] = None

    def check(self, setting: Setting) -> None:
        """Refuse options that do not go with the run: raises ConfigError, whose message begins with the option."""

    @abstractmethod
    def run(self, bench: Bench) -> Result | None:
        """Measure. None: there is nothing to measure in this run."""

    @classmethod
    def result_class(cls) -> type[Result] | None:
        """What `run` is annotated to give; None: it does not say."""
        said = cls.run.__annotations__.get("return")
        found = vars(sys.modules[cls.__module__]).get(said.removesuffix(" | None")) if isinstance(said, str) else said
        return next((one for one in get_args(found) or (found,) if isinstance(one, type) and issubclass(one, Result)), None)

    def windows_passed(self, windows: int, window_tokens: int) -> float | None:
        """About how many windows of that length go through the model, of a text with so many; None: `share` says it, not the options."""
        return None

    def identity(self) -> dict[str, Any]:
        """The options that decide a number: all of them."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Spread:
    """Times of a few rounds, in milliseconds."""

    median: float
    iqr: float
    samples: list[float] | None = None


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of a ratio, round by round (unitless)."""

    median: float
    low: float
    high: float
