"""Learned halting: deterministic gates, their file, what they refuse, and the pseudo-gradient that trains them."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import draws
from tiny import LAYERS, WIDTH, Batch
from tiny_encoder import MODEL as ENCODER
from tiny_encoder import states

from quicksilver.fitting.equivalent import KeepMask, equivalent_forward
from quicksilver.fitting.gates import HaltingGates, straight_through
from quicksilver.modules import LearnedHalting, learned_halting
from quicksilver.modules.learned_halting import TrainedGates
from quicksilver.runtime import ConfigError, apply
from quicksilver.runtime.pass_state import MISSING_KV
from quicksilver.studies.token_halting.training import SparsityController


def gates(seed: int = 0, bias: float = 0.3) -> HaltingGates:
    made = HaltingGates(WIDTH, [0, 2])
    with torch.no_grad():
        made.weight.copy_(torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
        made.bias.fill_(bias)
    return made


def learned(**options) -> LearnedHalting:
    """Nobody is protected."""
    return LearnedHalting(**{"protect_first": 0, "protect_last": None} | options)


def trained(model, seed: int = 0, **about) -> TrainedGates:
    return gates(seed).trained(tiny.Run(model, [], "compact", None).arch, **about)


@torch.no_grad()
def test_the_module_halts_whom_the_trained_forward_masks():
    learnt, given_states = gates(), states(2, 20)
    with equivalent_forward(ENCODER, learnt.gate) as mask:
        equivalent = ENCODER(given_states)
    with apply(ENCODER, [learned(gates=trained(ENCODER))]) as run:
        halted = ENCODER(given_states)
    torch.testing.assert_close(equivalent, halted, atol=2e-6, rtol=1e-5)
    left = run.trace.passes[0].active(LAYERS - 1)
    assert mask.current is not None
    assert torch.equal(mask.current.bool(), left)
    assert 0 < left.float().mean() < 1
    widest = int(run.trace.passes[0].active(2).sum(1).max())  # a gate reads the packed rows
    assert run.flops.signals == 2 * WIDTH * 2 * (20 + widest)


def test_gates_that_only_read_leave_no_derivative_on_what_they_read():
    slopes = {}
    for reads_only in (False, True):
        learnt, given_states = gates(), states(1, 12).requires_grad_()
        learnt.reads_only = reads_only
        with equivalent_forward(ENCODER, learnt.gate):
            ENCODER(given_states)
        slopes[reads_only] = torch.autograd.grad(
            learnt.sparsity(), [given_states, learnt.weight], allow_unused=True, materialize_grads=True
        )
    assert slopes[False][0].abs().sum() > 0
    assert slopes[True][0].abs().sum() == 0
    assert slopes[True][1].abs().sum() > 0


def test_the_gate_is_a_step_whose_derivative_is_that_of_p():
    p = torch.tensor([0.0, 0.2, 0.4999, 0.5, 0.7, 1.0], requires_grad=True)
    g = straight_through(p)
    assert g.tolist() == [0, 0, 0, 1, 1, 1]
    (slope,) = torch.autograd.grad((g * torch.arange(6.0)).sum(), p)
    assert slope.tolist() == [0, 1, 2, 3, 4, 5]


def test_training_halts_what_the_task_does_not_need():
    torch.manual_seed(0)
    learnt, given_states = HaltingGates(WIDTH, [0, 1]), states(1, 16)
    needed = torch.arange(16) < 4  # the task reads these tokens alone, after the last layer
    given_states[0, needed, 0] += 6.0
    with torch.no_grad():
        wanted = ENCODER(given_states)[0, needed]
    control, optimiser = SparsityController(learnt, 0.6, LAYERS), torch.optim.Adam(learnt.parameters(), lr=0.1)
    for _ in range(60):
        with equivalent_forward(ENCODER, learnt.gate) as mask:
            said = ENCODER(given_states)[0, needed]
        loss = 20 * (said - wanted).square().mean() + control.strength * learnt.sparsity()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        control.update(mask)
    assert mask.current is not None
    left = mask.current[0].detach() > 0.5
    assert left[needed].float().mean() >= 0.75
    assert left[~needed].float().mean() <= 0.5
    ENCODER.zero_grad()


def test_weights_of_the_sparsity_loss_say_whose_p_counts():
    learnt = gates()
    with equivalent_forward(ENCODER, learnt.gate):
        ENCODER(states(1, 10))
    weights = torch.zeros(1, 10)
    weights[0, 3] = 1.0
    entered = [layer for layer in learnt.layers if learnt.kept[layer][0, 3] > 0]
    expected = sum(float(learnt.scores[layer][0, 3].detach()) for layer in entered) / len(learnt.layers)
    assert float(learnt.sparsity(weights).detach()) == pytest.approx(expected, abs=1e-6)
    assert float(learnt.sparsity().detach()) != pytest.approx(expected, abs=1e-3)


def test_the_strength_follows_the_target():
    control = SparsityController(gates(), 0.5, LAYERS)
    dense, sparse = KeepMask(), KeepMask()
    dense.kept, sparse.kept = [None] * LAYERS, [torch.zeros(1, 4)] * LAYERS
    before = control.strength
    assert control.update(dense) == 1.0
    raised = control.strength
    assert raised > before
    assert control.update(sparse) == 0.0
    assert control.strength < raised


@pytest.mark.parametrize("tokens", [0.1, 0.2, 1.0, 1.5])
def test_a_share_that_cannot_be_met_is_refused(tokens):
    with pytest.raises(ConfigError, match=rf"tokens={tokens:g} cannot be met: .* at least 0.2 of all token-layers"):
        SparsityController(gates(), tokens, LAYERS)


@settings(max_examples=draws(4), deadline=None)
@given(batch=tiny.batches(low=4), seed=st.integers(0, 20))
def test_gates_that_read_the_place_halt_as_in_training_and_each_row_by_its_own_length(batch, seed):
    model = tiny.load("gpt2")
    arch = tiny.Run(model, [], "compact", None).arch
    learnt = HaltingGates(WIDTH, [0, 2], prompt_tokens=1)
    for part in learnt.parameters():
        torch.nn.init.normal_(part, std=0.3, generator=torch.Generator().manual_seed(seed))
    policy = learned(gates=learnt.trained(arch), protect_last=0)
    assert not policy.causal  # it reads where the prompt ends
    together = tiny.decisions(batch, tiny.forward(model, batch, [policy]).trace)
    for ids, decided in zip(batch.rows, together, strict=True):
        learnt.prompt_tokens = len(ids)
        with torch.no_grad(), equivalent_forward(model, learnt.gate) as mask:
            model(torch.tensor([ids]), use_cache=False)
        assert mask.current is not None
        assert torch.equal(mask.current[0].bool(), decided["halt_layer"] == LAYERS - 1)


def test_a_file_gives_the_gates_again_and_names_what_does_not_fit(tmp_path):
    model, path = tiny.load("gpt2"), tmp_path / "gates.safetensors"
    made = trained(model, missing_kv="project", provenance={"steps": 3})
    made.save(path)
    again = TrainedGates.load(path)
    assert torch.equal(again.weight, made.weight)
    assert (again.layers, again.missing_kv, again.provenance) == (made.layers, "project", {"steps": 3})
    policy = learned(gates=path)
    assert tiny.forward(model, Batch(((1, 2, 3, 4, 5, 6),)), [policy]).trace.active_counts()[-1] < 6
    assert policy.missing_kv == "project"
    for other, said in (
        (tiny.load("llama"), "fitted to other weights"),
        (tiny.build("gpt2", n_layer=3), f"layers={LAYERS} and this one has 3"),
    ):
        with pytest.raises(ConfigError, match=said), apply(other, [learned(gates=path)]):
            pass
    with pytest.raises(ConfigError, match="There is no set of gates .*train gates for this model"):
        learned(gates=tmp_path / "none").bind(tiny.Run(model, [], "compact", None).arch)


def test_gates_say_layer_by_layer_what_is_dropped_and_what_is_predicted(monkeypatch):
    model = tiny.load("gpt2")
    translators = tiny.random_translators(tiny.Run(model, [], "compact", None).arch)
    monkeypatch.setattr(learned_halting, "translator_for", lambda arch, source, layer: translators[layer - 1])
    policy = learned(gates=trained(model, seed=3, predicts=(2,)), threshold=0.6)
    halted = tiny.forward(model, Batch((tuple(range(1, 25)),)), [policy]).trace.passes[0]
    how = {layer: set(halted.halted_kv[halted.halt_layer == layer].tolist()) for layer in (0, 2)}
    assert how == {0: {MISSING_KV.index("drop")}, 2: {MISSING_KV.index("predict")}}
    dropped = tiny.forward(model, Batch((tuple(range(1, 25)),)), [learned(gates=policy.gates, threshold=0.6, missing_kv="drop")])
    assert set(dropped.trace.passes[0].halted_kv[dropped.trace.passes[0].halt_layer == 2].tolist()) == {MISSING_KV.index("drop")}


def test_a_record_is_of_the_files_behind_its_gates(tmp_path):
    path = tmp_path / "learned_halting" / "mine.safetensors"
    trained(tiny.load("gpt2")).save(path)
    assert learned_halting.gate_files({"gates": "mine"}, tmp_path) == [path]
    assert learned_halting.gate_files({"gates": str(path)}, tmp_path / "elsewhere") == [path]
    assert learned_halting.gate_files({"tau_drift": 1.0}, tmp_path) == []
    path.write_bytes(b"torn")
    with pytest.raises(ConfigError, match="cannot be read as a set of gates"):
        learned_halting.gate_files({"gates": "mine"}, tmp_path)
