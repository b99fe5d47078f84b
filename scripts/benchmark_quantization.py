"""What int8 brings on this machine: `python scripts/benchmark_quantization.py`, gpt2-large-shaped layers of random weights.

Every number is a ratio of callables that take turns in one run. Three parts:

    kernels    one linear layer: ways to multiply int8 codes that torch, and torchao where it is installed, offer, against float32
    prefill    whole models, `AdaptiveQuantization(bits=8, execution="int8")` for all tokens, batch x sequence
    decode     the same, one token at a time in batch 1

A kernel is timed with what it needs around it: coding the inputs with one scale a token, and putting scales and bias back on. On
a machine that is shared `--clock cpu` is fairer: it counts the processor time of this process, so use it with one thread.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

from quicksilver.measure.latency import Alternation, LatencySamples, Ratio, shared_weight_copy
from quicksilver.modules.fastest_linear import FastestLinear
from quicksilver.modules.quantization import AdaptiveQuantization
from quicksilver.runtime import RuntimeModule, apply
from quicksilver.runtime.quantized.choosing import Kind, choose
from quicksilver.runtime.quantized.codes import ByWidth
from quicksilver.runtime.quantized.integer import IntegerExecutor
from quicksilver.runtime.quantized.kernels import KERNELS
from quicksilver.runtime.quantized.linear import LinearLayer

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("kernels", "prefill", "decode")
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
Call = Callable[[], object]


@dataclass(frozen=True)
class Finding:
    """How many times as fast as the first callable of its comparison, median and quartiles over rounds."""

    part: str
    what: str
    name: str
    speedup: float
    low: float
    high: float


def alternate(fns: Mapping[str, Call], options: argparse.Namespace, repeat: int = 1) -> Alternation:
    """As `measure.latency.alternate`, on the chosen clock; `repeat` calls make one sample."""
    clock = CLOCKS[options.clock]
    times: dict[str, list[float]] = {name: [] for name in fns}
    load = psutil.getloadavg()[0]
    for turn in range(options.warmup + options.repeats):
        for name, fn in fns.items():
            began = clock()
            for _ in range(repeat):
                fn()
            if turn >= options.warmup:
                times[name].append(1e3 * (clock() - began) / repeat)
    samples = {name: LatencySamples(ms) for name, ms in times.items()}
    return Alternation(samples, load_before=load, load_after=psutil.getloadavg()[0])


def findings(part: str, what: str, times: Alternation) -> list[Finding]:
    first = next(iter(times))
    ratios: dict[str, Ratio] = {name: times.ratio(first, to=name) for name in times}
    return [Finding(part, what, name, r.median, r.low, r.high) for name, r in ratios.items()]


# -- kernels ---------------------------------------------------------------------------------------------------------------------


def kernels(options: argparse.Namespace) -> list[Finding]:
    wide = 4 * options.width
    shapes = [(options.kernel_rows, options.width, wide), (1, options.width, wide), (1, wide, options.width)]
    found = []
    for rows, width, channels in shapes:
        fns = kernel_calls(rows, width, channels)
        found += findings("kernels", f"{rows} x {width} x {channels}", alternate(fns, options, repeat=1 if rows > 1 else 4))
    return found


def kernel_calls(rows: int, width: int, channels: int, copies: int = 8) -> dict[str, Call]:
    """Ways to apply a linear layer. One row goes round `copies` of it, more than a cache holds: a decoder reads weights once."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator)
    bias = torch.randn(channels, generator=generator)
    copies = copies if rows == 1 else 1
    weights = [torch.randn(channels, width, generator=generator) / width**0.5 for _ in range(copies)]
    turn = iter(range(10**9))

    def each(make: Callable[[torch.Tensor], Call]) -> Call:
        made = [make(weight) for weight in weights]
        return lambda: made[next(turn) % copies]()

    zeros = torch.zeros(channels, dtype=torch.int64)

    def int8(weight: torch.Tensor) -> torch.Tensor:
        return (weight / (weight.abs().amax(1, keepdim=True) / 127)).round().to(torch.int8)

    def coded(dtype: torch.dtype, middle: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(1, keepdim=True) / 127
        return (x / scale).round_().add_(middle).to(dtype), scale

    def in_bfloat16(weight: torch.Tensor) -> Call:
        y, w, b = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
        return lambda: F.linear(y, w, b)

    def ours(weight: torch.Tensor) -> Call:
        linear = nn.Linear(width, channels)
        linear.weight, linear.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
        executor, all_at_8 = IntegerExecutor(weights="int8"), ByWidth({8: None})
        with_weights = LinearLayer({}, linear, {})
        return lambda: executor._linear(with_weights, linear.forward, all_at_8, {}, x)

    def onednn(weight: torch.Tensor) -> Call:
        # Unsigned inputs on purpose: with signed ones this operator runs a reference loop, 3000 times slower (torch 2.13).
        packed, scale = torch.ops.onednn.qlinear_prepack(int8(weight), None), weight.abs().amax(1) / 127

        def call() -> torch.Tensor:
            code, per_token = coded(torch.uint8, 128)
            out = torch.ops.onednn.qlinear_pointwise(
                code, 1.0, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )
            return torch.addcmul(bias, out, per_token)

        return call

    def packed_for_fbgemm(weight: torch.Tensor, bias: torch.Tensor | None) -> object:
        torch.backends.quantized.engine = "x86"
        scale = (weight.abs().amax(1) / 127).double()
        return torch.ops.quantized.linear_prepack(torch._make_per_channel_quantized_tensor(int8(weight), scale, zeros, 0), bias)

    def fbgemm(weight: torch.Tensor) -> Call:
        packed = packed_for_fbgemm(weight, None)

        def call() -> torch.Tensor:
            code, per_token = coded(torch.float32, 0)  # it wants floats, and codes them anew by the scale it is given
            out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(code, 1.0, 128, packed)
            return torch.addcmul(bias, out, per_token)

        return call

    def fbgemm_dynamic(weight: torch.Tensor) -> Call:
        packed = packed_for_fbgemm(weight, bias)
        return lambda: torch.ops.quantized.linear_dynamic(x, packed)

    def weight_only(weight: torch.Tensor) -> Call:
        y, code, scale = x.bfloat16(), int8(weight), (weight.abs().amax(1) / 127).bfloat16()
        return lambda: torch._weight_int8pack_mm(y, code, scale).add_(bias)

    def fastest(weight: torch.Tensor) -> Call:
        linear = nn.Linear(width, channels)
        linear.weight, linear.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
        if not chosen:
            chosen.append(choose([linear]).of(Kind.of(weight, rows)))
        product = KERNELS[chosen[0]].prepare(linear)
        return lambda: product(x)

    chosen: list[str] = []
    calls = {
        "float32": each(lambda weight: lambda: F.linear(x, weight, bias)),
        "bfloat16": each(in_bfloat16),
        "torch._int_mm (ours)": each(ours),
        "onednn.qlinear_pointwise": each(onednn),
        "fbgemm, scale given": each(fbgemm),
        "fbgemm dynamic, one scale a batch": each(fbgemm_dynamic),
        "_weight_int8pack_mm, bfloat16 inputs": each(weight_only),
    }
    product = each(fastest)
    calls[f"auto, which takes {chosen[0]}"] = product
    if importlib.util.find_spec("torchao") is not None:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        def torchao(weight: torch.Tensor) -> Call:
            linear = nn.Linear(width, channels)
            with torch.no_grad():
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)
            model = nn.Sequential(linear)
            quantize_(model, Int8DynamicActivationInt8WeightConfig())
            return lambda: model(x)

        calls["torchao int8 dynamic"] = each(torchao)
    return calls


# -- models ----------------------------------------------------------------------------------------------------------------------


def models(options: argparse.Namespace, layers: int) -> dict[str, tuple[PreTrainedModel, list[RuntimeModule]]]:
    """Dense and quantised, in both dtypes. The vocabulary is small: the output head is never quantised, and shall hide nothing."""
    torch.manual_seed(42)
    positions = options.sequence + options.context + 1024
    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config: PretrainedConfig
    if options.family == "gpt2":
        config = GPT2Config(
            n_layer=layers, n_embd=options.width, n_head=options.heads, vocab_size=1024, n_positions=positions, **ids
        )
    else:  # three matrices in the MLP: two thirds of the width, for as many weights a layer
        config = LlamaConfig(
            num_hidden_layers=layers, hidden_size=options.width, num_attention_heads=options.heads,
            intermediate_size=options.width * 8 // 3 // 8 * 8, vocab_size=1024, max_position_embeddings=positions, **ids,
        )  # fmt: skip
    single = AutoModelForCausalLM.from_config(config).eval()
    half = copy.deepcopy(single).to(torch.bfloat16)

    def quantised(depth: float, kv: bool = True) -> list[RuntimeModule]:
        return [AdaptiveQuantization(bits=8, execution="int8", depth=depth, kv=kv)]

    return {
        "float32": (single, []),
        "float32, int8 from half depth": (shared_weight_copy(single), quantised(0.5)),
        "float32, int8 from half depth, K/V as they are": (shared_weight_copy(single), quantised(0.5, kv=False)),
        "float32, int8 from the second layer on": (shared_weight_copy(single), quantised(0.0)),
        "float32, each product by the fastest kernel": (shared_weight_copy(single), [FastestLinear()]),
        "bfloat16": (half, []),
        "bfloat16, int8 from half depth": (shared_weight_copy(half), quantised(0.5)),
        "bfloat16, int8 from the second layer on": (shared_weight_copy(half), quantised(0.0)),
        "bfloat16, each product by the fastest kernel": (shared_weight_copy(half), [FastestLinear()]),
    }


def prefill(options: argparse.Namespace) -> list[Finding]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1024, (options.batch, options.sequence), generator=generator)
    with ExitStack() as stack:
        fns: dict[str, Call] = {}
        for name, (model, modules) in models(options, options.layers).items():
            run = stack.enter_context(apply(model, modules))

            def one(model: PreTrainedModel = model, run: object = run) -> None:
                run.reset()  # type: ignore[attr-defined]
                model(ids)

            fns[name] = one
        return findings("prefill", f"{options.batch} x {options.sequence}", alternate(fns, options))


def decode(options: argparse.Namespace, tokens: int = 4) -> list[Finding]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1024, (1, options.context), generator=generator)
    with ExitStack() as stack:
        fns: dict[str, Call] = {}
        for name, (model, modules) in models(options, options.decode_layers).items():
            run = stack.enter_context(apply(model, modules))
            state = [model(ids).past_key_values]

            def some(model: PreTrainedModel = model, state: list = state, run: object = run) -> None:
                run.reset()  # type: ignore[attr-defined]
                for _ in range(tokens):
                    state[0] = model(ids[:, :1], past_key_values=state[0]).past_key_values

            fns[name] = some
        return findings("decode", f"1 after {options.context}", alternate(fns, options))


# -- the run ---------------------------------------------------------------------------------------------------------------------


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a row, of prefill")
    parser.add_argument("--context", type=int, default=256, help="tokens cached before, of decode")
    parser.add_argument("--kernel-rows", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4, help="of prefill")
    parser.add_argument("--decode-layers", type=int, default=36, help="of decode, where what a pass costs once weighs more")
    parser.add_argument(
        "--family", choices=("gpt2", "llama"), default="gpt2", help="whose layers; a llama's have as many weights"
    )
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds, at least 3")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmarks" / "benchmark_quantization.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    console = Console(width=None if sys.stdout.isatty() else 130)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")  # of torch's own quantised tensors
    runs = {"kernels": kernels, "prefill": prefill, "decode": decode}
    found: list[Finding] = []
    for part in options.only:
        with console.status(f"{part} …"), torch.inference_mode():
            found += runs[part](options)
    table = Table(
        title=f"int8, speed relative to the first of each comparison ({options.clock} clock, load {psutil.getloadavg()[0]:.1f})"
    )
    for name in ("part", "shape", "what"):
        table.add_column(name)
    for name in ("times as fast", "quartiles"):
        table.add_column(name, justify="right")
    for f in found:
        table.add_row(f.part, f.what, f.name, f"{f.speedup:.2f}", f"{f.low:.2f} to {f.high:.2f}")
    console.print(table)
    shown = {key: value for key, value in vars(options).items() if key != "output"}  # a place on this machine
    content = {"torch": torch.__version__, "options": shown, "findings": [asdict(f) for f in found]}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(f"Saved to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
