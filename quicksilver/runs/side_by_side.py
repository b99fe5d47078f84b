"""Runs made in several processes at once, one thread each: on a small model two threads of one run gain little, and two runs twice as much.

Only runs that read no clock, of models that come with the package: two of a large one need not fit into memory. Each process takes a share of
the runs of one text and protocol, which it reads and scores with the dense model once; the longest shares begin.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from quicksilver.runtime.errors import ConfigError, QuickSilverError

if TYPE_CHECKING:
    from quicksilver.runs.config import RunConfig
    from quicksilver.runs.jobs import Job, Watch
    from quicksilver.runs.run import Planned, Progress

LOOKS_EVERY_S = 1.0
SHARE = 24  # runs that a worker takes at once: one with all 180 of a text would still work when the others have ended


def text_of(config: RunConfig) -> str:
    """Equal for runs whose model, windows and dense predictions are the same."""
    return repr((config.model, config.dataset, config.protocol, config.measure["batch_windows"]))


def groups(configs: Sequence[RunConfig]) -> list[list[int]]:
    """Numbers of the configs that may be made side by side, at most `SHARE` of one text together, those that score most windows first."""
    found: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        if not _alone(config):
            found.setdefault(text_of(config), []).append(number)
    shares = [numbers[first : first + SHARE] for numbers in found.values() for first in range(0, len(numbers), SHARE)]

    def windows(numbers: list[int]) -> float:
        return sum(configs[number].dataset.windows or math.inf for number in numbers)

    return sorted(shares, key=windows, reverse=True)


def _alone(config: RunConfig) -> bool:
    """Whether a run has to be made by itself: a clock is read, threads were asked for, the model may be large, a tracker may refuse the record."""
    from quicksilver.runs.parts import build_measurements

    return (
        any(measurement.timed for measurement in build_measurements(config.measure).values())
        or config.threads is not None
        or not config.model.path.startswith("embedded:")
        or config.model.device_map != "cpu"
        or config.tracker.name != "none"
    )


def make(jobs: Sequence[Job], workers: int | None = None, *, watch: Watch | None = None) -> None:
    """Make records of `jobs` that are missing and may be made side by side. What fails is left as it was: `run_missing` tries it again, and says why.

    Args:
        workers: processes; None: one a core. 1: nothing is made here.
        watch: shows progress.

    Raises:
        ConfigError: fewer than one worker.
    """
    from quicksilver.runs.jobs import run_context
    from quicksilver.runs.run import Planned

    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers}: needs at least 1.")
    configured = [job for job in jobs if job.config is not None]
    configs = [job.config for job in configured if job.config is not None]
    together = groups(configs)
    count = min(workers or _cores(), len(together))
    if count < 2:
        return
    place, work, steps = run_context(None, jobs), list[list[tuple[str, ...]]](), dict[str, Planned]()
    for numbers in together:
        words = []
        for number in numbers:
            with suppress(QuickSilverError):
                missing = {step.fingerprint: step for step in configured[number].planned(place).steps if not step.done}
                if missing:
                    words.append(configured[number].overrides)
                    steps |= missing
        if words:
            work.append(words)
    if len(work) < 2:
        return
    context = multiprocessing.get_context("spawn")
    with (
        watch(list(steps.values())) if watch is not None else nullcontext() as report,
        ProcessPoolExecutor(min(count, len(work)), mp_context=context, initializer=_end_with_the_parent) as pool,
    ):
        left = {pool.submit(_make_all, words) for words in work}
        try:
            while left:
                left = wait(left, timeout=LOOKS_EVERY_S, return_when=FIRST_COMPLETED).not_done
                if report is not None:
                    _tell(report, list(steps.values()))
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # records are whole or not there; the next call goes on
            raise


def _tell(report: Callable[[Progress], None], steps: Sequence[Planned]) -> None:
    """Say how many of the steps, all of which were missing, have a record by now."""
    from quicksilver.runs.run import Progress

    left = [step for step in steps if not step.done]
    done = len(steps) - len(left)
    if left:
        report(Progress(done, len(steps), left[0].config.label, "side by side", done / len(steps)))


def _make_all(jobs: Sequence[tuple[str, ...]]) -> None:
    """In a worker: its share of the runs of one text, one after the other."""
    import torch

    from quicksilver.runs.config import compose
    from quicksilver.runs.context import RunContext
    from quicksilver.runs.run import ensure

    torch.set_num_threads(1)
    place = RunContext()
    for overrides in jobs:
        with suppress(Exception):  # made again by the process that tells it
            ensure([compose(overrides)], context=place)


def _end_with_the_parent() -> None:
    """In a worker: a parent that is killed takes it along; else it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
