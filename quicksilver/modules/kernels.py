"""Transforms that change how the model is computed and not what: attention in blocks, and linear layers by the fastest kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime import Architecture, Transform
from quicksilver.runtime.architecture import linears_of
from quicksilver.runtime.block_attention import attention_in_blocks
from quicksilver.runtime.errors import KernelError
from quicksilver.runtime.module import NumberFormat
from quicksilver.runtime.options import Positive, check_choice
from quicksilver.runtime.quantized.kernels import (
    KERNELS,
    Choices,
    ChoosesKernels,
    Kind,
    Product,
    choose,
    machine,
    rows_class,
    weight_of,
)
from quicksilver.runtime.quantized.proving import instruction_set, processor

AUTO = "auto"
_MEASURED: dict[tuple[str, tuple[str, ...]], Choices] = {}  # in this process, by machine and kinds of products


@dataclass(kw_only=True)
class BlockAttention(Transform):
    """Every layer attends in blocks of queries: two batched products a block and a softmax between them. Causal.

    For narrow heads on a CPU (table quicksilver); wider heads may be slower with it than with torch's fused kernel: measure. What differs: in
    bfloat16 scores are rounded before the softmax, where the fused kernel keeps them in float32. One new token alone is left to that kernel.

    Args:
        block: queries of a head that are computed at once. A causal block of them visits the keys up to its last query, so that larger
            blocks visit more pairs; the ledger counts them.
    """

    changes_weights: ClassVar[bool] = False

    block: Positive = 64

    def applied(self, architecture: Architecture) -> AbstractContextManager[None]:
        return attention_in_blocks(architecture, self.block)


class LinearStandIn(nn.Module):
    """A linear layer that is computed by `product`. `weight` and `bias` stay those of the layer it stands for: a module that projects K/V
    alone multiplies by slices of them."""

    def __init__(self, linear: nn.Module, product: Product) -> None:
        super().__init__()
        vars(self)["_product"] = product  # not registered: parameters of a module in a module would be found twice
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = vars(self)["_product"](x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[-1])


def exchange(stack: ExitStack, module: nn.Module, name: str, values: torch.Tensor) -> None:
    """Until the stack closes, `values` are the module's parameter of that name; a parameter is taken as it is, so that tied ones stay tied."""
    stack.callback(module._parameters.__setitem__, name, module._parameters.get(name))
    if not isinstance(values, nn.Parameter):
        values = nn.Parameter(values.detach().contiguous(), requires_grad=False)
    module._parameters[name] = values


@contextmanager
def replaced_linears(architecture: Architecture, product_of: Callable[[nn.Module], Product]) -> Iterator[None]:
    """For the length of the context the linear layers of all decoder layers are computed by other products."""
    with ExitStack() as stack:
        for parent in [module for layer in architecture.layers for module in layer.modules()]:
            for name, child in list(parent.named_children()):
                if isinstance(child, (nn.Linear, Conv1D)):
                    stand_in = LinearStandIn(child, product_of(child))
                    stack.callback(setattr, parent, name, child)
                    setattr(parent, name, stand_in)
        yield


@dataclass(kw_only=True)
class FastestLinear(Transform, ChoosesKernels):
    """The linear layers of all decoder layers are computed by one kernel, or each product by the fastest on this machine. Causal.

    Which int8 product is fastest, and whether any beats the float one, is a property of the processor and of the shape. `auto` measures it in
    a few seconds (`runtime.quantized.kernels.choose`); the layer as it is stands among the candidates. Under the harness a measurement is kept in the
    results folder for the machine, and what was chosen is part of the run's identity: the formats round differently.

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

    def applied(self, architecture: Architecture) -> AbstractContextManager[None]:
        pick = self._pick(linears_of(architecture.layers))
        return replaced_linears(architecture, lambda linear: self._by_rows(linear, pick))

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

    def _by_rows(self, linear: nn.Module, pick: Callable[[torch.Tensor, int], str]) -> Product:
        """The kernel that the number of rows asks for, prepared when first asked for."""
        prepared = cache(lambda name: KERNELS[name].prepare(linear))
        by_rows: dict[int, Product] = {}

        def product(rows: torch.Tensor) -> torch.Tensor:
            found = by_rows.get(rows_class(len(rows)))
            if found is None:
                weight = weight_of(linear)
                name = pick(weight, len(rows))
                self._ran[f"{name} for {Kind.of(weight, len(rows))}"] = None
                found = by_rows[rows_class(len(rows))] = prepared(name)
            return found(rows)

        return product


def measured(linears: list[nn.Module]) -> Choices:
    """The choices for these layers, measured once in a process."""
    key = (machine(), tuple(sorted({str(Kind.of(weight_of(linear), 1)) for linear in linears})))
    if key not in _MEASURED:
        _MEASURED[key] = choose(linears)
    return _MEASURED[key]
