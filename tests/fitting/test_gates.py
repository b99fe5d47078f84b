"""Training gates on a language model: they come nearer to the dense answers at a budget, go on after a kill, and refuse what cannot be."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import tiny
import torch
from thinning import first

from quicksilver.fitting import gates as fitting
from quicksilver.fitting.gates import GateRecipe, at_budget, card, choose, saved_pct, train_gates
from quicksilver.fitting.schedules import KLToDense
from quicksilver.modules import LearnedHalting
from quicksilver.modules.fitted import MODELS_FOLDER
from quicksilver.modules.learned_halting import TrainedGates
from quicksilver.runtime import ConfigError, QuickSilverError, apply, architecture_of

RECIPE = GateRecipe(
    layers=(0, 1), saves_pct=25.0, steps=24, prompt_tokens=24, protect_first=1, protect_last=2, learning_rate=0.05
)
IDS = torch.randint(1, tiny.VOCABULARY, (8, 30), generator=torch.Generator().manual_seed(0))


def kl_of(arch, gates: TrainedGates, ids: torch.Tensor) -> torch.Tensor:
    return KLToDense(arch, ids, RECIPE.prompt_tokens, 1, torch.float32).of(RECIPE.halting(gates))


def predicting(monkeypatch: pytest.MonkeyPatch, arch) -> None:
    """Random maps, as no translator ships with a tiny model."""
    there = tiny.random_translators(arch)
    for module in (fitting, __import__("quicksilver.modules.learned_halting", fromlist=["translator_for"])):
        monkeypatch.setattr(module, "translator_for", lambda arch, source, layer: there[layer - 1])


@pytest.mark.parametrize("predicts", first([((1,),), ((),)]))
def test_without_a_price_fewer_halt_with_one_more_do_and_the_model_is_left_alone(monkeypatch, predicts) -> None:
    arch = architecture_of(tiny.load("gpt2"))
    predicting(monkeypatch, arch)
    before = copy.deepcopy(arch.model.state_dict())
    asked = [(p.requires_grad, p.grad) for p in arch.model.parameters()]  # other tests share this model
    recipe = replace(RECIPE, predicts=predicts, reaction=0.0, shift=0.0)
    free, dear = (train_gates(arch, IDS, replace(recipe, strength=strength)) for strength in (0.0, 5.0))
    assert all(torch.equal(before[key], value) for key, value in arch.model.state_dict().items())
    assert all((p.requires_grad, p.grad) == was for p, was in zip(arch.model.parameters(), asked, strict=True))
    assert free.curve[0]["kl_nats"] == pytest.approx(dear.curve[0]["kl_nats"])
    (kl_free, kl_dear), (saved_free, saved_dear) = (
        [sum(one[name] for one in found.curve[-4:]) / 4 for found in (free, dear)] for name in ("kl_nats", "saved_pct")
    )
    assert kl_free < min(kl_dear, free.curve[0]["kl_nats"])  # to drop may cost less than what random maps predict
    assert saved_free < free.curve[0]["saved_pct"] < saved_dear


def test_one_number_on_all_biases_meets_the_budget_or_it_is_said_that_none_does() -> None:
    arch = architecture_of(tiny.load("gpt2"))
    weight = torch.randn(2, tiny.WIDTH, generator=torch.Generator().manual_seed(1))
    spread = TrainedGates((0, 1), weight, torch.tensor([2.0, 2.5]), arch.n_layers)
    gates, saved = at_budget(arch, spread, IDS, RECIPE)
    assert saved == pytest.approx(25, abs=2)
    assert torch.equal(gates.weight, weight)
    assert gates.bias.diff() == pytest.approx(0.5)
    alike = TrainedGates((0, 1), torch.zeros_like(weight), torch.zeros(2), arch.n_layers)
    with pytest.raises(ConfigError, match=r"save -?\d+\.\d% at the nearest, not 25%"):
        at_budget(arch, alike, IDS, RECIPE)


def test_the_price_follows_the_budget() -> None:
    curve = train_gates(architecture_of(tiny.load("gpt2")), IDS, replace(RECIPE, steps=8)).curve
    for before, after in itertools.pairwise(curve):
        assert (after["saved_pct"] < 25) == (after["strength"] > before["strength"]) or after["strength"] == 0


def test_the_number_on_all_biases_keeps_a_training_at_its_budget() -> None:
    arch, recipe = architecture_of(tiny.load("gpt2")), replace(RECIPE, strength=5.0, reaction=0.0, learning_rate=0.02)
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


def test_what_is_kept_is_the_candidate_nearest_to_the_dense_model_and_never_worse_than_the_start() -> None:
    arch = architecture_of(tiny.load("gpt2"))
    found = train_gates(arch, IDS, RECIPE)
    assert set(found.candidates) == {"start", "averaged", "end"}
    two = train_gates(arch, IDS, replace(RECIPE, steps=2)).candidates  # the average is of the second half of the steps
    assert torch.equal(two["averaged"].weight, two["end"].weight)
    assert not torch.equal(found.candidates["averaged"].weight, found.candidates["end"].weight)
    chosen = choose(arch, found.candidates, IDS, RECIPE)
    assert chosen.kl_nats == min(chosen.compared.values())
    assert chosen.kl_nats == pytest.approx(float(kl_of(arch, chosen.gates, IDS).mean()))
    assert chosen.saved_pct == pytest.approx(RECIPE.saves_pct, abs=2)
    alike = TrainedGates((0, 1), torch.zeros(2, tiny.WIDTH), torch.zeros(2), arch.n_layers)
    with pytest.raises(ConfigError, match="at the nearest, not 25%"):
        choose(arch, {"alike": alike}, IDS, RECIPE)


@pytest.mark.parametrize("folder", sorted(MODELS_FOLDER.glob(f"*/{TrainedGates.folder}")), ids=lambda folder: folder.parent.name)
def test_gates_that_ship_meet_their_budget_and_have_the_card_that_they_make(folder) -> None:
    assert (folder / "README.md").read_text(encoding="utf-8") == card(folder, folder.parent.name)
    for path in folder.glob("*.safetensors"):
        gates = TrainedGates.load(path)
        assert gates.weights_digest
        assert gates.provenance["kl_nats_on_the_other_half"] <= gates.provenance["kl_nats_at_the_start"]
        assert gates.provenance["saved_pct_on_the_other_half"] == pytest.approx(gates.provenance["recipe"]["saves_pct"], abs=2)


def test_a_card_says_how_gates_were_made_and_what_they_cost(tmp_path) -> None:
    arch = architecture_of(tiny.load("gpt2"))
    alike = TrainedGates((0, 1), torch.zeros(2, tiny.WIDTH), torch.ones(2), arch.n_layers)
    assert kl_of(arch, alike, IDS[:2]).tolist() == [0, 0]  # nobody halts
    everybody = replace(alike, bias=-torch.ones(2))
    kl = kl_of(arch, everybody, IDS[:2])
    assert (kl > 0).all()
    said = {
        "recipe": vars(RECIPE),
        "datasets": ["poems"],
        "text": {"texts": {"poems": {"windows": 8}}},
        "kept": "averaged",
        "kl_nats_at_the_start": 0.5,
    }
    said |= {"saved_pct_on_the_other_half": 25.4, "kl_nats_on_the_other_half": float(kl.mean())}
    replace(everybody, provenance=said).save(tmp_path / "mine.safetensors")
    written = card(tmp_path, "tiny")
    assert (
        f"| mine.safetensors | 0, 1 | none: dropped | poems | 8 | 24 × 4 | 0 | 25.4 | {kl.mean():.4f} | 0.5000 | averaged |"
        in written
    )
    assert "--name mine --gates 0 1 --text poems --windows 8 --saves 25 --steps 24" in written
    everybody.save(tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="does not say how its gates were trained"):
        card(tmp_path, "tiny")


@pytest.mark.parametrize("predicts", [(), (1,)])
def test_what_a_step_counts_as_saved_is_what_the_runtime_saves(monkeypatch, predicts) -> None:
    arch = architecture_of(tiny.load("llama"))
    predicting(monkeypatch, arch)
    made = TrainedGates(
        (0, 1),
        torch.randn(2, tiny.WIDTH, generator=torch.Generator().manual_seed(1)),
        torch.zeros(2),
        arch.n_layers,
        predicts=predicts,
    )
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


def test_a_killed_training_goes_on_where_it_was(tmp_path) -> None:
    arch, recipe = architecture_of(tiny.load("gpt2")), replace(RECIPE, steps=20)
    whole = train_gates(arch, IDS, recipe)

    class Killed(Exception):
        pass

    def until(numbers: range):
        for number in numbers:
            if number == 13:
                raise Killed
            yield number

    path = tmp_path / "state.safetensors"
    with pytest.raises(Killed):
        train_gates(arch, IDS, recipe, checkpoint=path, progress=until)
    numbers: list[int] = []
    again = train_gates(arch, IDS, recipe, checkpoint=path, progress=lambda steps: numbers.extend(steps) or steps)
    assert numbers == list(range(10, 20))
    torch.testing.assert_close(again.gates.weight, whole.gates.weight)
    assert [one["kl_nats"] for one in again.curve] == pytest.approx([one["kl_nats"] for one in whole.curve])
    with pytest.raises(ConfigError, match="checkpoint of another training: its recipe"):
        train_gates(arch, IDS, replace(recipe, seed=1), checkpoint=path)
    path.write_bytes(b"torn")
    with pytest.raises(ConfigError, match="cannot be read"):
        train_gates(arch, IDS, recipe, checkpoint=path)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(tmp_path, monkeypatch) -> None:
    arch, path = architecture_of(tiny.load("gpt2")), tmp_path / "state.safetensors"
    kl, calls = fitting.kl_nats, []

    def breaks(dense: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return kl(dense, other) * (float("nan") if len(calls) > 12 else 1.0)

    monkeypatch.setattr(fitting, "kl_nats", breaks)
    with pytest.raises(QuickSilverError, match=r"loss of step 12 is not finite: .*last good state is .*state\.safetensors"):
        train_gates(arch, IDS, RECIPE, checkpoint=path)
    monkeypatch.setattr(fitting, "kl_nats", kl)
    steps: list[int] = []
    train_gates(arch, IDS, RECIPE, checkpoint=path, progress=lambda numbers: steps.extend(numbers) or numbers)
    assert steps[0] == 10


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"saves_pct": 90.0}, r"saves_pct=90 cannot be met: with a first gate after layer 0 at most \d\d\.?\d?% is saved"),
        ({"prompt_tokens": 29}, "longer than 30 tokens"),
        ({"layers": (0, tiny.LAYERS - 1)}, "Gates after layers"),
        ({"predicts": (1,)}, "none with this model"),
    ],
)
def test_what_cannot_be_trained_is_refused(changed, said) -> None:
    with pytest.raises(ConfigError, match=said):
        train_gates(architecture_of(tiny.load("gpt2")), IDS, replace(RECIPE, **changed))
