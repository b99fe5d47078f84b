"""The separate passes of one run: quality, null, audit, executed FLOPs, wall clock, memory, a look inside. What is timed is never also
traced or counted.

This file and what it imports decide every number of a record; `fingerprint.py` hashes exactly that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

from quicksilver.data.windows import Windows
from quicksilver.measure.flops import count_executed
from quicksilver.measure.inside import Inside, look_inside
from quicksilver.measure.latency import Alternation, alternate
from quicksilver.measure.memory import peak_memory
from quicksilver.measure.perplexity import Protocol, Scores, audit, score
from quicksilver.modules.controls import Replay, shuffled
from quicksilver.runtime.engine import apply
from quicksilver.runtime.module import RuntimeModule, Transform
from quicksilver.runtime.trace import Trace

PHASES = {
    "quality": 0.3,
    "null": 0.2,
    "audit": 0.1,
    "flops": 0.05,
    "latency": 0.25,
    "memory": 0.05,
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


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under module objects of their own: stays plain while `model` is under `apply`, so the two can take
    turns."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


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
    dense = _twin(model)
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
    return scalars


def _times(times: Alternation, name: str) -> dict[str, Any]:
    return {"median": times[name].median, "iqr": times[name].iqr, "samples": times[name].ms}


def _memory(
    model: PreTrainedModel, batch: torch.Tensor, protocol: Protocol, modules: Sequence[RuntimeModule], execution: str
) -> dict[str, Any]:
    """Peak memory of one batch, after one run of it that pays for one-time allocations."""
    peaks = {}
    for name, active in (("dense_", ()), ("", modules)):
        with torch.no_grad(), apply(model, active, execution=execution if active else "compact") as run:  # type: ignore[arg-type]

            def one(run: Any = run) -> None:
                run.reset()
                forward(model, batch, protocol)

            one()
            peaks[name] = peak_memory(one, model.device)
    return {
        "peak_memory_bytes": peaks[""].bytes,
        "dense_peak_memory_bytes": peaks["dense_"].bytes,
        "peak_memory_method": peaks[""].method if peaks[""].device_bytes is None else "cuda allocator",
    }
