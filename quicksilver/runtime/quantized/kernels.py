"""Ways to apply a linear layer that differ in kernel and number format.

| name | weights | inputs | runs on |
|---|---|---|---|
| `float` | as they are | as they are | anything: the layer itself |
| `bfloat16` | bfloat16 | bfloat16 | anything; in a float32 model |
| `int_mm` | int8, a scale an output channel | int8, a scale a token | `torch._int_mm`, where it is exact |
| `qlinear` | the same | the same, unsigned | oneDNN, weights packed for it |
| `weight_only` | int8, a scale an output channel | as they are | CPU |
| `fbgemm` | int8, a scale an output channel | unsigned, a scale and an offset a call | fbgemm; one row alone |

fbgemm takes one scale for all rows of a call. With more rows than one the numbers of a token would depend on its batch mates and on later
tokens, so it is offered for one row only.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.errors import UnsupportedModelError
from quicksilver.runtime.quantized.integer import INT_MM, kernel_for, multiply
from quicksilver.runtime.quantized.linear import encode_weight

Product = Callable[[torch.Tensor], torch.Tensor]  # (R, K) -> (R, N), in the dtype of what it is given


class LinearKernel(ABC):
    """One way to apply a linear layer."""

    name: str

    def fits(self, weight: torch.Tensor, rows: int) -> bool:
        """Whether it can compute `rows` rows with a weight (N, K) of this dtype, shape and device."""
        return True

    @abstractmethod
    def prepare(self, linear: nn.Module) -> Product:
        """The product with this layer's weights, coded or packed once."""


def weight_of(linear: nn.Module) -> torch.Tensor:
    """The weight of a linear layer as (N, K).

    Raises:
        UnsupportedModelError: it is offloaded.
    """
    weight: torch.Tensor = linear.weight.detach()  # type: ignore[operator]
    if weight.is_meta:
        raise UnsupportedModelError("The weights of a linear layer are offloaded and cannot be coded: load the model whole.")
    return weight.T if isinstance(linear, Conv1D) else weight


class _Float(LinearKernel):
    name = "float"

    def prepare(self, linear: nn.Module) -> Product:
        return linear.forward


class _BFloat16(LinearKernel):
    name = "bfloat16"

    def fits(self, weight: torch.Tensor, rows: int) -> bool:
        return weight.dtype == torch.float32  # in a bfloat16 model it is what `float` is

    def prepare(self, linear: nn.Module) -> Product:
        weight = weight_of(linear).bfloat16().contiguous()
        bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]
        half = None if bias is None else bias.detach().bfloat16()
        return lambda x: nn.functional.linear(x.bfloat16(), weight, half).to(x.dtype)


def _coded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (R, K) as whole numbers from -127 to 127, still floats, and the scale of each row (R, 1)."""
    scale = x.abs().amax(-1, keepdim=True).div_(127).clamp_(min=torch.finfo(x.dtype).tiny)
    return (x / scale).round_(), scale


def _finished(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (product if bias is None else product.add_(bias)).to(dtype)


class _IntMM(LinearKernel):
    name = "int_mm"

    def fits(self, weight: torch.Tensor, rows: int) -> bool:
        return kernel_for(weight.device.type, *weight.shape) == INT_MM

    def prepare(self, linear: nn.Module) -> Product:
        code, channel_scale = encode_weight(weight_of(linear), 8)
        transposed = code.contiguous().T  # (K, N) with K contiguous
        bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]

        def product(x: torch.Tensor) -> torch.Tensor:
            rows, scale = _coded(x.to(channel_scale.dtype))
            out = multiply(rows.to(torch.int8), transposed).to(channel_scale.dtype)
            return _finished(out.mul_(scale).mul_(channel_scale), bias, x.dtype)

        return product


class _QLinear(LinearKernel):
    name = "qlinear"

    def fits(self, weight: torch.Tensor, rows: int) -> bool:
        return (
            weight.device.type == "cpu"
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.onednn, "qlinear_pointwise")
        )

    def prepare(self, linear: nn.Module) -> Product:
        code, channel_scale = encode_weight(weight_of(linear), 8)
        packed = torch.ops.onednn.qlinear_prepack(code.contiguous(), None)
        zeros = torch.zeros(len(channel_scale), dtype=torch.int64)
        scales = channel_scale.float()
        bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]

        def product(x: torch.Tensor) -> torch.Tensor:
            rows, scale = _coded(x.float())
            # Unsigned on purpose: with signed inputs this operator runs a reference loop, 3000 times slower (torch 2.13).
            out = torch.ops.onednn.qlinear_pointwise(
                rows.add_(128).to(torch.uint8), 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )
            return _finished(out.mul_(scale), bias, x.dtype)

        return product


class _WeightOnly(LinearKernel):
    name = "weight_only"

    def fits(self, weight: torch.Tensor, rows: int) -> bool:
        return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)

    def prepare(self, linear: nn.Module) -> Product:
        weight = weight_of(linear)
        code, channel_scale = encode_weight(weight, 8)
        code, scales = code.contiguous(), channel_scale.to(weight.dtype)
        bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]
        return lambda x: _finished(torch._weight_int8pack_mm(x.contiguous(), code, scales), bias, x.dtype)


class _FBGemm(LinearKernel):
    name = "fbgemm"

    def fits(self, weight: torch.Tensor, rows: int) -> bool:
        return rows == 1 and weight.device.type == "cpu" and "x86" in torch.backends.quantized.supported_engines

    def prepare(self, linear: nn.Module) -> Product:
        code, channel_scale = encode_weight(weight_of(linear), 8)
        zeros = torch.zeros(len(channel_scale), dtype=torch.int64)
        bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]
        engine = torch.backends.quantized.engine
        try:
            torch.backends.quantized.engine = "x86"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch deprecates the tensors that this operator still takes its weights in
                coded = torch._make_per_channel_quantized_tensor(code.contiguous(), channel_scale.double(), zeros, 0)
                packed = torch.ops.quantized.linear_prepack(coded, None if bias is None else bias.detach().float())
        finally:
            torch.backends.quantized.engine = engine
        return lambda x: torch.ops.quantized.linear_dynamic(x.float(), packed).to(x.dtype)


KERNELS: dict[str, LinearKernel] = {
    kernel.name: kernel for kernel in (_Float(), _BFloat16(), _IntMM(), _QLinear(), _WeightOnly(), _FBGemm())
}
