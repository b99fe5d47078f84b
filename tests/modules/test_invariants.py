"""Every module, of ours and of the peers, keeps the invariants of the runtime, is no no-op, and leaves nothing behind (docs/design.md §8).

Quantized runs are compared in float64: rounding to a code is not continuous, so a difference of 1e-7 between two float32 executions may move a
value to its neighbouring code, and that is no error of either.
"""

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from drawing import Preset, RandomMLP
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import diagonal, draws
from tiny import EVEN, LONG, RAGGED
from transformers import PreTrainedModel

from quicksilver.baselines.eviction import HeavyHitter, SinkAttention, SlidingWindow
from quicksilver.baselines.halting import ConfidenceExit, OneShotHalting, PromptPruning, StaticExit
from quicksilver.baselines.number_formats import BFloat16, Int8Dynamic
from quicksilver.baselines.prompts import PromptLookup
from quicksilver.baselines.token_merging import TokenMerging
from quicksilver.measure.audit import audit
from quicksilver.measure.flop_counter import count_executed
from quicksilver.measure.perplexity import Protocol, check_allowed, score
from quicksilver.modules import (
    AdaptiveQuantization,
    ExponentialDecay,
    Halting,
    KVSkipping,
    LearnedHalting,
    RandomHalting,
    Replay,
    Schedule,
    StagedHalting,
    StaticDepth,
    TokenFusion,
    WordClassHalting,
    shuffled,
)
from quicksilver.modules.kernels import BlockAttention
from quicksilver.modules.learned_halting import TrainedGates
from quicksilver.runtime import RuntimeModule, Trace, Transform, apply

WEIGHT = 0.3 * torch.randn(2, tiny.WIDTH, generator=torch.Generator().manual_seed(0))
GATES = TrainedGates((0, 2), WEIGHT, torch.full((2,), 0.3), tiny.LAYERS)
WORDS = {"function_ids": [3, 9, 31], "letter_ids": range(1, 60), "begin_ids": [], "end_ids": range(1, 60)}

CAUSAL: dict[str, Callable[[], RuntimeModule]] = {
    "static_exit": lambda: StaticExit(depth=0.6),
    "confidence_state": lambda: ConfidenceExit(threshold=0.8),
    "confidence_softmax": lambda: ConfidenceExit(measure="softmax", threshold=0.05, temperature=2.0, horizon=20),
    "sliding_window": lambda: SlidingWindow(window=5),
    "sink_attention": lambda: SinkAttention(window=6, sinks=2),
    "halting": lambda: Halting(tau_drift=0.9, tau_entropy=None, resume_layers=1),
    "halting_entropy": lambda: Halting(
        tau_drift=0.2, tau_entropy=3.6, drift="cosine", entropy="latent", window=(0, 1), resume_layers=0
    ),
    "random_halting": lambda: RandomHalting(rate=0.3, window=(0.0, 1.0), resume_layers=0),
    "uneven_decay": lambda: ExponentialDecay(even=False, alpha=0.3),
    "static_depth": lambda: StaticDepth(depth=0.5, missing_kv="drop"),
    "learned_halting": lambda: LearnedHalting(gates=GATES, protect_first=0, protect_last=None, missing_kv="project"),
    "quantization": lambda: AdaptiveQuantization(tau_low=3.5, tau_high=3.8, depth=0.2),
    "quantization_again": lambda: AdaptiveQuantization(
        source="latent", tau_low=2.2, tau_high=2.8, depth=0.2, reassign=True, group_size=None
    ),
    "quantization_mix": lambda: AdaptiveQuantization(mix=(0.3, 0.4, 0.3), depth=0.2, scope="residual"),
    "quantization_int8": lambda: AdaptiveQuantization(mix=(0.3, 0.4, 0.3), widths=(2, 8, 16), depth=0.2, execution="int8"),
}
IN_PROMPTS: dict[str, Callable[[], RuntimeModule]] = {
    "token_merging": lambda: TokenMerging(r=0.1),
    "token_merging_states": lambda: TokenMerging(r=0.2, metric="states", proportional=False, start=0.5),
    "prompt_pruning": lambda: PromptPruning(),
    "one_shot_halting": lambda: OneShotHalting(protect_first=1),
    "heavy_hitter": lambda: HeavyHitter(heavy=3, recent=4),
    "halting_by_position": lambda: Halting(rule="capacity", signal="position", missing_kv="drop", resume_layers=0),
    "halting_by_attention": lambda: Halting(rule="capacity", signal="attention", resume_layers=1),
    "even_decay": lambda: ExponentialDecay(alpha=0.2),
    "staged_halting": lambda: StagedHalting(protect_first=1),
    "preset_halting": lambda: Preset(schedule=Schedule(1, 0.25, 3, 2, 5)),
    "linear_mlp": lambda: RandomMLP(protect_first=1, protect_last=3),
    "preset_of_both": lambda: Preset(schedule=Schedule(1, 0.0, 3, 2, 5, linear_mlp=(1, 2), protect_at_most=0.2)),
    "word_classes": lambda: WordClassHalting(depth=0.4, protect_first=0, protect_last=None, **WORDS),
    "kv_skipping": lambda: KVSkipping(criterion="attention", skipped_share=0.4, last_queries=4, protect_first=1),
    "token_fusion": lambda: TokenFusion(rule="capacity", protect_first=1, decode_every=2),
    "token_fusion_near": lambda: TokenFusion(
        start=0.2, every=1, tau_fuse=0.5, criterion="cosine", merge="attention", proportional=True
    ),
    "token_fusion_apart": lambda: TokenFusion(start=0.4, tau_fuse=1e9, tau_attention=-1.0, max_group=2),
    "quantization_minmax": lambda: AdaptiveQuantization(normalisation="minmax", tau_low=0.3, tau_high=0.6, depth=0.2),
}
MODULES = CAUSAL | IN_PROMPTS
TRANSFORMS: dict[str, Callable[[], Transform]] = {
    "int8_dynamic": Int8Dynamic,
    "bfloat16": BFloat16,
    "prompt_lookup": PromptLookup,
}
EVERYTHING = MODULES | TRANSFORMS
EVICTING = ("sliding_window", "sink_attention", "heavy_hitter")
# Each with the dial where nothing is left to do.
DENSE: dict[str, RuntimeModule] = {
    "static_exit at the last layer": StaticExit(depth=1.0),
    "confidence_exit that is never confident (state)": ConfidenceExit(threshold=1.0),
    "confidence_exit that is never confident (softmax)": ConfidenceExit(measure="softmax", threshold=1.0),
    "token_merging with r = 0": TokenMerging(r=0.0),
    "prompt_pruning of 0%": PromptPruning(layers=(0.25, 0.5), kept=(1.0, 1.0)),
    "one_shot_halting of 0%": OneShotHalting(halted_share=0.0),
    "sliding_window as long as the text": SlidingWindow(window=32),
    "sink_attention with window and sinks as long as the text": SinkAttention(window=28, sinks=4),
    "heavy_hitter with room for all": HeavyHitter(heavy=16, recent=16),
    "halting of 0%": Halting(rule="capacity", halted_share=0.0, resume_layers=0),
    "gates that are all open": LearnedHalting(gates=GATES, threshold=0.0, protect_first=0),
    "kv_skipping below 0": KVSkipping(criterion="attention", tau_kv=0.0),
    "token_fusion of 0%": TokenFusion(rule="capacity", fused_share=0.0),
    "attention in blocks": BlockAttention(block=5),
    "quantization to 16 bits": AdaptiveQuantization(bits=16),
    "quantization to 16 bits, int8": AdaptiveQuantization(bits=16, execution="int8", reassign=True),
    "quantization to 16 bits, residual": AdaptiveQuantization(bits=16, scope="residual"),
}
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False}, "beams": {"do_sample": False, "num_beams": 2}, "sampling": {"do_sample": True, "top_k": 0},
}  # fmt: skip


def model_for(name: str, family: str) -> PreTrainedModel:
    """In float64 where codes are compared; but eager Gemma 2 makes NaN of padding there."""
    exact = name.startswith("quantization") and family not in tiny.EAGER_ONLY
    return tiny.load(family, dtype=torch.float64 if exact else torch.float32)


@functools.cache
def dense(model: PreTrainedModel, batch: tiny.Batch, *chunks: int) -> tiny.Outcome:
    """Of the model without a module, once for all of them."""
    return tiny.forward(model, batch, [], chunks=chunks or None)


@functools.cache
def wide() -> PreTrainedModel:
    """So wide that what no ledger counts (norms, codes) does not matter."""
    return tiny.build("gpt2", n_embd=64)


@pytest.mark.parametrize(("name", "family"), diagonal(DENSE, tiny.unlike_first(tiny.FAMILIES), n=2 * len(DENSE)))
def test_where_its_dial_stands_at_nothing_a_module_is_the_dense_model(name: str, family: str) -> None:
    if "blocks" in name and family in tiny.EAGER_ONLY:
        pytest.skip("there is no attention in blocks under eager")
    plain, found = (
        dense(tiny.load(family), LONG, 24, 7, 1),
        tiny.forward(tiny.load(family), LONG, [DENSE[name]], chunks=[24, 7, 1]),
    )
    tiny.assert_close(found.logits, plain.logits)
    assert torch.equal(found.logits[:, :24], plain.logits[:, :24]) or "conf" in name or "blocks" in name  # other sums
    assert found.run.flops.paper == plain.run.flops.paper


# A module is replayed by either execution, the next family by the other: their number is odd.
REPLAYED = diagonal(MODULES, tiny.unlike_first(tiny.FAMILIES), ["compact", "masked"], n=2 * len(MODULES))


@pytest.mark.parametrize(("name", "family", "replayed"), REPLAYED)
def test_masked_and_a_replay_from_a_file_are_the_run_which_is_not_the_dense_one(
    name: str, family: str, replayed: str, tmp_path: Path
) -> None:
    model, module, chunks = model_for(name, family), MODULES[name](), [20, 7, 1]
    with tiny.unless_blind(model) as blind:
        run, plain = tiny.forward(model, RAGGED, [module], chunks=chunks), dense(model, RAGGED, *chunks)
    if blind:
        pytest.skip("skipping leaves a token of a sliding window without a key, which eager attention refuses")
    assert torch.cat(RAGGED.real(run.logits - plain.logits)).abs().max() > 0.01
    assert run.run.kv_bytes.billed == run.run.kv_bytes.resident
    run.trace.save(tmp_path / "trace.safetensors")
    replay = Replay(Trace.load(tmp_path / "trace.safetensors"), like=[module])
    codes_may_differ = name.startswith("quantization") and family in tiny.EAGER_ONLY
    for modules, execution in (([MODULES[name]()], "masked"), ([replay], replayed)):
        other = tiny.forward(model, RAGGED, modules, chunks=chunks, execution=execution)
        tiny.assert_same_run(RAGGED, other, run, atol=0.3 if codes_may_differ else 2e-5)
        assert run.run.kv_bytes.billed == other.run.kv_bytes.billed or (execution == "masked" and "quantization" in name)
        assert run.run.flops.nominal == other.run.flops.nominal


ROW_BY_ROW = [name for name in MODULES if "minmax" not in name]  # that one is over the batch, as it says itself


@pytest.mark.parametrize(("name", "family"), diagonal(ROW_BY_ROW, ["gpt2", "llama"], n=len(ROW_BY_ROW)))
def test_batch_mates_and_padding_do_not_matter(name: str, family: str) -> None:
    model = model_for(name, family)
    together = tiny.forward(model, RAGGED, [MODULES[name]()], chunks=[28])
    kept = together.run._cache.layers[-2]
    for i in range(2):
        alone = tiny.forward(model, RAGGED.alone(i), [MODULES[name]()], chunks=[len(RAGGED.rows[i])])
        tiny.assert_close(RAGGED.real(together.logits)[i], alone.logits[0])
        store = alone.run._cache.layers[-2]
        if store.entries is not None:
            assert kept.slots[i][kept.is_entry[i]].tolist() == store.slots[0].tolist()


@settings(max_examples=draws(10))
@given(st.data())
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_module_decides_the_same_in_prefill_in_chunks_and_token_by_token(name: str, data: st.DataObject) -> None:
    model = model_for(name, data.draw(st.sampled_from(["gpt2", "llama", "qwen2-mixed"])))
    batch = data.draw(tiny.batches(low=2, high=14))
    module = CAUSAL[name]()
    assert module.causal
    whole = tiny.forward(model, batch, [module])
    chunked = tiny.forward(model, batch, [module], chunks=data.draw(tiny.chunkings(batch.width)))
    tiny.assert_same_run(batch, whole, chunked)


# Other tokens, the same decisions.
BY_PLACE = (
    *("linear_mlp", "preset_of_both", "heavy_hitter", "halting_by_position"),
    *("even_decay", "staged_halting", "preset_halting", "word_classes"),
)


@pytest.mark.parametrize("name", EVERYTHING)
def test_no_module_lets_a_later_token_through_or_it_is_refused(name: str) -> None:
    module, everywhere = EVERYTHING[name](), Protocol("all", 24, 16, 2)
    for protocol in [Protocol("continuation", 24, 16, 2)] + [everywhere] * module.causal:
        found = audit(model_for(name, "llama"), EVEN.ids, protocol, [module], n_probes=3)
        assert found.max_abs_logit_difference <= 1e-5 * found.max_abs_logit
    if not module.causal:
        with tiny.refused("looks ahead.*protocol=continuation.*lookahead=true"):
            check_allowed([module], everywhere)
        module.lookahead = True
        check_allowed([module], everywhere)
        if name not in BY_PLACE:
            assert audit(model_for(name, "llama"), EVEN.ids, everywhere, [module], n_probes=3).max_abs_logit_difference > 1e-3


@pytest.mark.parametrize("name", [*MODULES, "int8_dynamic"])
def test_executed_flops_are_what_is_interposed(name: str) -> None:
    model = tiny.load("llama") if name in ("learned_halting", "preset_halting") else wide()
    for batch, chunks in ((EVEN, [20, 4]), (RAGGED, [28])):
        with torch.no_grad(), apply(model, [EVERYTHING[name]()]) as run:
            interposed = count_executed(lambda batch=batch, chunks=chunks: tiny.passes(model, batch.inputs(), chunks))
            assert run.flops.executed == pytest.approx(interposed, rel=0.01)


@pytest.mark.parametrize("name", [*MODULES])
def test_ledgers_by_window_add_up_to_the_run_s(name: str) -> None:
    model, module = tiny.load("gpt2"), MODULES[name]()
    for protocol in [Protocol("continuation", 24, 16, 2)] + [Protocol("all", 24, 16, 2)] * module.causal:
        frame = score(model, EVEN.ids, protocol, modules=[module]).windows
        with torch.no_grad(), apply(model, [MODULES[name]()]) as run:
            if protocol.name == "all":
                model(EVEN.ids, use_cache=False)
            else:
                cache = model(EVEN.ids[:, :16], use_cache=True, logits_to_keep=1).past_key_values
                model(EVEN.ids[:, 16:-1], past_key_values=cache, use_cache=True)
            columns = {"executed": run.flops.executed, "nominal": run.flops.nominal, "signal": run.flops.signals}
            assert {column: int(frame[f"{column}_flops"].sum()) for column in columns} == columns
            assert int(frame["paper_flops"].sum()) == pytest.approx(run.flops.paper, abs=2)


@pytest.mark.parametrize("name", [*EVERYTHING, "block_attention"])
def test_deciding_alone_changes_no_logit_and_nothing_is_left_on_the_model_or_in_memory(name: str) -> None:
    model, make = tiny.load("llama"), (EVERYTHING | {"block_attention": BlockAttention})[name]
    logits = dense(model, EVEN).logits
    with tiny.left_untouched(model):
        if name in MODULES and name not in EVICTING:
            tiny.assert_close(tiny.forward(model, EVEN, [make()], execution="decide").logits, logits)
        with pytest.raises(RuntimeError, match="a mishap"), apply(model, [make()]):
            raise RuntimeError("a mishap")
        module = make()
        gc.disable()  # the cache of a run must not wait for it
        try:
            with torch.no_grad(), apply(model, [module]) as run:
                outputs = tiny.passes(model, EVEN.inputs(), [20, 4])
            left = [weakref.ref(run), weakref.ref(outputs[-1].past_key_values)]
            del run, outputs
            assert [one() for one in left] == [None, None]
        finally:
            gc.enable()
    assert torch.equal(tiny.forward(model, EVEN, []).logits, logits)


@pytest.mark.parametrize(("name", "how"), diagonal(MODULES, HOW))
@torch.no_grad()
def test_compact_generates_what_masked_generates_in_left_padded_batches(name: str, how: str) -> None:
    model, written = model_for(name, "gpt2"), []
    for execution in ("compact", "masked"):
        torch.manual_seed(1)
        with apply(model, [MODULES[name]()], execution=execution) as run:
            written.append(model.generate(RAGGED.ids, attention_mask=RAGGED.mask, max_new_tokens=4, min_new_tokens=4, **HOW[how]))
        assert execution == "masked" or run.kv_bytes.billed == run.kv_bytes.resident > 0
    assert torch.equal(*written)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in EVICTING])
def test_its_null_decides_as_much_of_other_tokens(name: str) -> None:
    model, modules = model_for(name, "llama"), [MODULES[name]()]
    run = tiny.forward(model, RAGGED, modules)
    null = tiny.forward(model, RAGGED, [Replay(shuffled(run.trace, 0), like=modules)])
    assert null.trace.active_counts().tolist() == run.trace.active_counts().tolist()
    assert null.run.flops.nominal == pytest.approx(run.run.flops.nominal, rel=0.01)  # the same tokens see other numbers of keys
    for layer in range(tiny.LAYERS):
        for a, b in zip(run.trace.passes, null.trace.passes, strict=True):
            assert torch.equal(a.kv_present(layer).sum(1), b.kv_present(layer).sum(1))
            assert torch.equal(a.bits(layer).sort(1).values, b.bits(layer).sort(1).values)
    if name not in ("static_exit", "static_depth"):  # where all are chosen there are no others
        assert not torch.allclose(torch.cat(RAGGED.real(null.logits)), torch.cat(RAGGED.real(run.logits)), atol=1e-4)
