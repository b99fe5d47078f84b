"""Join neighbours into groups, closest first, all rows at once."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from quicksilver.modules.signals import lowest

# Rounds of `_grow`. A chain of d neighbours, each closer than the next, takes d rounds by distance. Longer chains (the states of
# repetitive text converge step by step) are cut at places spread evenly; after three such rounds no two of them are side by side.
_BY_DISTANCE, _BY_PLACE = 5, 3


def group_closest(
    distance: torch.Tensor, active: torch.Tensor, size: torch.Tensor, max_group: int | None, k: torch.Tensor | None
) -> torch.Tensor:
    """Join consecutive active tokens, closest first, into groups that go into their last. No host sync, no loop over tokens.

    Args:
        distance: (B, M), of each token to the active one before it; +inf: the two may not be joined.
        active: (B, M) bool.
        size: (B, M) float, original tokens that each stands for.
        max_group: that many original tokens a group may stand for; None: any number.
        k: (B, 1) long, joins a row, fewer where fewer are possible; None: all that are possible.

    Returns:
        (B, M) long: the column of the token that each goes into, its own where nothing happens.
    """
    order, active = active_first(active)
    distance = distance.gather(1, order).masked_fill(~active, math.inf)
    distance = F.pad(distance[:, 1:], (1, 0), value=math.inf)  # the first has none before it
    joined = distance.isfinite() if max_group is None else _grow(distance, size.gather(1, order) * active, max_group)
    if k is not None:
        joined = lowest(distance, joined, k)
    # A group ends where the next token is not joined to it.
    place = own_columns(order)
    ends = torch.where(F.pad(joined[:, 1:], (0, 1)), place.shape[1], place)
    last = ends.flip(1).cummin(1).values.flip(1)
    return torch.empty_like(order).scatter(1, order, order.gather(1, last))


def _grow(distance: torch.Tensor, size: torch.Tensor, max_group: int) -> torch.Tensor:
    """Which tokens join the one before them, (B, M) bool, as if joins were made one by one, closest first, while groups fit.

    A join that is closer than the ones on both sides comes before them in any case, so all such are made at once.
    """
    joined = torch.zeros_like(distance, dtype=torch.bool)
    possible, place = distance.isfinite(), own_columns(distance)
    evenly = (place * 0.6180339887) % 1  # golden ratio: neighbours are far apart, and so are low values
    for key in [distance] * _BY_DISTANCE + [evenly] * _BY_PLACE:
        group = (~joined).cumsum(1) - 1  # of each token
        total = torch.zeros_like(size).scatter_add(1, group, size)
        fits = total.gather(1, group) + total.gather(1, (group - 1).clamp(min=0)) <= max_group
        key = torch.where(possible & ~joined & fits, key, math.inf)
        # By group: the key of the join at its left end.
        left = torch.full_like(key, math.inf).scatter_reduce(1, group, key, "amin")
        beside = F.pad(left, (1, 1), value=math.inf)
        chosen = left.isfinite() & (left < beside[:, :-2]) & (left <= beside[:, 2:])
        joined = joined | (key.isfinite() & chosen.gather(1, group))
    return joined


def own_columns(like: torch.Tensor) -> torch.Tensor:
    """(B, M) long, the index of each column."""
    return torch.arange(like.shape[1], device=like.device).expand(like.shape)


def active_first(active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns with the active ones first, in order, and which of those are active: (B, M) each."""
    order = (~active).to(torch.uint8).argsort(dim=1, stable=True)
    return order, active.gather(1, order)
