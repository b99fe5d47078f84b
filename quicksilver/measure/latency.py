"""Wall clock: two or more callables timed in turns, so that a slow minute of the machine hits all of them alike.

Latency is measured in a pass of its own: no trace, no quality, no FLOP counting (docs/conflicts.md #27).
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from quicksilver.runtime.errors import ConfigError, QuickSilverError

MIN_REPEATS = 3  # two points have a difference, not a spread
BUSY = 0.5  # load average beyond what threads of our own explain
CLOCK_GAP_S = 0.1  # and a thousandth of the time that passed: more than a clock is adjusted by while it runs


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


@dataclass(frozen=True)
class LatencySamples:
    """Times of one callable, in the order they were taken.

    Args:
        ms: one time per repeat, in milliseconds (warm-up excluded).
    """

    ms: list[float]

    @property
    def median(self) -> float:
        """Median in milliseconds."""
        return _quartiles(self.ms)[1]

    @property
    def iqr(self) -> float:
        """Interquartile range in milliseconds: the spread printed beside the median."""
        low, _, high = _quartiles(self.ms)
        return high - low


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of the per-round ratios of two callables (unitless)."""

    median: float
    low: float
    high: float


class Alternation(dict[str, LatencySamples]):
    """What `alternate` measured: samples by name, and what is needed to judge them.

    Attributes:
        control: name of the callable that was timed twice in every round; None: none was.
        control_ms: times of its second appearance.
        load_before, load_after: 1-minute load average of the machine around the measurement. On a quiet machine
            `load_before` is near 0; anything above it competes for the same cores.
        seconds: how long the timed rounds took by the clock that timed them.
        clock_gap_s: how much more (or less) passed meanwhile by the clock on the wall: a machine that slept, a clock that was set.
    """

    def __init__(
        self,
        samples: Mapping[str, LatencySamples],
        *,
        control: str | None = None,
        control_ms: Sequence[float] = (),
        load_before: float,
        load_after: float,
        seconds: float = 0.0,
        clock_gap_s: float = 0.0,
    ) -> None:
        super().__init__(samples)
        self.control, self.control_ms = control, list(control_ms)
        self.load_before, self.load_after = load_before, load_after
        self.seconds, self.clock_gap_s = seconds, clock_gap_s

    @property
    def warnings(self) -> list[str]:
        """Why these times may be worth less than they look, one sentence a reason; empty on a quiet machine."""
        found = []
        allowed = torch.get_num_threads() + BUSY  # a pass of ours just before keeps its own threads in the average
        if self.load_before > allowed:
            found.append(
                f"load average {self.load_before:.1f} before timing, where threads of this process explain "
                f"{torch.get_num_threads()}: something else runs on this machine"
            )
        if abs(self.clock_gap_s) > CLOCK_GAP_S + 1e-3 * self.seconds:
            found.append(f"the clock jumped by {self.clock_gap_s:+.1f} s while timing: the machine slept, or its clock was set")
        return found

    @property
    def noise_floor(self) -> float | None:
        """How far one and the same callable is from itself (A/A), round by round: the farther quartile of the ratios, from 1.

        An effect smaller than this is noise. The medians alone would not do: those of two noisy series may agree by chance.
        """
        if self.control is None:
            return None
        low, _, high = _quartiles([b / a for a, b in zip(self[self.control].ms, self.control_ms, strict=True)])
        return max(abs(low - 1.0), abs(high - 1.0))

    def ratio(self, name: str, to: str) -> Ratio:
        """Time of `name` over time of `to`, round by round: neighbours in time share the machine's mood."""
        low, middle, high = _quartiles([a / b for a, b in zip(self[name].ms, self[to].ms, strict=True)])
        return Ratio(middle, low, high)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # A collection walks live objects: tens of milliseconds that would be charged to whoever was running. Between rounds the young
    # ones are enough: what a forward pass leaves behind.
    enabled = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _time_ms(fn: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            start.record()
            fn()
            end.record()
        end.synchronize()
        return start.elapsed_time(end)
    began = time.perf_counter()
    fn()
    return (time.perf_counter() - began) * 1e3


def shared_weight_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under module objects of their own: stays plain while `model` is under `apply`, so the two can take turns."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def alternate(
    fns: Mapping[str, Callable[[], object]],
    warmup: int = 2,
    repeats: int = 5,
    device: str | torch.device = "cpu",
    *,
    control: bool = True,
) -> Alternation:
    """Time callables in turns: A B A B …, after `warmup` untimed rounds.

    Args:
        fns: callables by name; each call is one sample. They run in the mapping's order in every round.
        warmup: rounds that are run and thrown away (first-touch memory, kernel selection).
        repeats: timed rounds, at least 3.
        device: a CUDA device is timed by its own events, everything else by `time.perf_counter`.
        control: time the first callable once more at the end of every round, for `Alternation.noise_floor`.

    Returns:
        Samples by name; the control's second samples are not among them.

    Raises:
        ConfigError: nothing to time, fewer than 3 repeats, a negative warm-up.
        QuickSilverError: a time that is not positive: the clock cannot be trusted.
    """
    if not fns:
        raise ConfigError("alternate() got nothing to time: pass at least one callable")
    if repeats < MIN_REPEATS:
        raise ConfigError(f"repeats={repeats} gives no interval: time at least {MIN_REPEATS} rounds (measure.repeats)")
    if warmup < 0:
        raise ConfigError(f"warmup={warmup} is negative: 0 or more untimed rounds")
    device = torch.device(device)
    turns = list(fns.items())
    first = turns[0][0]
    load_before = os.getloadavg()[0]
    for _ in range(warmup):
        for _, fn in turns:
            fn()
    gc.collect()
    times: dict[str, list[float]] = {name: [] for name in fns}
    control_ms: list[float] = []
    began, began_on_wall = time.perf_counter(), time.time()
    for _ in range(repeats):
        with _no_garbage_collection():
            for name, fn in turns:
                times[name].append(_time_ms(fn, device))
            if control:
                control_ms.append(_time_ms(fns[first], device))
    seconds, on_wall = time.perf_counter() - began, time.time() - began_on_wall
    for name, ms in (*times.items(), (first, control_ms)):
        if any(value <= 0 for value in ms):
            raise QuickSilverError(
                f"{name}: the clock stood still or ran backwards while it was timed; there is no time to report."
            )
    return Alternation(
        {name: LatencySamples(ms) for name, ms in times.items()},
        control=first if control else None,
        control_ms=control_ms,
        load_before=load_before,
        load_after=os.getloadavg()[0],
        seconds=seconds,
        clock_gap_s=on_wall - seconds,
    )
