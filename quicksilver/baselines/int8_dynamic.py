"""Dynamic int8 quantization of all linear layers, the same for every token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError, KernelError
from quicksilver.runtime.module import NumberFormat, Transform
from quicksilver.runtime.quantized.kernels import DYNAMIC_INT8, LinearKernel, weight_of
from quicksilver.runtime.quantized.linear import where_it_runs


@dataclass(kw_only=True)
class Int8Dynamic(Transform):
    """The linear layers of all decoder layers multiply integers: 8-bit weights, and inputs quantised as they come. Causal.

    Source: "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale" (Dettmers et al., arXiv 2208.07339) has one scale a
    token and one an output channel; as a recipe it is torchao's `Int8DynamicActivationInt8WeightConfig`.

    What differs: LLM.int8() keeps outlier dimensions in 16 bits, this (like torchao's recipe) does not. Symmetric codes, one scale
    a token for inputs and one an output channel for weights; embeddings, norms and output head stay as they are.

    Args:
        backend: `torch`: products by `torch._int_mm`. Where that is not exact, by what `torch.ao` quantizes dynamically with:
            fbgemm with inputs of 7 bits (`reduce_range`) on x86, QNNPACK on ARM; inputs have one scale a token all the same.
            `torchao`: torchao's own recipe and tensor types, where it is installed. `kernel` says which it was.

    Raises:
        ConfigError: an unknown backend; `torchao` without torchao.
        KernelError: by `apply`, no exact integer product on this machine.
        UnsupportedModelError: weights that are offloaded.
    """

    backend: Literal["torch", "torchao"] = "torch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "torchao":
            _torchao()
        self._ran: dict[str, None] = {}

    @property
    def kernel(self) -> str:
        return " and ".join(self._ran) or "not run yet"

    @property
    def number_format(self) -> NumberFormat:
        return "integer"

    @contextmanager
    def applied(self, architecture: Architecture) -> Iterator[None]:
        replaced: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for layer in architecture.layers:
                for parent in list(layer.modules()):
                    for name, child in list(parent.named_children()):
                        if isinstance(child, (nn.Linear, Conv1D)):
                            quantised = self._quantised(child)
                            replaced.append((parent, name, child))
                            setattr(parent, name, quantised)
            yield
        finally:
            for parent, name, child in reversed(replaced):
                setattr(parent, name, child)

    def _quantised(self, linear: nn.Module) -> nn.Module:
        weight = weight_of(linear)
        offered = DYNAMIC_INT8[:1] if self.backend == "torchao" else DYNAMIC_INT8  # torchao's recipe is on torch._int_mm
        refusals = []
        for kernel in offered:
            refusal = kernel.refusal(weight, 2)
            if refusal is None:
                by = f"torchao by {kernel.name}" if self.backend == "torchao" else kernel.name
                self._ran[f"{by} on {where_it_runs(weight.device.type)}"] = None
                return _TorchaoLinear(linear) if self.backend == "torchao" else _IntegerLinear(linear, kernel)
            refusals.append(refusal)
        raise KernelError(
            f"int8_dynamic: no exact int8 product here: {'; '.join(refusals)}.",
            "Measure it on another machine, or see what the widths do to quality with modules=[adaptive_quantization_uniform8].",
        )


class _IntegerLinear(nn.Module):
    """A linear layer on int8 codes: x ≈ scale · code by token, weight ≈ scale · code by output channel.

    `weight` and `bias` stay those of the layer it stands for: a module that projects K/V alone multiplies by slices of them.
    """

    def __init__(self, linear: nn.Module, kernel: LinearKernel) -> None:
        super().__init__()
        self._product = kernel.prepare(linear)
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x.reshape(-1, x.shape[-1]))
        return product.view(*x.shape[:-1], product.shape[-1])


class _TorchaoLinear(nn.Module):
    """The same by torchao; `weight` and `bias` as in `_IntegerLinear`."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        quantize_, recipe = _torchao()
        weight = weight_of(linear)
        shape = {"device": weight.device, "dtype": weight.dtype, "bias": linear.bias is not None}
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], **shape)  # type: ignore[arg-type]
        self.linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.linear.bias = linear.bias  # type: ignore[assignment]
        quantize_(self.linear, recipe())
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def _torchao() -> tuple:
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise ConfigError(
            f"int8_dynamic: backend='torchao' needs torchao, which cannot be imported ({error}): pip install 'quicksilver[peers]', "
            "or take backend='torch', the same recipe."
        ) from None
    return quantize_, Int8DynamicActivationInt8WeightConfig
