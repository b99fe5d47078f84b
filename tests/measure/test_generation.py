"""Continuations under modules beside the dense model's: the same prompts, the same random numbers, whatever is computed together."""

import sys
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import load, refused

from quicksilver.measure.generation import TEXTS, GenerationResult, compared, continued, distinct, edit_distance, gumbel_noise
from quicksilver.modules import StaticDepth
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure
from quicksilver.runtime import apply

PROMPTS = torch.tensor([[5, 9, 2, 33, 7, 5, 9, 2], [1, 44, 3, 8, 2, 2, 60, 17], [9, 9, 9, 1, 30, 4, 6, 5]])
SMALL = ["measure=generation", "measure.generation.prompts=3", "measure.generation.prompt_tokens=16", "measure.generation.new_tokens=8"]  # fmt: skip
TEXT = st.lists(st.integers(0, 3), max_size=12)


@pytest.mark.parametrize("modules", [[], [StaticDepth(depth=0.4, missing_kv="drop")]], ids=["dense", "halting"])
@torch.no_grad()
def test_greedy_continuations_are_those_of_generate_up_to_their_end(modules):
    model = load("llama")
    with apply(model, modules):
        ours = continued(model, PROMPTS, 9)
    with apply(model, modules):
        ids = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=9, do_sample=False, eos_token_id=-1)
    assert ours == ids[:, PROMPTS.shape[1] :].tolist()
    end = ours[0][3]
    with apply(model, modules):
        assert continued(model, PROMPTS[:1], 9, ends=[end]) == [ours[0][: ours[0].index(end)]]


@torch.no_grad()
def test_a_draw_is_a_prompt_s_own_whatever_it_is_batched_with_and_draws_follow_the_softmax():
    model = load("gpt2")
    noise = lambda rows: [gumbel_noise(0, row) for row in rows]
    together = continued(model, PROMPTS, 8, noise(range(3)))
    assert together == [continued(model, PROMPTS[row : row + 1], 8, noise([row]))[0] for row in range(3)]
    assert together != continued(model, PROMPTS, 8)
    assert continued(model, PROMPTS, 8, [gumbel_noise(1, row) for row in range(3)]) != together
    # Without spread the likeliest token is drawn.
    assert continued(model, PROMPTS, 8, noise(range(3)), temperature=1e-6) == continued(model, PROMPTS, 8)
    likely = model(PROMPTS[:1]).logits[0, -1].softmax(-1)
    prompts = PROMPTS[:1].repeat(2000, 1)
    drawn = torch.tensor(continued(model, prompts, 1, noise(range(2000))))[:, 0]
    share = torch.bincount(drawn, minlength=len(likely)) / 2000
    assert float((share - likely).abs().max()) < 5 * (0.25 / 2000) ** 0.5


@given(TEXT, TEXT)
def test_distances_of_texts(one, two):
    assert edit_distance(one, two) == edit_distance(two, one) <= max(len(one), len(two))
    assert (edit_distance(one, two) == 0) == (one == two)
    found = compared(one, two)
    assert found["identical"] == (one == two) == (found["agreement"] == 1)
    assert one[: int(found["same_tokens"])] == two[: int(found["same_tokens"])]
    assert found["edit_distance"] <= 1 - found["agreement"] + 1e-12  # aligned places are one way to edit


def test_known_distances():
    assert edit_distance([1, 2, 3, 4], [2, 3, 4, 5]) == 2
    assert compared([1, 2, 3, 4], [2, 3, 4, 5])["agreement"] == 0
    assert distinct([1, 2, 1, 2, 1, 2], 2) == pytest.approx(2 / 5)
    assert compared([7] * 8, list(range(8)))["repeated"] == pytest.approx(4 / 5)


@pytest.fixture(scope="module")
def world(world, tmp_path_factory):
    return [*world, f"results_dir={tmp_path_factory.mktemp('generation')}", "protocol=continuation", *SMALL]


HALTING = ["modules=[halting_attention]", "modules.halting.halted_share=0.6"]


def test_a_run_writes_its_texts_beside_the_dense_ones_and_mauve_is_asked_where_it_is_installed(world, monkeypatch):
    mauve = Mock(__spec__=Mock(), compute_mauve=Mock(return_value=Mock(mauve=0.75)))
    monkeypatch.setitem(sys.modules, "mauve", mauve)
    monkeypatch.setattr("quicksilver.measure.generation.MAUVE_LEAST", 3)
    config = compose([*world, *HALTING])
    (record,) = ensure([config])
    found = record.measured("generation", GenerationResult)
    assert found.greedy.mauve == 0.75
    asked = mauve.compute_mauve.call_args.kwargs
    assert asked["p_features"].shape == asked["q_features"].shape == (3, 16)
    frame = pd.read_parquet(record.path / TEXTS)
    assert list(frame["way"]) == ["greedy"] * 3 + ["sampled"] * 3
    assert found.greedy.agreement == pytest.approx(frame[frame["way"] == "greedy"]["agreement"].mean())
    assert found.greedy.agreement < 1
    assert found.executed_flops < found.dense_executed_flops
    # The dense model's own greedy text is what it finds likely.
    assert found.greedy.nats > 0
    for _, row in frame.iterrows():
        assert list(row["tokens"][: int(row["same_tokens"])]) == list(row["dense_tokens"][: int(row["same_tokens"])])
    # The dense run writes nothing of its own.
    assert not (record.path.parent / record.dense_fingerprint / TEXTS).exists()
    assert config.dense().identity() == compose([*world, "modules=[]"]).dense().identity()


def test_modules_that_change_nothing_change_no_text(world):
    record = ensure([compose([*world, "modules=[random_halting]", "modules.random_halting.rate=0"])])[0]
    found = record.measured("generation", GenerationResult)
    for one in (found.greedy, found.sampled):
        assert (one.identical, one.agreement, one.edit_distance, one.same_tokens) == (3, 1, 0, 8)
        assert one.nats == one.dense_nats
        assert one.mauve is None  # three texts are too few


def test_more_than_the_context_is_refused(world):
    with refused("prompt_tokens=16 and new_tokens=60 are more than the model's 64 positions"):
        ensure([compose([*world, *HALTING, "measure.generation.new_tokens=60"])])
