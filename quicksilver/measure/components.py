"""Where the time of a batch goes: attention, MLP, KV write, deciding, gathering … (Table 7, App. J and K), of the dense model and of the run.
Beside it what the decisions alone cost, everything executed. Under `continuation` of its prompt.

A pass of its own, in turns with the untouched one. Its marks cost time, so nothing else is measured in it, and how far its sum is from the
untouched pass goes into the record. Hooks and clocks are put in before a pass and taken out after it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from quicksilver.measure.latency import Alternation, InTurns, LatencySamples, Rounds, Step, alternate, shared_weight_copy
from quicksilver.measure.measurement import Quartiles, Result

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.architecture import Architecture
    from quicksilver.runtime.module import RuntimeModule

# What each component is. The last two are what is left inside and outside the layers.
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
DECIDING = ("decisions", "fusion")
OF_PHASE: Mapping[str, str] = {  # phase of the runtime -> component
    "runtime": "runtime", "layer": "norms", "halted_kv": "attention", "gather": "gather_scatter", "scatter": "gather_scatter",
    "decide": "decisions", "fuse": "fusion", "write_kv": "kv_write", "quantize": "quantization",
}  # fmt: skip
Section = tuple[str, int | None]  # component, and layer (None: outside the layers)


class SectionClock:
    """Marks at the borders of nested sections: the time between two marks belongs to the innermost section open between them.
    A CUDA device is marked by its own events, everything else by `time.perf_counter`."""

    def __init__(self, device: str | torch.device) -> None:
        self._on_gpu = str(device).startswith("cuda")
        self._open: list[Section] = []
        self._marks: list[tuple[Section | None, Any]] = []  # what is innermost from here on, and when

    def enter(self, component: str, layer: int | None = None) -> None:
        if self._open:
            layer = self._open[-1][1] if layer is None else layer
            # A logit lens is the price of a decision, whatever parts of the model it borrows.
            if component in (*KERNELS, "kv_write"):
                component = next((name for name, _ in reversed(self._open) if name in DECIDING), component)
        self._open.append((component, layer))
        self._mark()

    def leave(self) -> None:
        self._open.pop()
        self._mark()

    @contextmanager
    def section(self, component: str) -> Iterator[None]:
        """Inside the block, the time belongs to `component`."""
        self.enter(component)
        try:
            yield
        finally:
            self.leave()

    def _mark(self) -> None:
        import torch

        now: Any = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter()
        if self._on_gpu:
            now.record()
        self._marks.append((self._open[-1] if self._open else None, now))

    def times_ms(self) -> dict[Section, float]:
        """Milliseconds by component and layer (None: outside the layers), each moment counted once."""
        if self._on_gpu and self._marks:
            self._marks[-1][1].synchronize()
        times: dict[Section, float] = defaultdict(float)
        for (section, begin), (_, end) in pairwise(self._marks):
            if section is not None:
                times[section] += begin.elapsed_time(end) if self._on_gpu else 1e3 * (end - begin)
        return dict(times)


@contextmanager
def watching(arch: Architecture, modules: Sequence[RuntimeModule], clock: SectionClock) -> Iterator[None]:
    """Inside the block, `clock` notes the beginning and end of every part of the model, and of every phase of the runtime under `modules`."""
    from torch import nn
    from transformers.cache_utils import Cache

    from quicksilver.modules.fusion import TokenFusion
    from quicksilver.runtime.module import MergePolicy, TokenPolicy
    from quicksilver.runtime.phases import observed

    phases: Any = SimpleNamespace(enter=lambda phase: clock.enter(OF_PHASE[phase]), leave=clock.leave)
    with ExitStack() as stack:

        def hook(part: nn.Module, component: str, layer: int | None = None) -> None:
            stack.callback(part.register_forward_pre_hook(lambda *_: clock.enter(component, layer)).remove)
            stack.callback(part.register_forward_hook(lambda *_: clock.leave()).remove)

        def clock_calls(owner: Any, name: str, component: str) -> None:
            fn = getattr(owner, name)

            @functools.wraps(fn)
            def clocked(*args: Any, **kwargs: Any) -> Any:
                with clock.section(component):
                    return fn(*args, **kwargs)

            if name in vars(owner):
                stack.callback(setattr, owner, name, fn)
            else:  # its class has it
                stack.callback(delattr, owner, name)
            setattr(owner, name, clocked)

        for part in arch.base.children():
            if part is not arch.final_norm and not isinstance(part, nn.ModuleList):
                hook(part, "embedding")
        for index, layer in enumerate(arch.layers):
            hook(layer, "norms", index)
            hook(arch.attention(index), "attention")
            hook(arch.mlp(index), "mlp")
        hook(arch.final_norm, "output_head")
        hook(arch.output_head, "output_head")
        stack.enter_context(observed(phases))
        clock_calls(Cache, "update", "kv_write")
        for module in modules:
            component = "fusion" if isinstance(module, TokenFusion) else "decisions"
            for kind, method in ((TokenPolicy, "decide"), (MergePolicy, "merge_cache")):
                if isinstance(module, kind):
                    clock_calls(module, method, component)
        yield


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


class Subject(NamedTuple):
    """What is taken apart: `call` runs one pass of the model of `arch`, which is under `modules` already."""

    arch: Architecture
    call: Step
    modules: Sequence[RuntimeModule] = ()


def component_latency(
    subjects: Mapping[str, Subject],
    warmup: int,
    repeats: int,
    device: str | torch.device = "cpu",
    *,
    besides: Mapping[str, Step] | None = None,
) -> tuple[dict[str, BreakdownResult], Alternation]:
    """Take each subject's pass apart, in turns with its untouched self; `besides` are timed in the same rounds, whole. Gives
    breakdowns by subject, and the times of all that was not taken apart, by name. Raises ConfigError: fewer than 3 repeats."""
    clocks: dict[str, list[SectionClock]] = {name: [] for name in subjects}

    def take_apart(name: str, subject: Subject) -> None:
        clock = SectionClock(device)
        with watching(subject.arch, subject.modules, clock):
            clock.enter("model")
            subject.call()
            clock.leave()
        clocks[name].append(clock)

    whole: dict[str, Step] = {name: subject.call for name, subject in subjects.items()} | dict(besides or {})
    parts: dict[str, Step] = {f"{name}, taken apart": functools.partial(take_apart, name, one) for name, one in subjects.items()}
    times = alternate(whole | parts, warmup, repeats, device)
    breakdowns = {
        name: _breakdown([clock.times_ms() for clock in clocks[name][warmup:]], subject.arch.n_layers, times[name].median)
        for name, subject in subjects.items()
    }
    return breakdowns, dataclasses.replace(times, data={name: times[name] for name in whole})


def _breakdown(rounds: Sequence[Mapping[Section, float]], n_layers: int, headline_ms: float) -> BreakdownResult:
    sections = {section for times in rounds for section in times}

    def samples(*which: Section) -> LatencySamples:
        return LatencySamples([sum(times.get(section, 0.0) for section in which) for times in rounds])

    components, layers_ms = {}, {}
    for component in COMPONENTS:
        if mine := [section for section in sections if section[0] == component]:
            all_layers = samples(*mine)
            components[component] = Part(all_layers.median, all_layers.iqr)
        if any(layer is not None for _, layer in mine):
            layers_ms[component] = [samples((component, layer)).median for layer in range(n_layers)]
    sum_ms = sum(part.median_ms for part in components.values())
    return BreakdownResult(components, layers_ms, headline_ms, sum_ms, 100 * (sum_ms / headline_ms - 1))


@dataclass(frozen=True)
class ComponentsResult(Result):
    """Dense and run, taken apart in turns.

    Attributes:
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
class Components(InTurns, share=0.07):
    """Take one batch apart (App. J: 10 untimed rounds, 50 timed ones)."""

    repeats: Rounds = 5

    def run(self, bench: Bench) -> ComponentsResult:
        from quicksilver.measure.bench import Side
        from quicksilver.runtime.architecture import architecture_of

        decided, own = shared_weight_copy(bench.model), copy.deepcopy(list(bench.modules))  # two models decide at a time
        with bench.sides() as sides, ExitStack() as stack:
            subjects, besides = {}, {}
            for name, side in sides.items():
                arch, modules = (architecture_of(side.model), ()) if side.run is None else (side.run.arch, bench.modules)
                subjects[name] = Subject(arch, functools.partial(side.forward, True), modules)
            if bench.modules:
                policy = stack.enter_context(bench.apply(decided, own, "decide"))
                policy.count_decisions(False)
                besides["decide"] = functools.partial(Side(decided, bench.batch, bench.protocol, policy).forward, True)
            found, times = component_latency(subjects, self.warmup, self.repeats, bench.model.device, besides=besides)
        of: Literal["prompt", "window"] = "prompt" if bench.protocol.name == "continuation" else "window"
        both: dict[str, Any] = found | {f"{name}_ratio": times.ratio(name, to="dense") for name in times if name != "dense"}
        return ComponentsResult(of, times.noise_floor_pct, timing_warnings=times.warnings, **both)
