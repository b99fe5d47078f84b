"""Which neighbouring K/V entries of the cache are merged while decoding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from quicksilver.modules.fusion.distances import distance_between
from quicksilver.modules.fusion.grouping import group_closest, own_columns
from quicksilver.modules.signals import share_of, slot_draw
from quicksilver.runtime.view import CacheView


def merge_new_entries(
    view: CacheView,
    *,
    kind: str,
    share: float,
    max_group: int | None,
    protect_first: int,
    protect_last: int,
    seed: int,
) -> torch.Tensor:
    """Merge those entries that came since the last merge whose keys are closest to their neighbour's.

    Args:
        kind: of the distance between keys (`NeighbourDistance`), or `random` by `seed`.
        share: of the new entries, merged into others.
        max_group: original tokens an entry may stand for; None: any number.
        protect_first, protect_last: entries of the first slots of the sequence and of its newest tokens are left alone.

    Returns:
        (B, K) long, as `MergePolicy.merge_cache`.
    """
    free = view.present & (view.slots >= view.n_seen - view.n_new) & (view.slots < view.n_seen - protect_last)
    free &= view.slots >= protect_first
    columns = own_columns(view.slots)
    last = torch.where(view.present, columns, -1).cummax(1).values
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    eligible = free & (before >= 0)
    before = before.clamp(min=0)
    # An entry is beside another only if no halted or skipped token lies between them.
    beside = view.slots - view.slots.gather(1, before) == view.size.long()
    eligible &= beside & free.gather(1, before)
    if kind == "random":
        distance = slot_draw(seed, view.layer, view.slots)
    else:
        keys = view.keys.transpose(1, 2).flatten(2)  # (B, K, H_kv · head_dim)
        distance = distance_between(keys, keys.gather(1, before[..., None].expand_as(keys)), kind)
    k = share_of(torch.full_like(view.n_seen, view.n_new), share)
    return group_closest(distance.masked_fill(~eligible, math.inf), view.present, view.size, max_group, k)
