"""Every option that an annotation restricts is checked where the object is made, and the message names option, value and remedy."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Annotated, Any, Literal

import pytest
import torch

import quicksilver.baselines
import quicksilver.fitting
import quicksilver.measure
import quicksilver.modules
from quicksilver.modules.checks import TokenMask
from quicksilver.runtime import ConfigError
from quicksilver.runtime.options import Count, Fractions, Odd, Options, Positive, Share, TokenIds, _checks, at_least

PACKAGES = (quicksilver.baselines, quicksilver.fitting, quicksilver.measure, quicksilver.modules)


def every_class() -> list[type[Options]]:
    for package in PACKAGES:
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    waiting, classes = [Options], []
    while waiting:
        classes.append(waiting.pop())
        waiting += classes[-1].__subclasses__()
    return [cls for cls in classes if cls.__module__.startswith("quicksilver.") and dataclasses.is_dataclass(cls)]


def makeable(cls: Any) -> bool:
    needed = [field for field in dataclasses.fields(cls) if field.init and field.default is field.default_factory]
    return not needed and not getattr(cls, "__abstractmethods__", None)


CHECKED = [(cls, name) for cls in every_class() if makeable(cls) for name, _ in _checks(cls)]


def test_there_are_many() -> None:
    assert len(CHECKED) > 200
    assert len({cls for cls, _ in CHECKED}) > 40


@pytest.mark.parametrize(("cls", "name"), CHECKED, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_a_value_of_no_kind_is_refused(cls: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}(='no such value'| must be)") as raised:
        cls(**{name: "no such value"})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("cls", sorted({cls for cls, _ in CHECKED}, key=lambda cls: cls.__name__))
def test_no_number_or_choice_is_left_unchecked(cls: Any) -> None:
    """But those that a class checks itself, since what they may be depends on their type."""
    itself = {"bits", "protected_bits", "tokens", "keep"}
    plain = {
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.type in ("int", "float", "int | None", "float | None")
    }
    assert plain - itself <= set()


@dataclasses.dataclass
class Example(Options):
    """One of each."""

    choice: Literal["threshold", "capacity"] = "threshold"
    share: Share = 0.5
    count: Count | None = 0
    width: Annotated[int, at_least(2)] = 4
    every: Positive = 1
    pool: Odd = 1
    window: Fractions = (0.2, 0.8)
    ids: TokenIds = ()
    mask: TokenMask = None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"choice": "treshold"}, "choice='treshold' is not one of threshold, capacity. Did you mean 'threshold'?"),
        ({"share": 1.5}, "share=1.5 is out of range; give a number from 0 to 1."),
        ({"share": float("nan")}, "share=nan is not finite; give a number from 0 to 1."),
        ({"share": True}, "share=True is not a number; give a number from 0 to 1."),
        ({"count": -1}, "count=-1 must be a whole number of at least 0."),
        ({"count": 1.0}, "count=1.0 must be a whole number of at least 0."),
        ({"width": 1}, "width=1 must be a whole number of at least 2."),
        ({"every": False}, "every=False must be a whole number of at least 1."),
        ({"pool": 4}, "pool=4 has no middle: give an odd number."),
        ({"window": (0.8, 0.2)}, "window=[0.8, 0.2] is empty: its first fraction is above its last. Give them in order, such as [0.2, 0.8]."),
        ({"window": (0.2,)}, "window=(0.2,) must be two fractions of depth, such as [0.2, 0.8]."),
        ({"window": (5, 24)}, "window[0]=5.0 is out of range; give a number from 0 to 1."),
        ({"ids": 5}, "ids=5 must be a list of token ids, such as [50256]."),
        ({"ids": [3, "a"]}, "ids[1]='a' must be a whole number of at least 0."),
        ({"mask": [True]}, "mask must be a bool tensor by slot, (S,) or (B, S), not [True]: write mask.bool() for one of numbers."),
    ],
)  # fmt: skip
def test_the_message_names_option_value_and_remedy(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Example(**options)
    assert str(raised.value) == said


def test_sequences_become_tuples_and_none_is_let_through_where_it_may_stand() -> None:
    made = Example(window=[0, 1], ids=[3, 4], count=None, mask=torch.ones(3, dtype=torch.bool))  # type: ignore[arg-type]
    assert (made.window, made.ids, made.count) == ((0.0, 1.0), (3, 4), None)
