"""Which kernel and number format each product of a linear layer gets on this machine: measured, in a few seconds.

A kernel that is wrong on this machine is no candidate (proving.py). A choice is made for each kind of product: rows (in three classes), width, channels and dtype. The layer as it is stands among the
candidates, and another one must be faster than it by a margin.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.quantized.kernels import KERNELS, LinearKernel, Product, weight_of
from quicksilver.runtime.quantized.proving import instruction_set, processor

ROWS = (1, 16, 256)  # what is measured; for one row, up to 64, and more
BUDGET_S = 1.0
LEAST_ROUNDS = 3
MARGIN = 0.05  # a kernel must be so much faster than the layer as it is
COPIES = 8  # layers that one row goes round, so that weights come from memory as they do when a model decodes
COPIES_BYTES = 2**26  # of int8 weights, which is enough for that: more than a cache holds
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
    """What a measurement holds for: processor and instructions, torch, threads."""
    return f"{processor()}, {instruction_set()}, torch {torch.__version__}, {torch.get_num_threads()} threads"


@torch.no_grad()
def choose(
    linears: Sequence[nn.Module],
    *,
    kernels: Mapping[str, LinearKernel] = KERNELS,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Choices:
    """Time the candidates of each kind of product that `linears` have, in turns, and take the fastest.

    Weights are coded and packed once for all numbers of rows; that is not in the budget. With gpt2-large's layers it takes a few seconds.

    Args:
        budget_s: of all rounds together, shared by the kinds; each gets at least `LEAST_ROUNDS`.
        clock: seconds.
    """
    by_shape: dict[tuple[int, ...], list[nn.Module]] = {}
    for linear in linears:
        by_shape.setdefault(tuple(weight_of(linear).shape), []).append(linear)
    slice_s = budget_s / max(1, len(by_shape) * len(ROWS))
    by_kind, speedup = {}, {}
    for alike in by_shape.values():
        weight = weight_of(alike[0])
        copies = alike[: max(1, min(COPIES, -(-COPIES_BYTES // weight.numel())))]
        prepared: dict[str, list[Product]] = {}
        for rows in reversed(ROWS):
            fitting = {name: kernel for name, kernel in kernels.items() if name == AS_IT_IS or kernel.fits(weight, rows)}
            for name, kernel in fitting.items():
                there = prepared.setdefault(name, [])
                there += [kernel.prepare(linear) for linear in (copies if rows == 1 else copies[:1])[len(there) :]]
            kind = Kind.of(weight, rows)
            times = _times({name: prepared[name] for name in fitting}, weight, rows, slice_s, clock)
            fastest = min(times, key=lambda name: times[name])
            gain = times[AS_IT_IS] / times[fastest] if times[fastest] > 0 else 1.0
            by_kind[str(kind)] = fastest if gain > 1 + MARGIN else AS_IT_IS
            speedup[str(kind)] = gain if gain > 1 + MARGIN else 1.0
    return Choices(by_kind, speedup)


def _times(
    prepared: Mapping[str, Sequence[Product]], weight: torch.Tensor, rows: int, slice_s: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of one product (rows, K) · weight (N, K) by kernel, in rounds of all until `slice_s` are over."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight)
    for products in prepared.values():
        products[0](x)  # what is only paid once
    began = clock()
    samples: dict[str, list[float]] = {name: [] for name in prepared}
    while len(samples[AS_IT_IS]) < LEAST_ROUNDS or (clock() - began < slice_s and len(samples[AS_IT_IS]) < 50):
        for name, products in prepared.items():
            start = clock()
            for product in products:
                product(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            samples[name].append((clock() - start) / len(products))
    return {name: median(taken) for name, taken in samples.items()}
