"""Which kernel and number format each product of a linear layer gets on this machine: measured, in about a second.

A choice is made for each kind of product: rows (in three classes), width, channels and dtype. The layer as it is stands among the
candidates, and another one must be faster than it by a margin.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.quantized.kernels import KERNELS, LinearKernel, Product, weight_of

ROWS = (1, 16, 256)  # what is measured; for one row, up to 64, and more
BUDGET_S = 1.0
MARGIN = 0.05  # a kernel must be so much faster than the layer as it is
COPIES = 8  # layers that one row goes round, so that weights come from memory as they do when a model decodes
AS_IT_IS = "float"


class Kind(NamedTuple):
    """Products that share a choice: x (rows, width) times weights (channels, width)."""

    rows: int
    width: int
    channels: int
    dtype: str

    @classmethod
    def of(cls, weight: torch.Tensor, rows: int) -> Kind:
        """weight: (channels, width); rows of any number."""
        return cls(rows_class(rows), weight.shape[1], weight.shape[0], str(weight.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.rows} x {self.width} x {self.channels} {self.dtype}"


def rows_class(rows: int) -> int:
    """Which of `ROWS` stands for so many rows."""
    return ROWS[0] if rows <= 1 else ROWS[1] if rows <= 64 else ROWS[2]


@dataclass(frozen=True)
class Choices:
    """What was chosen.

    Attributes:
        by_kind: name of the kernel by `str(Kind)`; what is not in it stays as it is.
        speedup: of what was chosen over the layer as it is, by `str(Kind)`.
    """

    by_kind: Mapping[str, str]
    speedup: Mapping[str, float]

    def of(self, kind: Kind) -> str:
        return self.by_kind.get(str(kind), AS_IT_IS)

    @cached_property
    def digest(self) -> str:
        """sha256 of what was chosen, times left out: what decides the numbers that are computed."""
        return hashlib.sha256(json.dumps(dict(self.by_kind), sort_keys=True).encode()).hexdigest()

    def line(self) -> str:
        """`int_mm: 256 x 192 x 768 float32 (1.8x); float: …`."""
        names: dict[str, list[str]] = {}
        for kind, name in self.by_kind.items():
            gain = f" ({self.speedup[kind]:.1f}x)" if name != AS_IT_IS and kind in self.speedup else ""
            names.setdefault(name, []).append(kind + gain)
        return "; ".join(f"{name}: {', '.join(kinds)}" for name, kinds in sorted(names.items()))


class ChoosesKernels(ABC):
    """A module that may compute by kernels which a measurement on the machine has chosen.

    Attributes:
        choices: what was measured; None: the module measures by itself when it is applied.
    """

    choices: Choices | None

    @property
    @abstractmethod
    def measures(self) -> bool:
        """Whether what it computes depends on `choices`."""


def linears_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The linear layers of decoder layers."""
    return [module for layer in layers for module in layer.modules() if isinstance(module, (nn.Linear, Conv1D))]


def machine() -> str:
    """What a measurement holds for: processor, torch, threads."""
    return f"{processor()}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def processor() -> str:
    """What the system calls its processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@torch.no_grad()
def choose(
    linears: Sequence[nn.Module],
    *,
    kernels: Mapping[str, LinearKernel] = KERNELS,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Choices:
    """Time the candidates of each kind of product that `linears` have, in turns, and take the fastest.

    What the budget does not reach stays as it is. The order of kinds is that of their rows, many rows first: a prompt is most of the work.

    Args:
        budget_s: of all together, coding and packing of weights included; the kind that is being measured is finished.
        clock: seconds.
    """
    by_shape: dict[tuple[int, ...], list[nn.Module]] = {}
    for linear in linears:
        by_shape.setdefault(tuple(weight_of(linear).shape), []).append(linear)
    began = clock()
    kinds = [(rows, alike) for rows in reversed(ROWS) for alike in by_shape.values()]
    by_kind, speedup = {}, {}
    for index, (rows, alike) in enumerate(kinds):
        kind = Kind.of(weight_of(alike[0]), rows)
        left_s = budget_s - (clock() - began)
        if left_s <= 0:
            by_kind[str(kind)] = AS_IT_IS
            continue
        times = _times(alike[: COPIES if rows == 1 else 1], rows, kernels, left_s / (len(kinds) - index), clock)
        fastest = min(times, key=lambda name: times[name])
        gain = times[AS_IT_IS] / times[fastest] if times[fastest] > 0 else 1.0
        by_kind[str(kind)] = fastest if gain > 1 + MARGIN else AS_IT_IS
        speedup[str(kind)] = gain if gain > 1 + MARGIN else 1.0
    return Choices(by_kind, speedup)


def _times(
    linears: Sequence[nn.Module], rows: int, kernels: Mapping[str, LinearKernel], slice_s: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of one product by kernel, in rounds of all until `slice_s` are over, at least one."""
    began = clock()
    weight = weight_of(linears[0])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight)
    prepared: dict[str, list[Product]] = {}
    for name, kernel in kernels.items():
        if name == AS_IT_IS or kernel.fits(weight, rows):
            prepared[name] = [kernel.prepare(linear) for linear in linears]
            prepared[name][0](x)  # what is only paid once
    samples: dict[str, list[float]] = {name: [] for name in prepared}
    while not samples[AS_IT_IS] or (clock() - began < slice_s and len(samples[AS_IT_IS]) < 50):
        for name, products in prepared.items():
            start = clock()
            for product in products:
                product(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            samples[name].append((clock() - start) / len(products))
    return {name: median(taken) for name, taken in samples.items()}
