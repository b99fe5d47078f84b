"""All 2⁴ combinations of the mechanisms: the invariants of each hold for all of them together (docs/design.md §8).

In float64: where codes have two bits, the last digit of a float32 sum, which follows the shapes, decides a whole step.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import drawing
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import diagonal, draws
from tiny import Batch
from transformers import PreTrainedModel

from quicksilver.measure import Protocol, check_allowed, count_executed, score
from quicksilver.measure.perplexity import audit
from quicksilver.modules import AdaptiveQuantization, Halting, KVSkipping, RandomHalting, Replay, TokenFusion
from quicksilver.runtime import ConfigError, RuntimeModule, apply

MECHANISMS: dict[str, Any] = {
    "halting": lambda: Halting(tau_drift=0.95, window=(0.0, 1.0), missing_kv="project", resume_layers=1, tau_entropy=None),
    "kv_skipping": lambda: KVSkipping(protect_first=1),
    "fusion": lambda: TokenFusion(rule="capacity", fused_share=0.3, start=0.2, every=1, protect_first=1),
    "quantization": lambda: AdaptiveQuantization(depth=0.2, tau_low=3.4, tau_high=3.7),
}
COMBINATIONS = [names for n in range(5) for names in itertools.combinations(MECHANISMS, n)]
HOW: dict[str, Any] = {
    "greedy": {"do_sample": False}, "sampling": {"do_sample": True, "top_k": 0}, "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
}  # fmt: skip
FAMILIES = ("gpt2", "llama", "qwen2-mixed", "gpt_neox")
EVERY = pytest.mark.parametrize("names", COMBINATIONS, ids=lambda names: "+".join(names) or "none")
PROTOCOL = Protocol("continuation", window_tokens=24, prompt_tokens=15, batch_size=4)


def modules_of(names: tuple[str, ...]) -> list[RuntimeModule]:
    """`kv_skipping` follows halting; where nothing halts, it skips what gets least attention."""
    alone = {"kv_skipping": lambda: KVSkipping(criterion="attention", skipped_share=0.3, last_queries=4, protect_first=1)}
    return [(MECHANISMS if "halting" in names else MECHANISMS | alone)[name]() for name in names]


@functools.cache
def exact(family: str) -> PreTrainedModel:
    """In float64. Tests leave it as they found it."""
    return tiny.build(family).double()


def windows(rows: int, tokens: int = 24) -> torch.Tensor:
    return torch.randint(1, tiny.VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(3))


def ragged() -> st.SearchStrategy[Batch]:
    """Rows without a token twice: which of two equal distances is the lower is for rounding to say."""
    row = st.lists(st.integers(1, tiny.VOCABULARY - 1), min_size=5, max_size=14, unique=True).map(tuple)
    return st.builds(Batch, st.lists(row, min_size=1, max_size=3).map(tuple), st.integers(0, 2))


def fusions() -> st.SearchStrategy[TokenFusion]:
    return st.builds(
        TokenFusion, rule=st.sampled_from(["capacity", "threshold"]), criterion=st.sampled_from(["l2", "cosine", "attention", "random"]),
        attention_queries=st.sampled_from([3, None]), tau_fuse=st.just(0.5), fused_share=st.sampled_from([0.2, 0.5]),
        start=st.sampled_from([0.2, 0.4]), every=st.sampled_from([0, 1]), merge=st.sampled_from(["size", "mean", "attention"]),
        proportional=st.booleans(), first=st.sampled_from(["halting", "fusion"]), protect_first=st.just(1),
        decode_every=st.sampled_from([0, 2]),
    )  # fmt: skip


def halting() -> st.SearchStrategy[RuntimeModule]:
    seen, resumed = st.sampled_from(["drop", "project", "copy", "zero"]), st.sampled_from([0, 1])
    everywhere = st.just((0.0, 1.0))
    return st.one_of(
        st.builds(RandomHalting, rate=st.just(0.2), missing_kv=seen, window=everywhere, resume_layers=resumed),
        st.builds(Halting, tau_drift=st.just(0.95), tau_entropy=st.none(), window=everywhere, missing_kv=seen, resume_layers=resumed),
        st.builds(Halting, rule=st.just("capacity"), signal=st.sampled_from(["drift", "attention"]), halted_share=st.just(0.4),
                  window=st.just((0.0, 0.6)), missing_kv=seen, resume_layers=resumed),
    )  # fmt: skip


def drawn(names: tuple[str, ...]) -> st.SearchStrategy[list[RuntimeModule]]:
    """The mechanisms of these names with any options."""
    options = {"halting": halting(), "fusion": fusions(), "quantization": drawing.quantizing(causal=False)}
    return st.tuples(*(options.get(name, st.just(None)) for name in names)).map(
        lambda made: [fixed if one is None else one for one, fixed in zip(made, modules_of(names), strict=True)]
    )


@EVERY
@settings(max_examples=draws(4))
@given(data=st.data(), batch=ragged(), family=st.sampled_from(FAMILIES))
def test_compact_is_masked_is_a_replay_and_no_row_depends_on_another(
    names: tuple[str, ...], data: st.DataObject, batch: Batch, family: str
) -> None:
    model, modules = exact(family), data.draw(drawn(names))
    chunks = data.draw(st.none() | tiny.chunkings(batch.width))
    compact = tiny.forward(model, batch, modules, chunks=chunks)
    masked = tiny.forward(model, batch, modules, chunks=chunks, execution="masked")
    again = tiny.forward(model, batch, [Replay(compact.trace, like=modules)] if modules else [], chunks=chunks)
    for other in (masked, again):
        tiny.assert_close(batch.real(compact.logits), batch.real(other.logits))
        tiny.assert_same_decisions(tiny.decisions(batch, compact.trace), tiny.decisions(batch, other.trace))
        assert all(map(torch.equal, drawing.bits_of(batch, compact.trace), drawing.bits_of(batch, other.trace)))
        assert compact.run.flops.paper == other.run.flops.paper
    if chunks is not None:
        assert compact.run.kv_bytes.billed == compact.run.kv_bytes.resident
        return
    if all(module.causal for module in modules):
        cut = tiny.forward(model, batch, modules, chunks=data.draw(tiny.chunkings(batch.width)))
        tiny.assert_close(batch.real(compact.logits), batch.real(cut.logits))
        tiny.assert_same_decisions(tiny.decisions(batch, compact.trace), tiny.decisions(batch, cut.trace))
    for i in range(len(batch.rows)):
        alone = tiny.forward(model, batch.alone(i), modules)
        tiny.assert_close(alone.logits, batch.real(compact.logits)[i][None])
        assert torch.equal(drawing.bits_of(batch.alone(i), alone.trace)[0], drawing.bits_of(batch, compact.trace)[i])


@pytest.mark.parametrize(
    ("names", "how"), diagonal(COMBINATIONS, HOW, n=20), ids=lambda one: one if isinstance(one, str) else "+".join(one) or "none"
)
@settings(max_examples=1)
@given(data=st.data(), batch=ragged(), family=st.sampled_from(FAMILIES))
@torch.no_grad()
def test_compact_generates_what_masked_generates_in_left_padded_batches(
    names: tuple[str, ...], how: str, data: st.DataObject, batch: Batch, family: str
) -> None:
    model, modules, written = exact(family), data.draw(drawn(names)), []
    for execution in ("compact", "masked"):
        torch.manual_seed(1)
        with apply(model, modules, execution=execution) as run:  # type: ignore[arg-type]
            written.append(model.generate(batch.ids, attention_mask=batch.mask, max_new_tokens=6, min_new_tokens=6, **HOW[how]))
        if execution == "compact":
            assert run.kv_bytes.billed == run.kv_bytes.resident > 0
    assert torch.equal(*written)


@EVERY
def test_nothing_looks_ahead_where_it_must_not(names: tuple[str, ...]) -> None:
    """Whatever acts in a prompt, the tokens after it are predicted from what was before them; and under `all` only what is causal runs."""
    model, modules = exact("gpt2"), modules_of(names)
    assert audit(model, windows(4), PROTOCOL, modules).max_abs_logit_difference < 1e-9
    everywhere = Protocol("all", window_tokens=24, batch_size=4)
    if not all(module.causal for module in modules):
        with pytest.raises(ConfigError, match=r"(TokenFusion|KVSkipping).*lookahead"):
            check_allowed(modules, everywhere)
    else:
        assert audit(model, windows(4), everywhere, modules).max_abs_logit_difference < 1e-9


@EVERY
def test_what_is_counted_from_outside_is_what_is_billed(names: tuple[str, ...]) -> None:
    model, modules, batch = tiny.load("llama"), modules_of(names), Batch(tuple(tuple(row.tolist()) for row in windows(3)))
    runs = []
    counted = count_executed(lambda: runs.append(tiny.forward(model, batch, modules).run))
    assert runs[0].flops.executed == pytest.approx(counted, rel=0.01)


def test_every_mechanism_adds_something_to_all_the_others() -> None:
    """Or the sixteen would be fewer."""
    model = tiny.load("gpt2")
    nats = {names: score(model, windows(4), PROTOCOL, modules=modules_of(names)).nll_nats for names in COMBINATIONS}
    assert len({round(value, 6) for value in nats.values()}) == len(COMBINATIONS)
