"""`quicksilver run`: one run, a sweep, and what is said of mistakes."""

import re
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
from repository import ROOT
from saying import unsaid

from quicksilver.cli import progress
from quicksilver.records.record import load_record
from quicksilver.report.table import read
from quicksilver.runs.config import compose
from quicksilver.runs.run import plan
from quicksilver.runs.sweep import sweep_jobs

CAPACITY = ["modules=[halting_attention]", "protocol=continuation", "modules.halting.halted_share=0.5"]


def test_a_null_that_chose_the_same_tokens_is_no_verdict():
    same = pd.DataFrame({"nll_nats": [1.0] * 8, "null_nll_nats": [1.0] * 8})
    (said,) = progress._versus_null(SimpleNamespace(windows=same))
    assert said == "  to its null  equal: both chose the same tokens, so this null tells nothing"


def test_one_run_prints_what_its_record_says(words, prints, monkeypatch):
    out, err = prints("run", *words, *CAPACITY, "measure=default", "measure.latency.repeats=3", "measure.emissions.enabled=false")
    folder = Path(out.splitlines()[-1].split()[-1])
    record = load_record(folder)
    quality = f"perplexity   {record.quality.ppl:.4g} per token, {record.quality.bits_per_byte:.4g} bits per byte"
    saved = f"executed {100 * (1 - record.quality.prompt_executed_flops / record.dense.prompt_executed_flops):.1f}%"
    assert unsaid(out, "tiny | file | halting | continuation", quality, f"{record.quality.tokens} scored", saved) == []
    assert unsaid(out, "against dense", "its null", "of the prompt", "acts on      the prompt only") == []
    judged = r".*\]: (better \(p = .*\)|worse \(p = .*\)|no difference beyond chance( \(p = .*%\))?)$"
    assert re.search(rf"^  to its null  .* perplexity {judged}", out, re.M)
    assert re.search(rf"^ {{15}}\S+ KL {judged}", out, re.M)
    assert "Traceback" not in err
    assert not Path("outputs").exists()
    here = f"results_dir={folder.parents[1]}"
    shown = [prints("show", *words, here).out for words in ([], [record.fingerprint[:12]])]
    assert [one.count(record.label) for one in shown] == [one.count("trace.safetensors (") for one in shown] == [1, 1]
    monkeypatch.chdir(folder.parent)
    assert prints("show", folder.name).out == shown[1]
    shown = prints("show", str(folder)).out  # of any results folder
    assert unsaid(shown, record.label, f"on {record.environment.cpu}, {record.environment.threads} thread", "of all tokens") == []
    prints("report", here)  # no table is written there: the site has the runs
    assert (folder.parents[1] / "report" / "runs" / f"{record.fingerprint}.html").is_file()
    assert f"runs/{record.fingerprint}.html" in prints("show", here).out
    assert "memory       peak" in shown
    prints("run", *words, *CAPACITY[:2], "modules.halting.halted_share=0.3", "protocol=continuation", "measure=quick")
    others = [load_record(path) for path in folder.parent.glob("[!.]*")]
    other = next(one.fingerprint for one in others if one.modules and one.path != folder)
    shown = prints("show", folder.name, other, here).out
    assert re.search(rf"^  quality .* perplexity {judged}\n {{15}}\S+ KL {judged}", shown, re.M)
    assert f"against {record.label}" in shown
    assert re.search(r"^  options      halting\.halted_share=0\.\d against 0\.\d", shown, re.M)
    assert " 0.00% perplexity [0.00, 0.00]: no difference" in prints("show", folder.name, folder.name, here).out
    assert "zz: no record below" in prints("show", "zz", here, code=2).err
    monkeypatch.setattr("quicksilver.report.table.FALSE_DISCOVERIES", 0.0)  # an interval clear of zero is not enough
    assert "no difference beyond chance (p = " in prints("show", folder.name, other, here).out


def test_show_prints_what_each_process_timed_again_with_its_file_and_every_option(prints):
    results = ROOT / "results"
    rows = read(results / "claims.json").entries
    row = next(one for one in rows if one["kind"] == "tuned" and "processes" in one["timed"])
    shown = prints("show", row["record"], f"results_dir={results}").out
    files = re.findall(r"^ {15}on .*: (\S+\.json)$", shown, re.M)
    assert f"in {len(files)} processes on " in row["timed"]
    assert all(row["record"] in Path(one).read_text() for one in files)
    assert shown.count("  timed again  ") == len(files)
    assert re.search(r"^  options .*halting\.", shown, re.M)


def test_a_method_that_leaves_out_layers_for_scored_tokens_is_said_to_and_whole_texts_are_compared_by_all_tokens(words, prints):
    asked = ["run", *words, "modules=[static_exit]", "measure=sweep"]
    assert "acts on      prompt and scored tokens" in prints(*asked, "protocol=continuation").out
    folder = Path(prints(*asked, "protocol=all").out.split()[-1])
    shown = prints("show", folder.name, folder.name, f"results_dir={folder.parents[1]}").out
    assert re.search(r"^  FLOPs saved  (\S+) against \1 of all tokens", shown, re.M)


def test_a_plan_names_the_runs_that_cannot_be_made_and_plans_the_others(words, prints):
    out, err = prints("run", "-m", *words, *CAPACITY[:2], "modules.halting.halted_share=0.5,x", "plan=true", code=2)
    assert "[2/2] halted_share=x: modules.halting: halted_share='x' is not a number" in err
    assert "halted_share=0.5 | " in out
    assert "halted_share=x" not in out
    asked = ["-m", *words, "modules=[static_depth]", "modules.static_exit.depth=0.5,0.6", "plan=true"]
    assert prints("run", *asked, code=2).out == "Nothing would run: what has no record is refused (above).\n"


def test_a_failing_job_of_a_sweep_leaves_the_others_and_the_exit_code_tells(words, prints):
    sweep = ["-m", *words, "modules=[halting]", "modules.halting.tau_entropy=null", "modules.halting.resume_layers=0"]
    out, err = prints("run", *sweep, "modules.halting.tau_drift=p40,abc,p60", code=1)
    assert out.count("perplexity ") >= 2
    assert out.count("record  ") == 2
    assert unsaid(err, "tau_drift='abc' is not a number", "One run of this sweep failed") == []
    assert "Traceback" not in err
    prints("run", *sweep, "modules.halting.tau_drift=p40,p60")


def test_the_jobs_of_an_experiment_are_found_again_one_by_one(words, prints):
    here = [*words, "dataset.windows=3", "modules.halting.resume_layers=0"]  # a person's words win over the experiment's
    out = prints("run", "-m", "experiment=minimum_depth", *here).out
    jobs = [compose([*job, *here]) for job in sweep_jobs("minimum_depth")]
    assert all(plan([config]).done for config in jobs)
    assert out.count("3 windows of") == len(jobs)
    assert not plan([compose([*sweep_jobs("minimum_depth")[0], *words])]).done


def test_a_results_folder_may_have_any_name_and_a_run_that_has_its_record_there_runs_nothing(
    world, tmp_path, prints, monkeypatch
):
    folder = tmp_path / "résultats d'été #1 ~ (a, b)"
    first = prints("run", *world, f"results_dir={folder}")
    assert "1 must be made" in first.err
    assert (folder / "runs").is_dir()
    assert str(folder) in first.out
    monkeypatch.setattr("quicksilver.runs.run._run", None)  # nothing runs
    again = prints("run", *world, f"results_dir={folder}")
    assert again.out == first.out
    assert "has its record already" in again.err


def test_the_first_line_says_which_runs_reuse_committed_quality(capsys):
    steps: list = [SimpleNamespace(done=False, reuses_quality=reuses) for reuses in (True, True, False)]
    with progress.watched(steps):
        pass
    reused = "2 of these take the repository's quality after some windows are measured again; records=own measures all."
    assert f"3 must be made. {reused}" in capsys.readouterr().err
