"""Call the layer on all tokens, hide the absent keys by a mask, put the inactive states back: the reference, which saves nothing."""

from __future__ import annotations

from typing import Any

import torch

from quicksilver.runtime.execution.halted import kv_of_halted, predict_later_layers, translation_flops
from quicksilver.runtime.execution.plan import KV, Attended, LayerCall, LayerPlan, LayerResult, Machine
from quicksilver.runtime.forward import Forward
from quicksilver.runtime.ledger import LayerWork


class MaskedPort:
    """Stands where the layer expects its cache: all columns, with the K and V of halted tokens put in."""

    def __init__(self, plan: LayerPlan, halted: list[tuple[torch.Tensor, KV]], machine: Machine) -> None:
        self.plan, self.halted, self.machine = plan, halted, machine
        self.attended: Attended | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> KV:
        plan, layout = self.plan, self.plan.planned
        assert plan.target is not None
        for real, (halted_keys, halted_values) in self.halted:
            where = real[:, None, :, None]
            keys, values = torch.where(where, halted_keys, keys), torch.where(where, halted_values, values)
        new = keys, values
        keys, values = (self.machine.quantize_dequantize(part, plan.bits) for part in new)
        keys, values = plan.target.write(layout, keys, values)
        self.attended = Attended(*new, keys, layout.slots, layout.valid)
        return keys, values


def execute(plan: LayerPlan, call: LayerCall, forward: Forward, machine: Machine) -> LayerResult:
    hidden, packing = call.hidden, plan.packing
    halted = []
    for one in plan.halted:
        if one.source == "project":  # the layer itself does, of every state that enters it
            predict_later_layers(one, hidden, call, forward)
        else:
            assert one.packing.real is not None
            halted.append((one.packing.real, kv_of_halted(one, call, forward, machine)))
    port = MaskedPort(plan, halted, machine)
    # As under `compact`: K and V of a halted token are projected in full precision, then coded at its width.
    bits = plan.bits if plan.bits is None or packing.real is None else torch.where(packing.real, plan.bits, 16)
    computed = machine.run_layer(call, machine.inputs(call, plan, hidden, port), bits)
    if call.store is not None:
        call.store.advance(forward.n, forward.n_real)
    work = LayerWork(forward.batch, forward.n, plan.planned.slots.shape[1], 0, translation_flops(plan, call, forward))
    return LayerResult(packing.put(hidden, hidden, computed), packing, work, port.attended)
