"""The study: which detectors are trained, from what each starts, and what is measured of them (docs/learned-halting.md).

Measured is what a policy costs and what the detector still finds, scene by scene as a vehicle would run it: one scene a pass.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from quicksilver.fitting.gates import HaltingGates
from quicksilver.modules import StagedHalting, StaticDepth
from quicksilver.modules.learned_halting import LearnedHalting
from quicksilver.records.stats import Interval
from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import RuntimeModule
from quicksilver.runtime.run import apply

from .model import Batch, PillarDetector, Shape, batch_of, decode, detector
from .scenes import CLASSES, Grid, Match, Scene, SceneMaker, average_precision, matches, read_scenes
from .training import Policy, Recipe, Trained, train, trained

STRICT = (0.5, 0.3)  # rotated IoU from which a box is found, by class
LOOSE = (0.3, 0.15)
VALIDATION = 10_000_000  # seeds of scenes from here on are never trained on
BOX_WEIGHT = 0.1
STATIC_DEPTHS = (0.25, 0.5, 0.75)
GENTLE = 0.1  # of the usual rate
THRESHOLDS = (0.3, 0.5, 0.7)
FINER = (0.3, 0.4, 0.5, 0.7)  # between 0.3 and 0.5 detectors that start from the control begin to lose


class Part(NamedTuple):
    """One training of the study.

    Args:
        start: the part whose weights it begins with; None: drawn weights, for `Plan.steps`.
        gates: whether it halts by gates. reads_only: their derivative leaves the states alone.
        box_weight, base_rate: as in `Recipe`.
        rule: signal by which tokens halt instead, at the rates of `box`.
        teacher: the part whose outputs it imitates.
        layers: False: embedding and head alone.
    """

    start: str | None = "dense"
    gates: bool = False
    reads_only: bool = False
    box_weight: float = BOX_WEIGHT
    base_rate: float = 1.0
    rule: str | None = None
    teacher: str | None = None
    layers: bool = True


ALL_PARTS = {
    "dense": Part(start=None),
    "control": Part(),  # the dense detector after as many further steps as those that halt
    "box": Part(gates=True),
    "uniform": Part(gates=True, box_weight=1.0),
    "reading": Part(gates=True, reads_only=True),
    "frozen": Part("control", gates=True, base_rate=0.0),  # gates alone: nothing but stopping can differ from the control
    "gentle": Part("frozen", gates=True, reads_only=True, base_rate=GENTLE),
    "random": Part(rule="random"),
    "norm": Part(rule="norm"),
    "longer": Part("control", base_rate=GENTLE),  # what `gentle` owes to more steps
    "no_layers": Part(start=None, layers=False),
    "taught": Part("frozen", gates=True, reads_only=True, base_rate=GENTLE, teacher="longer"),
}
WIDE = "wide_"  # a part of this prefix is trained on the wider detector
MORE = {"taught": ("taught",), "wide": ("wide_control", "wide_frozen", "wide_gentle")}  # not in the study unless asked for
PARTS = tuple(name for name in ALL_PARTS if name not in MORE)
LEARNED = tuple(name for name in PARTS if ALL_PARTS[name].gates)
RULES = ("random", "norm")
Key = tuple[str, str, float]  # detector, policy, dial
Measured = tuple[str, str, float, "Evaluation"]
Task = tuple[int, str]  # seed, part


def part_of(name: str) -> tuple[Part, str]:
    """A part, and the prefix of what it starts from."""
    prefix = WIDE if name.startswith(WIDE) else ""
    return ALL_PARTS[name.removeprefix(prefix)], prefix


def needs(name: str) -> list[str]:
    """The parts that must be finished before this one."""
    part, prefix = part_of(name)
    return [prefix + one for one in (part.start, part.teacher, part.rule and "box") if one is not None]


@dataclass(frozen=True)
class Plan:
    """Sizes of the study.

    Args:
        shape: of the detector; wide: of the wider one that halts.
        scenes, validation: how many of them.
        steps, tuning_steps: of the dense training, and of every training after it, the dense control's included.
        tokens: share of token-layers that gates are trained for.
        folder: of KITTI or nuScenes, whose first frames are trained on and whose last ones are measured; None: scenes are made.
    """

    shape: Shape = field(default_factory=Shape)
    wide: Shape = field(default_factory=lambda: Shape(width=72, heads=3))
    scenes: int = 1600
    validation: int = 100
    steps: int = 800
    tuning_steps: int = 140
    tokens: float = 0.45
    maker: SceneMaker = field(default_factory=SceneMaker)
    folder: Path | None = None

    def __post_init__(self) -> None:
        for name in ("scenes", "validation", "steps", "tuning_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least 1.")
        least = 1 / self.shape.layers
        if not least < self.tokens < 1:
            first = f"the first of {self.shape.layers} layers has all tokens"
            raise ConfigError(f"tokens={self.tokens:g} cannot be met: {first}, so give a share between {least:.3g} and 1.")

    @cached_property
    def _frames(self) -> list[Scene]:
        if self.folder is None:
            return []
        found = read_scenes(self.folder, self.maker.grid, self.scenes + self.validation)
        if len(found) < self.scenes + self.validation:
            asked = f"{self.scenes} for training with {self.validation} for measuring were asked for"
            raise ConfigError(f"{self.folder} has {len(found)} frames, and {asked}: ask for fewer (--scenes, --validation).")
        return found

    @cached_property
    def training_data(self) -> Batch:
        made = self._frames[: self.scenes] or [self.maker.scene(seed) for seed in range(self.scenes)]
        return batch_of(made, self.maker.grid)

    @cached_property
    def validation_data(self) -> Batch:
        return batch_of(self.validation_scenes(self.validation), self.maker.grid)

    def validation_scenes(self, n: int) -> list[Scene]:
        """The first `n` scenes that are measured."""
        return self._frames[self.scenes :][:n] or [self.maker.scene(VALIDATION + seed) for seed in range(n)]


@dataclass
class SeedRuns:
    """All trainings of one seed; what is finished on disk is not repeated.

    Args:
        folder: for the checkpoints.
        progress: wraps the steps of the training called by a name.
        may_train: a detector that is not finished is trained; else it is refused.
    """

    plan: Plan
    seed: int
    folder: Path
    progress: Callable[[str, range], Iterable[int]] = lambda name, steps: steps
    may_train: bool = True

    def train(self, name: str) -> Trained:
        """The detector of `ALL_PARTS`, or of one with the prefix `WIDE`, and whatever it starts from."""
        (part, prefix), plan = part_of(name), self.plan
        shape = plan.wide if prefix else plan.shape
        shape = shape if part.layers else replace(shape, layers=0)
        recipe, halts = Recipe(plan.steps, seed=self.seed), dict[str, Any]()
        if part.gates:
            halts = {"tokens": plan.tokens, "box_weight": part.box_weight, "imitates": float(part.teacher is not None)}
        if part.start is not None:
            recipe = Recipe(plan.tuning_steps, learning_rate=1.5e-3, seed=self.seed + 100, base_rate=part.base_rate, **halts)
        path = self.folder / f"seed{self.seed}" / f"{name}.safetensors"
        if path.is_file() or not self.may_train:
            if (found := trained(path, shape)).step == recipe.steps:
                return found
            if not self.may_train:
                done = f"{path} was trained for {found.step} of {recipe.steps} steps"
                raise ConfigError(f"{done}: finish it first, python scripts/train_halting.py detection.")
        start = None if part.start is None else self.train(prefix + part.start)
        model = detector(shape, self.seed) if start is None else copy.deepcopy(start.model)
        gates = None
        if part.gates:
            gates = HaltingGates(shape.width, range(shape.layers - 1), reads_only=part.reads_only)
            if start is not None and start.gates is not None:
                gates.load_state_dict(start.gates.state_dict())
        return train(
            model, plan.training_data, recipe, gates=gates, policy=ruled(part.rule, self.rates) if part.rule else None,
            teacher=self.train(part.teacher).model if part.teacher else None, checkpoint=path,
            progress=lambda steps: self.progress(f"seed {self.seed}, {name}", steps),
        )  # fmt: skip

    @cached_property
    def rates(self) -> list[float]:
        """Share of all tokens that halts after each layer under the gates with box weights, on training scenes."""
        box, few = self.train("box"), self.plan.training_data.take(slice(0, 48))
        return halted_shares(evaluate(box.model, few, self.plan.maker.grid, gated(box)))

    # -- what is measured --------------------------------------------------------------------------------------------------------

    def evaluations(self, more: Sequence[str] = ()) -> Iterator[Measured]:
        """Detector, policy, its dial, and what it finds on the validation scenes. `dense` of a detector with gates: the same weights, with
        no token halted. `more`: names of `MORE`."""
        for name in ("no_layers", "control", "longer"):
            yield name, "dense", 0.0, self._measured(self.train(name))
        rates: dict[float, list[float]] = {}
        for one in (one for name in LEARNED for one in self._learned(name, dense=name not in ("uniform", "frozen"))):
            if one[:2] == ("box", "learned"):
                rates[one[2]] = halted_shares(one[3])
            yield one
        box, control = self.train("box"), self.train("control")
        yield "box", "resumed", 0.5, self._measured(box, gated(box, 0.5, layers=self.plan.shape.layers - 2, resume_layers=1))
        for name, (threshold, shares) in product(RULES, rates.items()):
            yield name, name, threshold, self._measured(self.train(name), ruled(name, shares))
        for depth in STATIC_DEPTHS:
            yield "static", "static", depth, self._measured(control, static(depth))
        if "taught" in more:
            yield from self._learned("taught")
        if "wide" in more:
            yield "wide_control", "dense", 0.0, self._measured(self.train("wide_control"))
            yield from self._learned("wide_gentle", dense=False)

    def _learned(self, name: str, dense: bool = True) -> Iterator[Measured]:
        one = self.train(name)
        if dense:
            yield name, "dense", 0.0, self._measured(one)
        for threshold in THRESHOLDS if part_of(name)[0].start == "dense" else FINER:
            yield name, "learned", threshold, self._measured(one, gated(one, threshold))

    def _measured(self, trained: Trained, policy: Policy | None = None) -> Evaluation:
        return evaluate(trained.model, self.plan.validation_data, self.plan.maker.grid, policy)


def tasks(seeds: Sequence[int], parts: Sequence[str]) -> list[Task]:
    """These parts with all that they start from, the first to be done first: a part of all seeds, then the next part."""

    def with_needs(part: str) -> list[str]:
        return [*(one for need in needs(part) for one in with_needs(need)), part]

    wanted = dict.fromkeys(one for part in parts for one in with_needs(part))
    return [(seed, part) for part in wanted for seed in seeds]


# -- policies --------------------------------------------------------------------------------------------------------------------
def gated(trained: Trained, threshold: float = 0.5, *, layers: int | None = None, resume_layers: int = 0) -> Policy:
    """The gates of a detector as a module of the runtime; `layers`: only the first so many gates."""
    assert trained.gates is not None
    gates = trained.gates.trained(architecture_of(trained.model))
    gates = replace(gates, layers=gates.layers[:layers], weight=gates.weight[:layers], bias=gates.bias[:layers])
    how: dict[str, Any] = {"gates": gates, "threshold": threshold, "resume_layers": resume_layers}
    return lambda scene: [LearnedHalting(**how, protect_first=0, protect_last=None)]


def ruled(name: str, shares: list[float]) -> Policy:
    """The share of all tokens that halts after each layer, chosen at `random` or by the smallest `norm` of the state."""

    def policy(scene: int) -> list[RuntimeModule]:
        signal: object = {"name": "random", "seed": scene} if name == "random" else "state_norm"
        stages = [{"before": layer + 1, "share": share, "signal": signal} for layer, share in enumerate(shares) if share > 0]
        return [StagedHalting(stages=stages, missing_kv="drop", protect_last=0, protect_first=0)] if stages else []

    return policy


def static(depth: float) -> Policy:
    """Every token stops after the same share of the layers."""
    return lambda scene: [StaticDepth(depth=depth, missing_kv="drop")]


def halted_shares(found: Evaluation) -> list[float]:
    """Mean share of all tokens that halts after each layer but the last."""
    active = found.active / found.active[:, :1]
    return [float(share) for share in np.maximum(0.0, (active[:, :-1] - active[:, 1:]).mean(0))]


# -- evaluation ------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Evaluation:
    """One policy on all scenes.

    Attributes:
        matched: by (recycled, strict) and class, of all scenes together, best first: scores, right, scene (K,), and boxes by scene (S,).
        tokens: (S,) share of token-layers computed. executed_flops: (S,), of encoder and head.
        active: (S, L) tokens that take part in each layer. kept_in_box: (S,) share of pillars in boxes that go through the last layer.
        halt_depth: (S, N) last layer that each pillar went through.
    """

    matched: dict[tuple[bool, bool], list[tuple[np.ndarray, ...]]]
    tokens: np.ndarray
    executed_flops: np.ndarray
    active: np.ndarray
    kept_in_box: np.ndarray
    halt_depth: np.ndarray

    def ap(self, *, recycled: bool = True, strict: bool = True, scenes: np.ndarray | None = None) -> float:
        """Mean over classes of the average precision over scenes (K,), repeats allowed; None: all."""
        return float(np.nanmean(self.ap_by_class(recycled=recycled, strict=strict, scenes=scenes)))

    def ap_by_class(self, *, recycled: bool = True, strict: bool = True, scenes: np.ndarray | None = None) -> list[float]:
        """Of each of `CLASSES`."""
        drawn = np.bincount(np.arange(len(self.tokens)) if scenes is None else scenes, minlength=len(self.tokens))
        each = self.matched[recycled, strict]
        return [average_precision(right, int((boxes * drawn).sum()), drawn[scene]) for _, right, scene, boxes in each]


def _pooled(per_scene: list[Match]) -> tuple[np.ndarray, ...]:
    """Matches of a class as `Evaluation.matched` has them: an interval draws scenes hundreds of times, and sorts once."""
    scores, right = (np.concatenate([one[k] for one in per_scene]) for k in (0, 1))
    scene = np.repeat(np.arange(len(per_scene)), [len(one[0]) for one in per_scene])
    order = np.argsort(-scores, kind="stable")
    return scores[order], right[order], scene[order], np.array([one[2] for one in per_scene])


@torch.no_grad()
def evaluate(model: PillarDetector, data: Batch, grid: Grid, policy: Policy | None = None) -> Evaluation:
    """Run every scene of `data` alone under the modules that `policy` gives for its number (None: dense)."""
    if not len(data):
        raise ConfigError("There is no scene to evaluate on: give at least one.")
    n_layers = model.config.num_hidden_layers
    outputs: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    tokens, flops, active, kept, depth = [], [], [], [], []
    for number in range(len(data)):
        features = data.features[number : number + 1]
        if n_layers:
            with apply(model, policy(number) if policy is not None else []) as run:
                said = model(features)
            (trace,) = run.trace.passes
            counts = np.array([int(trace.active(layer).sum()) for layer in range(n_layers)])
            halted_at = trace.halt_layer[0].to(torch.int64)
            flops.append(run.flops.executed)
        else:  # nothing to halt in
            said, counts, halted_at = model(features), np.zeros(0), torch.full((grid.n_pillars,), -1)
            flops.append(2 * model.head.weight.numel() * grid.n_pillars)
        left = halted_at == n_layers - 1
        outputs[True].append(said)
        # A head that is not given halted tokens: no heat there.
        outputs[False].append(said.clone())
        outputs[False][-1][:, ~left, : len(CLASSES)] = -12.0
        active.append(counts)
        tokens.append(counts.mean() / grid.n_pillars if n_layers else 0.0)
        inside = data.in_box[number]
        kept.append(float((left & inside).sum() / inside.sum().clamp(min=1)))
        depth.append(halted_at.numpy())
    matched = {}
    for recycled, said_each in outputs.items():
        found = list(zip(decode(torch.cat(said_each), grid), data.boxes, data.labels, strict=True))
        for strict, ious in ((True, STRICT), (False, LOOSE)):
            matched[recycled, strict] = [_pooled([matches(*one, label, iou) for one in found]) for label, iou in enumerate(ious)]
    return Evaluation(matched, *map(np.array, (tokens, flops, active, kept, depth)))


def ap_difference(ours: Sequence[Evaluation], theirs: Sequence[Evaluation], *, draws: int, recycled: bool = True) -> Interval:
    """AP of `ours` minus that of `theirs`, mean over seeds (paired, one of each), with a percentile bootstrap over scenes: all seeds are
    evaluated on the same scenes, which are drawn together.

    Dense detectors have nothing halted: they are taken with recycling.
    """
    from scipy import stats

    n = len(ours[0].tokens)
    if n < 2:
        raise ConfigError(f"an interval of AP is drawn over scenes, and there are {n}: evaluate at least 2.")

    def difference(scenes: np.ndarray | None) -> float:
        pair = ([one.ap(recycled=recycled, scenes=scenes) for one in each] for each in (ours, theirs))
        return float(np.mean([a - b for a, b in zip(*pair, strict=True)]))

    how: dict[str, Any] = {"n_resamples": draws, "vectorized": False, "method": "percentile", "rng": np.random.default_rng(0)}
    found = stats.bootstrap((np.arange(n),), difference, **how)
    return Interval(difference(None), *map(float, found.confidence_interval))


# -- several processes -----------------------------------------------------------------------------------------------------------
@contextmanager
def workers(plan: Plan, folder: Path, processes: int, threads: int) -> Iterator[Executor]:
    """A pool of processes, each of so many threads and with the scenes of one plan; `folder` is for the checkpoints."""
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (plan, folder, threads))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def train_side_by_side(pool: Executor, seeds: Sequence[int], parts: Sequence[str], say: Callable[[str], None]) -> None:
    """Train these parts of every seed, and what they start from, none before that; finished ones are not repeated."""
    waits_for = {(seed, part): [(seed, need) for need in needs(part)] for seed, part in tasks(seeds, parts)}
    order = TopologicalSorter(waits_for)
    order.prepare()
    running, done = dict[Future[None], Task](), 0
    while order.is_active():
        running |= {pool.submit(_called, _train, *task): task for task in order.get_ready()}
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            future.result()
            task, done = running.pop(future), done + 1
            order.done(task)
            say(f"seed {task[0]}, {task[1]}: trained ({done} of {len(waits_for)})")


def of_each_seed(pool: Executor, function: Callable[..., Any], seeds: Sequence[int], *arguments: Any) -> Iterator[Any]:
    """`function(SeedRuns, *arguments)` of every seed, in order, as many at once as there are processes."""
    return pool.map(_called, *zip(*((function, seed, *arguments) for seed in seeds), strict=True))


_OF_WORKER: list[tuple[Plan, Path]] = []


def _begin(plan: Plan, folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    _OF_WORKER.append((plan, folder))


def _called(function: Callable[..., Any], seed: int, *arguments: Any) -> Any:
    plan, folder = _OF_WORKER[0]
    return function(SeedRuns(plan, seed, folder), *arguments)


def _train(runs: SeedRuns, part: str) -> None:  # what it returns would travel between processes
    runs.train(part)


def measured(runs: SeedRuns, more: Sequence[str] = ()) -> list[Measured]:
    """Every evaluation of a seed: for `of_each_seed`."""
    return list(runs.evaluations(more))
