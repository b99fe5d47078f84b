"""The ladder: every model saves the same share of a prompt at the same depth, the trend is a slope, and what is missing is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from quicksilver.experiments.sweeps import figure_ladder as ladder
from quicksilver.fitting.schedules import saved_pct
from quicksilver.modules import Halting
from quicksilver.modules.staged_halting import Schedule
from quicksilver.report.artefacts import Outcome
from quicksilver.runs.config import compose
from quicksilver.runs.parts import build_modules
from quicksilver.runtime import ConfigError, apply, architecture_of

CONFIGS = {
    "12 layers": GPT2Config(n_layer=12, n_embd=64, n_head=2, vocab_size=6144, n_positions=512, n_inner=256),
    "16 layers": GPT2Config(n_layer=16, n_embd=192, n_head=6, vocab_size=6144, n_positions=512, n_inner=768),
    "grouped": LlamaConfig(
        num_hidden_layers=16, hidden_size=192, num_attention_heads=6, num_key_value_heads=2, head_dim=32, intermediate_size=512,
        vocab_size=6144, tie_word_embeddings=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_dials_are_arithmetic_that_the_runtime_agrees_with(name: str) -> None:
    config = CONFIGS[name]
    shape = ladder.shape_of(config.to_dict())
    with torch.device("meta"):
        architecture = architecture_of(AutoModelForCausalLM.from_config(config))
    assert (shape.linear_params, shape.kv_params) == (architecture.linear_params_per_layer, architecture.kv_params_per_layer)
    last = ladder.protected_tokens(shape)
    found = [
        saved_pct(architecture, Schedule(1, 0.0, shape.layers // 2, ladder.PROTECT_FIRST, kept), ladder.PROMPT_TOKENS)
        for kept in (last, last + 1)
    ]
    assert found[0] >= ladder.SAVES_PCT > found[1]


def test_what_is_dropped_saves_what_it_should_when_it_runs() -> None:
    config = CONFIGS["12 layers"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    options = build_modules(
        compose(["protocol=continuation", *ladder.overrides(ladder.shape_of(config.to_dict()), "drift")]).modules
    )
    ids = torch.arange(ladder.PROMPT_TOKENS)[None]

    def executed(modules: list[Any]) -> int:
        with torch.no_grad(), apply(model, modules) as run:
            model(ids, use_cache=True, logits_to_keep=1)
            return run.flops.executed

    assert isinstance(options[0], Halting)
    assert 100 * (1 - executed(options) / executed([])) == pytest.approx(ladder.SAVES_PCT, abs=0.2)


@pytest.mark.parametrize("name", CONFIGS)
def test_depths_are_the_same_fraction_of_every_model(name: str) -> None:
    layers = ladder.shape_of(CONFIGS[name].to_dict()).layers
    for depth in (ladder.DROP_DEPTH, ladder.PREDICT_DEPTH):
        assert depth * layers == round(depth * layers)


def test_a_budget_that_cannot_be_met_is_refused() -> None:
    shape = dataclasses.replace(ladder.shape_of(CONFIGS["12 layers"].to_dict()), vocabulary=10**9)
    with pytest.raises(ConfigError, match=r"saves less than 40%"):
        ladder.dropped_tokens(shape)
    with pytest.raises(ConfigError, match=r"saves less than 40%"):
        ladder.protected_tokens(shape)


def test_every_technique_composes() -> None:
    shape = ladder.shape_of(CONFIGS["16 layers"].to_dict())
    jobs = {technique: ladder.overrides(shape, technique) for technique in ladder.TECHNIQUES}
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

COSTS = {"predicted": 0.01, "position": 0.03, "attention": 0.05, "drift": 0.09, "random": 0.10}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two rungs and two other models, as far as a figure asks: shapes and how long they were trained."""
    folder = tmp_path / "models"
    there = {
        "ladder-gpt2-1m": ("12 layers", 4_000_000),
        "ladder-gpt2-8m": ("16 layers", 5_000_000),
        "reference-gpt2": ("16 layers", 13_000_000),
        "reference-llama": ("grouped", 8_000_000),
    }
    for name, (shape, tokens) in there.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(CONFIGS[shape].to_dict()))
        (folder / name / "training.json").write_text(json.dumps({"held_out": [{"tokens": 1}, {"tokens": tokens}]}))
    monkeypatch.setattr(ladder, "EMBEDDED", folder)
    return folder


def outcomes(results: Path) -> list[Outcome]:
    """The larger model loses half of what the smaller one loses."""
    dense = fakes.make(results, "dense continuation", "continuation")
    found = []
    for row in ladder.rows():
        if row.key == "dense":
            found.append(Outcome(row, dense, dense))
            continue
        small = row.panel == "ladder-gpt2-1m"
        lost = COSTS[row.key] * (1.0 if small else 0.5)
        model = dataclasses.replace(
            dense.model, name=row.panel, parameters=1_000_000 if small else 8_000_000, layers=12 if small else 16
        )
        record = fakes.make(
            results, f"{row.panel} {row.key}", "continuation", per_token=lost, saved=0.4, model=fakes.encoded(model), kl_nats=lost
        )
        record.windows["kl_nats"] = lost * np.linspace(0.5, 1.5, fakes.WINDOW_COUNT)
        found.append(Outcome(row, record, dense))
    return found


def test_missing_rungs_are_named_and_the_others_drawn(models: Path, tmp_path: Path) -> None:
    made = ladder.figure(outcomes(tmp_path / "results"), "figure_ladder")
    assert set(made.frame["panel"]) == {"ladder-gpt2-1m", "ladder-gpt2-8m", "reference-gpt2", "reference-llama", ladder.TREND}
    said = " ".join(made.caption)
    assert "the weights are not here: ladder-gpt2-2m, ladder-gpt2-4m" in said
    assert "make train-reference MODEL=ladder-gpt2-2m" in said
    assert made.png().startswith(b"\x89PNG")


def test_the_trend_is_of_the_rungs_and_says_what_else_differs(models: Path, tmp_path: Path) -> None:
    made = ladder.figure(outcomes(tmp_path / "results"), "figure_ladder")
    trends = made.frame[made.frame["panel"] == ladder.TREND].set_index("key")
    for key, lost in COSTS.items():  # three doublings halve it
        assert trends.loc[key, "kl_nats_per_doubling"] == pytest.approx(-lost / 6, rel=1e-3)
    said = " ".join(made.caption)
    assert "a difference of two sizes and no line" in said
    assert "depth (12, 16 layers)" in said
    assert "training (4.0 M, 5.0 M tokens)" in said
    assert "ladder-gpt2-8m and reference-gpt2 have one shape and saw 5.0 M and 13.0 M tokens" in said
    assert "random 5.00 [" in said  # of both: KL 0.05


def test_the_best_signal_stands_beside_the_next_and_beside_prediction(models: Path, tmp_path: Path) -> None:
    frame = ladder.measured(outcomes(tmp_path / "results"))
    mine = frame[frame["panel"] == "ladder-gpt2-1m"].set_index("key")
    assert mine["beside"].dropna().to_dict() == {"predicted": "position", "position": "attention"}
    assert mine.loc["position", "beside_kl_nats"] == pytest.approx(0.02)
    assert mine.loc["predicted", "beside_kl_nats_low"] > 0


def test_without_any_record_the_figure_says_so(models: Path) -> None:
    made = ladder.figure([Outcome(row, reason="failed") for row in ladder.rows()], "figure_ladder")
    assert "One size is no trend" in " ".join(made.caption)
    assert pd.isna(made.frame["kl_nats"]).all()
    assert "no record: ladder-gpt2-1m dense, ladder-gpt2-1m predicted" in " ".join(made.caption)
    assert made.png()
