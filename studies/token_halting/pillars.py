"""Points as pillars, boxes as targets of a centre-based head, and the head's outputs as boxes again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from .boxes import inside_boxes, keep_by_nms
from .scenes import CLASSES, Grid, Scene

SUB = 4  # a pillar's own little grid
BINS_M = np.array([0.15, 0.5, 0.9, 1.3, 1.8])  # edges between bins of height
N_MEASURED = 7 + len(BINS_M) + 1 + 2 * SUB**2
N_WAVES = 32
N_FEATURES = N_MEASURED + N_WAVES
N_REGRESSED = 6  # offset of the centre (m), log length and log width (of m), sine and cosine of twice the yaw
N_OUTPUTS = len(CLASSES) + N_REGRESSED
MAX_BOXES = 16
_SPREAD_M = (0.9, 0.6)  # of the heat around a centre, by class


def features(scene: Scene, grid: Grid) -> np.ndarray:
    """(N, F) float32: of each pillar the count, means, heights, a histogram of heights, its 4 × 4 cells, and where it is.

    What PointPillars (arXiv 1812.05784) learns from points is given by hand here: the experiment is about the layers behind it.
    """
    n = grid.n_pillars
    pillar = grid.pillar_of(scene.points[:, :2])
    points, pillar = scene.points[pillar >= 0], pillar[pillar >= 0]
    centres = grid.centres()
    offset = (points[:, :2] - centres[pillar]) / grid.size_m
    z = points[:, 2].astype(np.float64)
    count = np.bincount(pillar, minlength=n).astype(np.float64)
    some = np.maximum(count, 1)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(pillar, values, minlength=n) / some

    highest, lowest = np.zeros(n), np.zeros(n)
    np.maximum.at(highest, pillar, z)
    np.minimum.at(lowest, pillar, z)
    spread = np.sqrt(np.maximum(mean(z**2) - mean(z) ** 2, 0))
    bins = np.bincount(pillar * (len(BINS_M) + 1) + np.digitize(z, BINS_M), minlength=n * (len(BINS_M) + 1)).reshape(n, -1)
    cell = np.clip(((offset + 0.5) * SUB).astype(np.int64), 0, SUB - 1)
    cell_index = pillar * SUB**2 + cell[:, 0] * SUB + cell[:, 1]
    cells = np.bincount(cell_index, z > 0.25, minlength=n * SUB**2).reshape(n, -1)
    tops = np.zeros(n * SUB**2)
    np.maximum.at(tops, cell_index, z)
    parts = [
        np.log1p(count)[:, None], mean(offset[:, 0])[:, None], mean(offset[:, 1])[:, None], mean(z)[:, None], highest[:, None],
        lowest[:, None], spread[:, None], np.log1p(bins), np.log1p(cells), tops.reshape(n, -1), position_waves(grid),
    ]  # fmt: skip
    return np.concatenate(parts, axis=1).astype(np.float32)


@cache
def position_waves(grid: Grid) -> np.ndarray:
    """(N, 32): random Fourier features of the pillar's place (Rahimi and Recht 2007), half of them of a few pillars' reach, half of the
    grid's. Their inner product falls with distance, so attention can be local from the start."""
    draws = np.random.default_rng(0).normal(size=(N_WAVES // 2, 2))
    draws[: N_WAVES // 4] /= 1.5 * grid.size_m
    draws[N_WAVES // 4 :] /= 6.0 * grid.size_m
    phase = grid.centres() @ draws.T
    return np.concatenate([np.sin(phase), np.cos(phase)], axis=1).astype(np.float32)


@dataclass(frozen=True)
class Batch:
    """Scenes side by side.

    Attributes:
        features: (B, N, F). heat: (B, N, C), 1 at the centre of a box. regression: (B, N, 6), of the box whose heat is largest.
        near: (B, N) float, how much a pillar's regression counts. in_box: (B, N) bool, pillars that a labelled box touches.
        boxes: by scene (K, 5); labels: by scene (K,).
    """

    features: torch.Tensor
    heat: torch.Tensor
    regression: torch.Tensor
    near: torch.Tensor
    in_box: torch.Tensor
    boxes: list[np.ndarray]
    labels: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.boxes)

    def take(self, which: torch.Tensor | slice) -> Batch:
        chosen = list(range(len(self)))[which] if isinstance(which, slice) else which.tolist()
        tensors = (self.features, self.heat, self.regression, self.near, self.in_box)
        features, heat, regression, near, in_box = (tensor[chosen] for tensor in tensors)
        boxes, labels = ([every[i] for i in chosen] for every in (self.boxes, self.labels))
        return Batch(features, heat, regression, near, in_box, boxes, labels)


def batch_of(scenes: list[Scene], grid: Grid) -> Batch:
    """Features and targets of scenes; each is checked (`Scene.check`)."""
    columns: list[list[np.ndarray]] = [[], [], [], [], []]
    for number, scene in enumerate(scenes):
        scene.check(grid, f"scene {number}")
        for column, value in zip(columns, (features(scene, grid), *targets(scene, grid)), strict=True):
            column.append(value)
    given, heat, regression, near, in_box = (torch.from_numpy(np.stack(column)) for column in columns)
    return Batch(given, heat, regression, near, in_box, [scene.boxes for scene in scenes], [scene.labels for scene in scenes])


def targets(scene: Scene, grid: Grid) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Heat (N, C), regression (N, 6), its weight (N,) and pillars in a box (N,) bool, as CenterPoint has them (arXiv 2006.11275)."""
    centres = grid.centres()
    heat = np.zeros((grid.n_pillars, len(CLASSES)), dtype=np.float32)
    regression = np.zeros((grid.n_pillars, N_REGRESSED), dtype=np.float32)
    near = np.zeros(grid.n_pillars, dtype=np.float32)
    for (x, y, length, width, yaw), label in zip(scene.boxes, scene.labels, strict=True):
        offset = np.array([x, y]) - centres
        own = np.exp(-(offset**2).sum(1) / (2 * (_SPREAD_M[label] * grid.size_m) ** 2)).astype(np.float32)
        own[grid.pillar_of(np.array([[x, y]]))[0]] = 1.0
        heat[:, label] = np.maximum(heat[:, label], own)
        closer = own > near
        shape = [np.log(length), np.log(width), np.sin(2 * yaw), np.cos(2 * yaw)]
        regression[closer] = np.concatenate([offset, np.broadcast_to(shape, (len(offset), 4))], axis=1)[closer]
        near = np.maximum(near, own)
    near = np.where(near > 0.4, near, 0.0).astype(np.float32)
    # A pillar belongs to a box that touches it: boxes are grown by half a pillar on each side.
    grown = scene.boxes + np.array([0, 0, grid.size_m, grid.size_m, 0], dtype=np.float32)
    return heat, regression, near, np.asarray(inside_boxes(centres, grown).any(1))


@dataclass(frozen=True)
class Detections:
    """Boxes (K, 5), labels (K,) and scores (K,) of one scene, best first."""

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


def decode(outputs: torch.Tensor, grid: Grid, *, score_above: float = 0.05, overlap: float = 0.15) -> list[Detections]:
    """Boxes of the head's outputs (B, N, C + 6): peaks of the heat among their eight neighbours, then non-maximum suppression."""
    batch, n_classes = len(outputs), len(CLASSES)
    heat = outputs[..., :n_classes].sigmoid().transpose(1, 2).reshape(batch, n_classes, grid.side, grid.side)
    peak = (heat == F.max_pool2d(heat, 3, stride=1, padding=1)) & (heat > score_above)
    centres = torch.from_numpy(grid.centres())
    found = []
    for row in range(batch):
        label, x, y = peak[row].nonzero(as_tuple=True)
        pillar = x * grid.side + y
        scores = heat[row][peak[row]]
        best = scores.argsort(descending=True, stable=True)[: 3 * MAX_BOXES]
        label, pillar, scores = label[best], pillar[best], scores[best]
        said = outputs[row, pillar, n_classes:].double()
        size = said[:, 2:4].clamp(-2, 3).exp()
        yaw = torch.atan2(said[:, 4], said[:, 5]) / 2
        boxes = torch.cat([centres[pillar] + said[:, :2], size, yaw[:, None]], dim=1).numpy()
        kept = keep_by_nms(boxes, label.numpy(), overlap)[: 2 * MAX_BOXES]
        found.append(Detections(boxes[kept], label.numpy()[kept], scores.numpy()[kept]))
    return found
