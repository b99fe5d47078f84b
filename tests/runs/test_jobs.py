"""Rows on their way to records: an error behind the last run neither loses the records nor is asked about for ever."""

from __future__ import annotations

import pytest
from harness_world import make_world

import quicksilver.runs.run as harness_run
from quicksilver.runs.jobs import FAILED, RecordIndex, make_job, run_missing
from quicksilver.runs.tracker import NotMirrored
from quicksilver.runtime.errors import QuickSilverError


@pytest.fixture
def jobs(tmp_path):
    words = [*make_world(tmp_path / "world"), f"results_dir={tmp_path / 'results'}", "measure=sweep", "dataset.windows=3"]
    answers = RecordIndex(tmp_path / "results")
    runs = {"dense": [], "half": ["modules=[static_depth]", "modules.static_depth.depth=0.5"]}
    return answers, [make_job(name, (*words, *more), (), answers) for name, more in runs.items()]


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


@pytest.mark.processor
def test_a_row_whose_kernel_is_wrong_here_says_why_and_the_table_is_whole(tmp_path, monkeypatch):
    from quicksilver.runtime.quantized import kernels

    monkeypatch.setattr(kernels, "wrong", lambda name, *_: "overflows" if name.startswith("qlinear") else None)
    words = [*make_world(tmp_path / "world"), f"results_dir={tmp_path / 'results'}", "measure=sweep", "dataset.windows=3"]
    answers = RecordIndex(tmp_path / "results")
    runs = {"dense": [], "qlinear": ["modules=[fastest_linear]", "modules.fastest_linear.product=qlinear"]}
    rows = [make_job(name, (*words, *more), (), answers) for name, more in runs.items()]
    run_missing(rows, answers)
    assert [row.error for row in rows] == [None, None]
    assert rows[0].record is not None
    assert rows[1].record is None
    assert rows[1].reason.startswith("product='qlinear': qlinear overflows on ")
    assert "\n" not in rows[1].reason
