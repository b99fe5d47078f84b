"""Optuna draws runs: the study goes on where it was stopped, its front is what nothing beats, and what makes no sense is one line."""

import pandas as pd
import pytest
from saying import unsaid

import quicksilver.runs.run as harness_run
from quicksilver.cli import sweeping
from quicksilver.records.record import record_frame
from quicksilver.runs import optuna_sweep as study
from quicksilver.runs.sweep import Sweep
from quicksilver.runtime.errors import QuickSilverError

SHORT = ["modules=[static_depth]", "protocol=continuation", "measure=sweep", "dataset.windows=3"]
DRAWN = [*SHORT, "modules.static_depth.depth=interval(0.1,0.9)"]
ASKING = ["run", "-m", "hydra/sweeper=optuna", "hydra.sweeper.sampler=random"]


@pytest.mark.slow
def test_a_study_goes_on_where_it_was_killed_and_keeps_its_front(words, tmp_path, prints, monkeypatch):
    made = []
    real = harness_run._run

    def counted(step, *rest):
        if step.config.modules:
            if len(made) == 2:
                raise KeyboardInterrupt
            made.append(step.fingerprint)
        return real(step, *rest)

    monkeypatch.setattr(harness_run, "_run", counted)
    asked = [*ASKING, *words, *DRAWN, "name=front", "hydra.sweeper.trials=4"]
    prints(*asked, code=130)
    monkeypatch.setattr(harness_run, "_run", real)
    out = prints(*asked).out
    sweep = Sweep.load(tmp_path / "results", "front")
    states = sweep.states()
    assert [state.state for state in states] == ["done"] * len(states)
    assert 2 <= len(states) <= 4  # two depths may be the same layer
    assert [state.run.fingerprint for state in states][:2] == made  # what was made before was not drawn anew
    frame = record_frame(tmp_path / "results")
    ours = frame.loc[[state.run.fingerprint for state in states]]
    kl, saved = ours["kl_nats"], -(ours["executed_flops"] / ours["dense_executed_flops"])
    best = [  # equal runs are named once
        name for name in pd.DataFrame({"kl": kl, "saved": saved}).drop_duplicates().index
        if not any((kl[o] <= kl[name]) & (saved[o] >= saved[name]) & ((kl[o] < kl[name]) | (saved[o] > saved[name])) for o in ours.index)
    ]  # fmt: skip
    said = out[out.index("No other run beats these") :]
    assert all(name in said for name in best)
    assert sum(name in said for name in ours.index) == len(best)
    assert "No run meets the budget" in prints(*asked, "hydra.sweeper.budget={executed_flops_saved_pct: 99}").err
    pct = 100 + 100 * saved
    least = sorted(pct)[len(pct) // 2] - 1e-6  # what half of them save
    out = prints(*asked, f"hydra.sweeper.budget={{executed_flops_saved_pct: {least}}}").out
    chosen = kl[pct >= least].idxmin()
    assert chosen in out[out.index("No other run within it") :].splitlines()[1]
    assert record_frame(tmp_path / "results").index.equals(frame.index)  # nothing was made again


def test_a_value_that_composes_to_a_run_that_is_there_counts_as_no_trial(words, tmp_path, prints, refused, monkeypatch):
    made, real = [], harness_run._run
    monkeypatch.setattr(harness_run, "_run", lambda step, *rest: made.append(step.fingerprint) or real(step, *rest))
    monkeypatch.setattr(sweeping, "_AGAIN", 10)
    choice = [*SHORT, "modules.static_depth.depth=0.2,0.5,0.50,0.51"]
    for _ in range(2):  # the second start finds its trials again
        out, err = prints(*ASKING, *words, *choice, "name=few", "hydra.sweeper.trials=5")
        assert "10 draws in a row gave runs that are there: 3 of 5 are made" in err
        assert out.count("(equal: [") == 1  # depths 0.5 and 0.51 are one layer
    assert [state.state for state in Sweep.load(tmp_path / "results", "few").states()] == ["done"] * 3
    assert len(made) == len(set(made)) == 4  # with the dense one
    more = [*choice, "modules.static_depth.protect_first=0,1", "name=few", "hydra.sweeper.trials=6"]
    assert "there is a sweep of that name with other runs" in refused(*ASKING, *words, *more)
    assert "leave shard=true out" in refused(*ASKING, *words, *choice, "name=few", "shard=true")
    assert "few is a sweep: quicksilver list sweep few" in refused("show", "few", f"results_dir={tmp_path / 'results'}")


def test_a_plan_says_what_is_drawn_and_makes_nothing(words, tmp_path, prints):
    out = prints(*ASKING, *words, *DRAWN, "hydra.sweeper.trials=7", "plan=true").out
    assert unsaid(out, "Optuna draws 7 runs", "static_depth") == []
    assert not (tmp_path / "results" / "runs").exists()


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_every_sampler_takes_a_budget_and_goes_on(sampler, tmp_path):
    """Cost x and gain x: within a budget of gain the front begins with the least cost that meets it."""
    pytest.importorskip("optuna")
    from optuna.distributions import FloatDistribution

    objectives = {"kl_nats": "minimize", "executed_flops_saved_pct": "maximize"}
    config = study.StudyConfig(objectives=objectives, budget={"executed_flops_saved_pct": 40.0}, sampler=sampler)
    for trials in (15, 30):  # the second time it goes on from its journal
        opened = study.open_study(tmp_path, "front", config)
        while len(study.complete(opened)) < trials:
            trial = opened.ask({"x": FloatDistribution(0.0, 1.0)})
            opened.tell(trial, [trial.params["x"], 100 * trial.params["x"]])
    drawn = [trial.params["x"] for trial in study.complete(opened)]
    assert len(set(drawn)) == 30  # nothing is drawn twice from the same seed
    found, within = study.front(opened, config)
    assert within
    assert found[0]["x"] == min(x for x in drawn if x >= 0.4)


def test_words_become_distributions():
    words = ["a=1,2", "b=interval(0,1)", "c=range(1,9,2)", "d=5", "e=tag(log,interval(0.1,1))"]
    space = study.space_of(words, {"d": "interval(0,1)", "f": "x,y"})
    kinds = {key: type(one).__name__ for key, one in space.drawn.items()}
    assert kinds == {
        "f": "CategoricalDistribution", "a": "CategoricalDistribution", "b": "FloatDistribution", "c": "IntDistribution",
        "e": "FloatDistribution",
    }  # fmt: skip
    assert space.fixed == ("d=5",)
    assert space.drawn["c"].high == 7
    assert space.drawn["e"].log
    assert space.words({"f": "x", "a": "1", "b": 0, "c": 3, "e": 0.123456789})[1] == ("f=x", "a=1", "b=0", "c=3", "e=0.123457")


def test_a_record_without_the_objective_is_named():
    class Record:
        path, dense = "results/runs/x", None
        quality = type("Quality", (), dict(ppl=2.0, bits_per_byte=1.0, kl_nats=None, top1_agreement=None))

    assert study.values_of(Record, ["ppl"]) == [2.0]
    with pytest.raises(QuickSilverError, match="has no kl_nats"):
        study.values_of(Record, ["ppl", "kl_nats"])
