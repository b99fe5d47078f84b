"""What the words mean: halted, resumed, skipped, by models that need no runtime; and what a module is shown, and when."""

import itertools
from copy import deepcopy
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import diagonal, draws
from tiny import Batch, Capacity, Does, HaltAll, Hashed, SkipLeastAttended

from quicksilver.baselines.eviction import HeavyHitter
from quicksilver.baselines.halting import StaticExit
from quicksilver.baselines.token_merging import TokenMerging
from quicksilver.modules import Halting, KVSkipping, TokenFusion
from quicksilver.modules.kernels import BlockAttention
from quicksilver.runtime import MISSING_KV, LayerView, QuickSilverError, TokenState, apply
from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.errors import UnsupportedModelError

EVEN = Batch((tuple(range(1, 17)), tuple(range(40, 24, -1))))


@pytest.mark.parametrize("name", tiny.thinned(tiny.FAMILIES))
def test_the_modes_differ_from_dense_and_from_each_other(name: str) -> None:
    """A runtime that did nothing would agree with itself: the other tests compare executions, this one asks that there is an effect."""
    policies = [[Hashed(0.4, missing_kv=mode)] for mode in (*MISSING_KV, "mixed")]
    dense, skipped, *halted = (
        tiny.forward(tiny.load(name), EVEN, modules) for modules in ([], [SkipLeastAttended(0.2)], *policies)
    )
    for one, other in itertools.combinations([dense, skipped, *halted], 2):
        assert (one.logits - other.logits).abs().max() > 1e-3
    for found in halted:
        assert (found.logits - dense.logits).abs().max() > 1e-2
        assert found.run.flops.executed < dense.run.flops.executed
        counts = found.trace.active_counts().tolist()
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] < counts[0] == 32


def skip_all() -> Does:
    return Does(lambda view, tokens: tokens.skip_kv(tokens.active), at=1)


@pytest.mark.parametrize("execution", ["compact", "masked"])
def test_eager_attention_refuses_a_token_without_keys_and_says_what_to_do(execution: str) -> None:
    model, batch = tiny.load("llama", "eager"), Batch((tuple(range(1, 9)),))
    with tiny.refused(r"layer 2.*no key.*'sdpa', or protect the first tokens", QuickSilverError):
        tiny.forward(model, batch, [skip_all()], execution=execution)


def test_what_is_decided_alone_is_what_is_executed_where_the_first_decision_is_the_only_one() -> None:
    model, batch = tiny.load("llama"), Batch((tuple(range(1, 17)), tuple(range(30, 41))))
    policy = Capacity(0.4, at=(1,), signal="attention")
    decided, executed = (tiny.forward(model, batch, [policy], execution=e) for e in ("decide", "compact"))
    tiny.assert_same_decisions(tiny.decisions(batch, decided.trace), tiny.decisions(batch, executed.trace))
    assert decided.run.flops.signals == executed.run.flops.signals > 0


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("missing_kv", ["drop", "project"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gpt_neox"])
@given(row=tiny.token_ids(2, 14), halt=st.sampled_from([0.2, 0.5]), seed=st.integers(0, 99), resume=st.integers(0, 2))
@settings(max_examples=draws(5))
def test_halting_by_hand(name: str, missing_kv: str, execution: str, row: tuple[int, ...], halt: float, seed: int, resume: int):
    """The plain layers one after the other, with a mask that hides dropped keys and a `where` that freezes states."""
    model, batch = tiny.load(name, "eager"), Batch((row,))
    policy = Hashed(halt, missing_kv=missing_kv, resume_layers=resume, seed=seed)
    arch = architecture_of(model)
    n = len(row)
    slots = torch.arange(n)[None]
    halt_layer = policy.expected_halt_layer(slots, batch.ids, arch.n_layers)
    call: dict[str, Any] = {}
    note = lambda _, args, kwargs: call.update(kwargs, hidden=args[0])
    with arch.layers[0].register_forward_pre_hook(note, with_kwargs=True):
        model(**batch.inputs(), use_cache=False)
    rest = {k: v for k, v in call.items() if k in ("position_embeddings", "position_ids")}
    hidden = call["hidden"]
    for layer, module in enumerate(arch.layers):
        active = (halt_layer >= layer) | (layer >= arch.n_layers - resume)
        visible = slots[:, None] <= slots[:, :, None]
        if arch.attention_window(layer) is not None:
            visible &= slots[:, None] > slots[:, :, None] - arch.attention_window(layer)
        if missing_kv == "drop":
            # A frozen token's own row is thrown away below; it keeps its key there so that its softmax is defined.
            visible &= active[:, None] | torch.eye(n, dtype=torch.bool)
        mask = torch.zeros(1, 1, n, n).masked_fill(~visible[:, None], torch.finfo(torch.float32).min)
        hidden = torch.where(active[..., None], module(hidden, attention_mask=mask, **rest), hidden)
    found = tiny.forward(model, batch, [policy], execution=execution)
    assert torch.equal(found.trace.passes[0].halt_layer, halt_layer)
    tiny.assert_close(found.logits, arch.logits(hidden))


def test_several_modules_are_asked_in_order_of_priority_and_see_what_came_before() -> None:
    asked: list[tuple[int, int, int]] = []

    def noting(priority: int) -> Does:
        note = lambda view, tokens: asked.append((view.layer, priority, int(tokens.newly_halted.sum())))
        return Does(note, priority=priority)

    modules = [noting(40), noting(5), HaltAll(at=1, resume_layers=1), noting(90)]
    tiny.forward(tiny.load("llama"), Batch((tuple(range(1, 12)),)), modules)
    after_halt = [entry for entry in asked if entry[0] == 1]
    assert after_halt == [(1, 5, 0), (1, 40, 0), (1, 90, 11)]  # HaltAll has the default priority, 50
    assert [entry[:2] for entry in asked if entry[0] == 0] == [(0, 5), (0, 40), (0, 90)]
    assert not [entry for entry in asked if entry[0] == 2]  # nobody takes part there


def attention_noted(last_queries: int | None, reduce: str) -> tuple[Does, dict[int, torch.Tensor]]:
    """A policy that notes the attention received by slot before others decide; what it noted, by layer."""
    found: dict[int, torch.Tensor] = {}

    def note(view: LayerView, tokens: TokenState) -> None:
        received = torch.where(tokens.active, view.attention_received(last_queries, reduce), 0.0)
        by_slot = torch.zeros(view.slots.shape[0], tiny.POSITIONS)
        found[view.layer] = by_slot.scatter_add(1, view.slots.clamp(min=0), received)

    return Does(note, priority=10, wants_attention=lambda layer: True), found


@pytest.mark.parametrize(
    ("name", "attention"),
    diagonal(tiny.unlike_first([*tiny.FAMILIES, "gpt2-unscaled", "gpt2-by-layer", tiny.STORIES]), ("sdpa", "eager")),
)
@given(batch=tiny.batches(low=2), last_queries=st.sampled_from([1, 3, None]), reduce=st.sampled_from(["mean", "max"]))
@settings(max_examples=draws(4))
def test_attention_received_is_the_models_own(name: str, attention: str, batch: Batch, last_queries: int | None, reduce: str):
    changes = {"gpt2-unscaled": {"scale_attn_weights": False}, "gpt2-by-layer": {"scale_attn_by_inverse_layer_idx": True}}
    model = tiny.build("gpt2", **changes[name]) if name in changes else tiny.load(name, attention)
    model.set_attn_implementation("eager")
    attentions = model(**batch.inputs(), use_cache=False, output_attentions=True).attentions  # L of (B, H, N, N)
    model.set_attn_implementation("eager" if name in tiny.EAGER_ONLY else attention)
    module, found = attention_noted(last_queries, reduce)
    tiny.forward(model, batch, [module])
    for layer in range(tiny.LAYERS - 1):
        for i, row in enumerate(batch.rows):
            n = len(row)
            own = attentions[layer][i, :, -n:, -n:][:, -(last_queries or n) :]
            expected = own.mean((0, 1)) if reduce == "mean" else own.amax((0, 1))
            torch.testing.assert_close(found[layer][i, :n], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_nobody_receives_attention_where_no_key_is_left(execution: str, reduce: str) -> None:
    module, found = attention_noted(None, reduce)
    tiny.forward(tiny.load("llama"), Batch((tuple(range(1, 9)), (4, 5, 6))), [module, skip_all()], execution=execution)
    assert (found[1].sum(1) > 0).all()
    assert (found[2] == 0).all()
    assert (found[3] == 0).all()


def test_attention_received_weighs_super_tokens_as_the_model_does() -> None:
    """Where attention is proportional to size, what a token receives is, too."""
    model, (module, found) = tiny.load("llama", "eager"), attention_noted(None, "mean")
    weights: list[torch.Tensor] = []
    fusion = TokenFusion(rule="capacity", fused_share=0.5, criterion="l2", start=0.2, every=0, protect_first=1, proportional=True)
    with apply(model, [module, fusion]) as run:
        hook = model.model.layers[2].self_attn.register_forward_hook(lambda own, given, output: weights.append(output[1]))
        model(tiny.ids(1, 24, 3))
        hook.remove()
    active = run.trace.passes[0].active(2)[0]
    assert 0 < int(active.sum()) < 24
    torch.testing.assert_close(found[2][0, :24][active], weights[0].mean((1, 2))[0], atol=1e-5, rtol=1e-4)


MERGES = {"criterion": "l2", "start": 0.2, "protect_first": 0, "protect_last": 0, "decode_every": 3}
DIFFERENT_WAYS: dict[str, tuple[list[Any], list[int] | None]] = {
    "no key at all": ([skip_all()], None),
    "super-tokens, and a query without a key": (
        [KVSkipping(criterion="attention", skipped_share=0.5, last_queries=4, protect_first=0),
         TokenMerging(r=0.2, metric="states", protect_first=1, proportional=True)], None),
    "evictions by attention where no token is computed": (
        [StaticExit(depth=0.5, missing_kv="project"), HeavyHitter(heavy=2, recent=3)], [9, 1, 1, 1]),
    "merges while decoding, a layer without entries": (
        [Does(lambda view, tokens: tokens.halt(tokens.active & (view.slots < 10), missing_kv="drop"), at=0),
         TokenFusion(rule="capacity", fused_share=0.5, **MERGES)], [4] + [1] * 16),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT_WAYS)
def test_every_execution_and_attention_gives_the_same(name: str) -> None:
    (modules, chunks), model = DIFFERENT_WAYS[name], tiny.load("llama", dtype=torch.float64)
    batch = Batch((tuple(tiny.ids(1, sum(chunks or [12]), 3)[0].tolist()),))
    wanted = tiny.forward(model, batch, deepcopy(modules), chunks=chunks, execution="masked").logits
    for blocks, execution in itertools.product(([], [BlockAttention(block=3)]), ("compact", "masked")):
        found = tiny.forward(model, batch, [*deepcopy(modules), *blocks], chunks=chunks, execution=execution).logits
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize(
    "module", [TokenFusion(rule="capacity", fused_share=0.5, **{**MERGES, "decode_every": 2}), HeavyHitter(heavy=2, recent=3)]
)
def test_a_refused_crop_leaves_every_layer_as_it_was(module: Any, execution: str) -> None:
    model = tiny.load("llama")
    with apply(model, [deepcopy(module)], execution=execution):
        cache = model(tiny.ids(1, 12, 3), use_cache=True).past_key_values
        for token in tiny.ids(4, 1, 5):
            model(token[None], past_key_values=cache, use_cache=True)
        with tiny.refused("last 3 cached columns cannot be taken back", UnsupportedModelError):
            cache.crop(-3)
        assert [layer.get_seq_length() for layer in cache.layers] == [16] * tiny.LAYERS


@pytest.mark.parametrize("execution", ["compact", "masked"])
def test_rows_are_repeated_in_layers_without_entries_too(execution: str) -> None:
    model, tokens = tiny.load("llama"), tiny.ids(2, 6)
    with apply(model, [StaticExit(depth=0.4)], execution=execution):
        caches = [model(ids, use_cache=True).past_key_values for ids in (tokens, tokens.repeat_interleave(2, dim=0))]
        caches[0].batch_repeat_interleave(2)
        found, wanted = (model(tiny.ids(4, 1), past_key_values=cache, use_cache=True).logits for cache in caches)
    tiny.assert_close(found, wanted)


@pytest.mark.parametrize("name", tiny.thinned(tiny.MODELS))
def test_entropy_is_that_of_the_logit_lens_in_nats(name: str) -> None:
    asked: list[int] = []

    def compare(view: LayerView, tokens: TokenState) -> None:
        expected = torch.distributions.Categorical(logits=view.logits(tokens.active)).entropy()
        torch.testing.assert_close(view.logit_entropy_nats(tokens.active), expected, atol=1e-5, rtol=1e-5)
        asked.append(len(expected))

    found = tiny.forward(tiny.load(name), Batch((tuple(range(1, 12)), (5, 6, 7))), [Does(compare)])
    assert asked == [14] * (tiny.LAYERS - 1)
    arch = found.run.arch
    assert found.run.flops.signals == 2 * 14 * (tiny.LAYERS - 1) * 2 * arch.width * arch.vocab_size


def test_embeddings_instead_of_ids() -> None:
    model, batch = tiny.load("gpt2"), Batch((tuple(range(1, 12)), (5, 6, 7)))
    policy = Halting(tau_drift=0.8, tau_entropy=None, resume_layers=0)
    expected = tiny.forward(model, batch, [policy])
    assert expected.trace.active_counts()[-1] < 14
    inputs = batch.inputs()
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    with apply(model, [policy]) as run:
        logits = model(inputs_embeds=embeds, **inputs).logits
    tiny.assert_same_run(batch, tiny.Outcome(logits, run), expected)


@given(batch=tiny.batches(low=3), data=st.data())
@settings(max_examples=draws(15))
def test_a_module_that_looks_ahead_acts_in_prompts_only_unless_told_otherwise(batch: Batch, data: st.DataObject) -> None:
    chunks, asked = data.draw(tiny.chunkings(batch.width)), {False: set(), True: set()}
    for lookahead, passes in asked.items():
        module = Does(lambda view, tokens, passes=passes: passes.add(view.pass_index), causal=False, lookahead=lookahead)
        tiny.forward(tiny.load("llama"), batch, [module], chunks=chunks)
    assert asked[False] == ({0} if chunks[0] > 1 and batch.mask[:, : chunks[0]].any() else set())
    assert asked[True] == {i for i in range(len(chunks)) if batch.mask[:, sum(chunks[:i]) : sum(chunks[: i + 1])].any()}


@pytest.mark.parametrize("missing_kv", ["drop", "project", "predict"])
def test_whoever_asks_for_the_states_between_layers_gets_them_whole(missing_kv: str) -> None:
    policy, asked = Hashed(0.5, missing_kv=missing_kv), {"use_cache": False, "output_hidden_states": True}
    model = tiny.build("llama")
    with apply(model, [policy], decision_layers=[1], execution="masked"):
        wanted = model(EVEN.ids, **asked).hidden_states
    model = tiny.build("llama")  # without the hooks that transformers has just set
    with apply(model, [policy], decision_layers=[1]):
        carried = model(EVEN.ids, use_cache=False).logits
        found = model(EVEN.ids, **asked)
        tiny.assert_close(found.hidden_states, wanted)
        assert torch.equal(found.logits, carried)
    seen: list[torch.Tensor] = []
    model = tiny.build("llama")
    model.model.layers[3].register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with apply(model, [policy], decision_layers=[1]):
        assert torch.equal(model(EVEN.ids, use_cache=False).logits, carried)
    tiny.assert_close(seen[0], wanted[3])
