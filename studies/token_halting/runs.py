"""The detection study: which detectors are trained, in which order, and what is measured of them (docs/learned-halting.md)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from quicksilver.modules import StagedHalting, StaticDepth
from quicksilver.modules.halting_gates import HaltingGates
from quicksilver.modules.learned_halting import LearnedHalting, TrainedGates
from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import RuntimeModule

from .evaluate import Evaluation, ScenePolicy, evaluate
from .model import PillarDetector, detector
from .pillars import Batch, batch_of
from .readers import read_scenes
from .scenes import Scene, SceneMaker
from .training import Recipe, Shape, Trained, train, trained

VALIDATION = 10_000_000  # seeds of scenes from here on are never trained on
BOX_WEIGHT = 0.1
STATIC_DEPTHS = (0.25, 0.5, 0.75)
LEARNED = ("box", "uniform", "reading", "frozen", "gentle")
GENTLE = 0.1  # of the usual rate
IMITATES = 1.0
RULES = ("random", "norm")
THRESHOLDS = (0.3, 0.5, 0.7)
FINER = {
    "frozen": (0.3, 0.4, 0.5, 0.7),
    "gentle": (0.3, 0.4, 0.5, 0.7),
    "taught": (0.3, 0.4, 0.5, 0.7),
}  # between 0.3 and 0.5 the first of them begins to lose
PARTS = ("dense", "control", *LEARNED, *RULES, "longer", "no_layers")
MORE = {"taught": ("taught",), "wide": ("wide_control", "wide_frozen", "wide_gentle")}  # not in the study unless asked for
NEEDS = {
    "control": ("dense",), "longer": ("control",), "box": ("dense",), "uniform": ("dense",), "reading": ("dense",), "frozen": ("control",), "gentle": ("frozen",),
    "taught": ("frozen", "longer"), "random": ("box",), "norm": ("box",), "wide_frozen": ("wide_control",), "wide_gentle": ("wide_frozen",),
}  # fmt: skip
Measured = tuple[str, str, float, Evaluation]  # detector, policy, dial
Task = tuple[int, str]  # seed, part


@dataclass(frozen=True)
class Plan:
    """Sizes of the study.

    Args:
        shape: of the detector; wide: of the wider one that halts.
        scenes, validation: how many of them.
        steps, tuning_steps: of the dense training, and of every training after it, the dense control's included.
        tokens: share of token-layers that gates are trained for.
        folder: of KITTI or nuScenes, whose first frames are trained on and whose last ones are measured; None: scenes are made.

    Raises:
        ConfigError: nothing to train or to measure on, no step, a share of tokens that cannot be met, before anything is trained; by the data, a
            folder with fewer frames.
    """

    shape: Shape = field(default_factory=Shape)
    wide: Shape = field(default_factory=lambda: Shape(width=72, heads=3))
    scenes: int = 1600
    validation: int = 100
    steps: int = 800
    tuning_steps: int = 140
    tokens: float = 0.45
    seeds: tuple[int, ...] = (0, 1, 2)
    maker: SceneMaker = field(default_factory=SceneMaker)
    folder: Path | None = None

    def __post_init__(self) -> None:
        for name in ("scenes", "validation", "steps", "tuning_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least 1.")
        least = 1 / self.shape.layers
        if not least < self.tokens < 1:
            raise ConfigError(
                f"tokens={self.tokens:g} cannot be met: the first of {self.shape.layers} layers has all tokens, so give a share between "
                f"{least:.3g} and 1."
            )

    @cached_property
    def _frames(self) -> list[Scene]:
        assert self.folder is not None
        found = read_scenes(self.folder, self.maker.grid, self.scenes + self.validation)
        if len(found) < self.scenes + self.validation:
            raise ConfigError(
                f"{self.folder} has {len(found)} frames, and {self.scenes} for training with {self.validation} for measuring were asked for: ask for fewer "
                "(--scenes, --validation)."
            )
        return found

    @cached_property
    def training_data(self) -> Batch:
        if self.folder is not None:
            return batch_of(self._frames[: self.scenes], self.maker.grid)
        return batch_of([self.maker.scene(seed) for seed in range(self.scenes)], self.maker.grid)

    @cached_property
    def validation_data(self) -> Batch:
        return batch_of(self.validation_scenes(self.validation), self.maker.grid)

    def validation_scenes(self, n: int) -> list[Scene]:
        """The first `n` scenes that are measured."""
        if self.folder is not None:
            return self._frames[self.scenes :][:n]
        return [self.maker.scene(VALIDATION + seed) for seed in range(n)]


Progress = Callable[[str, range], Iterable[int]]


@dataclass
class SeedRuns:
    """All trainings of one seed; what is finished on disk is not repeated.

    Args:
        folder: for the checkpoints.
        progress: wraps the steps of the training called by a name.
        may_train: a detector that is not finished is trained; else it is refused.

    Raises:
        ConfigError: by whatever needs a detector that is not finished and may not be trained.
    """

    plan: Plan
    seed: int
    folder: Path
    progress: Progress = lambda name, steps: steps
    may_train: bool = True

    def train(self, part: str) -> Trained:
        """One of `PARTS` or of the parts of `MORE`, and whatever it starts from."""
        wide, name = part.startswith("wide_"), part.removeprefix("wide_")
        if name in RULES:
            return self.ruled(name)
        if name in (*LEARNED, "taught"):
            return self.learned(name, wide)
        rest = {
            "dense": self.dense,
            "control": self.control,
            "longer": lambda _: self.longer(),
            "no_layers": lambda _: self.without_layers(),
        }
        return rest[name](wide)

    def dense(self, wide: bool = False) -> Trained:
        """From scratch."""
        shape = self.plan.wide if wide else self.plan.shape
        name = "wide" if wide else "dense"
        return self._trained(name, shape, lambda: self._fresh(shape), Recipe(self.plan.steps, seed=self.seed))

    def without_layers(self) -> Trained:
        """Embedding and head alone, for as many steps."""
        shape = replace(self.plan.shape, layers=0)
        return self._trained("no_layers", shape, lambda: self._fresh(shape), Recipe(self.plan.steps, seed=self.seed))

    def control(self, wide: bool = False) -> Trained:
        """The dense detector after as many further steps as those that halt."""
        return self._tuned("control", wide=wide)

    def longer(self) -> Trained:
        """The control, trained on at a tenth of the rate for as many steps as `gentle`: what that owes to more steps."""
        return self._tuned("longer", self.control, base_rate=GENTLE)

    def learned(self, name: str, wide: bool = False) -> Trained:
        """With gates, under `box` weights or `uniform` ones; `reading`: box weights, and gates whose derivative leaves the states alone; `frozen`:
        box weights, and gates alone are trained, on the control, so that nothing but stopping can differ from it; `gentle`: from there on
        both, the detector at a tenth of the rate and the gates as in `reading`; `taught`: as `gentle`, imitating `longer`, too."""
        shape = self.plan.wide if wide else self.plan.shape
        goes_on = name in ("gentle", "taught")
        gates = HaltingGates(shape.width, range(shape.layers - 1), reads_only=name == "reading" or goes_on)
        start: Callable[[bool], Trained] = self.control if name == "frozen" else self.dense
        if goes_on:
            start = partial(self.learned, "frozen")
            if (found := start(wide).gates) is not None:
                gates.load_state_dict(found.state_dict())
        return self._tuned(
            name, start, wide=wide, gates=gates, teacher=self.longer if name == "taught" else None, tokens=self.plan.tokens,
            box_weight=1.0 if name == "uniform" else BOX_WEIGHT, base_rate=0.0 if name == "frozen" else GENTLE if goes_on else 1.0,
            imitates=IMITATES if name == "taught" else 0.0,
        )  # fmt: skip

    def ruled(self, name: str) -> Trained:
        """Under `random` halting or halting by `norm`, at the rates of the gates with box weights."""
        return self._tuned(name, policy=ruled(name, self.rates))

    @cached_property
    def rates(self) -> list[float]:
        """Share of all tokens that halts after each layer under the gates with box weights, on training scenes."""
        box = self.learned("box")
        found = evaluate(box.model, self.plan.training_data.take(slice(0, 48)), self.plan.maker.grid, gated(box))
        return halted_shares(found)

    def _fresh(self, shape: Shape) -> PillarDetector:
        return detector(shape.width, shape.layers, shape.heads, self.seed)

    def _tuned(
        self,
        name: str,
        start: Callable[[bool], Trained] | None = None,
        wide: bool = False,
        gates: HaltingGates | None = None,
        policy: ScenePolicy | None = None,
        teacher: Callable[[], Trained] | None = None,
        **recipe: object,
    ) -> Trained:
        shape = self.plan.wide if wide else self.plan.shape
        own = Recipe(self.plan.tuning_steps, learning_rate=1.5e-3, seed=self.seed + 100, **recipe)  # type: ignore[arg-type]
        return self._trained(
            f"wide_{name}" if wide else name,
            shape,
            lambda: copy.deepcopy((start or self.dense)(wide).model),
            own,
            gates,
            policy,
            teacher,
        )

    def _trained(
        self,
        name: str,
        shape: Shape,
        start: Callable[[], PillarDetector],
        recipe: Recipe,
        gates: HaltingGates | None = None,
        policy: ScenePolicy | None = None,
        teacher: Callable[[], Trained] | None = None,
    ) -> Trained:
        path = self.folder / f"seed{self.seed}" / f"{name}.safetensors"
        if path.is_file() or not self.may_train:
            found = trained(path, shape)
            if found.step == recipe.steps:
                return found
            if not self.may_train:
                raise ConfigError(
                    f"{path} was trained for {found.step} of {recipe.steps} steps: finish it first, python scripts/train_halting.py detection."
                )
        return train(
            start(), self.plan.training_data, recipe, gates=gates, policy=policy,
            teacher=None if teacher is None else teacher().model, checkpoint=path,
            progress=lambda steps: self.progress(f"seed {self.seed}, {name}", steps),
        )  # fmt: skip

    # -- what is measured --------------------------------------------------------------------------------------------------------

    def evaluations(self) -> Iterator[Measured]:
        """Detector, policy, its dial, and what it finds on the validation scenes. `dense` of a detector with gates: the same weights, with
        nobody halted."""
        measured = self._measured
        yield "no_layers", "dense", 0.0, measured(self.without_layers())
        yield "control", "dense", 0.0, measured(self.control())
        yield "longer", "dense", 0.0, measured(self.longer())
        rates: dict[float, list[float]] = {}
        for name in LEARNED:
            learned = self.learned(name)
            if name not in ("uniform", "frozen"):
                yield name, "dense", 0.0, measured(learned)
            for threshold in FINER.get(name, THRESHOLDS):
                found = measured(learned, gated(learned, threshold))
                if name == "box":
                    rates[threshold] = halted_shares(found)
                yield name, "learned", threshold, found
        box = self.learned("box")
        yield "box", "resumed", 0.5, measured(box, gated(box, 0.5, layers=self.plan.shape.layers - 2, resume_layers=1))
        for name in RULES:
            for threshold, shares in rates.items():
                yield name, name, threshold, measured(self.ruled(name), ruled(name, shares))
        for depth in STATIC_DEPTHS:
            yield "static", "static", depth, measured(self.control(), static(depth))

    def more_evaluations(self, more: Sequence[str]) -> Iterator[Measured]:
        """The same of what was asked for by its name in `MORE`."""
        if "taught" in more:
            taught = self.learned("taught")
            yield "taught", "dense", 0.0, self._measured(taught)
            for threshold in FINER["taught"]:
                yield "taught", "learned", threshold, self._measured(taught, gated(taught, threshold))
        if "wide" not in more:
            return
        yield "wide_control", "dense", 0.0, self._measured(self.control(wide=True))
        wide = self.learned("gentle", wide=True)
        for threshold in FINER["gentle"]:
            yield "wide_gentle", "learned", threshold, self._measured(wide, gated(wide, threshold))

    def _measured(self, trained: Trained, policy: ScenePolicy | None = None) -> Evaluation:
        return evaluate(trained.model, self.plan.validation_data, self.plan.maker.grid, policy)


def tasks(seeds: Sequence[int], parts: Sequence[str]) -> list[Task]:
    """These parts with all that they start from, the first to be done first: a part of all seeds, then the next part."""
    wanted: list[str] = []

    def add(part: str) -> None:
        if part not in wanted:
            for need in NEEDS.get(part, ()):
                add(need)
            wanted.append(part)

    for part in parts:
        add(part)
    return [(seed, part) for part in wanted for seed in seeds]


def gated(trained: Trained, threshold: float = 0.5, *, layers: int | None = None, resume_layers: int = 0) -> ScenePolicy:
    """The gates of a detector as a module of the runtime; `layers`: only the first so many gates."""
    assert trained.gates is not None
    gates = TrainedGates.of(trained.gates, architecture_of(trained.model))
    if layers is not None:
        gates = replace(gates, layers=gates.layers[:layers], weight=gates.weight[:layers], bias=gates.bias[:layers])
    return lambda scene: [
        LearnedHalting(gates=gates, threshold=threshold, resume_layers=resume_layers, protect_first=0, protect_last=None)
    ]


def ruled(name: str, shares: list[float]) -> ScenePolicy:
    """The share of all tokens that halts after each layer, chosen at `random` or by the smallest `norm` of the state."""

    def policy(scene: int) -> list[RuntimeModule]:
        signal: object = {"name": "random", "seed": scene} if name == "random" else "state_norm"
        stages = [{"before": layer + 1, "share": share, "signal": signal} for layer, share in enumerate(shares) if share > 0]
        return [StagedHalting(stages=stages, missing_kv="drop", protect_last=0, protect_first=0)] if stages else []

    return policy


def static(depth: float) -> ScenePolicy:
    """Every token stops after the same share of the layers."""
    return lambda scene: [StaticDepth(depth=depth, missing_kv="drop")]


def halted_shares(found: Evaluation) -> list[float]:
    """Mean share of all tokens that halts after each layer but the last."""
    active = found.active / found.active[:, :1]
    return [float(share) for share in np.maximum(0.0, (active[:, :-1] - active[:, 1:]).mean(0))]
