"""What the runtime costs and how much of what it saves is real: `python scripts/benchmark.py`, on a quiet machine.

gpt2-large layers (d = 1280, 20 heads, random weights) at 8 × 512 tokens, unless told otherwise. Every comparison is a ratio of
callables that take turns in one run; the first of them is timed twice a round, and that difference is the noise floor.

    none       no module: equal logits, and no slower than the plain model
    decay      exponential decay of active tokens, alpha = 0.07 over 36 layers: realization ratio, the share of time saved over
               the share of executed FLOPs saved; 1 means that every operation not executed is time not spent
    fusion     30% of the prompt fused away at a third of the depth: the same ratio, and the price of choosing the pairs
    decide     the price of deciding alone: modules decide, everything is executed
    predicted  a fifth of the prompt dropped early, nearly all others stopped at 5/8 of the depth with their K/V predicted, on the shapes of
               --shapes (a shipped model under its own schedules): the realization ratio of the prompt, and time per token decoded after
               it against after a dense prompt
    generate   greedy decoding: tokens per second without a module; time per token when every token stops at half depth
    repeat     the same ratio measured three times over: how far apart its medians are

The vocabulary is small so that the output head, which no module touches, neither hides nor pays for anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from shapes import ROOT, SHAPES, Shape, environment, model_of
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from quicksilver.measure.latency import Alternation, LatencySamples, Ratio, alternate, alternate_steps, shared_weight_copy
from quicksilver.modules.controls import ExponentialDecay, StaticDepth
from quicksilver.modules.fitted import MODELS_FOLDER, ModelShape, model_digest
from quicksilver.modules.fusion import TokenFusion
from quicksilver.modules.halting import Halting
from quicksilver.modules.staged_halting import Schedule, schedules_of, shipped_with_schedules
from quicksilver.modules.translators import BoundTranslator, Translator
from quicksilver.runtime import ConfigError, RuntimeModule, apply
from quicksilver.runtime.architecture import architecture_of

SECTIONS = ("none", "decay", "fusion", "decide", "predicted", "generate", "repeat")
LAYERS_OF_WIDE = 4  # of shapes wider than --width: a pass of 8 × 512 tokens takes half a minute
PAPER_LAYERS, PAPER_ALPHA = 36, 0.07  # gpt2-large; App. J: alpha from 0.05 to 0.1


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    section: str
    dtype: str
    what: str
    value: float
    low: float
    high: float
    unit: str
    target: str
    reached: bool
    noise_floor: float | None  # None: not a time
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bench:
    """A model of random weights, its input, and what was found with them."""

    options: argparse.Namespace
    dtype: torch.dtype
    findings: list[Finding] = field(default_factory=list)

    def model(self, layers: int) -> GPT2LMHeadModel:
        o = self.options
        torch.manual_seed(42)
        config = GPT2Config(
            n_layer=layers, n_embd=o.width, n_head=o.heads, vocab_size=o.vocabulary, n_positions=o.sequence + o.new_tokens,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        model: Any = GPT2LMHeadModel(config)  # transformers decorates `to` in a way that type checkers misread
        return model.to(device=o.device, dtype=self.dtype).eval()

    def input_ids(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        shape = (self.options.batch, self.options.sequence)
        return torch.randint(1, self.options.vocabulary, shape, generator=generator).to(self.options.device)

    def alternate(self, fns: Mapping[str, Callable[[], object]]) -> Alternation:
        return alternate(fns, warmup=self.options.warmup, repeats=self.options.repeats, device=self.options.device)

    def found(
        self,
        section: str,
        what: str,
        ratio: Ratio,
        times: Alternation | None,
        target: tuple[str, float],
        unit: str = "",
        **details: Any,
    ) -> None:
        """Note a finding; `target` is ("at least" | "at most", bound)."""
        reached = ratio.median >= target[1] if target[0] == "at least" else ratio.median <= target[1]
        if times is not None:
            details["samples_ms"] = {name: samples.ms for name, samples in times.items()}
            details["control_ms"], details["load_average"] = times.control_ms, [times.load_before, times.load_after]
        self.findings.append(
            Finding(
                section, str(self.dtype).removeprefix("torch."), what, ratio.median, ratio.low, ratio.high, unit,
                f"{target[0]} {target[1]:g}", reached, None if times is None else times.noise_floor, details,
            )
        )  # fmt: skip


def forward(
    model: PreTrainedModel,
    ids: torch.Tensor,
    modules: Sequence[RuntimeModule] | None,
    execution: Literal["compact", "decide"] = "compact",
) -> Callable[[], torch.Tensor]:
    """One forward pass as a callable: of the plain model (`modules=None`), or with the context entered and left each time."""

    def plain() -> torch.Tensor:
        return model(ids, use_cache=False).logits

    def under() -> torch.Tensor:
        with apply(model, modules or [], execution=execution):
            return plain()

    return plain if modules is None else under


def executed_flops(model: PreTrainedModel, modules: Sequence[RuntimeModule], call: Callable[[], object]) -> int:
    with apply(model, modules) as run:
        call()
        return run.flops.executed


def realized(ratio: Ratio, flops_saved: float) -> Ratio:
    """Share of time saved over share of FLOPs saved, of a ratio of times."""
    return transformed(ratio, lambda r: (1 - r) / flops_saved)


def transformed(ratio: Ratio, of: Callable[[float], float]) -> Ratio:
    """A ratio of times turned into what is reported; `of` is monotonic."""
    low, high = sorted((of(ratio.low), of(ratio.high)))
    return Ratio(of(ratio.median), low, high)


# -- sections --------------------------------------------------------------------------------------------------------------------


def no_module(bench: Bench) -> None:
    model, ids = bench.model(bench.options.layers), bench.input_ids()
    plain, under = forward(model, ids, None), forward(model, ids, [])
    identical = float(torch.equal(plain(), under()))
    times = bench.alternate({"plain": plain, "no module": under})
    slower = transformed(times.ratio("no module", "plain"), lambda r: 100 * (r - 1))
    bench.found("none", "slower than the plain model", slower, times, ("at most", 1.0), "%")
    bench.found("none", "logits bit-identical (1: yes)", Ratio(identical, identical, identical), None, ("at least", 1.0))


def decay(bench: Bench) -> None:
    layers = bench.options.decay_layers
    # Fewer layers fall along the same curve: the share of active tokens at the same fraction of depth is that of 36 layers.
    alpha = PAPER_ALPHA * PAPER_LAYERS / layers
    model, ids = bench.model(layers), bench.input_ids()
    policies = {"even rows": ExponentialDecay(alpha=alpha), "uneven rows": ExponentialDecay(alpha=alpha, even=False)}
    for policy in policies.values():
        policy.missing_kv = (
            "drop"  # the paper's way (2.2); projecting K/V of halted tokens is work that the decay does not ask for
        )
    fns = {"plain": forward(model, ids, None)} | {name: forward(model, ids, [policy]) for name, policy in policies.items()}
    dense = executed_flops(model, [], fns["plain"])
    saved = {name: 1 - executed_flops(model, [policy], fns["plain"]) / dense for name, policy in policies.items()}
    times = bench.alternate(fns)
    for name, flops_saved in saved.items():
        ratio = times.ratio(name, "plain")
        what = f"realization ratio, {name} ({100 * flops_saved:.1f}% of FLOPs saved)"
        bench.found(
            "decay", what, realized(ratio, flops_saved), times, ("at least", 0.95),
            executed_flops_saved=flops_saved, time_saved=1 - ratio.median, alpha=alpha, layers=layers,
        )  # fmt: skip


def fusion(bench: Bench) -> None:
    model, ids = bench.model(bench.options.decay_layers), bench.input_ids()
    policies = {
        "closest states": TokenFusion(rule="capacity", fused_share=0.3, start=1 / 3),
        "least attended": TokenFusion(rule="capacity", criterion="attention", fused_share=0.3, start=1 / 3),
    }
    plain = forward(model, ids, None)
    fns = {"plain": plain} | {name: forward(model, ids, [policy]) for name, policy in policies.items()}
    fns |= {f"{name}, decide": forward(model, ids, [policy], "decide") for name, policy in policies.items()}
    dense = executed_flops(model, [], plain)
    saved = {name: 1 - executed_flops(model, [policy], plain) / dense for name, policy in policies.items()}
    times = bench.alternate(fns)
    for name, flops_saved in saved.items():
        ratio = times.ratio(name, "plain")
        bench.found(
            "fusion", f"realization ratio, {name} ({100 * flops_saved:.1f}% of FLOPs saved)", realized(ratio, flops_saved), times,
            ("at least", 0.95), executed_flops_saved=flops_saved, time_saved=1 - ratio.median, layers=bench.options.decay_layers,
        )  # fmt: skip
        overhead = transformed(times.ratio(f"{name}, decide", "plain"), lambda r: 100 * (r - 1))
        bench.found("fusion", f"deciding costs: {name}", overhead, times, ("at most", 2.0), "%")


def decide(bench: Bench) -> None:
    model, ids = bench.model(bench.options.layers), bench.input_ids()
    whole_depth = (0.0, 1.0)
    policies: dict[str, RuntimeModule] = {
        # Nothing is below these thresholds, so every token is asked about after every layer: the dearest case.
        "drift thresholds, every token and layer": Halting(tau_drift=1e-9, window=whole_depth, tau_entropy=None, resume_layers=0),
        "random decay, even rows": ExponentialDecay(),
        "Halting() as it comes": Halting(rule="capacity", resume_layers=0),
    }
    fns = {"plain": forward(model, ids, None)}
    fns |= {name: forward(model, ids, [policy], "decide") for name, policy in policies.items()}
    times = bench.alternate(fns)
    for name in policies:
        overhead = transformed(times.ratio(name, "plain"), lambda r: 100 * (r - 1))
        bench.found("decide", f"deciding costs: {name}", overhead, times, ("at most", 2.0), "%")


def random_translator(model: PreTrainedModel, source_layer: int) -> BoundTranslator:
    """A map of the right shape: what it costs does not depend on what it predicts."""
    architecture = architecture_of(model)
    shape = ModelShape.of(architecture)
    sizes = (1 + shape.width, shape.n_layers - 1 - source_layer, 2, shape.n_kv_heads, shape.head_dim)
    weight = 0.02 * torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    return Translator(source_layer, weight, shape, model_digest(model)).bound(architecture)


def predicted(bench: Bench) -> None:
    for name in bench.options.shapes:
        if name in SHAPES:
            predicted_of(bench, SHAPES[name])
        else:
            presets_of(bench, name)


def presets_of(bench: Bench, name: str) -> None:
    """A shipped model under its own schedules."""
    model = AutoModelForCausalLM.from_pretrained(MODELS_FOLDER / name, dtype=bench.dtype).to(bench.options.device).eval()
    for save, schedule in schedules_of(architecture_of(model)).items():
        timed_prediction(
            bench, model, schedule.halting(), f"{name}, its {100 * save:g}%, {schedule}", model.config.num_hidden_layers
        )


def predicted_of(bench: Bench, shape: Shape) -> None:
    o = bench.options
    layers = min(shape.layers, LAYERS_OF_WIDE if shape.width > o.width else 2 * o.layers)
    model = model_of(shape, layers, o.sequence + o.new_tokens, vocabulary=o.vocabulary, dtype=bench.dtype, device=o.device)
    schedule = Schedule(max(1, round(layers * 3 / 16)), 0.2, max(2, round(layers * 5 / 8)), protect_last=min(32, o.sequence // 8))
    module = schedule.halting(translator=random_translator(model, schedule.predict_before))
    timed_prediction(bench, model, module, f"{shape.name} × {layers} layers, {schedule}", layers)


def timed_prediction(bench: Bench, model: PreTrainedModel, module: RuntimeModule, what: str, layers: int) -> None:
    """The prompt's realization ratio, and what decoding after it takes."""
    o, ids = bench.options, bench.input_ids()
    plain = shared_weight_copy(model)
    with apply(model, [module]) as run:
        passes = {"plain": forward(plain, ids, None), "predicted": forward(model, ids, None)}
        passes["predicted"]()
        executed = run.flops.executed
        saved = 1 - executed / executed_flops(plain, [], passes["plain"])
        times = bench.alternate(passes)
        decode = {"plain": decoding(plain, ids, o.new_tokens), "predicted": decoding(model, ids, o.new_tokens)}
        steps, _ = alternate_steps(decode, o.warmup, o.repeats, o.device)
    ratio = times.ratio("predicted", "plain")
    bench.found(
        "predicted", f"realization ratio, {what} ({100 * saved:.1f}% of FLOPs saved)", realized(ratio, saved), times, ("at least", 0.9),
        executed_flops_saved=saved, time_saved=1 - ratio.median, layers=layers,
    )  # fmt: skip
    slower = transformed(steps.ratio("predicted", "plain"), lambda r: 100 * (r - 1))
    bench.found("predicted", f"decoding after it, slower: {what}", slower, steps, ("at most", 1.5), "%", layers=layers)


def decoding(model: PreTrainedModel, ids: torch.Tensor, n: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """`n` further tokens after the prompt `ids`, whose cache is made once; and what takes them back."""
    cache = model(ids, use_cache=True).past_key_values

    def steps() -> None:
        for i in range(n):
            model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)

    return steps, lambda: cache.crop(-n)


class StepClock(LogitsProcessor):
    """Notes when each token's logits arrive: time per decoded token without the prompt's share, and without a second run."""

    def __init__(self, device: str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self.moments: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.on_gpu:
            torch.cuda.synchronize(scores.device)
        self.moments.append(time.perf_counter())
        return scores

    def ms_per_token(self) -> float:
        first, *_, last = self.moments
        return 1e3 * (last - first) / (len(self.moments) - 1)


def generate(bench: Bench) -> None:
    o = bench.options
    ids = bench.input_ids()
    model: Any = bench.model(o.layers)  # as `to`, `generate` is misread
    half = StaticDepth(depth=0.5, missing_kv="drop")
    per_token: dict[str, list[float]] = {"plain": [], "no module": [], "half depth": []}

    def decode(new_tokens: int, clock: StepClock | None = None) -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
            logits_processor=LogitsProcessorList([] if clock is None else [clock]),
        )  # fmt: skip

    def timed(name: str, modules: Sequence[RuntimeModule] | None) -> Callable[[], None]:
        def fn() -> None:
            clock = StepClock(o.device)
            if modules is None:
                decode(o.new_tokens, clock)
            else:
                with apply(model, modules):
                    decode(o.new_tokens, clock)
            per_token[name].append(clock.ms_per_token())

        return fn

    def decode_flops(modules: Sequence[RuntimeModule]) -> int:
        """Of the tokens after the first, which comes out of the prompt's pass."""
        whole = executed_flops(model, modules, lambda: decode(o.new_tokens))
        return whole - executed_flops(model, modules, lambda: decode(1))

    saved = 1 - decode_flops([half]) / decode_flops([])
    times = bench.alternate(
        {"plain": timed("plain", None), "no module": timed("no module", []), "half depth": timed("half depth", [half])}
    )
    bench.found(
        "generate", "no module: tokens per second, whole call, of the plain model's",
        transformed(times.ratio("no module", "plain"), lambda r: 1 / r), times, ("at least", 0.98),
    )  # fmt: skip
    # The clock also ticked in the warm-up, and twice a round in the plain model.
    plain_ms = per_token["plain"][o.warmup :]
    steps = Alternation(
        {
            "plain": LatencySamples(plain_ms[0::2]),
            "no module": LatencySamples(per_token["no module"][o.warmup :]),
            "half depth": LatencySamples(per_token["half depth"][o.warmup :]),
        },
        control="plain", control_ms=plain_ms[1::2], load_before=times.load_before, load_after=times.load_after,
    )  # fmt: skip
    bench.found(
        "generate", "no module: tokens per second, decoding alone, of the plain model's",
        transformed(steps.ratio("no module", "plain"), lambda r: 1 / r), steps, ("at least", 0.98),
    )  # fmt: skip
    ratio = steps.ratio("half depth", "plain")
    bench.found(
        "generate", f"half depth: share of the FLOPs saved ({100 * saved:.1f}%) that time per token falls by",
        realized(ratio, saved), steps, ("at least", 0.85),
        executed_flops_saved=saved, time_saved=1 - ratio.median, layers=o.layers,
    )  # fmt: skip


def repeat(bench: Bench) -> None:
    model, ids = bench.model(bench.options.layers), bench.input_ids()
    half = StaticDepth(depth=0.5, missing_kv="drop")
    fns = {"plain": forward(model, ids, None), "half depth": forward(model, ids, [half])}
    series = [bench.alternate(fns) for _ in range(3)]
    ratios = [times.ratio("half depth", "plain").median for times in series]
    spread = 100 * (max(ratios) - min(ratios)) / statistics.median(ratios)
    noisiest = max(series, key=lambda times: times.noise_floor or 0.0)
    bench.found(
        "repeat", "half depth: spread of one ratio, measured three times", Ratio(spread, spread, spread), noisiest, ("at most", 3.0), "%",
        ratios=ratios,
    )  # fmt: skip


# -- the run ---------------------------------------------------------------------------------------------------------------------


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a row")
    parser.add_argument("--layers", type=int, default=4, help="of none, decide and generate")
    parser.add_argument(
        "--decay-layers", type=int, default=PAPER_LAYERS, help="of decay and fusion; fewer scale alpha to the same curve"
    )
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument(
        "--shapes", nargs="*", choices=[*SHAPES, *shipped_with_schedules()], default=["gpt2-large", "llama2-7b"],
        help="of predicted: shapes, or shipped models under their own schedules"
    )  # fmt: skip
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=33, help="of generate, the first of which belongs to the prompt's pass")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds, at least 3")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmarks" / "benchmark.json")
    options = parser.parse_args(arguments)
    if options.new_tokens < 2:
        parser.error(f"--new-tokens {options.new_tokens}: at least 2, the time per token lies between two of them")
    return options


def table_of(findings: Sequence[Finding], options: argparse.Namespace) -> Table:
    shape = f"{options.batch} × {options.sequence}, d = {options.width}, {options.heads} heads, {options.repeats} rounds"
    table = Table(title=f"Runtime benchmark: {shape}")
    for name in ("section", "dtype", "measure"):
        table.add_column(name)
    for name in ("median", "quartiles", "target", "reached", "noise floor A/A"):
        table.add_column(name, justify="right")
    for f in findings:
        table.add_row(
            f.section, f.dtype, f.what, f"{f.value:.3f}{f.unit}", f"{f.low:.3f} to {f.high:.3f}", f"{f.target}{f.unit}",
            "yes" if f.reached else "NO", "–" if f.noise_floor is None else f"{100 * f.noise_floor:.2f}%",
        )  # fmt: skip
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    around = environment(options.device) | {"load_average_before": os.getloadavg()[0]}
    if around["load_average_before"] > 0.5:
        load = around["load_average_before"]
        console.print(
            f"[bold]The machine is busy[/bold] (load {load:.2f}): the ratios below carry its noise; see the noise floor."
        )
    runs = {
        "none": no_module,
        "decay": decay,
        "fusion": fusion,
        "decide": decide,
        "predicted": predicted,
        "generate": generate,
        "repeat": repeat,
    }
    findings: list[Finding] = []
    for name in options.only:
        for dtype in options.dtypes:
            bench = Bench(options, getattr(torch, dtype))
            with console.status(f"{name}, {dtype} …"), torch.inference_mode():
                runs[name](bench)
            findings += bench.findings
    console.print(table_of(findings, options))
    shown = {key: value for key, value in vars(options).items() if key != "output"}  # a place on this machine
    content = {"environment": around, "options": shown, "findings": [asdict(f) for f in findings]}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(f"Saved to {options.output}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"benchmark: {error}")
