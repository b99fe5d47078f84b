"""Controls of prediction: maps that know less, fitted on the same text, at the same schedule."""

from __future__ import annotations

import pytest
import tiny
import torch

from quicksilver.fitting.fitted_prediction import FittedPrediction, static_schedule
from quicksilver.fitting.schedules import saved_pct
from quicksilver.modules import Schedule
from quicksilver.runtime import MISSING_KV, ConfigError, architecture_of

N = 40
BATCH = tiny.Batch((tuple(range(1, N + 1)), tuple(range(3, N + 3))))
SCHEDULE = Schedule(1, 0.25, 2, 2, 5)


def text(windows: int = 12) -> torch.Tensor:
    return torch.randint(1, tiny.VOCABULARY, (windows, 48), generator=torch.Generator().manual_seed(3))


def fitted(name: str, control: str) -> FittedPrediction:
    module = FittedPrediction(schedule=SCHEDULE, control=control)
    module.fit(tiny.load(name), text(), batch_size=4)
    return module


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_pairs_predict_better_than_the_mean_and_that_no_worse_than_shuffled_pairs(name: str) -> None:
    arch = architecture_of(tiny.load(name))
    states: dict[int, torch.Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: states.__setitem__(i, kwargs.get("hidden_states", args[0] if args else None)),
            with_kwargs=True,
        )
        for i, layer in enumerate(arch.layers)
    ]
    arch.base(input_ids=BATCH.ids, use_cache=False)
    for handle in handles:
        handle.remove()
    error = {}
    for control in ("none", "shuffled", "mean"):
        module = fitted(name, control)
        module.bind(arch)
        (translator,) = module.translators.values()
        predicted = translator.translate(states[2])
        assert list(predicted.layers) == [3, 4]
        differences = [
            (a - b).square().mean()
            for j in predicted.layers
            for a, b in zip(predicted[j], arch.project_kv_unrotated(j, states[j]), strict=True)
        ]
        error[control] = float(torch.stack(differences).sum())
        same_for_all = all(bool((part - part[:, :, :1]).abs().max() < 1e-6) for j in predicted.layers for part in predicted[j])
        assert same_for_all == (control == "mean")
    assert error["none"] < 0.7 * error["mean"] < error["shuffled"]


@pytest.mark.parametrize("execution", ["compact", "masked"])
def test_it_runs_like_a_preset_and_a_control_costs_the_same_work(execution: str) -> None:
    model = tiny.load("llama")
    runs = {
        control: tiny.forward(model, BATCH, [fitted("llama", control)], execution=execution)
        for control in ("none", "shuffled", "mean")
    }
    assert len({run.run.flops.executed for run in runs.values()}) == 1
    assert not torch.equal(runs["none"].logits, runs["mean"].logits)
    assert not torch.equal(runs["none"].logits, runs["shuffled"].logits)
    (one,) = runs["none"].trace.passes
    assert (one.halted_kv == MISSING_KV.index("predict")).any()


def test_static_prediction_drops_nobody_and_stops_as_late_as_the_budget_allows() -> None:
    arch = architecture_of(tiny.load("gpt2"))
    schedule = static_schedule(arch, 0.15, prompt_tokens=N, protect_last=5)
    assert schedule.drop_share == 0
    assert saved_pct(arch, schedule, N) >= 15
    later = Schedule(1, 0.0, schedule.predict_before + 1, 4, 5)
    assert schedule.predict_before + 1 > arch.n_layers - 2 or saved_pct(arch, later, N) < 15
    module = FittedPrediction(save=0.01, drop_oldest=False, prompt_tokens=90)
    module.fit(tiny.load("gpt2"), text())
    run = tiny.forward(tiny.load("gpt2"), tiny.Batch((tuple(i % 60 + 1 for i in range(90)),)), [module])
    (one,) = run.trace.passes
    assert not (one.valid & (one.halt_layer < tiny.LAYERS - 1) & (one.halted_kv == MISSING_KV.index("drop"))).any()


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="too few to fit"):
        FittedPrediction(schedule=SCHEDULE).fit(tiny.load("gpt2"), text(2))
    assert FittedPrediction(schedule=SCHEDULE, missing_kv="project").fitted
