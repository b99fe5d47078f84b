"""Checks of options, and fractions of depth. Every message names the option, the value and what to give instead."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

from quicksilver.runtime.errors import ConfigError


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
    """A share of the work, above 0 and below 1; raises ConfigError, which for a percentage names the share that it is."""
    share = check_number(name, value)
    if not 0 < share < 1:
        meant = (
            f"{name}={share / 100:g} for {share:g}%"
            if 1 < share < 100
            else f"more than 0 and less than 1, such as {name}=0.4 for 40%"
        )
        raise ConfigError(f"{name}={value!r} is no share of the work: give {meant}.")
    return share


def check_count(name: str, value: object, low: int = 0) -> int:
    """`value` as an int of at least `low`; raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {low}.")
    return int(value)


def check_token_ids(name: str, value: object) -> tuple[int, ...]:
    """A sequence of token ids; raises ConfigError."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}={value!r} must be a list of token ids, such as [50256].")
    return tuple(check_count(f"{name}[{i}]", v) for i, v in enumerate(value))


def check_known_ids(name: str, ids: Iterable[int], vocabulary: int) -> None:
    """Raises ConfigError when one of `ids` is beyond the model's vocabulary: it would never match, and nothing would say so."""
    beyond = [i for i in ids if i >= vocabulary]
    if beyond:
        raise ConfigError(
            f"{name} has the token id {beyond[0]}, and the model's vocabulary ends at {vocabulary - 1} ({vocabulary} tokens): "
            "give ids of this model's tokenizer."
        )


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises ConfigError, with the nearest choice, when `value` is none of them."""
    choices = list(choices)
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}.{hint}")


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


def layer_after(fraction: float, n_layers: int) -> int:
    """Index of the layer after which `fraction` of the depth has been gone through; at least one layer always has.

    >>> layer_after(0.2, 30), layer_after(0.8, 30), layer_after(0.0, 30)
    (5, 23, 0)
    """
    return max(0, math.floor(fraction * n_layers + 0.5) - 1)


def check_odd(name: str, value: object) -> None:
    """An odd whole number of at least 1, which has a middle; raises ConfigError."""
    if check_count(name, value, 1) % 2 == 0:
        raise ConfigError(f"{name}={value!r} has no middle: give an odd number.")
