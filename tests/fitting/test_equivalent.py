"""The equivalent forward: the halted run's values, with a derivative."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import draws
from tiny_encoder import MODEL as ENCODER
from tiny_encoder import states

from quicksilver.fitting.equivalent import equivalent_forward
from quicksilver.modules import Replay
from quicksilver.runtime import ConfigError, TokenPolicy, apply
from quicksilver.runtime.trace import Trace


def gates_of(trace: Trace):
    """The trace's decisions as gates of 0 and 1."""
    depth = trace.passes[0].halt_layer
    return lambda layer, hidden, kept: (depth != layer).to(hidden.dtype)


@settings(max_examples=draws(6), deadline=None)
@given(
    family=st.sampled_from(["gpt2", "llama", "gpt_neox", "qwen2-mixed"]),
    batch=tiny.batches(low=4, padded=False),
    seed=st.integers(0, 50),
    last=st.sampled_from([1, 3]),
)
@torch.no_grad()
def test_a_language_models_values_are_those_of_the_halted_run_and_predicted_tokens_stay_in_sight(family, batch, seed, last):
    model = tiny.load(family)
    arch = tiny.Run(model, [], "compact", None).arch
    translator = tiny.random_translators(arch)[1]

    @dataclass
    class DropThenPredict(TokenPolicy):
        @property
        def translators(self):
            return {1: translator} if last == 1 else {}

        def decide(self, view, tokens):
            if view.layer <= last:
                chosen = tokens.active & (tiny.chance(seed, view.layer, view.slots, view.input_ids) < 0.4)
                predicts = view.layer == last == 1
                how = {"missing_kv": "predict", "translator": translator} if predicts else {"missing_kv": "drop"}
                tokens.halt(chosen, **how)

    halted = tiny.forward(model, batch, [DropThenPredict()])
    decided = gates_of(halted.trace)
    gate = lambda layer, *states: decided(layer, *states) if layer <= last else None
    with equivalent_forward(model, gate, translators={1: translator} if last == 1 else {}):
        tiny.assert_close(model(**batch.inputs(), use_cache=False).logits, halted.logits)


@torch.no_grad()
def test_a_gate_that_drops_behind_one_that_predicts_is_refused():
    model = tiny.load("gpt2")
    translators = {0: tiny.random_translators(tiny.Run(model, [], "compact", None).arch)[0]}
    with (
        equivalent_forward(model, lambda layer, hidden, kept: kept, translators=translators),
        pytest.raises(ConfigError, match="The gate after layer 1 drops tokens behind one that predicts"),
    ):
        model(torch.tensor([[1, 2, 3]]), use_cache=False)


@torch.no_grad()
def test_an_encoders_values_are_those_of_the_halted_run_and_nothing_is_left_behind():
    given_states = states(3, 12)
    plain = ENCODER(given_states)
    depth = torch.randint(0, 5, (3, 12), generator=torch.Generator().manual_seed(1)).short()
    with equivalent_forward(ENCODER, lambda layer, hidden, kept: (depth != layer).float()) as mask:
        equivalent = ENCODER(given_states)
    with apply(ENCODER, [Replay(_trace(depth))]) as run:
        halted = ENCODER(given_states)
    assert not torch.allclose(halted, plain, atol=1e-3)
    torch.testing.assert_close(equivalent, halted, atol=2e-6, rtol=1e-5)
    for layer, kept in enumerate(mask.kept):
        assert torch.equal(torch.ones(3, 12) if kept is None else kept, run.trace.passes[0].active(layer).float())
    assert torch.equal(ENCODER(given_states), plain)


def _trace(depth: torch.Tensor) -> Trace:
    from quicksilver.runtime.pass_state import PassState
    from quicksilver.runtime.trace import PassTrace

    rows, n = depth.shape
    state = PassState(torch.ones(rows, n, dtype=torch.bool), torch.arange(n).expand(rows, -1), tiny.LAYERS)
    state.halt_layer = depth
    return Trace(tiny.LAYERS, [PassTrace.of(state, 0)])


def test_the_derivative_is_that_of_the_soft_mask_and_halted_tokens_have_one():
    given_states = states(1, 8).double()
    model = ENCODER.double()
    try:
        g = torch.ones(1, 8, dtype=torch.double)
        g[0, [2, 5]] = 0.0

        def loss(value: torch.Tensor) -> torch.Tensor:
            with equivalent_forward(model, lambda layer, hidden, kept: value if layer == 1 else None):
                return model(given_states).square().sum()

        point = g.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(point), point)
        with torch.no_grad():
            for token in range(8):
                step = torch.zeros_like(g)
                step[0, token] = 1e-6 if g[0, token] == 0 else -1e-6  # a mask beyond 0 or 1 would be a negative weight
                change = float(loss(g + step) - loss(g)) / float(step[0, token])
                assert float(slope[0, token]) == pytest.approx(change, rel=1e-4, abs=1e-5)
        assert slope[0, [2, 5]].abs().min() > 1e-6
    finally:
        ENCODER.float()
