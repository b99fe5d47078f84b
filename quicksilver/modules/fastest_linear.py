"""Every linear layer by the kernel and in the number format that are fastest on this machine, or by a named one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import KernelError
from quicksilver.runtime.module import NumberFormat, Transform
from quicksilver.runtime.options import check_choice
from quicksilver.runtime.quantized.kernels import (
    KERNELS,
    Choices,
    ChoosesKernels,
    Kind,
    Product,
    choose,
    linears_of,
    machine,
    rows_class,
    weight_of,
)
from quicksilver.runtime.quantized.proving import instruction_set, processor

AUTO = "auto"
_MEASURED: dict[tuple[str, tuple[str, ...]], Choices] = {}  # in this process, by machine and kinds of products


@dataclass(kw_only=True)
class FastestLinear(Transform, ChoosesKernels):
    """The linear layers of all decoder layers are computed by one kernel, or each product by the fastest on this machine. Causal.

    Which int8 product is fastest, and whether any beats the float one, is a property of the processor and of the shape: on one,
    `torch._int_mm` is half as fast as oneDNN's qlinear; on another int8 is slower than bfloat16; for one row weight-only formats win.
    `auto` measures it in a few seconds (`runtime.quantized.choosing`); the layer as it is stands among the candidates. Under the
    harness a measurement is kept in the results folder for the machine, and what was chosen is part of the run's identity: the formats
    round differently, so records of machines that choose differently are different records.

    What differs from `int8_dynamic`: with `auto` the number format depends on how many rows a product has, so a sequence alone and in a
    batch, or a prompt and a decoded token, may be rounded differently.

    Args:
        product: `auto`, or the name of a kernel of `runtime.quantized.kernels` for every product that it can compute; others stay as
            they are. No kernel is timed or used that is wrong on this processor.

    Attributes:
        choices: what was measured; None: `auto` measures when it is applied, once in a process.

    Raises:
        ConfigError: an unknown kernel.
        KernelError: by `apply`, a kernel that this machine lacks or computes wrongly.
    """

    product: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("product", self.product, (AUTO, *KERNELS))
        self.choices: Choices | None = None
        self._ran: dict[str, None] = {}

    @property
    def measures(self) -> bool:
        """Whether what is computed depends on a measurement."""
        return self.product == AUTO

    @property
    def kernel(self) -> str:
        return f"{'; '.join(self._ran)}; on {processor()} ({instruction_set()})" if self._ran else "not run yet"

    @property
    def number_format(self) -> NumberFormat:
        return {"float": "float32", "bfloat16": "bfloat16"}.get(self.product, "integer")  # type: ignore[return-value]

    @contextmanager
    def applied(self, architecture: Architecture) -> Iterator[None]:
        linears = linears_of(architecture.layers)
        pick = self._pick(linears)
        replaced: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for layer in architecture.layers:
                for parent in list(layer.modules()):
                    for name, child in list(parent.named_children()):
                        if isinstance(child, (nn.Linear, Conv1D)):
                            replaced.append((parent, name, child))
                            setattr(parent, name, _ChosenLinear(child, pick, self._ran))
            yield
        finally:
            for parent, name, child in reversed(replaced):
                setattr(parent, name, child)

    def _pick(self, linears: list[nn.Module]) -> Callable[[torch.Tensor, int], str]:
        """Which kernel computes so many rows with a weight (N, K)."""
        if self.measures:
            choices = self.choices or measured(linears)
            return lambda weight, rows: choices.of(Kind.of(weight, rows))
        named = KERNELS[self.product]
        refusals = [named.refusal(weight_of(linear), 1) for linear in linears]
        if None not in refusals:
            offered = [name for name, kernel in KERNELS.items() if kernel.fits(weight_of(linears[0]), 1)]
            raise KernelError(f"product={self.product!r}: {refusals[0]}.", f"Give product=auto, or one of {', '.join(offered)}.")
        return lambda weight, rows: self.product if named.fits(weight, rows) else "float"


def measured(linears: list[nn.Module]) -> Choices:
    """The choices for these layers, measured once in a process."""
    kinds = tuple(sorted({str(Kind.of(weight_of(linear), 1)) for linear in linears}))
    key = (machine(), kinds)
    if key not in _MEASURED:
        _MEASURED[key] = choose(linears)
    return _MEASURED[key]


class _ChosenLinear(nn.Module):
    """A linear layer that is applied by the kernel its number of rows asks for, prepared when first asked for.

    `weight` and `bias` stay those of the layer it stands for: a module that projects K/V alone multiplies by slices of them.
    """

    def __init__(self, linear: nn.Module, pick: Callable[[torch.Tensor, int], str], ran: dict[str, None]) -> None:
        super().__init__()
        self._pick, self._ran = pick, ran
        # Not registered: parameters of a module in a module would be found twice.
        vars(self)["_linear"] = linear
        self._by_name: dict[str, Product] = {}
        self._by_rows: dict[int, Product] = {}
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        product = self._by_rows.get(rows_class(len(rows)))
        out = (self._prepared(len(rows)) if product is None else product)(rows)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _prepared(self, rows: int) -> Product:
        linear: nn.Module = vars(self)["_linear"]
        weight = weight_of(linear)
        name = self._pick(weight, rows)
        if name not in self._by_name:
            self._by_name[name] = KERNELS[name].prepare(linear)
        self._ran[f"{name} for {Kind.of(weight, rows)}"] = None
        self._by_rows[rows_class(rows)] = self._by_name[name]
        return self._by_name[name]
