"""Peak memory of a callable: of the process, and of the GPU where there is one. A pass of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
SAMPLING_INTERVAL_S = 0.002


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory while a callable ran.

    Attributes:
        process_bytes: peak resident memory of the process, weights and libraries included.
        before_bytes: resident memory just before, so `process_bytes - before_bytes` is what the callable added.
        device_bytes: peak of the CUDA allocator (`torch.cuda.max_memory_allocated`, as App. J); None on a CPU.
        method: `kernel`: the high-water mark that Linux keeps, exact up to the few pages a thread may hold back.
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
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark_bytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _peak_by_sampling(fn: Callable[[], object]) -> int:
    process = psutil.Process()
    peak = process.memory_info().rss
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(SAMPLING_INTERVAL_S):
            peak = max(peak, process.memory_info().rss)

    sampler = threading.Thread(target=sample, name="peak-memory", daemon=True)
    sampler.start()
    try:
        fn()
    finally:
        done.set()
        sampler.join()
    return max(peak, process.memory_info().rss)


def peak_memory(fn: Callable[[], object], device: str | torch.device = "cpu") -> PeakMemory:
    """Run `fn` once and report the peak memory while it ran.

    Args:
        fn: the callable; run it once before for a peak without one-time allocations.
        device: a CUDA device adds the allocator's peak on it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before_bytes = psutil.Process().memory_info().rss
    if _reset_high_water_mark():
        fn()
        method: Literal["kernel", "sampling"] = "kernel"
        process_bytes = _high_water_mark_bytes()
    else:
        process_bytes = _peak_by_sampling(fn)
        method = "sampling"
    device_bytes = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        device_bytes = torch.cuda.max_memory_allocated(device)
    return PeakMemory(process_bytes, before_bytes, device_bytes, method)
