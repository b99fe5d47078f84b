"""What the detectors' wall clock is made of, and how much of the saved operations it saves.

Two clocks, each with operations of its own. The `encoder`: embedded pillars in, states out; what the paper accelerates. The `whole` detector:
points in, boxes out, with features, embedding, head, decoding and suppression of overlaps, which no halting shortens. Operations are those of the
scenes that are timed.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import torch

from quicksilver.measure.latency import alternate, shared_weight_copy
from quicksilver.modules.learned_halting import LearnedHalting, TrainedGates
from quicksilver.runtime.phases import observed
from quicksilver.runtime.run import Run, apply

from .evaluate import Evaluation, ScenePolicy, ap_difference, evaluate
from .measure import DRAWS, Key, compared
from .model import PillarDetector, detector
from .pillars import N_FEATURES, N_MEASURED, N_OUTPUTS, N_WAVES, batch_of, decode, features
from .runs import LEARNED, PARTS, Plan, SeedRuns, gated, ruled, tasks
from .scenes import Grid, Scene, SceneMaker

TIMED = (0.3, 0.5)  # thresholds
LEFT = (0.35, 0.2, 0.15)  # of the tokens after each layer, near what gates that were trained for 45% of token-layers leave
SIZES = (*((width, side, 1) for side in (24, 48) for width in (48, 96, 192, 384)), (48, 24, 8), (192, 24, 8))


@dataclass
class Timed:
    """A detector under one policy, ready to be timed. A context manager: the policy acts inside.

    Args:
        scenes: their points; embedded: the same, (B, N, D) each, as the encoder takes them.
    """

    model: PillarDetector
    policy: ScenePolicy | None
    scenes: Sequence[Scene]
    grid: Grid
    embedded: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.model = cast(PillarDetector, shared_weight_copy(self.model))  # one that no other run acts on
        with torch.inference_mode():
            self.embedded = [self.embed(self.given(scene)) for scene in self.scenes]

    def __enter__(self) -> Timed:
        self._context = apply(self.model, [] if self.policy is None else self.policy(0))
        self.run = self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)

    def given(self, scene: Scene) -> torch.Tensor:
        """(1, N, F) of its points."""
        return torch.from_numpy(features(scene, self.grid))[None]

    def embed(self, given: torch.Tensor) -> torch.Tensor:
        """(1, N, F) -> (1, N, D)."""
        return self.model.embed(given) + self.model.place(given[..., N_MEASURED:])

    def encoder(self) -> None:
        """Every scene through the encoder alone, one a pass."""
        with torch.inference_mode():
            for hidden in self.embedded:
                self.run.reset()
                self.model.encoder(inputs_embeds=hidden)

    def whole(self) -> None:
        """Every scene from its points to its boxes, one a pass."""
        with torch.inference_mode():
            for scene in self.scenes:
                self.run.reset()
                decode(self.model(self.given(scene)), self.grid)

    def flops(self, clock: str) -> float:
        """Executed operations of a scene, mean: of what the clock of that name covers, as far as it is products, attention and gates."""
        found = []
        with torch.inference_mode():
            for hidden in self.embedded:
                self.run.reset()
                self.model.encoder(inputs_embeds=hidden)
                found.append(self.run.flops.executed)
        encoder, n, width = float(np.mean(found)), self.grid.n_pillars, self.model.config.hidden_size
        beside = 2 * n * (N_FEATURES * 2 * width + 2 * width * width + N_WAVES * width + width * N_OUTPUTS)
        return encoder if clock == "encoder" else encoder + beside


def timing(seed: SeedRuns, more: Sequence[str] = (), repeats: int = 15, scenes: int = 8) -> pd.DataFrame:
    """Wall clock of one scene a pass, in turns with the dense control; one sample is a round of `scenes`. Two rows, one a clock, for each detector,
    policy and dial: every threshold of the gates that halts somebody and leaves somebody, and random halting at the rates of box weights."""
    runs: dict[Key, tuple[PillarDetector, ScenePolicy | None]] = {
        ("control", "dense", 0.0): (seed.control().model, None),
        ("longer", "dense", 0.0): (seed.longer().model, None),
    }
    for name in LEARNED:
        learned = seed.learned(name)
        runs |= {(name, "learned", threshold): (learned.model, gated(learned, threshold)) for threshold in TIMED}
    runs["random", "random", 0.5] = (seed.ruled("random").model, ruled("random", seed.rates))
    if "taught" in more:
        learned = seed.learned("taught")
        runs |= {("taught", "learned", threshold): (learned.model, gated(learned, threshold)) for threshold in TIMED}
    if "wide" in more:
        runs["wide_control", "dense", 0.0] = (seed.control(wide=True).model, None)
        learned = seed.learned("gentle", wide=True)
        runs |= {("wide_gentle", "learned", threshold): (learned.model, gated(learned, threshold)) for threshold in TIMED}
    made = seed.plan.validation_scenes(scenes)
    rows = []
    with ExitStack() as stack:
        ready = {key: stack.enter_context(Timed(*run, made, seed.plan.maker.grid)) for key, run in runs.items()}
        for clock in ("encoder", "whole"):
            times = alternate({" ".join(map(str, key)): getattr(one, clock) for key, one in ready.items()}, 2, repeats)
            dense, *_ = ready
            flops = {key: one.flops(clock) for key, one in ready.items()}
            for key in ready:
                name = " ".join(map(str, key))
                ratio = times.ratio(name, " ".join(map(str, dense)))
                rows.append(
                    dict(zip(("detector", "policy", "dial"), key, strict=True))
                    | {"clock": clock, "latency_ms": times[name].median / scenes, "latency_ratio": ratio.median, "latency_ratio_low": ratio.low,
                       "latency_ratio_high": ratio.high, "flops_saved_pct": 100 * (1 - flops[key] / flops[dense]),
                       "noise_floor_pct": 100 * (times.noise_floor or 0.0), "load_average": times.load_before}
                )  # fmt: skip
    return pd.DataFrame(rows)


# -- share by share --------------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds by part; an observer of the runtime's phases, whose innermost one is charged."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        self._charge()
        layers = sum(name.startswith("layer ") for name in self.seconds)
        self._open.append(f"layer {layers}" if phase == "layer" else phase)

    def leave(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge what is inside and in no other part."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()


def parts(seed: SeedRuns, name: str = "gentle", repeats: int = 15, scenes: int = 8) -> pd.DataFrame:
    """Where a scene's time goes, dense and halted at the paper's threshold: milliseconds (of each scene its least of `repeats`, mean over scenes) of
    every part, operations where the ledger has them, tokens where it is a layer."""
    learned, grid = seed.learned(name), seed.plan.maker.grid
    made = seed.plan.validation_scenes(scenes)
    rows: list[dict[str, object]] = []
    runs: dict[str, tuple[PillarDetector, ScenePolicy | None]] = {
        "dense": (seed.control().model, None),
        "halted": (learned.model, gated(learned)),
    }
    for said, (model, policy) in runs.items():
        with Timed(model, policy, made, grid) as timed:
            taken: dict[str, list[float]] = defaultdict(list)
            tokens: dict[str, list[float]] = defaultdict(list)
            for scene in made:
                each = [_taken(timed, scene) for _ in range(repeats)]
                for part in each[0]:
                    taken[part].append(min(one[part] for one in each))
                (trace,) = timed.run.trace.passes
                for layer in range(trace.n_layers):
                    tokens[f"layer {layer}"].append(float(trace.active(layer).sum()))
            for part, values in taken.items():
                n = float(np.mean(tokens[part])) if part in tokens else None
                rows.append(
                    {"run": said, "part": part, "latency_ms": 1e3 * float(np.mean(values)), "tokens": n,
                     "flops": _layer_flops(timed, tokens[part]) if part in tokens else None}
                )  # fmt: skip
    return pd.DataFrame(rows)


def _taken(timed: Timed, scene: Scene) -> dict[str, float]:
    watch, model = Stopwatch(), timed.model
    handles = []
    if timed.policy is None:  # layers that nobody wraps have no phases
        for layer in model.encoder.layers:
            handles.append(layer.register_forward_pre_hook(lambda *_: watch.enter("layer")))
            handles.append(layer.register_forward_hook(lambda *_: watch.leave()))
    timed.run.reset()
    try:
        with torch.inference_mode(), observed(watch):
            with watch.part("features of the points"):
                given = timed.given(scene)
            with watch.part("embedding"):
                hidden = timed.embed(given)
            with watch.part("a pass's begin and end"):
                hidden = model.encoder(inputs_embeds=hidden).last_hidden_state
            with watch.part("norm and head"):
                said = model.head(model.encoder.norm(hidden))
            with watch.part("boxes and suppression"):
                decode(said, timed.grid)
    finally:
        for handle in handles:
            handle.remove()
    for index in range(model.config.num_hidden_layers):  # one that nobody is left for is not called
        watch.seconds.setdefault(f"layer {index}", 0.0)
    return dict(watch.seconds)


def _layer_flops(timed: Timed, tokens: Sequence[float]) -> float:
    width = timed.model.config.hidden_size
    return float(np.mean([16 * width**2 * n + 4 * width * n**2 for n in tokens]))


# -- by size ---------------------------------------------------------------------------------------------------------------------


def sizes(shapes: Sequence[tuple[int, int, int]] = SIZES, layers: int = 4, repeats: int = 7) -> pd.DataFrame:
    """How much of the saved operations of the encoder its time saves, by width, pillars and scenes a pass. Weights are drawn, and gates too, whose
    biases leave `LEFT` of each scene's tokens: the clock does not ask what was learnt."""
    rows = []
    for width, side, batch in shapes:
        grid = Grid(side=side, size_m=24 / side)
        model = detector(width, layers, max(1, width // 16) if width < 96 else width // 32, 0)
        scenes = [SceneMaker(grid=grid).scene(number) for number in range(max(batch, 2))]
        given = batch_of(scenes, grid).features
        plain = cast(PillarDetector, shared_weight_copy(model))
        with torch.inference_mode():
            hidden = model.embed(given) + model.place(given[..., N_MEASURED:])
            passes = list(hidden.split(batch))
            policy = [LearnedHalting(gates=_gates_that_leave(model, passes), protect_first=0, protect_last=None)]
            with apply(model, policy) as halted, apply(plain, []) as dense:
                flops = [_flops(run, one, passes) for run, one in ((dense, plain), (halted, model))]
                shares = [float(p.active(layer).float().mean()) for p in halted.trace.passes for layer in range(layers)]
                times = alternate({"dense": _all(dense, plain, passes), "halted": _all(halted, model, passes)}, 2, repeats)
        ratio = times.ratio("halted", "dense")
        rows.append(
            {"width": width, "pillars": grid.n_pillars, "scenes_a_pass": batch, "tokens": float(np.mean(shares)),
             "dense_ms": times["dense"].median / len(scenes), "halted_ms": times["halted"].median / len(scenes), "latency_ratio": ratio.median,
             "latency_ratio_low": ratio.low, "latency_ratio_high": ratio.high, "flops_saved_pct": 100 * (1 - flops[1] / flops[0]),
             "noise_floor_pct": 100 * (times.noise_floor or 0.0), "load_average": times.load_before, "threads": torch.get_num_threads()}
        )  # fmt: skip
    return pd.DataFrame(rows)


def _all(run: Run, model: PillarDetector, passes: Sequence[torch.Tensor]) -> Callable[[], None]:
    def once() -> None:
        for hidden in passes:
            run.reset()
            model.encoder(inputs_embeds=hidden)

    return once


def _flops(run: Run, model: PillarDetector, passes: Sequence[torch.Tensor]) -> float:
    run.reset()
    for hidden in passes:
        model.encoder(inputs_embeds=hidden)
    return run.flops.executed


def _gates_that_leave(model: PillarDetector, passes: Sequence[torch.Tensor]) -> TrainedGates:
    """Gates after every layer but the last, layer by layer with biases at which the mean scene has `LEFT` of its tokens left."""
    width, last = model.config.hidden_size, model.config.num_hidden_layers - 1
    weight = torch.randn(last, width, generator=torch.Generator().manual_seed(0)) / width**0.5
    bias = torch.full((last,), 30.0)
    for layer in range(last):
        gates = TrainedGates(tuple(range(last)), weight, bias.clone(), last + 1)
        seen: list[torch.Tensor] = []
        handle = model.encoder.layers[layer + 1].register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append(_input(args, kwargs)), with_kwargs=True
        )
        try:
            with apply(model, [LearnedHalting(gates=gates, protect_first=0, protect_last=None)]) as run:
                for hidden in passes:
                    model.encoder(inputs_embeds=hidden)
        finally:
            handle.remove()
        active = torch.cat([trace.active(layer + 1).flatten() for trace in run.trace.passes])
        logits = torch.cat([gates.logits(layer, states, None).flatten() for states in seen])[active] - bias[layer]
        left = round(LEFT[min(layer, len(LEFT) - 1)] * active.numel())
        bias[layer] = -logits.sort(descending=True).values[left - 1 : left + 1].mean()
    return TrainedGates(tuple(range(last)), weight, bias, last + 1)


def _input(args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]


# -- the study itself ------------------------------------------------------------------------------------------------------------


def cost(plan: Plan, seed: int, folder: Path, steps: int = 12, scenes: int = 4) -> pd.DataFrame:
    """What the study takes of one process for one seed: a row for making the scenes, one for each training, one for its evaluations and one for its
    part of the intervals. A few of each are timed, from nothing; the rest is their number.

    Args:
        folder: of finished detectors, which are evaluated: one that has learnt nothing finds nothing to suppress.
    """
    few = dataclasses.replace(plan, scenes=48, validation=scenes)
    rows: list[dict[str, object]] = []

    def timed(what: str, count: float, n: int, do: Callable[[], object]) -> None:
        began = time.perf_counter()
        do()
        rows.append({"what": what, "count": count, "seconds_each": (time.perf_counter() - began) / n})

    timed("scenes", plan.scenes + plan.validation, 48 + scenes, lambda: (few.training_data, few.validation_data))
    short = dataclasses.replace(few, steps=steps, tuning_steps=steps)
    short.__dict__["training_data"] = few.training_data
    with tempfile.TemporaryDirectory() as place:
        trial = SeedRuns(short, seed, Path(place))
        for _, part in tasks([seed], PARTS):
            count = plan.steps if part in ("dense", "no_layers") else plan.tuning_steps
            timed(part, count, steps, partial(trial.train, part))
    found: dict[Key, list[Evaluation]] = {}

    def evaluated() -> None:
        for detector_, policy, dial, one in SeedRuns(few, seed, folder, may_train=False).evaluations():
            found[detector_, policy, dial] = [one]

    timed("evaluations", 0, scenes, evaluated)
    rows[-1] |= {"count": plan.validation, "what": f"{len(found)} evaluations"}
    whole = dataclasses.replace(plan, scenes=48)
    dense = evaluate(SeedRuns(whole, seed, folder, may_train=False).control().model, whole.validation_data, plan.maker.grid)
    draws = 40
    ap_difference([dense], [dense], draws=2)  # what is paid once
    timed("intervals", DRAWS * len(compared(found)), draws, lambda: ap_difference([dense], [dense], draws=draws))
    frame = pd.DataFrame(rows)
    frame.insert(0, "seed", seed)
    return frame.assign(
        seconds=frame["count"] * frame["seconds_each"], load_average=os.getloadavg()[0], threads=torch.get_num_threads()
    )
