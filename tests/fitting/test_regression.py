"""Sums of a streamed pass and what is solved from them: against a regression on all of the data at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from quicksilver.fitting.fit import NormalEquations, fit_translators
from quicksilver.fitting.text import FitText
from quicksilver.modules.fitted import model_digest
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


def test_what_it_predicts_is_nearer_than_the_controls() -> None:
    arch, fit_on, other = architecture_of(tiny.load("llama")), text(40), text(4, seed=1)
    x, y = inputs_and_targets(arch, other.ids, 2)

    def error(control: str | None) -> float:
        weight = fit_translators(arch, fit_on, [2], control=control)[2].weight
        return float((x @ weight.flatten(1).double() - y).square().mean())

    own, mean, shuffled = error(None), error("mean"), error("shuffled")
    assert own < 0.8 * mean
    assert own < 0.8 * shuffled


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
