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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.errors import UnsupportedModelError
from quicksilver.runtime.quantized.linear import encode_weight, multiply, no_int_mm
from quicksilver.runtime.quantized.proving import INTEGER, instruction_set, processor, wrong

Product = Callable[[torch.Tensor], torch.Tensor]  # (R, K) -> (R, N), in the dtype of what it is given


@dataclass(frozen=True, eq=False)
class LinearKernel:
    """One way to apply a linear layer.

    Attributes:
        prepare: the product with a layer's weights, coded or packed once.
        lacks: why it cannot compute so many rows with a weight (N, K) of this dtype, shape and device; None: it can.
        bound: error that the number format leaves at the worst codes; None: it is the layer itself, and nothing is compared.
        codes: least and greatest code of an input.
        most_rows: of a call; None: any number.
    """

    name: str
    prepare: Callable[[nn.Module], Product]
    lacks: Callable[[torch.Tensor, int], str | None] = lambda weight, rows: None
    bound: float | None = INTEGER
    codes: tuple[int, int] = (-127, 127)
    most_rows: int | None = None

    def refusal(self, weight: torch.Tensor, rows: int) -> str | None:
        """Why it is not offered here: it lacks something, or is wrong on this processor; None: it is offered."""
        if (lacks := self.lacks(weight, rows)) is not None or self.bound is None:
            return lacks
        device, dtype = weight.device.type, str(weight.dtype).removeprefix("torch.")

        def product(code: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
            linear = nn.Linear(codes.shape[1], codes.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(codes.to(weight.dtype), requires_grad=False)
            return self.prepare(linear)(code.to(weight.dtype))

        # Of a result that is rounded to a short format; of float32 `INTEGER` has it already.
        rounding = torch.finfo(weight.dtype).eps if weight.dtype in (torch.bfloat16, torch.float16) else 0.0
        fault = wrong(f"{self.name} {dtype}", device, product, self.bound + rounding, self.codes, self.most_rows)
        return None if fault is None else f"{self.name} {fault} on {processor()} ({instruction_set()})"

    def fits(self, weight: torch.Tensor, rows: int) -> bool:
        return self.refusal(weight, rows) is None


def weight_of(linear: nn.Module) -> torch.Tensor:
    """The weight of a linear layer as (N, K).

    Raises:
        UnsupportedModelError: it is offloaded.
    """
    weight: torch.Tensor = linear.weight.detach()  # type: ignore[operator]
    if weight.is_meta:
        raise UnsupportedModelError("The weights of a linear layer are offloaded and cannot be changed: load the model whole.")
    return weight.T if isinstance(linear, Conv1D) else weight


def _by_rows(
    linear: nn.Module,
    product: Product,
    *,
    dtype: torch.dtype = torch.float32,
    channels: torch.Tensor | None = None,
    greatest: int = 127,
) -> Product:
    """A layer as `product` of rows that are whole numbers from -greatest to greatest, still floats, each with a scale of its own.

    Args:
        channels: scales (N,) that the product leaves out.
    """
    bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]

    def whole(x: torch.Tensor) -> torch.Tensor:
        exact = x.to(dtype)
        scale = exact.abs().amax(-1, keepdim=True).div_(greatest).clamp_(min=torch.finfo(exact.dtype).tiny)
        out = product((exact / scale).round_()).mul_(scale)
        if channels is not None:
            out.mul_(channels)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    return whole


def _bfloat16(linear: nn.Module) -> Product:
    weight = weight_of(linear).bfloat16().contiguous()
    bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]
    half = None if bias is None else bias.detach().bfloat16()
    return lambda x: nn.functional.linear(x.bfloat16(), weight, half).to(x.dtype)


def _bfloat16_lacks(weight: torch.Tensor, rows: int) -> str | None:
    return None if weight.dtype == torch.float32 else f"bfloat16 is for float32 models, and this one is {weight.dtype}"


def _int_mm(linear: nn.Module) -> Product:
    code, scales = encode_weight(weight_of(linear), 8)
    transposed = code.contiguous().T  # (K, N) with K contiguous
    return _by_rows(
        linear, lambda rows: multiply(rows.to(torch.int8), transposed).to(scales.dtype), dtype=scales.dtype, channels=scales
    )


def _qlinear(linear: nn.Module) -> Product:
    code, channel_scale = encode_weight(weight_of(linear), 8)
    packed = torch.ops.onednn.qlinear_prepack(code.contiguous(), None)
    zeros, scales = torch.zeros(len(channel_scale), dtype=torch.int64), channel_scale.float()

    def product(rows: torch.Tensor) -> torch.Tensor:
        # Unsigned on purpose: with signed inputs this operator runs a reference loop, 3000 times slower (torch 2.13).
        return torch.ops.onednn.qlinear_pointwise(
            rows.add_(128).to(torch.uint8), 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return _by_rows(linear, product)


def _qlinear_lacks(weight: torch.Tensor, rows: int) -> str | None:
    if weight.device.type != "cpu":
        return f"qlinear runs on the CPU, and the model is on {weight.device.type}"
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")
    return None if there else "qlinear needs oneDNN, which this torch was built without"


def _weight_only(linear: nn.Module) -> Product:
    weight = weight_of(linear)
    code, channel_scale = encode_weight(weight, 8)
    code, scales = code.contiguous(), channel_scale.to(weight.dtype)
    bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]

    def product(x: torch.Tensor) -> torch.Tensor:
        out = torch._weight_int8pack_mm(x.contiguous(), code, scales)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    return product


def _weight_only_lacks(weight: torch.Tensor, rows: int) -> str | None:
    there = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    return None if there else f"weight_only takes float32 and bfloat16 on the CPU, not {weight.dtype} on {weight.device.type}"


@contextmanager
def _engine(name: str) -> Iterator[None]:
    """torch's quantised tensors are multiplied by the engine of that name."""
    before = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = name
        yield
    finally:
        torch.backends.quantized.engine = before


def _packed(engine: str, weight: torch.Tensor, bias: Any = None, padding: int = 0) -> object:
    """weight (N, K) as int8 by channel, `padding` columns of zeros behind it, packed for an engine."""
    code, scale = encode_weight(weight, 8)
    code = nn.functional.pad(code, (0, padding)).contiguous()
    with _engine(engine), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates the tensors that these operators still take their weights in
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        coded = torch._make_per_channel_quantized_tensor(code, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(coded, None if bias is None else bias.detach().float())


def _engine_lacks(weight: torch.Tensor, rows: int, name: str, engine: str) -> str | None:
    if name == "fbgemm" and rows != 1:
        return "fbgemm has one scale a call: it is offered for one row alone"
    if weight.device.type != "cpu":
        return f"{name} runs on the CPU, and the model is on {weight.device.type}"
    engines = torch.backends.quantized.supported_engines
    return None if engine in engines else f"{name} needs the engine {engine}; this torch has {', '.join(engines)}"


def _fbgemm(linear: nn.Module) -> Product:
    packed = _packed("x86", weight_of(linear), linear.bias)
    return lambda x: torch.ops.quantized.linear_dynamic(x.float(), packed).to(x.dtype)


def _fbgemm_reduced(linear: nn.Module) -> Product:
    packed, of = _packed("x86", weight_of(linear)), torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return _by_rows(linear, lambda rows: of(rows, 1.0, 64, packed), greatest=63)


def _qnnpack(linear: nn.Module) -> Product:
    # It finds a scale of its own for each call. With the ends of the range in two columns that meet zeros it finds 1 and 128.
    packed = _packed("qnnpack", weight_of(linear), padding=2)

    def product(rows: torch.Tensor) -> torch.Tensor:
        ends = rows.new_tensor([-128.0, 127.0]).expand(len(rows), 2)
        with _engine("qnnpack"):
            return torch.ops.quantized.linear_dynamic(torch.cat([rows, ends], 1), packed)

    return _by_rows(linear, product)


KERNELS: dict[str, LinearKernel] = {
    kernel.name: kernel
    for kernel in (
        LinearKernel("float", lambda linear: linear.forward, bound=None),
        LinearKernel("bfloat16", _bfloat16, _bfloat16_lacks, 2**-8),  # its sums may be rounded once
        LinearKernel("int_mm", _int_mm, lambda weight, rows: no_int_mm(weight.device.type, *weight.shape)),
        LinearKernel("qlinear", _qlinear, _qlinear_lacks),
        LinearKernel("weight_only", _weight_only, _weight_only_lacks, 2**-12),  # it adds up 4096 products in float32
        # One scale a call, from the least to the greatest value: half a step.
        LinearKernel("fbgemm", _fbgemm, partial(_engine_lacks, name="fbgemm", engine="x86"), 2**-8, most_rows=1),
    )
}
# int8 by tokens and channels, the best first: what PyTorch's own dynamic quantization uses where `int_mm` is not exact.
DYNAMIC_INT8: tuple[LinearKernel, ...] = (
    KERNELS["int_mm"],
    LinearKernel("fbgemm_reduced", _fbgemm_reduced, partial(_engine_lacks, name="fbgemm_reduced", engine="x86"), codes=(-63, 63)),
    LinearKernel("qnnpack", _qnnpack, partial(_engine_lacks, name="qnnpack", engine="qnnpack")),
)


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
