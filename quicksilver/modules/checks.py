"""Checks of options, fractions of depth, and the tokens that an option names (paper 2.1, 2.2, H.7)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

import torch

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.view import LayerView


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


# -- tokens by id, by slot, by place: all masks are (B, M) bool --------------------------------------------------------------------


def by_id(name: str, view: LayerView, ids: Sequence[int]) -> torch.Tensor:
    """Tokens whose id is in `ids`; raises ConfigError when the model was given embeddings."""
    if not ids:
        return torch.zeros_like(view.slots, dtype=torch.bool)
    if view.input_ids is None:
        raise ConfigError(
            f"{name}={list(ids)} selects by token id, but the model was given embeddings: call it with input_ids, or use a mask."
        )
    return torch.isin(view.input_ids, torch.tensor(list(ids), device=view.input_ids.device))


def by_slot(name: str, view: LayerView, mask: torch.Tensor | None) -> torch.Tensor:
    """Tokens whose slot is marked in `mask`: (S,) bool for every row, or (B, S); slots from S on are not marked.

    Raises:
        ConfigError: a mask with another number of rows than the batch.
    """
    if mask is None:
        return torch.zeros_like(view.slots, dtype=torch.bool)
    rows = view.slots.shape[0]
    if mask.dim() == 1:
        mask = mask.expand(rows, -1)
    if mask.shape[0] != rows:
        raise ConfigError(
            f"{name} has {mask.shape[0]} rows and the batch {rows}: give (S,) for every row alike, or one row per sequence."
        )
    # One more column, never marked, stands for all slots beyond the mask.
    padded = torch.cat([mask.to(view.slots.device), mask.new_zeros(rows, 1).to(view.slots.device)], dim=1)
    return padded.gather(1, view.slots.clamp(0, mask.shape[1]))


def check_mask(name: str, mask: object) -> None:
    """Raises ConfigError unless `mask` is None or a bool tensor of one or two dimensions."""
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() in (1, 2)):
        found = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
        raise ConfigError(
            f"{name} must be a bool tensor by slot, (S,) or (B, S), not {found}: write mask.bool() for one of numbers."
        )


def by_place(view: LayerView, first: int, last: int) -> torch.Tensor:
    """The first `first` tokens of a sequence (attention sinks) and the last `last` of its prompt.

    Only a prompt has a known end: outside of one nothing is last.
    """
    chosen = view.slots < first
    return chosen | (view.slots >= view.n_tokens - last) if last and view.is_prompt else chosen
