"""Rotated boxes seen from above: overlap, suppression, average precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .pillars import Detections

RECALLS = np.arange(1, 41) / 40  # KITTI's forty positions of recall
_SLACK = 1e-9


def corners(boxes: np.ndarray) -> np.ndarray:
    """Boxes (K, 5) as x, y, length, width, yaw -> (K, 4, 2), counter-clockwise."""
    half = boxes[:, None, 2:4] / 2 * np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]])
    cos, sin = np.cos(boxes[:, 4])[:, None], np.sin(boxes[:, 4])[:, None]
    turned = np.stack([half[..., 0] * cos - half[..., 1] * sin, half[..., 0] * sin + half[..., 1] * cos], axis=-1)
    return turned + boxes[:, None, :2]


def inside_boxes(places: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Which places (P, 2) lie in which boxes (K, 5): (P, K) bool."""
    offset = places[:, None] - boxes[None, :, :2]
    cos, sin = np.cos(boxes[:, 4]), np.sin(boxes[:, 4])
    along, across = offset[..., 0] * cos + offset[..., 1] * sin, offset[..., 1] * cos - offset[..., 0] * sin
    return (np.abs(along) <= boxes[:, 2] / 2 + _SLACK) & (np.abs(across) <= boxes[:, 3] / 2 + _SLACK)


def rotated_iou(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Intersection over union of boxes, pair by pair: (K, 5) and (K, 5) -> (K,).

    The vertices of what two boxes share are corners of either in the other and crossings of their edges; sorted by angle around their
    mean they enclose its area.
    """
    if not len(one):
        return np.zeros(0)
    one, two = one.astype(np.float64), two.astype(np.float64)
    a, b = corners(one), corners(two)  # (K, 4, 2)
    edge_a, edge_b = np.roll(a, -1, axis=1) - a, np.roll(b, -1, axis=1) - b
    gap = b[:, None] - a[:, :, None]  # (K, 4, 4, 2)

    def cross(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        return u[..., 0] * v[..., 1] - u[..., 1] * v[..., 0]

    across = cross(edge_a[:, :, None], edge_b[:, None])
    safe = np.where(np.abs(across) < 1e-12, 1.0, across)
    t, u = cross(gap, edge_b[:, None]) / safe, cross(gap, edge_a[:, :, None]) / safe
    meets = (np.abs(across) >= 1e-12) & (t >= 0) & (t <= 1) & (u >= 0) & (u <= 1)
    crossing = a[:, :, None] + t[..., None] * edge_a[:, :, None]
    vertices = np.concatenate([a, b, crossing.reshape(len(a), 16, 2)], axis=1)  # (K, 24, 2)
    counts = np.concatenate([_in_own(a, two), _in_own(b, one), meets.reshape(len(a), 16)], axis=1)
    mean = (vertices * counts[..., None]).sum(1) / np.maximum(counts.sum(1), 1)[:, None]
    offset = np.where(counts[..., None], vertices - mean[:, None], 0.0)
    angle = np.where(counts, np.arctan2(offset[..., 1], offset[..., 0]), np.inf)
    order = angle.argsort(axis=1)
    ring = np.take_along_axis(offset, order[..., None], axis=1)
    real = np.take_along_axis(counts, order, axis=1)
    ring = np.where(real[..., None], ring, ring[:, :1])  # what is no vertex repeats the first
    shared = 0.5 * np.abs(cross(ring, np.roll(ring, -1, axis=1)).sum(1))
    shared = np.where(counts.sum(1) >= 3, shared, 0.0)
    union = one[:, 2] * one[:, 3] + two[:, 2] * two[:, 3] - shared
    return shared / np.maximum(union, 1e-12)


def _in_own(places: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Which of each pair's places (K, 4, 2) lie in its box (K, 5): (K, 4) bool."""
    offset = places - boxes[:, None, :2]
    cos, sin = np.cos(boxes[:, 4])[:, None], np.sin(boxes[:, 4])[:, None]
    along, across = offset[..., 0] * cos + offset[..., 1] * sin, offset[..., 1] * cos - offset[..., 0] * sin
    return (np.abs(along) <= boxes[:, None, 2] / 2 + _SLACK) & (np.abs(across) <= boxes[:, None, 3] / 2 + _SLACK)


def all_ious(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Every box of (A, 5) with every box of (B, 5): (A, B)."""
    return _ious_where(np.ones((len(one), len(two)), dtype=bool), one, two)


def _ious_where(asked: np.ndarray, one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Of the pairs that are asked for, (A, B) bool: (A, B), 0 elsewhere. Most pairs are too far apart to share anything, and are not computed."""
    radii = [np.hypot(boxes[:, 2], boxes[:, 3]) / 2 for boxes in (one, two)]
    apart = np.hypot(*(one[:, None, axis] - two[None, :, axis] for axis in (0, 1)))
    pairs = np.nonzero(asked & (apart <= radii[0][:, None] + radii[1] + 1e-6))
    ious = np.zeros(asked.shape)
    ious[pairs] = rotated_iou(one[pairs[0]], two[pairs[1]])
    return ious


def keep_by_nms(boxes: np.ndarray, labels: np.ndarray, overlap: float) -> np.ndarray:
    """Indices of the boxes (K, 5), best first, that overlap no better one of their label by more than `overlap`."""
    rivals = np.tri(len(boxes), k=-1, dtype=bool) & (labels[:, None] == labels)
    overlaps = _ious_where(rivals, boxes, boxes) > overlap  # (K, K), with better ones of the same label
    kept = np.zeros(len(boxes), dtype=bool)
    for i in range(len(boxes)):
        kept[i] = not (overlaps[i] & kept).any()
    return np.flatnonzero(kept)


def matches(
    found: Detections, boxes: np.ndarray, labels: np.ndarray, label: int, iou: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """Scores of one scene's detections of a class, which of them are right, and how many boxes there were.

    Greedy, best score first; a box is found once.
    """
    own, there = found.boxes[found.labels == label], boxes[labels == label]
    right = np.zeros(len(own), dtype=bool)
    taken = np.zeros(len(there), dtype=bool)
    ious = all_ious(own, there)
    for i in range(len(own)):
        open_ious = np.where(taken, -1.0, ious[i])
        if len(there) and open_ious.max() >= iou:
            taken[open_ious.argmax()] = right[i] = True
    return found.scores[found.labels == label], right, len(there)


def average_precision(scores: np.ndarray, right: np.ndarray, n_boxes: int, times: np.ndarray | None = None) -> float:
    """Mean over forty recalls of the best precision at that recall or a higher one (KITTI since 2019); NaN without boxes.

    Args:
        times: (K,) how often each detection is there; None: once.
    """
    if not n_boxes:
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    each = np.ones(len(order), dtype=np.int64) if times is None else times[order]
    hits = (right[order] * each).cumsum()
    precision = hits / np.maximum(each.cumsum(), 1)
    recall = hits / n_boxes
    best = np.maximum.accumulate(precision[::-1])[::-1] if len(precision) else precision
    at = np.searchsorted(recall, RECALLS - 1e-12)
    return float(np.where(at < len(best), best[np.minimum(at, max(len(best) - 1, 0))] if len(best) else 0.0, 0.0).mean())


def mean_average_precision(
    found: Sequence[Detections], boxes: Sequence[np.ndarray], labels: Sequence[np.ndarray], ious: Sequence[float]
) -> tuple[float, list[float]]:
    """Mean over classes of the average precision at each class's IoU, and each of them."""
    each = []
    for label, iou in enumerate(ious):
        parts = [matches(one, b, k, label, iou) for one, b, k in zip(found, boxes, labels, strict=True)]
        scores, right = (np.concatenate([part[i] for part in parts]) if parts else np.zeros(0) for i in (0, 1))
        each.append(average_precision(scores, right.astype(bool), sum(part[2] for part in parts)))
    there = [value for value in each if not np.isnan(value)]
    return float(np.mean(there)) if there else float("nan"), each
