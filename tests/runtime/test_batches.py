"""Invariant 5: a sequence does not feel its batch mates, nor padding on either side, nor what stands in the padding."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import draws
from tiny import Batch, Hashed

from quicksilver.runtime import apply


@pytest.mark.parametrize(("name", "attention"), tiny.with_attention(tiny.MODELS))
@given(data=st.data(), execution=st.sampled_from(["compact", "masked"]))
@settings(max_examples=draws(6))
def test_a_sequence_is_the_same_alone_and_in_a_left_padded_batch(
    name: str, attention: str, execution: str, data: st.DataObject
) -> None:
    model = tiny.load(name, attention)
    batch = data.draw(tiny.batches(low=2))
    modules = data.draw(tiny.policies())
    with tiny.unless_blind(model) as blind:
        together = tiny.forward(model, batch, modules, execution=execution)
    if blind:
        return
    decided = tiny.decisions(batch, together.trace)
    for i, logits in enumerate(batch.real(together.logits)):
        alone = tiny.forward(model, batch.alone(i), modules, execution=execution)
        tiny.assert_same_decisions(decided[i : i + 1], tiny.decisions(batch.alone(i), alone.trace))
        tiny.assert_close([logits], alone.logits)


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
@given(batch=tiny.batches(low=2, padded=True), data=st.data())
@settings(max_examples=draws(5))
@torch.no_grad()
def test_padding_on_the_right_is_no_difference_either(name: str, execution: str, batch: Batch, data: st.DataObject) -> None:
    """Evaluation harnesses pad on the right: no real token sees padding there, with or without a mask that says so."""
    model, modules = tiny.load(name), data.draw(tiny.policies())
    width = batch.width
    ids = torch.tensor([list(row) + [9] * (width - len(row)) for row in batch.rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch.rows])
    with apply(model, modules, execution=execution) as run:
        found = model(ids, attention_mask=mask, use_cache=False).logits
    for i, row in enumerate(batch.rows):
        alone = tiny.forward(model, batch.alone(i), modules, execution=execution)
        tiny.assert_close([found[i, : len(row)]], alone.logits)
        assert torch.equal(run.trace.passes[0].halt_layer[i, : len(row)], alone.trace.passes[0].halt_layer[0])


@given(batch=tiny.batches(low=2), policy=tiny.hashed(), name=st.sampled_from(tiny.FAMILIES))
@settings(max_examples=draws(30))
def test_the_trace_is_what_the_policy_decided(batch: Batch, policy: Hashed, name: str) -> None:
    """The decisions worked out without a runtime, from slots and ids alone."""
    found = tiny.decisions(batch, tiny.forward(tiny.load(name), batch, [policy]).trace)
    for row, decided in zip(batch.rows, found, strict=True):
        slots, ids = torch.arange(len(row)), torch.tensor(row)
        assert torch.equal(decided["halt_layer"], policy.expected_halt_layer(slots, ids, tiny.LAYERS))
        halted = decided["halt_layer"] < tiny.LAYERS - 1
        resumes = tiny.LAYERS - policy.resume_layers
        assert torch.equal(decided["resume_layer"], torch.where(halted, resumes, tiny.LAYERS).to(torch.int16))
        assert torch.equal(decided["kv_layer"], expected_kv_layer(policy, slots, ids, decided["halt_layer"]))


def expected_kv_layer(policy: Hashed, slots: torch.Tensor, ids: torch.Tensor, halt_layer: torch.Tensor) -> torch.Tensor:
    """The first layer after which the policy said of an active token that it has no K/V from now on."""
    last = torch.full(slots.shape, tiny.LAYERS - 1, dtype=torch.int16)
    if policy.skip:
        for layer in reversed(range(tiny.LAYERS - 1)):
            last[policy.skips(layer, slots, ids) & (halt_layer > layer)] = layer
    return last
