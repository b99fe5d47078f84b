"""Invariant 6: what the ledgers say ran is what ran, and what the cache is billed for is what it holds."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import draws
from tiny import Batch, Capacity, HaltAll, Hashed
from transformers import DynamicCache

from quicksilver.baselines.eviction import SinkAttention, SlidingWindow
from quicksilver.modules import Halting
from quicksilver.runtime import Run, RuntimeModule, apply
from quicksilver.runtime.cache import CacheLayer
from quicksilver.runtime.ledger import head_flops
from quicksilver.runtime.plan import Planner
from quicksilver.runtime.run import Execution

TWO = Batch((tuple(range(1, 17)), tuple(range(60, 44, -1))))


def test_nominal_by_hand() -> None:
    """8 tokens, all halted after layer 1, nothing kept of them: two layers of eight tokens, and the head."""
    model, n = tiny.load("llama"), 8
    found = tiny.forward(model, Batch((tuple(range(1, 1 + n)),)), [HaltAll(1)]).run
    config = model.config
    head_dim = tiny.WIDTH // 4
    matrices = 2 * tiny.WIDTH * tiny.WIDTH + 2 * tiny.WIDTH * 2 * head_dim + 3 * tiny.WIDTH * config.intermediate_size
    layer = 2 * matrices * n + 4 * 4 * head_dim * n * (n + 1) // 2
    head = 2 * tiny.WIDTH * tiny.VOCABULARY * n
    assert found.flops.nominal == found.flops.executed == 2 * layer + head
    assert found.flops.dense_nominal == tiny.LAYERS * layer + head


@given(
    batch=tiny.batches(low=3), policy=tiny.hashed(("drop",)), name=st.sampled_from(["mistral", "qwen2-mixed", "llama"]),
    spans=st.sampled_from([[], [SinkAttention(window=4, sinks=2)], [SlidingWindow(window=5)]]),
)  # fmt: skip
@settings(max_examples=draws(30))
def test_nominal_counts_the_keys_that_are_left_within_a_window(
    batch: Batch, policy: Hashed, name: str, spans: list[RuntimeModule]
) -> None:
    found = tiny.forward(tiny.load(name), batch, [policy, *spans]).run
    arch, (one,) = found.arch, found.trace.passes
    slots, expected = one.valid.cumsum(1) - 1, head_flops(arch, batch.ids.numel()).nominal
    for layer in range(arch.n_layers):
        active, visible = one.active(layer), found._visibility.visible(layer, slots, slots, one.kv_present(layer))
        expected += 2 * arch.linear_params_per_layer * int(active.sum()) + 4 * arch.n_heads * arch.head_dim * int(
            visible[active].sum()
        )
    assert found.flops.nominal == expected


@given(
    batch=tiny.batches(low=6), data=st.data(), name=st.sampled_from(["mistral", "llama"]),
    spans=st.sampled_from([[], [SinkAttention(window=4, sinks=2)], [SinkAttention(window=3, sinks=5)], [SlidingWindow(window=5)]]),
)  # fmt: skip
@settings(max_examples=draws(30))
def test_nominal_of_later_passes_counts_what_a_window_shows_of_the_cache(
    batch: Batch, data: st.DataObject, name: str, spans: list[RuntimeModule]
) -> None:
    found = tiny.forward(tiny.load(name), batch, [tiny.Never(), *spans], chunks=data.draw(tiny.chunkings(batch.width))).run
    arch, slots = found.arch, batch.mask.long().cumsum(1) - 1
    visible = [found._visibility.visible(layer, slots, slots, batch.mask.bool()) for layer in range(arch.n_layers)]
    pairs = sum(int(seen[batch.mask.bool()].sum()) for seen in visible)
    linear = 2 * arch.linear_params_per_layer * arch.n_layers * int(batch.mask.sum())
    assert found.flops.nominal == linear + 4 * arch.n_heads * arch.head_dim * pairs + head_flops(arch, batch.ids.numel()).nominal


def test_ledgers_add_up_over_passes_and_reset_forgets() -> None:
    model, ids = tiny.load("gpt2"), TWO.ids[:1]
    with apply(model, [Capacity(0.5, signal="attention")]) as run:
        model(ids)
        one = run.flops
        model(ids)
        assert run.flops - one == one
        assert one.signals > 0
        assert len(run.trace.passes) == 2
        run.reset()
        assert run.flops.executed == run.kv_bytes.billed == 0
        assert run.trace.passes == []
        model(ids)
        assert run.flops == one
        run.reset()
        model(ids, logits_to_keep=1)
    assert one.executed - run.flops.executed == 15 * 2 * tiny.WIDTH * tiny.VOCABULARY  # it may be read after the block


def storage_bytes(cache: Any) -> int:
    """What the cache keeps alive: a small view of a large tensor keeps all of it."""
    held = [t.untyped_storage() for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize("modules", [[tiny.Never()], [HaltAll(2)], [Hashed(0.4, 0.3, "drop")]], ids=["dense", "even", "uneven"])
def test_resident_bytes_are_the_bytes_that_are_kept_alive(name: str, modules: list[RuntimeModule]) -> None:
    """GPT-2 and GPT-NeoX compute q, k and v in one product: K and V as views of it would keep the queries as well."""
    model, cache = tiny.load(name), None
    with apply(model, modules) as run:
        for first, stop in ((0, 12), (12, 13), (13, 16)):
            cache = model(TWO.ids[:, first:stop], past_key_values=cache, use_cache=True).past_key_values
            assert storage_bytes(cache) == run.kv_bytes.resident
        cache.crop(-5)
        assert storage_bytes(cache) == run.kv_bytes.resident


def columns_from(first: int, batch: Batch) -> dict[str, torch.Tensor]:
    """What a model is given of a batch after the columns before `first`."""
    return {name: x if name == "attention_mask" else x[:, first:] for name, x in batch.inputs().items()}


@pytest.mark.parametrize("execution", ["compact", "masked"])
@given(data=st.data(), batch=tiny.batches(low=3), policy=tiny.hashed(), name=st.sampled_from(["gpt2", "llama", "mistral"]))
@settings(max_examples=draws(20))
def test_a_rearranged_cache_goes_on_as_the_sequences_it_now_holds(name, execution, data, batch, policy):
    """Cropped, or its rows reordered: as if nothing else had ever been in it."""
    model, order = tiny.load(name), list(range(len(batch.rows)))
    by = data.draw(st.sampled_from(["crop", "reorder_cache", "batch_select_indices", "batch_repeat_interleave"]))
    removed = data.draw(st.integers(1, min(map(len, batch.rows)) - 1)) if by == "crop" else 1
    kept = filled = batch.width - removed
    if by == "crop":
        filled = batch.width
    elif by == "batch_repeat_interleave":
        order = sorted(2 * order)
    else:
        order = data.draw(st.lists(st.sampled_from(order), min_size=1, max_size=4))
    after = Batch(tuple(batch.rows[i] for i in order), batch.width - max(len(batch.rows[i]) for i in order))

    with apply(model, [policy], execution=execution) as run:
        chunks = data.draw(tiny.chunkings(filled))
        cache = tiny.passes(model, batch.inputs(), chunks)[-1].past_key_values
        getattr(cache, by)({"crop": -removed, "batch_repeat_interleave": 2}.get(by, torch.tensor(order)))
        rearranged = run.kv_bytes
        assert cache.get_seq_length() == kept
        run.reset()
        fresh = tiny.passes(model, after.inputs(), [kept])[-1].past_key_values
        assert rearranged == run.kv_bytes
        again, expected = (model(**columns_from(kept, after), past_key_values=c, use_cache=True).logits for c in (cache, fresh))
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)


def test_drafts_that_are_taken_back_leave_nothing_in_a_layer_that_had_no_entry() -> None:
    """As in speculative decoding, where the first tokens of all left the later layers."""
    model, found = tiny.load("llama"), []
    for execution in ("compact", "masked"):
        leave = tiny.Does(lambda view, tokens: tokens.halt(tokens.active & (view.slots < 4), missing_kv="drop"), at=0)
        with apply(model, [leave], execution=execution):
            cache = model(TWO.ids[:, :4], use_cache=True).past_key_values
            cache.crop(-2)
            cache = model(TWO.ids[:, 2:8], past_key_values=cache).past_key_values
            cache.crop(-2)
            assert cache.get_seq_length() == 6
            found.append(model(TWO.ids[:, 6:], past_key_values=cache).logits)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("execution", ["compact", "masked"])
def test_a_cache_cropped_to_nothing_is_a_new_one(execution: str) -> None:
    model = tiny.load("llama")
    with apply(model, [Hashed(0.4, 0.2)], execution=execution) as run:
        output = model(TWO.ids, use_cache=True)
        cache, full = output.past_key_values, run.kv_bytes
        with pytest.raises(ValueError, match="negative"):  # a positive number once meant the length to keep
            cache.crop(5)
        cache.crop(0)
        assert run.kv_bytes == full
        for empty in (lambda: cache.crop(-16), cache.reset):
            empty()
            assert (run.kv_bytes.billed, run.kv_bytes.resident, cache.get_seq_length()) == (0, 0, 0)
            again = model(TWO.ids, past_key_values=cache).logits
            assert run.kv_bytes == full
            torch.testing.assert_close(again, output.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("name", tiny.thinned(tiny.FAMILIES))
@given(batch=tiny.batches(low=2, high=10), policy=tiny.hashed(), data=st.data())
@settings(max_examples=draws(9))
def test_a_cache_made_outside_is_adopted(name: str, execution: str, batch: Batch, policy: Hashed, data: st.DataObject) -> None:
    """Its tokens are dense, those that follow are under the modules: as if a policy had begun to act there."""
    model = tiny.load(name)
    outside = data.draw(st.integers(1, min(batch.width - 1, tiny.SLIDING_WINDOW - 2)))  # a full window has dropped what is needed
    cache = tiny.passes(model, batch.inputs(), [outside])[-1].past_key_values
    with apply(model, [policy], execution=execution):
        found = model(**columns_from(outside, batch), past_key_values=cache, use_cache=True).logits
    later = replace(policy, first_pass=1)
    expected = tiny.forward(model, batch, [later], chunks=[outside, batch.width - outside], execution=execution)
    real = batch.mask[:, outside:].bool()
    torch.testing.assert_close(found[real], expected.logits[:, outside:][real], atol=1e-5, rtol=1e-5)


def test_an_empty_cache_may_be_brought_along_and_a_complete_one_may_leave_the_block() -> None:
    model = tiny.load("mistral")
    expected = tiny.forward(model, TWO, [Hashed()], chunks=[16]).logits
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        with apply(model, [Hashed()]):
            assert torch.equal(model(TWO.ids, past_key_values=cache).logits, expected)
        assert cache.get_seq_length() == 16
    model = tiny.load("llama")
    plain = tiny.passes(model, TWO.inputs(), [8, 8])[-1].logits
    for execution in ("compact", "masked"):
        with apply(model, [tiny.Never()], execution=execution):
            cache = model(TWO.ids[:, :8], use_cache=True).past_key_values
        assert torch.equal(model(TWO.ids[:, 8:], past_key_values=cache).logits, plain)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_a_token_after_a_thinned_prompt_goes_behind_what_is_left(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight to its layers where no module acts, else without a mask; logits, ledgers and facts are those of the long way, after crops and beams too."""
    model, ids, calls = tiny.load(name, attention), torch.arange(2, 34).view(2, 16), Counter[str]()
    module = Halting(rule="capacity", signal="random", schedule="one_shot", window=(0.2, 0.8), missing_kv="drop", resume_layers=0)
    for owner, method in ((CacheLayer, "append"), (Planner, "plan")):
        own = getattr(owner, method)
        counted = lambda *args, own=own, method=method, **options: calls.update([method]) or own(*args, **options)
        monkeypatch.setattr(owner, method, counted)

    def decoded(execution: Execution) -> tuple[torch.Tensor, list[list[int]], Run]:
        with apply(model, [module], execution=execution) as run:
            cache = model(ids, use_cache=True).past_key_values
            calls.clear()
            logits = [model(ids[:, :1] + i, past_key_values=cache, use_cache=True).logits for i in range(3)]
            cache.crop(-2)
            cache.reorder_cache(torch.tensor([1, 0]))
            logits += [model(ids[:, :1] + i, past_key_values=cache, use_cache=True).logits for i in range(2)]
            return torch.stack(logits), [layer.slots[layer.is_entry].tolist() for layer in cache.layers], run

    quick, slots, run = decoded("compact")
    assert calls == {"append": 5 * run.arch.n_layers}
    assert run.kv_bytes.billed == run.kv_bytes.resident
    monkeypatch.setattr(Run, "_no_module_acts_in", lambda self, current: False)
    planned, planned_slots, planned_run = decoded("compact")
    assert calls == {"append": 5 * run.arch.n_layers, "plan": 5 * run.arch.n_layers}
    assert torch.equal(quick, planned)
    assert (slots, run.flops, run.kv_bytes) == (planned_slots, planned_run.flops, planned_run.kv_bytes)
    masked, masked_slots, masked_run = decoded("masked")
    torch.testing.assert_close(quick, masked, atol=1e-5, rtol=1e-5)
    assert (slots, run.flops.nominal) == (masked_slots, masked_run.flops.nominal)
