"""Rows on their way to records: an error behind the last run neither loses the records nor is asked about for ever. Runs in several processes:
who may, that each text stays with one process, and that what fails is left to be told."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

import quicksilver.runs.run as harness_run
from quicksilver.runs import jobs as side_by_side
from quicksilver.runs.config import compose
from quicksilver.runs.jobs import FAILED, Job, RecordIndex, make_job, run_context, run_missing
from quicksilver.runs.tracker import NotMirrored
from quicksilver.runtime.errors import ConfigError, QuickSilverError, UnavailableError

DEPTH = ["modules=[static_depth]", "modules.static_depth.depth=0.5"]


def jobs_of(results, words, **runs: list[str]) -> tuple[RecordIndex, list[Job]]:
    """A job for each of the runs, on top of `words`."""
    answers = RecordIndex(results)
    return answers, [make_job(name, (*words, "measure=sweep", *more), answers) for name, more in runs.items()]


@pytest.fixture
def jobs(tmp_path, words):
    return jobs_of(tmp_path / "results", words, dense=["dataset.windows=3"], half=["dataset.windows=3", *DEPTH])


def test_an_error_after_the_last_run_leaves_every_row_its_record(jobs, monkeypatch):
    answers, rows = jobs
    mirrored = []

    def refuses(record, *_, **__):
        mirrored.append(record)
        raise NotMirrored("W&B refused it")

    monkeypatch.setattr(harness_run, "mirror", refuses)
    told = []
    run_missing(rows, answers, on_fault=told.append)
    assert [str(error) for error in told] == ["W&B refused it"] * 2
    assert [record.fingerprint for record in mirrored] == [row.record.fingerprint for row in rows]
    assert all(row.error is None for row in rows)


def test_an_error_of_the_dense_run_is_told_once_and_is_that_of_each_row(jobs, monkeypatch):
    answers, rows = jobs
    told, run = [], harness_run._run

    def fails(*_):
        raise QuickSilverError("the logits are not finite")

    monkeypatch.setattr(harness_run, "_run", fails)
    run_missing(rows, answers, on_fault=told.append)
    assert [(row.record, row.reason, str(row.error)) for row in rows] == [(None, FAILED, "the logits are not finite")] * 2
    assert len(told) == 1
    monkeypatch.setattr(harness_run, "_run", lambda step, *rest: fails() if step.config.modules else run(step, *rest))
    run_missing(rows, answers)
    assert [row.record is not None for row in rows] == [True, False]  # one that fails leaves the others alone


@pytest.mark.parametrize("word", ["modules.predicted_kv.schedule={0}/own.yaml", "hydra.searchpath=[file://{0}]"])
def test_what_files_of_the_user_s_decide_is_not_remembered_by_the_words_alone(word, jobs, tmp_path):
    answers, rows = jobs
    run_missing(rows[:1], answers)
    words = (*rows[0].overrides, word.format(tmp_path))
    config = compose(list(rows[0].overrides))
    if "schedule" in word:
        config = replace(
            config,
            modules={"predicted_kv": {"_target_": "quicksilver.modules.PresetHalting", "schedule": f"{tmp_path}/own.yaml"}},
        )
    answers.put(words, config, fingerprint=rows[0].record.fingerprint)
    assert answers.get(words) is None


@pytest.mark.processor
def test_a_row_whose_kernel_is_wrong_here_says_why_and_the_table_is_whole(words, tmp_path, monkeypatch):
    from quicksilver.runtime.quantized import kernels

    monkeypatch.setattr(kernels, "wrong", lambda name, *_: "overflows" if name.startswith("qlinear") else None)
    qlinear = ["modules=[fastest_linear]", "modules.fastest_linear.product=qlinear"]
    answers, rows = jobs_of(tmp_path / "results", [*words, "dataset.windows=3"], dense=[], qlinear=qlinear)
    run_missing(rows, answers)
    assert [row.error for row in rows] == [None, None]
    assert rows[0].record is not None
    assert rows[1].record is None
    assert rows[1].reason.startswith("product='qlinear': qlinear overflows on ")
    assert "\n" not in rows[1].reason


def test_a_row_whose_gates_do_not_ship_with_the_model_says_so_before_it_is_loaded(words, tmp_path):
    far = ["model=far-llama", "modules=[learned_halting]", f"results_dir={tmp_path / 'results'}"]
    answers, rows = jobs_of(tmp_path / "results", ["protocol=continuation"], dense=words, learned=far)
    run_missing(rows, answers)
    assert rows[0].record is not None
    assert (rows[1].record, rows[1].error, rows[1].reason) == (None, None, "gates='predict': none ship with far-llama.")
    with pytest.raises(UnavailableError, match=r"far-llama\. Train gates for this model: python scripts/train_halting\.py"):
        rows[1].planned(run_context(None, rows))


# --- in several processes ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def two_texts(words, tmp_path, monkeypatch):
    """Two runs on each of two texts, in this process; and which of them each worker was given."""
    three, two = ["dataset.windows=3"], ["dataset.windows=2"]
    _, jobs = jobs_of(tmp_path / "results", words, a=three, b=[*three, *DEPTH], c=two, d=[*two, *DEPTH])
    monkeypatch.setattr(side_by_side, "_alone", lambda config: False)
    monkeypatch.setattr(side_by_side, "ProcessPoolExecutor", lambda count, **_: ThreadPoolExecutor(1))
    real, given = side_by_side._make_all, []

    def make_all(words):
        given.append(words)
        real(words)

    monkeypatch.setattr(side_by_side, "_make_all", make_all)
    return jobs, given, tmp_path / "results" / "runs"


def test_each_text_goes_to_one_worker_and_every_run_gets_its_record(two_texts):
    jobs, given, records = two_texts
    with pytest.raises(ConfigError, match="workers=0"):
        side_by_side.make_side_by_side(jobs, 0)
    side_by_side.make_side_by_side(jobs, 1)
    assert given == []  # one worker leaves everything to this process
    side_by_side.make_side_by_side(jobs, 2, watch=contextmanager(lambda steps: iter([lambda progress: None])))
    assert [len(words) for words in given] == [2, 2]  # the one of more windows first
    asked = [{[word for word in run if word.startswith("dataset.windows=")][-1] for run in words} for words in given]
    assert asked == [{"dataset.windows=3"}, {"dataset.windows=2"}]
    assert len(list(records.glob("*/record.json"))) == 4
    side_by_side.make_side_by_side(jobs, 2)
    assert len(given) == 2  # everything is there: no worker is started


def test_what_fails_is_left_without_a_record_and_the_others_go_on(two_texts, monkeypatch):
    jobs, _, records = two_texts
    real = harness_run._run

    def run(step, *rest):
        if step.config.modules and step.config.dataset.windows == 3:
            raise QuickSilverError("not finite")
        return real(step, *rest)

    monkeypatch.setattr(harness_run, "_run", run)
    side_by_side.make_side_by_side(jobs, 2)
    assert len(list(records.glob("*/record.json"))) == 3


def test_runs_of_one_text_are_shared_and_what_reads_a_clock_or_may_be_large_is_made_alone(monkeypatch):
    monkeypatch.setattr(side_by_side, "SHARE", 2)
    alone = (["measure=default"], ["model.path=/folder"], ["threads=2"])
    more = ([], ["dataset.windows=null"], ["dataset.windows=16"], *alone, [], [], ["protocol=continuation"])
    asked = ["dataset=python-docs", "dataset.windows=4", "measure=sweep"]  # those of most windows first
    assert side_by_side.groups([compose([*asked, *words]) for words in more]) == [[1], [2], [0, 6], [7], [8]]
