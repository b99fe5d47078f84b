"""Linear layers whose inputs are quantised, simulated in float arithmetic."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.cache import CacheLayer
from quicksilver.runtime.errors import UnsupportedModelError
from quicksilver.runtime.ledger import BETA
from quicksilver.runtime.precision import PrecisionExecutor
from quicksilver.runtime.quantized.codes import STORED_AS, UNTOUCHED, ByWidth, exact_dtype, quantize_dequantize, rows_of


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
            linears = [LinearLayer(m.__dict__, m, {}) for m in layer.modules() if isinstance(m, (nn.Linear, Conv1D))]
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
        return CacheLayer.packed(self.kv_group_size) if self.kv else CacheLayer.ragged()

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
