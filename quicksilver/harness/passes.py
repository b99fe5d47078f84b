"""The separate passes of one run: quality, null, audit, executed FLOPs, wall clock, memory, a look inside. What is timed is never also
traced or counted.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

from quicksilver.data.windows import Windows
from quicksilver.measure.components import Subject, component_latency
from quicksilver.measure.deployment import Served, deployment, serve
from quicksilver.measure.energy import energy, meter_of
from quicksilver.measure.flops import count_executed
from quicksilver.measure.inside import Inside, look_inside
from quicksilver.measure.latency import Alternation, alternate, shared_weight_copy
from quicksilver.measure.memory import paper_kv_delta_bytes, peak_memory, peak_tensor_bytes
from quicksilver.measure.perplexity import Protocol, Scores, audit, score
from quicksilver.modules.controls import Replay, shuffled
from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import RuntimeModule, Transform
from quicksilver.runtime.run import apply
from quicksilver.runtime.trace import Trace

PHASES = {
    "quality": 0.25,
    "null": 0.15,
    "audit": 0.08,
    "flops": 0.04,
    "latency": 0.18,
    "memory": 0.05,
    "components": 0.07,
    "energy": 0.08,
    "deployment": 0.05,
    "signals": 0.05,
}  # rough shares of a run's time

ROUNDING = 1e-4  # of the largest logit: more than this is no rounding of one sum

Report = Callable[[str, float], None]  # phase, share of it that is done


@dataclass(frozen=True)
class Options:
    """What is measured beside quality; the fields of the config group `measure` that decide a number."""

    null_control: str
    probes: int
    flops: bool
    latency: bool
    warmup: int
    repeats: int
    memory: bool
    batch_windows: int
    components: bool = False
    energy: bool = False
    energy_window_s: float = 3.0
    energy_rounds: int = 3
    country_iso_code: str | None = None
    deployment: bool = False
    deployment_prompt_tokens: int = 256
    deployment_new_tokens: int = 64
    budget_ms: float = 50.0
    attribution: bool = False


@dataclass
class Measured:
    """What the passes gave: scalars for record.json, one row per window, every decision, and the signals of `texts`."""

    scalars: dict[str, Any]
    windows: pd.DataFrame
    trace: Trace
    inside: list[Inside] = field(default_factory=list)


def measure(
    model: PreTrainedModel,
    windows: Windows,
    protocol: Protocol,
    modules: Sequence[RuntimeModule],
    options: Options,
    *,
    texts: Sequence[torch.Tensor] = (),
    execution: str = "compact",
    seed: int = 0,
    report: Report = lambda phase, share: None,
) -> Measured:
    """Run every pass that `options` ask for.

    Args:
        texts: (N,) long each, to look inside.

    Raises:
        ConfigError: windows or modules that do not fit model or protocol.
        QuickSilverError: logits that are not finite.
    """

    def batches(phase: str) -> Callable[[int, int], None]:
        return lambda done, of: report(phase, done / of)

    how: dict[str, Any] = {"execution": execution}
    report("quality", 0.0)
    scores = score(model, windows.ids, protocol, windows.token_bytes, modules=modules, progress=batches("quality"), **how)
    scalars, frame = totals(scores), scores.windows

    scalars["null"] = None
    chosen = by_chance(modules, scores.trace, seed) if options.null_control == "shuffle" else None
    if chosen is not None:
        report("null", 0.0)
        kind, chance = chosen
        null = score(model, windows.ids, protocol, windows.token_bytes, modules=chance, progress=batches("null"), **how)
        kept = totals(null)
        scalars["null"] = {"kind": kind, **{k: kept[k] for k in ("ppl", "nll_nats", "executed_flops", "nominal_flops")}}
        frame = frame.assign(null_nll_nats=null.windows["nll_nats"])

    rows = min(options.batch_windows, len(windows.ids))
    scalars["batch_windows"] = rows
    report("audit", 0.0)
    audited = audit(model, windows.ids[:rows], protocol, modules, seed=seed, n_probes=options.probes, **how)
    scalars["audit"] = {
        "max_abs_logit_difference": audited.max_abs_logit_difference,
        "max_abs_logit": audited.max_abs_logit,
        "probes": len(audited.probes),
        "positions": list(audited.probes),
    }
    if execution == "compact" and audited.max_abs_logit_difference > ROUNDING * audited.max_abs_logit:
        # Two causes look alike here: a leak, or coarse codes that magnify the last digits of a sum, which follow the shapes. Under
        # `masked` no shape depends on a decision: what still moves is a leak.
        exact = audit(model, windows.ids[:rows], protocol, modules, "masked", seed=seed, n_probes=options.probes)
        scalars["audit"]["masked_max_abs_logit_difference"] = exact.max_abs_logit_difference

    batch = windows.ids[:rows].to(model.device)
    if options.flops:
        report("flops", 0.0)
        scalars["batch_flops"] = _batch_flops(model, batch, protocol, modules, execution)
    if options.latency:
        scalars |= _latency(model, batch, protocol, modules, options, execution, report)
    if options.memory:
        report("memory", 0.0)
        scalars |= _memory(model, batch, protocol, modules, execution)
    if options.components:
        report("components", 0.0)
        scalars |= _components(model, batch, protocol, modules, options, execution)
    if options.energy:
        report("energy", 0.0)
        scalars |= _energy(model, batch, protocol, modules, options, execution)
    if options.deployment:
        report("deployment", 0.0)
        scalars |= _deployment(model, windows.ids[:1].to(model.device), modules, options, execution)
    inside = []
    for number, ids in enumerate(texts):
        report("signals", number / len(texts))
        inside.append(look_inside(model, ids, modules, execution=execution, attribution=options.attribution))  # type: ignore[arg-type]
    return Measured(scalars, frame, scores.trace, inside)


def by_chance(modules: Sequence[RuntimeModule], trace: Trace, seed: int) -> tuple[str, list[RuntimeModule]] | None:
    """The null of a run, and what kind it is: `shuffle` deals its decisions to random tokens. Who is fused with whom is not one
    token's decision, so a run that fused is repeated with its fusing module's own null, `random neighbours`, the rest as it was;
    where it has none, random tokens are merged into their right neighbours. Nor can evictions be dealt: `random entries` is the
    evicting module's own null. None: nothing was decided about tokens, or they left by rule and there is nothing to draw."""
    transforms = [module for module in modules if isinstance(module, Transform)]
    if len(transforms) == len(modules):
        return None
    nulls = [module.null(seed) for module in modules]
    fused, evicted = (any(getattr(one, events) for one in trace.passes) for events in ("fusions", "evictions"))
    if evicted and not any(nulls):
        return None
    if not any(nulls) or not (fused or evicted):
        return "shuffle", [*transforms, Replay(shuffled(trace, seed), like=modules)]
    kind = "random neighbours" if fused else "random entries"
    return kind, [null or module for null, module in zip(nulls, modules, strict=True)]


def totals(scores: Scores) -> dict[str, Any]:
    """Sums over the windows; perplexity divides once, at the end."""
    frame = scores.windows
    sums = {name: int(frame[name].sum()) for name in frame.columns if name.endswith("_flops")}
    has_bytes = not frame["bytes"].isna().any()
    return {
        "ppl": scores.ppl,
        "bits_per_byte": scores.bits_per_byte,
        "nll_nats": scores.nll_nats,
        "tokens": scores.tokens,
        "bytes": int(frame["bytes"].sum()) if has_bytes else None,
        **sums,
        "kv_bytes_billed": scores.kv_bytes_billed,
        "kv_bytes_resident": scores.kv_bytes_resident,
    }


def forward(model: PreTrainedModel, batch: torch.Tensor, protocol: Protocol, prompt_only: bool = False) -> None:
    """The calls that score a batch of windows (B, N), without scoring: one under `all`, prompt and continuation under
    `continuation`."""
    if protocol.name == "all":
        model(batch, use_cache=False)
        return
    prompt = protocol.prompt_tokens
    output = model(batch[:, :prompt], use_cache=True, logits_to_keep=1)
    if not prompt_only and protocol.scored_tokens > 1:
        model(batch[:, prompt:-1], use_cache=True, past_key_values=output.past_key_values)


def _batch_flops(
    model: PreTrainedModel, batch: torch.Tensor, protocol: Protocol, modules: Sequence[RuntimeModule], execution: str
) -> dict[str, int]:
    """Executed FLOPs of one batch by interposition, and the analytic count of the same calls: they agree within 1%."""
    with torch.no_grad(), apply(model, modules, execution=execution) as run:  # type: ignore[arg-type]
        interposed = count_executed(lambda: forward(model, batch, protocol))
        return {"interposed": interposed, "analytic": run.flops.executed}


def _latency(
    model: PreTrainedModel,
    batch: torch.Tensor,
    protocol: Protocol,
    modules: Sequence[RuntimeModule],
    options: Options,
    execution: str,
    report: Report,
) -> dict[str, Any]:
    """Wall clock of one batch, run and dense in turns; under `continuation` also of its prompt alone."""
    dense = shared_weight_copy(model)
    parts = {"": False, "prompt_": True} if protocol.name == "continuation" else {"": False}
    rounds = (options.warmup + options.repeats) * len(parts)
    done = 0
    scalars: dict[str, Any] = {}
    with torch.no_grad(), apply(model, modules, execution=execution) as run:  # type: ignore[arg-type]
        for prefix, prompt_only in parts.items():

            def ours(prompt_only: bool = prompt_only) -> None:
                run.reset()  # or the traces of all rounds pile up
                forward(model, batch, protocol, prompt_only)

            def theirs(prompt_only: bool = prompt_only) -> None:
                nonlocal done
                forward(dense, batch, protocol, prompt_only)
                done += 1
                report("latency", min(1.0, done / (2 * rounds)))  # the dense model runs twice a round: it is the control too

            times = alternate({"dense": theirs, "run": ours}, options.warmup, options.repeats, model.device)
            scalars |= {f"{prefix}latency_ms": _times(times, "run"), f"dense_{prefix}latency_ms": _times(times, "dense")}
            scalars[f"{prefix}noise_floor_pct"] = 100 * (times.noise_floor or 0.0)
            ratio = times.ratio("run", to="dense")
            scalars[f"{prefix}latency_ratio"] = {"median": ratio.median, "low": ratio.low, "high": ratio.high}
            scalars[f"{prefix}load_average"] = {"before": times.load_before, "after": times.load_after}
            scalars[f"{prefix}timing_warnings"] = times.warnings
    return scalars


def _times(times: Alternation, name: str) -> dict[str, Any]:
    return {"median": times[name].median, "iqr": times[name].iqr, "samples": times[name].ms}


def _memory(
    model: PreTrainedModel, batch: torch.Tensor, protocol: Protocol, modules: Sequence[RuntimeModule], execution: str
) -> dict[str, Any]:
    """Peak memory of one batch, after one run of it that pays for one-time allocations, and its KV cache by layer."""
    peaks, tensors, caches, saved = {}, {}, {}, []
    for name, active in (("dense_", ()), ("", modules)):
        with torch.no_grad(), apply(model, active, execution=execution if active else "compact") as run:  # type: ignore[arg-type]

            def one(run: Any = run) -> None:
                run.reset()
                forward(model, batch, protocol)

            one()
            peaks[name] = peak_memory(one, model.device)
            run.reset()  # what the next pass would free was no allocation of its own
            tensors[name] = peak_tensor_bytes(one) if model.device.type == "cpu" else None
            caches[name] = run.kv_bytes_by_layer
            saved = paper_kv_delta_bytes(run.trace, run.arch, model.dtype.itemsize)
    return {
        "peak_memory_bytes": peaks[""].bytes,
        "dense_peak_memory_bytes": peaks["dense_"].bytes,
        "peak_memory_method": peaks[""].method if peaks[""].device_bytes is None else "cuda allocator",
        "peak_tensor_bytes": tensors[""],
        "dense_peak_tensor_bytes": tensors["dense_"],
        "kv_bytes_by_layer": {
            "billed": [layer.billed for layer in caches[""]],
            "resident": [layer.resident for layer in caches[""]],
            "dense": [layer.resident for layer in caches["dense_"]],
            "paper_saved": saved,
        },
    }


def _components(
    model: PreTrainedModel,
    batch: torch.Tensor,
    protocol: Protocol,
    modules: Sequence[RuntimeModule],
    options: Options,
    execution: str,
) -> dict[str, Any]:
    """Where the time of one batch goes, dense and run; and what the decisions alone cost, everything executed. Under
    `continuation` of its prompt."""
    plain, decided = shared_weight_copy(model), shared_weight_copy(model)
    asked = copy.deepcopy(list(modules))  # decisions of their own: two models at a time
    with torch.no_grad(), ExitStack() as stack:
        dense = architecture_of(plain)
        subjects = {"dense": Subject(dense, lambda: forward(plain, batch, protocol, True))}
        besides: dict[str, Callable[[], object]] = {}
        if modules:
            run = stack.enter_context(apply(model, modules, execution=execution))  # type: ignore[arg-type]
            policy = stack.enter_context(apply(decided, asked, execution="decide"))

            def ours() -> None:
                run.reset()
                forward(model, batch, protocol, True)

            def deciding() -> None:
                policy.reset()
                forward(decided, batch, protocol, True)

            subjects["run"], besides["decide"] = Subject(run.arch, ours, modules), deciding
        found, times = component_latency(subjects, options.warmup, options.repeats, model.device, besides=besides)
    scalars: dict[str, Any] = {name: breakdown.scalars() for name, breakdown in found.items()}
    scalars["of"] = "prompt" if protocol.name == "continuation" else "window"
    scalars["noise_floor_pct"] = 100 * (times.noise_floor or 0.0)
    for name in times:
        if name != "dense":
            ratio = times.ratio(name, to="dense")
            scalars[f"{name}_ratio"] = {"median": ratio.median, "low": ratio.low, "high": ratio.high}
    return {"components": scalars, "components_timing_warnings": times.warnings}


def _energy(
    model: PreTrainedModel,
    batch: torch.Tensor,
    protocol: Protocol,
    modules: Sequence[RuntimeModule],
    options: Options,
    execution: str,
) -> dict[str, Any]:
    """Joules per token of one batch over and over, run and dense in turns with rest."""
    assert options.country_iso_code is not None  # checked with the config
    dense = shared_weight_copy(model)

    def settled(work: Callable[[], None]) -> Callable[[], None]:
        def fn() -> None:
            work()
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)

        return fn

    with torch.no_grad(), ExitStack() as stack:
        works = {"dense": settled(lambda: forward(dense, batch, protocol))}
        if modules:
            run = stack.enter_context(apply(model, modules, execution=execution))  # type: ignore[arg-type]

            def ours() -> None:
                run.reset()
                forward(model, batch, protocol)

            works["run"] = settled(ours)
        processed = batch.numel() if protocol.name == "all" else batch[:, :-1].numel()
        meter = meter_of(options.country_iso_code)
        found, how = energy(works, processed, meter, window_s=options.energy_window_s, rounds=options.energy_rounds)
    per_token = {name: one.scalars(meter.grid_kg_per_kwh) for name, one in found.items()}
    return {"energy": {**per_token, **how, "country_iso_code": options.country_iso_code}}


def _deployment(
    model: PreTrainedModel, window: torch.Tensor, modules: Sequence[RuntimeModule], options: Options, execution: str
) -> dict[str, Any]:
    """One prompt served alone, run and dense in turns (App. J)."""
    prompt, new = window[:, : options.deployment_prompt_tokens], options.deployment_new_tokens
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and prompt.shape[1] + new > positions:
        raise ConfigError(
            f"measure.deployment_prompt_tokens={prompt.shape[1]} and measure.deployment_new_tokens={new} are more than the model's "
            f"{positions} positions."
        )
    dense = shared_weight_copy(model)
    with torch.no_grad(), ExitStack() as stack:
        ways = {"dense": lambda: serve(dense, prompt, new)}
        if modules:
            run = stack.enter_context(apply(model, modules, execution=execution))  # type: ignore[arg-type]

            def ours() -> Served:
                run.reset()
                return serve(model, prompt, new)

            ways["run"] = ours
        found, steps = deployment(ways, options.warmup, options.repeats, model.device)
    scalars: dict[str, Any] = {name: one.scalars(options.budget_ms) for name, one in found.items()}
    scalars |= {"prompt_tokens": prompt.shape[1], "new_tokens": new, "budget_ms": options.budget_ms}
    scalars["noise_floor_pct"] = 100 * (steps.noise_floor or 0.0)
    if modules:
        ratio = steps.ratio("run", to="dense")
        scalars["per_token_ratio"] = {"median": ratio.median, "low": ratio.low, "high": ratio.high}
        same = (a == b for a, b in zip(found["run"].tokens, found["dense"].tokens, strict=True))
        scalars["same_first_tokens"] = sum(1 for _ in itertools.takewhile(bool, same))
    return {"deployment": scalars, "deployment_timing_warnings": steps.warnings}
