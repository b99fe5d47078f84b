"""Taking a pass apart, for `components`: attention, MLP, KV write, deciding, gathering …

A pass of its own, in turns with the untouched one: its marks cost time, so nothing else is measured in it, and how far its sum is from
the untouched pass goes into the record. Nothing of it stays: hooks on the model's parts and clocks around the runtime's are put in
before a pass and taken out after it.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from quicksilver.measure.components import COMPONENTS, KERNELS
from quicksilver.measure.latency import Alternation, LatencySamples, alternate
from quicksilver.modules.fusion import TokenFusion
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.module import MergePolicy, RuntimeModule, TokenPolicy
from quicksilver.runtime.phases import observed

DECIDING = ("decisions", "fusion")

# The component that each phase of the runtime counts as.
OF_PHASE: Mapping[str, str] = {
    "runtime": "runtime",
    "layer": "norms",
    "halted_kv": "attention",
    "gather": "gather_scatter",
    "scatter": "gather_scatter",
    "decide": "decisions",
    "fuse": "fusion",
    "write_kv": "kv_write",
    "quantize": "quantization",
}


class SectionClock:
    """Marks at the borders of nested sections: the time between two marks belongs to the innermost section open between them.

    Args:
        device: a CUDA device is marked by its own events, everything else by `time.perf_counter`.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open: list[tuple[str, int | None]] = []
        self._marks: list[tuple[tuple[str, int | None] | None, Any]] = []  # what is innermost from here on, and when

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

    def _mark(self) -> None:
        innermost = self._open[-1] if self._open else None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((innermost, event))
        else:
            self._marks.append((innermost, time.perf_counter()))

    def times_ms(self) -> dict[tuple[str, int | None], float]:
        """Milliseconds by component and layer (None: outside the layers), each moment counted once."""
        if self._on_gpu and self._marks:
            self._marks[-1][1].synchronize()
        times: dict[tuple[str, int | None], float] = {}
        for (section, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if section is not None:
                passed = begin.elapsed_time(end) if self._on_gpu else 1e3 * (end - begin)
                times[section] = times.get(section, 0.0) + passed
        return times


@dataclass(frozen=True)
class _PhaseMarks:
    """Is told by the runtime when a phase begins and ends, and notes both moments on a clock."""

    clock: SectionClock

    def enter(self, phase: str) -> None:
        self.clock.enter(OF_PHASE[phase])

    def leave(self) -> None:
        self.clock.leave()


@contextmanager
def watching(arch: Architecture, modules: Sequence[RuntimeModule], clock: SectionClock) -> Iterator[None]:
    """Inside the block, `clock` notes the beginning and end of every part of the model, and of every phase of the runtime under `modules`."""
    with ExitStack() as stack:

        def hook(part: nn.Module, component: str, layer: int | None = None) -> None:
            stack.callback(part.register_forward_pre_hook(lambda *_: clock.enter(component, layer)).remove)
            stack.callback(part.register_forward_hook(lambda *_: clock.leave()).remove)

        for part in arch.base.children():
            if part is not arch.final_norm and not isinstance(part, nn.ModuleList):
                hook(part, "embedding")
        for index, layer in enumerate(arch.layers):
            hook(layer, "norms", index)
            hook(arch.attention(index), "attention")
            hook(arch.mlp(index), "mlp")
        hook(arch.final_norm, "output_head")
        hook(arch.output_head, "output_head")
        stack.enter_context(observed(_PhaseMarks(clock)))
        stack.enter_context(_clocked(Cache, "update", "kv_write", clock))
        for module in modules:
            component = "fusion" if isinstance(module, TokenFusion) else "decisions"
            for kind, method in ((TokenPolicy, "decide"), (MergePolicy, "merge_cache")):
                if isinstance(module, kind):
                    stack.enter_context(_clocked(module, method, component, clock))
        yield


@contextmanager
def _clocked(owner: Any, name: str, component: str, clock: SectionClock) -> Iterator[None]:
    """Inside the block, the clock notes the beginning and end of every call of `owner.name`; afterwards the owner is as it was."""
    static = inspect.getattr_static(owner, name)
    fn = static.__func__ if isinstance(static, classmethod) else getattr(owner, name)

    @functools.wraps(fn)
    def clocked(*args: Any, **kwargs: Any) -> Any:
        clock.enter(component)
        try:
            return fn(*args, **kwargs)
        finally:
            clock.leave()

    own = name in vars(owner)
    setattr(owner, name, classmethod(clocked) if isinstance(static, classmethod) else clocked)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, static)
        else:
            delattr(owner, name)


@dataclass(frozen=True)
class Subject:
    """What is taken apart: `call` runs one pass of the model of `arch`, which is under `modules` already."""

    arch: Architecture
    call: Callable[[], object]
    modules: Sequence[RuntimeModule] = ()


@dataclass(frozen=True)
class Breakdown:
    """One subject's time by component.

    Attributes:
        components: samples by component, one a round; components that did not occur are absent.
        layers_ms: median by layer of each component that runs inside layers.
        headline: the untouched pass, timed in the same rounds.
    """

    components: Mapping[str, LatencySamples]
    layers_ms: Mapping[str, list[float]]
    headline: LatencySamples

    @property
    def sum_ms(self) -> float:
        """The medians of all components together."""
        return sum(samples.median for samples in self.components.values())

    @property
    def residual_pct(self) -> float:
        """How far the sum is from the untouched pass, in percent of it: what the marks cost, and noise."""
        return 100 * (self.sum_ms / self.headline.median - 1)


def component_latency(
    subjects: Mapping[str, Subject],
    warmup: int,
    repeats: int,
    device: str | torch.device = "cpu",
    *,
    besides: Mapping[str, Callable[[], object]] | None = None,
) -> tuple[dict[str, Breakdown], Alternation]:
    """Take each subject's pass apart, in turns with its untouched self; `besides` are timed in the same rounds, whole.

    Returns:
        Breakdowns by subject, and the times of everything that was not taken apart: subjects under their names, and `besides`.

    Raises:
        ConfigError: fewer than 3 repeats.
    """
    device = torch.device(device)
    clocks: dict[str, list[SectionClock]] = {name: [] for name in subjects}

    def taken_apart(name: str, subject: Subject) -> Callable[[], None]:
        def fn() -> None:
            clock = SectionClock(device)
            with watching(subject.arch, subject.modules, clock):
                clock.enter("model")
                subject.call()
                clock.leave()
            clocks[name].append(clock)

        return fn

    turns: dict[str, Callable[[], object]] = {name: subject.call for name, subject in subjects.items()} | dict(besides or {})
    parts = {f"{name}, taken apart": taken_apart(name, subject) for name, subject in subjects.items()}
    times = alternate(turns | parts, warmup, repeats, device)
    whole = Alternation(
        {name: times[name] for name in turns}, control=times.control, control_ms=times.control_ms, load_before=times.load_before,
        load_after=times.load_after, seconds=times.seconds, clock_gap_s=times.clock_gap_s,
    )  # fmt: skip
    breakdowns = {
        name: _breakdown([clock.times_ms() for clock in clocks[name][warmup:]], subject.arch.n_layers, times[name])
        for name, subject in subjects.items()
    }
    return breakdowns, whole


def _breakdown(rounds: Sequence[Mapping[tuple[str, int | None], float]], n_layers: int, headline: LatencySamples) -> Breakdown:
    sections = {section for times in rounds for section in times}
    components, layers_ms = {}, {}
    for component in COMPONENTS:
        mine = [section for section in sections if section[0] == component]
        if not mine:
            continue
        components[component] = LatencySamples([sum(times.get(section, 0.0) for section in mine) for times in rounds])
        if any(layer is not None for _, layer in mine):
            layers_ms[component] = [
                LatencySamples([times.get((component, layer), 0.0) for times in rounds]).median for layer in range(n_layers)
            ]
    return Breakdown(components, layers_ms, headline)
