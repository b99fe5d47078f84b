"""What the runtime costs and how much of what it saves is real, on a quiet machine: `make benchmark`, or one part of it.

python scripts/benchmark.py [all] [--full]        # the standard parts or all, each in a process of its own, and a page of them
python scripts/benchmark.py runtime --only none decay --batch 4
python scripts/benchmark.py quantization|break_even|scaling|lengths|lm_eval --help
python scripts/benchmark_gpu.py                    # on a CUDA device; python scripts/benchmark_against.py REVISION: against an earlier version

Random weights of true shapes: what is priced is the execution. Every comparison is a ratio of callables that take turns in one run; the first of
them begins and ends a round, and that difference is the noise floor (A/A). Numbers and pictures go to results/benchmarks/.

runtime, on layers of gpt2-large's shape. Realization ratio: share of time saved over share of executed FLOPs saved; at 1 no time is spent on what
    is not executed.
    none       no module: equal logits, and no slower than the plain model
    decay      realization ratio of an exponential decay of active tokens
    fusion     that of a prompt of which 30% is fused away at a third of the depth, and the price of choosing the pairs
    decide     the price of deciding alone: modules decide, everything is executed
    predicted  a fifth of the prompt dropped early, nearly all others stopped at 5/8 of the depth with their K/V predicted, on --shapes:
               realization ratio of the prompt, that of a truncation at no more operations, and time per token decoded after it
    generate   greedy decoding: tokens per second without a module; time of a further token when every token stops at half depth
    repeat     one ratio measured three times over: how far apart its medians are
quantization: what int8 brings. A kernel is timed with what it needs around it: coding the inputs with one scale a token, scales and bias.
    kernels    one linear layer: every kernel of the runtime that is right on this processor, and torchao's where it is installed
    prefill    whole models, int8 products for all tokens, batch × sequence; decode: one token at a time in batch 1
break_even: time over dense inference's, by batch × sequence × width × halting rate. A point pays where even the worse quartile is faster than dense
    inference by more than the noise. In prefill tokens halt at once after the first layer; in decode every new token stops at a share of the
    depth. Beside halting: half of the K/V skipped, 30% fused, int8 from the second layer on.
lengths: one prompt in batch 1. Time to its first token and per further token over dense inference's, against its length: predicted K/V, and a
    truncation at no more operations.
scaling: time against length and depth, dense and under ExponentialDecay at the paper's ends of alpha (App. J), each with its power law.
lm_eval: our adapter without modules against lm-eval's own model `hf` on the same requests, after their answers were found equal. Each part takes
    as many rounds as fit into its share of --seconds, five at least.
`--clock cpu` counts the processor time of this process: fairer on a shared machine, with --threads 1.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import logging
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import benchmarking as shared
import numpy as np
import pandas as pd
import torch
from benchmarking import Asked, Call, Option, Passes, Row, Shape, Way, findings, in_turns, model_of, prompt, random_ids, table
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from quicksilver.baselines.prompts import PromptTruncation
from quicksilver.cli.progress import needing
from quicksilver.experiments.drawing import look
from quicksilver.fitting.schedules import TILE
from quicksilver.measure.latency import Alternation
from quicksilver.modules import AdaptiveQuantization, ExponentialDecay, Halting, KVSkipping, StaticDepth, TokenFusion
from quicksilver.modules.fitted import MODELS_FOLDER, ModelShape, Translator, model_digest
from quicksilver.modules.kernels import FastestLinear
from quicksilver.modules.staged_halting import Schedule, schedules_of, shipped_with_schedules
from quicksilver.report.figure import Figure, panels, style, whiskers, write_cells
from quicksilver.runtime import ConfigError, RuntimeModule, apply
from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.ledger import LayerWork
from quicksilver.runtime.quantized.kernels import KERNELS, Kind, choose

LAYERS_OF_WIDE = 4  # of shapes wider than --width: a pass of 8 × 512 tokens takes half a minute
HALF_DEPTH = StaticDepth(depth=0.5, missing_kv="drop")
PAPER_LAYERS, PAPER_ALPHA = 36, 0.07  # gpt2-large; App. J: alpha from 0.05 to 0.1
ALPHAS = (0.05, 0.1)  # per layer, App. J
PHASES = ("prefill", "decode")
FASTEST = "fastest"  # the plain number format and attention that precision=fastest finds
STEPS = 4  # tokens decoded in one sample of break_even and of quantization
COPIES = 8  # of a linear layer that one row goes round, more than a cache holds: a decoder reads weights once
Options = argparse.Namespace
Drawn = tuple[pd.DataFrame, Any, str]  # what a picture shows, the drawing, the first lines of its caption


# -- runtime ---------------------------------------------------------------------------------------------------------------------


class Bench:
    """Models of random weights and their input, in one number format."""

    def __init__(self, o: Options, dtype: str) -> None:
        self.options, self.format, self.dtype = o, dtype, getattr(torch, dtype, torch.float32)
        self.ids = random_ids(o.batch, o.sequence, vocabulary=o.vocabulary, device=o.device)

    def model(self, layers: int, shape: Shape | None = None) -> PreTrainedModel:
        o = self.options
        if self.format == FASTEST:
            raise ConfigError(
                f"--dtypes {FASTEST} is measured on shipped models alone: --only predicted --shapes {shipped_with_schedules()[0]}."
            )
        shape = shape or Shape("given", "gpt2", o.width, o.heads, 4 * o.width, layers)
        return model_of(shape, layers, o.sequence + o.new_tokens, vocabulary=o.vocabulary, dtype=self.dtype, device=o.device)

    def shipped(self, name: str) -> tuple[PreTrainedModel, list[RuntimeModule], str]:
        """A shipped model in this number format, the modules that compute in it, and its name."""

        def loaded(dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
            model: Any = AutoModelForCausalLM.from_pretrained(MODELS_FOLDER / name, dtype=dtype, attn_implementation=attention)
            return model.to(self.options.device).eval()

        if self.format != FASTEST:
            return loaded(self.dtype), [], self.format
        from quicksilver.runs.context import fastest_format, format_times_ms, of_format
        from quicksilver.runs.parts import build_modules

        chosen = fastest_format(format_times_ms(loaded(torch.float32), self.options.sequence))
        dtype, attention, modules = of_format(chosen)
        return loaded(getattr(torch, dtype), attention), build_modules(modules), f"{FASTEST}: {chosen}"

    def against_plain(
        self, model: PreTrainedModel, ways: Mapping[str, Way], *asked: Asked, passes: Passes | None = None,
        plain: Sequence[RuntimeModule] | None = None, **details: Any,
    ) -> list[Row]:  # fmt: skip
        """What was asked of these ways, in turns with the plain model; passes: the prompt's, unless given; plain: modules of its number format."""
        passes = passes or prompt(self.ids, use_cache=False)
        times, executed = in_turns({"plain": Way(model, plain or None), **ways}, passes, self.options)
        return findings({}, times, executed, asked, **details)


def no_module(bench: Bench) -> list[Row]:
    model = bench.model(bench.options.layers)
    plain = model(bench.ids, use_cache=False).logits
    with apply(model, []):
        equal = float(torch.equal(plain, model(bench.ids, use_cache=False).logits))
    asked = Asked("no module", "slower than the plain model, %", shared.SLOWER_PCT, ("at most", 1.0))
    identical = shared.finding({}, "logits bit-identical (1: yes)", [equal], ("at least", 1.0))
    return [*bench.against_plain(model, {"no module": Way(model)}, asked), identical]


def policies(bench: Bench, layers: int, made: Mapping[str, RuntimeModule], kinds: Sequence[str], **details: Any) -> list[Row]:
    """The realization ratio of each policy (`compact`), and what its decisions alone cost (`decide`)."""
    model, ways, asked = bench.model(layers), {}, []
    for kind, (name, module) in product(kinds, made.items()):
        ways[way := f"{name}, {kind}"] = Way(model, [module], kind)
        if kind == "decide":
            asked.append(Asked(way, f"deciding costs, %: {name}", shared.SLOWER_PCT, ("at most", 2.0)))
        else:
            asked.append(Asked(way, f"realization ratio, {name} ({{saved}} of FLOPs saved)", shared.REALIZED, ("at least", 0.95)))
    return bench.against_plain(model, ways, *asked, **details, layers=layers)


def decay(bench: Bench) -> list[Row]:
    # Fewer layers fall along the same curve: the share of active tokens at the same fraction of depth is that of 36 layers.
    alpha = PAPER_ALPHA * PAPER_LAYERS / bench.options.decay_layers
    # The paper drops (2.2); projecting K/V of halted tokens is work that the decay does not ask for.
    rows = {"even rows": True, "uneven rows": False}
    made = {name: ExponentialDecay(alpha=alpha, even=even, missing_kv="drop") for name, even in rows.items()}
    return policies(bench, bench.options.decay_layers, made, ("compact",), alpha=alpha)


def fusion(bench: Bench) -> list[Row]:
    how: dict[str, Any] = {"rule": "capacity", "fused_share": 0.3, "start": 1 / 3}
    made = {"closest states": TokenFusion(**how), "least attended": TokenFusion(criterion="attention", **how)}
    return policies(bench, bench.options.decay_layers, made, ("compact", "decide"))


def decide(bench: Bench) -> list[Row]:
    made: dict[str, RuntimeModule] = {
        # Nothing is below these thresholds, so every token is asked about after every layer: the dearest case.
        "drift thresholds, every token and layer": Halting(tau_drift=1e-9, window=(0.0, 1.0), tau_entropy=None, resume_layers=0),
        "random decay, even rows": ExponentialDecay(),
        "Halting() as it comes": Halting(rule="capacity", resume_layers=0),
    }
    return policies(bench, bench.options.layers, made, ("decide",))


def in_two_stages(model: PreTrainedModel, tokens: int) -> tuple[Schedule, Sequence[RuntimeModule]]:
    """A fifth of the prompt dropped early, nearly all others stopped at 5/8 of the depth, with random maps."""
    architecture = architecture_of(model)
    shape, layers = ModelShape.of(architecture), architecture.n_layers
    drop, predict = max(1, round(layers * 3 / 16)), max(2, round(layers * 5 / 8))
    schedule = Schedule(drop, 0.2, predict, protect_last=min(28, tokens // 8), tile=TILE)
    # A map of the right shape: what it costs does not depend on what it predicts.
    sizes = (1 + shape.width, layers - 1 - predict, 2, shape.n_kv_heads, shape.head_dim)
    weight = 0.02 * torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    return schedule, schedule.modules(translator=Translator(predict, weight, shape, model_digest(model)).bound(architecture))


def tokens_as_cheap(model: PreTrainedModel, modules: Sequence[RuntimeModule], ids: torch.Tensor) -> int:
    """The longest prompt that takes no more operations without the modules than `ids` (1, N) takes with them."""
    with torch.no_grad(), apply(model, modules) as run:
        model(ids, use_cache=False, logits_to_keep=1)
    arch, tokens, saved = architecture_of(model), ids.shape[1], run.flops.dense_nominal - run.flops.executed

    def layers(n: int) -> int:
        return arch.n_layers * LayerWork(1, n, None).flops(arch)

    return max(n for n in range(1, tokens) if n == 1 or layers(tokens) - layers(n) >= saved)


def predicted(bench: Bench) -> list[Row]:
    o, found = bench.options, list[Row]()
    after = shared.decoding(bench.ids, o.new_tokens, anew=False)
    for name in o.shapes:
        plain, number_format = list[RuntimeModule](), bench.format
        if name in shared.SHAPES:
            shape = shared.SHAPES[name]
            layers = min(shape.layers, LAYERS_OF_WIDE if shape.width > o.width else 2 * o.layers)
            model = bench.model(layers, shape)
            schedule, modules = in_two_stages(model, o.sequence)
            made = {f"{name} × {layers} layers, {schedule}": modules}
        else:  # a shipped model under its own schedules
            model, plain, number_format = bench.shipped(name)
            layers, schedules = model.config.num_hidden_layers, schedules_of(architecture_of(model))
            made = {f"{name}, its {100 * share:g}%, {schedule}": schedule.modules() for share, schedule in schedules.items()}
        for what, modules in made.items():
            kept = tokens_as_cheap(model, modules, bench.ids[:1])
            ways = {"predicted": Way(model, [*modules, *plain])}
            cut = {"truncated": Way(model, [PromptTruncation(keep=kept), *plain])}
            realized = f"realization ratio, {what} ({{saved}} of FLOPs saved)"
            of_prompt = Asked("predicted", realized, shared.REALIZED, ("at least", 0.9))
            of_cut = Asked("truncated", f"the same, truncated to {kept} tokens ({{saved}} of FLOPs saved)", shared.REALIZED)
            of_token = Asked("predicted", f"decoding after it, slower, %: {what}", shared.SLOWER_PCT, ("at most", 1.5))
            for asked, more, passes in (((of_prompt, of_cut), cut, None), ((of_token,), {}, after)):
                rows = bench.against_plain(model, ways | more, *asked, passes=passes, plain=plain, layers=layers)
                found += [row | {"dtype": number_format} for row in rows]
    return found


def generate(bench: Bench) -> list[Row]:
    o, ids = bench.options, bench.ids
    model: Any = bench.model(o.layers)  # transformers decorates `generate` in a way that type checkers misread
    new: dict[str, Any] = {"max_new_tokens": o.new_tokens, "min_new_tokens": o.new_tokens, "do_sample": False}

    def whole(model: Any, begin: Call) -> tuple[Call, ...]:
        return (lambda: (begin(), model.generate(ids, attention_mask=torch.ones_like(ids), **new)),)

    said, ways, bound = "no module: tokens per second, {}, of the plain model's", {"no module": Way(model)}, ("at least", 0.98)
    calls, decoded = (Asked("no module", said.format(of), shared.TIMES_AS_FAST, bound) for of in ("whole call", "decoding alone"))
    found = bench.against_plain(model, ways, calls, passes=whole)
    realized = "half depth: share of the FLOPs saved ({saved}) that time per token falls by"
    half, passes = Asked("half depth", realized, shared.REALIZED, ("at least", 0.85)), shared.decoding(ids, o.new_tokens - 1)
    ways["half depth"] = Way(model, [HALF_DEPTH])
    return found + bench.against_plain(model, ways, decoded, half, passes=passes, layers=o.layers)


def repeat(bench: Bench) -> list[Row]:
    model = bench.model(bench.options.layers)
    ways, asked = {"half depth": Way(model, [HALF_DEPTH])}, Asked("half depth", "", shared.TIME)
    series = [bench.against_plain(model, ways, asked)[0] for _ in range(3)]
    ratios = [one["value"] for one in series]
    spread = 100 * (max(ratios) - min(ratios)) / statistics.median(ratios)
    noisiest = max(series, key=lambda one: one["noise_floor"] or 0.0)
    details = noisiest["details"] | {"ratios": ratios}
    said = "half depth: spread of one ratio, measured three times, %"
    return [shared.finding({}, said, [spread], ("at most", 3.0), noise_floor=noisiest["noise_floor"], details=details)]


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "none": no_module, "decay": decay, "fusion": fusion, "decide": decide, "predicted": predicted, "generate": generate, "repeat": repeat,
}  # fmt: skip


def runtime(o: Options) -> Iterator[Row]:
    shared.say_if_busy()
    for name, dtype in product(o.only, o.dtypes):
        yield from ({"section": name, "dtype": dtype} | row for row in SECTIONS[name](Bench(o, dtype)))


# -- quantization ----------------------------------------------------------------------------------------------------------------


def kernel_calls(rows: int, width: int, channels: int) -> dict[str, tuple[Call]]:
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
        turn = cycle([make(linear) for linear in linears])
        return lambda: [next(turn)(x) for _ in range(1 if rows > 1 else 4)]

    return {name: (around(make),) for name, make in ways.items()}


def quantized_models(o: Options, layers: int) -> dict[str, Way]:
    """Dense and quantised, in both dtypes. The output head is never quantised."""
    # A llama has three matrices in the MLP: two thirds of the width, for as many weights a layer.
    inner = 4 * o.width if o.family == "gpt2" else o.width * 8 // 3 // 8 * 8
    single = model_of(Shape("given", o.family, o.width, o.heads, inner, layers), layers, o.sequence + o.context + 1024)
    half: Any = copy.deepcopy(single)
    ways: dict[str, dict[str, Any]] = {
        "int8 from half depth": {"depth": 0.5}, "int8 from half depth, K/V as they are": {"depth": 0.5, "kv": False},
        "int8 from the second layer on": {"depth": 0.0},
    }  # fmt: skip
    found: dict[str, Way] = {}
    for dtype, model in {"float32": single, "bfloat16": half.to(torch.bfloat16)}.items():
        found[dtype] = Way(model)
        for name, how in ways.items():
            if dtype == "float32" or "kv" not in how:
                found[f"{dtype}, {name}"] = Way(model, [AdaptiveQuantization(bits=8, execution="int8", **how)])
        found[f"{dtype}, each product by the fastest kernel"] = Way(model, [FastestLinear()])
    return found


QUANTIZED = ("kernels", "prefill", "decode")


def quantization(o: Options) -> Iterator[Row]:
    """How many times as fast as the first of each comparison."""
    if o.threads:
        torch.set_num_threads(o.threads)

    def found(part: str, what: str, times: Alternation) -> list[Row]:
        return findings({"section": part, "of": what}, times, {}, [Asked(name, name, shared.TIMES_AS_FAST) for name in times])

    wide = 4 * o.width
    if "kernels" in o.only:
        for sizes in ((o.kernel_rows, o.width, wide), (1, o.width, wide), (1, wide, o.width)):
            yield from found("kernels", " x ".join(map(str, sizes)), shared.timed(kernel_calls(*sizes), o))
    if "prefill" in o.only:
        times, _ = in_turns(quantized_models(o, o.layers), prompt(random_ids(o.batch, o.sequence)), o)
        yield from found("prefill", f"{o.batch} x {o.sequence}", times)
    if "decode" in o.only:
        times, _ = in_turns(quantized_models(o, o.decode_layers), shared.decoding(random_ids(1, o.context), STEPS), o)
        yield from found("decode", f"1 after {o.context}", times)


# -- break-even ------------------------------------------------------------------------------------------------------------------


def mechanisms(phase: str, rates: Sequence[float], layers: int) -> dict[str, RuntimeModule]:
    """What is timed against dense inference, by name; `halting` with each of its rates."""
    how: dict[str, Any] = {"rule": "capacity", "signal": "random", "schedule": "one_shot", "missing_kv": "drop"}
    once = partial(Halting, window=(0.0, 1 / layers), resume_layers=0, **how)
    made = (StaticDepth(depth=1 - rate, missing_kv="drop") if phase == "decode" else once(halted_share=rate) for rate in rates)
    return {f"halting {rate:.0%}": module for rate, module in zip(rates, made, strict=True)} | {
        "kv skipping 50%": KVSkipping(criterion="attention", skipped_share=0.5, min_depth=0.0),
        "fusion 30%": TokenFusion(rule="capacity", tau_fuse=None, criterion="random", fused_share=0.3, start=0.0),
        "int8": AdaptiveQuantization(bits=8, execution="int8", depth=0.0),
    }


def cell_of(model: PreTrainedModel, shape: Shape, phase: str, batch: int, sequence: int, o: Options) -> list[Row]:
    """One cell of the map: every mechanism at this batch and sequence, in turns with dense inference."""
    place = {"shape": shape.name, "width": shape.width, "phase": phase, "batch": batch, "sequence": sequence}
    ids = random_ids(batch, sequence, device=o.device)
    passes = shared.decoding(ids, STEPS) if phase == "decode" else prompt(ids, use_cache=True, logits_to_keep=1)
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
    noise = times.noise_floor or 0.0
    around = {"noise_floor_pct": 100 * noise, "dense_ms": times["dense"].median, **_load(times)}
    return [
        place | {
            "mechanism": name, "status": "measured",
            "verdict": "pays" if ratio.high < 1 - noise else "costs" if ratio.low > 1 + noise else "within noise",
            "time_saved_pct": 100 * (1 - ratio.median), "time_saved_pct_low": 100 * (1 - ratio.high),
            "time_saved_pct_high": 100 * (1 - ratio.low),
        } | around for name in ways for ratio in [times.ratio(name, to="dense")]
    ]  # fmt: skip


def _load(times: Alternation) -> Row:
    return {"load_average": times.load_before, "warnings": "; ".join(times.warnings)}


def break_even_rates(frame: pd.DataFrame) -> list[Row]:
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
        found.append(dict(zip(keys, key, strict=True)) | {"rate": at})
    return found


def draw_break_even(frame: pd.DataFrame, o: Options) -> Drawn:
    """A map for each phase and shape: a line a batch and sequence, a column a mechanism."""
    there = frame[frame["status"] == "measured"]
    shapes, phases, names = (list(there[column].unique()) for column in ("shape", "phase", "mechanism"))
    with style():
        drawing, axes = panels(len(phases), len(shapes), size=(1.2 + 2.9 * len(shapes), 1.0 + 2.3 * len(phases)), sharex=True)
        for plot, (phase, shape) in zip(axes.flat, product(phases, shapes), strict=True):
            cells = there[(there["phase"] == phase) & (there["shape"] == shape)]
            lines = list(dict.fromkeys(zip(cells["batch"], cells["sequence"], strict=True)))
            plot.set(title=f"{shape}, {phase}", ylabel="batch × tokens" if shape == shapes[0] else "")
            plot.grid(visible=False)
            if not lines:
                plot.text(0.5, 0.5, "left out", ha="center", transform=plot.transAxes)
                continue
            cells = cells.assign(shown=cells["time_saved_pct"].where(cells["verdict"] != "within noise", 0.0))
            values = cells.pivot(index=["batch", "sequence"], columns="mechanism", values="shown").loc[lines, names].to_numpy()
            drawn = plot.imshow(values, cmap="RdBu", vmin=-75, vmax=75, aspect="auto")
            measured = [at for at in np.ndindex(values.shape) if not np.isnan(values[at])]
            write_cells(plot, values, {at: f"{values[at]:+.0f}" if values[at] else "·" for at in measured})
            plot.set_yticks(range(len(lines)), [f"{batch} × {sequence}" for batch, sequence in lines])
            plot.set_xticks(range(len(names)), names, rotation=60, ha="right")
        drawing.colorbar(drawn, ax=axes, label="time saved, % of dense (more is better)", shrink=0.8)
    caption = (
        f"Random weights of the true widths, {o.layers} layers, float32; {STEPS} tokens after each prompt in decode. Percent of dense time "
        "saved, median of rounds in turns; · = no further from dense than dense from itself (A/A) or than the quartiles."
    )
    return frame, drawing, caption


def break_even(o: Options) -> Drawn:
    if not all(rate < 1 for rate in o.rates):
        raise ConfigError(f"--rates {' '.join(map(str, o.rates))}: shares between 0 and 1.")
    found: list[Row] = []
    for name in o.shapes:
        model = model_of(shared.SHAPES[name], o.layers, max(o.sequence) + STEPS, device=o.device)
        for phase, batch, sequence in product(o.phases, o.batch, o.sequence):
            found += cell_of(model, shared.SHAPES[name], phase, batch, sequence, o)
    frame = pd.DataFrame(found)
    if not frame["status"].eq("measured").any():
        raise ConfigError(f"nothing was measured: every cell takes longer than --cell-seconds {o.cell_seconds:g}.")
    return draw_break_even(frame, o)


# -- scaling ---------------------------------------------------------------------------------------------------------------------


def _along(plot: Any, ticks: Sequence[int], **labels: str) -> None:
    """A logarithmic axis with these ticks, and what stands beside the axes."""
    plot.set_xscale("log", base=2)
    plot.set_xticks(ticks, [*map(str, ticks)])
    plot.set(**labels)
    plot.legend()


def scaling_point(sequence: int, layers: int, o: Options) -> list[Row]:
    """Dense inference and both decays, in turns, at one length and depth."""
    model = model_of(shared.SHAPES[o.shape], layers, sequence, device=o.device)
    # Few layers fall along the curve of all: the share of active tokens at the same fraction of depth is that of the true model.
    scale = shared.SHAPES[o.shape].layers / layers
    ways = {f"decay {alpha:g}": Way(model, [ExponentialDecay(alpha=alpha * scale, missing_kv="drop")]) for alpha in ALPHAS}
    ids = random_ids(o.batch, sequence, device=o.device)
    times, executed = in_turns({"dense": Way(model, None), **ways}, prompt(ids, use_cache=False), o)
    place = {"shape": o.shape, "batch": o.batch, "sequence": sequence, "layers": layers}
    return [
        place | {"way": name, "ms": samples.median, "iqr_ms": samples.iqr, "noise_floor_pct": times.noise_floor_pct,
                 "executed_flops": executed[name], "time_of_dense": times.ratio(name, to="dense").median,
                 "flops_of_dense": executed[name] / executed["dense"]} | _load(times)
        for name, samples in times.items()
    ]  # fmt: skip


def power_law(x: Sequence[float], y: Sequence[float]) -> Row:
    """Exponent of y ~ x^k by least squares in logarithms, and R²; neither of fewer than three points, which any line nearly fits."""
    from scipy import stats

    if len(x) < 3:
        return {"exponent": "too few points", "r_squared": None, "points": len(x)}
    found = stats.linregress(np.log(x), np.log(y))
    return {"exponent": float(found.slope), "r_squared": float(found.rvalue**2), "points": len(x)}


def fits(frame: pd.DataFrame) -> list[Row]:
    """Power laws of time: against length, and against depth, for each way."""
    groups = frame.groupby(["axis", "way"], sort=False)
    return [{"axis": axis, "way": way} | power_law(mine[axis], mine["ms"]) for (axis, way), mine in groups]


def scaling(o: Options) -> Drawn:
    """Time against length and against depth, on logarithmic axes."""
    points = [("sequence", sequence, o.fixed_layers) for sequence in o.sequence]
    points += [("layers", o.fixed_sequence, layers) for layers in o.layers]
    frame = pd.DataFrame({"axis": axis} | row for axis, sequence, layers in points for row in scaling_point(sequence, layers, o))
    labels = {"sequence": "tokens of a sequence", "layers": "layers"}
    with style():
        drawing, axes = panels(1, 2, size=(7.6, 3.3))
        for plot, axis in zip(axes.flat, labels, strict=True):
            along = frame[frame["axis"] == axis]
            for place, fit in enumerate(fits(along)):
                mine = along[along["way"] == fit["way"]]
                law = "" if fit["r_squared"] is None else f": ~ {fit['exponent']:.2f} power, R² {fit['r_squared']:.3f}"
                bars = look(place, label=f"{fit['way']}{law}", elinewidth=0.7, capsize=2)
                plot.errorbar(mine[axis], mine["ms"], yerr=mine["iqr_ms"] / 2, **bars)
            _along(plot, sorted(set(along[axis])), xlabel=labels[axis], ylabel="time of one pass, ms")
            plot.set_yscale("log", base=2)
            plot.yaxis.set_major_formatter("{x:g}")
    caption = (
        f"{o.shape}'s width with random weights, batch {o.batch}, float32; left with {o.fixed_layers} layers, right with "
        f"{o.fixed_sequence} tokens. decay α: N·exp(−αℓ) tokens active in layer ℓ of the true depth ({shared.SHAPES[o.shape].layers} layers), at the "
        "same fraction of this one's. Medians of rounds in turns; bars: half of the interquartile range."
    )
    return frame, drawing, caption


# -- one prompt, by its length ----------------------------------------------------------------------------------------------------


def length_point(tokens: int, o: Options) -> list[Row]:
    """Times over dense inference's at one length: of the prompt until its first token, and of a further token."""
    model = model_of(shared.SHAPES[o.shape], o.layers, tokens + o.new_tokens, dtype=getattr(torch, o.dtype), device=o.device)
    schedule, modules = in_two_stages(model, tokens)
    ids = random_ids(1, tokens, device=o.device)
    kept = tokens_as_cheap(model, modules, ids)
    ways = {"dense": Way(model, None), "predicted": Way(model, modules), "truncated": Way(model, [PromptTruncation(keep=kept)])}
    asked = {
        "first token": prompt(ids, use_cache=True, logits_to_keep=1),
        "further token": shared.decoding(ids, o.new_tokens, anew=False),
    }
    found = []
    for what, passes in asked.items():
        times, executed = in_turns(ways, passes, o)
        for way, samples in times.items():
            n, work = (1, executed[way] / executed["dense"]) if what == "first token" else (o.new_tokens, math.nan)
            ratio = times.ratio(way, to="dense")
            found.append({
                "tokens": tokens, "what": what, "way": way, "ms": samples.median / n, "time_of_dense": ratio.median, "low": ratio.low,
                "high": ratio.high, "noise_floor_pct": times.noise_floor_pct, "flops_of_dense": work, "schedule": str(schedule), "kept": kept,
            } | _load(times))  # fmt: skip
    return found


def lengths(o: Options) -> Drawn:
    """Time to the first token and per further token over dense inference's, against the length of one prompt."""
    frame = pd.DataFrame(row for tokens in o.sequence for row in length_point(tokens, o))
    titles = {"first token": "to the first token", "further token": "per further token"}
    with style():
        drawing, axes = panels(1, 2, size=(7.6, 3.3))
        for plot, (what, title) in zip(axes.flat, titles.items(), strict=True):
            for place, way in enumerate(("predicted", "truncated")):
                mine = frame[(frame["what"] == what) & (frame["way"] == way)]
                around = whiskers(mine["time_of_dense"], mine["low"], mine["high"])
                plot.errorbar(mine["tokens"], mine["time_of_dense"], yerr=around, **look(place, label=way, capsize=2))
            if what == "first token":
                plot.plot(mine["tokens"], mine["flops_of_dense"], "", color="0.4", label="operations, both")
            plot.axhline(1, color="0.6", linewidth=0.8)
            _along(plot, o.sequence, xlabel="tokens of the prompt", ylabel=f"time {title}, over dense")
    caption = (
        f"One prompt on {o.layers} layers of {o.shape}'s width with random weights, {o.dtype}. predicted: a fifth dropped early, nearly all "
        "others stopped at 5/8 of the depth with K/V predicted. truncated: the newest tokens, at no more operations. Medians and quartiles of "
        "rounds in turns."
    )
    return frame, drawing, caption


# -- lm-evaluation-harness -------------------------------------------------------------------------------------------------------

LM_CALLS = {
    **dict.fromkeys(("contexts", "letters", "choices"), "loglikelihood"), "rolling": "loglikelihood_rolling", "generate": "generate_until",
}  # fmt: skip
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
    kind: Any = LM_CALLS[part]
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments[part])]


def apart(part: str, ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference in nats; of texts 0, or infinity where two differ."""
    if part == "generate":
        return 0.0 if ours == theirs else math.inf
    pairs = zip(ours, theirs, strict=True)
    if part == "rolling":
        return max(abs(a - b) for a, b in pairs)
    return max(abs(a[0] - b[0]) if a[1] == b[1] else math.inf for a, b in pairs)


def lm_part(part: str, hflm: Any, ours: Any, o: Options) -> Row:
    """Our time over HFLM's, in turns with HFLM's over its own: median and quartiles over rounds."""
    of = requests(part, o.contexts, o.words)

    def asked(model: Any) -> Call:
        return lambda: getattr(model, LM_CALLS[part])(of, disable_tqdm=True)

    began = time.perf_counter()
    difference = apart(part, asked(ours)(), asked(hflm)())  # and nothing is cold after it
    round_s = 1.5 * (time.perf_counter() - began)
    rounds = min(max(LEAST_ROUNDS, int(o.seconds / len(o.parts) / round_s)), MOST_ROUNDS)
    turns = {"hflm": (asked(hflm),), "quicksilver": (asked(ours),)}
    times = shared.timed(turns, Options(warmup=0, repeats=rounds, clock=o.clock))
    place = {"section": part, "rounds": rounds, "largest difference": difference}
    return findings(place, times, {}, [Asked("quicksilver", "time over HFLM's", shared.TIME, ("at most", 1.05))])[0]


def lm_eval(o: Options) -> Iterator[Row]:
    with needing("lm_eval", "lm-eval"):
        from lm_eval.models.huggingface import HFLM
    from quicksilver.lm_eval import QuickSilverLM

    torch.set_num_threads(o.threads)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as results:
        ours = QuickSilverLM(pretrained=o.model, batch_size=o.batch_size, results_dir=results)
    hflm = HFLM(pretrained=ours.model, tokenizer=ours.tokenizer, batch_size=o.batch_size)
    wrong = []
    for part in o.parts:
        yield (row := lm_part(part, hflm, ours, o))
        if row["largest difference"] > (10 * NATS if part == "rolling" else NATS):
            wrong.append(part)
    if wrong:
        raise ConfigError(f"lm_eval: answers differ: {', '.join(wrong)}.")


# -- all of them, and their page -------------------------------------------------------------------------------------------------

# A part's words. It writes what its benchmark does, those about prediction into a file of their own.
STANDARD = ("runtime", "presets", "lengths")
PARTS = {
    "runtime": "runtime --only none decay fusion decide generate repeat --dtypes float32 --batch 4 --sequence 256 --decay-layers 8 --new-tokens 17 --repeats 3",
    "presets": f"runtime --only predicted --dtypes float32 {FASTEST} --batch 4 --sequence 448 --repeats 5 --new-tokens 9 --shapes {' '.join(shipped_with_schedules())}",
    "lengths": "lengths --repeats 3 --sequence 128 512 2048",
    "prediction": "runtime --only predicted --dtypes float32 --shapes gpt2-large --repeats 3 --new-tokens 17",
    "quantization": "quantization --batch 4 --sequence 256 --layers 2 --decode-layers 12 --kernel-rows 1024 --repeats 3",
    "break_even": "break_even --cell-seconds 0.5",
    "scaling": "scaling --repeats 3",
}
OWN_FILE = {"presets": "benchmark_prediction_presets.json", "prediction": "benchmark_prediction_gpt2-large.json"}
TITLES = {  # of the page, by the beginning of a file's name
    "benchmark_prediction": "Dropped, then predicted, on true shapes",
    "benchmark_quantization": "int8: times as fast as the first of each comparison",
    "benchmark_lm_eval": "lm-evaluation-harness: the adapter without modules",
    "benchmark_kvpress": "Peers by their own code (kvpress, torchao), and here: what fewer K/V or bits of weights cost",
    "benchmark_gpu": "On a CUDA device",
    "benchmark": "Runtime",
}
_NAMED = ("section", "of", "dtype", "what")  # of a finding, as far as its benchmark has them
LENGTHS = ["what", "tokens", "way", "time_of_dense", "low", "high", "flops_of_dense", "noise_floor_pct"]
# Title, what is found in the frame beside the picture, and how.
PICTURES: dict[str, tuple[str, str, Callable[[pd.DataFrame], list[Row]]]] = {
    "break_even": ("Where a mechanism starts to pay", "Halting rate from which more time is saved than noise", break_even_rates),
    "scaling": ("Time against length and depth", "Time ~ axis ^ exponent", fits),
    # Ratios without the dense rows, which are 1.
    "lengths": ("One prompt: time over dense inference's, by its length", "Time over dense inference's",
                lambda frame: frame.loc[frame["way"] != "dense", LENGTHS].round(3).rename(columns=str).to_dict("records")),
}  # fmt: skip


def all_parts(o: Options) -> int:
    shared.say_if_busy()
    began, notes, ran = time.monotonic(), dict[str, str](), dict[str, str]()
    o.output.mkdir(parents=True, exist_ok=True)
    for part in PARTS if o.full else o.only:
        if time.monotonic() - began > 60 * o.minutes:
            notes[part] = f"the {o.minutes:g} minutes were over"
            continue
        print(f"[{part}]", flush=True)
        started, words = time.monotonic(), [*PARTS[part].split(), *getattr(o, part).split()]
        own = BENCHMARKS[words[0]][1]  # what has no name of its own is given the folder
        written = OWN_FILE.get(part, own.name * (own.suffix == ".json"))
        if code := run_part(words, o.output / written):
            notes[part] = f"{words[0]} ended with exit code {code}"
        ran[part] = f"{time.monotonic() - started:.0f} s (`benchmark.py {' '.join(words)}`)"
    page = o.output / "README.md"
    page.write_text(markdown(o.output), encoding="utf-8")
    for part, said in ran.items():
        print(f"{part}: {said}")
    print(f"Written: {page} ({time.monotonic() - began:.0f} s)")
    for part, why in notes.items():
        print(f"{part}: not measured, {why}.", file=sys.stderr)
    return 1 if notes else 0


def run_part(words: Sequence[str], output: Path) -> int:
    """Run one part in a process of its own; returns its exit code."""
    command = [sys.executable, str(Path(__file__).resolve()), *words, "--output", str(output)]
    return subprocess.run(command, cwd=shared.ROOT).returncode


def markdown(output: Path) -> str:
    """What is in the folder, as a page. Files that differ in a last number alone (`…_2.json`) are sessions of one benchmark."""
    parts = [
        "# Benchmarks",
        "`make benchmark` makes this page again, of all files beside it. Each part names its machine. Shapes are true, weights random and layers "
        "few, but for models that ship. Ratios are medians of rounds in turns. A difference within the noise floor of the clock (A/A) is none.",
    ]
    sessions: dict[str, list[Row]] = {}
    for path in sorted(output.glob("benchmark*.json")):
        sessions.setdefault(re.sub(r"_\d+$", "", path.stem), []).append(json.loads(path.read_text(encoding="utf-8")))
    for stem, contents in sessions.items():
        around, told = contents[0].get("environment", {}), contents[0]["options"]
        given = ", ".join(f"{name} {' '.join(map(str, one)) if isinstance(one, list) else one}" for name, one in told.items())
        named = {"machine": "{}", "threads": "{} threads", "torch": "torch {}", "transformers": "transformers {}"}
        known = [words.format(around[name]) for name, words in named.items() if name in around]
        title = next(title for beginning, title in TITLES.items() if stem.startswith(beginning))
        many = f" {len(contents)} processes: the range of their medians." if len(contents) > 1 else ""
        parts += [
            f"## {title}" + ", on a processor with AMX" * stem.endswith("_amx"),
            f"{', '.join(known) or 'Machine not noted'}.{many} {given}.",
            table(_findings([content["findings"] for content in contents]), markdown=True),
        ]
    for name, (title, said, summary) in PICTURES.items():
        if (output / f"{name}.csv").is_file():
            frame = pd.read_csv(output / f"{name}.csv")
            shown = table(summary(frame), markdown=True)
            parts += [f"## {title}", f"![{title}]({name}.png)", f"{said}:", shown, *left_out(frame)]
    return "\n\n".join(parts) + "\n"


def _findings(sessions: Sequence[Sequence[Row]]) -> list[Row]:
    """What is printed of each finding: its median and quartiles, or the range of its medians over sessions."""
    if "value" not in sessions[0][0]:
        return list(sessions[0])
    rows = []
    for found in zip(*sessions, strict=True):
        row, values = {key: found[0][key] for key in _NAMED if key in found[0]}, [one["value"] for one in found]
        if "dtype" in row:
            row["dtype"] = " / ".join(dict.fromkeys(one["dtype"] for one in found))  # a process may find another one fastest
        unit = found[0].get("unit", "")
        if len(found) > 1:
            row["medians"] = f"{min(values):.3g} to {max(values):.3g}{unit}"
        else:
            row |= {"median": f"{values[0]:.4g}{unit}", "quartiles": f"{found[0]['low']:.4g} to {found[0]['high']:.4g}"}
        noise = [one["noise_floor"] for one in found if one.get("noise_floor") is not None]
        reached = all(one["reached"] for one in found) if found[0].get("reached") is not None else None
        row |= {"target": found[0].get("target"), "reached": reached, "noise": f"{100 * max(noise):.1f}%" if noise else ""}
        rows.append(row)
    return rows


def left_out(frame: pd.DataFrame) -> list[str]:
    """One line for each cell of a map that was not measured."""
    cells = frame[frame["status"] != "measured"].to_dict("records") if "status" in frame else []
    return [f"{cell['shape']}, {cell['phase']}, {cell['batch']} × {cell['sequence']}: {cell['status']}" for cell in cells]


# -- what there is ---------------------------------------------------------------------------------------------------------------

LAYERED = [*shared.SHAPES, *shipped_with_schedules()]
# What runs (yielding findings, or a figure), where it writes, and its options.
BENCHMARKS: dict[str, tuple[Callable[[Options], Any], Path, dict[str, Any]]] = {
    "all": (all_parts, shared.RESULTS, {
        "only": Option(STANDARD, choices=PARTS), "full": Option(False, "all parts"),
        "minutes": Option(20.0, "no part begins after that; the longest takes about four", least=0),
        **{part: Option("", "further options of that part, in one word") for part in PARTS},
    }),
    "runtime": (runtime, shared.RESULTS / "benchmark.json", {
        "only": Option(tuple(SECTIONS), "sections to run", SECTIONS),
        "dtypes": Option(
            ("float32", "bfloat16"), f"{FASTEST}: of predicted, as precision=fastest chooses", ("float32", "bfloat16", "float16", FASTEST)
        ),
        "batch": 8, "sequence": Option(512, "tokens of a row"), "layers": Option(4, "of none, decide and generate"),
        "decay_layers": Option(PAPER_LAYERS, "of decay and fusion; fewer scale alpha to the same curve"), "width": 1280, "heads": 20,
        "shapes": Option(("gpt2-large", "llama2-7b"), "of predicted: shapes, or shipped models under their own schedules", LAYERED),
        "vocabulary": 1024, "new_tokens": Option(33, "of generate, the first of which belongs to the prompt's pass", least=2),
        **shared.TIMED, "device": "cpu",
    }),
    "quantization": (quantization, shared.RESULTS / "benchmark_quantization.json", {
        "only": Option(QUANTIZED, choices=QUANTIZED), "clock": shared.CLOCK,
        "batch": 8, "sequence": Option(512, "tokens of a row, of prefill"), "context": Option(256, "tokens cached before, of decode"),
        "kernel_rows": 2048, "layers": Option(4, "of prefill"),
        "decode_layers": Option(36, "of decode, where what a pass costs once weighs more"),
        "family": Option("gpt2", "whose layers; a llama's have as many weights", ("gpt2", "llama")), "width": 1280, "heads": 20,
        **shared.TIMED, "threads": Option(None, kind=int),
    }),
    "break_even": (break_even, shared.RESULTS, {
        "shapes": Option(("gpt2", "gpt2-large", "llama2-7b"), choices=shared.SHAPES), "phases": Option(PHASES, choices=PHASES),
        "batch": (1, 4), "sequence": (64, 256, 512), "rates": Option((0.25, 0.5, 0.75), "shares of tokens, or of the depth, halted", least=1e-3),
        "layers": Option(3, "what halts after the first must have something to miss", least=2),
        "cell_seconds": Option(1.0, "a cell whose dense pass takes longer is left out, and said so", least=0),
        **shared.TIMED, "repeats": shared.REPEATS._replace(default=3), "device": "cpu",
    }),
    "scaling": (scaling, shared.RESULTS, {
        "shape": Option("gpt2", choices=shared.SHAPES), "sequence": (128, 256, 512, 1024), "layers": Option((2, 4, 8), least=2),
        "fixed_layers": Option(4, "depth while the length varies", least=2), "fixed_sequence": Option(256, "length while the depth varies"),
        "batch": 1, **shared.TIMED, "device": "cpu",
    }),
    "lengths": (lengths, shared.RESULTS, {
        "shape": Option("tinyllama", choices=shared.SHAPES), "sequence": (128, 256, 512, 1024, 2048, 4096),
        "layers": Option(8, "fewer than the true number", least=4), "dtype": Option("bfloat16", choices=("float32", "bfloat16", "float16")),
        "new_tokens": Option(8, "decoded after the prompt", least=1), **shared.TIMED, "device": "cpu",
    }),
    "lm_eval": (lm_eval, shared.RESULTS / "benchmark_lm_eval.json", {
        "model": Option("reference-gpt2", "a model of conf/model, a folder or a hub id"), "parts": Option(tuple(LM_CALLS), choices=LM_CALLS),
        "contexts": 8, "words": Option(48, "words of a context, at least", least=2), "batch_size": 4,
        "seconds": Option(45.0, "of rounds, all parts together; what loads comes on top", least=0), "clock": shared.CLOCK, "threads": 1,
    }),
}  # fmt: skip


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words and words[0] in BENCHMARKS else "all"
    run, output, options = BENCHMARKS[name]
    o, began = shared.parsed(name, __doc__, options, words, output), time.monotonic()
    if name == "all":
        return run(o)
    if name in PICTURES:
        (frame, drawing, caption), around = run(o), shared.environment(o.device)
        title, said, summary = PICTURES[name]
        versions = f"torch {around['torch']}, transformers {around['transformers']}"
        machine = f"Machine: {around['machine']}, {around['threads']} threads, {versions}; {o.repeats} rounds."
        Figure(name, title, frame, drawing, (caption, machine)).write(o.output)
        print(title, f"{said}:", table(summary(frame)), *left_out(frame), machine, sep="\n\n")
    else:
        around, found = shared.environment(getattr(o, "device", "cpu")), list[Row]()
        for row in run(o):
            found.append(row)
            shared.save(o.output, around, o, findings=found)  # what was measured stays, whatever comes next
        print(table(found))
    print(f"Saved to {o.output} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"benchmark: {error}")
