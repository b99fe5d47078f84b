"""Tokens held at 8, 4 or 2 bits: nested codes, linear layers that run on them, K/V stored packed (paper 2.5, App. E, G.4).

Top to bottom: the codes, which rows of a batch are at which width, the two executors, the cache layer.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.cache import Entries, Hold, KVLayout, RaggedLayer, merge_entries
from quicksilver.runtime.errors import UnsupportedModelError
from quicksilver.runtime.ledger import BETA
from quicksilver.runtime.precision import PrecisionExecutor

WIDTHS = (2, 4, 8, 16)
UNTOUCHED = 16
# Values worked on at a time. Coding takes several passes over its data: in pieces they stay in a cache, and their buffers are used
# again instead of being asked of the system anew, which cost half the speed of an int8 layer with 1024 tokens.
PIECE = 2**19
TINY = torch.finfo(torch.float32).tiny


# -- nested codes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Codes:
    """Values (..., D) as the leading `bits` bits of one 8-bit code a value: value = offset + scale · code, by group along D.

    Attributes:
        code: (..., D) uint8, below 2^bits.
        scale, offset: (..., G); the last group of D may be shorter than the others.
        group_size: values a group.
    """

    bits: int
    code: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    group_size: int

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, (..., D)."""
        if self.code.numel() > 2 * PIECE:
            rows = _rows_a_piece(self.code)
            parts = zip(self.code.split(rows), self.scale.split(rows), self.offset.split(rows), strict=True)
            values = torch.empty(self.code.shape, dtype=dtype, device=self.code.device)
            for piece, part in zip(values.split(rows), parts, strict=True):
                piece.copy_(Codes(self.bits, *part, self.group_size).decode(dtype))
            return values
        exact = _exact(dtype)
        # Three steps, not torch.addcmul: it takes three times as long where its arguments are broadcast.
        values = _grouped(self.code, self.group_size).to(exact)
        values = values.mul_(self.scale.to(exact)[..., None]).add_(self.offset.to(exact)[..., None])
        return _ungrouped(values, self.code.shape[-1]).to(dtype)


def encode(x: torch.Tensor, bits: int, group_size: int | None, stored_as: torch.dtype | None = None) -> Codes:
    """Code x (..., D) at `bits` (8, 4 or 2).

    The 8-bit code divides a group's range from its least to its greatest value into 255 steps. The 4- and the 2-bit code are its
    leading bits, as a matryoshka nests (conflicts.md #20). What a code stands for is free to depend on the width: at 8 bits the
    point it was rounded to, below that the straight line through (code, value) with the least squared error in the group.

    Why so: perplexity of stories260K (dense 3.56, on stories of its own) and of reference-gpt2 (136.6, WikiText-103 validation)
    with the inputs of all linear layers from half depth on and their K/V at one width, in groups of 32:

        codes                                             stories260K: 4, 2 bits     reference-gpt2: 4, 2 bits
        symmetric, sign and magnitude, zero kept          4.13, 55.5                 141.4, 731
        symmetric, bins decoded to their midpoints        3.85, 40.0                 141.0, 239
        min-max, bins decoded to their midpoints          3.76, 11.2                 138.5, 284
        min-max, least squares (this)                     3.73, 10.7                 137.5, 161
        the same, one group a token                       3.88, 17.1                 138.2, 206 (midpoints: 2783)

    At 8 bits all are within 0.1% of dense. Min-max costs a second number a group, half a bit a value; symmetric codes in groups
    of 16, which cost the same, are worse (4 bits: 3.81 and 139.1). A group of zeros has scale and offset 0 and stays zeros.

    Args:
        group_size: values that share scale and offset, None: all D.
        stored_as: dtype that scale and offset are rounded to, before anything is coded with them.
    """
    width = x.shape[-1]
    size = width if group_size is None else min(group_size, width)
    if x.ndim > 1 and x.numel() > 2 * PIECE:
        parts = [encode(piece, bits, group_size, stored_as) for piece in x.split(_rows_a_piece(x))]
        return Codes(bits, *(torch.cat([getattr(p, name) for p in parts]) for name in ("code", "scale", "offset")), size)
    eight, step, offset, above = _eight_bits(_grouped(x.to(_exact(x.dtype)), size), stored_as)
    code = eight.to(torch.uint8)
    if bits < 8:
        step, offset = step.to(above.dtype), offset.to(above.dtype)
        code >>= 8 - bits
        exact = code.to(above.dtype)
        middle = exact.mean(-1, keepdim=True)
        deviation = exact - middle
        spread = deviation.square().sum(
            -1, keepdim=True
        )  # at least 1/2, unless all codes are one: then only rounding is left of it
        step = torch.where(spread > 0.25, (deviation * above).sum(-1, keepdim=True) / spread, 0)
        offset = offset + above.mean(-1, keepdim=True) - step * middle
    dtype = step.dtype if stored_as is None else stored_as
    return Codes(bits, _ungrouped(code, width), step.to(dtype)[..., 0], offset.to(dtype)[..., 0], size)


def _eight_bits(
    groups: torch.Tensor, stored_as: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0 to 255 of groups (..., g), as floats; their step and offset (..., 1), as they are stored; how far values lie above the
    offset. A token of a decoder is coded so in every layer: there each operation costs what calling it costs."""
    offset = groups.amin(-1, keepdim=True)
    step = groups.amax(-1, keepdim=True).sub_(offset).div_(255)
    if stored_as is None:
        above = groups - offset
        return (above / step.clamp(min=TINY)).round_(), step, offset, above
    offset, step = offset.to(stored_as), step.to(stored_as)
    above = groups - offset.to(groups.dtype)
    code = (above / step.to(groups.dtype).clamp_(min=TINY)).round_()
    return code.clamp_(0, 255), step, offset, above  # what was rounded may miss the range's ends


def hold(x: torch.Tensor, bits: int, group_size: int | None, stored_as: torch.dtype | None = None) -> torch.Tensor:
    """x (..., D) as it reads after having been held at `bits`."""
    return x if bits == UNTOUCHED else encode(x, bits, group_size, stored_as).decode(x.dtype)


def _rows_a_piece(x: torch.Tensor) -> int:
    return max(1, PIECE * x.shape[0] // x.numel())


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grouped(x: torch.Tensor, size: int) -> torch.Tensor:
    """(..., D) -> (..., G, size); a short last group repeats its last value, which changes neither its least nor its greatest."""
    missing = -x.shape[-1] % size
    if missing:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], dim=-1)
    return x.view(*x.shape[:-1], -1, size) if x.is_contiguous() else x.unflatten(-1, (-1, size))


def _ungrouped(x: torch.Tensor, width: int) -> torch.Tensor:
    """What `_grouped` grouped: (..., G, size) -> (..., width)."""
    return x.flatten(-2) if x.shape[-2] * x.shape[-1] == width else x.flatten(-2)[..., :width]


def pack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (..., D) uint8 below 2^bits, as bytes: (..., ceil(D·bits/8)) uint8, the first code in the lowest bits."""
    a_byte = 8 // bits
    if a_byte == 1:
        return code.contiguous()
    code = F.pad(code, (0, -code.shape[-1] % a_byte)).unflatten(-1, (-1, a_byte))
    packed = code[..., 0].clone()
    for i in range(1, a_byte):
        packed |= code[..., i] << (bits * i)
    return packed


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """What `pack` packed: (..., D) uint8 with D = width."""
    a_byte = 8 // bits
    if a_byte == 1:
        return packed
    codes = torch.stack([(packed >> (bits * i)) & (2**bits - 1) for i in range(a_byte)], dim=-1)
    return codes.flatten(-2)[..., :width]


# -- which rows at which width ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByWidth:
    """The rows of a flattened batch of tokens at each width that occurs: (n,) long, or None for all of them."""

    rows: dict[int, torch.Tensor | None]
    _last: ClassVar[tuple[torch.Tensor, ByWidth] | None] = None

    @classmethod
    def of(cls, bits: torch.Tensor) -> ByWidth:
        """bits: uint8 of any shape, and not written to afterwards."""
        last = ByWidth._last
        # Where nothing is packed, all layers of a pass and their caches ask about the same tensor: it is looked at once.
        if last is not None and last[0] is bits:
            return last[1]
        flat = bits.reshape(-1)
        counts = flat.bincount(minlength=UNTOUCHED + 1).tolist()  # the host's one look at the device
        found = [width for width in WIDTHS if counts[width]]
        one = len(found) == 1
        answer = cls({width: None if one else (flat == width).nonzero()[:, 0] for width in found})
        ByWidth._last = (bits, answer)
        return answer

    @property
    def all_untouched(self) -> bool:
        return self.rows.keys() <= {UNTOUCHED}

    def hold(self, x: torch.Tensor, group_size: int | None, stored_as: torch.dtype | None = None) -> torch.Tensor:
        """x (R, ..., D), each row as it reads at its width."""
        held = None
        for width, rows in self.rows.items():
            if width == UNTOUCHED:
                continue
            if rows is None:
                return hold(x, width, group_size, stored_as)
            held = x.clone() if held is None else held
            held[rows] = hold(x[rows], width, group_size, stored_as)
        return x if held is None else held


# -- executors -------------------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Rows of a linear layer's input that share a product.

    Attributes:
        rows: (n,) long, None: all.
        inputs: what the product takes.
        weight_bits: width of the weights they meet; 16: the layer's own.
    """

    rows: torch.Tensor | None
    inputs: Any
    weight_bits: int


class _Linear(NamedTuple):
    """A linear layer, the attributes of its instance, and its weights at the widths they were asked for."""

    instance: dict[str, Any]
    module: nn.Module
    prepared: dict[int, Any]


class SimulatedExecutor(PrecisionExecutor):
    """Float arithmetic on values that have been held at the tokens' widths: what the policy does to quality, at no gain in speed.

    Args:
        scope: `linear`: the inputs of every linear layer after the decision. `residual`: the hidden state, once, when the width
            is decided (conflicts.md #19).
        weights: `float`: the model's own. `int8`: quantised tokens meet 8-bit weights, one scale an output channel. `token`: they
            meet the leading bits of those, as many as they have themselves.
        group_size: values of an input that share a scale, None: one scale a token.
        kv: hold K/V entries at the token's width, too, packed.
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
        self._linears: weakref.WeakKeyDictionary[nn.Module, list[_Linear]] = weakref.WeakKeyDictionary()

    def run_layer(self, layer: nn.Module, bits: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        by_width = ByWidth.of(bits)
        if self.scope == "residual" or by_width.all_untouched:
            return call()
        linears = self._linears.get(layer)
        if linears is None:
            linears = [_Linear(m.__dict__, m, {}) for m in layer.modules() if isinstance(m, (nn.Linear, Conv1D))]
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

    def hold_kv(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        by_width = ByWidth.of(bits)
        if not self.kv or by_width.all_untouched:
            return states
        batch, heads, n, width = states.shape
        tokens = states.transpose(1, 2).reshape(batch * n, heads, width)
        return by_width.hold(tokens, self.kv_group_size, STORED_AS).view(batch, n, heads, width).transpose(1, 2)

    def new_store(self) -> RaggedLayer:
        return PackedLayer(self.kv_group_size) if self.kv else RaggedLayer()

    def hold_states(self, states: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        by_width = ByWidth.of(bits)
        if self.scope != "residual" or by_width.all_untouched:
            return states
        return by_width.hold(states.flatten(0, 1), self.group_size).view_as(states)

    def _linear(
        self,
        linear: _Linear,
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

    def _parts(self, x: torch.Tensor, by_width: ByWidth) -> list[_Part]:
        """x: (R, D)."""
        if self.weights == "float":
            return [_Part(None, by_width.hold(x, self.group_size), UNTOUCHED)]
        return [
            _Part(rows, hold(_rows(x, rows), width, self.group_size), self._weight_bits(width))
            for width, rows in by_width.rows.items()
        ]

    def _weight_bits(self, width: int) -> int:
        return width if width == UNTOUCHED or self.weights == "token" else 8

    def _product(self, linear: _Linear, inputs: Any, weight_bits: int) -> torch.Tensor:
        matrix = self._prepared(linear, weight_bits)
        return F.linear(inputs, matrix, linear.module.bias)  # type: ignore[arg-type]

    def _prepared(self, linear: _Linear, bits: int) -> Any:
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
    exact = weight.to(_exact(weight.dtype))
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
    def of(cls, x: torch.Tensor, bits: int) -> _IntegerInputs:
        if bits < 8:
            codes = encode(x, bits, None)
            return cls(codes.code.view(torch.int8), codes.scale, codes.offset, x.dtype)
        if x.numel() > 2 * PIECE:
            return cls.join([cls.of(piece, bits) for piece in x.split(_rows_a_piece(x))])
        # As `encode` has it, in fewer steps. 0 to 255 does not fit int8: moved down by half its range, and the offset up.
        code, step, offset, _ = _eight_bits(x.to(_exact(x.dtype)))
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

    The product is `torch._int_mm`: oneDNN on CPU, cuBLASLt on CUDA. Of what scripts/benchmark_quantization.py compares, oneDNN's
    qlinear is by the number of rows slower or faster for many, but wants the weights packed a second time; fbgemm codes a whole
    batch with one scale or goes through tensor types that torch has deprecated. For one token all of them wait for the weights.
    Where `_int_mm` is missing or inexact the codes are multiplied as floats: one warning, and `kernel` says so.
    """

    _warned = False

    def forget(self) -> None:
        super().forget()
        self._ran: dict[str, None] = {}  # an ordered set

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return " and ".join(self._ran) or "not run yet"

    def _parts(self, x: torch.Tensor, by_width: ByWidth) -> list[_Part]:
        parts, coded = [], []
        for width, rows in by_width.rows.items():
            if width == UNTOUCHED:
                parts.append(_Part(rows, _rows(x, rows), UNTOUCHED))
            elif self.weights == "token" or rows is None:
                parts.append(_Part(rows, _IntegerInputs.of(_rows(x, rows), width), self._weight_bits(width)))
            else:
                coded.append((rows, _IntegerInputs.of(x[rows], width)))
        if coded:
            parts.append(_Part(torch.cat([rows for rows, _ in coded]), _IntegerInputs.join([inputs for _, inputs in coded]), 8))
        return parts

    def _prepare(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> _IntegerWeight:
        code, scale = encode_weight(weight, bits)
        channel_sum = code.sum(1) * scale
        kernel = kernel_for(weight.device.type, *weight.shape)
        where = f"{kernel} on {weight.device.type}"
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

    def _product(self, linear: _Linear, inputs: Any, weight_bits: int) -> torch.Tensor:
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


def _rows(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x[rows]


def kernel_for(device: str, channels: int, width: int) -> str:
    """How codes (R, width) are multiplied with weights (channels, width) on a kind of device."""
    if device == "cpu" and not torch.backends.mkldnn.is_available():  # a plain loop
        return FLOAT_PRODUCT
    if device == "cuda" and (channels % 8 or width % 8):  # cuBLASLt
        return FLOAT_PRODUCT
    return INT_MM if _int_mm_is_exact(device) else FLOAT_PRODUCT


@functools.cache
def _int_mm_is_exact(device: str) -> bool:
    """Tried once, at the ends of the range: without VNNI instructions oneDNN adds pairs of products in 16 bits, which overflow,
    silently."""
    code = torch.tensor([127, -128], dtype=torch.int8, device=device).repeat(16)[:, None].repeat(1, 64)
    weight = torch.full((32, 64), 127, dtype=torch.int8, device=device)
    try:
        return torch.equal(torch._int_mm(code, weight.T), (code[:, :1].int() * 127 * 64).expand(-1, 32))
    except (RuntimeError, NotImplementedError):
        return False


def multiply(code: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """code (R, K) int8, weight (K, N) -> (R, N): int32 by int8 weights, else float."""
    if weight.dtype != torch.int8:
        return code.to(weight.dtype) @ weight
    n = code.shape[0]
    if code.is_cuda and n <= 16:  # cuBLASLt takes no fewer
        return torch._int_mm(F.pad(code, (0, 0, 0, 32 - n)), weight)[:n]
    return torch._int_mm(code, weight)


# -- the cache -------------------------------------------------------------------------------------------------------------------

STORED_AS = torch.bfloat16  # of scales and offsets in a cache: float16 would overflow where keys have outliers

_Pool = tuple[torch.Tensor, ...]
"""Entries of one width, (T, 2, H_kv, ...), K and V side by side: at 16 bits their values, else packed codes, scales, offsets."""


class PackedLayer(RaggedLayer):
    """K and V packed at the width of each entry (its `bits` fact): two 4-bit or four 2-bit codes a byte, scales in bfloat16.

    Entries of a width lie end to end, row by row, in slot order: what is resident is what is billed. Entries of 16 bits keep the
    dtype they came in. Reading decodes. An entry is coded once, when it comes in: selecting rows and cropping move codes.

    Facts of an entry (slot, width) are not counted as K/V, here as in every cache of the runtime.
    """

    def __init__(self, group_size: int = 32) -> None:
        super().__init__()
        self.group_size = group_size
        self._pools: dict[int, _Pool] = {}
        self._heads = self._head_dim = 0

    @property
    def is_packed(self) -> bool:
        """False until entries with widths come in: so far this is a plain RaggedLayer."""
        return self._entries is not None and "bits" in self._entries

    def resident_bytes(self) -> int:
        return super().resident_bytes() + sum(part.nbytes for pool in self._pools.values() for part in pool)

    def billed_bytes(self) -> int:
        if not self.is_packed:
            return super().billed_bytes()
        assert self.entries is not None
        bits = self.entries["bits"][self.is_entry]
        groups = math.ceil(self._head_dim / min(self.group_size, self._head_dim))
        total = 0
        for width in WIDTHS:
            if width == UNTOUCHED:
                head = self._head_dim * self.dtype.itemsize
            else:
                head = math.ceil(self._head_dim * width / 8) + groups * 2 * STORED_AS.itemsize
            total += int((bits == width).sum()) * 2 * self._heads * head
        return total

    def padded(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self.is_packed:
            return super().padded()
        assert self.entries is not None
        bits = self.entries["bits"]
        shape = (*bits.shape, 2, self._heads, self._head_dim)
        if self.valid is None and len(self._pools) == 1:
            ((width, pool),) = self._pools.items()
            states = self._decode(pool, width).view(shape)
        else:
            states = torch.zeros(shape, dtype=self.dtype, device=bits.device)
            for width, pool in self._pools.items():
                states[self.is_entry & (bits == width)] = self._decode(pool, width)
        return states[:, :, 0].transpose(1, 2), states[:, :, 1].transpose(1, 2)

    def write(self, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if "bits" not in layout.entries:
            return super().write(layout, keys, values)
        past = self.entries is not None
        pools = self._as_pools()
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device
        batch, self._heads, _, self._head_dim = keys.shape
        bits = layout.new.get("bits")
        if bits is None:
            bits = torch.full_like(layout.new["slots"], UNTOUCHED, dtype=torch.uint8)
        states = torch.stack([keys.transpose(1, 2), values.transpose(1, 2)], dim=2)  # (B, M, 2, H_kv, head_dim)
        new = ByWidth.of(bits)
        if layout.order is None and (batch == 1 or len(pools.keys() | new.rows.keys()) == 1):
            self._append(pools, states, new)  # decoding ends here
            self.entries, self.valid, self.keys, self.values = layout.entries, layout.valid, None, None
        else:
            at = self._places() if past else torch.zeros(batch, 0, dtype=torch.long, device=keys.device)
            pools, new_at = self._extended(pools, bits, states)
            at = torch.cat([at, new_at], dim=1)
            self._settle(layout.entries, layout.valid, at if layout.order is None else at.gather(1, layout.order), pools)
        return self.padded()  # type: ignore[return-value]

    def merge(self, into: torch.Tensor, hold: Hold | None = None) -> None:
        if not self.is_packed:
            return super().merge(into, hold)
        assert self.entries is not None
        size = self.entries.get("size", torch.ones_like(self.is_entry, dtype=torch.float32))
        entries, present, keys, values = merge_entries(self.entries, self.is_entry, *self.padded(), into)  # type: ignore[misc]
        targets = present & (entries["size"] != size)
        states = torch.stack([keys.transpose(1, 2), values.transpose(1, 2)], dim=2)[targets][None]
        pools, new_at = self._extended(self._pools, entries["bits"][targets][None], states)
        at = self._places().masked_scatter(targets, new_at)
        order = (~present).to(torch.uint8).argsort(dim=1, stable=True)
        entries = {name: fact.gather(1, order) for name, fact in entries.items()}
        self._settle_trimmed(entries, present.gather(1, order), at.gather(1, order), pools)
        self.settled, self.merged = self.seen, True

    def _keep_only(self, present: torch.Tensor) -> None:
        if not self.is_packed:
            return super()._keep_only(present)
        assert self.entries is not None
        order = (~present).to(torch.uint8).argsort(dim=1, stable=True)
        entries = {name: fact.gather(1, order) for name, fact in self.entries.items()}
        self._settle_trimmed(entries, present.gather(1, order), self._places().gather(1, order), self._pools)

    def crop(self, tokens_to_remove: int) -> None:
        n = abs(tokens_to_remove)
        if not self.is_packed or n == 0:
            return super().crop(tokens_to_remove)
        assert self.entries is not None
        self._retreat(n)
        self.real_seen = self.real_seen - n  # type: ignore[operator]
        left = self.is_entry & (self.entries["slots"] < self.real_seen)
        self._settle_trimmed(self.entries, left, self._places(), self._pools)

    def reset(self) -> None:
        super().reset()
        self._pools = {}

    def _select_rows(self, rows: torch.Tensor) -> None:
        if not self.is_packed:
            return super()._select_rows(rows)
        assert self.entries is not None
        self.real_seen = self.real_seen[rows]  # type: ignore[index]
        entries = {name: fact[rows] for name, fact in self.entries.items()}
        self._settle_trimmed(entries, self.is_entry[rows], self._places()[rows], self._pools)

    # -- codes -----------------------------------------------------------------------------------------------------------------

    def _encode(self, states: torch.Tensor, bits: int) -> _Pool:
        """states: (T, 2, H_kv, head_dim)."""
        if bits == UNTOUCHED:
            return (states,)
        codes = encode(states, bits, self.group_size, STORED_AS)
        return pack(codes.code, bits), codes.scale, codes.offset

    def _decode(self, pool: _Pool, bits: int) -> torch.Tensor:
        """K, V (T, 2, H_kv, head_dim) of a width's entries."""
        if bits == UNTOUCHED:
            return pool[0]
        code, scale, offset = pool
        size, width = min(self.group_size, self._head_dim), self._head_dim
        return Codes(bits, unpack(code, bits, width), scale, offset, size).decode(self.dtype)

    # -- pools: where an entry lies in the pool of its width is its place, (B, K) long -----------------------------------------

    def _as_pools(self) -> dict[int, _Pool]:
        """The pools; a layer that was plain so far becomes one pool of 16 bits."""
        if self.is_packed or self.entries is None:
            return self._pools
        flat = [part.transpose(1, 2).flatten(0, 1) if self.valid is None else part for part in (self.keys, self.values)]
        return {UNTOUCHED: (torch.stack(flat, dim=1),)}

    def _places(self) -> torch.Tensor:
        assert self.entries is not None
        at = torch.zeros_like(self.entries["slots"])
        bits = self.entries.get("bits", torch.full_like(at, UNTOUCHED, dtype=torch.uint8))
        for width in self._as_pools():
            here = self.is_entry & (bits == width)
            at = torch.where(here, here.flatten().cumsum(0).view_as(at) - 1, at)
        return at

    def _append(self, pools: dict[int, _Pool], states: torch.Tensor, new: ByWidth) -> None:
        """Entries after those there are, where nothing has to move: one row, or rows of one width. states: (B, M, 2, ...)."""
        batch, flat = states.shape[0], states.flatten(0, 1)
        self._pools = dict(pools)
        for width, rows in new.rows.items():
            parts = self._encode(_rows(flat, rows), width)
            if width in pools:
                parts = tuple(_joined_rows(old, part, batch) for old, part in zip(pools[width], parts, strict=True))
            self._pools[width] = parts

    def _extended(
        self, pools: dict[int, _Pool], bits: torch.Tensor, states: torch.Tensor
    ) -> tuple[dict[int, _Pool], torch.Tensor]:
        """The pools with entries added at their end, and the places of those; bits (B, M), states (B, M, 2, H_kv, head_dim)."""
        extended, flat = dict(pools), states.flatten(0, 1)
        at = torch.zeros(flat.shape[0], dtype=torch.long, device=bits.device)
        for width, rows in ByWidth.of(bits).rows.items():
            parts = self._encode(_rows(flat, rows), width)
            before = pools[width][0].shape[0] if width in pools else 0
            at[slice(None) if rows is None else rows] = torch.arange(before, before + parts[0].shape[0], device=at.device)
            extended[width] = (
                tuple(torch.cat(pair) for pair in zip(pools[width], parts, strict=True)) if width in pools else parts
            )
        return extended, at.view_as(bits)

    def _settle(self, entries: Entries, valid: torch.Tensor | None, at: torch.Tensor, pools: dict[int, _Pool]) -> None:
        """Keep the entries at the places `at` (B, K) of `pools`, in that order, and nothing else."""
        self.entries, self.valid = entries, valid
        self.keys = self.values = None
        self._pools = {}
        for width, pool in pools.items():
            places = at[self.is_entry & (entries["bits"] == width)]
            if places.numel():
                self._pools[width] = tuple(part[places] for part in pool)

    def _settle_trimmed(self, entries: Entries, valid: torch.Tensor, at: torch.Tensor, pools: dict[int, _Pool]) -> None:
        """`_settle` after cutting off columns that are padding in all rows."""
        width = int(valid.sum(1).max())
        entries = {name: fact[:, :width] for name, fact in entries.items()}
        valid = valid[:, :width]
        self._settle(entries, None if bool(valid.all()) else valid, at[:, :width], pools)


def _joined_rows(old: torch.Tensor, new: torch.Tensor, batch: int) -> torch.Tensor:
    """(B·K, ...) and (B·M, ...), row by row, as (B·(K+M), ...)."""
    if batch == 1:
        return torch.cat([old, new])
    rest = old.shape[1:]
    return torch.cat([old.view(batch, -1, *rest), new.view(batch, -1, *rest)], dim=1).view(-1, *rest)
