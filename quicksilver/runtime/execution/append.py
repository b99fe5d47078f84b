"""One new token in each row, nothing decided about it yet: it sees all that the layer has, so there is nothing to plan or mask."""

from __future__ import annotations

from typing import Any

import torch

from quicksilver.runtime.cache import CacheLayer
from quicksilver.runtime.execution.plan import LayerCall, LayerResult, Machine, Packing
from quicksilver.runtime.forward import Forward
from quicksilver.runtime.ledger import LayerWork


class AppendingPort:
    """Stands where the layer expects its cache: puts K and V behind what there is."""

    def __init__(self, store: CacheLayer) -> None:
        self.store = store

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.store.append(keys, values)


def execute(call: LayerCall, forward: Forward, machine: Machine) -> LayerResult:
    store = call.store
    assert store is not None
    inputs = call.arguments | {"attention_mask": None, machine.arch.cache_argument: AppendingPort(store)}
    output = machine.run_layer(call, inputs, None)
    keys = store.length
    assert isinstance(keys, int), "rows of unequal length cannot be appended to"
    return LayerResult(output, Packing(None, None, 1), LayerWork(forward.batch, 1, keys))
