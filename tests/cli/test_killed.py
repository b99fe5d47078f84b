"""A sweep over tasks that is killed, twice, and started again: every record once, and each as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from harness_world import make_world

from quicksilver.harness.record import Record, load_record, record_frame
from quicksilver.measure.task import EXAMPLES

TASK = """name: {name}
reader: task
windows: 4
calibration_windows: 4
task:
  template: "{{text}}"
  labels: {{x: ['0'], y: ['1']}}
  train: {{files: [{rows}]}}
  validation: {{files: [{rows}]}}
"""
TASKS = ("one", "two", "three")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    group = tmp_path / "mine" / "dataset"
    group.mkdir(parents=True)
    for place, name in enumerate(TASKS):
        rows = tmp_path / f"{name}.jsonl"
        rows.write_text("".join(json.dumps({"text": "abc " * (2 + (i + place) % 5), "label": i % 2}) + "\n" for i in range(24)))
        (group / f"{name}.yaml").write_text(TASK.format(name=name, rows=rows))
    world = [word for word in make_world(tmp_path / "world", window=64) if not word.startswith(("dataset", "measure"))]
    return [
        *world, f"hydra.searchpath=[file://{tmp_path / 'mine'}]", f"dataset={','.join(TASKS)}", "modules=[],[static_depth]", "measure=task",
        "protocol=continuation", "protocol.window_tokens=32", "protocol.prompt_tokens=24", "name=tasks",
    ]  # fmt: skip


def start(words: list[str], results: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "quicksilver", "run", "-m", *words, f"results_dir={results}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


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
    assert start(words, whole).wait() == 0
    seen: dict[str, int] = {}
    for wanted in (1, 3):  # records that are there when the blow falls
        process = start(words, killed)
        while len(runs(killed)) < wanted and process.poll() is None:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert len(runs(killed)) < 2 * len(TASKS)
        seen |= {name: (path / "record.json").stat().st_mtime_ns for name, path in runs(killed).items()}
    assert seen
    assert start(words, killed).wait() == 0
    assert runs(killed).keys() == runs(whole).keys()
    assert len(record_frame(killed)) == 2 * len(TASKS)
    for name, path in runs(killed).items():
        assert numbers(load_record(path)) == numbers(load_record(runs(whole)[name]))
        assert (
            seen.get(name, (path / "record.json").stat().st_mtime_ns) == (path / "record.json").stat().st_mtime_ns
        )  # not made again
