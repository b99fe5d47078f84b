"""A fitted lens: solved against all data at once, nearer to the model than the raw lens, counted, and refused on another model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import tiny
import torch

from quicksilver.fitting.fit import fit_lens
from quicksilver.fitting.text import FitText
from quicksilver.models.loading import EMBEDDED
from quicksilver.modules import Halting, signals
from quicksilver.modules.calibration import calibrate
from quicksilver.modules.lens import Lens, files_behind, lens_for
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runtime import ConfigError, apply, architecture_of


def text(windows: int = 30, tokens: int = 48, seed: int = 0) -> FitText:
    ids = torch.randint(1, tiny.VOCABULARY, (windows, tokens), generator=torch.Generator().manual_seed(seed))
    return FitText(ids, {"texts": {}})


@pytest.fixture(params=["gpt2", "llama"])
def arch(request):
    return architecture_of(tiny.load(request.param))


@torch.no_grad()
def states_and_targets(arch, ids: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """States after each layer, and the head's own input: (B·N, D) each. Hugging Face's last hidden state is normed already."""
    found = arch.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    return tuple(state.flatten(0, 1) for state in found[1:]), found[-1].flatten(0, 1)


def test_it_is_the_ridge_regression_of_the_head_s_input(arch) -> None:
    made = fit_lens(arch, text(), ridge=0.01, batch_size=7)
    states, target = states_and_targets(arch, text().ids)
    assert made.weight.shape == (arch.n_layers - 1, 1 + arch.width, arch.width)
    for layer in range(arch.n_layers - 1):
        normed = arch.normalised_input(layer, states[layer])
        x = torch.cat([torch.ones_like(normed[:, :1]), normed], dim=1).double()
        xx = x.T @ x
        wanted = torch.linalg.solve(xx + 0.01 * xx.diagonal().mean() * torch.eye(len(xx)), x.T @ target.double())
        torch.testing.assert_close(made.weight[layer].double(), wanted, atol=1e-4, rtol=1e-3)


def test_on_other_text_it_is_nearer_to_the_model_than_the_raw_lens(arch) -> None:
    made, other = fit_lens(arch, text(60)), text(6, seed=1).ids
    states, target = states_and_targets(arch, other)
    with torch.no_grad():
        own = arch.output_head(target).log_softmax(-1)
        for layer in range(arch.n_layers - 1):
            raw, fitted = (
                logits.log_softmax(-1)
                for logits in (arch.logits(states[layer]), arch.output_head(made.head_input(arch, layer, states[layer])))
            )
            kl = [(own.exp() * (own - one)).sum(-1).mean() for one in (raw, fitted)]
            assert kl[1] < kl[0]


def test_halting_reads_it_calibrates_on_it_and_pays_for_it(arch, tmp_path: Path, monkeypatch) -> None:
    made = fit_lens(arch, text())
    made.save(tmp_path / "lens.safetensors")
    monkeypatch.setattr(Lens, "shipped", lambda: [tmp_path / "lens.safetensors"])
    torch.testing.assert_close(lens_for(arch).weight, made.weight)
    ids = text(4, seed=2).ids
    found = calibrate(arch.model, ids, signals=[signals.Entropy("tuned_lens")])
    states, _ = states_and_targets(arch, ids)
    with torch.no_grad():
        p = arch.output_head(made.head_input(arch, 1, states[1])).softmax(-1)
    median = float(torch.special.entr(p).sum(-1).quantile(0.5))
    assert found.percentiles["entropy-tuned_lens"][1][49] == pytest.approx(median, rel=1e-3)
    halting = Halting(
        tau_entropy="p50",
        entropy="tuned_lens",
        calibration=found,
        window=(0.2, 0.8),
        missing_kv="drop",
        tau_drift=None,
        resume_layers=0,
    )
    with torch.no_grad(), apply(arch.model, [halting]) as run:
        arch.model(ids, use_cache=False)
    (one,) = run.trace.passes
    first = halting.first_layer
    half = float((one.halt_layer == first).float().mean())
    assert 0.4 < half < 0.6
    asked = sum(int(one.active(layer).sum()) for layer in range(first, halting.last_layer + 1))
    assert run.flops.signals == asked * 2 * arch.width * (arch.vocab_size + arch.width)


def test_a_lens_is_of_one_model_and_whole(arch, tmp_path: Path, monkeypatch) -> None:
    made = fit_lens(arch, text())
    path = tmp_path / "lens.safetensors"
    Lens(made.weight, "of another").save(path)
    monkeypatch.setattr(Lens, "shipped", lambda: [path])
    with pytest.raises(ConfigError, match="none with this model"):
        Halting(tau_entropy=1.0, entropy="tuned_lens", tau_drift=None, resume_layers=0).bind(arch)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read as a lens"):
        Lens.load(path)
    with pytest.raises(ConfigError, match="not finite"):
        Lens(made.weight * float("nan"), "")
    with pytest.raises(ConfigError, match=r"\(2, 3\) where"):
        Lens(torch.zeros(2, 3), "")
    with pytest.raises(ConfigError, match="tokens are too few"):
        fit_lens(arch, text(1, 4))


def test_the_models_own_file_is_part_of_what_a_run_is_of_only_where_it_is_read(tmp_path: Path) -> None:
    folder = EMBEDDED / "reference-gpt2"
    own = [path for path in Lens.shipped() if path.is_relative_to(folder)]
    assert len(own) == 1
    assert files_behind({"entropy": "tuned_lens"}, folder) == files_behind({"source": "tuned_lens"}, folder) == own
    assert files_behind({"entropy": "logit_lens"}, folder) == files_behind({"entropy": "tuned_lens"}, tmp_path) == []


def test_a_measurement_that_reads_the_lens_is_of_it_too() -> None:
    place = RunContext()
    found = [place.identity(compose(["protocol=all", *words])).digests for words in (["measure=lenses"], ["measure=quick"])]
    own = EMBEDDED / "reference-gpt2" / "tuned_lens" / "lens.safetensors"
    assert found[0]["tuned_lens.lenses.lens.safetensors"] == hashlib.sha256(own.read_bytes()).hexdigest()
    assert not any(key.startswith("tuned_lens") for key in found[1])
