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
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch

from quicksilver.fitting.equivalent import equivalent_forward
from quicksilver.fitting.gates import HaltingGates
from quicksilver.measure.latency import alternate, shared_weight_copy
from quicksilver.runtime.phases import observed
from quicksilver.runtime.run import apply

from .evaluate import Evaluation, ScenePolicy, ap_difference, evaluate
from .frames import DRAWS, compared
from .model import N_FEATURES, N_MEASURED, N_OUTPUTS, N_WAVES, PillarDetector, Shape, decode, detector, features
from .runs import LEARNED, PARTS, Key, SeedRuns, gated, ruled, tasks
from .scenes import Grid, Scene, SceneMaker
from .training import Trained

TIMED = (0.3, 0.5)  # thresholds
LEFT = (0.35, 0.2, 0.15)  # of the tokens after each layer, near what gates that were trained for 45% of token-layers leave
SIZES = (*((width, side, 1) for side in (24, 48) for width in (48, 96, 192, 384)), (48, 24, 8), (192, 24, 8))


class Timed:
    """A detector under one policy, ready to be timed. A context manager: the policy acts inside.

    Args:
        scenes: their points. a_pass: how many of them go through the encoder at once.

    Attributes:
        embedded: the scenes as the encoder takes them, a pass each: (B, N, D).
    """

    def __init__(
        self, model: PillarDetector, policy: ScenePolicy | None, scenes: Sequence[Scene], grid: Grid, a_pass: int = 1
    ) -> None:
        self.model = cast(PillarDetector, shared_weight_copy(model))  # one that no other run acts on
        self.policy, self.scenes, self.grid = policy, scenes, grid
        with torch.inference_mode():
            self.embedded = torch.cat([self.embed(self.given(scene)) for scene in scenes]).split(a_pass)

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
        """Every pass through the encoder alone."""
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
        """Executed operations of a pass, mean: of what the clock of that name covers, as far as it is products, attention and gates. The run's
        trace is that of all passes then."""
        self.run.reset()
        with torch.inference_mode():
            for hidden in self.embedded:
                self.model.encoder(inputs_embeds=hidden)
        encoder, n, width = self.run.flops.executed / len(self.embedded), self.grid.n_pillars, self.model.config.hidden_size
        beside = 2 * n * (N_FEATURES * 2 * width + 2 * width * width + N_WAVES * width + width * N_OUTPUTS)
        return encoder if clock == "encoder" else encoder + beside


def timing(seed: SeedRuns, more: Sequence[str] = (), repeats: int = 15, scenes: int = 8) -> pd.DataFrame:
    """Wall clock of one scene a pass, in turns with the dense control; one sample is a round of `scenes`. Two rows, one a clock, for each detector,
    policy and dial: every threshold of the gates that halts some tokens and leaves some, and random halting at the rates of box weights."""
    runs: dict[Key, tuple[PillarDetector, ScenePolicy | None]] = {}

    def add(name: str) -> None:
        trained = seed.train(name)
        if trained.gates is None:
            runs[name, "dense", 0.0] = trained.model, None
        else:
            runs.update({(name, "learned", threshold): (trained.model, gated(trained, threshold)) for threshold in TIMED})

    for name in ("control", "longer", *LEARNED):
        add(name)
    runs["random", "random", 0.5] = seed.train("random").model, ruled("random", seed.rates)
    for name in (*(("taught",) if "taught" in more else ()), *(("wide_control", "wide_gentle") if "wide" in more else ())):
        add(name)
    rows = []
    with ExitStack() as stack:
        made, grid = seed.plan.validation_scenes(scenes), seed.plan.maker.grid
        ready = {key: stack.enter_context(Timed(*run, made, grid)) for key, run in runs.items()}
        for clock in ("encoder", "whole"):
            times = alternate({" ".join(map(str, key)): getattr(one, clock) for key, one in ready.items()}, 2, repeats)
            flops = {key: one.flops(clock) for key, one in ready.items()}
            dense, *_ = ready
            for key in ready:
                name = " ".join(map(str, key))
                rows.append(
                    dict(zip(("detector", "policy", "dial"), key, strict=True))
                    | {"clock": clock, "latency_ms": times[name].median / scenes}
                    | _against(times, name, " ".join(map(str, dense)), flops[key] / flops[dense])
                )
    return pd.DataFrame(rows)


def _against(times: Any, name: str, dense: str, flops: float) -> dict[str, float]:
    """Time of one run as a share of the dense one's; `flops`: the same share of operations."""
    ratio = times.ratio(name, dense)
    return {
        "latency_ratio": ratio.median, "latency_ratio_low": ratio.low, "latency_ratio_high": ratio.high,
        "flops_saved_pct": 100 * (1 - flops), "noise_floor_pct": 100 * (times.noise_floor or 0.0), "load_average": times.load_before,
    }  # fmt: skip


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
    learned, made = seed.train(name), seed.plan.validation_scenes(scenes)
    rows: list[dict[str, object]] = []
    for said, model, policy in (("dense", seed.train("control").model, None), ("halted", learned.model, gated(learned))):
        taken, tokens = defaultdict(list), defaultdict(list)
        with Timed(model, policy, made, seed.plan.maker.grid) as timed:
            for scene in made:
                each = [_taken(timed, scene) for _ in range(repeats)]
                for part in each[0]:
                    taken[part].append(min(one[part] for one in each))
                (trace,) = timed.run.trace.passes
                for layer in range(trace.n_layers):
                    tokens[f"layer {layer}"].append(float(trace.active(layer).sum()))
        for part, values in taken.items():
            n, width = np.array(tokens.get(part, [np.nan])), model.config.hidden_size
            flops = (16 * width**2 * n + 4 * width * n**2).mean()
            rows.append(
                {"run": said, "part": part, "latency_ms": 1e3 * float(np.mean(values)), "tokens": n.mean(), "flops": flops}
            )
    return pd.DataFrame(rows)


def _taken(timed: Timed, scene: Scene) -> dict[str, float]:
    watch, model = Stopwatch(), timed.model
    timed.run.reset()
    with ExitStack() as hooks:
        if timed.policy is None:  # layers that nobody wraps have no phases
            for layer in model.encoder.layers:
                hooks.callback(layer.register_forward_pre_hook(lambda *_: watch.enter("layer")).remove)
                hooks.callback(layer.register_forward_hook(lambda *_: watch.leave()).remove)
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
    for index in range(model.config.num_hidden_layers):  # one that no token is left for is not called
        watch.seconds.setdefault(f"layer {index}", 0.0)
    return dict(watch.seconds)


# -- by size ---------------------------------------------------------------------------------------------------------------------


def sizes(shapes: Sequence[tuple[int, int, int]] = SIZES, layers: int = 4, repeats: int = 7) -> pd.DataFrame:
    """How much of the saved operations of the encoder its time saves, by width, pillars and scenes a pass. Weights are drawn, and gates too, whose
    biases leave `LEFT` of each scene's tokens: the clock does not ask what was learnt."""
    rows = []
    for width, side, batch in shapes:
        grid = Grid(side=side, size_m=24 / side)
        model = detector(Shape(width, layers, max(1, width // 16) if width < 96 else width // 32), 0)
        scenes = [SceneMaker(grid=grid).scene(number) for number in range(max(batch, 2))]
        with Timed(model, None, scenes, grid, batch) as dense:
            gates = _gates_that_leave(model, torch.cat(dense.embedded))
            with Timed(model, gated(Trained(model, gates, [], 0)), scenes, grid, batch) as halted:
                flops = halted.flops("encoder") / dense.flops("encoder")
                shares = [float(p.active(layer).float().mean()) for p in halted.run.trace.passes for layer in range(layers)]
                times = alternate({"dense": dense.encoder, "halted": halted.encoder}, 2, repeats)
        rows.append(
            {"width": width, "pillars": grid.n_pillars, "scenes_a_pass": batch, "tokens": float(np.mean(shares)),
             "dense_ms": times["dense"].median / len(scenes), "halted_ms": times["halted"].median / len(scenes)}
            | _against(times, "halted", "dense", flops) | {"threads": torch.get_num_threads()}
        )  # fmt: skip
    return pd.DataFrame(rows)


def _gates_that_leave(model: PillarDetector, hidden: torch.Tensor) -> HaltingGates:
    """Gates after every layer but the last, with biases at which the mean scene of hidden (B, N, D) has `LEFT` of its tokens left."""
    width, last = model.config.hidden_size, model.config.num_hidden_layers - 1
    gates = HaltingGates(width, range(last)).requires_grad_(False)
    gates.weight.copy_(torch.randn(last, width, generator=torch.Generator().manual_seed(0)) / width**0.5)
    gates.bias.zero_()

    def gate(layer: int, states: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        logits = gates.logits(layer, states)  # (B, N)
        left = round(LEFT[min(layer, len(LEFT) - 1)] * kept.numel())
        gates.bias[layer] = -logits[kept > 0.5].sort(descending=True).values[left - 1 : left + 1].mean()
        return (logits + gates.bias[layer] >= 0).to(states.dtype)

    with torch.no_grad(), equivalent_forward(model, gate):
        model.encoder(inputs_embeds=hidden)
    return gates


# -- the study itself ------------------------------------------------------------------------------------------------------------


def cost(runs: SeedRuns, steps: int = 12, scenes: int = 4) -> pd.DataFrame:
    """What the study takes of one process for one seed: a row for making the scenes, one for each training, one for its evaluations and one for its
    part of the intervals. A few of each are timed, from nothing; the rest is their number. Finished detectors are evaluated: one that has learnt
    nothing finds nothing to suppress."""
    plan, seed = runs.plan, runs.seed
    few = dataclasses.replace(plan, scenes=48, validation=scenes)
    rows: list[dict[str, Any]] = []

    def timed(what: str, count: float, n: int, do: Callable[[], object]) -> None:
        began = time.perf_counter()
        do()
        rows.append({"seed": seed, "what": what, "count": count, "seconds_each": (time.perf_counter() - began) / n})

    timed("scenes", plan.scenes + plan.validation, 48 + scenes, lambda: (few.training_data, few.validation_data))
    short = dataclasses.replace(few, steps=steps, tuning_steps=steps)
    short.__dict__["training_data"] = few.training_data
    with tempfile.TemporaryDirectory() as place:
        trial = SeedRuns(short, seed, Path(place))
        for _, part in tasks([seed], PARTS):
            count = plan.steps if part in ("dense", "no_layers") else plan.tuning_steps
            timed(part, count, steps, partial(trial.train, part))
    found: dict[Key, list[Evaluation]] = {}
    finished = dataclasses.replace(runs, plan=few, may_train=False)
    timed("evaluations", plan.validation, scenes, lambda: found.update({one[:3]: [one[3]] for one in finished.evaluations()}))
    rows[-1]["what"] = f"{len(found)} evaluations"
    dense = evaluate(finished.train("control").model, plan.validation_data, plan.maker.grid)
    draws = 40
    ap_difference([dense], [dense], draws=2)  # what is paid once
    timed("intervals", DRAWS * len(compared(found)), draws, lambda: ap_difference([dense], [dense], draws=draws))
    frame = pd.DataFrame(rows)
    return frame.assign(
        seconds=frame["count"] * frame["seconds_each"], load_average=os.getloadavg()[0], threads=torch.get_num_threads()
    )
