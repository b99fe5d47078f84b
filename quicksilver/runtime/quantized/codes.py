"""Nested codes of 8, 4 and 2 bits for rows of values, and which rows of a batch have which width (paper 2.5, App. E, G.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.phases import phase
from quicksilver.runtime.trace import Trace

WIDTHS = (2, 4, 8, 16)
UNTOUCHED = 16
STORED_AS = torch.bfloat16  # of scales and offsets in a cache: float16 would overflow where keys have outliers
# Values worked on at a time. Coding takes several passes over its data: in pieces they stay in a cache, and their buffers are used
# again instead of being asked of the system anew, which cost half the speed of an int8 layer with 1024 tokens.
PIECE = 2**19
TINY = torch.finfo(torch.float32).tiny


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

    @phase("quantize")
    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, (..., D)."""
        if self.code.numel() > 2 * PIECE:
            rows = rows_a_piece(self.code)
            parts = zip(self.code.split(rows), self.scale.split(rows), self.offset.split(rows), strict=True)
            values = torch.empty(self.code.shape, dtype=dtype, device=self.code.device)
            for piece, part in zip(values.split(rows), parts, strict=True):
                piece.copy_(Codes(self.bits, *part, self.group_size).decode(dtype))
            return values
        exact = exact_dtype(dtype)
        # Three steps, not torch.addcmul: it takes three times as long where its arguments are broadcast.
        values = _grouped(self.code, self.group_size).to(exact)
        values = values.mul_(self.scale.to(exact)[..., None]).add_(self.offset.to(exact)[..., None])
        return _ungrouped(values, self.code.shape[-1]).to(dtype)


@phase("quantize")
def encode(x: torch.Tensor, bits: int, group_size: int | None, stored_as: torch.dtype | None = None) -> Codes:
    """Code x (..., D) at `bits` (8, 4 or 2).

    The 8-bit code divides a group's range from its least to its greatest value into 255 steps. The 4- and the 2-bit code are its
    leading bits, as a matryoshka nests (docs/conflicts.md #20). What a code stands for is free to depend on the width: at 8 bits the
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
        parts = [encode(piece, bits, group_size, stored_as) for piece in x.split(rows_a_piece(x))]
        code, scale, offset = (torch.cat([getattr(p, name) for p in parts]) for name in ("code", "scale", "offset"))
        return Codes(bits, code, scale, offset, size)
    eight, step, offset, above = eight_bits(_grouped(x.to(exact_dtype(x.dtype)), size), stored_as)
    code = eight.to(torch.uint8)
    if bits < 8:
        step, offset = step.to(above.dtype), offset.to(above.dtype)
        code >>= 8 - bits
        exact = code.to(above.dtype)
        middle = exact.mean(-1, keepdim=True)
        deviation = exact - middle
        spread = deviation.square().sum(-1, keepdim=True)  # at least 1/2; of codes that are all one, only rounding
        step = torch.where(spread > 0.25, (deviation * above).sum(-1, keepdim=True) / spread, 0)
        offset = offset + above.mean(-1, keepdim=True) - step * middle
    dtype = step.dtype if stored_as is None else stored_as
    return Codes(bits, _ungrouped(code, width), step.to(dtype)[..., 0], offset.to(dtype)[..., 0], size)


def eight_bits(
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


@phase("quantize")
def quantize_dequantize(x: torch.Tensor, bits: int, group_size: int | None, stored_as: torch.dtype | None = None) -> torch.Tensor:
    """x (..., D) as it reads after having been coded at `bits`."""
    return x if bits == UNTOUCHED else encode(x, bits, group_size, stored_as).decode(x.dtype)


def rows_a_piece(x: torch.Tensor) -> int:
    return max(1, PIECE * x.shape[0] // x.numel())


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
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
    first, *others = F.pad(code, (0, -code.shape[-1] % a_byte)).unflatten(-1, (-1, a_byte)).unbind(-1)
    packed = first.clone()
    for i, other in enumerate(others, 1):
        packed |= other << (bits * i)
    return packed


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """What `pack` packed: (..., D) uint8 with D = width."""
    a_byte = 8 // bits
    if a_byte == 1:
        return packed
    codes = torch.stack([(packed >> (bits * i)) & (2**bits - 1) for i in range(a_byte)], dim=-1)
    return codes.flatten(-2)[..., :width]


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

    def quantize_dequantize(self, x: torch.Tensor, group_size: int | None, stored_as: torch.dtype | None = None) -> torch.Tensor:
        """x (R, ..., D), each row as it reads at its width."""
        held = x
        for width, rows in self.rows.items():
            if rows is None:
                return quantize_dequantize(x, width, group_size, stored_as)
            if width != UNTOUCHED:
                held = x.clone() if held is x else held
                held[rows] = quantize_dequantize(x[rows], width, group_size, stored_as)
        return held


def rows_of(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """x[rows]; None: all of x."""
    return x if rows is None else x[rows]


def mix_of(trace: Trace) -> dict[int, float]:
    """What the null needs: the share of each width among the active tokens of the layers after the first decision on widths.

    Raises:
        ConfigError: no token was given a width.
    """
    found = np.zeros(max(WIDTHS) + 1, dtype=np.int64)
    for p in trace.passes:
        for layer in range(min((q.layer for q in p.precisions), default=trace.n_layers) + 1, trace.n_layers):
            bits, active = p.bits(layer).cpu().numpy(), p.active(layer).cpu().numpy()  # torch takes 4 ms for such a mask
            found += np.bincount(bits[active], minlength=len(found))
    total = sum(int(found[width]) for width in WIDTHS)
    if not total:
        raise ConfigError("No token of this trace was given a width: run the model under AdaptiveQuantization.")
    return {width: int(found[width]) / total for width in WIDTHS}
