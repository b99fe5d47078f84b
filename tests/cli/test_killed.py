"""A sweep over tasks that is killed, twice, and started again: every record once, and each as if nothing had been."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from harness_world import make_world

from quicksilver.measure.task import EXAMPLES
from quicksilver.records.record import Record, load_record, record_frame

TASKS = ("sst2", "rte")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Two tasks, dense and under a module: four runs."""
    texts = ["abc " * (2 + i % 5) for i in range(24)]
    tables = {
        "SST-2": "sentence\tlabel\n" + "".join(f"{text}\t{i % 2}\n" for i, text in enumerate(texts)),
        "RTE": "sentence1\tsentence2\tlabel\n" + "".join(f"{text}\td e\t{i % 2}\n" for i, text in enumerate(texts)),
    }
    for name, table in tables.items():
        (tmp_path / "glue" / name).mkdir(parents=True)
        for part in ("train", "dev", "test"):
            (tmp_path / "glue" / name / f"{part}.tsv").write_text(table)
    world = [word for word in make_world(tmp_path / "world") if not word.startswith(("dataset", "measure"))]
    return [
        *world, f"data.root={tmp_path}", f"dataset={','.join(TASKS)}", "dataset.windows=4", "dataset.calibration_windows=4",
        "modules=[],[static_depth]", "measure=task", "protocol=continuation", "name=tasks",
    ]  # fmt: skip


def start(words: list[str], results: Path) -> subprocess.Popen[bytes]:
    """The command in a process of its own; what it prints is in `results`.log."""
    command = [sys.executable, "-m", "quicksilver", "run", "-m", *words, f"results_dir={results}"]
    with results.with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def runs(results: Path) -> dict[str, Path]:
    """Finished records by fingerprint."""
    return {path.parent.name: path.parent for path in results.glob("runs/*/record.json")}


def numbers(record: Record) -> tuple[object, ...]:
    """What a run found, without times."""
    examples = pd.read_parquet(record.path / EXAMPLES).to_json(double_precision=15)
    return record.content["task"], record.content["dense_fingerprint"], record.content["nll_nats"], examples


@pytest.mark.slow
def test_a_killed_sweep_over_tasks_ends_as_an_undisturbed_one(words: list[str], tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert start(words, whole).wait() == 0, whole.with_suffix(".log").read_text()
    seen: dict[str, int] = {}
    for wanted in (1, 2):  # records that are there when the blow falls
        process = start(words, killed)
        while len(runs(killed)) < wanted and process.poll() is None:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert len(runs(killed)) < 2 * len(TASKS)
        seen |= {name: (path / "record.json").stat().st_mtime_ns for name, path in runs(killed).items()}
    assert seen
    assert start(words, killed).wait() == 0, killed.with_suffix(".log").read_text()
    assert runs(killed).keys() == runs(whole).keys()
    assert len(record_frame(killed)) == 2 * len(TASKS)
    for name, path in runs(killed).items():
        assert numbers(load_record(path)) == numbers(load_record(runs(whole)[name]))
        assert seen.get(name) in (None, (path / "record.json").stat().st_mtime_ns)  # not made again
