"""Gather the active tokens, call the layer on them alone, scatter the result.

Between layers with the same active tokens that nobody looks between, they stay gathered: the states are carried by the `Forward`.
"""

from __future__ import annotations

from typing import Any

import torch

from quicksilver.runtime.execution.halted import kv_of_halted, translation_flops
from quicksilver.runtime.execution.plan import KV, Attended, LayerCall, LayerPlan, LayerResult, Machine
from quicksilver.runtime.forward import Forward
from quicksilver.runtime.ledger import LayerWork
from quicksilver.runtime.rows import join_kv


class CompactPort:
    """Stands where the layer expects its cache: stores what has an entry, returns what is attended to."""

    def __init__(self, plan: LayerPlan, halted: list[KV], machine: Machine) -> None:
        self.plan, self.halted, self.machine = plan, halted, machine
        self.attended: Attended | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> KV:
        plan, new = self.plan, (keys, values)
        if self.halted:
            keys, values = (join_kv(parts) for parts in zip(new, *self.halted, strict=True))
        stored = (keys, values) if plan.target is None else plan.target.write(plan.planned, keys, values)
        if not plan.own_keys_only or (plan.layout is not None and plan.layout.order is None):
            keys, values = stored  # without an order, a new store holds just the queries' own, at their widths already
        else:
            keys, values = (self.machine.quantize_dequantize(part, plan.bits) for part in (keys, values))
        if plan.own_keys_only:
            self.attended = Attended(*new, keys, plan.slots, plan.packing.real)
        else:
            self.attended = Attended(*new, keys, plan.planned.slots, plan.planned.valid)
        return keys, values


def execute(plan: LayerPlan, call: LayerCall, forward: Forward, machine: Machine) -> LayerResult:
    packing, store = plan.packing, call.store
    halted = [kv_of_halted(one, call, forward, machine) for one in plan.halted]
    projected = sum(one.packing.width for one in plan.halted if one.source == "project")
    keys_seen: int | None
    if packing.width == 0:
        # Nobody takes part: what is halted but not skipped may still have to be stored.
        if store is not None and plan.layout is not None:
            store.write(plan.layout, *(join_kv(parts) for parts in zip(*halted, strict=True)))
        output, attended, keys_seen = call.hidden, None, 0
        before = after = None
    else:
        port = CompactPort(plan, halted, machine)
        before = packing.take(call.hidden) if forward.carried is None else forward.carried[1]
        after = packing.of_chosen(before, machine.run_layer(call, machine.inputs(call, plan, before, port), plan.bits))
        forward.carried = (packing, after) if plan.carries else None
        output = call.hidden if plan.carries else packing.put_all(call.hidden, after)
        attended = port.attended
        if plan.own_keys_only:
            keys_seen = None if machine.arch.causal else packing.width
        else:
            keys_seen = plan.planned.slots.shape[1]
    if store is not None:
        store.advance(forward.n, forward.n_real)
    work = LayerWork(forward.batch, packing.width, keys_seen, projected, translation_flops(plan, call, forward))
    return LayerResult(output, packing, work, attended, before, after, plan.slots)
