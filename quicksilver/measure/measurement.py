"""What a measurement is: options, a check, a pass of its own, a typed result. The harness knows none of them by name.

    @dataclass
    class Slowest(Measurement):
        share = 0.02

        def run(self, bench: Bench) -> SlowestResult: ...

A yaml of conf/measure puts it into runs, `slowest: {_target_: my_file.Slowest}`; its result stands in record.json under that name.
Light: what a record holds can be read without torch. docs/adding-a-measurement.md has an example, whole.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from quicksilver.measure.typed import decoded, encoded
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench


@dataclass(frozen=True)
class Result:
    """What a measurement found: a dataclass of numbers, texts, lists and further dataclasses, with units in the names of its fields.

    Attributes:
        section: where it stands in record.json; None: under the measurement's name in the config; "": its fields stand beside each other
            at the top.
    """

    section: ClassVar[str | None] = None

    def line(self) -> str | None:
        """One line for a person, without the measurement's name; None: nothing to say by itself."""
        return None

    def to_json(self) -> Any:
        """As record.json has it."""
        return encoded(self)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """From what `to_json` gave.

        Raises:
            Mistyped: it is not what the fields say.
        """
        return decoded(cls, content)


@dataclass(frozen=True)
class Setting:
    """What of a run's configuration a measurement may depend on, before anything is loaded. `annotated`: the dataset has gold tags."""

    protocol: str
    window_tokens: int
    prompt_tokens: int
    execution: str
    annotated: bool = False


@dataclass
class Measurement(ABC):
    """One pass over a model, its windows and its modules. The options are the fields of the dataclass.

    Attributes:
        share: rough share of a run's time, beside the others' shares.
        timed: a clock is read, which `masked` execution makes worthless.
        windows_speak: windows whose scores come out alike twice say that all of it would.
        in_identity: a record without it is another record. False: no number of the others depends on it, and records that lack it count.
        of_ranks: right where a model is cut among several processes, each of which makes this pass.
        reads: folders beside the model whose files decide what is found.
        of_dense: in the dense run that other runs are compared with `always`; `never`; or `alone`: only where the dense run was asked for.
    """

    share: ClassVar[float] = 0.05
    timed: ClassVar[bool] = False
    windows_speak: ClassVar[bool] = False
    in_identity: ClassVar[bool] = True
    of_ranks: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()
    of_dense: ClassVar[Literal["always", "alone", "never"]] = "always"

    def check(self, setting: Setting) -> None:  # noqa: B027  (optional)
        """Refuse options out of range, or that do not go with the run: raises ConfigError, whose message begins with the option."""

    @abstractmethod
    def run(self, bench: Bench) -> Result | None:
        """Measure. None: there is nothing to measure in this run."""

    def identity(self) -> dict[str, Any]:
        """The options that decide a number: all of them."""
        return dataclasses.asdict(self)


def at_least(option: str, value: float, least: float) -> None:
    """Raises ConfigError, naming the option."""
    if value < least:
        raise ConfigError(f"{option}={value:g} is out of range: at least {least:g}.")


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
