"""What fitting took: time and peak memory, with the machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from quicksilver.files import write_atomically
from quicksilver.measure.memory import peak_memory

T = TypeVar("T")


@dataclass(frozen=True)
class FitCost:
    """Of one `quicksilver fit`, text and model loaded before.

    Attributes:
        layers: source layers that a map was fitted from. distill_steps: of each.
        tokens: of the text.
        seconds: wall clock; cpu_seconds: of this process, all threads.
        peak_bytes: of the process's resident memory meanwhile, model and libraries included.
        machine: processor, torch, threads.
    """

    model: str
    layers: list[int]
    distill_steps: int
    tokens: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    machine: str

    def line(self) -> str:
        distilled = f", {self.distill_steps} steps of distillation each" if self.distill_steps else ""
        return (
            f"{self.model}: {len(self.layers)} maps on {self.tokens:,} tokens{distilled}: {self.seconds:.1f} s "
            f"({self.cpu_seconds:.1f} s of processor time), peak memory {self.peak_bytes / 1e9:.2f} GB; {self.machine}"
        )

    def save(self, path: Path) -> None:
        """As JSON, in one rename."""
        write_atomically(path, (json.dumps(asdict(self), indent=1) + "\n").encode())


def priced(fit: Callable[[], T], *, model: str, layers: list[int], distill_steps: int, tokens: int) -> tuple[T, FitCost]:
    """What `fit` returns, and what it took."""
    from quicksilver.runtime.quantized.choosing import machine

    found: list[T] = []
    began, cpu_began = time.perf_counter(), time.process_time()
    peak = peak_memory(lambda: found.append(fit()))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    cost = FitCost(model, layers, distill_steps, tokens, round(seconds, 2), round(cpu_seconds, 2), peak.process_bytes, machine())
    return found[0], cost
