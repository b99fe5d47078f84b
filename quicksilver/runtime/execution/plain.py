"""The layer as the model called it: the model's own mask, every token."""

from __future__ import annotations

from typing import Any

import torch

from quicksilver.runtime.cache import CacheLayer
from quicksilver.runtime.execution.plan import Attended, LayerCall, LayerPlan, LayerResult, Machine
from quicksilver.runtime.forward import Forward
from quicksilver.runtime.ledger import LayerWork
from quicksilver.runtime.visibility import Visibility


class ObservingPort:
    """Stands where the layer expects its cache: passes K and V on and remembers them."""

    def __init__(self, store: CacheLayer | None) -> None:
        self.store = store
        self.attended: Attended | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        new = keys, values
        if self.store is not None:
            keys, values = self.store.update(keys, values)
        self.attended = Attended(*new, keys)
        return keys, values


def execute(plan: LayerPlan, call: LayerCall, forward: Forward, machine: Machine, visibility: Visibility) -> LayerResult:
    work = LayerWork(forward.batch, forward.n, keys_per_query(visibility, call.layer, forward, keeps_all=True))
    if not plan.observes_kv:
        return LayerResult(machine.run_layer(call, call.arguments, None), plan.packing, work)
    port = ObservingPort(call.store)
    output = machine.run_layer(call, call.arguments | {machine.arch.cache_argument: port}, None)
    return LayerResult(output, plan.packing, work, port.attended)


def keys_per_query(visibility: Visibility, layer: int, forward: Forward, *, keeps_all: bool) -> int | None:
    """Keys per query of the model's own attention; None: its causal kernel, which skips the upper triangle.

    Args:
        keeps_all: the cache of a sliding window keeps more than what the next token can see, as a ragged one does.
    """
    if not visibility.arch.causal:
        return forward.seen + forward.n
    window = visibility.windows[layer]
    fits = window is None or forward.n < window  # transformers gives a mask from n = window on
    if visibility.sdpa and forward.seen == 0 and not forward.padded and fits:
        return None
    seen = forward.seen if window is None or keeps_all else min(forward.seen, window - 1)
    return seen + forward.n
