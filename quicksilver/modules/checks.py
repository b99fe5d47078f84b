"""Fractions of depth, and the tokens that an option names (paper 2.1, 2.2, H.7)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import torch

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.view import LayerView


def check_known_ids(name: str, ids: Iterable[int], vocabulary: int) -> None:
    """Raises ConfigError when one of `ids` is beyond the model's vocabulary: it would never match, and nothing would say so."""
    beyond = [i for i in ids if i >= vocabulary]
    if beyond:
        raise ConfigError(
            f"{name} has the token id {beyond[0]}, and the model has {vocabulary} tokens: give ids of its tokenizer."
        )


def layer_after(fraction: float, n_layers: int) -> int:
    """Index of the layer after which `fraction` of the depth has been gone through; at least one layer always has.

    >>> layer_after(0.2, 30), layer_after(0.8, 30), layer_after(0.0, 30)
    (5, 23, 0)
    """
    return max(0, math.floor(fraction * n_layers + 0.5) - 1)


# -- tokens by id, by slot, by place: all masks are (B, M) bool --------------------------------------------------------------------


def by_id(name: str, view: LayerView, ids: Sequence[int]) -> torch.Tensor:
    """Tokens whose id is in `ids`; raises ConfigError when the model was given embeddings."""
    if not ids:
        return torch.zeros_like(view.slots, dtype=torch.bool)
    if view.input_ids is None:
        raise ConfigError(
            f"{name}={list(ids)} selects by token id, but the model was given embeddings: give input_ids, or use a mask."
        )
    return torch.isin(view.input_ids, torch.tensor(list(ids), device=view.input_ids.device))


def by_slot(name: str, view: LayerView, mask: torch.Tensor | None) -> torch.Tensor:
    """Tokens whose slot is marked in `mask`: (S,) bool for every row, or (B, S); slots from S on are not marked. Raises
    ConfigError: a mask with another number of rows than the batch."""
    if mask is None:
        return torch.zeros_like(view.slots, dtype=torch.bool)
    rows = view.slots.shape[0]
    if mask.dim() == 1:
        mask = mask.expand(rows, -1)
    if mask.shape[0] != rows:
        raise ConfigError(
            f"{name} has {mask.shape[0]} rows and the batch has {rows}: give (S,) for all rows, or one row per sequence."
        )
    # One more column, never marked, stands for all slots beyond the mask.
    padded = torch.cat([mask.to(view.slots.device), mask.new_zeros(rows, 1).to(view.slots.device)], dim=1)
    return padded.gather(1, view.slots.clamp(0, mask.shape[1]))


def check_mask(name: str, mask: object) -> None:
    """Raises ConfigError unless `mask` is None or a bool tensor of one or two dimensions."""
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() in (1, 2)):
        found = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
        raise ConfigError(f"{name} must be a bool tensor by slot, (S,) or (B, S), not {found}: write mask.bool().")


TokenMask = Annotated[torch.Tensor | None, check_mask]


def by_place(view: LayerView, first: int, last: int) -> torch.Tensor:
    """The first `first` tokens of a sequence (attention sinks) and the last `last` of its prompt.

    Only a prompt has a known end: outside of one nothing is last.
    """
    chosen = view.slots < first
    return chosen | (view.slots >= view.n_tokens - last) if last and view.is_prompt else chosen
