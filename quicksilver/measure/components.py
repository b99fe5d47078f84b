"""Where the time of a batch goes: attention, MLP, KV write, deciding, gathering … (Table 7, App. J and K), dense and run; and what the
decisions alone cost, everything executed. Under `continuation` of its prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from quicksilver.measure.measurement import Measurement, Quartiles, Result
from quicksilver.runtime.options import Count, at_least

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench

# What each component is; `report` prints these words. The last two are what is left inside and outside the layers.
COMPONENTS: Mapping[str, str] = {
    "embedding": "token and position embeddings, rotary factors",
    "attention": "attention with its projections, without the KV write; K/V projected for tokens that halted",
    "mlp": "feed-forward network",
    "norms": "norms and residual sums of the layers",
    "kv_write": "planning and writing the KV cache",
    "output_head": "final norm and output head",
    "decisions": "signals and decisions of all modules but fusion, logit lens included",
    "fusion": "deciding what is fused, and merging it",
    "quantization": "coding and decoding of states, inputs and K/V; not the products",
    "gather_scatter": "packing the active tokens and putting them back",
    "runtime": "masks and bookkeeping around the layers",
    "model": "the rest of the model's own Python: masks, outputs",
}
KERNELS = ("embedding", "attention", "mlp", "norms", "output_head")  # what a dense pass has, too


@dataclass(frozen=True)
class Part:
    """Time of one component over the rounds."""

    median_ms: float
    iqr_ms: float


@dataclass(frozen=True)
class BreakdownResult:
    """One pass taken apart.

    Attributes:
        components: by name; those that did not occur are absent.
        layers_ms: median by layer of each component that runs inside layers.
        headline_ms: the untouched pass, timed in the same rounds; `sum_ms` all components together; `residual_pct` how far these are apart.
    """

    components: dict[str, Part]
    layers_ms: dict[str, list[float]]
    headline_ms: float
    sum_ms: float
    residual_pct: float


@dataclass(frozen=True)
class ComponentsResult(Result):
    """Dense and run, taken apart in turns.

    Attributes:
        of: `prompt` or `window`.
        run_ratio, decide_ratio: time of the run, and of deciding with everything executed, over the dense time; None in a dense run.
    """

    of: Literal["prompt", "window"]
    noise_floor_pct: float
    dense: BreakdownResult
    run: BreakdownResult | None = None
    run_ratio: Quartiles | None = None
    decide_ratio: Quartiles | None = None
    timing_warnings: list[str] = field(default_factory=list)

    @property
    def ours(self) -> BreakdownResult:
        """Of the run; in a dense run, of the dense model."""
        return self.run or self.dense

    def line(self) -> str:
        found = self.ours
        dearest = sorted(found.components.items(), key=lambda part: -part[1].median_ms)[:3]
        parts = ", ".join(f"{name} {part.median_ms:.1f} ms" for name, part in dearest)
        return f"{parts} of {found.headline_ms:.1f} ms; sum off by {found.residual_pct:+.1f}%"


@dataclass
class Components(Measurement):
    """Take one batch apart.

    Args:
        warmup: untimed rounds (App. J: 10).
        repeats: timed rounds, at least 3 (App. J: 50).
    """

    warmup: Count = 1
    repeats: Annotated[int, at_least(3)] = 5

    share = 0.07
    timed = True

    def run(self, bench: Bench) -> ComponentsResult:
        import torch

        from quicksilver.measure.bench import forward
        from quicksilver.measure.breakdown import Subject, component_latency
        from quicksilver.measure.latency import shared_weight_copy
        from quicksilver.runtime.architecture import architecture_of

        model, batch, protocol = bench.model, bench.batch, bench.protocol
        plain, decided = shared_weight_copy(model), shared_weight_copy(model)
        asked = copy.deepcopy(list(bench.modules))  # decisions of their own: two models at a time
        with torch.no_grad(), ExitStack() as stack:
            dense = architecture_of(plain)
            subjects = {"dense": Subject(dense, lambda: forward(plain, batch, protocol, True))}
            besides: dict[str, Callable[[], object]] = {}
            if bench.modules:
                run = stack.enter_context(bench.apply())
                policy = stack.enter_context(bench.apply(decided, asked, "decide"))

                def ours() -> None:
                    run.reset()
                    forward(model, batch, protocol, True)

                def deciding() -> None:
                    policy.reset()
                    forward(decided, batch, protocol, True)

                subjects["run"], besides["decide"] = Subject(run.arch, ours, bench.modules), deciding
            found, times = component_latency(subjects, self.warmup, self.repeats, model.device, besides=besides)
        ratios = {
            f"{name}_ratio": Quartiles(ratio.median, ratio.low, ratio.high)
            for name in times
            if name != "dense" and (ratio := times.ratio(name, to="dense"))
        }
        parts = {
            name: BreakdownResult(
                {part: Part(samples.median, samples.iqr) for part, samples in one.components.items()},
                dict(one.layers_ms),
                one.headline.median,
                one.sum_ms,
                one.residual_pct,
            )
            for name, one in found.items()
        }
        return ComponentsResult(
            of="prompt" if protocol.name == "continuation" else "window",
            noise_floor_pct=100 * (times.noise_floor or 0.0),
            timing_warnings=times.warnings,
            **parts,  # type: ignore[arg-type]
            **ratios,  # type: ignore[arg-type]
        )
