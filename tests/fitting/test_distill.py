"""Training a translator brings the answers nearer to the dense model's, and touches nothing else."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from thinning import first

from quicksilver.fitting.schedules import ScheduleEvaluator, distill, search
from quicksilver.modules import Schedule
from quicksilver.modules.fitted import ModelShape, model_digest
from quicksilver.modules.translators import Translator
from quicksilver.runtime import ConfigError, architecture_of

SCHEDULE = Schedule(1, 0.1, 2, 1, 3)


def world(name: str = "llama") -> tuple:
    arch = architecture_of(tiny.load(name))
    shape = ModelShape.of(arch)
    weight = torch.zeros(1 + shape.width, 2, 2, shape.n_kv_heads, shape.head_dim)
    ids = torch.randint(1, tiny.VOCABULARY, (8, 30), generator=torch.Generator().manual_seed(0))
    return arch, Translator(2, weight, shape, model_digest(arch.model)), ids


@pytest.mark.parametrize("name", first(["gpt2", "llama", "gpt_neox"]))
def test_it_comes_nearer_to_the_dense_answers_and_leaves_the_model_alone(name: str) -> None:
    arch, zeros, ids = world(name)
    before = copy.deepcopy(arch.model.state_dict())
    trained = distill(arch, zeros, ids, [SCHEDULE], steps=40, prompt_tokens=24, batch_size=4, learning_rate=1e-2)
    judge = ScheduleEvaluator(arch, ids, prompt_tokens=24)
    assert judge.kl_nats(SCHEDULE, trained).mean() < 0.8 * judge.kl_nats(SCHEDULE, zeros).mean()
    assert all(torch.equal(before[key], value) for key, value in arch.model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in arch.model.parameters() if not parameter.requires_grad)
    assert trained.provenance["distilled"]["steps"] == 40
    assert float(zeros.weight.abs().sum()) == 0


def test_the_search_takes_the_least_kl_of_what_saves_enough() -> None:
    arch, zeros, ids = world()
    judge = ScheduleEvaluator(arch, ids, prompt_tokens=24)
    found = search(judge, [zeros], 0.3, protect_last=(2, 6))
    assert [one.kl_nats for one in found] == sorted(one.kl_nats for one in found)
    assert all(one.saved_pct >= 30 for one in found)
    assert found[0].kl_nats == pytest.approx(float(judge.kl_nats(found[0].schedule, zeros).mean()))
    with pytest.raises(ConfigError, match="from layer 2 saves 0.99"):
        search(judge, [zeros], 0.99)


def test_options_that_make_no_sense_are_refused() -> None:
    arch, zeros, ids = world()
    with pytest.raises(ConfigError, match="steps=0"):
        distill(arch, zeros, ids, [SCHEDULE], steps=0, prompt_tokens=24)
    with pytest.raises(ConfigError, match="longer than 31"):
        distill(arch, zeros, ids, [SCHEDULE], prompt_tokens=30)
    with pytest.raises(ConfigError, match="before layer 2"):
        distill(arch, zeros, ids, [Schedule(1, 0.1, 3)], prompt_tokens=24)
