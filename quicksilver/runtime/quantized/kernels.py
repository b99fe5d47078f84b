"""Ways to apply a linear layer that differ in kernel and number format.

| name | weights | inputs | runs on |
|---|---|---|---|
| `float` | as they are | as they are | anything: the layer itself |
| `bfloat16` | bfloat16 | bfloat16 | anything; in a float32 model |
| `int_mm` | int8, a scale an output channel | int8, a scale a token | `torch._int_mm`, where it is exact |
| `qlinear` | the same | the same, unsigned | oneDNN, weights packed for it |
| `weight_only` | int8, a scale an output channel | as they are | CPU |
| `fbgemm` | int8, a scale an output channel | unsigned, a scale and an offset a call | fbgemm; one row alone |
| `fbgemm_reduced` | int8, a scale an output channel | 7 bits (`reduce_range`), a scale a token | fbgemm |
| `qnnpack` | int8, a scale an output channel | int8, a scale a token | QNNPACK: ARM, and x86 |

fbgemm takes one scale for all rows of a call. With more rows than one the numbers of a token would depend on its batch mates and on later
tokens, so it is offered for one row only. The last two are for `int8_dynamic` where `int_mm` is not exact: 7-bit inputs cannot saturate.

Every kernel but `float` is compared with float64 on this machine before it is offered (proving.py)."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.errors import UnsupportedModelError
from quicksilver.runtime.quantized.linear import encode_weight, multiply, no_int_mm
from quicksilver.runtime.quantized.proving import INTEGER, instruction_set, processor, wrong

Product = Callable[[torch.Tensor], torch.Tensor]  # (R, K) -> (R, N), in the dtype of what it is given


class LinearKernel(ABC):
    """One way to apply a linear layer.

    Attributes:
        bound: error that the number format leaves at the worst codes; None: it is the layer itself, and nothing is compared.
        codes: least and greatest code of an input.
        most_rows: of a call; None: any number.
    """

    name: str
    bound: float | None = INTEGER
    codes: tuple[int, int] = (-127, 127)
    most_rows: int | None = None

    def lacks(self, weight: torch.Tensor, rows: int) -> str | None:
        """Why it cannot compute `rows` rows with a weight (N, K) of this dtype, shape and device; None: it can."""
        return None

    def refusal(self, weight: torch.Tensor, rows: int) -> str | None:
        """Why it is not offered here: it lacks something, or is wrong on this processor; None: it is offered."""
        if (lacks := self.lacks(weight, rows)) is not None or self.bound is None:
            return lacks
        device, dtype = weight.device.type, str(weight.dtype).removeprefix("torch.")

        def product(code: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
            linear = nn.Linear(codes.shape[1], codes.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(codes.to(weight.dtype), requires_grad=False)
            return self.prepare(linear)(code.to(weight.dtype))

        bound = self.bound + output_rounding(weight.dtype)
        fault = wrong(f"{self.name} {dtype}", device, product, bound, self.codes, self.most_rows)
        return None if fault is None else f"{self.name} {fault} on {processor()} ({instruction_set()})"

    def fits(self, weight: torch.Tensor, rows: int) -> bool:
        return self.refusal(weight, rows) is None

    @abstractmethod
    def prepare(self, linear: nn.Module) -> Product:
        """The product with this layer's weights, coded or packed once."""


def output_rounding(dtype: torch.dtype) -> float:
    """Relative error of a result that is rounded to `dtype`; of float32 `INTEGER` has it already."""
    return torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0


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
    bound = None

    def prepare(self, linear: nn.Module) -> Product:
        return linear.forward


class _BFloat16(LinearKernel):
    name = "bfloat16"
    bound = 2**-8  # its sums may be rounded once

    def lacks(self, weight: torch.Tensor, rows: int) -> str | None:
        return None if weight.dtype == torch.float32 else f"bfloat16 is for float32 models, and this one is {weight.dtype}"

    def prepare(self, linear: nn.Module) -> Product:
        weight = weight_of(linear).bfloat16().contiguous()
        bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]
        half = None if bias is None else bias.detach().bfloat16()
        return lambda x: nn.functional.linear(x.bfloat16(), weight, half).to(x.dtype)


def _coded(x: torch.Tensor, greatest: int = 127) -> tuple[torch.Tensor, torch.Tensor]:
    """x (R, K) as whole numbers from -greatest to greatest, still floats, and the scale of each row (R, 1)."""
    scale = x.abs().amax(-1, keepdim=True).div_(greatest).clamp_(min=torch.finfo(x.dtype).tiny)
    return (x / scale).round_(), scale


def _finished(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (product if bias is None else product.add_(bias)).to(dtype)


class _IntMM(LinearKernel):
    name = "int_mm"

    def lacks(self, weight: torch.Tensor, rows: int) -> str | None:
        return no_int_mm(weight.device.type, *weight.shape)

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

    def lacks(self, weight: torch.Tensor, rows: int) -> str | None:
        if weight.device.type != "cpu":
            return f"qlinear runs on the CPU, and the model is on {weight.device.type}"
        there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")
        return None if there else "qlinear needs oneDNN, which this torch was built without"

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
    bound = 2**-12  # it adds up 4096 products in float32

    def lacks(self, weight: torch.Tensor, rows: int) -> str | None:
        there = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        return None if there else f"weight_only takes float32 and bfloat16 on the CPU, not {weight.dtype} on {weight.device.type}"

    def prepare(self, linear: nn.Module) -> Product:
        weight = weight_of(linear)
        code, channel_scale = encode_weight(weight, 8)
        code, scales = code.contiguous(), channel_scale.to(weight.dtype)
        bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]
        return lambda x: _finished(torch._weight_int8pack_mm(x.contiguous(), code, scales), bias, x.dtype)


class _Packed(LinearKernel):
    """What packs weights for an engine of torch's quantised tensors."""

    engine: str

    def lacks(self, weight: torch.Tensor, rows: int) -> str | None:
        if weight.device.type != "cpu":
            return f"{self.name} runs on the CPU, and the model is on {weight.device.type}"
        engines = torch.backends.quantized.supported_engines
        return (
            None if self.engine in engines else f"{self.name} needs the engine {self.engine}; this torch has {', '.join(engines)}"
        )

    def packed(self, weight: torch.Tensor, bias: torch.Tensor | None, padding: int = 0) -> tuple[object, torch.Tensor]:
        """weight (N, K) int8 by channel, `padding` columns of zeros behind it, packed; the scales of its channels (N,)."""
        code, scale = encode_weight(weight, 8)
        code = nn.functional.pad(code, (0, padding)).contiguous()
        with self.chosen(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the tensors that these operators still take their weights in
            zeros = torch.zeros(len(scale), dtype=torch.int64)
            coded = torch._make_per_channel_quantized_tensor(code, scale.double(), zeros, 0)
            return torch.ops.quantized.linear_prepack(coded, None if bias is None else bias.detach().float()), scale

    @contextmanager
    def chosen(self) -> Iterator[None]:
        before = torch.backends.quantized.engine
        try:
            torch.backends.quantized.engine = self.engine
            yield
        finally:
            torch.backends.quantized.engine = before


class _FBGemm(_Packed):
    name = "fbgemm"
    engine = "x86"
    bound = 2**-8  # one scale a call, from the least to the greatest value: half a step
    most_rows = 1

    def lacks(self, weight: torch.Tensor, rows: int) -> str | None:
        return super().lacks(weight, rows) if rows == 1 else "fbgemm has one scale a call: it is offered for one row alone"

    def prepare(self, linear: nn.Module) -> Product:
        packed, _ = self.packed(weight_of(linear), linear.bias)  # type: ignore[arg-type]
        return lambda x: torch.ops.quantized.linear_dynamic(x.float(), packed).to(x.dtype)


class _FBGemmReduced(_Packed):
    name = "fbgemm_reduced"
    engine = "x86"
    codes = (-63, 63)

    def prepare(self, linear: nn.Module) -> Product:
        packed, _ = self.packed(weight_of(linear), None)
        bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]

        def product(x: torch.Tensor) -> torch.Tensor:
            rows, scale = _coded(x.float(), 63)
            out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, 1.0, 64, packed)
            return _finished(out.mul_(scale), bias, x.dtype)

        return product


class _QNNPack(_Packed):
    name = "qnnpack"
    engine = "qnnpack"

    def prepare(self, linear: nn.Module) -> Product:
        # It finds a scale of its own for each call. With the ends of the range in two columns that meet zeros it finds 1 and 128.
        packed, _ = self.packed(weight_of(linear), None, padding=2)
        bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]

        def product(x: torch.Tensor) -> torch.Tensor:
            rows, scale = _coded(x.float())
            ends = rows.new_tensor([-128.0, 127.0]).expand(len(rows), 2)
            with self.chosen():
                out = torch.ops.quantized.linear_dynamic(torch.cat([rows, ends], 1), packed)
            return _finished(out.mul_(scale), bias, x.dtype)

        return product


KERNELS: dict[str, LinearKernel] = {
    kernel.name: kernel for kernel in (_Float(), _BFloat16(), _IntMM(), _QLinear(), _WeightOnly(), _FBGemm())
}
# int8 by tokens and channels, the best first: what PyTorch's own dynamic quantization uses where `int_mm` is not exact.
DYNAMIC_INT8: tuple[LinearKernel, ...] = (KERNELS["int_mm"], _FBGemmReduced(), _QNNPack())


ROWS = (1, 16, 256)  # what is measured; for one row, up to 64, and more
BUDGET_S = 1.0
LEAST_ROUNDS = 3
MARGIN = 0.05  # a kernel must be so much faster than the layer as it is
COPIES = 8  # layers that one row goes round, so that weights come from memory as they do when a model decodes
COPIES_BYTES = 2**26  # of int8 weights, which is enough for that: more than a cache holds
AS_IT_IS = "float"


class Kind(NamedTuple):
    """Products that share a choice: x (rows, width) times weights (channels, width)."""

    rows: int
    width: int
    channels: int
    dtype: str

    @classmethod
    def of(cls, weight: torch.Tensor, rows: int) -> Kind:
        """weight: (channels, width); rows of any number."""
        return cls(rows_class(rows), weight.shape[1], weight.shape[0], str(weight.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.rows} x {self.width} x {self.channels} {self.dtype}"


def rows_class(rows: int) -> int:
    """Which of `ROWS` stands for so many rows."""
    return ROWS[0] if rows <= 1 else ROWS[1] if rows <= 64 else ROWS[2]


@dataclass(frozen=True)
class Choices:
    """What was chosen.

    Attributes:
        by_kind: name of the kernel by `str(Kind)`; what is not in it stays as it is.
        speedup: of what was chosen over the layer as it is, by `str(Kind)`.
    """

    by_kind: Mapping[str, str]
    speedup: Mapping[str, float]

    def of(self, kind: Kind) -> str:
        return self.by_kind.get(str(kind), AS_IT_IS)

    @cached_property
    def digest(self) -> str:
        """sha256 of what was chosen, times left out: what decides the numbers that are computed."""
        return hashlib.sha256(json.dumps(dict(self.by_kind), sort_keys=True).encode()).hexdigest()

    def line(self) -> str:
        """`int_mm: 256 x 192 x 768 float32 (1.8x); float: …`."""
        names: dict[str, list[str]] = {}
        for kind, name in self.by_kind.items():
            gain = f" ({self.speedup[kind]:.1f}x)" if name != AS_IT_IS and kind in self.speedup else ""
            names.setdefault(name, []).append(kind + gain)
        return "; ".join(f"{name}: {', '.join(kinds)}" for name, kinds in sorted(names.items()))


class ChoosesKernels(ABC):
    """A module that may compute by kernels which a measurement on the machine has chosen.

    Attributes:
        choices: what was measured; None: the module measures by itself when it is applied.
    """

    choices: Choices | None

    @property
    @abstractmethod
    def measures(self) -> bool:
        """Whether what it computes depends on `choices`."""


def linears_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The linear layers of decoder layers."""
    return [module for layer in layers for module in layer.modules() if isinstance(module, (nn.Linear, Conv1D))]


def machine() -> str:
    """What a measurement holds for: processor and instructions, torch, threads."""
    return f"{processor()}, {instruction_set()}, torch {torch.__version__}, {torch.get_num_threads()} threads"


@torch.no_grad()
def choose(
    linears: Sequence[nn.Module],
    *,
    kernels: Mapping[str, LinearKernel] = KERNELS,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Choices:
    """Time the candidates of each kind of product that `linears` have, in turns, and take the fastest.

    Weights are coded and packed once for all numbers of rows; that is not in the budget. With gpt2-large's layers it takes a few seconds.

    Args:
        budget_s: of all rounds together, shared by the kinds; each gets at least `LEAST_ROUNDS`.
        clock: seconds.
    """
    by_shape: dict[tuple[int, ...], list[nn.Module]] = {}
    for linear in linears:
        by_shape.setdefault(tuple(weight_of(linear).shape), []).append(linear)
    slice_s = budget_s / max(1, len(by_shape) * len(ROWS))
    by_kind, speedup = {}, {}
    for alike in by_shape.values():
        weight = weight_of(alike[0])
        copies = alike[: max(1, min(COPIES, -(-COPIES_BYTES // weight.numel())))]
        prepared: dict[str, list[Product]] = {}
        for rows in reversed(ROWS):
            fitting = {name: kernel for name, kernel in kernels.items() if name == AS_IT_IS or kernel.fits(weight, rows)}
            for name, kernel in fitting.items():
                there = prepared.setdefault(name, [])
                there += [kernel.prepare(linear) for linear in (copies if rows == 1 else copies[:1])[len(there) :]]
            kind = Kind.of(weight, rows)
            times = _times({name: prepared[name] for name in fitting}, weight, rows, slice_s, clock)
            fastest = min(times, key=lambda name: times[name])
            gain = times[AS_IT_IS] / times[fastest] if times[fastest] > 0 else 1.0
            by_kind[str(kind)] = fastest if gain > 1 + MARGIN else AS_IT_IS
            speedup[str(kind)] = gain if gain > 1 + MARGIN else 1.0
    return Choices(by_kind, speedup)


def _times(
    prepared: Mapping[str, Sequence[Product]], weight: torch.Tensor, rows: int, slice_s: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of one product (rows, K) · weight (N, K) by kernel, in rounds of all until `slice_s` are over."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight)
    for products in prepared.values():
        products[0](x)  # what is only paid once
    began = clock()
    samples: dict[str, list[float]] = {name: [] for name in prepared}
    while len(samples[AS_IT_IS]) < LEAST_ROUNDS or (clock() - began < slice_s and len(samples[AS_IT_IS]) < 50):
        for name, products in prepared.items():
            start = clock()
            for product in products:
                product(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            samples[name].append((clock() - start) / len(products))
    return {name: median(taken) for name, taken in samples.items()}
