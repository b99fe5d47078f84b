"""generate(): the ragged cache under left padding, greedy, sampling, beams, rejected candidates; `compact` token for token `masked`."""

from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from thinning import diagonal, draws
from tiny import Batch, Capacity, Hashed
from transformers import GenerationConfig, pipeline

from quicksilver.baselines.eviction import HeavyHitter
from quicksilver.modules import AdaptiveQuantization, TokenFusion
from quicksilver.runtime import RuntimeModule, apply

LOOKING_AHEAD: dict[str, RuntimeModule] = {
    "halts": Capacity(0.5, at=(1,)),
    "quantizes": AdaptiveQuantization(normalisation="minmax", tau_low=0.3, tau_high=0.6, depth=0.2),
    "fuses": TokenFusion(rule="capacity", tau_fuse=None, fused_share=0.3, protect_first=1),
}


def greedy(model, batch, modules, execution="compact", tokens=6, **options):
    """The ids that are generated, and the run."""
    options |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    with apply(model, modules, execution=execution) as run:
        return model.generate(batch.ids, attention_mask=batch.mask, **options), run


@pytest.mark.parametrize("name", tiny.thinned(tiny.FAMILIES))
@given(batch=tiny.batches(low=2, high=10), policy=tiny.hashed(protect=1))
@settings(max_examples=draws(3))
def test_greedy_generation_is_what_one_prefill_of_all_of_it_would_write(name: str, batch: Batch, policy: Hashed) -> None:
    """Without a cache at all, for a causal policy: each token is the argmax over everything before it."""
    model = tiny.load(name)
    with tiny.unless_blind(model) as blind:
        ids, run = greedy(model, batch, [policy])
    if blind:
        return
    assert len(run.trace.passes) == 6
    for row, prompt in zip(ids, batch.rows, strict=True):
        written = row[-6:].tolist()
        logits = tiny.forward(model, Batch(((*prompt, *written[:-1]),)), [policy]).logits[0, -6:]
        assert logits[:, 1:].argmax(-1).tolist() == [token - 1 for token in written]  # no end of text before the sixth


@pytest.mark.parametrize(("drafts", "policy", "name"), diagonal(("lookup", "assistant"), LOOKING_AHEAD, ("gpt2", "llama")))
def test_drafts_are_no_prompt(drafts: str, policy: str, name: str) -> None:
    """A policy that looks ahead in prompts sees what the user gave, and the text is that of plain greedy decoding."""
    model, batch = tiny.load(name), Batch(((5, 9, 7, 5, 9, 7, 5, 9, 7, 5, 9),))
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if drafts == "lookup" else {"assistant_model": tiny.build(name)}
    wanted, alone = greedy(model, batch, [LOOKING_AHEAD[policy]], tokens=10)
    for execution in ("compact", "masked"):
        guessed, run = greedy(model, batch, [LOOKING_AHEAD[policy]], execution, tokens=10, **options)
        assert torch.equal(guessed, wanted)
        prompt, *rest = run.trace.passes
        assert torch.equal(prompt.halt_layer, alone.trace.passes[0].halt_layer)
        assert torch.equal(prompt.bits(4), alone.trace.passes[0].bits(4))
        assert execution == "masked" or run.kv_bytes.billed == run.kv_bytes.resident
        assert prompt.valid.shape == batch.ids.shape
        assert any(p.valid.shape[1] > 1 for p in rest)  # it did guess
        assert all(bool((p.halt_layer == tiny.LAYERS - 1).all()) and not p.fusions for p in rest)
    assert not {"_prefill", "_get_candidate_generator"} & set(vars(model))


def test_what_would_decide_by_drafts_or_chunks_is_refused() -> None:
    model, batch = tiny.load("llama"), Batch(((5, 9, 7, 5, 9, 7, 5, 9),))
    ahead, in_prompts = Capacity(0.5, at=(1,)), Capacity(0.5, at=(1,))
    ahead.lookahead = True
    for module, options, says in (
        (ahead, {"prompt_lookup_num_tokens": 3}, "without speculative decoding"),
        (HeavyHitter(heavy=2, recent=2), {"prompt_lookup_num_tokens": 3}, "without speculative decoding"),
        (in_prompts, {"assistant_model": model}, "drafts for itself"),
        (in_prompts, {"prefill_chunk_size": 3}, "prefill_chunk_size=3 gives it 8 tokens in parts"),
    ):
        with tiny.refused(says):
            greedy(model, batch, [module], **options)
    for module, size in ((in_prompts, 8), (Hashed(0.4, 0.2, "drop"), 3)):
        assert torch.equal(greedy(model, batch, [module], prefill_chunk_size=size)[0], greedy(model, batch, [module])[0])


def test_generation_goes_on_from_a_cache() -> None:
    """A conversation: the second turn starts from the first one's ragged cache."""
    model, batch = tiny.load("llama"), Batch((tuple(range(1, 12)),))
    with apply(model, [Hashed(0.4, 0.2, "drop")]):
        config = GenerationConfig(max_new_tokens=5, min_new_tokens=5, do_sample=False, eos_token_id=0, pad_token_id=0)
        first = model.generate(batch.ids, attention_mask=batch.mask, generation_config=config, return_dict_in_generate=True)
        said = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
        second = model.generate(
            said, attention_mask=torch.ones_like(said), generation_config=config, past_key_values=first.past_key_values
        )
        afresh = model.generate(said, attention_mask=torch.ones_like(said), generation_config=config)
    assert torch.equal(second, afresh)


def test_a_pipeline_runs_under_it(data_root: Any) -> None:
    """The trained model writes on; halting a few of its tokens changes the story."""
    from transformers import AutoTokenizer

    model = tiny.load(tiny.STORIES)
    tokenizer = AutoTokenizer.from_pretrained(data_root / tiny.STORIES)
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    config = GenerationConfig(max_new_tokens=16, do_sample=False, pad_token_id=0)
    plain = writer("Once upon a time", generation_config=config)[0]["generated_text"]
    assert plain.startswith("Once upon a time, there was a little")
    with apply(model, []):
        assert writer("Once upon a time", generation_config=config)[0]["generated_text"] == plain
    with apply(model, [Hashed(0.2, missing_kv="project")]) as run:
        halted = writer("Once upon a time", generation_config=config)[0]["generated_text"]
    assert halted != plain
    assert run.flops.executed < run.flops.dense_nominal * 1.01
