"""Controls of prediction, and the ceiling of early exit: fitted on the same text, at the same schedule."""

from __future__ import annotations

import pytest
import tiny
import torch

from quicksilver.fitting.fitted_prediction import FittedPrediction, static_schedule
from quicksilver.fitting.oracle_exit import OracleExit, share_that_saves
from quicksilver.fitting.schedules import saved_pct
from quicksilver.modules import Schedule
from quicksilver.runtime import MISSING_KV, ConfigError, architecture_of

N = 40
BATCH = tiny.Batch((tuple(range(1, N + 1)), tuple(range(3, N + 3))))
SCHEDULE = Schedule(1, 0.25, 2, 2, 5)


def text(windows: int = 12, tokens: int = 48) -> torch.Tensor:
    return torch.randint(1, tiny.VOCABULARY, (windows, tokens), generator=torch.Generator().manual_seed(3))


def fitted(name: str, control: str) -> FittedPrediction:
    module = FittedPrediction(schedule=SCHEDULE, control=control)
    module.fit(tiny.load(name), text(), batch_size=4)
    return module


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_pairs_predict_better_than_the_mean_and_that_no_worse_than_shuffled_pairs(name: str) -> None:
    arch = architecture_of(tiny.load(name))
    states = arch.model(BATCH.ids, use_cache=False, output_hidden_states=True).hidden_states
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


def oracle(name: str, save: float = 0.1) -> OracleExit:
    module = OracleExit(save=save, lookahead=True)
    module.fit(tiny.load(name), text(tokens=N), batch_size=4)
    return module


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_it_saves_what_was_asked_for_and_loses_less_than_the_same_tokens_without_a_head(name: str) -> None:
    model, module = tiny.load(name), oracle(name)
    rows = [tiny.Batch((tuple(row),)) for row in text(tokens=N).tolist()]
    executed = [sum(tiny.forward(model, row, modules).run.flops.executed for row in rows) for modules in ([module], [])]
    # The threshold is the quantile that saves so much on this very text.
    assert 100 * (1 - executed[0] / executed[1]) == pytest.approx(10, abs=1.5)
    batch = tiny.Batch(tuple(tuple(row) for row in text(tokens=N).tolist()))
    dense, run = tiny.forward(model, batch, []), tiny.forward(model, batch, [module])
    (one,) = run.trace.passes
    left = one.halt_layer == module.exit.before - 1
    assert not left[:, :4].any()
    assert float(left.float().mean()) == pytest.approx(module.exit.share * (N - 4) / N, abs=0.02)
    assert (one.halted_kv[left] == MISSING_KV.index("predict")).all()

    def kl(logits: torch.Tensor) -> torch.Tensor:
        p = dense.logits.log_softmax(-1)
        return (p.exp() * (p - logits.log_softmax(-1))).sum(-1)

    exact = module.exit.head
    module._exit = type(module.exit)(module.exit.before, torch.zeros_like(exact), 1e9, 0.0, 0.0)
    without = tiny.forward(model, batch, [module]).logits
    assert float(kl(run.logits)[left].mean()) < float(kl(without)[left].mean())
    assert torch.equal(tiny.forward(model, batch, []).logits, dense.logits)  # nothing is left on the model


def test_what_comes_after_a_token_moves_neither_its_decision_nor_its_logits_and_masked_agrees() -> None:
    model, module = tiny.load("llama"), oracle("llama")
    changed = tiny.Batch(tuple((*row[:20], *[7] * 20) for row in BATCH.rows))
    one, two, masked = (
        tiny.forward(model, batch, [module], execution=execution)
        for batch, execution in ((BATCH, "compact"), (changed, "compact"), (BATCH, "masked"))
    )
    assert torch.equal(one.trace.passes[0].halt_layer[:, :20], two.trace.passes[0].halt_layer[:, :20])
    torch.testing.assert_close(one.logits[:, :20], two.logits[:, :20], rtol=1e-4, atol=1e-5)
    tiny.assert_close(one.logits, masked.logits)


def test_bad_input_is_refused() -> None:
    model = tiny.load("gpt2")
    with pytest.raises(ConfigError, match="save=0.95: not even all tokens leaving before layer 1 saves so much"):
        OracleExit(save=0.95).fit(model, text(tokens=N))
    with pytest.raises(ConfigError, match="are too few to fit"):
        OracleExit().fit(model, text(2, N))
    shares = [share_that_saves(architecture_of(model), 2, saved, N) for saved in (0.0, 0.05, 0.1, 0.99)]
    assert shares[0] == 0
    assert shares[3] is None
    assert 0 < shares[1] < shares[2] <= 1
