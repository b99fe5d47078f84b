"""Linear layers whose inputs are quantised, simulated in float arithmetic."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.architecture import linears_of
from quicksilver.runtime.cache import CacheLayer
from quicksilver.runtime.errors import UnsupportedModelError
from quicksilver.runtime.ledger import BETA
from quicksilver.runtime.module import PrecisionExecutor
from quicksilver.runtime.phases import phase
from quicksilver.runtime.quantized.codes import (
    PIECE,
    STORED_AS,
    UNTOUCHED,
    ByWidth,
    eight_bits,
    encode,
    exact_dtype,
    quantize_dequantize,
    rows_a_piece,
    rows_of,
)
from quicksilver.runtime.quantized.proving import INTEGER, instruction_set, wrong


class Part(NamedTuple):
    """Rows of a linear layer's input that share a product.

    Attributes:
        rows: (n,) long, None: all.
        inputs: what the product takes.
        weight_bits: width of the weights they meet; 16: the layer's own.
    """

    rows: torch.Tensor | None
    inputs: Any
    weight_bits: int


class LinearLayer(NamedTuple):
    """A linear layer, the attributes of its instance, and its weights at the widths they were asked for."""

    instance: dict[str, Any]
    module: nn.Module
    prepared: dict[int, Any]


class SimulatedExecutor(PrecisionExecutor):
    """Float arithmetic on values that have been coded at the tokens' widths: what the policy does to quality, at no gain in speed.

    Args:
        scope: `linear`: the inputs of every linear layer after the decision. `residual`: the hidden state, once, when the width
            is decided (docs/conflicts.md #19).
        weights: `float`: the model's own. `int8`: quantised tokens meet 8-bit weights, one scale an output channel. `token`: they
            meet the leading bits of those, as many as they have themselves.
        group_size: values of an input that share a scale, None: one scale a token.
        kv: keep K/V entries at the token's width, too, packed.
        kv_group_size: values of a head that share a scale there.
        beta: what the paper's ledger charges.
    """

    kernel = "float products of dequantised values"

    def __init__(
        self,
        *,
        scope: str = "linear",
        weights: str = "float",
        group_size: int | None = 32,
        kv: bool = True,
        kv_group_size: int = 32,
        beta: Mapping[int, float] = BETA,
    ) -> None:
        self.scope, self.weights, self.group_size = scope, weights, group_size
        self.kv, self.kv_group_size, self.beta = kv, kv_group_size, beta
        self.forget()

    def forget(self) -> None:
        """Drop what was prepared of a model's weights: they may have changed since."""
        self._linears: weakref.WeakKeyDictionary[nn.Module, list[LinearLayer]] = weakref.WeakKeyDictionary()

    def run_layer(self, layer: nn.Module, bits: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        by_width = ByWidth.of(bits)
        if self.scope == "residual" or by_width.all_untouched:
            return call()
        linears = self._linears.get(layer)
        if linears is None:
            linears = [LinearLayer(m.__dict__, m, {}) for m in linears_of([layer])]
            self._linears[layer] = linears
        previous = [linear.instance.get("forward") for linear in linears]
        seen: dict[str, Any] = {}
        for linear in linears:
            # Straight into the instance: nn.Module's own __setattr__ takes longer than a token's norm.
            linear.instance["forward"] = functools.partial(self._linear, linear, linear.module.forward, by_width, seen)
        try:
            return call()
        finally:
            for linear, forward in zip(linears, previous, strict=True):
                if forward is None:
                    del linear.instance["forward"]
                else:
                    linear.instance["forward"] = forward

    def quantize_dequantize_kv(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        by_width = ByWidth.of(bits)
        if not self.kv or by_width.all_untouched:
            return states
        batch, heads, n, width = states.shape
        tokens = states.transpose(1, 2).reshape(batch * n, heads, width)
        return by_width.quantize_dequantize(tokens, self.kv_group_size, STORED_AS).view(batch, n, heads, width).transpose(1, 2)

    def new_store(self) -> CacheLayer:
        return CacheLayer("packed", self.kv_group_size) if self.kv else CacheLayer("ragged")

    def quantize_dequantize_states(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        by_width = ByWidth.of(bits)
        if self.scope != "residual" or by_width.all_untouched:
            return states
        return by_width.quantize_dequantize(states.flatten(0, 1), self.group_size).view_as(states)

    def _linear(
        self,
        linear: LinearLayer,
        original: Callable[[torch.Tensor], torch.Tensor],
        by_width: ByWidth,
        seen: dict[str, Any],
        x: torch.Tensor,
    ) -> torch.Tensor:
        """`linear`(x) with x (..., D), its tokens at their widths."""
        if seen.get("input") is not x:  # q, k and v read the same input: it is coded once
            seen["input"], seen["parts"] = x, self._parts(x.reshape(-1, x.shape[-1]), by_width)
        out = None
        for part in seen["parts"]:
            own_weights = part.weight_bits == UNTOUCHED
            product = original(part.inputs) if own_weights else self._product(linear, part.inputs, part.weight_bits)
            if part.rows is None:
                return product.view(*x.shape[:-1], product.shape[-1])
            if out is None:
                out = product.new_empty(x.shape[:-1].numel(), product.shape[-1])
            out[part.rows] = product
        assert out is not None
        return out.view(*x.shape[:-1], out.shape[-1])

    def _parts(self, x: torch.Tensor, by_width: ByWidth) -> list[Part]:
        """x: (R, D)."""
        if self.weights == "float":
            return [Part(None, by_width.quantize_dequantize(x, self.group_size), UNTOUCHED)]
        return [
            Part(rows, quantize_dequantize(rows_of(x, rows), width, self.group_size), self._weight_bits(width))
            for width, rows in by_width.rows.items()
        ]

    def _weight_bits(self, width: int) -> int:
        return width if width == UNTOUCHED or self.weights == "token" else 8

    def _product(self, linear: LinearLayer, inputs: Any, weight_bits: int) -> torch.Tensor:
        matrix = self._prepared(linear, weight_bits)
        return F.linear(inputs, matrix, linear.module.bias)  # type: ignore[arg-type]

    def _prepared(self, linear: LinearLayer, bits: int) -> Any:
        """The weights of a linear layer at `bits`, made once and kept."""
        kept, module = linear.prepared, linear.module
        if bits not in kept:
            weight: torch.Tensor = module.weight  # type: ignore[assignment]
            if weight.is_meta:
                raise UnsupportedModelError(
                    "The weights of a linear layer are offloaded and cannot be quantised: load the model whole, or simulate with "
                    "weights='float'."
                )
            with torch.no_grad():
                kept[bits] = self._prepare(weight.T if isinstance(module, Conv1D) else weight, module.bias, bits)  # type: ignore
        return kept[bits]

    def _prepare(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> Any:
        """weight: (N, K), bias (N,)."""
        code, scale = encode_weight(weight, bits)
        return (code.to(scale.dtype) * scale[:, None]).to(weight.dtype)


def encode_weight(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """weight (N, K) as code (N, K) int8 and scale (N,): weight ≈ scale · code.

    Symmetric, unlike activations: weights have zero mean, and without an offset the product of integers needs no further terms.
    Nested likewise: below 8 bits the leading bits of the 8-bit code, in the middle of what they leave open, with the scale of
    least squared error.
    """
    exact = weight.to(exact_dtype(weight.dtype))
    step = exact.abs().amax(1) / 127
    code = (exact / torch.where(step > 0, step, 1)[:, None]).round_().to(torch.int8)
    if bits == 8:
        return code, step
    left_open = 8 - bits
    code = ((code >> left_open) << left_open) + 2 ** (left_open - 1)
    middle = code.to(exact.dtype)
    return code, (exact * middle).sum(1) / middle.square().sum(1)


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
