"""Calibration: percentiles of what the model does, kept with where they came from, and refused where they do not belong."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import quicksilver.modules.calibration as calibration_module
from quicksilver.modules import Calibration, Halting, KVSkipping, calibrate, calibrate_modules, calibrated
from quicksilver.modules.calibration import SIGNALS, calibration_path
from quicksilver.modules.fitted import model_digest
from quicksilver.modules.signals import AttentionReceived, Drift, Entropy
from quicksilver.runtime import ConfigError, LayerView, TokenState
from quicksilver.runtime.architecture import architecture_of

WINDOWS = tiny.ids(6, 24, low=0)
MAX_ATTENTION = AttentionReceived(4, "max")


@pytest.fixture(scope="module")
def of_llama() -> Calibration:
    return calibrate(tiny.load("llama"), WINDOWS, signals=[*SIGNALS, MAX_ATTENTION], batch_size=4, source={"model": "tiny"})


@torch.no_grad()
def test_percentiles_are_those_of_the_measured_values(of_llama: Calibration) -> None:
    model = tiny.load("llama")
    entering = model(WINDOWS, output_hidden_states=True, use_cache=False).hidden_states[:-1]  # the last one has been normed
    for layer, (before, after) in enumerate(itertools.pairwise(entering)):
        moved = (after - before).norm(dim=-1)
        log_p = model.lm_head(model.model.norm(after)).log_softmax(-1)
        expected = {
            "drift-l2": moved,
            "drift-relative": moved / after.norm(dim=-1),
            "drift-cosine": 1 - torch.cosine_similarity(before, after, dim=-1),
            "entropy-logit_lens": -(log_p.exp() * log_p).sum(-1),
        }
        for key, values in expected.items():
            row = of_llama.percentiles[key][layer]
            np.testing.assert_allclose(row, np.percentile(values.flatten().numpy(), range(1, 100)), rtol=1e-3, atol=1e-5)
    assert all(rows[-1] is None for rows in of_llama.percentiles.values())  # nothing halts after the last layer


def test_attention_is_that_of_halted_tokens(of_llama: Calibration) -> None:
    """C.3. Halted: drift and entropy both below their 25th percentile."""
    noted: dict[int, list[float]] = {}

    def note(view: LayerView, tokens: TokenState) -> None:
        received = view.attention_received(4, "max")
        values = noted.setdefault(view.layer, [])
        for row in range(len(received)):
            taking_part = (tokens.active | tokens.newly_halted)[row].nonzero().flatten().tolist()
            halted = tokens.newly_halted[row].nonzero().flatten().tolist()
            values += [float(received[row, column]) for column in halted if column not in taking_part[-4:]]  # those observe

    noting = tiny.Does(note, priority=60, causal=False, wants_attention=lambda layer: True)
    halting = Halting(tau_drift="p25", tau_entropy="p25", calibration=of_llama, resume_layers=0)
    tiny.forward(tiny.load("llama"), tiny.Batch(tuple(map(tuple, WINDOWS.tolist()))), [halting, noting])
    assert any(noted.values())
    for layer, row in enumerate(of_llama.percentiles["attention-max-4-halted"]):
        values = noted.get(layer, [])
        assert (row is None) == (not values)
        if row is not None:
            np.testing.assert_allclose(row, np.percentile(values, range(1, 100)), rtol=1e-4, atol=1e-6)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, of_llama: Calibration) -> None:
    path = tmp_path / "c.json"
    of_llama.save(path)
    with pytest.raises(ConfigError, match="not finite"):
        Calibration(1, (1, 99), {"drift-l2": [[float("nan"), 1.0]]}).save(path)
    with pytest.raises(TypeError, match="JSON"):
        Calibration(1, (1, 99), {}, {"windows": torch.ones(1)}).save(path)
    assert Calibration.load(path) == of_llama
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_it_is_measured_once_and_found_by_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("gpt2")
    first = calibrated(tmp_path, model, WINDOWS, signals=[Drift()])
    assert first.provenance["windows"] == 6
    assert first.provenance["model_digest"] == model_digest(model)
    assert {"numerics_version", "dtype", "data_digest", "window_tokens", "torch"} <= set(first.provenance)
    monkeypatch.setattr(model, "forward", None)  # would fail if it were called
    assert calibrated(tmp_path, model, WINDOWS, signals=[Drift()]) == first
    others = [
        calibration_path(tmp_path, model, WINDOWS + 1, [Drift()]),
        calibration_path(tmp_path, model, WINDOWS, [Drift("l2")]),
        calibration_path(tmp_path, model, WINDOWS, [Drift()], grid=(50,)),
        calibration_path(tmp_path, tiny.load("llama"), WINDOWS, [Drift()]),
    ]
    assert len({calibration_path(tmp_path, model, WINDOWS, [Drift()]), *others}) == 5
    assert not any(path.exists() for path in others)


def test_the_digest_tells_weights_apart_and_not_their_precision() -> None:
    model = tiny.build("llama")
    digest = model_digest(model)
    assert digest == model_digest(tiny.build("llama").to(torch.bfloat16)) != model_digest(tiny.build("gpt2"))
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(1.05)
    assert model_digest(model) != digest


def test_modules_that_ask_get_what_they_ask_for(tmp_path: Path) -> None:
    model = tiny.load("llama")
    asking = Halting(tau_drift="p25", tau_entropy="p50", entropy="latent", resume_layers=0)
    skipping = KVSkipping(criterion="halted_and_attention", tau_kv="p95", last_queries=4)
    given_numbers, ranked = (
        Halting(tau_drift=0.1, tau_entropy=None, resume_layers=0),
        Halting(rule="capacity", tau_drift="p25", tau_entropy=None, resume_layers=0),
    )
    assert asking.calibration_signals() == [Drift(), Entropy("latent")]
    made = calibrate_modules([asking, skipping, given_numbers, ranked], tmp_path, model, WINDOWS)
    assert made is not None
    assert asking.calibration is skipping.calibration is made
    assert given_numbers.calibration is ranked.calibration is None
    assert set(made.percentiles) == {"drift-relative", "entropy-latent", "attention-max-4-halted"}
    for module in (asking, skipping):
        module.bind(architecture_of(model))
    assert calibrate_modules([asking, given_numbers], tmp_path, model, WINDOWS) is None
    trace = tiny.forward(model, tiny.Batch((tuple(range(20)),)), [asking, skipping]).trace
    assert trace.active_counts()[-1] < 20


def test_a_signal_is_measured_once_whoever_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.load("llama")
    asked: list[list[str]] = []
    real = calibration_module.calibrate

    def spied(*args: Any, signals: Any, **options: Any) -> Calibration:
        asked.append([signal.key for signal in signals])
        return real(*args, signals=signals, **options)

    monkeypatch.setattr(calibration_module, "calibrate", spied)

    def thresholds(**options: Any) -> Calibration:
        made = calibrate_modules([Halting(**{"tau_drift": None, "tau_entropy": None} | options)], tmp_path, model, WINDOWS)
        assert made is not None
        return made

    drift = thresholds(tau_drift="p25")
    both = thresholds(tau_drift="p40", tau_entropy="p50", entropy="latent")
    again = thresholds(tau_drift="p25", tau_entropy="p25", entropy="latent")
    assert asked == [["drift-relative"], ["entropy-latent"]]
    assert both.percentiles == again.percentiles
    assert both.percentiles["drift-relative"] == drift.percentiles["drift-relative"]
    assert both.percentiles == real(model, WINDOWS, signals=[Drift(), Entropy("latent")]).percentiles


def test_what_does_not_belong_is_refused_with_the_remedy(tmp_path: Path, of_llama: Calibration) -> None:
    shallow = Calibration(3, of_llama.grid, {key: rows[:3] for key, rows in of_llama.percentiles.items()}, {})
    only_l2 = Calibration(5, of_llama.grid, {"drift-l2": of_llama.percentiles["drift-l2"]}, {})
    for calibration, model, tau, says in (
        (of_llama, "gpt2", "p25", "(?=.*tau_drift='p25')(?=.*other weights).*quicksilver calibrate"),
        (shallow, "llama", "p25", "n_layers=3 and this one has 5"),
        (of_llama, "llama", "p99.5", "Percentile p99.5 is outside the calibrated p1 to p99"),
        (only_l2, "llama", "p25", "has drift-l2, not 'drift-relative': calibrate again"),
        (tmp_path / "none.json", "llama", "p25", r"(?=.*none\.json).*quicksilver calibrate"),
    ):
        with tiny.refused(says):
            Halting(tau_drift=tau, calibration=calibration, tau_entropy=None, resume_layers=0).bind(
                architecture_of(tiny.load(model))
            )
    with tiny.refused(r"shape \(W, N\).*\(0, 8\).*more text"):
        calibrate(tiny.load("gpt2"), WINDOWS[:0, :8])
