"""Dynamic int8 quantization of all linear layers, the same for every token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.modules.checks import check_choice
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError, UnsupportedModelError
from quicksilver.runtime.module import Transform
from quicksilver.runtime.quantized.integer import INT_MM, kernel_for, multiply
from quicksilver.runtime.quantized.linear import encode_weight

BACKENDS = ("torch", "torchao")


@dataclass(kw_only=True)
class Int8Dynamic(Transform):
    """The linear layers of all decoder layers multiply integers: 8-bit weights, and inputs quantised as they come. Causal.

    Source: "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale" (Dettmers et al., arXiv 2208.07339) has one scale a
    token and one an output channel; as a recipe it is torchao's `Int8DynamicActivationInt8WeightConfig`.

    What differs: LLM.int8() keeps outlier dimensions in 16 bits, this (like torchao's recipe) does not. Symmetric codes, one scale
    a token for inputs and one an output channel for weights; embeddings, norms and output head stay as they are.

    Args:
        backend: `torch`: products by `torch._int_mm`. `torchao`: torchao's own recipe and tensor types, where it is installed.

    Raises:
        ConfigError: an unknown backend; `torchao` without torchao; by `apply`, a device without an exact integer product.
        UnsupportedModelError: weights that are offloaded.
    """

    backend: Literal["torch", "torchao"] = "torch"

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        if self.backend == "torchao":
            _torchao()

    @contextmanager
    def applied(self, architecture: Architecture) -> Iterator[None]:
        replaced: list[tuple[nn.Module, str, nn.Module]] = []
        make = _IntegerLinear if self.backend == "torch" else _TorchaoLinear
        try:
            for layer in architecture.layers:
                for parent in list(layer.modules()):
                    for name, child in list(parent.named_children()):
                        if isinstance(child, (nn.Linear, Conv1D)):
                            quantised = make(child)
                            replaced.append((parent, name, child))
                            setattr(parent, name, quantised)
            yield
        finally:
            for parent, name, child in reversed(replaced):
                setattr(parent, name, child)


class _IntegerLinear(nn.Module):
    """A linear layer on int8 codes: x ≈ scale · code by token, weight ≈ scale · code by output channel.

    `weight` and `bias` stay those of the layer it stands for: a module that projects K/V alone multiplies by slices of them.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        weight = _of(linear)
        if kernel_for(weight.device.type, *weight.shape) != INT_MM:
            raise ConfigError(
                f"int8_dynamic: {weight.device.type} has no exact int8 matrix product for weights of {tuple(weight.shape)}. "
                "Measure it on another machine, or see what the widths do to quality with modules=[adaptive_quantization_uniform8]."
            )
        code, self.scale = encode_weight(weight, 8)
        self.code = code.contiguous().T  # (K, N) with K contiguous
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(self.scale.dtype)
        scale = rows.abs().amax(-1, keepdim=True).div_(127).clamp_(min=torch.finfo(rows.dtype).tiny)
        code = (rows / scale).round_().to(torch.int8)
        product = multiply(code, self.code).to(scale.dtype).mul_(scale).mul_(self.scale)
        if self.bias is not None:
            product += self.bias  # type: ignore[arg-type]
        return product.to(x.dtype).view(*x.shape[:-1], product.shape[-1])


def _of(linear: nn.Module) -> torch.Tensor:
    """The weight of a linear layer as (N, K)."""
    weight: torch.Tensor = linear.weight.detach()  # type: ignore[operator]
    if weight.is_meta:
        raise UnsupportedModelError("The weights of a linear layer are offloaded and cannot be quantised: load the model whole.")
    return weight.T if isinstance(linear, Conv1D) else weight


class _TorchaoLinear(nn.Module):
    """The same by torchao; `weight` and `bias` as in `_IntegerLinear`."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        quantize_, recipe = _torchao()
        weight = _of(linear)
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
