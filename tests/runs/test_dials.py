"""Budgets on a tiny model: the dial is set on one text and used on another, and what cannot be had is refused with its numbers."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from harness_world import make_text

from quicksilver.cli.commands.search import Budget as BudgetCommand
from quicksilver.modules.calibration import Calibration
from quicksilver.report.sweeps import BUDGET_COLUMNS
from quicksilver.runs import dials as dials_module
from quicksilver.runs.choices import choices
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.dials import Budget, Dial, fit, freeze, frozen_overrides, load_dial, note
from quicksilver.runs.parts import build_modules
from quicksilver.runs.run import ensure, plan
from quicksilver.runtime.errors import ConfigError

SHARE = Dial("share", ["modules=[halting_attention]", "protocol=continuation"], ["modules.halting.halted_share"], 0.05, 0.9)
HALTING = ["modules=[halting]", "modules.halting.tau_entropy=null", "modules.halting.resume_layers=0", "protocol=all"]
DRIFT = Dial("drift", HALTING, ["modules.halting.tau_drift"], 1, 99, percentile=True)


@pytest.fixture(scope="module")
def words(world, tmp_path_factory) -> list[str]:
    return [*world, "protocol.batch_size=5", f"results_dir={tmp_path_factory.mktemp('results')}"]


@pytest.fixture(scope="module")
def saving(words):
    return fit(Budget("save", 20, "prompt_nominal"), SHARE, words, halvings=4)


@pytest.fixture(scope="module")
def percentile(words):
    return fit(Budget("save", 10, "nominal"), DRIFT, words, halvings=3)


def test_the_least_of_the_dial_that_saves_enough_is_taken(saving):
    assert saving.chosen.reached >= 20
    below = [step for step in saving.steps if step.value < saving.chosen.value]
    assert below
    assert all(step.reached < 20 for step in below)
    assert saving.chosen.value - max(step.value for step in below) <= (SHARE.high - SHARE.low) / 2**4 + 1e-4


def test_the_search_reads_the_calibrating_text_alone_and_is_found_again(saving, words, monkeypatch):
    assert {one.data.part for step in saving.steps for one in (step.record, step.dense)} == {"calibration"}
    monkeypatch.setattr("quicksilver.runs.run._run", None)  # nothing runs
    again = fit(saving.budget, SHARE, words, halvings=4)
    assert [step.record.fingerprint for step in again.steps] == [step.record.fingerprint for step in saving.steps]


def test_the_most_of_the_dial_that_costs_little_enough_is_taken(saving, words):
    ends = [Budget("cost", 50).reached(step.record, step.dense) for step in saving.steps]
    found = fit(Budget("cost", min(99.0, max(ends) + 1)), SHARE, words, halvings=2)
    assert found.chosen.reached <= found.budget.pct
    assert all(step.reached > found.budget.pct for step in found.steps if step.value > found.chosen.value)


@pytest.mark.parametrize(("pct", "dial", "said"), [(95, SHARE, "saves at most"), (60, DRIFT, "modules.halting.tau_drift=p99")])
def test_a_budget_that_cannot_be_met_says_what_can(words, pct, dial, said):
    with pytest.raises(ConfigError, match="calibrating text. Ask less") as caught:
        fit(Budget("save", pct, "nominal"), dial, words, halvings=1)
    assert said in str(caught.value)
    assert f"save {pct}% of nominal FLOPs" in str(caught.value)


def test_what_no_budget_can_be_is_refused(words, monkeypatch):
    unknown = "ledger='prompt_wall' is not one of executed, nominal, paper"
    ranges = {("save", 0): "pct=0 is out of range", ("cost", 100): "pct=100 is out of range"}
    for given, said in (ranges | {("save", 5, "prompt_wall"): unknown}).items():
        with pytest.raises(ConfigError, match=said):
            Budget(*given)
    with pytest.raises(ConfigError, match="protocol=all has no prompt_executed FLOPs"):
        fit(Budget("save", 10, "prompt_executed"), DRIFT, words, halvings=1)
    monkeypatch.setattr(Budget, "reached", lambda self, record, dense: 7.0)
    with pytest.raises(ConfigError, match="it costs at least 7.0%"):
        fit(Budget("cost", 1), SHARE, words, halvings=1)


def test_of_a_grid_the_setting_of_least_kl_is_taken_and_all_are_noted(saving, words, tmp_path):
    dial = dataclasses.replace(SHARE, grid={"modules.halting.resume_layers": [0, 2], "modules.halting.protect_first": [1, 40]})
    found = fit(saving.budget, dial, words, halvings=1)
    assert len(found.settings) == 2  # with 40 tokens of each prompt left alone the budget is beyond reach
    assert [one.kl_nats for one in found.settings] == sorted(one.kl_nats for one in found.settings)
    assert all(one.chosen.reached >= 20 for one in found.settings)
    assert found.config == found.settings[0].config
    file = tmp_path / "searched.yaml"
    for _ in range(2):
        note(found, file)
    (dials_of_model,) = yaml.safe_load(file.read_text()).values()
    entry = dials_of_model["share"]["save20_prompt_nominal"]
    assert entry["overrides"] == list(found.dial.at(found.chosen.value))
    assert len(entry["compared"]) == len(found.settings) - 1
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="is no file of `quicksilver budget`"):
        note(found, file)


# --- what is written ------------------------------------------------------------------------------------------------------------
def frozen(found, folder: Path, words: list[str]):
    path = freeze(found, folder)
    return path, compose([f"hydra.searchpath=[file://{folder}]", *words, f"modules=[{path.stem}]", *found.dial.overrides[-1:]])


def test_what_is_written_is_the_module_that_was_found(saving, words, tmp_path):
    path, config = frozen(saving, tmp_path, words)
    of = re.sub(r"\W", "_", f"{saving.config.model.name}_{saving.config.dataset.name}")  # another model's preset is another file
    assert path == tmp_path / "modules" / f"share_save20_prompt_nominal_{of}.yaml"
    assert config.modules == saving.config.modules
    assert saving.chosen.record.fingerprint in path.read_text()
    assert list(tmp_path.glob("*.json")) == []  # nothing was calibrated


def test_percentiles_keep_the_numbers_they_were_found_with(percentile, words, tmp_path):
    path, config = frozen(percentile, tmp_path, words)
    kept = Calibration.load(config.modules["halting"]["calibration"])
    # On a text of its own, whose percentiles would be others.
    elsewhere = [f"dataset.files.calibration={make_text(tmp_path / 'elsewhere.txt', seed=9, words=300)}"]
    (frozen_there,) = ensure([compose([*words, *elsewhere, *frozen_overrides(percentile, path)])])
    (anew,) = ensure([compose([*words, *elsewhere, *DRIFT.at(percentile.chosen.value)])])
    assert frozen_there.calibration is None
    assert anew.calibration is not None
    assert frozen_there.quality.nll_nats != anew.quality.nll_nats
    (here,) = ensure([compose([*words, *DRIFT.at(percentile.chosen.value)])])
    assert frozen_there.quality.nll_nats == here.quality.nll_nats
    assert kept.thresholds("drift-relative", 50) != [0.0] * kept.n_layers
    config = compose([*words, *frozen_overrides(percentile, path)])
    ensure([config], context=RunContext())  # which leaves the file's name in the config
    assert config.modules["halting"]["calibration"] == str(tmp_path / f"{path.stem}.calibration.json")
    assert plan([config]).done


# --- the dials of conf/budget ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", choices("budget"))
def test_every_dial_turns_from_end_to_end(name):
    dial = load_dial(name)
    for value in (dial.low, dial.high):
        config = compose(dial.at(value))
        build_modules(config.modules)
        for key in dial.keys:
            _, module, option = key.split(".")
            assert str(config.modules[module][option]) == dial.text(value)
    assert compose(dial.at(dial.low)).modules != compose(dial.at(dial.high)).modules


@pytest.mark.parametrize(("content", "said"), [
    ("overrides: [a]\nkeys: [b]\nlow: 1\nhigh: 2\nlower: 3\n", "lower"),
    ("overrides: [a]\nkeys: [b]\nlow: 2\nhigh: 2\n", "low=2 and high=2 must be two ends"),
    ("overrides: [a]\nkeys: [b]\nlow: 1\nhigh: 2\ngrid: {c: []}\n", "each of grid a list of values"),
    ("overrides: [a]\nkeys: [b]\nlow: much\nhigh: 1\n", "is no dial"),
    ("overrides: [a]\n", "is no dial"),
])  # fmt: skip
def test_a_yaml_that_is_no_dial_is_refused(tmp_path, content, said):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        load_dial(str(path))
    with pytest.raises(ConfigError, match="There is no dial haltin. There are: .*halting_attention"):
        load_dial("haltin")


def test_a_command_finds_a_module_in_a_folder_of_ones_own(tmp_path, monkeypatch):
    folder = tmp_path / "it's mine"
    (folder / "modules").mkdir(parents=True)
    half = "# @package modules.half\n_target_: quicksilver.modules.StaticDepth\ndepth: 0.5\n"
    (folder / "modules" / "half.yaml").write_text(half)
    monkeypatch.chdir(tmp_path)
    for words in (["--config-dir", folder.name], [f"--config-dir={folder}"]):
        command = BudgetCommand.parsed(["save=0.3", *words, "modules=[half]"], "quicksilver budget")
        assert command.save == [0.3]
        assert compose(command.overrides).modules["half"]["depth"] == 0.5


def test_a_setting_is_said_with_the_options_of_its_grid():
    dial = load_dial("one_shot_halting")
    assert {one.said(0.2) for one in dial.settings()} >= {"start=0, halted_share=0.2", "start=0.55, halted_share=0.2"}
    layers = next(load_dial("prompt_pruning").settings())
    setting = next(column for column in BUDGET_COLUMNS if column.header == "setting")
    assert setting.cell({"dial": layers.said(0.6)}) == ("layers=[0.2, 0.5, 0.75]", "kept=0.6")
    assert load_dial("halting_drift").said(25) == "tau_entropy=null, tau_drift=p25"


# --- quicksilver budget ---------------------------------------------------------------------------------------------------------
def test_the_command_sets_freezes_and_reports(world, tmp_path, prints, monkeypatch):
    monkeypatch.setattr(dials_module, "load_dial", lambda name: SHARE)
    results = tmp_path / "results"
    asked = ["save=[0.2,0.94]", "of=prompt_nominal", "halvings=2", "transfer=file", *world, "protocol.batch_size=5"]
    # The second cannot be met; the first is reported all the same.
    out, err = prints("budget", *asked, f"results_dir={results}", code=1)
    assert "cannot save 94% of the prompt's nominal FLOPs" in err
    assert "--config-dir" in out
    assert max(map(len, out[out.index("Budgets:") :].partition("Written:")[0].splitlines())) <= 150
    lines = [line.split() for line in out.splitlines() if line.startswith(("calibrating ", "test ", "file "))]
    assert [line[0] for line in lines] == ["calibrating", "test", "file"]
    assert {line[1] for line in lines} == {lines[0][1]}  # one position of the dial for all
    assert lines[0][4] == "yes"
    assert (results / "tables" / "budget-share-tiny-file.csv").is_file()
    assert (results / "budget" / "modules" / "share_save20_prompt_nominal_tiny_file.yaml").is_file()
