"""What a policy costs and what the detector still finds, scene by scene as a vehicle would run it: one scene a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import RuntimeModule
from quicksilver.runtime.run import apply

from .model import Batch, PillarDetector, decode
from .scenes import CLASSES, Grid, average_precision, matches

STRICT = (0.5, 0.3)  # rotated IoU from which a box is found, by class
LOOSE = (0.3, 0.15)
ScenePolicy = Callable[[int], list[RuntimeModule]]
Match = tuple[np.ndarray, np.ndarray, int]


@dataclass(frozen=True)
class Evaluation:
    """One policy on all scenes.

    Attributes:
        matched: by (recycled, strict) and class, each scene's (scores, right, number of boxes).
        tokens: (S,) share of token-layers computed. executed_flops: (S,), of encoder and head.
        active: (S, L) tokens that take part in each layer. kept_in_box: (S,) share of pillars in boxes that go through the last layer.
        halt_depth: (S, N) last layer that each pillar went through.
    """

    matched: dict[tuple[bool, bool], list[list[Match]]]
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
        drawn = None if scenes is None else np.bincount(scenes, minlength=len(self.tokens))
        found = []
        for scores, right, scene, n_boxes in self._pooled[recycled, strict]:
            times, of_each = (None, 1) if drawn is None else (drawn[scene], drawn)
            found.append(average_precision(scores, right, int((n_boxes * of_each).sum()), times))
        return found

    @cached_property
    def _pooled(self) -> dict[tuple[bool, bool], list[tuple[np.ndarray, ...]]]:
        """`matched`, all scenes together, best first: scores, right, scene (K,), and boxes by scene (S,). An interval draws scenes hundreds of
        times, and sorts once."""

        def pooled(per_scene: list[Match]) -> tuple[np.ndarray, ...]:
            scores, right = (np.concatenate([one[k] for one in per_scene]) for k in (0, 1))
            scene = np.repeat(np.arange(len(per_scene)), [len(one[0]) for one in per_scene])
            order = np.argsort(-scores, kind="stable")
            return scores[order], right[order], scene[order], np.array([one[2] for one in per_scene])

        return {key: [pooled(per_scene) for per_scene in by_class] for key, by_class in self.matched.items()}


def without_halted(outputs: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Outputs (B, N, C + 6) of a head that is not given halted tokens, left (B, N) bool: no heat there."""
    heat = outputs[..., : len(CLASSES)].masked_fill(~left[..., None], -12.0)
    return torch.cat([heat, outputs[..., len(CLASSES) :]], dim=-1)


@torch.no_grad()
def evaluate(model: PillarDetector, data: Batch, grid: Grid, policy: ScenePolicy | None = None) -> Evaluation:
    """Run every scene of `data` alone under the modules that `policy` gives for its number (None: dense).

    Raises:
        ConfigError: no scene.
    """
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
        outputs[False].append(without_halted(said, left[None]))
        active.append(counts)
        tokens.append(counts.mean() / grid.n_pillars if n_layers else 0.0)
        inside = data.in_box[number]
        kept.append(float((left & inside).sum() / inside.sum().clamp(min=1)))
        depth.append(halted_at.numpy())
    matched = {}
    for recycled, said_each in outputs.items():
        found = decode(torch.cat(said_each), grid)
        for strict, ious in ((True, STRICT), (False, LOOSE)):
            matched[recycled, strict] = [
                [matches(one, b, k, label, ious[label]) for one, b, k in zip(found, data.boxes, data.labels, strict=True)]
                for label in range(len(CLASSES))
            ]
    return Evaluation(matched, *map(np.array, (tokens, flops, active, kept, depth)))


@dataclass(frozen=True)
class Interval:
    """A value with a 95% interval."""

    value: float
    low: float
    high: float


def ap_difference(
    ours: Sequence[Evaluation], theirs: Sequence[Evaluation], *, recycled: bool = True, strict: bool = True, draws: int = 400
) -> Interval:
    """AP of `ours` minus that of `theirs`, mean over seeds (paired, one of each), with a percentile bootstrap over scenes: all seeds are
    evaluated on the same scenes, which are drawn together.

    Dense detectors have nothing halted: they are taken with recycling.

    Raises:
        ConfigError: an interval over fewer than two scenes.
    """
    from scipy import stats

    n = len(ours[0].tokens)
    if n < 2:
        raise ConfigError(f"an interval of AP is drawn over scenes, and there are {n}: evaluate at least 2.")

    def difference(scenes: np.ndarray | None) -> float:
        pair = ([one.ap(recycled=recycled, strict=strict, scenes=scenes) for one in each] for each in (ours, theirs))
        return float(np.mean([a - b for a, b in zip(*pair, strict=True)]))

    found = stats.bootstrap(
        (np.arange(n),), difference, n_resamples=draws, vectorized=False, method="percentile", rng=np.random.default_rng(0)
    )
    return Interval(difference(None), *(float(end) for end in found.confidence_interval))
