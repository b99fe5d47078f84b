"""K and V of tokens that are halted in a layer and seen there all the same: where each source has them from."""

from __future__ import annotations

import torch

from quicksilver.runtime.execution.plan import KV, HaltedKV, LayerCall, LayerPlan, Machine
from quicksilver.runtime.forward import Forward
from quicksilver.runtime.phases import phase
from quicksilver.runtime.rows import take_kv


@phase("halted_kv")
def kv_of_halted(halted: HaltedKV, call: LayerCall, forward: Forward, machine: Machine) -> KV:
    """K and V, (B, H_kv, E, head_dim) each, of the tokens in `halted.packing`."""
    arch, packing, layer = machine.arch, halted.packing, call.layer
    match halted.source:
        case "copy":
            assert forward.newest_kv is not None
            keys, values = forward.newest_kv
            return (keys, values) if packing.order is None else (take_kv(keys, packing.order), take_kv(values, packing.order))
        case "project":
            frozen = packing.take(call.hidden)
            predict_later_layers(halted, frozen, call, forward)
            return arch.project_kv(layer, frozen, packing.rotary(call.rotary, forward.batch))
        case "predict":
            assert halted.translator is not None
            predicted = forward.predicted[halted.translator]
            return predicted.rotated_keys(layer, arch, packing.rotary(call.rotary, forward.batch)), predicted[layer][1]
        case _:
            shape = (forward.batch, arch.own_kv_heads, packing.width, arch.head_dim)
            return call.hidden.new_zeros(shape), call.hidden.new_zeros(shape)


def predict_later_layers(halted: HaltedKV, frozen: torch.Tensor, call: LayerCall, forward: Forward) -> None:
    """In the first layer that tokens of `missing_kv="predict"` miss: all its later K/V at once; frozen: (B, E, D)."""
    if halted.translator == call.layer:
        forward.predict(forward.executed.translators[call.layer], frozen)


def translation_flops(plan: LayerPlan, call: LayerCall, forward: Forward) -> int:
    """What `predict_later_layers` took, a row."""
    translators = forward.executed.translators
    return sum(one.packing.width * translators[call.layer].flops_per_token for one in plan.halted if one.translator == call.layer)
