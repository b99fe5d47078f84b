"""Rotated boxes seen from above: overlap, suppression, average precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .pillars import Detections

RECALLS = np.arange(1, 41) / 40  # KITTI's forty positions of recall
_SLACK = 1e-9
_EDGE_SLACK = 1e-11  # an edge that two boxes share is counted once: for the first box it lies inside, for the second outside


def corners(boxes: np.ndarray) -> np.ndarray:
    """Boxes (K, 5) as x, y, length, width, yaw -> (K, 4, 2), counter-clockwise."""
    half = boxes[:, None, 2:4] / 2 * np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]])
    return _turned(half, -boxes[:, None, 4]) + boxes[:, None, :2]


def inside_boxes(places: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Which places (P, 2) lie in which boxes (K, 5): (P, K) bool."""
    offset = _turned(places[:, None] - boxes[None, :, :2], boxes[:, 4])
    return (np.abs(offset) <= boxes[:, 2:4] / 2 + _SLACK).all(-1)


def rotated_iou(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Intersection over union of boxes, pair by pair: (K, 5) and (K, 5) -> (K,).

    The outline of the intersection is the part of each box's edges that lies in the other box. Its area follows by Green's theorem.
    """
    one, two = one.astype(np.float64), two.astype(np.float64)
    shared = (_outline(one, two, two, _EDGE_SLACK) + _outline(two, one, two, -_EDGE_SLACK)) / 2
    union = one[:, 2] * one[:, 3] + two[:, 2] * two[:, 3] - shared
    return np.maximum(shared, 0.0) / np.maximum(union, 1e-12)


def _outline(boxes: np.ndarray, within: np.ndarray, around: np.ndarray, slack: float) -> np.ndarray:
    """∮ x dy − y dx along the edges of `boxes` as far as they lie in `within`, from the centres of `around`, all (K, 5): (K,)."""
    start = corners(boxes)
    edge = np.roll(start, -1, axis=1) - start  # (K, 4, 2)
    yaw, half = within[:, None, 4], within[:, None, 2:4] / 2 + slack
    place, along = _turned(start - within[:, None, :2], yaw), _turned(edge, yaw)
    along = np.where(np.abs(along) < 1e-12, 1e-12, along)
    ends = np.sort([(-half - place) / along, (half - place) / along], axis=0)  # an edge between two pairs of parallel lines
    near, far = np.clip([ends[0].max(-1), ends[1].min(-1)], 0, 1)[..., None]
    begin = start - around[:, None, :2] + near * edge
    piece = np.maximum(far - near, 0) * edge
    return (begin[..., 0] * piece[..., 1] - begin[..., 1] * piece[..., 0]).sum(1)


def _turned(vectors: np.ndarray, yaw: np.ndarray) -> np.ndarray:
    """Vectors (..., 2) in the coordinates of a box that is turned by `yaw` (...)."""
    cos, sin, x, y = np.cos(yaw), np.sin(yaw), vectors[..., 0], vectors[..., 1]
    return np.stack([x * cos + y * sin, y * cos - x * sin], axis=-1)


def all_ious(one: np.ndarray, two: np.ndarray, asked: np.ndarray | None = None) -> np.ndarray:
    """Every box of (A, 5) with every box of (B, 5): (A, B); 0 where `asked` (A, B) is False, and for boxes too far apart to overlap."""
    radii = [np.hypot(boxes[:, 2], boxes[:, 3]) / 2 for boxes in (one, two)]
    apart = np.hypot(*(one[:, None, axis] - two[None, :, axis] for axis in (0, 1)))
    near = apart <= radii[0][:, None] + radii[1] + 1e-6
    pairs = np.nonzero(near if asked is None else near & asked)
    ious = np.zeros(near.shape)
    ious[pairs] = rotated_iou(one[pairs[0]], two[pairs[1]])
    return ious


def keep_by_nms(boxes: np.ndarray, labels: np.ndarray, overlap: float) -> np.ndarray:
    """Indices of the boxes (K, 5), best first, that overlap no better one of their label by more than `overlap`."""
    rivals = np.tri(len(boxes), k=-1, dtype=bool) & (labels[:, None] == labels)
    overlaps = all_ious(boxes, boxes, rivals) > overlap  # (K, K), with better ones of the same label
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
    best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)  # a recall that is not reached has precision 0
    return float(best[np.searchsorted(hits / n_boxes, RECALLS - 1e-12)].mean())
