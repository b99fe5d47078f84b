"""The four ways to execute a layer's plan; each stands a port, an object with `update`, where the layer expects its cache.

plain     the layer as the model called it: its own mask, every token
append    one new token in each row, nothing decided about it: nothing to plan or mask
compact   gather the active tokens, call the layer on them alone, scatter the result
masked    call the layer on all tokens and undo what should not have happened: the reference, which saves nothing

Under compact, packed states are carried by the `Forward` to a next layer with the same active tokens, unless they are inspected between.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from quicksilver.runtime.cache.stores import join_kv, take_kv
from quicksilver.runtime.ledger import LayerWork
from quicksilver.runtime.phases import phase
from quicksilver.runtime.plan import KV, Attended, Forward, HaltedKV, LayerCall, LayerPlan, LayerResult, Machine, Way, join_pieces
from quicksilver.runtime.visibility import Visibility


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
            keys, values = forward.predicted[halted.translator][layer]
            return arch.rotate_keys(layer, keys, packing.rotary(call.rotary, forward.batch)), values
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


def mlp_work(plan: LayerPlan) -> tuple[int, int]:
    """Of a row: tokens whose MLP is not computed, and the operations of what stands in for it."""
    if plan.mlp is None:
        return 0, 0
    exact = plan.mlp.exact.width
    computed = plan.packing.width if exact and plan.bits is not None else exact  # a quantised MLP is given all tokens, or none
    return plan.packing.width - computed, plan.packing.width * plan.mlp.map.flops_per_token


def execute_plain(plan: LayerPlan, call: LayerCall, forward: Forward, machine: Machine) -> LayerResult:
    work = LayerWork(forward.batch, forward.n, keys_per_query(machine.visibility, call.layer, forward, keeps_all=True))
    if not plan.observes_kv:
        return LayerResult(machine.run_layer(call, call.arguments, None), plan.packing, work)
    attended: Attended | None = None

    def update(keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> KV:
        nonlocal attended
        new = keys, values
        if call.store is not None:
            keys, values = call.store.update(keys, values)
        attended = Attended(*new, keys)
        return keys, values

    output = machine.run_layer(call, call.arguments | {machine.arch.cache_argument: SimpleNamespace(update=update)}, None)
    return LayerResult(output, plan.packing, work, attended)


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


def execute_append(plan: LayerPlan, call: LayerCall, forward: Forward, machine: Machine) -> LayerResult:
    store = call.store
    assert store is not None
    port = SimpleNamespace(update=lambda keys, values, *_, **__: store.append(keys, values))
    output = machine.run_layer(call, call.arguments | {"attention_mask": None, machine.arch.cache_argument: port}, None)
    keys = store.length
    assert isinstance(keys, int), "rows of unequal length cannot be appended to"
    return LayerResult(output, plan.packing, LayerWork(forward.batch, 1, keys))


def execute_compact(plan: LayerPlan, call: LayerCall, forward: Forward, machine: Machine) -> LayerResult:
    packing, store = plan.packing, call.store
    halted = [kv_of_halted(one, call, forward, machine) for one in plan.halted]
    projected = sum(one.packing.width for one in plan.halted if one.source == "project")
    attended: Attended | None = None
    before = after = None
    keys_seen: int | None = 0

    def update(keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> KV:
        """Store what has an entry; what is attended to."""
        nonlocal attended
        new = keys, values
        if halted:
            parts = zip(new, *halted, strict=True)
            keys, values = (join_kv(each) if plan.pieces is None else join_pieces(each, plan.pieces, 2) for each in parts)
        stored = (keys, values) if plan.target is None else plan.target.write(plan.planned, keys, values)
        if not plan.own_keys_only or (plan.layout is not None and plan.layout.order is None):
            keys, values = stored  # without an order, a new store holds just the queries' own, at their widths already
        else:
            keys, values = (machine.quantize_dequantize(part, plan.bits) for part in (keys, values))
        if plan.own_keys_only:
            attended = Attended(*new, keys, plan.slots, packing.real)
        else:
            attended = Attended(*new, keys, plan.planned.slots, plan.planned.valid, plan.planned.entries.get("size"))
        return keys, values

    if packing.width == 0:
        # No token is computed: what is halted but not skipped may still have to be stored.
        if store is not None and plan.layout is not None:
            store.write(plan.layout, *(join_kv(parts) for parts in zip(*halted, strict=True)))
        output = call.hidden
    else:
        before = packing.take(call.hidden) if forward.carried is None else forward.carried[1]
        inputs = machine.inputs(call, plan, before, SimpleNamespace(update=update))
        after = packing.of_chosen(before, machine.run_layer(call, inputs, plan.bits, plan.mlp))
        forward.carried = (packing, after) if plan.carries else None
        output = call.hidden if plan.carries else packing.put_all(call.hidden, after)
        if not plan.own_keys_only:
            keys_seen = plan.planned.slots.shape[1]
        else:
            keys_seen = None if machine.arch.causal else packing.width
    if store is not None:
        store.advance(forward.n, forward.n_real)
    work = LayerWork(forward.batch, packing.width, keys_seen, projected, translation_flops(plan, call, forward), *mlp_work(plan))
    return LayerResult(output, packing, work, attended, before, after, plan.slots)


def execute_masked(plan: LayerPlan, call: LayerCall, forward: Forward, machine: Machine) -> LayerResult:
    hidden, packing, layout = call.hidden, plan.packing, plan.planned
    halted = []
    for one in plan.halted:
        if one.source == "project":  # the layer itself does, of every state that enters it
            predict_later_layers(one, hidden, call, forward)
        else:
            assert one.packing.real is not None
            halted.append((one.packing.real[:, None, :, None], kv_of_halted(one, call, forward, machine)))
    attended: Attended | None = None

    def update(keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> KV:
        """All columns, with K and V of halted tokens put in."""
        nonlocal attended
        assert plan.target is not None
        for where, (halted_keys, halted_values) in halted:
            keys, values = torch.where(where, halted_keys, keys), torch.where(where, halted_values, values)
        new = keys, values
        keys, values = (machine.quantize_dequantize(part, plan.bits) for part in new)
        keys, values = plan.target.write(layout, keys, values)
        attended = Attended(*new, keys, layout.slots, layout.valid, layout.entries.get("size"))
        return keys, values

    # As under `compact`: K and V of a halted token are projected in full precision, then coded at its width.
    bits = plan.bits if plan.bits is None or packing.real is None else torch.where(packing.real, plan.bits, 16)
    computed = machine.run_layer(call, machine.inputs(call, plan, hidden, SimpleNamespace(update=update)), bits, plan.mlp)
    if call.store is not None:
        call.store.advance(forward.n, forward.n_real)
    work = LayerWork(forward.batch, forward.n, layout.slots.shape[1], 0, translation_flops(plan, call, forward), *mlp_work(plan))
    return LayerResult(packing.put(hidden, hidden, computed), packing, work, attended)


EXECUTE: dict[Way, Callable[[LayerPlan, LayerCall, Forward, Machine], LayerResult]] = {
    "plain": execute_plain, "append": execute_append, "compact": execute_compact, "masked": execute_masked,
}  # fmt: skip
