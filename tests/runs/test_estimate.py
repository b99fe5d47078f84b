"""Estimates: the operations are those of the ledgers, a shape needs no weights, and what fits nowhere is refused."""

import dataclasses
import json

import pytest
import tiny
import torch
from saying import unsaid

from quicksilver.models import memory_check
from quicksilver.models.spec import ModelConfig
from quicksilver.runs import estimate
from quicksilver.runs.config import compose
from quicksilver.runtime import apply
from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.errors import ConfigError

SPEED = 1e12
LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_a_window_costs_what_the_ledger_of_a_pass_says(family):
    model = tiny.load(family)
    ids = torch.arange(12)[None]
    with apply(model, []) as run, torch.no_grad():
        model(ids, use_cache=False)
    assert estimate.window_flops(architecture_of(model), 12) == run.flops.executed


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_is_planned_without_memory(tmp_path, prints):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    words = ["model=folder", "model.name=llama2-70b", f"model.path={tmp_path}", "model.dtype=bfloat16", "modules=[halting]"]
    config = compose([*words, "dataset.windows=4", "protocol=continuation"])
    dense, ours = estimate.estimates([config], SPEED)
    parameters = 68_976_648_192  # as published
    assert dense.weights_bytes == 2 * parameters
    assert dense.memory_bytes > dense.weights_bytes
    assert ours.flops > dense.flops > 2 * 0.9 * parameters * 4 * config.protocol.window_tokens
    assert dense.seconds == pytest.approx(1 + dense.flops / 0.45e12)
    assert ours.seconds > 1 + ours.flops / 0.45e12  # and the calibration text
    out = prints("run", *words, "dataset.windows=4", "plan=true").out
    assert unsaid(out, "llama2-70b | python-source | halting | all", "2 runs: about ", "Weights: 128 GiB.") == []
    assert ("more than the" in out) == (memory_check.memory_bytes() < dense.memory_bytes)


def test_the_paper_s_models_are_known_by_name():
    for name, parameters in (("gpt2-large", 774_030_080), ("llama2-7b", 6_738_415_616)):
        arch = estimate.shape_of(compose([f"model={name}"]).model)
        assert sum(parameter.numel() for parameter in arch.model.parameters()) == parameters
        assert all(parameter.is_meta for parameter in arch.model.parameters())


def test_what_cannot_be_estimated_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("QUICKSILVER_DATA", raising=False)
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(ConfigError, match="describes no model"):
        estimate.shape_of(ModelConfig(name="mine", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"give dataset\.windows="):
        estimate.estimates([compose(["dataset=wikitext103"])], SPEED)
    with pytest.raises(ConfigError, match=r"model=mine: its shape is not known here.*Known without: gpt2-large, llama2-7b"):
        estimate.shape_of(ModelConfig(name="mine", path="/not/there"))


def test_a_plan_names_texts_and_models_that_are_not_here(monkeypatch):
    monkeypatch.delenv("QUICKSILVER_DATA", raising=False)
    _, absent = estimate.without_record([compose([one]) for one in ("dataset=gum", "model=gpt2-large", "dataset=python-docs")])
    assert absent == ["dataset=gum", "model=gpt2-large"]
    found = estimate.estimates([compose(["dataset.windows=8"])], SPEED)
    assert "Not on this machine: dataset=gum, model=gpt2-large." in estimate.table(found, absent)


def test_a_plan_says_what_an_offload_reads_what_a_kill_costs_and_what_workers_share(words, monkeypatch):
    monkeypatch.setattr(estimate, "memory_bytes", lambda: 1000)
    monkeypatch.setattr(estimate, "_whole", lambda *_, **__: 320)
    config = compose([*words, "measure=sweep", "dataset.windows=100000", "protocol.batch_size=4"])
    (found,) = estimate.estimates([config], 1e6)
    assert found.calls == 81  # of the windows that the text has, and one for the batch that is counted
    assert found.seconds_at_risk == pytest.approx(1 + (found.seconds - 1) * 32 / estimate.windows_passed(config, 320))
    timed = compose([*words, "measure=default", "dataset.windows=8"])  # what is timed begins again
    slow = estimate.estimate(timed, estimate.shape_of(timed.model), 1e6, 8)
    assert slow.seconds_at_risk > slow.seconds / 2
    said = estimate.table([dataclasses.replace(found, label="x" * 200)] * 4, workers=2)
    ranges = ((estimate.duration(4 + faster * share * found.seconds) for faster in (0.7, 1.5)) for share in (4, 2))
    one, two = (" to ".join(ends) for ends in ranges)
    sums = f"about {one} by one worker, {two} by 2 (0.7 to 1.5 times the sum at the speed measured now, and 4 s of start)"
    read = f"about {memory_check.gibibytes(4 * 81 * found.weights_bytes)} are read from it"
    assert unsaid(said, sums, f"{'x' * 109}… ", "If a run is killed, about ", read) == []


def test_a_plan_names_the_pass_that_finds_percentiles(words):
    alone = [*words, "modules=[halting]", "modules.halting.tau_entropy=null", "measure=sweep"]
    for tau, named in (("p10", True), ("0.1", False)):
        said = estimate.table(estimate.estimates([compose([*alone, f"modules.halting.tau_drift={tau}"])], SPEED))
        assert ("Thresholds by percentile first need a pass over the calibration text" in said) == named


def test_a_text_that_is_scored_whole_is_counted(words):
    configs = [compose([*words, f"dataset.windows={windows}"]) for windows in ("null", "5", "8")]
    whole, less, more = (estimate.estimates([config], SPEED)[0].flops for config in configs)
    assert less < whole < more  # 900 bytes, 4 of them a token


def test_more_than_an_hour_starts_with_yes_alone(words, monkeypatch, prints):
    prints("run", *words, "measure=sweep", "dataset.windows=2")  # a second is not asked about
    monkeypatch.setattr(estimate, "_SLOWEST", 1e3)
    monkeypatch.setattr(estimate, "measured_flops_per_s", lambda *_: 1e2)
    for command in (["run"], ["run", "-m"]):
        asked = [*command, *words, "measure=sweep", "dataset.windows=3"]
        out, err = prints(*asked, code=2)
        assert "1 run: about " in out
        assert "add yes=true to start it" in err
    prints("run", *words, "measure=sweep", "dataset.windows=2")  # it has its record
    prints(*asked, "yes=true")


def test_more_passes_take_longer():
    asked = (["measure=sweep"], *([f"measure={name}", "modules=[halting]"] for name in ("sweep", "default", "paper")))
    dense, sweep, default, paper = (estimate.windows_passed(compose(words), 64) for words in asked)
    assert dense < sweep < default < paper
    written = ["measure=generation", "modules=[halting]", "protocol=continuation", "measure.generation.prompts=64"]
    asked = ([], ["measure.generation.sampled=false"], ["measure.generation.prompts=128"])
    few, greedy, many = (estimate.windows_passed(compose([*written, *more]), 64) for more in asked)
    scored = sweep  # both models, once; both write and read each prompt's text, in both ways
    assert few == pytest.approx(2 * scored * 2 * (256 + 64) / 512 + scored, rel=0.2)
    assert greedy < few == many  # of 64 windows
    needle = compose(["measure=needle", "protocol=continuation"])  # each window is asked eleven times, up to 32 of them
    assert estimate.windows_passed(needle, 32) == 8 * estimate.windows_passed(needle, 4)


def test_a_plan_of_a_sweep_and_of_a_table_starts_nothing(words, tmp_path, prints, monkeypatch):
    monkeypatch.setattr(estimate, "measured_flops_per_s", lambda *_: SPEED)
    swept = ["modules=[static_depth]", "modules.static_depth.depth=0.2,0.5"]
    assert "3 runs: about" in prints("run", "-m", *words, *swept, "plan=true").out
    assert " runs: about" in prints("reproduce", "table", "11", *words, "plan=true").out
    assert not (tmp_path / "results" / "runs").exists()
    assert not (tmp_path / "results" / "sweeps").exists()
