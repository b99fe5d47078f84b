"""What is timed of a detector is what it says: its clocks cover their own operations, its parts are those that ran, gates of drawn weights leave
what they shall."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from quicksilver.fitting.gates import HaltingGates
from quicksilver.runtime.run import apply
from quicksilver.studies.token_halting import timing
from quicksilver.studies.token_halting.model import Shape, detector
from quicksilver.studies.token_halting.runs import Plan, SeedRuns, gated
from quicksilver.studies.token_halting.scenes import Grid, SceneMaker
from quicksilver.studies.token_halting.training import Recipe, Trained, train

GRID = Grid(side=8)
MAKER = SceneMaker(grid=GRID, cars=(2, 3), pedestrians=(1, 3), clutter=(1, 2), beams=16, azimuths=96)
SHAPE = Shape(width=16, layers=3, heads=2)
PLAN = Plan(shape=SHAPE, scenes=8, validation=2, steps=1, tuning_steps=1, tokens=0.6, maker=MAKER)


@pytest.fixture
def halting():
    """A detector and gates that halt some tokens and leave some."""
    gates = HaltingGates(SHAPE.width, [0, 1])
    model = detector(SHAPE, 0)
    trained = train(model, PLAN.training_data, Recipe(1, batch_size=4, tokens=0.6), gates=gates)
    with torch.no_grad():
        gates.weight.normal_(generator=torch.Generator().manual_seed(0))
        gates.bias.fill_(4.0)
    return trained


def test_each_clock_has_the_operations_of_its_own_part(halting):
    scenes = PLAN.validation_scenes(2)
    with (
        timing.Timed(halting.model, None, scenes, GRID) as dense,
        timing.Timed(halting.model, gated(halting), scenes, GRID) as ours,
    ):
        encoder, whole = ([one.flops(clock) for one in (dense, ours)] for clock in ("encoder", "whole"))
    with apply(halting.model, []) as run, torch.inference_mode():
        halting.model(PLAN.validation_data.features[:1])
    assert encoder[1] < encoder[0]
    assert whole[0] - encoder[0] == whole[1] - encoder[1]  # what no halting saves
    assert encoder[0] < run.flops.executed < whole[0]  # the run has the head, and not the embedding


def test_parts_are_those_that_ran_and_layers_have_the_tokens_that_were_left(halting, monkeypatch):
    seed = SeedRuns(PLAN, 0, None)
    monkeypatch.setattr(seed, "train", lambda name: halting)
    found = timing.parts(seed, repeats=3, scenes=2).set_index(["run", "part"])
    assert (found["latency_ms"] > 0).all()
    assert set(found.loc["halted"].index) - set(found.loc["dense"].index) == {"runtime", "decide", "gather", "scatter"}
    assert found.loc[("dense", "layer 2"), "tokens"] == GRID.n_pillars
    tokens = [found.loc[("halted", f"layer {layer}"), "tokens"] for layer in range(3)]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[2] < tokens[0] == GRID.n_pillars
    flops = found.loc["halted"]["flops"].dropna()
    assert flops["layer 2"] < flops["layer 0"]


def test_drawn_gates_leave_what_they_shall():
    model = detector(Shape(32, 4, 2), 0)
    hidden = torch.randn(3, 200, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        gates = timing._gates_that_leave(model, hidden)
        with apply(model, gated(Trained(model, gates, [], 0))(0)) as run:
            for one in hidden.split(1):
                model.encoder(inputs_embeds=one)
    left = np.mean([[float(p.active(layer).float().mean()) for layer in range(4)] for p in run.trace.passes], axis=0)
    assert left == pytest.approx([1, *timing.LEFT], abs=0.02)


def test_a_row_a_size():
    found = timing.sizes(((16, 8, 1), (16, 8, 2)), layers=4, repeats=3)
    assert found["pillars"].tolist() == [64, 64]
    assert (found["latency_ratio"] > 0).all()
    assert found["flops_saved_pct"].between(20, 80).all()
    assert found["tokens"].to_numpy() == pytest.approx((1 + sum(timing.LEFT)) / 4, abs=0.03)


def test_the_cost_of_a_study_is_its_steps_times_a_step(tmp_path, monkeypatch):
    def evaluations(seed):
        for dial in (0.0, 0.1):
            yield "control", "dense", dial, seed._measured(seed.train("control"))

    monkeypatch.setattr(timing, "PARTS", ("frozen",))
    monkeypatch.setattr(SeedRuns, "evaluations", evaluations)
    plan = dataclasses.replace(PLAN, steps=4, tuning_steps=3, validation=2)
    runs = SeedRuns(plan, 0, tmp_path)
    runs.train("control")
    found = timing.cost(runs, steps=1, scenes=2).set_index("what")
    assert found["count"].to_dict() == {
        "scenes": 10, "dense": 4, "control": 3, "frozen": 3, "2 evaluations": 2, "intervals": timing.DRAWS,
    }  # fmt: skip
    assert found["seconds"].to_numpy() == pytest.approx((found["count"] * found["seconds_each"]).to_numpy())
    assert (found["seconds_each"] > 0).all()
