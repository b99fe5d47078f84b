"""The peers, and the mechanisms beside them: each has the property that defines it. What all share: tests/modules/test_invariants.py."""

import math
import warnings

import pytest
import tiny
import torch
from drawing import RandomMLP
from hypothesis import given, settings
from hypothesis import strategies as st
from looking import Pass
from tiny import EVEN, LONG, RAGGED

from quicksilver.baselines.eviction import HeavyHitter, SinkAttention, SlidingWindow
from quicksilver.baselines.halting import ConfidenceExit, OneShotHalting, PromptPruning, StaticExit
from quicksilver.baselines.number_formats import BFloat16, Int8Dynamic
from quicksilver.baselines.prompts import PromptLookup, PromptTruncation
from quicksilver.baselines.token_merging import TokenMerging, match
from quicksilver.measure.flop_counter import count_by_operator
from quicksilver.measure.perplexity import Protocol, score
from quicksilver.measure.quality import by_chance
from quicksilver.modules import AdaptiveQuantization, Halting, KVSkipping, Replay, TokenFusion, shuffled
from quicksilver.runtime import ConfigError, UnsupportedModelError, apply
from quicksilver.runtime.trace import Trace


# -- exits -----------------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def states_of(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """States (B, N, D) before the first layer and after each but the last."""
    return model(ids, output_hidden_states=True).hidden_states[:-1]


@torch.no_grad()
def test_a_static_exit_reads_the_head_at_its_layer_and_runs_nothing_above() -> None:
    model = tiny.load("llama")
    peer = tiny.forward(model, EVEN, [StaticExit(depth=0.6)], chunks=[24])
    expected = model.lm_head(model.model.norm(states_of(model, EVEN.ids)[3]))
    tiny.assert_close(peer.logits, expected)
    assert peer.trace.active_counts().tolist() == [48, 48, 48, 0, 0]
    assert [layer.entries is None for layer in peer.run._cache.layers] == [False, False, False, True, True]


@pytest.mark.parametrize("measure", ["state", "softmax"])
def test_a_token_leaves_when_its_confidence_exceeds_the_threshold(measure: str) -> None:
    model = tiny.load("llama")
    before, after = states_of(model, EVEN.ids)[:2]
    if measure == "state":
        confidence = torch.cosine_similarity(before, after, dim=-1)
    else:
        with torch.no_grad():
            best = model.lm_head(model.model.norm(after)).softmax(-1).topk(2).values
        confidence = best[..., 0] - best[..., 1]
    threshold = float(confidence.median())
    peer = tiny.forward(model, EVEN, [ConfidenceExit(measure=measure, threshold=threshold)])
    assert torch.equal(peer.trace.passes[0].halt_layer == 0, confidence > threshold)
    assert 0.3 < float((confidence > threshold).float().mean()) < 0.7


def test_the_threshold_of_a_confidence_decays_with_the_slot() -> None:
    cosine = 0.76  # between 0.72 + 0.1 and 0.72
    after = torch.tensor([cosine, (1 - cosine**2) ** 0.5, *[0.0] * 6]).expand(1, 12, 8)
    one = Pass([12])
    policy = ConfidenceExit(threshold=0.8, temperature=3.0, horizon=10)
    one.ask(policy, 2, before=torch.eye(8)[0].expand(1, 12, 8), after=after)
    assert one.halted(2)[0].tolist() == [0.72 + 0.1 * math.exp(-0.3 * t) < cosine for t in range(12)]


# -- merging ---------------------------------------------------------------------------------------------------------------------
def matched_one_by_one(metric: torch.Tensor, free: list[int], k: int) -> set[frozenset[int]]:
    """The groups of ToMe, without vectors."""
    a, b = free[0::2], free[1::2]
    if not a or not b:
        return set()
    unit = torch.nn.functional.normalize(metric, dim=-1)
    edges = [(max((float(unit[i] @ unit[j]), -n) for n, j in enumerate(b)), i) for i in a]
    groups: dict[int, set[int]] = {}
    for (_, n), i in sorted(edges, key=lambda edge: (-edge[0][0], edge[1]))[:k]:
        groups.setdefault(b[-n], {b[-n]}).add(i)
    return {frozenset(group) for group in groups.values()}


@given(st.integers(1, 30), st.integers(0, 999), st.integers(0, 10))
def test_the_matching_is_tome_s(n: int, seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    metric = torch.randn(2, n, 6, generator=generator)
    free = torch.rand(2, n, generator=generator) < 0.8
    into = match(metric, free, torch.tensor([[k], [k]]))
    for row in range(2):
        groups: dict[int, set[int]] = {}
        for column, target in enumerate(into[row].tolist()):
            groups.setdefault(target, set()).add(column)
        merged = {frozenset(group) for group in groups.values() if len(group) > 1}
        assert merged == matched_one_by_one(metric[row], free[row].nonzero().flatten().tolist(), k)
        assert all(target == max(group) for target, group in groups.items())  # in the last of them: nothing flows backward


@given(st.integers(12, 60), st.sampled_from([0.03, 0.08]))
def test_merging_takes_its_share_after_every_layer_until_none_is_left_to_match(n: int, r: float) -> None:
    ids = torch.arange(1, n + 1)[None] % tiny.VOCABULARY
    peer = tiny.forward(tiny.load("gpt2"), tiny.Batch((tuple(ids[0].tolist()),)), [TokenMerging(r=r, protect_first=1)])
    active = peer.trace.active_counts().tolist()
    assert active == [n - math.floor(r * n * layer + 0.5) for layer in range(tiny.LAYERS)]
    state = peer.trace.passes[0]
    assert int(state.fused_layer[0, 0]) == int(state.fused_layer[0, -1]) == tiny.LAYERS - 1


# -- pruning and one-shot halting ------------------------------------------------------------------------------------------------
def test_pruning_keeps_what_the_last_token_attends_to() -> None:
    model = tiny.load("llama", "eager")
    with torch.no_grad():
        attention = model(LONG.ids, output_attentions=True).attentions[1].mean(1)[0, -1]  # (N,) from the last token
    pruning = PromptPruning(layers=(0.4,), kept=(0.5,), protect_first=0)
    peer = tiny.forward(tiny.load("llama"), LONG, [pruning])
    kept = peer.trace.passes[0].halt_layer[0] == tiny.LAYERS - 1
    assert kept[-1]
    order = attention[:-1].argsort(descending=True)
    assert kept[:-1].nonzero().flatten().tolist() == sorted(order[:15].tolist())


@given(st.integers(8, 40))
def test_pruning_is_progressive_and_what_was_dropped_has_no_kv_above(n: int) -> None:
    batch = tiny.Batch((tuple(i % 60 + 1 for i in range(n)),))
    pruning = PromptPruning(layers=(0.2, 0.6), kept=(0.7, 0.4), protect_first=1)
    peer = tiny.forward(tiny.load("gpt2"), batch, [pruning], chunks=[n])
    shares = [1.0, 0.7, 0.7, 0.4, 0.4]
    left = [max(2, n - math.floor((1 - share) * n + 0.5)) for share in shares]
    assert peer.trace.active_counts().tolist() == left
    assert [int(layer.lengths[0]) for layer in peer.run._cache.layers] == left


def test_one_shot_halting_halts_the_smallest_attention_outputs_once() -> None:
    model = tiny.load("llama")
    seen: list[torch.Tensor] = []
    with model.model.layers[1].self_attn.register_forward_hook(lambda module, args, output: seen.append(output[0])):
        tiny.forward(model, LONG, [])
    norm = seen[0].norm(dim=-1)[0, :-1]  # the last token is spared
    peer = tiny.forward(model, LONG, [OneShotHalting(start=0.4, halted_share=0.5, protect_first=0)], chunks=[24, 8])
    whole = tiny.forward(model, LONG, [OneShotHalting(start=0.4, halted_share=0.5, protect_first=0)])
    halted = whole.trace.passes[0].halt_layer[0] < tiny.LAYERS - 1
    assert halted[:-1].nonzero().flatten().tolist() == sorted(norm.argsort()[:16].tolist())
    assert set(whole.trace.passes[0].halt_layer[0].tolist()) == {1, tiny.LAYERS - 1}
    assert (peer.trace.passes[1].halt_layer == tiny.LAYERS - 1).all()  # what follows the prompt is left alone


# -- attention spans and eviction ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize(("window", "sinks"), [(5, 0), (5, 2), (1, 3)])
def test_sinks_and_window_keep_exactly_those_slots(window: int, sinks: int, execution: str) -> None:
    modules = [SinkAttention(window=window, sinks=sinks)]
    for store in tiny.forward(tiny.load("llama"), RAGGED, modules, chunks=[24, 3, 1], execution=execution).run._cache.layers:
        for row, n in enumerate((28, 18)):
            expected = sorted({*range(sinks), *range(n - window + 1, n)})
            assert store.slots[row][store.is_entry[row]].tolist() == expected


@torch.no_grad()
def test_a_window_is_the_model_s_own_sliding_window() -> None:
    ours, theirs = tiny.build("mistral", sliding_window=None), tiny.build("mistral", sliding_window=6)
    windowed = tiny.forward(ours, LONG, [SlidingWindow(window=6)], chunks=[20, 11, 1])
    tiny.assert_close(windowed.logits, tiny.forward(theirs, LONG, [], chunks=[20, 11, 1]).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_what_was_evicted_is_what_nobody_attends_to(family: str) -> None:
    """The same logits come of the plain model under a mask that hides from later queries what left after the prompt."""
    model = tiny.load(family)
    evicting = tiny.forward(model, LONG, [HeavyHitter(heavy=0, recent=6)], chunks=[20, 12])
    visible = torch.ones(32, 32, dtype=torch.bool).tril()
    visible[20:, :14] = False
    plain = model(LONG.ids, attention_mask=visible[None, None].expand(1, 1, -1, -1), use_cache=False).logits
    tiny.assert_close(evicting.logits, plain)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize("chunks", [[32], [20, 11, 1], [16, *[1] * 16]])
def test_heavy_hitters_are_those_that_received_most(family: str, chunks: list[int]) -> None:
    """Room for all: the sums are those of the model's own attention matrices. Eager, because sdpa keeps no weights."""
    with torch.no_grad():
        attentions = tiny.load(family, "eager")(LONG.ids, output_attentions=True).attentions
    model = tiny.load(family, "sdpa")
    received = tiny.forward(model, LONG, [HeavyHitter(heavy=32, recent=1)], chunks=chunks).run._cache.layers
    for layer, weights in zip(received, attentions, strict=True):
        torch.testing.assert_close(layer.entries["attention"], weights.mean(1).sum(1), atol=1e-4, rtol=1e-4)
    # and with less room those leave that received least
    kept = tiny.forward(model, LONG, [HeavyHitter(heavy=6, recent=4)], chunks=[32]).run._cache.layers[0]
    total = attentions[0].mean(1).sum(1)[0]
    assert kept.slots[0].tolist() == sorted([*total[:28].argsort(descending=True)[:6].tolist(), 28, 29, 30, 31])


@pytest.mark.parametrize("criterion", ["attention", "random"])
def test_h2o_keeps_its_budget_at_every_step_of_decoding(criterion: str) -> None:
    model = tiny.load("llama")
    inputs = {name: x for name, x in RAGGED.inputs().items() if name != "position_ids"}
    with apply(model, [HeavyHitter(heavy=5, recent=4, criterion=criterion)]) as run:
        output = model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert output.shape[1] == 40
        assert run.pass_index == 12
        for store in run._cache.layers:
            assert store.lengths.tolist() == [9, 9]
            for row, n in enumerate((39, 29)):  # the last token was never fed back
                slots = store.slots[row].tolist()
                assert slots[-4:] == list(range(n - 4, n))
        for number, one in enumerate(run.trace.passes):
            for layer in range(tiny.LAYERS):
                left = one.evicted(layer).tolist()
                assert left == ([28 - 9, 18 - 9] if number == 0 else [1, 1])
        rows, entries, heads, head_dim = 2, 9, 2, 8
        assert run.kv_bytes.billed == rows * entries * tiny.LAYERS * 2 * heads * head_dim * 4


def test_an_evicted_entry_cannot_be_taken_back() -> None:
    model = tiny.load("llama")
    with torch.no_grad(), apply(model, [SlidingWindow(window=5)]):
        cache = model(LONG.ids, use_cache=True).past_key_values
        with tiny.refused("left the cache.*without speculation", UnsupportedModelError):
            cache.crop(-2)


def test_eviction_goes_with_halting_quantization_and_fusion() -> None:
    evicting = HeavyHitter(heavy=4, recent=4)
    for others in (
        [Halting(halted_share=0.4, missing_kv="project", rule="capacity", resume_layers=0), KVSkipping()],
        [AdaptiveQuantization(bits=8)],
        [TokenFusion(fused_share=0.2, decode_every=2, rule="capacity")],
    ):
        given = tiny.load("gpt2"), RAGGED, [*others, evicting]
        compact, masked = (tiny.forward(*given, chunks=[22, *[1] * 6], execution=each) for each in ("compact", "masked"))
        tiny.assert_close(RAGGED.real(compact.logits), RAGGED.real(masked.logits), atol=2e-5)
        assert compact.run.kv_bytes.billed == compact.run.kv_bytes.resident
        assert all(int(store.lengths.max()) <= 8 for store in compact.run._cache.layers)


# -- nulls -----------------------------------------------------------------------------------------------------------------------
def test_the_null_of_evictions_is_chance_at_the_same_budget() -> None:
    modules = [HeavyHitter(heavy=3, recent=4)]
    run = tiny.forward(tiny.load("gpt2"), EVEN, modules, chunks=[20, 4])
    kind, (chance,) = by_chance(modules, run.trace, seed=3)
    assert kind == "random entries"
    null = tiny.forward(tiny.load("gpt2"), EVEN, [chance], chunks=[20, 4])
    assert null.run.kv_bytes == run.run.kv_bytes
    assert null.run._cache.layers[1].slots.tolist() != run.run._cache.layers[1].slots.tolist()
    with tiny.refused("evicted cannot be shuffled"):
        shuffled(run.trace, 0)


def test_where_nothing_is_chosen_there_is_no_null() -> None:
    for modules in ([SlidingWindow(window=5)], [Int8Dynamic()], [BFloat16(), PromptLookup()]):
        run = tiny.forward(tiny.load("gpt2"), EVEN, modules, chunks=[20, 4])
        assert by_chance(modules, run.trace, seed=3) is None
    modules = [Halting(halted_share=0.5, rule="capacity", resume_layers=0), Int8Dynamic()]
    run = tiny.forward(tiny.load("gpt2"), EVEN, modules)
    kind, (transform, replay) = by_chance(modules, run.trace, seed=3)
    assert kind == "shuffle"
    assert transform is modules[1]
    assert isinstance(replay, Replay)


# -- what changes the model ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", tiny.thinned(tiny.FAMILIES))
def test_int8_changes_logits_within_a_bound_and_its_layers_multiply_by_the_kernel_it_names(family: str) -> None:
    model = tiny.load(family)
    module = Int8Dynamic()
    dense, quantised = (tiny.forward(model, EVEN, modules).logits for modules in ([], [module]))
    assert 1e-4 < float((quantised - dense).norm() / dense.norm()) < 0.1
    with torch.no_grad(), apply(model, [module]) as run:
        counted = count_by_operator(lambda: model(EVEN.ids))
        integer = 2 * 48 * run.arch.linear_params_per_layer * run.arch.n_layers
        (kernel,) = module.kernel.split(" and ")
        named = {"int_mm": "aten._int_mm", "fbgemm_reduced": "quantized.linear_with_input_q_dq_qweight_dq_output_fp32"}
        operator = named.get(kernel.split()[0], "quantized.linear_dynamic")
        columns = 1.1 if kernel.startswith("qnnpack") else 1.0  # two more a product, which set its scale
        assert integer <= counted[operator] <= columns * integer
        assert sum(n for name, n in counted.items() if name in ("aten.mm", "aten.addmm")) == 2 * 48 * tiny.WIDTH * tiny.VOCABULARY


def test_int8_goes_with_halting_that_projects_kv() -> None:
    for family in ("gpt2", "llama", "gpt_neox"):
        modules = [Int8Dynamic(), Halting(halted_share=0.5, missing_kv="project", rule="capacity", resume_layers=0)]
        outcomes = [tiny.forward(tiny.load(family), EVEN, modules, execution=execution) for execution in ("compact", "masked")]
        # Rounding to codes magnifies the last digits of a sum.
        assert float((outcomes[0].logits - outcomes[1].logits).norm() / outcomes[1].logits.norm()) < 0.02


def test_torchao_is_asked_for_by_name_or_gives_the_same() -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"needs torchao.*\[peers\].*backend='torch'"):
            Int8Dynamic(backend="torchao")
        return
    for family in ("gpt2", "llama"):
        peers = ([], [Int8Dynamic(backend="torch")], [Int8Dynamic(backend="torchao")])
        dense, ours, theirs = (tiny.forward(tiny.load(family), EVEN, modules).logits for modules in peers)
        assert 0.5 < float((theirs - dense).norm() / (ours - dense).norm()) < 2  # they round in other places


@pytest.mark.parametrize("family", tiny.thinned(tiny.FAMILIES))
def test_bfloat16_is_the_model_loaded_in_bfloat16(family: str) -> None:
    model, converted = tiny.build(family), tiny.build(family).to(torch.bfloat16)
    for name, buffer in tiny.build(family).named_buffers():  # transformers keeps them in float32 when it loads
        converted.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
    ours = tiny.forward(model, EVEN, [BFloat16()], chunks=[20, 4])
    assert ours.logits.dtype == torch.bfloat16
    assert torch.equal(ours.logits, tiny.forward(converted, EVEN, [], chunks=[20, 4]).logits)
    assert 2 * ours.run.kv_bytes.billed == tiny.forward(model, EVEN, [], chunks=[20, 4]).run.kv_bytes.billed
    mapping = RandomMLP(protect_first=1, protect_last=3)
    mapped = tiny.forward(model, EVEN, [BFloat16(), mapping]).logits  # by maps that were bound in float32
    assert torch.equal(mapped, tiny.forward(converted, EVEN, [mapping]).logits)
    assert not torch.equal(mapped[:, 20:], ours.logits[:, 20:])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prompt_lookup_decodes_what_greedy_decoding_does_in_fewer_passes(family: str) -> None:
    model = tiny.load(family)
    prompt = torch.tensor([[5, 6, 7, 8] * 6])
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    for modules in ([], [Halting(tau_drift=0.5, tau_entropy=None, resume_layers=0)]):
        with apply(model, modules):
            wanted = model.generate(prompt, **options)
        with apply(model, [*modules, PromptLookup()]) as run:
            assert torch.equal(model.generate(prompt, **options), wanted)
            assert run.pass_index < 24


# -- prompt truncation -------------------------------------------------------------------------------------------------------------
IDS = torch.arange(1, 49).reshape(2, 24)


@pytest.fixture(scope="module", params=tiny.UNALIKE)
def model(request):
    return tiny.load(request.param)


def generated(model, ids, **options):
    return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, **options)[:, ids.shape[1] :]


def test_it_is_the_dense_models_shorter_prompt_and_its_states_stand_in_the_columns_that_were_given(model):
    with torch.no_grad():
        short = model(IDS[:, -14:], use_cache=True)
        after = model(IDS[:, :5], past_key_values=short.past_key_values)
        with apply(model, []) as run:
            model(IDS[:, -14:], logits_to_keep=1)
            wanted = run.flops
        with apply(model, [PromptTruncation(keep=14)]) as run:
            cut = model(IDS, use_cache=True, logits_to_keep=1)
            assert run.flops == wanted
            continued = model(IDS[:, :5], past_key_values=cut.past_key_values)
            whole = model(IDS, use_cache=False).logits
    torch.testing.assert_close(cut.logits, short.logits[:, -1:])
    torch.testing.assert_close(continued.logits, after.logits)
    assert cut.past_key_values.get_seq_length() == short.past_key_values.get_seq_length() == 14 + 5
    assert whole[:, :10].isnan().all()
    torch.testing.assert_close(whole[:, 10:], short.logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_cut_as_if_it_were_alone(model, side):
    mask = torch.ones_like(IDS)
    mask[1, slice(0, 9) if side == "left" else slice(15, None)] = 0
    alone = IDS[1:, 9:] if side == "left" else IDS[1:, :15]
    with torch.no_grad(), apply(model, [PromptTruncation(keep=0.5)]):
        logits = model(IDS, attention_mask=mask).logits[1][mask[1].bool()]
        torch.testing.assert_close(logits, model(alone).logits[0], equal_nan=True)
        if side == "left":
            assert torch.equal(generated(model, IDS, attention_mask=mask)[1:], generated(model, alone))


def test_it_writes_what_the_shorter_prompt_writes_and_does_not_speculate(model):
    wanted = generated(model, IDS[:, -14:])
    beams = generated(model, IDS[:, -14:], num_beams=2)
    with apply(model, [PromptTruncation(keep=14)]):
        assert torch.equal(generated(model, IDS), wanted)
        assert torch.equal(generated(model, IDS, num_beams=2), beams)
        with tiny.refused("cuts the prompt, and speculative decoding"):
            generated(model, IDS[:1], prompt_lookup_num_tokens=2)
    assert torch.equal(generated(model, IDS[:, -14:]), wanted)  # nothing is left behind


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    keep=st.floats(0.01, 1.0) | st.integers(1, 24),
    which=st.sampled_from(["last", "ends", "random"]),
)
def test_as_many_are_kept_as_asked_for_and_always_the_last(lengths, keep, which):
    valid = torch.zeros(len(lengths), 24, dtype=torch.bool)
    for row, length in enumerate(lengths):
        valid[row, 24 - length :] = True
    module = PromptTruncation(keep=keep, which=which)
    if isinstance(keep, int) and keep > max(lengths):
        with tiny.refused(f"keep={keep} is more than the prompt's {max(lengths)} tokens"):
            module.kept(valid, None)
        return
    kept = module.kept(valid, None)
    wanted = [min(keep, n) if isinstance(keep, int) else max(1, int(n * keep + 0.5)) for n in lengths]
    assert kept.sum(1).tolist() == wanted
    assert not (kept & ~valid).any()
    if which != "ends" or min(wanted) > 1:
        assert kept[:, -1].all()
    if which == "ends":
        first = valid.long().argmax(1)
        assert all(kept[row, first[row]] for row, count in enumerate(wanted) if count > 1)


def test_its_null_keeps_as_many_at_random(model):
    kind, (null,) = by_chance([PromptTruncation()], Trace(2, []), seed=7)
    assert (kind, null) == ("random tokens", PromptTruncation(which="random", seed=7))
    scores = [score(model, IDS, Protocol("continuation", 24, 20), modules=[one]) for one in (PromptTruncation(), null)]
    assert scores[0].windows["executed_flops"].tolist() == scores[1].windows["executed_flops"].tolist()
    assert scores[0].nll_nats != scores[1].nll_nats
