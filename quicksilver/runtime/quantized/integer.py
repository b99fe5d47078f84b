"""Linear layers whose quantised inputs meet quantised weights in integer products."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quicksilver.runtime.phases import phase
from quicksilver.runtime.quantized.codes import PIECE, UNTOUCHED, ByWidth, eight_bits, encode, exact_dtype, rows_a_piece, rows_of
from quicksilver.runtime.quantized.linear import LinearLayer, Part, SimulatedExecutor, encode_weight
from quicksilver.runtime.quantized.proving import INTEGER, instruction_set, wrong


class _IntegerInputs(NamedTuple):
    """Rows x (R, K) ≈ offset + scale · code, code (R, K) int8, scale and offset (R, 1); `dtype` is that of x."""

    code: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    dtype: torch.dtype

    @classmethod
    @phase("quantize")
    def of(cls, x: torch.Tensor, bits: int) -> _IntegerInputs:
        if bits < 8:
            codes = encode(x, bits, None)
            return cls(codes.code.view(torch.int8), codes.scale, codes.offset, x.dtype)
        if x.numel() > 2 * PIECE:
            return cls.join([cls.of(piece, bits) for piece in x.split(rows_a_piece(x))])
        # As `encode` has it, in fewer steps. 0 to 255 does not fit int8: moved down by half its range, and the offset up.
        code, step, offset, _ = eight_bits(x.to(exact_dtype(x.dtype)))
        return cls(code.sub_(128).to(torch.int8), step, offset.add(step, alpha=128), x.dtype)

    @classmethod
    def join(cls, parts: Sequence[_IntegerInputs]) -> _IntegerInputs:
        code, scale, offset = (torch.cat([part[i] for part in parts]) for i in range(3))  # type: ignore[misc]
        return cls(code, scale, offset, parts[0].dtype)


class _IntegerWeight(NamedTuple):
    """weight (N, K) ≈ scale · code; `channel_sum` (N,) is the sum of each channel's scaled codes.

    `code` is (K, N) with K contiguous: int8, or the same numbers as floats where the device has no product of integers.
    """

    code: torch.Tensor
    scale: torch.Tensor
    channel_sum: torch.Tensor
    bias: torch.Tensor


INT_MM, FLOAT_PRODUCT = "torch._int_mm", "float products of the codes"


class IntegerExecutor(SimulatedExecutor):
    """Integer products for quantised tokens, float ones for the rest; tokens gathered by width.

    Inputs have one scale and offset a token, weights one scale an output channel: (offset + scale · code) · W is one int8
    product, accumulated in int32, and three passes over its result. A 4- or 2-bit code is an int8 number, so all quantised tokens
    share the product (with `weights="token"` those of one width do). The weights' codes stay in memory beside the model.

    The product is `torch._int_mm`: oneDNN on CPU, cuBLASLt on CUDA. Of what `scripts/benchmark.py quantization` compares, oneDNN's
    qlinear is by the number of rows slower or faster for many, but wants the weights packed a second time; fbgemm codes a whole
    batch with one scale or goes through tensor types that torch has deprecated. For one token all of them wait for the weights.
    Where `_int_mm` is missing or inexact the codes are multiplied as floats: one warning, and `kernel` says so.
    """

    _warned = False

    def forget(self) -> None:
        super().forget()
        # An ordered set. It outlives the coded weights: a record asks what ran after the last context has closed.
        self._ran: dict[str, None] = getattr(self, "_ran", {})

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return " and ".join(self._ran) or "not run yet"

    def _parts(self, x: torch.Tensor, by_width: ByWidth) -> list[Part]:
        parts, coded = [], []
        for width, rows in by_width.rows.items():
            if width == UNTOUCHED:
                parts.append(Part(rows, rows_of(x, rows), UNTOUCHED))
            elif self.weights == "token" or rows is None:
                parts.append(Part(rows, _IntegerInputs.of(rows_of(x, rows), width), self._weight_bits(width)))
            else:
                coded.append((rows, _IntegerInputs.of(x[rows], width)))
        if coded:
            parts.append(Part(torch.cat([rows for rows, _ in coded]), _IntegerInputs.join([inputs for _, inputs in coded]), 8))
        return parts

    def _prepare(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> _IntegerWeight:
        code, scale = encode_weight(weight, bits)
        channel_sum = code.sum(1) * scale
        kernel = kernel_for(weight.device.type, *weight.shape)
        where = f"{kernel} on {where_it_runs(weight.device.type)}"
        if kernel == FLOAT_PRODUCT:
            code = code.to(scale.dtype)
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{weight.device.type} has no exact int8 matrix product for weights of {tuple(weight.shape)}: the linear "
                    "layers of quantised tokens multiply their codes as floats, which is slower than the dense model. "
                    "execution=simulate says what the widths do to quality.",
                    stacklevel=2,
                )
        self._ran[where] = None
        added = scale.new_zeros(()) if bias is None else bias.to(scale.dtype)
        return _IntegerWeight(code.contiguous().T, scale, channel_sum, added)

    def _product(self, linear: LinearLayer, inputs: Any, weight_bits: int) -> torch.Tensor:
        weight: _IntegerWeight = self._prepared(linear, weight_bits)
        rows = max(256, 4 * PIECE // weight.scale.shape[0])  # fewer would slow the product down
        if inputs.code.shape[0] <= 2 * rows:
            return _affine_product(inputs, weight)
        out = torch.empty(inputs.code.shape[0], weight.scale.shape[0], dtype=inputs.dtype, device=inputs.code.device)
        pieces = zip(inputs.code.split(rows), inputs.scale.split(rows), inputs.offset.split(rows), strict=True)
        for piece, part in zip(out.split(rows), pieces, strict=True):
            piece.copy_(_affine_product(_IntegerInputs(*part, inputs.dtype), weight))
        return out


def _affine_product(inputs: _IntegerInputs, weight: _IntegerWeight) -> torch.Tensor:
    """(offset + scale · code) · W + bias: (R, N)."""
    products = multiply(inputs.code, weight.code).to(weight.scale.dtype)
    out = torch.addcmul(weight.bias, inputs.offset, weight.channel_sum)
    return out.addcmul_(products.mul_(inputs.scale), weight.scale).to(inputs.dtype)


def kernel_for(device: str, channels: int, width: int) -> str:
    """How codes (R, width) are multiplied with weights (channels, width) on a kind of device."""
    return INT_MM if no_int_mm(device, channels, width) is None and int_mm_fault(device) is None else FLOAT_PRODUCT


def no_int_mm(device: str, channels: int, width: int) -> str | None:
    """Why `torch._int_mm` has no fast product of this shape; None: it has."""
    if device == "cpu" and not torch.backends.mkldnn.is_available():
        return f"{INT_MM} is a plain loop in a torch that was built without oneDNN"
    if device == "cuda" and (channels % 8 or width % 8):  # cuBLASLt
        return f"{INT_MM} on cuda takes multiples of 8, not weights of {(channels, width)}"
    return None


def where_it_runs(device: str) -> str:
    """`cpu (AVX512, avx512_vnni)`, for the record."""
    return f"cpu ({instruction_set()})" if device == "cpu" else device


def int_mm_fault(device: str) -> str | None:
    """What is wrong with `torch._int_mm` here; None: it is exact."""
    return wrong(INT_MM, device, lambda code, weight: multiply(code, weight.T), INTEGER)


def multiply(code: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """code (R, K) int8, weight (K, N) -> (R, N): int32 by int8 weights, else float."""
    if weight.dtype != torch.int8:
        return code.to(weight.dtype) @ weight
    n = code.shape[0]
    if code.is_cuda and n <= 16:  # cuBLASLt takes no fewer
        return torch._int_mm(F.pad(code, (0, 0, 0, 32 - n)), weight)[:n]
    return torch._int_mm(code, weight)
