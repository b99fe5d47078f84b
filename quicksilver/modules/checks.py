"""Fractions of depth, and the tokens that an option names (paper 2.1, 2.2, H.7)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from quicksilver.runtime import ConfigError, LayerView


def check_known_ids(name: str, ids: Iterable[int], vocabulary: int) -> None:
    """Raises ConfigError when one of `ids` is beyond the model's vocabulary: it would never match, and nothing would say so."""
    beyond = [i for i in ids if i >= vocabulary]
    if beyond:
        there = f"the model has {vocabulary} tokens"
        raise ConfigError(f"{name} has the token id {beyond[0]}, and {there}: give ids of its tokenizer.")


def layer_after(fraction: float, n_layers: int) -> int:
    """Index of the layer after which `fraction` of the depth has been gone through; at least one layer always has.

    >>> layer_after(0.2, 30), layer_after(0.8, 30), layer_after(0.0, 30)
    (5, 23, 0)
    """
    return max(0, math.floor(fraction * n_layers + 0.5) - 1)


def layer_to_act(name: str, fraction: float, n_layers: int, act: str) -> int:
    """`layer_after` of an option; raises ConfigError where no layer follows it to `act` in."""
    if (layer := layer_after(fraction, n_layers)) >= n_layers - 1:
        raise ConfigError(f"{name}={fraction!r} leaves none of {n_layers} layers to {act} in: give a smaller fraction.")
    return layer


# -- columns of tokens (B, M) ------------------------------------------------------------------------------------------------------
def own_columns(like: torch.Tensor) -> torch.Tensor:
    """(B, M) long, the index of each column."""
    return torch.arange(like.shape[1], device=like.device).expand(like.shape)


def active_first(active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns with the active ones first, in order, and which of those are active: (B, M) each."""
    order = (~active).to(torch.uint8).argsort(dim=1, stable=True)
    return order, active.gather(1, order)


# -- tokens by place, by id, by slot -----------------------------------------------------------------------------------------------
def check_mask(name: str, mask: object) -> None:
    """Raises ConfigError unless `mask` is None or a bool tensor of one or two dimensions."""
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() in (1, 2)):
        found = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
        raise ConfigError(f"{name} must be a bool tensor by slot, (S,) or (B, S), not {found}: write mask.bool().")


TokenMask = Annotated[torch.Tensor | None, check_mask]


def share_of(n_tokens: torch.Tensor, share: float) -> torch.Tensor:
    """`share` of n_tokens (B, 1) long, rounded half up: (B, 1) long. Of the row's own length: batch mates do not count."""
    return (n_tokens.double() * share + 0.5).floor().long()


@dataclass(frozen=True)
class Ends:
    """The `first` tokens of a sequence (attention sinks), and the last of its prompt: `last`, or the share `at_most` where that is less,
    one at least."""

    first: int = 0
    last: int = 0
    at_most: float = 1.0

    def n_last(self, n_tokens: torch.Tensor) -> torch.Tensor:
        """How many are last of n_tokens (B, 1) long: (B, 1) long."""
        return (n_tokens if self.at_most == 1 else share_of(n_tokens, self.at_most)).clamp(min=1).clamp(max=self.last)

    def count(self, n_tokens: int) -> int:
        """How many of `n_tokens` these are."""
        return self.first + int(self.n_last(torch.tensor([[n_tokens]])))

    def mask(self, view: LayerView) -> torch.Tensor:
        """Which these are: (B, M) bool. Only a prompt has a known end: outside of one nothing is last."""
        chosen = view.slots < self.first
        if not self.last or not view.is_prompt:
            return chosen
        return chosen | (view.slots >= view.n_tokens - self.n_last(view.n_tokens))


def marked(view: LayerView, name: str, ids: Sequence[int], mask: torch.Tensor | None, ends: Ends) -> torch.Tensor:
    """What the options `NAME_ids` and `NAME_mask` select, beside the `ends`: (B, M) bool.

    Args:
        mask: by slot, (S,) bool for every row, or (B, S); slots from S on are not marked.

    Raises:
        ConfigError: ids on a model that was given embeddings, a mask with another number of rows than the batch.
    """
    chosen = ends.mask(view)
    if ids:
        if view.input_ids is None:
            selects = f"{name}_ids={list(ids)} selects by token id"
            raise ConfigError(f"{selects}, but the model was given embeddings: give input_ids, or use a mask.")
        chosen |= torch.isin(view.input_ids, torch.tensor(list(ids), device=view.input_ids.device))
    if mask is not None:
        rows, mask = view.slots.shape[0], mask.to(view.slots.device)
        mask = mask.expand(rows, -1) if mask.dim() == 1 else mask
        if mask.shape[0] != rows:
            given = f"{name}_mask has {mask.shape[0]} rows and the batch has {rows}"
            raise ConfigError(f"{given}: give (S,) for all rows, or one row per sequence.")
        # One more column, never marked, stands for all slots beyond the mask.
        padded = torch.cat([mask, mask.new_zeros(rows, 1)], dim=1)
        chosen |= padded.gather(1, view.slots.clamp(0, mask.shape[1]))
    return chosen
