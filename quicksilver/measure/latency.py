"""Wall clock: two or more callables timed in turns, so that a slow minute of the machine hits all of them alike.

Latency is measured in a pass of its own: no trace, no quality, no FLOP counting (docs/conflicts.md #27).
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import statistics
import sys
import time
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING, Annotated, Any

from quicksilver.measure.measurement import Measurement, Quartiles, Result, Spread
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.options import Count, at_least

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from quicksilver.measure.bench import Bench

LOUD = 10  # percent; a clock with more noise than this does not tell the methods apart
MIN_REPEATS = 3  # two points have a difference, not a spread
BUSY = 0.5  # load average beyond what threads of our own explain
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
CLOCK_GAP_S = 0.1  # and a thousandth of the time that passed: more than a clock is adjusted by while it runs

Step = Callable[[], object]
Rounds = Annotated[int, at_least(MIN_REPEATS)]


def _quartiles(values: Sequence[float]) -> Quartiles:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(middle, low, high)


@dataclass(frozen=True)
class LatencySamples:
    """Times of one callable in milliseconds, in the order they were taken, warm-up excluded."""

    ms: list[float]

    @property
    def median(self) -> float:
        """Median in milliseconds."""
        return _quartiles(self.ms).median

    @property
    def iqr(self) -> float:
        """Interquartile range in milliseconds: the spread printed beside the median."""
        found = _quartiles(self.ms)
        return found.high - found.low


@dataclass
class Alternation(UserDict[str, LatencySamples]):
    """What `alternate` measured: samples by name, and what is needed to judge them.

    Attributes:
        control_ms: of the first callable, where it ends every round as well.
        load_before, load_after: 1-minute load average of the machine; on a quiet one `load_before` is near 0.
        seconds: how long the timed rounds took by the clock that timed them.
        clock_gap_s: how much more (or less) passed meanwhile by the clock on the wall: a machine that slept, a clock that was set.
    """

    data: dict[str, LatencySamples]
    control_ms: Sequence[float] = ()
    load_before: float = 0.0
    load_after: float = 0.0
    seconds: float = 0.0
    clock_gap_s: float = 0.0

    @property
    def warnings(self) -> list[str]:
        """Why these times may be worth less than they look, one sentence a reason; empty on a quiet machine."""
        import torch

        found = []
        threads = torch.get_num_threads()  # a pass of ours just before keeps its own threads in the average
        if self.load_before > threads + BUSY:
            busy = f"load average {self.load_before:.1f} before timing, where threads of this process explain {threads}"
            found.append(f"{busy}: something else runs on this machine")
        if abs(self.clock_gap_s) > CLOCK_GAP_S + 1e-3 * self.seconds:
            found.append(f"the clock jumped by {self.clock_gap_s:+.1f} s while timing: the machine slept, or its clock was set")
        return found

    @property
    def noise_floor(self) -> float | None:
        """How far one and the same callable is from itself (A/A), round by round: the farther quartile of the ratios, from 1.

        An effect smaller than this is noise. The medians alone would not do: those of two noisy series may agree by chance.
        """
        if not self.control_ms:
            return None
        first = next(iter(self.values()))
        found = _quartiles([b / a for a, b in zip(first.ms, self.control_ms, strict=True)])
        return max(abs(found.low - 1.0), abs(found.high - 1.0))

    @property
    def noise_floor_pct(self) -> float:
        """The same in percent, 0 without a control."""
        return 100 * (self.noise_floor or 0.0)

    def ratio(self, name: str, to: str) -> Quartiles:
        """Time of `name` over time of `to`, round by round: two neighbours in time are slowed by the same other load."""
        return _quartiles([a / b for a, b in zip(self[name].ms, self[to].ms, strict=True)])


@contextmanager
def gc_paused(generation: int = 1) -> Iterator[None]:
    """Garbage up to this generation is collected before, and none within: a collection takes tens of milliseconds, and frees memory."""
    enabled = gc.isenabled()
    gc.collect(generation)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """glibc keeps what is freed within, as CUDA's allocator does. Otherwise it gives pages back between layers and takes them anew: up to
    a fifth of a prompt's time, more in one process than in the next."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
        yield
        return
    try:
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(option, 2**31 - 1)
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # as high as glibc's own thresholds grow
        libc.mallopt(M_TRIM_THRESHOLD, 64 * 2**20)
        libc.malloc_trim(0)


def _times_ms(name: str, steps: Sequence[Step], device: torch.device, clock: Callable[[], float]) -> list[float]:
    """Milliseconds from the beginning of the first step to the end of each, one after another without a pause."""
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
        each = [before.elapsed_time(after) for before, after in pairwise(marks)]
    else:
        moments = [clock()]
        for step in steps:
            step()
            moments.append(clock())
        each = [(after - before) * 1e3 for before, after in pairwise(moments)]
    if min(each) <= 0:
        raise QuickSilverError(f"{name}: the clock stood still or ran backwards while it was timed; there is no time to report.")
    return list(accumulate(each))


def shared_weight_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under module objects of their own: stays plain while `model` is under `apply`, so the two can take turns."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def alternate(
    fns: Mapping[str, Step], warmup: int = 2, repeats: int = 5, device: str | torch.device = "cpu", *, control: bool = True
) -> Alternation:
    """Time callables in turns: A B A B …, in the mapping's order; each call is one sample.

    Args:
        warmup: rounds that are run and thrown away (first-touch memory, kernel selection).
        repeats: timed rounds, at least 3.
        device: a CUDA device is timed by its own events, everything else by `time.perf_counter`.
        control: let the first callable end every round too, for `Alternation.noise_floor`. The call that ends a round begins the next.

    Raises:
        ConfigError: nothing to time, fewer than 3 repeats, a negative warm-up.
        QuickSilverError: a time that is not positive: the clock cannot be trusted.
    """
    return alternate_steps({name: [fn] for name, fn in fns.items()}, warmup, repeats, device, control=control)[-1]


@freed_memory_kept()
def alternate_steps(
    fns: Mapping[str, Sequence[Step]],
    warmup: int = 2,
    repeats: int = 5,
    device: str | torch.device = "cpu",
    *,
    control: bool = True,
    clock: Callable[[], float] | None = None,
) -> list[Alternation]:
    """As `alternate`, of work in equally many steps that follow one another, such as a prompt and what is decoded after it.
    `clock` gives seconds where the device has no events of its own; None: `time.perf_counter`.

    Gives one alternation for each step: from the first step's beginning to the end of that step.
    """
    import torch

    if not fns:
        raise ConfigError("alternate() got nothing to time: pass at least one callable")
    if repeats < MIN_REPEATS:
        raise ConfigError(f"repeats={repeats} gives no interval: time at least {MIN_REPEATS} rounds")
    if warmup < 0:
        raise ConfigError(f"warmup={warmup} is negative: 0 or more untimed rounds")
    device, first, clock = torch.device(device), next(iter(fns)), clock or time.perf_counter
    load_before = os.getloadavg()[0]
    for _ in range(warmup):
        for steps in fns.values():
            for step in steps:
                step()
    times: dict[str, list[list[float]]] = {name: [] for name in fns}  # by round, by step
    again: list[list[float]] = []
    began, began_on_wall = time.perf_counter(), time.time()
    for _ in range(repeats):
        with gc_paused():
            for name, steps in fns.items():
                ended_with = again[-1:] if name == first else []
                times[name].append(*ended_with or [_times_ms(name, steps, device, clock)])
            if control:
                again.append(_times_ms(first, fns[first], device, clock))
    seconds, on_wall = time.perf_counter() - began, time.time() - began_on_wall
    around = (load_before, os.getloadavg()[0], seconds, on_wall - seconds)
    by_step = [
        {name: LatencySamples([ends[n] for ends in rounds]) for name, rounds in times.items()} for n in range(len(fns[first]))
    ]
    return [Alternation(one, [ends[n] for ends in again], *around) for n, one in enumerate(by_step)]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the run and of the dense model, their ratio round by round, and the noise floor (A/A) of that in percent."""

    run_ms: Spread
    dense_ms: Spread
    ratio: Quartiles
    noise_floor_pct: float


@dataclass(frozen=True)
class LatencyResult(Result, section=""):
    """Wall clock of one batch, run and dense in turns; `prompt_…` of its prompt alone, under `continuation`.

    Attributes:
        latency_ratio: time of the run over that of the dense model, round by round.
        noise_floor_pct: how far the dense model is from itself (A/A), in percent: a difference that is no larger is none.
        load_average: of the machine, `before` and `after`.
        timing_warnings: why these times may be worth less than they look.
    """

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
        of = "prompt_" if prompt else ""
        names = (f"{of}latency_ms", f"dense_{of}latency_ms", f"{of}latency_ratio", f"{of}noise_floor_pct")
        values = [getattr(self, name) for name in names]
        return None if None in values else Timing(*values)

    def line(self) -> str:
        """The time saved: of the prompt where there is one, then of the whole batch."""
        both = {" of the prompt's": self.timing(prompt=True), " of the batch's": self.timing()}
        there = {of: one for of, one in both.items() if one is not None}
        said = (time_saved(one.ratio, one.noise_floor_pct, of if len(there) > 1 else "") for of, one in there.items())
        return f"\n{' ' * 15}".join(said)


def time_saved(ratio: Quartiles, noise_floor_pct: float, of: str) -> str:
    """`12.0% of the prompt's time saved (quartiles …; noise …)`, of a ratio to dense time; within the noise floor nothing is said to be saved."""
    saved, low, high = (100 * (1 - value) for value in (ratio.median, ratio.high, ratio.low))
    if abs(saved) <= noise_floor_pct:
        if noise_floor_pct > LOUD:
            return f"{saved:.1f}%{of} time saved, not to be told from 0: the noise of the clock is {noise_floor_pct:.1f}%"
        return f"≈ 0{of} time saved: {saved:.1f}% is within the noise of the clock ({noise_floor_pct:.1f}%)"
    return (
        f"{saved:.1f}%{of} time saved ({'slower; ' * (saved < 0)}quartiles {low:.1f} to {high:.1f}; noise {noise_floor_pct:.1f}%)"
    )


@dataclass
class InTurns(Measurement, share=0.18, timed=True):
    """Rounds in which the run and the dense model take turns.

    Args:
        warmup: untimed rounds.
        repeats: timed rounds, at least 3.
    """

    warmup: Count = 1
    repeats: Rounds = 3


@dataclass
class Latency(InTurns):
    """Time one batch."""

    def run(self, bench: Bench) -> LatencyResult:
        from quicksilver.measure.perplexity import calls

        dense, batch, protocol = shared_weight_copy(bench.model), bench.batch, bench.protocol
        prefixes = ("prompt_", "") if protocol.name == "continuation" else ("",)
        rounds = self.warmup + self.repeats + 1  # passes of the dense model, which begins and ends every round
        done = count(1)
        found: dict[str, Any] = {}
        with bench.apply() as run:
            run.count_decisions(False)
            steps = {
                "dense": calls(dense, batch, protocol, before=lambda: bench.progress(min(1.0, next(done) / rounds))),
                "run": calls(bench.model, batch, protocol, before=run.reset),  # or the traces of all rounds pile up
            }
            each = alternate_steps(steps, self.warmup, self.repeats, bench.model.device)
        for prefix, times in zip(prefixes, each, strict=True):
            ours, theirs = (Spread(times[name].median, times[name].iqr, times[name].ms) for name in ("run", "dense"))
            found |= {
                f"{prefix}latency_ms": ours,
                f"dense_{prefix}latency_ms": theirs,
                f"{prefix}latency_ratio": times.ratio("run", to="dense"),
                f"{prefix}noise_floor_pct": times.noise_floor_pct,
                f"{prefix}load_average": {"before": times.load_before, "after": times.load_after},
                f"{prefix}timing_warnings": times.warnings,
            }
        return LatencyResult(**found)


@dataclass(frozen=True)
class DevicesResult(Result):
    """One batch in every process at once. Lists have one entry a process, in the order of their ranks.

    Attributes:
        processes: that torchrun started; `replicas` of the model, each of which makes a pass over a batch of `tokens`.
        tokens_per_s: of all replicas together, by the slowest process; `dense_tokens_per_s` of the dense model in turns with it.
        ms_by_rank, dense_ms_by_rank: medians by the clock of each process, from a common start.
        peak_memory_bytes_by_rank: of the device of each process, or of the process on a CPU.
        timing_warnings: why these times may be worth less than they look.
    """

    processes: int
    replicas: int
    tokens: int
    tokens_per_s: float
    dense_tokens_per_s: float
    ms_by_rank: list[float]
    dense_ms_by_rank: list[float]
    peak_memory_bytes_by_rank: list[int]
    timing_warnings: list[str]

    def line(self) -> str:
        most = max(self.peak_memory_bytes_by_rank) / 2**30
        how = f"{self.replicas} × {self.processes // self.replicas} processes (replicas × parts of a model)"
        return f"{self.tokens_per_s:.4g} tokens a second, dense {self.dense_tokens_per_s:.4g}, by {how}, at most {most:.2f} GiB"


@dataclass
class Devices(InTurns, of_ranks=True):
    """Time one batch in every process that torchrun started; all begin each pass together."""

    def run(self, bench: Bench) -> DevicesResult:
        from torch import distributed

        from quicksilver.measure.memory import peak_memory
        from quicksilver.models import parallel
        from quicksilver.runtime.placement import ranks_of

        together: Step = distributed.barrier if parallel.processes() > 1 else lambda: None
        with bench.sides() as sides:
            steps = {name: [together, side.forward] for name, side in sides.items()}
            begun, ended = alternate_steps(steps, self.warmup, self.repeats, bench.model.device, control=False)
            peak = peak_memory(list(sides.values())[-1].forward, bench.model.device).bytes
            last = len(bench.batch) * (bench.protocol.name == "continuation")  # of each window, which no pass is given
            tokens, run = bench.batch.numel() - last, list(sides)[-1]
        ms = {name: [end - start for start, end in zip(begun[name].ms, ended[name].ms, strict=True)] for name in sides}
        every = parallel.gathered(({name: statistics.median(taken) for name, taken in ms.items()}, peak, ended.warnings))
        ours, dense = ([medians[name] for medians, _, _ in every] for name in (run, "dense"))
        replicas = len(every) // ranks_of(bench.model).size
        per_s, dense_per_s = (1e3 * replicas * tokens / max(taken) for taken in (ours, dense))
        said = list(dict.fromkeys(warning for _, _, found in every for warning in found))
        return DevicesResult(len(every), replicas, tokens, per_s, dense_per_s, ours, dense, [peak for _, peak, _ in every], said)
