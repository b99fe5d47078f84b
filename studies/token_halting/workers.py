"""The trainings and evaluations of the detection study in several processes: what waits for nothing that is missing runs beside the rest."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch

from .runs import NEEDS, Measured, Plan, SeedRuns, Task, tasks
from .timing import cost


@dataclass
class Workers:
    """A pool of processes, each with the scenes of one plan. A context manager: it ends them.

    Args:
        folder: for the checkpoints. threads: of each process.
    """

    plan: Plan
    folder: Path
    processes: int
    threads: int = 1
    _pool: ProcessPoolExecutor = field(init=False, repr=False)

    def __enter__(self) -> Workers:
        self._pool = ProcessPoolExecutor(
            self.processes, multiprocessing.get_context("spawn"), _begin, (self.plan, self.folder, self.threads)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def train(self, seeds: Sequence[int], parts: Sequence[str], say: Callable[[str], None]) -> None:
        """Train these parts of every seed, and what they start from; finished ones are not repeated."""
        waiting, done, running = tasks(seeds, parts), set[Task](), dict[Future[None], Task]()
        n = len(waiting)
        while waiting or running:
            for seed, part in ready(waiting, done)[: self.processes - len(running)]:
                waiting.remove((seed, part))
                running[self._pool.submit(_train, seed, part)] = seed, part
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                future.result()
                done.add(task := running.pop(future))
                say(f"seed {task[0]}, {task[1]}: trained ({len(done)} of {n})")

    def measure(self, seeds: Sequence[int], more: Sequence[str] = ()) -> Iterator[list[Measured]]:
        """Every evaluation of every seed, in order."""
        return self._pool.map(_measure, seeds, [tuple(more)] * len(seeds))

    def costs(self, seeds: Sequence[int]) -> Iterator[pd.DataFrame]:
        """What the study would take for these seeds (`timing.cost`); as many of them as there are processes are timed side by side."""
        return self._pool.map(_cost, seeds)


def ready(waiting: Sequence[Task], done: set[Task]) -> list[Task]:
    """Tasks whose needs are done, in order."""
    return [(seed, part) for seed, part in waiting if all((seed, need) in done for need in NEEDS.get(part, ()))]


_HERE: list[tuple[Plan, Path]] = []  # of a worker


def _begin(plan: Plan, folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    _HERE.append((plan, folder))


def _train(seed: int, part: str) -> None:
    SeedRuns(_HERE[0][0], seed, _HERE[0][1]).train(part)


def _measure(seed: int, more: Sequence[str]) -> list[Measured]:
    one = SeedRuns(_HERE[0][0], seed, _HERE[0][1])
    return [*one.evaluations(), *one.more_evaluations(more)]


def _cost(seed: int) -> pd.DataFrame:
    plan, folder = _HERE[0]
    return cost(plan, seed, folder)
