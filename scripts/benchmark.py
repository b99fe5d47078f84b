"""What the runtime costs and how much of what it saves is real, on a quiet machine: `make benchmark`, or one part of it.

python scripts/benchmark.py [all] --minutes 16     # every part that begins within the minutes, in a process of its own, and a page of them
python scripts/benchmark.py runtime --only none decay --batch 4
python scripts/benchmark.py quantization|break_even|scaling|lm_eval --help
python scripts/benchmark_gpu.py                    # on a CUDA device; python scripts/benchmark_against.py REVISION: against an earlier version

Random weights of true shapes: what is priced is the execution. Every comparison is a ratio of callables that take turns in one run; the first of
them is timed twice a round, and that difference is the noise floor (A/A). Numbers and pictures go to results/benchmarks/.

runtime, on gpt2-large layers (d = 1280, 20 heads) at 8 × 512 tokens:
    none       no module: equal logits, and no slower than the plain model
    decay      exponential decay of active tokens, alpha = 0.07 over 36 layers: realization ratio, the share of time saved over the share of
               executed FLOPs saved; 1 means that every operation not executed is time not spent
    fusion     30% of the prompt fused away at a third of the depth: the same ratio, and the price of choosing the pairs
    decide     the price of deciding alone: modules decide, everything is executed
    predicted  a fifth of the prompt dropped early, nearly all others stopped at 5/8 of the depth with their K/V predicted, on --shapes (a shipped
               model under its own schedules): realization ratio of the prompt, and time per token decoded after it
    generate   greedy decoding: tokens per second without a module; time of a further token when every token stops at half depth
    repeat     the same ratio measured three times over: how far apart its medians are
quantization: what int8 brings. A kernel is timed with what it needs around it: coding the inputs with one scale a token, scales and bias.
    kernels    one linear layer: every kernel of the runtime that is right on this processor, and torchao's where it is installed
    prefill    whole models, int8 products for all tokens, batch × sequence; decode: one token at a time in batch 1
break_even: time over dense inference's, by batch × sequence × width × halting rate. A point pays where even the worse quartile is faster than dense
    inference by more than the noise.
    prefill    one-shot halting of a share of the prompt after the first layer; half of the K/V skipped; 30% fused; int8 from the second layer on
    decode     every new token stops at a share of the depth; the others leave a smaller cache, or narrower products
scaling: time against length and depth, dense and under ExponentialDecay at the paper's ends of alpha (App. J), each with its power law.
lm_eval: our adapter without modules against lm-eval's own model `hf` on the same requests; answers must be equal, which is looked at first. Each
    part takes as many rounds as fit into its share of --seconds, five at least.
`--clock cpu` counts the processor time of this process: fairer on a shared machine, with --threads 1.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from benchmarking import (
    REPEATS,
    RESULTS,
    ROOT,
    SHAPES,
    WARMUP,
    Call,
    Option,
    Passes,
    Shape,
    Way,
    decoding,
    environment,
    in_turns,
    model_of,
    parsed,
    prompt,
    random_ids,
    save,
    say_if_busy,
)  # fmt: skip
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from quicksilver.measure.latency import Alternation, Ratio, alternate_steps
from quicksilver.modules import AdaptiveQuantization, ExponentialDecay, Halting, KVSkipping, StaticDepth, TokenFusion
from quicksilver.modules.fastest_linear import FastestLinear
from quicksilver.modules.fitted import MODELS_FOLDER, ModelShape, model_digest
from quicksilver.modules.staged_halting import Schedule, schedules_of, shipped_with_schedules
from quicksilver.modules.translators import BoundTranslator, Translator
from quicksilver.report.figure import DASHES, MARKERS, PALETTE, Figure, panels, style
from quicksilver.runtime import ConfigError, RuntimeModule, apply
from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.quantized.kernels import KERNELS, Kind, choose

LAYERS_OF_WIDE = 4  # of shapes wider than --width: a pass of 8 × 512 tokens takes half a minute
PAPER_LAYERS, PAPER_ALPHA = 36, 0.07  # gpt2-large; App. J: alpha from 0.05 to 0.1
ALPHAS = (0.05, 0.1)  # per layer, App. J
PHASES = ("prefill", "decode")
STEPS = 4  # tokens decoded in one sample of break_even and of quantization
COPIES = 8  # of a linear layer that one row goes round, more than a cache holds: a decoder reads weights once
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
Options = argparse.Namespace


def show(title: str, rows: Any) -> None:
    print(f"{title}\n\n{pd.DataFrame(rows).to_string(index=False, na_rep='too few points')}\n")


# -- runtime ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """Models of random weights, their input, and what was found with them."""

    options: Options
    dtype: torch.dtype
    findings: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        o = self.options
        self.ids = random_ids(o.batch, o.sequence, vocabulary=o.vocabulary, device=o.device)
        self.prompt = prompt(self.ids, use_cache=False)

    def model(self, layers: int, shape: Shape | None = None) -> PreTrainedModel:
        o = self.options
        shape = shape or Shape("given", "gpt2", o.width, o.heads, 4 * o.width, layers, o.vocabulary)
        return model_of(shape, layers, o.sequence + o.new_tokens, vocabulary=o.vocabulary, dtype=self.dtype, device=o.device)

    def turns(
        self, model: PreTrainedModel, ways: Mapping[str, Way], passes: Passes | None = None
    ) -> tuple[Alternation, dict[str, float]]:
        """The plain model and these ways, in turns; the share that each saves of its executed FLOPs."""
        times, executed = in_turns({"plain": Way(model, None), **ways}, passes or self.prompt, self.options)
        return times, {name: 1 - flops / executed["plain"] for name, flops in executed.items()}

    def found(
        self, section: str, what: str, ratio: Ratio, times: Alternation | None, target: tuple[str, float], unit: str = "", **details: Any
    ) -> None:  # fmt: skip
        """Note a finding; `target` is ("at least" | "at most", bound)."""
        reached = ratio.median >= target[1] if target[0] == "at least" else ratio.median <= target[1]
        if times is not None:
            details["samples_ms"] = {name: samples.ms for name, samples in times.items()}
            details["control_ms"], details["load_average"] = times.control_ms, [times.load_before, times.load_after]
        self.findings.append({
            "section": section, "dtype": str(self.dtype).removeprefix("torch."), "what": what, "value": ratio.median, "low": ratio.low,
            "high": ratio.high, "unit": unit, "target": f"{target[0]} {target[1]:g}", "reached": reached,
            "noise_floor": None if times is None else times.noise_floor, "details": details,  # None: not a time
        })  # fmt: skip

    def slower(self, section: str, what: str, times: Alternation, name: str, most: float, **details: Any) -> None:
        """How much slower than the plain model, in percent."""
        ratio = transformed(times.ratio(name, "plain"), lambda r: 100 * (r - 1))
        self.found(section, what, ratio, times, ("at most", most), "%", **details)

    def realization(
        self, section: str, what: str, times: Alternation, name: str, saved: float, least: float, **details: Any
    ) -> None:
        """Share of time saved over the share `saved` of FLOPs."""
        ratio = times.ratio(name, "plain")
        more = {"executed_flops_saved": saved, "time_saved": 1 - ratio.median, **details}
        self.found(section, what, transformed(ratio, lambda r: (1 - r) / saved), times, ("at least", least), **more)


def transformed(ratio: Ratio, of: Callable[[float], float]) -> Ratio:
    """A ratio of times turned into what is reported; `of` is monotonic."""
    low, high = sorted((of(ratio.low), of(ratio.high)))
    return Ratio(of(ratio.median), low, high)


HALF_DEPTH = StaticDepth(depth=0.5, missing_kv="drop")


def no_module(bench: Bench) -> None:
    model = bench.model(bench.options.layers)
    plain = model(bench.ids, use_cache=False).logits
    with apply(model, []):
        identical = float(torch.equal(plain, model(bench.ids, use_cache=False).logits))
    times, _ = bench.turns(model, {"no module": Way(model)})
    bench.slower("none", "slower than the plain model", times, "no module", 1.0)
    bench.found("none", "logits bit-identical (1: yes)", Ratio(identical, identical, identical), None, ("at least", 1.0))


def policies(
    bench: Bench, section: str, layers: int, modules: Mapping[str, RuntimeModule], kinds: Sequence[str], **details: Any
) -> None:
    """The realization ratio of each policy (`compact`), and what its decisions alone cost (`decide`)."""
    model = bench.model(layers)
    ways = {(name, kind): Way(model, [module], kind) for kind in kinds for name, module in modules.items()}
    times, saved = bench.turns(model, {", ".join(key): way for key, way in ways.items()})
    for (name, kind), key in ((key, ", ".join(key)) for key in ways):
        if kind == "decide":
            bench.slower(section, f"deciding costs: {name}", times, key, 2.0)
        else:
            what = f"realization ratio, {name} ({100 * saved[key]:.1f}% of FLOPs saved)"
            bench.realization(section, what, times, key, saved[key], 0.95, **details, layers=layers)


def decay(bench: Bench) -> None:
    # Fewer layers fall along the same curve: the share of active tokens at the same fraction of depth is that of 36 layers.
    alpha = PAPER_ALPHA * PAPER_LAYERS / bench.options.decay_layers
    # The paper drops (2.2); projecting K/V of halted tokens is work that the decay does not ask for.
    rows = {"even rows": True, "uneven rows": False}
    made = {name: ExponentialDecay(alpha=alpha, even=even, missing_kv="drop") for name, even in rows.items()}
    policies(bench, "decay", bench.options.decay_layers, made, ("compact",), alpha=alpha)


def fusion(bench: Bench) -> None:
    shared: dict[str, Any] = {"rule": "capacity", "fused_share": 0.3, "start": 1 / 3}
    made = {"closest states": TokenFusion(**shared), "least attended": TokenFusion(criterion="attention", **shared)}
    policies(bench, "fusion", bench.options.decay_layers, made, ("compact", "decide"))


def decide(bench: Bench) -> None:
    made: dict[str, RuntimeModule] = {
        # Nothing is below these thresholds, so every token is asked about after every layer: the dearest case.
        "drift thresholds, every token and layer": Halting(tau_drift=1e-9, window=(0.0, 1.0), tau_entropy=None, resume_layers=0),
        "random decay, even rows": ExponentialDecay(),
        "Halting() as it comes": Halting(rule="capacity", resume_layers=0),
    }
    policies(bench, "decide", bench.options.layers, made, ("decide",))


def random_translator(model: PreTrainedModel, source_layer: int) -> BoundTranslator:
    """A map of the right shape: what it costs does not depend on what it predicts."""
    architecture = architecture_of(model)
    shape = ModelShape.of(architecture)
    sizes = (1 + shape.width, shape.n_layers - 1 - source_layer, 2, shape.n_kv_heads, shape.head_dim)
    weight = 0.02 * torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    return Translator(source_layer, weight, shape, model_digest(model)).bound(architecture)


def predicted(bench: Bench) -> None:
    o, decoded = bench.options, decoding(bench.ids, bench.options.new_tokens)
    after: Passes = lambda model, begin: decoded(model, lambda: None)  # the prompt's run goes on
    for name in o.shapes:
        if name in SHAPES:
            shape = SHAPES[name]
            layers = min(shape.layers, LAYERS_OF_WIDE if shape.width > o.width else 2 * o.layers)
            drop, predict = max(1, round(layers * 3 / 16)), max(2, round(layers * 5 / 8))
            schedule = Schedule(drop, 0.2, predict, protect_last=min(32, o.sequence // 8))
            model = bench.model(layers, shape)
            module = schedule.halting(translator=random_translator(model, schedule.predict_before))
            made = {f"{name} × {layers} layers, {schedule}": module}
        else:  # a shipped model under its own schedules
            model = AutoModelForCausalLM.from_pretrained(MODELS_FOLDER / name, dtype=bench.dtype).to(o.device).eval()
            layers, found = model.config.num_hidden_layers, schedules_of(architecture_of(model))
            made = {f"{name}, its {100 * save_:g}%, {schedule}": schedule.halting() for save_, schedule in found.items()}
        for what, module in made.items():
            ways = {"predicted": Way(model, [module])}
            times, saved = bench.turns(model, ways)
            share = saved["predicted"]
            said = f"realization ratio, {what} ({100 * share:.1f}% of FLOPs saved)"
            bench.realization("predicted", said, times, "predicted", share, 0.9, layers=layers)
            steps, _ = bench.turns(model, ways, after)
            bench.slower("predicted", f"decoding after it, slower: {what}", steps, "predicted", 1.5, layers=layers)


def generate(bench: Bench) -> None:
    o, ids = bench.options, bench.ids
    model: Any = bench.model(o.layers)  # transformers decorates `generate` in a way that type checkers misread
    how = {
        "max_new_tokens": o.new_tokens,
        "min_new_tokens": o.new_tokens,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }

    def whole(model: Any, begin: Call) -> tuple[Call, ...]:
        return (lambda: (begin(), model.generate(ids, **how)),)

    calls, _ = bench.turns(model, {"no module": Way(model)}, whole)
    steps, saved = bench.turns(
        model, {"no module": Way(model), "half depth": Way(model, [HALF_DEPTH])}, decoding(ids, o.new_tokens - 1)
    )
    for what, times in (("whole call", calls), ("decoding alone", steps)):
        ratio = transformed(times.ratio("no module", "plain"), lambda r: 1 / r)
        said = f"no module: tokens per second, {what}, of the plain model's"
        bench.found("generate", said, ratio, times, ("at least", 0.98))
    share = saved["half depth"]
    said = f"half depth: share of the FLOPs saved ({100 * share:.1f}%) that time per token falls by"
    bench.realization("generate", said, steps, "half depth", share, 0.85, layers=o.layers)


def repeat(bench: Bench) -> None:
    model = bench.model(bench.options.layers)
    series = [bench.turns(model, {"half depth": Way(model, [HALF_DEPTH])})[0] for _ in range(3)]
    ratios = [times.ratio("half depth", "plain").median for times in series]
    spread = 100 * (max(ratios) - min(ratios)) / statistics.median(ratios)
    noisiest = max(series, key=lambda times: times.noise_floor or 0.0)
    said, ratio = "half depth: spread of one ratio, measured three times", Ratio(spread, spread, spread)
    bench.found("repeat", said, ratio, noisiest, ("at most", 3.0), "%", ratios=ratios)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "none": no_module, "decay": decay, "fusion": fusion, "decide": decide, "predicted": predicted, "generate": generate, "repeat": repeat,
}  # fmt: skip


def runtime(o: Options) -> int:
    around = environment(o.device) | {"load_average_before": say_if_busy()}
    findings: list[dict[str, Any]] = []
    for name in o.only:
        for dtype in o.dtypes:
            bench = Bench(o, getattr(torch, dtype))
            SECTIONS[name](bench)
            findings += bench.findings
    shape = f"{o.batch} × {o.sequence}, d = {o.width}, {o.heads} heads, {o.repeats} rounds"
    show(f"Runtime benchmark: {shape}", _runtime_rows(findings))
    save(o.output, {"environment": around, "options": o, "findings": findings})
    return 0


# -- quantization ----------------------------------------------------------------------------------------------------------------


def speedups(part: str, what: str, times: Alternation) -> list[dict[str, Any]]:
    """How many times as fast as the first callable: median and quartiles over rounds."""
    ratios = {name: times.ratio(next(iter(times)), to=name) for name in times}
    return [
        {"part": part, "what": what, "name": name, "speedup": r.median, "low": r.low, "high": r.high}
        for name, r in ratios.items()
    ]


def kernels(o: Options) -> list[dict[str, Any]]:
    wide, found = 4 * o.width, []
    for rows, width, channels in ((o.kernel_rows, o.width, wide), (1, o.width, wide), (1, wide, o.width)):
        calls = {name: (call,) for name, call in kernel_calls(rows, width, channels).items()}
        times = alternate_steps(calls, o.warmup, o.repeats, clock=CLOCKS[o.clock])[0]
        found += speedups("kernels", f"{rows} x {width} x {channels}", times)
    return found


def kernel_calls(rows: int, width: int, channels: int) -> dict[str, Call]:
    """Every kernel for this product, as far as it is right on this processor, torchao's where it is installed, and the one that `auto` takes."""
    torch.manual_seed(0)
    x = torch.randn(rows, width)
    linears = [nn.Linear(width, channels).requires_grad_(False) for _ in range(COPIES if rows == 1 else 1)]
    chosen = choose(linears[:1]).of(Kind.of(linears[0].weight, rows))
    ways: dict[str, Callable[[nn.Module], Call]] = {}
    for name, kernel in KERNELS.items():
        if (refusal := kernel.refusal(linears[0].weight, rows)) is None:
            ways["float32" if name == "float" else name] = kernel.prepare
        else:
            print(f"{name} is not timed: {refusal}.", file=sys.stderr)
    ways[f"auto, which takes {chosen}"] = KERNELS[chosen].prepare
    if importlib.util.find_spec("torchao") is not None:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        def torchao(linear: nn.Module) -> Call:
            model = nn.Sequential(copy.deepcopy(linear))
            quantize_(model, Int8DynamicActivationInt8WeightConfig())
            return model

        ways["torchao int8 dynamic"] = torchao

    def around(make: Callable[[nn.Module], Call]) -> Call:
        products = [make(linear) for linear in linears]
        turn = cycle(products)
        return lambda: [next(turn)(x) for _ in range(1 if rows > 1 else 4)]

    return {name: around(make) for name, make in ways.items()}


def quantized_models(o: Options, layers: int) -> dict[str, Way]:
    """Dense and quantised, in both dtypes. The output head is never quantised."""
    # A llama has three matrices in the MLP: two thirds of the width, for as many weights a layer.
    inner = 4 * o.width if o.family == "gpt2" else o.width * 8 // 3 // 8 * 8
    single = model_of(Shape("given", o.family, o.width, o.heads, inner, layers, 1024), layers, o.sequence + o.context + 1024)
    half: Any = copy.deepcopy(single)
    ways: dict[str, dict[str, Any]] = {
        "int8 from half depth": {"depth": 0.5},
        "int8 from half depth, K/V as they are": {"depth": 0.5, "kv": False},
        "int8 from the second layer on": {"depth": 0.0},
    }
    found: dict[str, Way] = {}
    for dtype, model in {"float32": single, "bfloat16": half.to(torch.bfloat16)}.items():
        found[dtype] = Way(model)
        for name, how in ways.items():
            if dtype == "float32" or "kv" not in how:
                found[f"{dtype}, {name}"] = Way(model, [AdaptiveQuantization(bits=8, execution="int8", **how)])
        found[f"{dtype}, each product by the fastest kernel"] = Way(model, [FastestLinear()])
    return found


def quantized_prefill(o: Options) -> list[dict[str, Any]]:
    times, _ = in_turns(quantized_models(o, o.layers), prompt(random_ids(o.batch, o.sequence)), o, clock=CLOCKS[o.clock])
    return speedups("prefill", f"{o.batch} x {o.sequence}", times)


def quantized_decode(o: Options) -> list[dict[str, Any]]:
    times, _ = in_turns(quantized_models(o, o.decode_layers), decoding(random_ids(1, o.context), STEPS), o, clock=CLOCKS[o.clock])
    return speedups("decode", f"1 after {o.context}", times)


QUANTIZED = {"kernels": kernels, "prefill": quantized_prefill, "decode": quantized_decode}


def quantization(o: Options) -> int:
    if o.threads:
        torch.set_num_threads(o.threads)
    found = [one for part in o.only for one in QUANTIZED[part](o)]
    save(o.output, {"torch": torch.__version__, "options": o, "findings": found})
    return 0


# -- break-even ------------------------------------------------------------------------------------------------------------------


def mechanisms(phase: str, rates: Sequence[float], layers: int) -> dict[str, RuntimeModule]:
    """What is timed against dense inference, by name; `halting` with each of its rates."""
    once: dict[str, Any] = {"rule": "capacity", "signal": "random", "schedule": "one_shot", "missing_kv": "drop"}

    def halting(rate: float) -> RuntimeModule:
        if phase == "decode":
            return StaticDepth(depth=1 - rate, missing_kv="drop")
        return Halting(halted_share=rate, window=(0.0, 1 / layers), resume_layers=0, **once)

    return {f"halting {rate:.0%}": halting(rate) for rate in rates} | {
        "kv skipping 50%": KVSkipping(criterion="attention", skipped_share=0.5, min_depth=0.0),
        "fusion 30%": TokenFusion(rule="capacity", tau_fuse=None, criterion="random", fused_share=0.3, start=0.0),
        "int8": AdaptiveQuantization(bits=8, execution="int8", depth=0.0),
    }


def cell_of(model: PreTrainedModel, shape: Shape, phase: str, batch: int, sequence: int, o: Options) -> list[dict[str, Any]]:
    """One cell of the map: every mechanism at this batch and sequence, in turns with dense inference."""
    place = {"shape": shape.name, "width": shape.width, "phase": phase, "batch": batch, "sequence": sequence}
    ids = random_ids(batch, sequence, device=o.device)
    passes = decoding(ids, STEPS) if phase == "decode" else prompt(ids, use_cache=True, logits_to_keep=1)
    dense, seconds = passes(model, lambda: None), 0.0
    for _ in range(2):  # the first one asks the system for memory
        began = time.perf_counter()
        for step in dense:
            step()
        seconds = time.perf_counter() - began
    if seconds > o.cell_seconds:
        return [place | {"status": f"left out: one pass takes {seconds:.1f} s, more than --cell-seconds {o.cell_seconds:g}"}]
    ways = {name: Way(model, [module]) for name, module in mechanisms(phase, o.rates, o.layers).items()}
    times, _ = in_turns({"dense": Way(model, None), **ways}, passes, o)
    return [place | cell_row(times, name) for name in ways]


def cell_row(times: Alternation, name: str) -> dict[str, Any]:
    """One mechanism in one cell."""
    ratio, noise = times.ratio(name, to="dense"), times.noise_floor or 0.0
    verdict = "pays" if ratio.high < 1 - noise else "costs" if ratio.low > 1 + noise else "within noise"
    return {
        "mechanism": name, "status": "measured", "verdict": verdict, "time_saved_pct": 100 * (1 - ratio.median),
        "time_saved_pct_low": 100 * (1 - ratio.high), "time_saved_pct_high": 100 * (1 - ratio.low), "noise_floor_pct": 100 * noise,
        "dense_ms": times["dense"].median, "load_average": times.load_before, "warnings": "; ".join(times.warnings),
    }  # fmt: skip


def break_even_rates(frame: pd.DataFrame) -> pd.DataFrame:
    """The halting rate from which on time is saved, for each cell; `none` where no measured rate saves more than noise.

    Between the last rate that saves nothing and the first that pays it is interpolated.
    """
    found, keys = [], ["shape", "phase", "batch", "sequence"]
    for key, cell in frame[frame["status"] == "measured"].groupby(keys, sort=False):
        at, before = "none", None
        for step in cell[cell["mechanism"].str.startswith("halting")].to_dict("records"):
            rate, saved = float(step["mechanism"].split()[1].rstrip("%")), step["time_saved_pct"]
            if step["verdict"] == "pays":
                at = f"at most {rate:.0f}%"
                if before is not None and before[1] < 0:
                    at = f"{before[0] + (rate - before[0]) * -before[1] / (saved - before[1]):.0f}%"
                break
            before = (rate, saved)
        found.append((*key, at))
    return pd.DataFrame(found, columns=[*keys, "rate"])


def draw_break_even(frame: pd.DataFrame, around: Mapping[str, Any], o: Options) -> Figure:
    """A map for each phase and shape: a line a batch and sequence, a column a mechanism."""
    there = frame[frame["status"] == "measured"]
    shapes, phases, names = (list(dict.fromkeys(there[column])) for column in ("shape", "phase", "mechanism"))
    with style():
        drawing, axes = panels(len(phases), len(shapes), size=(1.2 + 2.9 * len(shapes), 1.0 + 2.3 * len(phases)), sharex=True)
        for plot, (phase, shape) in zip(axes.flat, ((phase, shape) for phase in phases for shape in shapes), strict=True):
            cells = there[(there["phase"] == phase) & (there["shape"] == shape)]
            lines = list(dict.fromkeys(zip(cells["batch"], cells["sequence"], strict=True)))
            plot.set_title(f"{shape}, {phase}")
            plot.grid(visible=False)
            if not lines:
                plot.text(0.5, 0.5, "left out", ha="center", transform=plot.transAxes)
                continue
            shown = cells.assign(shown=cells["time_saved_pct"].where(cells["verdict"] != "within noise", 0.0))
            values = shown.pivot_table(index=["batch", "sequence"], columns="mechanism", values="shown").reindex(lines)[names]
            drawn = plot.imshow(values.to_numpy(), cmap="RdBu", vmin=-75, vmax=75, aspect="auto")
            for cell in cells.to_dict("records"):
                saved, at = (
                    cell["time_saved_pct"],
                    (names.index(cell["mechanism"]), lines.index((cell["batch"], cell["sequence"]))),
                )
                said = "·" if cell["verdict"] == "within noise" else f"{saved:+.0f}"
                plot.text(*at, said, ha="center", va="center", size=7, color="white" if abs(saved) > 50 else "black")
            plot.set_yticks(range(len(lines)), [f"{batch} × {sequence}" for batch, sequence in lines])
            plot.set_xticks(range(len(names)), names, rotation=60, ha="right")
            if shape == shapes[0]:
                plot.set_ylabel("batch × tokens")
        drawing.colorbar(drawn, ax=axes, label="time saved, % of dense (more is better)", shrink=0.8)
    caption = (
        f"Random weights of the true widths, {o.layers} layers, float32; {STEPS} tokens after each prompt in decode. Percent of dense time "
        "saved, median of rounds in turns; · = no further from dense than dense from itself (A/A) or than the quartiles.",
        machine_of(around, o),
    )
    return Figure("break_even", "Where a mechanism starts to pay", frame, drawing, caption)


def machine_of(around: Mapping[str, Any], o: Options) -> str:
    return (
        f"Machine: {around['machine']}, {around['threads']} threads, torch {around['torch']}, transformers {around['transformers']}; "
        f"{o.repeats} rounds."
    )


def break_even(o: Options) -> int:
    if not all(rate < 1 for rate in o.rates):
        raise ConfigError(f"--rates {' '.join(map(str, o.rates))}: shares between 0 and 1.")
    found: list[dict[str, Any]] = []
    for name in o.shapes:
        model = model_of(SHAPES[name], o.layers, max(o.sequence) + STEPS, device=o.device)
        for phase in o.phases:
            for batch in o.batch:
                for sequence in o.sequence:
                    found += cell_of(model, SHAPES[name], phase, batch, sequence, o)
    frame, around = pd.DataFrame(found), environment(o.device)
    if not frame["status"].eq("measured").any():
        raise ConfigError(f"nothing was measured: every cell takes longer than --cell-seconds {o.cell_seconds:g}.")
    draw_break_even(frame, around, o).write(o.output)
    title = f"Halting rate from which time is saved ({around['machine']}, {around['threads']} threads)"
    show(title, break_even_rates(frame))
    for cell in frame[frame["status"] != "measured"].to_dict("records"):
        print(f"{cell['shape']}, {cell['phase']}, {cell['batch']} × {cell['sequence']}: {cell['status']}")
    return 0


# -- scaling ---------------------------------------------------------------------------------------------------------------------


def scaling_point(sequence: int, layers: int, o: Options) -> list[dict[str, Any]]:
    """Dense inference and both decays, in turns, at one length and depth."""
    model = model_of(SHAPES[o.shape], layers, sequence, device=o.device)
    # Few layers fall along the curve of all: the share of active tokens at the same fraction of depth is that of the true model.
    scale = SHAPES[o.shape].layers / layers
    ways = {f"decay {alpha:g}": Way(model, [ExponentialDecay(alpha=alpha * scale, missing_kv="drop")]) for alpha in ALPHAS}
    ids = random_ids(o.batch, sequence, device=o.device)
    times, executed = in_turns({"dense": Way(model, None), **ways}, prompt(ids, use_cache=False), o)
    place = {"shape": o.shape, "batch": o.batch, "sequence": sequence, "layers": layers}
    return [
        place
        | {"way": name, "ms": samples.median, "iqr_ms": samples.iqr, "noise_floor_pct": 100 * (times.noise_floor or 0.0)}
        | {"executed_flops": executed[name], "time_of_dense": times.ratio(name, to="dense").median}
        | {"flops_of_dense": executed[name] / executed["dense"]}
        | {"load_average": times.load_before, "warnings": "; ".join(times.warnings)}
        for name, samples in times.items()
    ]


def power_law(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Exponent of y ~ x^k by least squares in logarithms, and R²; NaN of fewer than three points, which any line nearly fits."""
    if len(x) < 3:
        return math.nan, math.nan
    logs, values = np.log(x), np.log(y)
    slope, intercept = np.polyfit(logs, values, 1)
    residual = float(((values - (slope * logs + intercept)) ** 2).sum())
    return float(slope), 1 - residual / float(((values - values.mean()) ** 2).sum())


def fits(frame: pd.DataFrame) -> pd.DataFrame:
    """Power laws of time: against length, and against depth, for each way."""
    found = []
    for axis in ("sequence", "layers"):
        for way, mine in frame[frame["axis"] == axis].groupby("way", sort=False):
            found.append((axis, way, *power_law(mine[axis], mine["ms"]), len(mine)))
    return pd.DataFrame(found, columns=["axis", "way", "exponent", "r_squared", "points"])


def draw_scaling(frame: pd.DataFrame, fitted: pd.DataFrame, around: Mapping[str, Any], o: Options) -> Figure:
    """Time against length and against depth, on logarithmic axes."""
    labels = {"sequence": "tokens of a sequence", "layers": "layers"}
    with style():
        drawing, axes = panels(1, 2, size=(7.6, 3.3))
        for plot, axis in zip(axes.flat, labels, strict=True):
            for place, (way, mine) in enumerate(frame[frame["axis"] == axis].groupby("way", sort=False)):
                fit = fitted[(fitted["axis"] == axis) & (fitted["way"] == way)].iloc[0]
                law = "" if math.isnan(fit["exponent"]) else f": ~ {fit['exponent']:.2f} power, R² {fit['r_squared']:.3f}"
                plot.errorbar(
                    mine[axis], mine["ms"], yerr=mine["iqr_ms"] / 2, label=f"{way}{law}", color=PALETTE[place], marker=MARKERS[place],
                    linestyle=DASHES[place], elinewidth=0.7, capsize=2,
                )  # fmt: skip
            plot.set_xscale("log", base=2)
            plot.set_yscale("log", base=2)
            plot.set_xlabel(labels[axis])
            plot.set_ylabel("time of one pass, ms")
            points = sorted(set(frame.loc[frame["axis"] == axis, axis]))
            plot.set_xticks(points, [f"{point:g}" for point in points])
            plot.yaxis.set_major_formatter("{x:g}")
            plot.legend()
    caption = (
        f"{o.shape}'s width with random weights, batch {o.batch}, float32; left with {o.fixed_layers} layers, right with "
        f"{o.fixed_sequence} tokens. decay α: N·exp(−αℓ) tokens active in layer ℓ of the true depth ({SHAPES[o.shape].layers} layers), at the "
        "same fraction of this one's. Medians of rounds in turns; bars: half of the interquartile range.",
        machine_of(around, o),
    )
    return Figure("scaling", "Time against length and depth", frame, drawing, caption)


def scaling(o: Options) -> int:
    points = [("sequence", sequence, o.fixed_layers) for sequence in o.sequence]
    points += [("layers", o.fixed_sequence, layers) for layers in o.layers]
    found = [{"axis": axis} | row for axis, sequence, layers in points for row in scaling_point(sequence, layers, o)]
    frame, around = pd.DataFrame(found), environment(o.device)
    fitted = fits(frame)
    draw_scaling(frame, fitted, around, o).write(o.output)
    title = f"Time against length and depth ({o.shape}, {around['machine']}, {around['threads']} threads)"
    show(title, fitted.round({"exponent": 3, "r_squared": 4}))
    return 0


# -- lm-evaluation-harness -------------------------------------------------------------------------------------------------------

LM_PARTS = ("contexts", "letters", "choices", "rolling", "generate")
LM_CALLS = {"rolling": "loglikelihood_rolling", "generate": "generate_until"}  # other parts: loglikelihood
MOST_SLOWER = 1.05  # what the adapter may cost
NATS = 1e-4  # of a log-likelihood; of a whole text, which is a sum over many tokens, ten times as much
LETTERS = (" A", " B", " C", " D")
LEAST_ROUNDS, MOST_ROUNDS = 5, 25


def requests(part: str, count: int, words: int) -> list[Any]:
    """Requests of one part on the text that every CPython carries; contexts of `words` words and up to half as many more."""
    from lm_eval.api.instance import Instance

    from quicksilver.data.made_here import python_docs

    text = python_docs("test").split()
    starts = range(0, count * 3 * words, 3 * words)
    contexts = [" ".join(text[start : start + words + (7 * i) % (words // 2)]) for i, start in enumerate(starts)]
    following = [[" " + " ".join(text[start + k : start + k + 3 + k % 3]) for k in (0, 5, 9, 14)] for start in starts]
    pairs = list(zip(contexts, following, strict=True))
    arguments: dict[str, Iterator[tuple[Any, ...]]] = {
        "contexts": ((context, choices[0]) for context, choices in pairs),  # nothing is shared: both compute the same tokens
        "letters": ((context, letter) for context in contexts for letter in LETTERS),
        "choices": ((context, one) for context, choices in pairs for one in choices),  # ours computes the context once
        "rolling": ((context,) for context in contexts),
        "generate": ((context, {"until": ["\n\n"], "max_gen_toks": 24}) for context in contexts[: max(1, count // 4)]),
    }
    kind: Any = LM_CALLS.get(part, "loglikelihood")
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments[part])]


def apart(part: str, ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference in nats; of texts 0, or infinity where two differ."""
    if part == "generate":
        return 0.0 if ours == theirs else math.inf
    pairs = zip(ours, theirs, strict=True)
    if part == "rolling":
        return max(abs(a - b) for a, b in pairs)
    return max(abs(a[0] - b[0]) if a[1] == b[1] else math.inf for a, b in pairs)


def lm_part(part: str, hflm: Any, ours: Any, o: Options) -> dict[str, Any]:
    """Our time over HFLM's, and HFLM's over its own: median and quartiles over rounds."""
    of = requests(part, o.contexts, o.words)

    def asked(model: Any) -> Call:
        return lambda: getattr(model, LM_CALLS.get(part, "loglikelihood"))(of, disable_tqdm=True)

    began = time.perf_counter()
    difference = apart(part, asked(ours)(), asked(hflm)())  # and nothing is cold after it
    round_s = 1.5 * (time.perf_counter() - began)
    rounds = min(max(LEAST_ROUNDS, int(o.seconds / len(o.parts) / round_s)), MOST_ROUNDS)
    calls = {"hflm": (asked(hflm),), "quicksilver": (asked(ours),), "hflm again": (asked(hflm),)}
    times = alternate_steps(calls, 0, rounds, control=False, clock=CLOCKS[o.clock])[0]
    ratio, noise = times.ratio("quicksilver", to="hflm"), times.ratio("hflm again", to="hflm")
    return {
        "part": part, "hflm_ms": times["hflm"].median, "ratio": ratio.median, "low": ratio.low, "high": ratio.high, "noise_low": noise.low,
        "noise_high": noise.high, "apart": difference, "rounds": rounds, "reached": ratio.median <= MOST_SLOWER,
    }  # fmt: skip


def lm_eval(o: Options) -> int:
    from lm_eval.models.huggingface import HFLM

    from quicksilver.lm_eval import QuickSilverLM

    load = os.getloadavg()[0]
    torch.set_num_threads(o.threads)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as results:
        ours = QuickSilverLM(pretrained=o.model, batch_size=o.batch_size, results_dir=results)
    hflm = HFLM(pretrained=ours.model, tokenizer=ours.tokenizer, batch_size=o.batch_size)
    found = [lm_part(part, hflm, ours, o) for part in o.parts]
    what = f"{o.model}, batch {o.batch_size}, {o.contexts} contexts, {o.clock} clock"
    show(f"quicksilver without modules over HFLM: {what}", _lm_rows(found))
    save(o.output, {"environment": {**environment("cpu"), "load_average_before": load}, "options": o, "findings": found})
    wrong = [f["part"] for f in found if f["apart"] > (10 * NATS if f["part"] == "rolling" else NATS)]
    if wrong:
        print(f"answers differ: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


# -- all of them, and their page -------------------------------------------------------------------------------------------------


def all_parts(o: Options) -> int:
    say_if_busy()
    began = time.monotonic()
    notes: dict[str, str] = {}
    ran: dict[str, str] = {}
    o.output.mkdir(parents=True, exist_ok=True)
    for part in o.only:
        if time.monotonic() - began > 60 * o.minutes:
            notes[part] = f"the {o.minutes:g} minutes were over"
            continue
        print(f"[{part}]", flush=True)
        started, more = time.monotonic(), getattr(o, part).split()
        why = run_part(part, o.output, more)
        ran[part] = f"{time.monotonic() - started:.0f} s (`benchmark.py {' '.join([*PARTS[part][0], *more])}`)"
        if why is not None:
            notes[part] = why
    page = o.output / "README.md"
    page.write_text(markdown(o.output, notes, ran), encoding="utf-8")
    print(f"Written: {page} ({time.monotonic() - began:.0f} s)")
    for part, why in notes.items():
        print(f"{part}: not measured, {why}.", file=sys.stderr)
    return 1 if notes else 0


# A part's words, and what it writes: those without a name are given the folder.
PARTS: dict[str, tuple[tuple[str, ...], str]] = {
    "runtime": (
        ("runtime", *["--only", "none", "decay", "fusion", "decide", "generate", "repeat", "--dtypes", "float32", "--batch", "4", "--decay-layers", "8", "--new-tokens", "17"]),
        "benchmark.json",
    ),
    "prediction": (
        ("runtime", *["--only", "predicted", "--dtypes", "float32", "--shapes", "gpt2-large", "--repeats", "3", "--new-tokens", "17"]),
        "benchmark_prediction_gpt2-large.json",
    ),
    "quantization": (
        ("quantization", *["--batch", "4", "--sequence", "256", "--layers", "2", "--decode-layers", "12", "--kernel-rows", "1024", "--repeats", "3"]),
        "benchmark_quantization.json",
    ),
    "break_even": (("break_even", "--cell-seconds", "0.5"), ""),
    "scaling": (("scaling", "--repeats", "3"), ""),
}  # fmt: skip


def run_part(part: str, output: Path, more: Sequence[str]) -> str | None:
    """Run one part in a process of its own; None, or why there is nothing of it."""
    words, file = PARTS[part]
    command = [sys.executable, str(Path(__file__).resolve()), *words, *more, "--output", str(output / file)]
    done = subprocess.run(command, cwd=ROOT)
    return None if done.returncode == 0 else f"{words[0]} ended with exit code {done.returncode}"


def markdown(output: Path, notes: Mapping[str, str], ran: Mapping[str, str]) -> str:
    """What is in the folder, as a page; `ran`: how long each part took, and its command."""
    around = environment("cpu")
    parts = [
        "# Benchmarks",
        f"{around['machine']}, {around['threads']} threads, torch {around['torch']}, transformers {around['transformers']}. `make benchmark` "
        "makes this page again. Random weights of true shapes, few layers: what is measured is the runtime. Ratios are medians of rounds in "
        "turns; a difference within the A/A noise floor is none.",
    ]
    contents = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(output.glob("benchmark*.json"))}
    if "benchmark.json" in contents:
        parts += ["## Runtime", *_runtime(contents["benchmark.json"])]
    predictions = [content for name, content in contents.items() if name.startswith("benchmark_prediction_")]
    if predictions:
        parts += ["## Dropped, then predicted, on true shapes", *(part for content in predictions for part in _runtime(content))]
    if (output / "break_even.csv").is_file():
        frame = pd.read_csv(output / "break_even.csv")
        parts += ["## Where a mechanism starts to pay", "![break-even map](break_even.png)"]
        parts += ["Halting rate from which more time is saved than noise:", _table(break_even_rates(frame))]
        left = frame[frame["status"] != "measured"]
        if len(left):
            parts.append(_table(left[["shape", "phase", "batch", "sequence", "status"]]))
    if (output / "scaling.csv").is_file():
        frame = fits(pd.read_csv(output / "scaling.csv")).round({"exponent": 3, "r_squared": 4})
        parts += ["## Time against length and depth", "![scaling](scaling.png)", "Time ~ axis ^ exponent:", _table(frame)]
    if "benchmark_quantization.json" in contents:
        frame = pd.DataFrame(contents["benchmark_quantization.json"]["findings"])
        frame = frame[["part", "what", "name", "speedup", "low", "high"]].round(2)
        parts += ["## int8", "Times as fast as the first of each comparison:", _table(frame)]
    if "benchmark_lm_eval.json" in contents:
        parts += ["## lm-evaluation-harness", *_lm_eval(contents["benchmark_lm_eval.json"])]
    parts += ["## This time", "\n".join(f"- {part}: {said}" for part, said in ran.items())]
    if notes:
        parts.append("\n".join(f"- {part}: not measured, {why}" for part, why in notes.items()))
    return "\n\n".join(parts) + "\n"


def _runtime_rows(findings: Any) -> list[dict[str, str]]:
    return [
        {
            "section": one["section"], "dtype": one["dtype"], "what": one["what"], "median": f"{one['value']:.3f}{one['unit']}",
            "quartiles": f"{one['low']:.3f} to {one['high']:.3f}", "target": f"{one['target']}{one['unit']}",
            "reached": "yes" if one["reached"] else "no",
            "noise": "" if one["noise_floor"] is None else f"{100 * one['noise_floor']:.1f}%",
        }
        for one in findings
    ]  # fmt: skip


def _runtime(content: Mapping[str, Any]) -> list[str]:
    options = content["options"]
    sizes = ", ".join(options["shapes"]) if options["only"] == ["predicted"] else f"d = {options['width']}"
    shape = f"{options['batch']} × {options['sequence']} tokens, {sizes}, {options['repeats']} rounds"
    load = content["environment"]["load_average_before"]
    return [f"{shape}; load average before: {load:.1f}.", _table(pd.DataFrame(_runtime_rows(content["findings"])))]


def _lm_rows(findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "requests": one["part"], "rounds": one["rounds"], "HFLM, ms": f"{one['hflm_ms']:.0f}", "time over HFLM's": f"{one['ratio']:.3f}",
            "quartiles": f"{one['low']:.3f} to {one['high']:.3f}", "HFLM over itself": f"{one['noise_low']:.3f} to {one['noise_high']:.3f}",
            "largest difference": f"{one['apart']:.1e}", f"at most {MOST_SLOWER}": "yes" if one["reached"] else "no",
        }
        for one in findings
    ]  # fmt: skip


def _lm_eval(content: Mapping[str, Any]) -> list[str]:
    options, load = content["options"], content["environment"]["load_average_before"]
    said = f"The adapter without modules on {options['model']}, {options['contexts']} contexts, {options['clock']} clock; load average before: {load:.1f}."
    return [said, _table(pd.DataFrame(_lm_rows(content["findings"])))]


def _table(frame: pd.DataFrame) -> str:
    rows = [list(frame), ["---"] * len(frame.columns), *frame.astype(object).where(frame.notna(), "").to_numpy().tolist()]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


# -- what there is ---------------------------------------------------------------------------------------------------------------

LAYERED = [*SHAPES, *shipped_with_schedules()]
TIMED: dict[str, Any] = {"repeats": REPEATS, "warmup": WARMUP}
BENCHMARKS: dict[str, tuple[Callable[[Options], int], Path, dict[str, Any]]] = {
    "all": (all_parts, RESULTS, {
        "only": Option(tuple(PARTS), choices=PARTS),
        "minutes": Option(16.0, "no part begins after that; the longest takes about four", least=0),
        **{part: Option("", "further options of that part, in one word") for part in PARTS},
    }),
    "runtime": (runtime, RESULTS / "benchmark.json", {
        "only": Option(tuple(SECTIONS), "sections to run", SECTIONS),
        "dtypes": Option(("float32", "bfloat16"), choices=("float32", "bfloat16", "float16")),
        "batch": 8, "sequence": Option(512, "tokens of a row"), "layers": Option(4, "of none, decide and generate"),
        "decay_layers": Option(PAPER_LAYERS, "of decay and fusion; fewer scale alpha to the same curve"), "width": 1280, "heads": 20,
        "shapes": Option(("gpt2-large", "llama2-7b"), "of predicted: shapes, or shipped models under their own schedules", LAYERED),
        "vocabulary": 1024, "new_tokens": Option(33, "of generate, the first of which belongs to the prompt's pass", least=2),
        **TIMED, "device": "cpu",
    }),
    "quantization": (quantization, RESULTS / "benchmark_quantization.json", {
        "only": Option(tuple(QUANTIZED), choices=QUANTIZED), "clock": Option("wall", choices=CLOCKS),
        "batch": 8, "sequence": Option(512, "tokens of a row, of prefill"), "context": Option(256, "tokens cached before, of decode"),
        "kernel_rows": 2048, "layers": Option(4, "of prefill"),
        "decode_layers": Option(36, "of decode, where what a pass costs once weighs more"),
        "family": Option("gpt2", "whose layers; a llama's have as many weights", ("gpt2", "llama")), "width": 1280, "heads": 20,
        **TIMED, "threads": Option(None, kind=int),
    }),
    "break_even": (break_even, RESULTS, {
        "shapes": Option(("gpt2", "gpt2-large", "llama2-7b"), choices=SHAPES), "phases": Option(PHASES, choices=PHASES),
        "batch": (1, 4), "sequence": (64, 256, 512), "rates": Option((0.25, 0.5, 0.75), "shares of tokens, or of the depth, halted", least=1e-3),
        "layers": Option(3, "what halts after the first must have something to miss", least=2),
        "cell_seconds": Option(1.0, "a cell whose dense pass takes longer is left out, and said so", least=0),
        **TIMED, "repeats": Option(3, REPEATS.help, least=3), "device": "cpu",
    }),
    "scaling": (scaling, RESULTS, {
        "shape": Option("gpt2", choices=SHAPES), "sequence": (128, 256, 512, 1024), "layers": (2, 4, 8),
        "fixed_layers": Option(4, "depth while the length varies"), "fixed_sequence": Option(256, "length while the depth varies"),
        "batch": 1, **TIMED, "device": "cpu",
    }),
    "lm_eval": (lm_eval, RESULTS / "benchmark_lm_eval.json", {
        "model": Option("reference-gpt2", "a model of conf/model, a folder or a hub id"), "parts": Option(LM_PARTS, choices=LM_PARTS),
        "contexts": 8, "words": Option(48, "words of a context, at least", least=2), "batch_size": 4,
        "seconds": Option(45.0, "of rounds, all parts together; what loads comes on top", least=0),
        "clock": Option("wall", choices=CLOCKS), "threads": 1,
    }),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words and words[0] in BENCHMARKS else "all"
    run, output, options = BENCHMARKS[name]
    given, began = parsed(name, __doc__, options, words, output), time.monotonic()
    with torch.inference_mode():
        code = run(given)
    print(f"Saved to {given.output} ({time.monotonic() - began:.0f} s)")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"benchmark: {error}")
