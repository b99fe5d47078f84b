"""Every option that an annotation restricts is checked where the object is made, and the message names option, value and remedy."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pkgutil
import random
import re
import time
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

import quicksilver.baselines
import quicksilver.cli.commands
import quicksilver.fitting
import quicksilver.measure
import quicksilver.modules
from quicksilver.modules.checks import TokenMask
from quicksilver.modules.halting import Halting
from quicksilver.runtime import ConfigError
from quicksilver.runtime.options import Count, Fractions, Odd, Options, Positive, Share, TokenIds, at_least

PACKAGES = (quicksilver.baselines, quicksilver.cli.commands, quicksilver.fitting, quicksilver.measure, quicksilver.modules)


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


CLASSES = sorted((cls for cls in every_class() if makeable(cls)), key=lambda cls: (cls.__module__, cls.__name__))
# What a value may be accepted for: a word of the annotation. What has none is wrong everywhere.
WRONG: list[tuple[Any, str]] = [
    ("no such value", r"(?<!Literal)\bstr\b|Path"), ("no", r"\bstr\b|Path"), ("ü", r"\bstr\b|Path"), ("", r"\bstr\b|Path"), ("p101", r"\bstr\b|Path"),
    ("0.2", r"\bstr\b|Path"), (b"0.2", "never"), (None, "None|TokenMask"), (True, "bool"), (math.nan, "never"), (math.inf, "never"), (-math.inf, "never"),
    (-1, "int\\b.*None|-1.0"), (-0.5, "-1.0"), (1j, "never"), (object(), "never"), (torch.tensor(0.5), "never"), ([], "Sequence|list|TokenIds"),
    (["no"], r"Sequence\[int \| str\]|list\[str\]"), ([[]], "never"), ([math.nan], "never"), ([True], "never"), ([-1], "Sequence\\[int"), ({}, "dict"),
    ({"no": 1}, "dict"), (set(), "never"), (lambda: None, "never"), (Halting, "never"),
]  # fmt: skip
FIELDS = [(cls, field) for cls in CLASSES for field in dataclasses.fields(cls) if field.init]
UNSEEN = {"architecture", "lens"}  # `LensEntropy` is given them by `bound`, not by a person


def test_the_generator_is_large() -> None:
    assert len(FIELDS) * len(WRONG) > 9_000
    assert len(CLASSES) > 55


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_wrong_value_of_any_option_is_refused_in_one_line_that_names_it(cls: Any) -> None:
    found = []
    for field in dataclasses.fields(cls):
        for value, where in WRONG if field.init and field.name not in UNSEEN else ():
            said = refusal(cls, field.name, value)
            if said is None and not re.search(where, field.type):
                found.append(f"{field.name}: {field.type} = {value!r} is accepted")
            if said is not None and ("\n" in said or field.name not in said):
                found.append(f"{field.name}={value!r}: {said}")
    assert not found


def drawn(chance: random.Random) -> tuple[Any, str]:
    """A wrong value and where it may stand: as in `WRONG`, with other letters, numbers, and depths."""
    text = "".join(chance.choices("aZü0.9-_[]{}=,:%\n\0 😀", k=chance.randint(1, 12)))
    number = chance.choice([1, -1]) * 10 ** chance.uniform(-12, 30)
    plain: list[tuple[Any, str]] = [
        (text, r"\bstr\b|Path"), (text.encode(), "never"), (complex(number, 1), "never"), (number, ""), (int(number), ""), (np.float32(number), ""),
        (range(chance.randint(-3, 9)), "Sequence|list|TokenIds|Fractions|Thresholds"), (torch.full((2,), number), "never"), ({text: number}, "dict"), ({number}, "never"),
    ]  # fmt: skip
    value, where = chance.choice(plain)
    for _ in range(chance.choice([0, 0, 1, 2, 40])):
        value, where = [value], r"Sequence|list|TokenIds|Fractions|Thresholds" if where != "never" else where
    return value, where


@pytest.mark.slow
def test_ten_times_as_many_wrong_values_by_a_seed() -> None:
    seed = int(os.environ.get("FAULTS_SEED", time.time() // 86400))  # another one every night; the message names it
    chance, found = random.Random(seed), []
    for cls, field in FIELDS * (10 * len(WRONG)):
        value, where = drawn(chance)
        try:
            said = refusal(cls, field.name, value) if field.name not in UNSEEN else field.name
        except Exception as error:
            found.append(f"{cls.__name__}.{field.name}={value!r:.80}: {type(error).__name__}: {error}")
            continue
        if said is None and not re.search(where, field.type):
            found.append(f"{cls.__name__}.{field.name}: {field.type} = {value!r:.80} is accepted")
        if said is not None and (len(said.splitlines()) > 1 or field.name not in said):
            found.append(f"{cls.__name__}.{field.name}={value!r:.80}: {said}")
    assert not found, f"FAULTS_SEED={seed}"


def refusal(cls: Any, name: str, value: Any) -> str | None:
    """What the ConfigError says; None: the value is accepted."""
    try:
        cls(**{name: value})
    except ConfigError as error:
        return str(error)
    return None


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
        ({"mask": [True]}, "mask must be a bool tensor by slot, (S,) or (B, S), not [True]: write mask.bool()."),
    ],
)  # fmt: skip
def test_the_message_names_option_value_and_remedy(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Example(**options)
    assert str(raised.value) == said


def test_sequences_become_tuples_and_none_is_let_through_where_it_may_stand() -> None:
    made = Example(window=[0, 1], ids=[3, 4], count=None, mask=torch.ones(3, dtype=torch.bool))  # type: ignore[arg-type]
    assert (made.window, made.ids, made.count) == ((0.0, 1.0), (3, 4), None)
