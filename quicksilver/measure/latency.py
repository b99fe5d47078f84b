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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar

from quicksilver.measure.measurement import Measurement, Quartiles, Result, Spread
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.options import Count, at_least

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from quicksilver.measure.bench import Bench

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
        import torch

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
        """Time of `name` over time of `to`, round by round: two neighbours in time are slowed by the same other load."""
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


def _times_ms(steps: Sequence[Step], device: torch.device, clock: Callable[[], float]) -> list[float]:
    """Milliseconds of each step, one after another without a pause."""
    import torch

    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            marks[0].record()
            for step, mark in zip(steps, marks[1:], strict=True):
                step()
                mark.record()
        marks[-1].synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(marks)]
    moments = [clock()]
    for step in steps:
        step()
        moments.append(clock())
    return [(after - before) * 1e3 for before, after in pairwise(moments)]


def shared_weight_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under module objects of their own: stays plain while `model` is under `apply`, so the two can take turns."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


Step = Callable[[], object]


def alternate(
    fns: Mapping[str, Step], warmup: int = 2, repeats: int = 5, device: str | torch.device = "cpu", *, control: bool = True
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
    return alternate_steps({name: [fn] for name, fn in fns.items()}, warmup, repeats, device, control=control)[-1]


def alternate_steps(
    fns: Mapping[str, Sequence[Step]],
    warmup: int = 2,
    repeats: int = 5,
    device: str | torch.device = "cpu",
    *,
    control: bool = True,
    clock: Callable[[], float] | None = None,
) -> list[Alternation]:
    """As `alternate`, of work in steps that follow one another, such as a prompt and what is decoded after it.

    Args:
        fns: the steps of each, equally many.
        clock: seconds, where the device has no events of its own; None: `time.perf_counter`.

    Returns:
        One for each step: the time from the first step's beginning to the end of that step. The last is of all of them.
    """
    import torch

    if not fns:
        raise ConfigError("alternate() got nothing to time: pass at least one callable")
    if repeats < MIN_REPEATS:
        raise ConfigError(f"repeats={repeats} gives no interval: time at least {MIN_REPEATS} rounds")
    if warmup < 0:
        raise ConfigError(f"warmup={warmup} is negative: 0 or more untimed rounds")
    device = torch.device(device)
    turns = list(fns.items())
    first = turns[0][0]
    load_before = os.getloadavg()[0]
    for _ in range(warmup):
        for _, steps in turns:
            for step in steps:
                step()
    gc.collect()
    times: dict[str, list[list[float]]] = {name: [] for name in fns}  # by round, by step
    again: list[list[float]] = []
    began, began_on_wall = time.perf_counter(), time.time()
    for _ in range(repeats):
        with _no_garbage_collection():
            for name, steps in turns:
                times[name].append(_times_ms(steps, device, clock or time.perf_counter))
            if control:
                again.append(_times_ms(fns[first], device, clock or time.perf_counter))
    seconds, on_wall = time.perf_counter() - began, time.time() - began_on_wall
    for name, rounds in (*times.items(), (first, again)):
        if any(value <= 0 for values in rounds for value in values):
            raise QuickSilverError(
                f"{name}: the clock stood still or ran backwards while it was timed; there is no time to report."
            )
    load_after = os.getloadavg()[0]
    return [
        Alternation(
            {name: LatencySamples([sum(values[: n + 1]) for values in rounds]) for name, rounds in times.items()},
            control=first if control else None,
            control_ms=[sum(values[: n + 1]) for values in again],
            load_before=load_before,
            load_after=load_after,
            seconds=seconds,
            clock_gap_s=on_wall - seconds,
        )
        for n in range(len(turns[0][1]))
    ]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the run and of the dense model, their ratio round by round, and the noise floor (A/A) of that in percent."""

    run_ms: Spread
    dense_ms: Spread
    ratio: Quartiles
    noise_floor_pct: float


@dataclass(frozen=True)
class LatencyResult(Result):
    """Wall clock of one batch, run and dense in turns; `prompt_…` of its prompt alone, under `continuation`.

    Attributes:
        latency_ratio: time of the run over that of the dense model, round by round.
        noise_floor_pct: how far the dense model is from itself (A/A), in percent: a difference that is no larger is none.
        load_average: of the machine, `before` and `after`.
        timing_warnings: why these times may be worth less than they look.
    """

    section: ClassVar[str | None] = ""

    latency_ms: Spread
    dense_latency_ms: Spread
    latency_ratio: Quartiles
    noise_floor_pct: float
    load_average: dict[str, float] = field(default_factory=dict)
    timing_warnings: list[str] = field(default_factory=list)
    prompt_latency_ms: Spread | None = None
    dense_prompt_latency_ms: Spread | None = None
    prompt_latency_ratio: Quartiles | None = None
    prompt_noise_floor_pct: float | None = None
    prompt_load_average: dict[str, float] | None = None
    prompt_timing_warnings: list[str] | None = None

    def timing(self, *, prompt: bool = False) -> Timing | None:
        """Of the batch, or of its prompt alone; None: the protocol has no prompt."""
        if not prompt:
            return Timing(self.latency_ms, self.dense_latency_ms, self.latency_ratio, self.noise_floor_pct)
        run_ms, dense_ms = self.prompt_latency_ms, self.dense_prompt_latency_ms
        ratio, noise = self.prompt_latency_ratio, self.prompt_noise_floor_pct
        return (
            None
            if run_ms is None or dense_ms is None or ratio is None or noise is None
            else Timing(run_ms, dense_ms, ratio, noise)
        )

    def line(self) -> str:
        ratio, noise = self.prompt_latency_ratio, self.prompt_noise_floor_pct
        of = " of the prompt's"
        if ratio is None or noise is None:
            ratio, noise, of = self.latency_ratio, self.noise_floor_pct, ""
        saved, low, high = (100 * (1 - value) for value in (ratio.median, ratio.high, ratio.low))
        return f"{saved:.1f}%{of} time saved (quartiles {low:.1f} to {high:.1f}; noise {noise:.1f}%)"


@dataclass
class Latency(Measurement):
    """Time one batch, alternated with the dense model.

    Args:
        warmup: untimed rounds.
        repeats: timed rounds, at least 3.
    """

    warmup: Count = 1
    repeats: Annotated[int, at_least(MIN_REPEATS)] = 3

    share = 0.18
    timed = True

    def run(self, bench: Bench) -> LatencyResult:
        import torch

        from quicksilver.measure.bench import calls

        model, batch, protocol = bench.model, bench.batch, bench.protocol
        dense = shared_weight_copy(model)
        prefixes = ("prompt_", "") if protocol.name == "continuation" else ("",)
        rounds = self.warmup + 2 * self.repeats  # the dense model runs twice in a timed round: it is the control too
        done = 0
        found: dict[str, object] = {}
        with torch.no_grad(), bench.apply() as run:

            def note() -> None:
                nonlocal done
                done += 1
                bench.progress(min(1.0, done / rounds))

            theirs = calls(dense, batch, protocol, before=note)
            ours = calls(model, batch, protocol, before=run.reset)  # or the traces of all rounds pile up
            for prefix, times in zip(
                prefixes, alternate_steps({"dense": theirs, "run": ours}, self.warmup, self.repeats, model.device), strict=True
            ):
                for key, name in ((f"{prefix}latency_ms", "run"), (f"dense_{prefix}latency_ms", "dense")):
                    found[key] = Spread(times[name].median, times[name].iqr, times[name].ms)
                ratio = times.ratio("run", to="dense")
                found[f"{prefix}noise_floor_pct"] = 100 * (times.noise_floor or 0.0)
                found[f"{prefix}latency_ratio"] = Quartiles(ratio.median, ratio.low, ratio.high)
                found[f"{prefix}load_average"] = {"before": times.load_before, "after": times.load_after}
                found[f"{prefix}timing_warnings"] = times.warnings
        return LatencyResult(**found)  # type: ignore[arg-type]
