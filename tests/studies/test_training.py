"""Training the detector: it learns, goes on after a kill as if nothing had been, and stops where a number is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from quicksilver.fitting.gates import HaltingGates
from quicksilver.modules import StaticDepth
from quicksilver.runtime import ConfigError, QuickSilverError
from quicksilver.studies.token_halting.evaluate import ap_difference, evaluate
from quicksilver.studies.token_halting.model import Shape, detector
from quicksilver.studies.token_halting.pillars import Batch, batch_of
from quicksilver.studies.token_halting.runs import Plan, gated, halted_shares, ruled
from quicksilver.studies.token_halting.scenes import Grid, SceneMaker
from quicksilver.studies.token_halting.training import Recipe, imitation_loss, read_checkpoint, train, trained

GRID = Grid(side=8)
SHAPE = Shape(width=16, layers=3, heads=2)
MAKER = SceneMaker(grid=GRID, cars=(1, 2), pedestrians=(1, 3), clutter=(1, 2), beams=16, azimuths=96)


def scenes(n: int, first: int = 0) -> Batch:
    found, seed = [], first
    while len(found) < n:
        scene = MAKER.scene(seed)
        seed += 1
        if len(scene.boxes):
            found.append(scene)
    return batch_of(found, GRID)


DATA = scenes(12)


def fresh():
    return detector(SHAPE, 0)


def gates() -> HaltingGates:
    return HaltingGates(SHAPE.width, [0, 1])


RECIPE = Recipe(8, batch_size=4, tokens=0.6, box_weight=0.2)


def test_a_killed_training_goes_on_as_if_nothing_had_been(tmp_path):
    whole = train(fresh(), DATA, RECIPE, gates=gates())

    class Killed(Exception):
        pass

    def killed(steps):
        for step in steps:
            if step == 5:
                raise Killed
            yield step

    path = tmp_path / "one.pt"
    with pytest.raises(Killed):
        train(fresh(), DATA, RECIPE, gates=gates(), checkpoint=path, every=2, progress=killed)
    assert read_checkpoint(path)["step"] == 4
    resumed = train(fresh(), DATA, RECIPE, gates=gates(), checkpoint=path, every=2)
    for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=0, rtol=0)
    assert torch.equal(whole.gates.weight, resumed.gates.weight)
    assert whole.curve == resumed.curve
    again = trained(path, SHAPE)
    assert torch.equal(again.gates.bias, whole.gates.bias)
    assert again.step == 8
    assert again.processor_s == resumed.processor_s > 0  # of both parts together


def test_a_teacher_is_imitated():
    teacher = train(fresh(), DATA, Recipe(30, batch_size=6)).model
    shared = {"batch_size": 6, "tokens": 0.9}

    def distance(model) -> float:
        with torch.no_grad():
            return float(imitation_loss(model(DATA.features), teacher(DATA.features), DATA))

    alone = train(fresh(), DATA, Recipe(10, **shared), gates=gates())
    taught = train(fresh(), DATA, Recipe(10, imitates=5.0, **shared), gates=gates(), teacher=teacher)
    assert distance(teacher) == pytest.approx(0, abs=1e-5)
    assert distance(taught.model) < 0.8 * distance(alone.model)


@pytest.mark.parametrize(("imitates", "teaches", "halts"), [(0.0, True, True), (1.0, False, True), (1.0, True, False)])
def test_a_teacher_needs_one_that_imitates_it(imitates, teaches, halts):
    recipe = Recipe(2, tokens=0.6 if halts else None, imitates=imitates)
    with pytest.raises(ConfigError, match="give gates, teacher and recipe.imitates, or no teacher"):
        train(fresh(), DATA, recipe, gates=gates() if halts else None, teacher=fresh() if teaches else None)


def test_it_learns():
    learnt = train(fresh(), DATA, Recipe(30, batch_size=6))
    assert learnt.curve[-1]["loss"] < 0.7 * learnt.curve[0]["loss"]


def test_a_loss_that_is_no_number_stops_and_the_last_good_state_stays(tmp_path):
    path = tmp_path / "one.pt"
    seen = []

    def poisoned(steps):
        for step in steps:
            seen.append(step)
            if step == 5:
                model.head.bias.data[0] = float("nan")
            yield step

    model = fresh()
    with pytest.raises(
        QuickSilverError, match=r"loss of step 5 is not finite: give a smaller learning rate.*last good state is .*one"
    ):
        train(model, DATA, Recipe(8, batch_size=4), checkpoint=path, every=2, progress=poisoned)
    found = read_checkpoint(path)
    assert found["step"] == 4
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found["parts"][0].values())


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    path = tmp_path / "one.pt"
    train(fresh(), DATA, Recipe(2, batch_size=4), checkpoint=path)
    with pytest.raises(ConfigError, match="checkpoint of another training: its recipe"):
        train(fresh(), DATA, Recipe(3, batch_size=4), checkpoint=path)
    with pytest.raises(ConfigError, match="layers=3, and this one has 2"):
        trained(path, dataclasses.replace(SHAPE, layers=2))
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        trained(path, SHAPE)
    with pytest.raises(ConfigError, match="There is no checkpoint"):
        trained(Path(tmp_path / "none"), SHAPE)


def test_gates_need_a_target_that_can_be_met():
    with pytest.raises(ConfigError, match="give gates and recipe.tokens, or neither"):
        train(fresh(), DATA, Recipe(2), gates=gates())
    with pytest.raises(ConfigError, match="tokens=0.2 cannot be met"):
        train(fresh(), DATA, Recipe(2, tokens=0.2), gates=gates())
    with pytest.raises(ConfigError, match="box_weight=0"):
        Recipe(2, box_weight=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": 0.25}, "tokens=0.25 cannot be met: the first of 4 layers has all tokens, so give a share between 0.25 and 1"),
        ({"tokens": 1.0}, "tokens=1 cannot be met"),
        ({"tokens": float("nan")}, "tokens=nan cannot be met"),
        ({"scenes": 0}, "scenes=0: give at least 1"),
        ({"validation": -3}, "validation=-3: give at least 1"),
        ({"tuning_steps": 0}, "tuning_steps=0: give at least 1"),
    ],
)
def test_a_plan_that_cannot_end_is_refused_before_anything_is_trained(given, said):
    with pytest.raises(ConfigError, match=said):
        Plan(**given)


def test_what_is_measured_of_a_policy():
    model = fresh()
    with torch.no_grad():
        model.head.bias[:2] += 4.0  # it sees something everywhere
    dense = evaluate(model, DATA, GRID)
    assert dense.tokens.tolist() == [1.0] * 12
    assert dense.ap() == dense.ap(recycled=False)
    half = evaluate(model, DATA, GRID, ruled("random", [0.5, 0.25]))
    assert halted_shares(half) == pytest.approx([0.5, 0.25])
    np.testing.assert_allclose(half.tokens, (1 + 0.5 + 0.25) / 3)
    assert (half.executed_flops < dense.executed_flops).all()
    assert not np.array_equal(half.halt_depth[0], half.halt_depth[1])  # each scene draws its own
    static = evaluate(model, DATA, GRID, lambda scene: [StaticDepth(depth=0.3, missing_kv="drop")])
    assert sum(one[0].size for one in static.matched[True, True][0]) > 0
    assert sum(one[0].size for one in static.matched[False, True][0]) == 0  # a head that is given nothing
    same = ap_difference([dense], [dense], draws=20)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    blind = ap_difference([static], [dense], recycled=False, draws=20)
    assert blind.value == pytest.approx(static.ap(recycled=False) - dense.ap())
    assert blind.low <= blind.value <= blind.high
    assert blind.low < blind.high
    one = DATA.take(slice(0, 1))
    with pytest.raises(ConfigError, match="there are 1"):
        ap_difference([evaluate(model, one, GRID)], [evaluate(model, one, GRID)], draws=20)
    with pytest.raises(ConfigError, match="no scene"):
        evaluate(model, DATA.take(slice(0, 0)), GRID)


def test_gates_alone_are_trained_where_the_detector_has_no_rate():
    start, learnt = fresh(), gates()
    was = learnt.weight.detach().clone()
    done = train(fresh(), DATA, dataclasses.replace(RECIPE, base_rate=0.0), gates=learnt)
    for one, two in zip(start.parameters(), done.model.parameters(), strict=True):
        assert torch.equal(one, two)
        assert two.requires_grad
    assert not torch.equal(learnt.weight, was)
    for recipe in ({"steps": 2, "base_rate": 0.0}, {"steps": 2, "tokens": 0.5, "base_rate": -0.1}):
        with pytest.raises(ConfigError, match="base_rate=.* must lie between 0 and 1"):
            Recipe(**recipe)


def test_gates_of_a_training_are_a_module():
    learnt = train(fresh(), DATA, RECIPE, gates=gates())
    nobody = evaluate(learnt.model, DATA, GRID, gated(learnt, 0.0))
    everybody = evaluate(learnt.model, DATA, GRID, gated(learnt, 1.0))
    assert nobody.tokens.mean() == 1
    dense = evaluate(learnt.model, DATA, GRID)  # bit for bit: the same scores, whether halted tokens are recycled or not
    for recycled in (True, False):
        for ours, theirs in zip(nobody.matched[recycled, True], dense.matched[recycled, True], strict=True):
            assert all(np.array_equal(a[0], b[0]) for a, b in zip(ours, theirs, strict=True))
    assert everybody.active[:, 1].sum() == 0
