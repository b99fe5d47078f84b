"""Composing many runs gives what Hydra gives for each, and says what Hydra's refusals say."""

from __future__ import annotations

import pytest
from hydra.core.global_hydra import GlobalHydra
from thinning import first

from quicksilver.harness.composing import Composer, hydra_started
from quicksilver.harness.config import compose
from quicksilver.runtime.errors import ConfigError

RUNS = [
    ["modules=[halting]", "modules.halting.tau_drift=p10"],
    ["modules=[halting]", "modules.halting.tau_drift=p40", "seed=3"],
    ["modules=[halting]", "modules.halting.tau_drift=[0.1,0.2]", "dataset.windows=3"],
    ["modules=[]", "measure=sweep", "results_dir='a, b'"],
    ["experiment=e9_grid", "modules.adaptive_quantization.tau_low=0.2", "modules.adaptive_quantization.tau_high=0.55"],
    ["experiment=e9_grid", "modules.adaptive_quantization.tau_low=0.25", "dataset.windows=9"],
    ["measure.latency.enabled=false", "++measure.audit.probes=1"],
    ["modules=[kv_skipping,halting]", "~modules.halting.tau_entropy", "modules.halting.tau_drift=p10"],
    ["data.root=${oc.env:HOME}", "decision_layers=[1,2]", "threads=null"],
]
WRONG = [
    ["modules=[haltin]"],
    ["modules=[halting]", "modules.halting.tau_drft=p10"],
    ["seed=x"],
    ["seed=-1"],
    ["sed=1"],
    ["model=3"],
    ["dataset.windows=0"],
    ["modules=[halting]", "seed=[1,2]"],
]


def test_one_composer_gives_what_hydra_gives_run_by_run(monkeypatch):
    calls = []
    by_hydra = Composer._by_hydra
    monkeypatch.setattr(Composer, "_by_hydra", lambda self, words: calls.append(words) or by_hydra(self, words))
    with hydra_started():
        composer = Composer()
        ours = [composer.compose(words) for words in RUNS]
    assert ours == [compose(words) for words in RUNS]
    assert len(calls) < len(RUNS)  # or nothing was shared


@pytest.mark.parametrize("words", first(WRONG, 3))
def test_a_mistake_is_said_as_for_a_single_run(words):
    with pytest.raises(ConfigError) as alone:
        compose(words)
    with hydra_started():
        composer = Composer()
        composer.compose([])
        with pytest.raises(ConfigError) as among_many:
            composer.compose(words)
    assert str(among_many.value) == str(alone.value)


def test_folders_of_the_user_s_own_are_searched(tmp_path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "mine.yaml").write_text(
        "# @package modules.mine\n_target_: quicksilver.modules.Halting\ntau_drift: 0.5\n"
    )
    with hydra_started([tmp_path]):
        assert Composer([tmp_path]).compose(["modules=[mine]"]).modules["mine"]["tau_drift"] == 0.5
    with hydra_started(), pytest.raises(ConfigError, match="mine"):
        Composer().compose(["modules=[mine]"])
    with pytest.raises(ConfigError, match="no such folder"), hydra_started([tmp_path / "not there"]):
        pass


def test_a_run_does_not_change_the_next_one():
    with hydra_started():
        composer = Composer()
        before = composer.compose(["modules=[halting]"])
        composer.compose(["modules=[halting]", "modules.halting.tau_drift=p99", "seed=7"])
        assert composer.compose(["modules=[halting]"]) == before


def test_a_hydra_that_runs_already_is_left_as_it_was():
    with hydra_started():
        outer = GlobalHydra.instance().hydra
        with hydra_started():  # as in a worker, which a launcher's Hydra started
            assert Composer().compose(["seed=3"]).seed == 3
        assert GlobalHydra.instance().hydra is outer
        assert Composer().compose(["seed=4"]).seed == 4
    assert not GlobalHydra.instance().is_initialized()
