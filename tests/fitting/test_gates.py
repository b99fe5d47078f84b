"""Learned halting: gates halt as in the equivalent forward that trains them, come nearer to the dense answers at a budget, and go on after a kill."""

import itertools
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import draws, first
from tiny import LAYERS, WIDTH, Batch
from tiny_encoder import MODEL as ENCODER
from tiny_encoder import states

from quicksilver.fitting import gates as fitting
from quicksilver.fitting.equivalent import KeepMask, equivalent_forward
from quicksilver.fitting.gates import GateRecipe, HaltingGates, card, choose, saved_pct, straight_through, train_gates
from quicksilver.fitting.schedules import KLToDense
from quicksilver.fitting.training import read_training
from quicksilver.modules import LearnedHalting, Replay, learned_halting
from quicksilver.modules.fitted import MODELS_FOLDER
from quicksilver.modules.learned_halting import TrainedGates
from quicksilver.runtime import QuickSilverError, apply, architecture_of
from quicksilver.runtime.pass_state import MISSING_KV, PassState
from quicksilver.runtime.trace import PassTrace, Trace
from quicksilver.studies.token_halting.training import SparsityController


# -- the equivalent forward --------------------------------------------------------------------------------------------------------
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
    arch = architecture_of(model)
    translators = {1: tiny.random_translators(arch)[1]} if last == 1 else {}

    def drop_then_predict(view, tokens):
        if view.layer <= last:
            chosen = tokens.active & (tiny.chance(seed, view.layer, view.slots, view.input_ids) < 0.4)
            translator = translators.get(view.layer)
            tokens.halt(chosen, missing_kv="predict" if translator else "drop", translator=translator)

    halted = tiny.forward(model, batch, [tiny.Does(drop_then_predict, translators=translators)])
    depth = halted.trace.passes[0].halt_layer
    gate = lambda layer, hidden, kept: (depth != layer).to(hidden.dtype) if layer <= last else None  # its decisions, 0 and 1
    with equivalent_forward(model, gate, translators=translators):
        tiny.assert_close(model(**batch.inputs(), use_cache=False).logits, halted.logits)


@torch.no_grad()
def test_a_gate_that_drops_behind_one_that_predicts_is_refused():
    model = tiny.load("gpt2")
    translators = {0: tiny.random_translators(architecture_of(model))[0]}
    drops = equivalent_forward(model, lambda layer, hidden, kept: kept, translators=translators)
    with drops, tiny.refused("The gate after layer 1 drops tokens behind one that predicts"):
        model(torch.tensor([[1, 2, 3]]), use_cache=False)


@torch.no_grad()
def test_an_encoders_values_are_those_of_the_halted_run_and_nothing_is_left_behind():
    given_states = states(3, 12)
    plain = ENCODER(given_states)
    depth = torch.randint(0, 5, (3, 12), generator=torch.Generator().manual_seed(1)).short()
    with equivalent_forward(ENCODER, lambda layer, hidden, kept: (depth != layer).float()) as mask:
        equivalent = ENCODER(given_states)
    state = PassState(torch.ones(3, 12, dtype=torch.bool), torch.arange(12).expand(3, -1), LAYERS)
    state.halt_layer = depth
    with apply(ENCODER, [Replay(Trace(LAYERS, [PassTrace.of(state, 0)]))]) as run:
        halted = ENCODER(given_states)
    assert not torch.allclose(halted, plain, atol=1e-3)
    torch.testing.assert_close(equivalent, halted, atol=2e-6, rtol=1e-5)
    for layer, kept in enumerate(mask.kept):
        assert torch.equal(torch.ones(3, 12) if kept is None else kept, run.trace.passes[0].active(layer).float())
    assert torch.equal(ENCODER(given_states), plain)


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


# -- gates -------------------------------------------------------------------------------------------------------------------------
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
    return gates(seed).trained(architecture_of(model), **about)


@torch.no_grad()
def test_the_module_halts_whom_the_trained_forward_masks():
    learnt, given_states = gates(), states(2, 20)
    with equivalent_forward(ENCODER, learnt.gate) as mask:
        equivalent = ENCODER(given_states)
    with apply(ENCODER, [learned(gates=trained(ENCODER))]) as run:
        halted = ENCODER(given_states)
    torch.testing.assert_close(equivalent, halted, atol=2e-6, rtol=1e-5)
    left = run.trace.passes[0].active(LAYERS - 1)
    assert torch.equal(mask.current.bool(), left)
    assert 0 < left.float().mean() < 1
    widest = int(run.trace.passes[0].active(2).sum(1).max())  # a gate reads the packed rows
    assert run.flops.signals == 2 * WIDTH * 2 * (20 + widest)


def test_gates_that_only_read_leave_no_derivative_on_what_they_read():
    options = {"allow_unused": True, "materialize_grads": True}
    for reads_only in (False, True):
        learnt, given_states = gates(), states(1, 12).requires_grad_()
        learnt.reads_only = reads_only
        with equivalent_forward(ENCODER, learnt.gate):
            ENCODER(given_states)
        of_states, of_gates = torch.autograd.grad(learnt.sparsity(), [given_states, learnt.weight], **options)
        assert (of_states.abs().sum() == 0) == reads_only
        assert of_gates.abs().sum() > 0


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


def test_the_strength_follows_the_target_which_can_be_met() -> None:
    control = SparsityController(gates(), 0.5, LAYERS)
    dense, sparse = KeepMask(), KeepMask()
    dense.kept, sparse.kept = [None] * LAYERS, [torch.zeros(1, 4)] * LAYERS
    before = control.strength
    assert control.update(dense) == 1.0
    assert (raised := control.strength) > before
    assert control.update(sparse) == 0.0
    assert control.strength < raised
    for tokens in (0.1, 0.2, 1.0, 1.5):
        with tiny.refused(rf"tokens={tokens:g} cannot be met: .* at least 0.2 of all token-layers"):
            SparsityController(gates(), tokens, LAYERS)


@settings(max_examples=draws(4), deadline=None)
@given(batch=tiny.batches(low=4), seed=st.integers(0, 20))
def test_gates_that_read_the_place_halt_as_in_training_and_each_row_by_its_own_length(batch, seed):
    model = tiny.load("gpt2")
    arch = architecture_of(model)
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
    for other, source, said in (
        (tiny.load("llama"), path, "fitted to other weights"),
        (tiny.build("gpt2", n_layer=3), path, f"layers={LAYERS} and this one has 3"),
        (model, tmp_path / "none", "There is no set of gates .*train gates for this model"),
    ):
        with tiny.refused(said), apply(other, [learned(gates=source)]):
            pass


def test_gates_by_name_are_those_of_each_model_in_turn(monkeypatch):
    monkeypatch.setattr(TrainedGates, "of_model", lambda arch, option: {"predict": trained(arch.model)})
    policy = learned(gates="predict")
    for name in ("gpt2", "llama"):
        assert tiny.forward(tiny.load(name), tiny.EVEN, [policy]).trace.active_counts()[-1] < 48


def test_gates_say_layer_by_layer_what_is_dropped_and_what_is_predicted(monkeypatch):
    model = tiny.load("gpt2")
    predicting(monkeypatch, architecture_of(model))
    made = trained(model, seed=3, predicts=(2,))
    for options, later in (({}, "predict"), ({"missing_kv": "drop"}, "drop")):
        policy = learned(gates=made, threshold=0.6, **options)
        halted = tiny.forward(model, tiny.EVEN.alone(0), [policy]).trace.passes[0]
        how = {layer: set(halted.halted_kv[halted.halt_layer == layer].tolist()) for layer in (0, 2)}
        assert how == {0: {MISSING_KV.index("drop")}, 2: {MISSING_KV.index(later)}}


def test_a_record_is_of_the_files_behind_its_gates(tmp_path):
    path = tmp_path / "learned_halting" / "mine.safetensors"
    trained(tiny.load("gpt2")).save(path)
    assert learned_halting.gate_files({"gates": "mine"}, tmp_path) == [path]
    assert learned_halting.gate_files({"gates": str(path)}, tmp_path / "elsewhere") == [path]
    assert learned_halting.gate_files({"tau_drift": 1.0}, tmp_path) == []
    path.write_bytes(b"torn")
    with tiny.refused("cannot be read as a set of gates"):
        learned_halting.gate_files({"gates": "mine"}, tmp_path)


# -- their training ----------------------------------------------------------------------------------------------------------------
RECIPE = GateRecipe((0, 1), saves_pct=25.0, steps=24, prompt_tokens=24, protect_first=1, protect_last=2, learning_rate=0.05)
IDS = tiny.ids(8, 30)
START = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
ALIKE = TrainedGates((0, 1), torch.zeros(2, WIDTH), torch.zeros(2), LAYERS)


@pytest.fixture(scope="module")
def arch():
    return architecture_of(tiny.load("gpt2"))


@pytest.fixture(scope="module")
def whole(arch) -> fitting.TrainedGatesRun:
    return train_gates(arch, IDS, RECIPE)


def kl_of(arch, gates: TrainedGates, ids: torch.Tensor) -> torch.Tensor:
    return KLToDense(arch, ids, RECIPE.prompt_tokens, 1, torch.float32).of(RECIPE.halting(gates))


def predicting(monkeypatch: pytest.MonkeyPatch, arch) -> None:
    """Random maps, as no translator ships with a tiny model."""
    there = tiny.random_translators(arch)
    for module in (fitting, learned_halting):
        monkeypatch.setattr(module, "translator_for", lambda arch, source, layer: there[layer - 1])


@pytest.mark.parametrize("predicts", first([((1,),), ((),)]))
def test_without_a_price_fewer_halt_with_one_more_do_and_the_model_is_left_alone(arch, monkeypatch, predicts) -> None:
    predicting(monkeypatch, arch)
    recipe = replace(RECIPE, predicts=predicts, reaction=0.0, shift=0.0, steps=16)
    with tiny.left_untouched(arch.model):
        free, dear = (train_gates(arch, IDS, replace(recipe, strength=strength)) for strength in (0.0, 5.0))
    assert free.curve[0]["kl_nats"] == pytest.approx(dear.curve[0]["kl_nats"])
    (kl_free, kl_dear), (saved_free, saved_dear) = (
        [sum(one[name] for one in found.curve[-4:]) / 4 for found in (free, dear)] for name in ("kl_nats", "saved_pct")
    )
    assert kl_free < min(kl_dear, free.curve[0]["kl_nats"])  # to drop may cost less than what random maps predict
    assert saved_free < free.curve[0]["saved_pct"] < saved_dear


def test_the_price_follows_the_budget(whole) -> None:
    for before, after in itertools.pairwise(whole.curve):
        assert (after["saved_pct"] < 25) == (after["strength"] > before["strength"]) or after["strength"] == 0


def test_the_number_on_all_biases_keeps_a_training_at_its_budget(arch) -> None:
    recipe = replace(RECIPE, strength=5.0, reaction=0.0, learning_rate=0.02, steps=16)
    off = {shift: train_gates(arch, IDS, replace(recipe, shift=shift)).curve[-8:] for shift in (0.0, 0.8)}
    missed = {shift: abs(sum(one["saved_pct"] for one in curve) / 8 - 25) for shift, curve in off.items()}
    assert missed[0.8] < 0.7 * missed[0.0]  # at a price that halts nearly all


@pytest.mark.parametrize("predicts", [(), (1,)])
def test_gates_start_with_the_rule_that_they_have_to_beat(monkeypatch, predicts) -> None:
    arch = architecture_of(tiny.load("llama"))
    predicting(monkeypatch, arch)
    recipe = replace(RECIPE, predicts=predicts, steps=1, saves_pct=60.0 if predicts else 40.0)
    start = train_gates(arch, IDS, recipe).candidates["start"]
    with torch.no_grad(), apply(arch.model, [LearnedHalting(gates=start, protect_first=1, protect_last=2)]) as run:
        arch.model(IDS[:3, :24], logits_to_keep=1)
    for stopped in run.trace.passes[0].halt_layer:
        dropped = (stopped == 0).sum()
        assert 0 < dropped < 21
        assert (stopped[1 : 1 + dropped] == 0).all()  # the oldest that may
        behind = stopped[1 + dropped : 22]
        assert (behind == (1 if predicts else arch.n_layers - 1)).all()


def test_what_is_kept_is_the_candidate_nearest_to_the_dense_model_with_one_number_on_all_biases_that_meets_the_budget(
    arch, whole
) -> None:
    assert set(whole.candidates) == {"start", "averaged", "end"}
    two = train_gates(arch, IDS, replace(RECIPE, steps=2)).candidates  # the average is of the second half of the steps
    assert torch.equal(two["averaged"].weight, two["end"].weight)
    assert not torch.equal(whole.candidates["averaged"].weight, whole.candidates["end"].weight)
    chosen = choose(arch, whole.candidates, IDS, RECIPE)
    assert chosen.kl_nats == min(chosen.compared.values())
    assert chosen.kl_nats == pytest.approx(float(kl_of(arch, chosen.gates, IDS).mean()))
    assert chosen.saved_pct == pytest.approx(RECIPE.saves_pct, abs=2)
    was = whole.candidates[chosen.name]
    assert torch.equal(chosen.gates.weight, was.weight)
    torch.testing.assert_close(chosen.gates.bias, was.bias + chosen.shift)
    with tiny.refused(r"save -?\d+\.\d% at the nearest, not 25%"):
        choose(arch, {"alike": ALIKE}, IDS, RECIPE)


@pytest.mark.parametrize("folder", sorted(MODELS_FOLDER.glob(f"*/{TrainedGates.folder}")), ids=lambda folder: folder.parent.name)
def test_gates_that_ship_meet_their_budget_and_have_the_card_that_they_make(folder) -> None:
    assert (folder / "README.md").read_text(encoding="utf-8") == card(folder, folder.parent.name)
    for path in folder.glob("*.safetensors"):
        gates = TrainedGates.load(path)
        assert gates.weights_digest
        assert gates.provenance["kl_nats_on_the_other_half"] <= gates.provenance["kl_nats_at_the_start"]
        assert gates.provenance["saved_pct_on_the_other_half"] == pytest.approx(gates.provenance["recipe"]["saves_pct"], abs=2)


def test_a_card_says_how_gates_were_made_and_what_they_cost(arch, tmp_path) -> None:
    nobody, everybody = (replace(ALIKE, bias=sign * torch.ones(2)) for sign in (1, -1))
    assert kl_of(arch, nobody, IDS[:2]).tolist() == [0, 0]
    kl = kl_of(arch, everybody, IDS[:2])
    assert (kl > 0).all()
    said = {
        "recipe": vars(RECIPE), "datasets": ["poems"], "text": {"texts": {"poems": {"windows": 8}}}, "kept": "averaged",
        "kl_nats_at_the_start": 0.5,
    }  # fmt: skip
    said |= {"saved_pct_on_the_other_half": 25.4, "kl_nats_on_the_other_half": float(kl.mean())}
    replace(everybody, provenance=said).save(tmp_path / "mine.safetensors")
    written = card(tmp_path, "tiny")
    row = f"| mine.safetensors | 0, 1 | none: dropped | poems | 8 | 24 × 4 | 0 | 25.4 | {kl.mean():.4f} | 0.5000 | averaged |"
    assert row in written
    assert "--name mine --gates 0 1 --text poems --windows 8 --saves 25 --steps 24" in written
    everybody.save(tmp_path / "other.safetensors")
    with tiny.refused("does not say how its gates were trained"):
        card(tmp_path, "tiny")


@pytest.mark.parametrize("predicts", [(), (1,)])
def test_what_a_step_counts_as_saved_is_what_the_runtime_saves(monkeypatch, predicts) -> None:
    arch = architecture_of(tiny.load("llama"))
    predicting(monkeypatch, arch)
    made = TrainedGates((0, 1), START, torch.zeros(2), LAYERS, predicts=predicts)
    row = IDS[:1, :24]
    with torch.no_grad(), apply(arch.model, [LearnedHalting(gates=made, protect_first=1, protect_last=2)]) as run:
        arch.model(row, logits_to_keep=1)
        ours = run.flops.executed - run.flops.signals
        trace = run.trace.passes[0]
    with torch.no_grad(), apply(arch.model, []) as run:
        arch.model(row, logits_to_keep=1)
        dense = run.flops.executed
    kept = [trace.active(layer).float() for layer in range(arch.n_layers)]
    stopped = {layer: (trace.halt_layer == layer).float() for layer in predicts}
    assert 0 < kept[-1].sum() < 24
    assert saved_pct(arch, kept, stopped) == pytest.approx(100 * (1 - ours / dense), abs=0.2)


def test_a_killed_training_goes_on_where_it_was(arch, whole, tmp_path) -> None:
    def until(numbers: range):
        yield from numbers[:13]
        raise KeyboardInterrupt

    path = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train_gates(arch, IDS, RECIPE, checkpoint=path, progress=until)
    numbers: list[int] = []
    again = train_gates(arch, IDS, RECIPE, checkpoint=path, progress=lambda steps: numbers.extend(steps) or steps)
    assert numbers == list(range(10, 24))
    torch.testing.assert_close(again.candidates["end"].weight, whole.candidates["end"].weight)
    assert [one["kl_nats"] for one in again.curve] == pytest.approx([one["kl_nats"] for one in whole.curve])
    with tiny.refused("checkpoint of another training: its recipe"):
        train_gates(arch, IDS, replace(RECIPE, seed=1), checkpoint=path)
    path.write_bytes(b"torn")
    with tiny.refused("cannot be read"):
        train_gates(arch, IDS, RECIPE, checkpoint=path)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(arch, tmp_path, monkeypatch) -> None:
    path, kl, calls = tmp_path / "state.safetensors", fitting.kl_nats, []

    def breaks(dense: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return kl(dense, other) * (float("nan") if len(calls) > 12 else 1.0)

    monkeypatch.setattr(fitting, "kl_nats", breaks)
    with pytest.raises(QuickSilverError, match=r"loss of step 12 is not finite: .*last good state is .*state\.safetensors"):
        train_gates(arch, IDS, RECIPE, checkpoint=path)
    assert read_training(path)["step"] == 10


@pytest.mark.parametrize(("changed", "said"), [
    ({"saves_pct": 90.0}, r"saves_pct=90 cannot be met: with a first gate after layer 0 at most \d\d\.?\d?% is saved"),
    ({"prompt_tokens": 29}, "longer than 30 tokens"),
    ({"layers": (0, tiny.LAYERS - 1)}, "Gates after layers"),
    ({"predicts": (1,)}, "none with this model"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(arch, changed, said) -> None:
    with tiny.refused(said):
        train_gates(arch, IDS, replace(RECIPE, **changed))
