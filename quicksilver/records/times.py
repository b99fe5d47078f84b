"""Times of a table's runs, taken again in several processes: each process is one file below `results_dir/times`.

A process times every run beside the dense model, in an order drawn anew. So a time that one process had by chance shows as a range over all,
and rows are compared only in processes that timed all of them, on one machine.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quicksilver.files import write_atomically
from quicksilver.measure.latency import LatencyResult, Timing
from quicksilver.measure.measurement import Mistyped, Quartiles, Spread, decoded, encoded
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_json

TIMES = "times"


@dataclass(frozen=True)
class TimedProcess:
    """What one process timed.

    Attributes:
        table: the table or figure whose runs these are.
        started: ISO 8601, UTC.
        machine: processor, instruction set, torch and threads.
        rounds: of each run, in turns with the dense model.
        results: by fingerprint of the run, in the order in which they were timed.
    """

    table: str
    started: str
    machine: str
    rounds: int
    results: dict[str, LatencyResult]

    def __hash__(self) -> int:
        return hash((self.table, self.started))

    def path(self, root: Path) -> Path:
        """Its file below the results folder `root`."""
        stamp = self.started.partition("+")[0].replace(":", "").replace("-", "")
        return root / TIMES / f"{self.table}-{stamp}.json"

    def write(self, root: Path) -> Path:
        """Write it below the results folder `root`; returns the file."""
        path = self.path(root)
        write_atomically(path, (json.dumps(encoded(self)) + "\n").encode())
        return path


def timed_processes(root: Path) -> list[TimedProcess]:
    """All below the results folder `root`, the oldest first.
    Raises ConfigError: a file that is none, or whose times cannot be."""
    found = [_read(path, path.stat().st_mtime_ns) for path in sorted((root / TIMES).glob("*.json"))]
    return sorted(found, key=lambda one: one.started)


@lru_cache(maxsize=256)
def _read(path: Path, _changed_ns: int) -> TimedProcess:
    try:
        found = decoded(TimedProcess, read_json(path))
        for result in found.results.values():
            _check(result)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no file of `quicksilver time` ({error}): move it away, and time again.") from error
    return found


def _check(result: LatencyResult) -> None:
    """Raises Mistyped where medians and ratios are not those of the samples, or a sample is no time."""
    for phase, timing in (("", result.timing()), ("prompt_", result.timing(prompt=True))):
        if timing is None:
            continue
        ours, theirs = timing.run_ms.samples or [], timing.dense_ms.samples or []
        if len(ours) < 3 or len(ours) != len(theirs) or min(*ours, *theirs) <= 0:
            raise Mistyped(f"{phase}latency_ms has {len(ours)} and {len(theirs)} samples, and not three times above 0 of each")
        again = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        if not math.isclose(again, timing.ratio.median, rel_tol=1e-6):
            raise Mistyped(f"{phase}latency_ratio is {timing.ratio.median:g}, and that of its samples is {again:g}")


def shared(processes: Sequence[TimedProcess], fingerprints: Iterable[str]) -> list[TimedProcess]:
    """Those that timed all of these runs, on the machine of the latest of them."""
    wanted = set(fingerprints)
    whole = [one for one in processes if wanted and wanted <= one.results.keys()]
    return [one for one in whole if one.machine == whole[-1].machine]


def one_by_one(processes: Sequence[TimedProcess]) -> list[tuple[TimedProcess, ...]]:
    """Each alone, for what is compared within one; none at all once, where a record's own time is taken."""
    return [(one,) for one in processes] or [()]


def over(processes: Sequence[TimedProcess], fingerprint: str, *, prompt: bool) -> Timing | None:
    """The median over processes, with the range of their medians as its ends; None: the protocol has no prompt."""
    each = [found for one in processes if (found := one.results[fingerprint].timing(prompt=prompt)) is not None]
    if not each:
        return None
    ratios = [one.ratio.median for one in each]
    ours, theirs = ([getattr(one, name).median for one in each] for name in ("run_ms", "dense_ms"))
    return Timing(
        Spread(statistics.median(ours), max(ours) - min(ours)), Spread(statistics.median(theirs), max(theirs) - min(theirs)),
        Quartiles(statistics.median(ratios), min(ratios), max(ratios)), statistics.median(one.noise_floor_pct for one in each),
    )  # fmt: skip
