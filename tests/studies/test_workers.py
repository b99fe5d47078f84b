"""Several trainings side by side: nothing starts before what it starts from, and nothing twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import pytest

from quicksilver.studies.token_halting import runs
from quicksilver.studies.token_halting.runs import MORE, PARTS, Plan, Workers, needs, tasks


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("parts", [PARTS, ("norm", "frozen"), *MORE.values()])
def test_a_part_waits_for_what_it_starts_from(monkeypatch, processes, parts):
    log, lock, running = [], Lock(), []

    def train(_, seed: int, part: str) -> None:
        with lock:
            running.append((seed, part))
            assert len(running) <= processes
            assert all((seed, need) in log for need in needs(part))
        with lock:
            running.remove((seed, part))
            log.append((seed, part))

    monkeypatch.setattr(runs, "_called", train)
    monkeypatch.setattr(runs, "ProcessPoolExecutor", lambda n, *_: ThreadPoolExecutor(n))
    said: list[str] = []
    with Workers(Plan(), Path("nowhere"), processes) as pool:
        pool.train((0, 3), parts, said.append)
    assert sorted(log) == sorted(tasks((0, 3), parts))
    assert len(set(log)) == len(log)
    assert {part for _, part in log} >= set(parts)
    assert said[-1].endswith(f"({len(log)} of {len(log)})")


def test_what_a_part_starts_from_is_trained_though_it_was_not_asked_for():
    assert tasks((1,), ("frozen", "norm")) == [(1, "dense"), (1, "control"), (1, "frozen"), (1, "box"), (1, "norm")]


def test_a_training_that_fails_ends_the_study_and_says_why(monkeypatch):
    def fails(_, seed: int, part: str) -> None:
        raise RuntimeError(f"{part} of {seed}")

    monkeypatch.setattr(runs, "_called", fails)
    monkeypatch.setattr(runs, "ProcessPoolExecutor", lambda n, *_: ThreadPoolExecutor(n))
    with pytest.raises(RuntimeError, match="dense of 4"), Workers(Plan(), Path("nowhere"), 2) as pool:
        pool.train((4,), PARTS, print)
