"""Peak memory of a callable, of the process and of its tensors, and what the KV cache holds by layer. Passes of their own."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quicksilver.measure.latency import gc_paused
from quicksilver.measure.measurement import Measurement, Result

if TYPE_CHECKING:
    import torch

    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.architecture import Architecture
    from quicksilver.runtime.module import RuntimeModule
    from quicksilver.runtime.run import KVBytes
    from quicksilver.runtime.trace import Trace

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
SAMPLING_INTERVAL_S = 0.002


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory while a callable ran.

    Attributes:
        process_bytes: peak resident memory of the process, weights and libraries included; `before_bytes` just before.
        device_bytes: peak of the CUDA allocator (`torch.cuda.max_memory_allocated`, as App. J); None on a CPU.
        method: `kernel`: the high-water mark that Linux keeps, exact up to the few pages a thread may hold back. Before it starts,
            pages that the C library keeps for later are given back: else whoever ran before would leave its peak to the next.
            `sampling`: a thread reads the resident size every 2 ms; a peak shorter than that can be missed.
    """

    process_bytes: int
    before_bytes: int
    device_bytes: int | None
    method: Literal["kernel", "sampling"]

    @property
    def bytes(self) -> int:
        """The peak where the model lives: on the GPU if there is one, else of the process."""
        return self.process_bytes if self.device_bytes is None else self.device_bytes


def _reset_high_water_mark() -> bool:
    # `getrusage().ru_maxrss` covers the whole life of the process and would report the loading of the model. Writing 5 to
    # clear_refs starts the kernel's mark afresh (proc(5)); other systems and some containers do not offer it.
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")
        return True
    return False


def _peak_by_sampling(fn: Callable[[], object], resident: Callable[[], int]) -> int:
    found, done = [resident()], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLING_INTERVAL_S):
            found.append(max(found.pop(), resident()))

    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(sample)
        try:
            fn()
        finally:
            done.set()
        sampling.result()
    return max(*found, resident())


def peak_memory(fn: Callable[[], object], device: str | torch.device = "cpu") -> PeakMemory:
    """The peak while `fn` runs once; a CUDA device adds its allocator's. Run it before for a peak without one-time allocations."""
    import psutil
    import torch

    def resident() -> int:
        return int(psutil.Process().memory_info().rss)

    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)  # glibc's; musl keeps no pages worth mentioning
    before_bytes, kernel = resident(), _reset_high_water_mark()
    if kernel:
        fn()
        process_bytes = 1024 * int(_STATUS.read_text().partition("\nVmHWM:")[2].split()[0])
    else:
        process_bytes = _peak_by_sampling(fn, resident)
    device_bytes = None
    if on_gpu:
        torch.cuda.synchronize(device)
        device_bytes = torch.cuda.max_memory_allocated(device)
    return PeakMemory(process_bytes, before_bytes, device_bytes, "kernel" if kernel else "sampling")


@contextmanager
def _no_remarks() -> Iterator[None]:
    """Standard error goes nowhere: the profiler remarks from C++ that it starts, stops, and sees older tensors freed."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_tensor_bytes(fn: Callable[[], object]) -> int:
    """Most bytes of CPU tensors at one moment of `fn`, above those there were before it: every allocation of torch's is counted.

    Exact and repeatable, but blind to what libraries below torch allocate for themselves. The process is neither: the C library
    keeps pages, so that the same call adds 16 MB once and 46 MB another time, where its tensors always take 37.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    # Tensors in garbage go first, and none within: their end would lower the peak.
    with _no_remarks(), gc_paused(2), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        fn()
    held = peak = 0
    assert profiled.profiler is not None
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def paper_kv_delta_bytes(trace: Trace, arch: Architecture, element_bytes: int) -> list[int]:
    """ΔM of App. J by layer: N_halted · d_kv · h · 2 values of `element_bytes`. A token that is halted or fused in a layer counts."""
    a_token = 2 * arch.n_kv_heads * arch.head_dim * element_bytes
    return [a_token * sum(int((p.valid & ~p.active(layer)).sum()) for p in trace.passes) for layer in range(trace.n_layers)]


@dataclass(frozen=True)
class KvBytesByLayer:
    """The KV cache of one batch by layer, in bytes; empty where there is none.

    Attributes:
        billed: what the policy pays for; `resident` what the tensors hold; `dense` what the dense model's hold.
        paper_saved: ΔM of App. J.
    """

    billed: list[int]
    resident: list[int]
    dense: list[int]
    paper_saved: list[int]


@dataclass(frozen=True)
class MemoryResult(Result, section=""):
    """Peaks of one batch, run and dense: of the process or of the GPU's allocator, and on a CPU of the tensors alone."""

    peak_memory_bytes: int
    dense_peak_memory_bytes: int
    peak_memory_method: str
    peak_tensor_bytes: int | None
    dense_peak_tensor_bytes: int | None
    kv_bytes_by_layer: KvBytesByLayer

    def line(self) -> str:
        ours, dense, what = self.peak_tensor_bytes, self.dense_peak_tensor_bytes, "tensors"
        if ours is None or dense is None:
            ours, dense, what = self.peak_memory_bytes, self.dense_peak_memory_bytes, self.peak_memory_method
        return f"peak {ours / 1e6:.1f} MB, dense {dense / 1e6:.1f} MB ({what} of one batch)"


@dataclass
class Memory(Measurement, share=0.05, windows_speak=True):
    """Weigh one batch, whose windows were scored before: what is allocated once is paid for. And its KV cache by layer."""

    def run(self, bench: Bench) -> MemoryResult:
        known = None if bench.dense is None else bench.dense.peak_tensor_bytes
        of_dense = _weighed(bench, (), known) if bench.modules else None
        peak, tensors, cache, saved = ours = _weighed(bench, bench.modules)
        dense_peak, dense_tensors, dense_cache, _ = of_dense or ours  # a dense run is its own
        if bench.dense is not None:
            bench.dense.peak_tensor_bytes = dense_tensors
        method = peak.method if peak.device_bytes is None else "cuda allocator"
        billed, resident = [layer.billed for layer in cache], [layer.resident for layer in cache]
        by_layer = KvBytesByLayer(billed, resident, [layer.resident for layer in dense_cache], saved)
        return MemoryResult(peak.bytes, dense_peak.bytes, method, tensors, dense_tensors, by_layer)


def _weighed(
    bench: Bench, modules: Sequence[RuntimeModule], tensor_bytes: int | None = None
) -> tuple[PeakMemory, int | None, list[KVBytes], list[int]]:
    """One batch under `modules`: its peak, that of its tensors (where it is known, `tensor_bytes`), its cache by layer, and what the paper says is
    saved of that."""
    from quicksilver.measure.bench import Side

    model = bench.model
    with bench.apply(modules=modules) as run:
        side = Side(model, bench.batch, bench.protocol, run)
        peak, cache = peak_memory(side.forward, model.device), run.kv_bytes_by_layer
        saved = paper_kv_delta_bytes(run.trace, run.arch, model.dtype.itemsize)
        run.reset()  # what the next pass would free was no allocation of its own
        if tensor_bytes is None and model.device.type == "cpu":
            tensor_bytes = peak_tensor_bytes(side.forward)  # exact, so that once is enough
    return peak, tensor_bytes, cache, saved
