"""The ladder: every model saves the same share of a prompt at the same depth, the trend is a slope, and what is missing is named."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pandas as pd
import pytest
import torch
from saying import unsaid
from thinning import first
from transformers import AutoConfig, AutoModelForCausalLM

from quicksilver.experiments.sweeps import figure_ladder as ladder
from quicksilver.fitting.schedules import saved_pct, work_saved_pct
from quicksilver.models.loading import EMBEDDED
from quicksilver.modules import Halting
from quicksilver.modules.staged_halting import Schedule
from quicksilver.records.identity import ModelEntry
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.runs.config import compose
from quicksilver.runs.parts import build_modules
from quicksilver.runtime import apply, architecture_of
from quicksilver.runtime.ledger import LayerWork


def architecture(model: str) -> Any:
    with torch.device("meta"):
        return architecture_of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EMBEDDED / model)))


@pytest.mark.parametrize("model", first(ladder.DIALS))
def test_the_dials_save_what_they_should_by_the_runtime(model: str) -> None:
    layers, dropped, last, cut = ladder.DIALS[model]
    found = architecture(model)
    assert found.n_layers == layers
    for depth in (ladder.DROP_DEPTH, ladder.PREDICT_DEPTH):  # the same fraction of every model
        assert depth * layers == round(depth * layers)

    def predicting(last: int) -> float:
        return saved_pct(found, Schedule(1, 0.0, layers // 2, ladder.PROTECT_FIRST, last), ladder.PROMPT_TOKENS)

    def dropping(count: int, before: int) -> float:
        left = [ladder.PROMPT_TOKENS - (count if layer >= before else 0) for layer in range(layers)]
        return work_saved_pct(found, [LayerWork(1, tokens, None) for tokens in left], ladder.PROMPT_TOKENS)

    assert predicting(last) >= ladder.SAVES_PCT > predicting(last + 1)
    for count, before in ((dropped, layers // 4), (cut, 0)):
        assert dropping(count, before) >= ladder.SAVES_PCT > dropping(count - 1, before)


def test_what_is_dropped_saves_what_it_should_when_it_runs() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EMBEDDED / "ladder-gpt2-1m")).eval()
    options = build_modules(compose(["protocol=continuation", *ladder.overrides("ladder-gpt2-1m", "drift")]).modules)
    ids = torch.arange(ladder.PROMPT_TOKENS)[None]

    def executed(modules: list[Any]) -> int:
        with torch.no_grad(), apply(model, modules) as run:
            model(ids, use_cache=True, logits_to_keep=1)
            return run.flops.executed

    assert isinstance(options[0], Halting)
    assert 100 * (1 - executed(options) / executed([])) == pytest.approx(ladder.SAVES_PCT, abs=0.2)


def test_every_technique_composes() -> None:
    jobs = {technique: ladder.overrides("reference-llama", technique) for technique in ladder.TECHNIQUES}
    assert len(set(jobs.values())) == len(jobs)
    for technique, words in jobs.items():
        assert build_modules(compose([*ladder.ALWAYS, *words]).modules), technique


def test_the_slope_is_that_of_a_line_and_its_interval_that_of_the_windows() -> None:
    rng = np.random.default_rng(0)
    hard = rng.uniform(0.5, 1.5, 64)
    sizes = [1_000_000, 2_000_000, 8_000_000]
    falling = ladder.slope_per_doubling(sizes, [hard * (0.10 - 0.02 * doublings) for doublings in (0, 1, 3)])
    assert falling.value == pytest.approx(-0.02 * hard.mean(), rel=1e-6)
    assert falling.low < falling.value < falling.high < 0
    noise = ladder.slope_per_doubling(sizes, [0.1 + 0.05 * rng.standard_normal(64) for _ in sizes])
    assert noise.low < 0 < noise.high


# --- figure ------------------------------------------------------------------------------------------------------------------
COSTS = {"truncated": 0.12, "predicted": 0.01, "position": 0.03, "attention": 0.05, "drift": 0.09, "random": 0.10}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rungs and two other models, as far as a figure asks: that they are there, and how long they were trained."""
    trained = {"ladder-gpt2-1m": 4e6, "ladder-gpt2-8m": 5e6, **dict.fromkeys(ladder.SEEDS, 13e6)}
    for name, tokens in trained.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "training.json").write_text(json.dumps({"held_out": [{"tokens": 1}, {"tokens": tokens}]}))
    monkeypatch.setattr(ladder, "EMBEDDED", tmp_path / "models")


def outcomes(results: Path) -> list[Outcome]:
    """The larger model loses half of what the smaller one loses."""
    named = ModelEntry(**fakes.described("dense")["model"])

    def made(row: Row) -> dict[str, Any]:
        parameters, layers, times = (1_000_000, 12, 1.0) if row.panel == "ladder-gpt2-1m" else (8_000_000, 16, 0.5)
        lost = times * COSTS[row.key] * (1.2 if row.panel == ladder.SEEDS[1] else 1.0)
        model = dataclasses.replace(named, name=row.panel, parameters=parameters, layers=layers)
        return {"per_token": lost, "saved": 0.4, "model": fakes.encoded(model), "kl_nats": lost}

    found = fakes.outcomes(results, ladder.rows(), made)
    for one in found:
        if one.row.key != "dense":
            one.record.windows["kl_nats"] = one.record.quality.kl_nats * np.linspace(0.5, 1.5, fakes.WINDOW_COUNT)
    return found


def test_the_trend_is_of_the_rungs_that_are_there_and_says_what_else_differs(models: None, tmp_path: Path) -> None:
    made = ladder.figure(outcomes(tmp_path / "results"), "figure_ladder")
    assert made.png().startswith(b"\x89PNG")
    frame = made.frame
    assert set(frame["panel"]) == {"ladder-gpt2-1m", "ladder-gpt2-8m", *ladder.SEEDS, ladder.TREND}
    trends = frame[frame["panel"] == ladder.TREND].set_index("key")
    for key in trends.index:  # three doublings halve it
        assert trends.loc[key, "kl_nats_per_doubling"] == pytest.approx(-COSTS[key] / 6, rel=1e-3)
    assert {*COSTS} - {*trends.index} == {ladder.TRUNCATED}  # not of the rungs
    wanted = (
        "the weights are not here: ladder-gpt2-2m, ladder-gpt2-4m",
        "make train-reference MODEL=ladder-gpt2-2m",
        "a difference of two sizes and no line",
        "depth (12, 16 layers)",
        "training (4.0 M, 5.0 M tokens)",
        "ladder-gpt2-8m and reference-gpt2 have one shape and saw 5.0 M and 13.0 M tokens",
        "random 5.00 [",  # of both: KL 0.05
        "KL × 100 of both, and the difference: predicted 0.50 and 0.60 (+0.10 [",
        "truncated 6.00 and 7.20 (+1.20 [",
    )
    assert unsaid(" ".join(made.caption), *wanted) == []
    # The best signal stands beside the next, and beside prediction.
    mine = frame[frame["panel"] == "ladder-gpt2-1m"].set_index("key")
    assert mine["beside"].dropna().to_dict() == {"predicted": "position", "position": "attention"}
    assert mine.loc["position", "beside_kl_nats"] == pytest.approx(0.02)
    assert mine.loc["predicted", "beside_kl_nats_low"] > 0


def test_without_any_record_the_figure_says_so(models: None) -> None:
    made = ladder.figure([Outcome(row, reason="failed") for row in ladder.rows()], "figure_ladder")
    said = " ".join(made.caption)
    assert "One size is no trend" in said
    assert "no record: ladder-gpt2-1m dense, ladder-gpt2-1m predicted" in said
    assert pd.isna(made.frame["kl_nats"]).all()
