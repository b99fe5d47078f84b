"""Runs in several processes: who may, that each text stays with one process, and that what fails is left to be told."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness_world import make_world

from quicksilver.runs import jobs as side_by_side
from quicksilver.runs.config import compose
from quicksilver.runs.jobs import RecordIndex, make_job
from quicksilver.runtime.errors import ConfigError, QuickSilverError

DEPTH = ["modules=[static_depth]", "modules.static_depth.depth=0.5"]


@pytest.fixture
def two_texts(tmp_path, monkeypatch):
    """Two runs on each of two texts, in this process; and which of them each worker was given."""
    world = [*make_world(tmp_path / "world"), f"results_dir={tmp_path / 'results'}", "measure=sweep"]
    answers = RecordIndex(tmp_path / "results")
    texts = {"three": ["dataset.windows=3"], "two": ["dataset.windows=2"]}
    jobs = [make_job(name, (*world, *text, *more), (), answers) for name, text in texts.items() for more in ([], DEPTH)]
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
    said = []
    side_by_side.make_side_by_side(jobs, 2, watch=_watch(said))
    assert [len(words) for words in given] == [2, 2]  # the one of more windows first
    asked = [{[word for word in run if word.startswith("dataset.windows=")][-1] for run in words} for words in given]
    assert asked == [{"dataset.windows=3"}, {"dataset.windows=2"}]
    assert len(list(records.glob("*/record.json"))) == 4
    side_by_side.make_side_by_side(jobs, 2)
    assert len(given) == 2  # everything is there: no worker is started


def test_what_fails_is_left_without_a_record_and_the_others_go_on(two_texts, monkeypatch):
    import quicksilver.runs.run as harness_run

    jobs, _, records = two_texts
    real = harness_run._run

    def run(step, *rest):
        if step.config.modules and step.config.dataset.windows == 3:
            raise QuickSilverError("not finite")
        return real(step, *rest)

    monkeypatch.setattr(harness_run, "_run", run)
    side_by_side.make_side_by_side(jobs, 2)
    assert len(list(records.glob("*/record.json"))) == 3


def test_one_worker_leaves_everything_to_this_process(two_texts):
    jobs, given, _ = two_texts
    side_by_side.make_side_by_side(jobs, 1)
    assert given == []
    with pytest.raises(ConfigError, match="workers=0"):
        side_by_side.make_side_by_side(jobs, 0)


def test_what_reads_a_clock_or_may_be_large_is_made_alone():
    config = compose(["dataset=python-docs", "measure=sweep"])
    timed = compose(["dataset=python-docs", "measure=default"])
    large = dataclasses.replace(config, model=dataclasses.replace(config.model, path="/folder"))
    other = dataclasses.replace(config, dataset=dataclasses.replace(config.dataset, windows=4))
    asked = dataclasses.replace(config, threads=2)
    assert side_by_side.groups([config, timed, other, large, asked, config]) == [[0, 5], [2]]


def test_many_runs_of_one_text_are_shared_and_the_longest_share_begins(monkeypatch):
    monkeypatch.setattr(side_by_side, "SHARE", 2)
    short = compose(["dataset=python-docs", "dataset.windows=4", "measure=sweep"])
    other = compose(["dataset=python-docs", "dataset.windows=16", "measure=sweep"])
    all_positions = compose(["dataset=python-docs", "dataset.windows=4", "measure=sweep", "protocol=continuation"])
    assert short.protocol != all_positions.protocol
    assert side_by_side.groups([short, other, short, short, all_positions]) == [[1], [0, 2], [3], [4]]


def _watch(said):
    from contextlib import contextmanager

    @contextmanager
    def watch(steps):
        yield said.append

    return watch
