"""Sums of a streamed pass and what is solved and distilled from them: against a regression on all of the data at once."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import tiny
import torch
from thinning import first

from quicksilver.fitting.fit import FitCost, NormalEquations, fit_translators, priced
from quicksilver.fitting.schedules import ScheduleEvaluator, distill, search
from quicksilver.fitting.text import FitText
from quicksilver.modules import Schedule
from quicksilver.modules.fitted import ModelShape, model_digest
from quicksilver.modules.translators import Translator
from quicksilver.runtime import ConfigError, architecture_of


def text(windows: int = 12, tokens: int = 48, seed: int = 0) -> FitText:
    ids = torch.randint(1, tiny.VOCABULARY, (windows, tokens), generator=torch.Generator().manual_seed(seed))
    return FitText(ids, {"texts": {}})


@torch.no_grad()
def inputs_and_targets(arch, ids: torch.Tensor, source: int) -> tuple[torch.Tensor, torch.Tensor]:
    """X (T, 1 + D) and Y (T, (L−1−source)·2·d_kv) of a plain pass, from the model's own hidden states."""
    states = arch.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    normed = arch.normalised_input(source, states[source]).flatten(0, 1)
    parts = [part.transpose(1, 2).flatten(2).flatten(0, 1)
             for layer in range(source + 1, arch.n_layers) for part in arch.project_kv_unrotated(layer, states[layer])]  # fmt: skip
    return torch.cat([torch.ones_like(normed[:, :1]), normed], dim=1).double(), torch.cat(parts, dim=1).double()


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_streamed_sums_solve_to_the_ridge_regression_of_all_data(name: str) -> None:
    arch, fit_on = architecture_of(tiny.load(name)), text()
    found = fit_translators(arch, fit_on, [1, 2], ridge=0.01, batch_size=5)
    assert sorted(found) == [1, 2]
    for source, translator in found.items():
        x, y = inputs_and_targets(arch, fit_on.ids, source)
        xx = x.T @ x
        wanted = torch.linalg.solve(xx + 0.01 * xx.diagonal().mean() * torch.eye(len(xx)), x.T @ y)
        torch.testing.assert_close(translator.weight.flatten(1).double(), wanted, atol=1e-4, rtol=1e-3)
        assert translator.weights_digest == model_digest(arch.model)
        assert translator.provenance["tokens"] == fit_on.ids.numel()


def test_a_fit_that_was_stopped_goes_on_and_comes_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, fit_on, checkpoint = architecture_of(tiny.load("gpt2")), text(), tmp_path / "sums.safetensors"
    monkeypatch.setattr("quicksilver.fitting.fit.SAVED_EVERY_S", -1.0)
    seen: list[int] = []

    def stopping(batches):
        for number, batch in enumerate(batches):
            if number == 2:
                raise KeyboardInterrupt
            yield batch

    def counting(batches):
        for batch in batches:
            seen.append(len(batch))
            yield batch

    with pytest.raises(KeyboardInterrupt):
        fit_translators(arch, fit_on, [1], batch_size=3, checkpoint=checkpoint, progress=stopping)
    assert checkpoint.is_file()
    resumed = fit_translators(arch, fit_on, [1], batch_size=3, checkpoint=checkpoint, progress=counting)
    assert seen == [3, 3]
    assert not checkpoint.exists()
    assert torch.equal(resumed[1].weight, fit_translators(arch, fit_on, [1], batch_size=3)[1].weight)


def test_sums_of_other_text_or_a_torn_file_are_not_taken_up(tmp_path: Path) -> None:
    arch, path = architecture_of(tiny.load("gpt2")), tmp_path / "sums.safetensors"
    sums = NormalEquations(arch, [1])
    sums.add(text().ids)
    sums.save(path, "one")
    assert not NormalEquations(arch, [1]).resume(path, "another")
    assert not NormalEquations(arch, [1]).resume(tmp_path / "none", "one")
    path.write_bytes(path.read_bytes()[:200])
    assert not NormalEquations(arch, [1]).resume(path, "one")


def test_too_little_text_and_bad_options_are_refused() -> None:
    arch = architecture_of(tiny.load("gpt2"))
    with pytest.raises(ConfigError, match="100 tokens are too few to fit 33 coefficients a column: give at least 330"):
        fit_translators(arch, text(2, 50), [1])
    repeated = FitText(text(1, 8).ids.repeat(60, 1), {})
    with pytest.raises(ConfigError, match="spans 8 of 33 directions"):
        fit_translators(arch, repeated, [1])
    with pytest.raises(ConfigError, match="layers from 0 to 3"):
        fit_translators(arch, text(), [4])
    with pytest.raises(ConfigError, match="ridge=0"):
        fit_translators(arch, text(), [1], ridge=0)
    with pytest.raises(ConfigError, match="control='noise'"):
        fit_translators(arch, text(), [1], control="noise")


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


def test_the_price_of_a_fit_has_its_time_its_memory_and_its_machine(tmp_path: Path) -> None:
    megabytes = 64

    def fit() -> str:
        torch.ones(megabytes, 2**18).sum()  # float32
        return "a map"

    found, cost = priced(fit, model="tiny", layers=[3, 4], distill_steps=70, tokens=2048)
    assert found == "a map"
    assert cost.seconds >= 0
    assert cost.peak_bytes > megabytes * 2**20
    assert torch.__version__ in cost.machine
    cost.save(tmp_path / "tiny.cost.json")
    assert FitCost(**json.loads((tmp_path / "tiny.cost.json").read_text())) == cost
    said = FitCost("tiny", [3, 4], 70, 122880, 40.04, 61.0, 812_000_000, "A Processor, torch 2, 2 threads").line()
    assert said == (
        "tiny: 2 maps on 122,880 tokens, 70 steps of distillation each: 40.0 s (61.0 s of processor time), peak memory 0.81 GB; "
        "A Processor, torch 2, 2 threads"
    )
