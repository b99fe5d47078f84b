"""What commands say while they work: how far runs are, why rows failed, and how to repeat them."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quicksilver.runtime.errors import QuickSilverError

if TYPE_CHECKING:
    from quicksilver.runs.jobs import Job
    from quicksilver.runs.run import Planned, Progress


def width() -> int | None:
    """Columns of the terminal; None: the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def explain(failed: Sequence[Job]) -> None:
    """Why jobs failed, and the command that repeats the first of them alone; jobs with the same trouble share it."""
    troubles: dict[str, list[Job]] = {}
    for job in failed:
        troubles.setdefault(str(job.error) or repr(job.error), []).append(job)
    for trouble, jobs in troubles.items():
        print(f"\nFailed: {', '.join(job.name for job in jobs)}\n  {trouble}", file=sys.stderr)
        print(f"  To repeat it alone: quicksilver run {shlex.join(jobs[0].overrides)}", file=sys.stderr)


def show_fault(error: Exception) -> None:
    """The traceback of what is no QuickSilverError: a fault of ours or of a library, for which one line would not do. And the line of a record
    that the tracker did not take, which no row of a table would say."""
    from quicksilver.runs.tracker import NotMirrored

    if isinstance(error, NotMirrored):
        print(f"quicksilver: {error}", file=sys.stderr, flush=True)
    elif not isinstance(error, QuickSilverError):
        traceback.print_exception(error)


@contextmanager
def watched(steps: Sequence[Planned]) -> Iterator[Callable[[Progress], None]]:
    """Say on stderr how much there is to do and how far it is: a bar with the time left on a terminal, else one line a run."""
    from quicksilver.runs.terminal import progress_bar

    missing = sum(not step.done for step in steps)
    if missing:
        print(
            f"{len(steps)} runs behind this, {len(steps) - missing} with a record, {missing} to do.", file=sys.stderr, flush=True
        )
    announced: set[int] = set()
    started = time.monotonic()
    with progress_bar() as bar:

        def show(progress: Progress) -> None:
            bar(progress)
            if not sys.stderr.isatty() and progress.run not in announced:
                announced.add(progress.run)
                left = _time_left(time.monotonic() - started, progress.fraction)
                print(f"[{progress.run + 1}/{progress.runs}] {progress.label}{left}", file=sys.stderr, flush=True)

        yield show


@contextmanager
def counted(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A bar over `total` steps on a terminal, gone at the end; the block calls what it is given after each step."""
    from tqdm import tqdm

    with tqdm(total=total, desc=what, file=sys.stderr, disable=None, leave=False, delay=0.5) as bar:

        def step() -> None:
            bar.update()

        yield step


def _time_left(seconds: float, fraction: float) -> str:
    """`, about 12 min left`; nothing as long as nothing is done."""
    if fraction <= 0:
        return ""
    left = seconds * (1 - fraction) / fraction
    return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"
