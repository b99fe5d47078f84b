"""Signals: what each score is, whom it is asked about, and that chance is the same chance everywhere. Calibration: percentiles of them, kept with
where they came from, and refused where they do not belong."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from looking import Pass

import quicksilver.modules.calibration as calibration_module
from quicksilver.modules import Calibration, Halting, KVSkipping, calibrate, calibrate_modules, calibrated
from quicksilver.modules.calibration import SIGNALS, calibration_path
from quicksilver.modules.fitted import model_digest
from quicksilver.modules.signals import (
    AttentionReceived,
    Drift,
    Entropy,
    Position,
    Signal,
    UpdateNorm,
    lowest,
    make_signal,
    signal_names,
)  # fmt: skip
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
    digest = model_digest(model)
    first = calibrated(tmp_path, model, WINDOWS, signals=[Drift()])
    assert first.provenance["windows"] == 6
    assert first.provenance["model_digest"] == digest == model_digest(tiny.build("gpt2").to(torch.bfloat16))
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
    with torch.no_grad():
        model.transformer.h[3].mlp.c_fc.weight.mul_(1.05)
    assert model_digest(model) != digest


def test_modules_that_ask_get_what_they_ask_for(tmp_path: Path) -> None:
    model = tiny.load("llama")
    asking = Halting(tau_drift="p25", tau_entropy="p50", entropy="latent", resume_layers=0)
    skipping = KVSkipping(criterion="halted_and_attention", tau_kv="p95", last_queries=4)
    given_numbers = Halting(tau_drift=0.1, tau_entropy=None, resume_layers=0)
    ranked = Halting(rule="capacity", tau_drift="p25", tau_entropy=None, resume_layers=0)
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


# -- signals -----------------------------------------------------------------------------------------------------------------------
SHAPES = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 2), st.integers(0, 999))


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def test_a_zero_state_has_a_drift_and_no_nan() -> None:
    view, tokens = Pass([3]).look(0, torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))
    for kind in ("relative", "l2", "cosine"):
        assert Drift(kind)(view, tokens).isfinite().all()
    view, tokens = Pass([3, 1]).look(0)
    moved = (view.after - view.before).norm(dim=-1)
    for score, value in ((Drift("l2"), moved), (UpdateNorm(), moved / math.sqrt(8))):
        assert torch.equal(score(view, tokens).isposinf(), view.slots < 0)
        torch.testing.assert_close(score(view, tokens)[view.slots >= 0], value[view.slots >= 0])


def test_latent_entropy_is_of_the_softmax_over_the_state_and_the_histogram_s_of_bins_of_the_standardised_state() -> None:
    view, tokens = Pass([4]).look(1)
    wanted = [entropy(state.softmax(-1).tolist()) for state in view.after[0]]
    assert Entropy("latent")(view, tokens)[0].tolist() == pytest.approx(wanted, rel=1e-4)
    spread = torch.linspace(-1, 1, 64)
    spike = torch.zeros(64)
    spike[5] = 1.0
    states = torch.stack([spread, 100 * spread + 7, spike])[None]
    view, tokens = Pass([3]).look(1, states, states)
    even, scaled, peaked = Entropy("histogram", bins=16)(view, tokens)[0].tolist()
    assert even == pytest.approx(scaled, abs=1e-5)  # normed: scale and offset do not count
    assert peaked == pytest.approx(entropy([63 / 64, 1 / 64]), rel=1e-4)
    assert peaked < even <= math.log(16)


@given(SHAPES, st.integers(-2, 12))
def test_lowest_takes_exactly_k_and_the_lowest(shape: tuple, k: int) -> None:
    lengths, extra, seed = shape
    one = Pass(lengths, extra=extra)
    torch.manual_seed(seed)
    scores = torch.randint(0, 4, one.shape).float()  # ties on purpose
    scores[torch.rand(one.shape) < 0.2] = math.nan
    eligible = one.state.valid & (torch.rand(one.shape) < 0.7)
    chosen = lowest(scores, eligible, torch.full((len(lengths), 1), k))
    assert not (chosen & ~eligible).any()
    for row in range(len(lengths)):
        assert chosen[row].sum() == min(max(k, 0), int(eligible[row].sum()))
        order = [(scores[row, c].nan_to_num(math.inf).item(), c) for c in eligible[row].nonzero().flatten().tolist()]
        assert chosen[row].nonzero().flatten().tolist() == sorted(c for _, c in sorted(order)[: max(k, 0)])


@dataclass(frozen=True)
class Third(Signal):
    """A signal of somebody else."""

    weight: float = 1.0
    name: ClassVar[str] = "third-of-slot"

    def score(self, view: object, tokens: object, where: torch.Tensor) -> torch.Tensor:
        return self.weight * view.slots.float() / 3


def test_signals_are_found_by_name_wherever_they_are_written() -> None:
    assert isinstance(make_signal("third-of-slot"), Third)
    assert make_signal({"name": "third-of-slot", "weight": 2.0}) == Third(2.0)
    assert make_signal("drift", kind="l2", of="latent") == Drift("l2")
    assert make_signal({"name": "drift", "kind": "cosine"}, kind="l2") == Drift("cosine")
    assert make_signal(Position()) == Position()
    assert {"drift", "update_norm", "entropy", "attention", "position", "random"} <= set(signal_names())
    for name, cls in signal_names().items():
        assert cls.causal != (name in ("attention", "context"))
        assert cls.needs_attention == (name == "attention")
