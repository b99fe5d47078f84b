"""Rotated boxes: overlap against areas that are known, average precision against cases that are plain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicksilver.studies.token_halting.boxes import all_ious, average_precision, inside_boxes, keep_by_nms, matches, rotated_iou
from quicksilver.studies.token_halting.pillars import Detections


def box(x=0.0, y=0.0, length=4.0, width=2.0, yaw=0.0) -> np.ndarray:
    return np.array([[x, y, length, width, yaw]])


boxes = st.builds(box, st.floats(-2, 2), st.floats(-2, 2), st.floats(0.5, 5), st.floats(0.5, 3), st.floats(-4, 4))


def test_overlaps_that_are_known():
    assert rotated_iou(box(), box())[0] == pytest.approx(1)
    assert rotated_iou(box(), box(yaw=np.pi))[0] == pytest.approx(1)
    assert rotated_iou(box(), box(yaw=np.pi / 2))[0] == pytest.approx(4 / 12)
    assert rotated_iou(box(), box(x=1))[0] == pytest.approx(6 / 10)
    assert rotated_iou(box(), box(x=4.01))[0] == 0
    octagon = 8 * (2**0.5 - 1)  # a square of side 2 in one turned by 45 degrees
    assert rotated_iou(box(length=2, width=2), box(length=2, width=2, yaw=np.pi / 4))[0] == pytest.approx(octagon / (8 - octagon))


@settings(max_examples=40, deadline=None)
@given(boxes, boxes, st.floats(-3, 3), st.floats(-3, 3), st.integers(0, 9))
def test_overlap_is_what_darts_say(one, two, x, y, seed):
    found = rotated_iou(one, two)[0]
    assert rotated_iou(two, one)[0] == pytest.approx(found, abs=1e-9)
    moved = np.array([[x, y, 0, 0, 0]])
    assert rotated_iou(one + moved, two + moved)[0] == pytest.approx(found, abs=1e-6)
    darts = np.random.default_rng(seed).uniform(-6, 6, (4000, 2))
    in_one, in_two = inside_boxes(darts, one)[:, 0], inside_boxes(darts, two)[:, 0]
    if (in_one | in_two).sum() > 50:
        assert found == pytest.approx((in_one & in_two).sum() / (in_one | in_two).sum(), abs=0.15)


def test_average_precision_of_plain_cases():
    right = np.array([True, True, True, True])
    scores = np.array([0.9, 0.8, 0.7, 0.6])
    assert average_precision(scores, right, 4) == 1
    assert average_precision(scores, right, 8) == pytest.approx(0.5)  # half of the boxes are never found
    assert average_precision(scores, ~right, 4) == 0
    assert average_precision(np.zeros(0), np.zeros(0, dtype=bool), 4) == 0
    assert np.isnan(average_precision(scores, right, 0))
    # A wrong one first halves the precision at a quarter of the recall, and costs less later.
    assert average_precision(scores, np.array([False, True, True, True]), 4) == pytest.approx(0.75 * 0.75)


def test_a_box_is_found_once_and_classes_are_kept_apart():
    there, labels = np.concatenate([box(), box(x=10)]), np.array([0, 1])
    twice = Detections(np.concatenate([box(), box(x=0.1), box(x=10)]), np.array([0, 0, 0]), np.array([0.9, 0.8, 0.7]))
    car, pedestrian = (matches(twice, there, labels, label, 0.5) for label in (0, 1))
    assert car[1].tolist() == [True, False, False]  # found by the best
    assert (len(pedestrian[0]), pedestrian[2]) == (0, 1)  # and the pedestrian by none: a car stands there


def test_suppression_keeps_the_best_of_those_that_overlap():
    crowd = np.concatenate([box(), box(x=0.5), box(x=6)])
    assert keep_by_nms(crowd, np.array([0, 0, 0]), 0.2).tolist() == [0, 2]
    assert keep_by_nms(crowd, np.array([0, 1, 0]), 0.2).tolist() == [0, 1, 2]


@settings(max_examples=10, deadline=None)
@given(st.lists(boxes, min_size=1, max_size=4), st.floats(0, 6))
def test_boxes_that_are_not_compared_share_nothing(drawn, apart):
    ours = np.concatenate(drawn)
    theirs = ours + np.array([[apart, -apart, 0, 0, 0.3]])
    each = rotated_iou(ours.repeat(len(theirs), axis=0), np.tile(theirs, (len(ours), 1)))
    np.testing.assert_array_equal(all_ious(ours, theirs).ravel(), each)
