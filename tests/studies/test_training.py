"""Trainings of the study, what is measured and what is timed: they learn, go on after a kill as if nothing had been, and wait for what they start from."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, islice
from threading import Lock

import numpy as np
import pytest
import tiny_encoder
import torch

from quicksilver.fitting.gates import HaltingGates
from quicksilver.fitting.training import read_training
from quicksilver.modules import StaticDepth
from quicksilver.runtime import ConfigError
from quicksilver.runtime.run import apply
from quicksilver.studies.token_halting import frames, runs
from quicksilver.studies.token_halting.frames import accuracy, effects
from quicksilver.studies.token_halting.model import Shape, batch_of, detector
from quicksilver.studies.token_halting.runs import PARTS, Plan, SeedRuns, ap_difference, evaluate, gated, ruled
from quicksilver.studies.token_halting.scenes import Grid, SceneMaker
from quicksilver.studies.token_halting.training import Recipe, imitation_loss, train, trained

GRID = Grid(side=8)
SHAPE = Shape(width=16, layers=3, heads=2)
MAKER = SceneMaker(grid=GRID, cars=(1, 2), pedestrians=(1, 3), clutter=(1, 2), beams=16, azimuths=96)
PLAN = Plan(shape=SHAPE, scenes=8, validation=2, steps=1, tuning_steps=1, tokens=0.6, maker=MAKER)
DATA = batch_of(list(islice((scene for scene in map(MAKER.scene, count()) if len(scene.boxes)), 12)), GRID)
RECIPE = Recipe(8, batch_size=4, tokens=0.6, box_weight=0.2)
fresh = partial(detector, SHAPE, 0)
gates = partial(HaltingGates, SHAPE.width, [0, 1])


@pytest.fixture(scope="module")
def whole():
    return train(fresh(), DATA, RECIPE, gates=gates())


def test_a_killed_training_goes_on_as_if_nothing_had_been(whole, tmp_path):
    def killed(steps: range) -> Iterator[int]:
        yield from steps[:5]
        raise KeyboardInterrupt

    path = tmp_path / "one.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(fresh(), DATA, RECIPE, gates=gates(), checkpoint=path, every=2, progress=killed)
    assert read_training(path)["step"] == 4
    resumed = train(fresh(), DATA, RECIPE, gates=gates(), checkpoint=path, every=2)
    for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=0, rtol=0)
    assert torch.equal(whole.gates.weight, resumed.gates.weight)
    assert whole.curve == resumed.curve
    again = trained(path, SHAPE)
    assert torch.equal(again.gates.bias, whole.gates.bias)
    assert again.step == 8


def test_a_training_learns_and_its_detector_can_teach():
    learnt = train(fresh(), DATA, Recipe(30, batch_size=6))
    assert learnt.curve[-1]["loss"] < 0.7 * learnt.curve[0]["loss"]
    teacher = learnt.model
    shared = {"batch_size": 6, "tokens": 0.9}

    def distance(model) -> float:
        with torch.no_grad():
            return float(imitation_loss(model(DATA.features), teacher(DATA.features), DATA))

    alone = train(fresh(), DATA, Recipe(10, **shared), gates=gates())
    taught = train(fresh(), DATA, Recipe(10, imitates=5.0, **shared), gates=gates(), teacher=teacher)
    assert distance(teacher) == pytest.approx(0, abs=1e-5)
    assert distance(taught.model) < 0.8 * distance(alone.model)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    path, damaged = tmp_path / "one.safetensors", tmp_path / "damaged.safetensors"
    train(fresh(), DATA, Recipe(2, batch_size=4), checkpoint=path)
    damaged.write_bytes(b"nothing")
    for call, said in (
        (lambda: train(fresh(), DATA, Recipe(3, batch_size=4), checkpoint=path), "checkpoint of another training: its recipe"),
        (lambda: trained(path, dataclasses.replace(SHAPE, layers=2)), "layers=3, and this one has 2"),
        (lambda: trained(damaged, SHAPE), "cannot be read"),
        (lambda: trained(tmp_path / "none", SHAPE), "There is no checkpoint"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()


TEACHING = "give gates, teacher and recipe.imitates, or no teacher"


@pytest.mark.parametrize(("make", "said"), [
    (lambda: train(fresh(), DATA, Recipe(2, tokens=0.6), gates=gates(), teacher=fresh()), TEACHING),
    (lambda: train(fresh(), DATA, Recipe(2, tokens=0.6, imitates=1.0), gates=gates()), TEACHING),
    (lambda: train(fresh(), DATA, Recipe(2, imitates=1.0), teacher=fresh()), TEACHING),
    (lambda: train(fresh(), DATA, Recipe(2), gates=gates()), "give gates and recipe.tokens, or neither"),
    (lambda: train(fresh(), DATA, Recipe(2, tokens=0.2), gates=gates()), "tokens=0.2 cannot be met"),
    (lambda: Recipe(2, box_weight=0), "box_weight=0"),
    (lambda: Recipe(2, base_rate=0.0), "base_rate=.* must lie between 0 and 1"),
    (lambda: Recipe(2, tokens=0.5, base_rate=-0.1), "base_rate=.* must lie between 0 and 1"),
    (lambda: Plan(tokens=0.25), "tokens=0.25 cannot be met: the first of 4 layers has all .* a share between 0.25 and 1"),
    (lambda: Plan(tokens=1.0), "tokens=1 cannot be met"),
    (lambda: Plan(tokens=float("nan")), "tokens=nan cannot be met"),
    (lambda: Plan(scenes=0), "scenes=0: give at least 1"),
    (lambda: Plan(validation=-3), "validation=-3: give at least 1"),
    (lambda: Plan(tuning_steps=0), "tuning_steps=0: give at least 1"),
    (lambda: evaluate(fresh(), DATA.take(slice(0, 0)), GRID), "no scene"),
    (lambda: ap_difference(*[[evaluate(fresh(), DATA.take(slice(0, 1)), GRID)]] * 2, draws=20), "there are 1"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_is_trained(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_what_is_measured_of_a_policy():
    model = fresh()
    with torch.no_grad():
        model.head.bias[:2] += 4.0  # it sees something everywhere
    dense = evaluate(model, DATA, GRID)
    assert dense.tokens.tolist() == [1.0] * 12
    assert dense.ap() == dense.ap(recycled=False)
    half = evaluate(model, DATA, GRID, ruled("random", [0.5, 0.25]))
    assert runs.halted_shares(half) == pytest.approx([0.5, 0.25])
    np.testing.assert_allclose(half.tokens, (1 + 0.5 + 0.25) / 3)
    assert (half.executed_flops < dense.executed_flops).all()
    assert not np.array_equal(half.halt_depth[0], half.halt_depth[1])  # each scene draws its own
    static = evaluate(model, DATA, GRID, lambda scene: [StaticDepth(depth=0.3, missing_kv="drop")])
    assert static.matched[True, True][0][0].size > 0
    assert static.matched[False, True][0][0].size == 0  # a head that is given nothing
    same = ap_difference([dense], [dense], draws=20)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    blind = ap_difference([static], [dense], recycled=False, draws=20)
    assert blind.value == pytest.approx(static.ap(recycled=False) - dense.ap())
    assert blind.low <= blind.value <= blind.high
    assert blind.low < blind.high


def test_gates_alone_are_trained_where_the_detector_has_no_rate():
    start, learnt = fresh(), gates()
    was = learnt.weight.detach().clone()
    done = train(fresh(), DATA, dataclasses.replace(RECIPE, base_rate=0.0), gates=learnt)
    for one, two in zip(start.parameters(), done.model.parameters(), strict=True):
        assert torch.equal(one, two)
        assert two.requires_grad
    assert not torch.equal(learnt.weight, was)


def test_gates_of_a_training_are_a_module(whole):
    nobody, everybody = (evaluate(whole.model, DATA, GRID, gated(whole, threshold)) for threshold in (0.0, 1.0))
    assert nobody.tokens.mean() == 1
    dense = evaluate(whole.model, DATA, GRID)  # bit for bit: the same scores, whether halted tokens are recycled or not
    for recycled in (True, False):
        for ours, theirs in zip(nobody.matched[recycled, True], dense.matched[recycled, True], strict=True):
            assert np.array_equal(ours[0], theirs[0])
    assert everybody.active[:, 1].sum() == 0


# --- several processes ---
@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("parts", [PARTS, ("norm", "frozen"), *runs.MORE.values()])
def test_a_part_waits_for_what_it_starts_from(monkeypatch, processes, parts):
    log, lock, running = [], Lock(), []

    def train(_, seed: int, part: str) -> None:
        with lock:
            running.append((seed, part))
            assert len(running) <= processes
            assert all((seed, need) in log for need in runs.needs(part))
        with lock:
            running.remove((seed, part))
            log.append((seed, part))

    monkeypatch.setattr(runs, "_called", train)
    said: list[str] = []
    with ThreadPoolExecutor(processes) as pool:
        runs.train_side_by_side(pool, (0, 3), parts, said.append)
    assert sorted(log) == sorted(runs.tasks((0, 3), parts))
    assert len(set(log)) == len(log)
    assert {part for _, part in log} >= set(parts)
    assert said[-1].endswith(f"({len(log)} of {len(log)})")


def test_a_training_that_fails_ends_the_study_and_says_why(monkeypatch):
    def fails(_, seed: int, part: str) -> None:
        raise RuntimeError(f"{part} of {seed}")

    monkeypatch.setattr(runs, "_called", fails)
    with pytest.raises(RuntimeError, match="dense of 4"), ThreadPoolExecutor(2) as pool:
        runs.train_side_by_side(pool, (4,), PARTS, print)


# --- the pseudo-gradient ---
def test_effects_are_those_of_turning_one_decision_round():
    given, decisions = tiny_encoder.states(1, 9), torch.ones(1, 9)
    decisions[0, 4] = 0.0

    def loss() -> torch.Tensor:
        return tiny_encoder.MODEL(given).square().mean()

    found = effects(tiny_encoder.MODEL, loss, 1, decisions, [2, 4, 7])
    assert found["kept"].tolist() == [True, False, True]
    # The derivative of the equivalent forward is that of its soft mask; the parts of it are less, and together the whole.
    np.testing.assert_allclose(found["both"], found["finite difference"], rtol=0.05, atol=1e-4)
    assert (found["states"] - found["both"]).abs().max() > 1e-4
    assert np.isfinite(found["states"] + found["attention"]).all()
    assert found["true"].abs().min() > 0
    with pytest.raises(ConfigError, match="no token"):
        effects(tiny_encoder.MODEL, loss, 1, decisions, [])


def test_accuracy_of_estimates_that_are_plain():
    true = np.array([1.0, -2.0, 3.0, 1e-6])
    assert accuracy(true, true) == pytest.approx({"correlation": 1, "same_sign": 1, "relative_error": 0, "decisions": 4})
    assert accuracy(true, -true) == pytest.approx({"correlation": -1, "same_sign": 0, "relative_error": 2, "decisions": 4})


# --- time ---
@pytest.fixture
def halting():
    """A detector and gates that halt some tokens and leave some."""
    learnt = train(fresh(), PLAN.training_data, Recipe(1, batch_size=4, tokens=0.6), gates=gates())
    with torch.no_grad():
        learnt.gates.weight.normal_(generator=torch.Generator().manual_seed(0))
        learnt.gates.bias.fill_(4.0)
    return learnt


def test_each_clock_has_the_operations_of_its_own_part(halting):
    timed = partial(frames.Timed, halting.model, scenes=PLAN.validation_scenes(2), grid=GRID)
    with timed(None) as dense, timed(gated(halting)) as ours:
        encoder, whole = ([one.flops(clock) for one in (dense, ours)] for clock in ("encoder", "whole"))
    with apply(halting.model, []) as run, torch.inference_mode():
        halting.model(PLAN.validation_data.features[:1])
    assert encoder[1] < encoder[0]
    assert whole[0] - encoder[0] == whole[1] - encoder[1]  # what no halting saves
    assert encoder[0] < run.flops.executed < whole[0]  # the run has the head, and not the embedding


def test_parts_are_those_that_ran_and_layers_have_the_tokens_that_were_left(halting, monkeypatch):
    seed = SeedRuns(PLAN, 0, None)
    monkeypatch.setattr(seed, "train", lambda name: halting)
    found = frames.parts(seed, repeats=3, scenes=2).set_index(["run", "part"])
    assert (found["latency_ms"] > 0).all()
    assert set(found.loc["halted"].index) - set(found.loc["dense"].index) == {"runtime", "decide", "gather", "scatter"}
    assert found.loc[("dense", "layer 2"), "tokens"] == GRID.n_pillars
    tokens = [found.loc[("halted", f"layer {layer}"), "tokens"] for layer in range(3)]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[2] < tokens[0] == GRID.n_pillars
    flops = found.loc["halted"]["flops"].dropna()
    assert flops["layer 2"] < flops["layer 0"]


def test_a_row_a_size():
    found = frames.sizes(((16, 8, 1), (16, 8, 2)), repeats=3)
    assert found["pillars"].tolist() == [64, 64]
    assert (found["latency_ratio"] > 0).all()
    assert found["flops_saved_pct"].between(20, 80).all()
    assert found["tokens"].to_numpy() == pytest.approx((1 + sum(frames.LEFT)) / 4, abs=0.03)


def test_the_cost_of_a_study_is_its_steps_times_a_step(tmp_path, monkeypatch):
    def evaluations(seed):
        for dial in (0.0, 0.1):
            yield "control", "dense", dial, seed._measured(seed.train("control"))

    monkeypatch.setattr(frames, "PARTS", ("frozen",))
    monkeypatch.setattr(SeedRuns, "evaluations", evaluations)
    plan = dataclasses.replace(PLAN, steps=4, tuning_steps=3, validation=2)
    seed = SeedRuns(plan, 0, tmp_path)
    seed.train("control")
    found = frames.cost(seed, steps=1, scenes=2).set_index("what")
    assert found["count"].to_dict() == {
        "scenes": 10, "dense": 4, "control": 3, "frozen": 3, "2 evaluations": 2, "intervals": frames.DRAWS,
    }  # fmt: skip
    assert found["seconds"].to_numpy() == pytest.approx((found["count"] * found["seconds_each"]).to_numpy())
    assert (found["seconds_each"] > 0).all()
