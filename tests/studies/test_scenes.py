"""Scenes, boxes and pillars: overlaps and precisions that are known, scenes made by seed, and boxes that survive the way to targets and back."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quicksilver.runtime.errors import ConfigError
from quicksilver.studies.token_halting.model import N_FEATURES, Detections, batch_of, decode, features
from quicksilver.studies.token_halting.runs import Plan
from quicksilver.studies.token_halting.scenes import (
    KITTI_SENSOR_M,
    Grid,
    SceneMaker,
    all_ious,
    average_precision,
    inside_boxes,
    keep_by_nms,
    matches,
    read_scenes,
    rotated_iou,
)

MAKER = SceneMaker()
SCENES = [MAKER.scene(seed) for seed in range(6)]


def test_a_seed_is_a_scene_whose_density_falls_with_range():
    assert np.array_equal(MAKER.scene(3).points, SCENES[3].points)
    assert not np.array_equal(SCENES[2].points[:50], SCENES[3].points[:50])
    points = np.concatenate([scene.points for scene in SCENES])
    assert (points[:, 0] < 8).sum() > 3 * (points[:, 0] > 16).sum()


def test_what_stands_in_front_takes_points_from_what_stands_behind():
    maker = SceneMaker(noise_m=0.0)
    rng = np.random.default_rng(0)
    car, wall = (9.0, 0.0, 4.0, 1.8, 1.5, 0.0), (4.0, 0.0, 0.3, 6.0, 2.5, 0.0)
    alone, _ = maker._returns(rng, np.array([car]), np.zeros(1))
    _, hit = maker._returns(rng, np.array([car, wall]), np.zeros(2))
    on_car = inside_boxes(alone[:, :2], np.array([[9.0, 0.0, 4.4, 2.2, 0.0]]))[:, 0] & (alone[:, 2] > 0.2)
    assert on_car.sum() > 30
    assert (hit == 0).sum() < 0.1 * on_car.sum()


def test_labels_have_points_and_lie_in_the_grid():
    for scene in SCENES:
        assert len(scene.boxes) == len(scene.labels) > 0
        grown = scene.boxes + np.array([0, 0, 0.5, 0.5, 0])
        assert (inside_boxes(scene.points[:, :2], grown).sum(0) >= 5).all()
        scene.check(MAKER.grid)


def test_targets_decode_to_the_boxes_they_are_of():
    batch = batch_of(SCENES, MAKER.grid)
    assert batch.features.shape == (6, 576, N_FEATURES)
    perfect = torch.cat([torch.logit(batch.heat.clamp(1e-4, 1 - 1e-4)), batch.regression], dim=-1)
    found = zip(decode(perfect, MAKER.grid), batch.boxes, batch.labels, strict=True)
    right = [matches(*one, label, 0.9)[1].sum() for one in found for label in (0, 1)]
    assert sum(right) > 0.95 * sum(map(len, batch.boxes))  # two pedestrians in one pillar are one centre
    silent = torch.cat([torch.full_like(batch.heat, -9.0), batch.regression], dim=-1)
    assert not any(len(one.boxes) for one in decode(silent, MAKER.grid))


def test_the_order_of_points_does_not_matter():
    scene = SCENES[0]
    mixed = dataclasses.replace(scene, points=scene.points[::-1])
    np.testing.assert_allclose(features(scene, MAKER.grid), features(mixed, MAKER.grid), atol=1e-5)


@pytest.mark.parametrize(("change", "said"), [
    ({"points": np.zeros((0, 3), np.float32)}, r"scene 0 is empty: none of its 0 points lies in the grid, x from 0 to 24 m"),
    ({"points": np.full((3, 3), 99.0, np.float32)}, "is empty: none of its 3 points"),
    ({"points": np.full((3, 3), np.nan, np.float32)}, "not finite"),
    ({"boxes": np.array([[30.0, 0, 4, 2, 0]])}, r"1 boxes outside the grid, the first at x=30.0 m, y=0.0 m.*crop them"),
    ({"boxes": np.array([[3.0, 0, 0, 2, 0]])}, "without length or width"),
])  # fmt: skip
def test_bad_scenes_are_refused(change, said):
    labels = np.zeros(len(change.get("boxes", SCENES[0].boxes)), np.int64)
    with pytest.raises(ConfigError, match="at least 2 pillars"):
        Grid(side=1)
    with pytest.raises(ConfigError, match=said):
        batch_of([dataclasses.replace(SCENES[0], **{"labels": labels, **change})], MAKER.grid)


# --- boxes ---
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
    right, once = np.array([True, True, True, True]), np.ones(4, dtype=int)
    assert average_precision(right, 4, once) == 1
    assert average_precision(right, 8, once) == pytest.approx(0.5)  # half of the boxes are never found
    assert average_precision(~right, 4, once) == 0
    assert average_precision(right[:0], 4, once[:0]) == 0
    assert np.isnan(average_precision(right, 0, once))
    # A wrong one first halves the precision at a quarter of the recall, and costs less later.
    assert average_precision(np.array([False, True, True, True]), 4, once) == pytest.approx(0.75 * 0.75)


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


# --- KITTI and nuScenes folders, written here in their published layout ---------------------------------------------------------
GRID = Grid()
# x, y, length, width, yaw; the second is outside of the grid, the third has no points
CAR, FAR, EMPTY = (10.0, 3.0, 4.2, 1.8, 0.7), (60.0, 0.0, 4.0, 1.8, 0.0), (15.0, -6.0, 4.0, 1.7, 0.0)
# The camera looks ahead: its x is to the right, its y down, its z ahead.
CAMERA = np.array([[0.0, -1.0, 0.0], [0.0, 0.0, -1.0], [1.0, 0.0, 0.0]])


def cloud(seed: int = 0) -> np.ndarray:
    """Ground, and 30 points in the first box, heights from the ground: (P, 3)."""
    draw = np.random.default_rng(seed)
    ground = np.column_stack([draw.uniform(1, 23, 200), draw.uniform(-11, 11, 200), np.zeros(200)])
    along, across = draw.uniform(-1.8, 1.8, 30), draw.uniform(-0.7, 0.7, 30)
    x, y, _, _, yaw = CAR
    cos, sin = math.cos(yaw), math.sin(yaw)
    body = (x + along * cos - across * sin, y + along * sin + across * cos, draw.uniform(0.5, 1.5, 30))
    return np.concatenate([ground, np.column_stack(body)])


def kitti(folder: Path) -> Path:
    root = folder / "training"
    for sub in ("velodyne", "label_2", "calib"):
        (root / sub).mkdir(parents=True)
    points = cloud() - np.array([0, 0, KITTI_SENSOR_M])
    for name in ("000000", "000001"):
        np.column_stack([points, np.ones(len(points))]).astype("<f4").tofile(root / "velodyne" / f"{name}.bin")
        rectified, forward = (" ".join(map(str, one.ravel())) for one in (np.eye(3), np.column_stack([CAMERA, [0, 0, 0]])))
        (root / "calib" / f"{name}.txt").write_text(f"P0: 1\nR0_rect: {rectified}\nTr_velo_to_cam: {forward}\n")
        lines = ["DontCare -1 -1 -10 0 0 0 0 -1 -1 -1 -1000 -1000 -1000 -10"]
        for x, y, length, width, yaw in (CAR, FAR, EMPTY):
            place = CAMERA @ np.array([x, y, -KITTI_SENSOR_M])
            lines.append(f"Car 0 0 0 0 0 0 0 1.5 {width} {length} {' '.join(map(str, place))} {-yaw - math.pi / 2}")
        (root / "label_2" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def quaternion(yaw: float) -> list[float]:
    return [math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)]


def nuscenes(folder: Path) -> Path:
    tables = folder / "v1.0-mini"
    (folder / "samples").mkdir(parents=True)
    tables.mkdir()
    turn, shift, above = 0.4, np.array([100.0, 50.0, 0.0]), np.array([0.9, 0.0, 1.84])  # of the vehicle, and of the sensor on it
    points = cloud() - above
    np.column_stack([points, np.zeros((len(points), 2))]).astype("<f4").tofile(folder / "samples" / "sweep.bin")
    cos, sin = math.cos(turn), math.sin(turn)
    notes = [
        {"token": f"n{i}", "sample_token": "s", "instance_token": "i", "size": [width, length, 1.5], "rotation": quaternion(yaw + turn),
         "translation": [cos * x - sin * y + shift[0], sin * x + cos * y + shift[1], 0.7]}
        for i, (x, y, length, width, yaw) in enumerate((CAR, FAR, EMPTY))
    ]  # fmt: skip
    sweep = {"sample_token": "s", "calibrated_sensor_token": "c", "ego_pose_token": "e", "filename": "samples/sweep.bin"}
    sweeps = [{"token": "d", "timestamp": 1, "is_key_frame": True}, {"token": "between", "timestamp": 2, "is_key_frame": False}]
    content = {
        "sample": [{"token": "s"}], "sample_data": [sweep | one for one in sweeps],
        "calibrated_sensor": [{"token": "c", "sensor_token": "lidar", "rotation": quaternion(0.0), "translation": above.tolist()}],
        "ego_pose": [{"token": "e", "rotation": quaternion(turn), "translation": shift.tolist()}],
        "sample_annotation": notes, "instance": [{"token": "i", "category_token": "k"}],
        "category": [{"token": "k", "name": "vehicle.car"}], "sensor": [{"token": "lidar", "channel": "LIDAR_TOP"}],
    }  # fmt: skip
    for name, rows in content.items():
        (tables / f"{name}.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize(("write", "frames"), [(kitti, 2), (nuscenes, 1)])
def test_a_box_is_where_it_was_put_and_heights_are_from_the_ground(write, frames, tmp_path):
    scenes = read_scenes(write(tmp_path / "data"), GRID)
    assert len(scenes) == frames
    (box,) = scenes[0].boxes  # one is outside, one is empty
    np.testing.assert_allclose(box[:4], CAR[:4], atol=1e-4)
    assert math.sin(2 * (box[4] - CAR[4])) == pytest.approx(0, abs=1e-5)
    assert math.cos(2 * (box[4] - CAR[4])) == pytest.approx(1, abs=1e-5)
    assert scenes[0].labels.tolist() == [0]
    assert scenes[0].points[:, 2].min() == pytest.approx(0, abs=1e-4)
    assert 1 < scenes[0].points[:, 2].max() < 1.6
    assert len(read_scenes(tmp_path / "data", GRID, limit=1)) == 1


def test_a_plan_takes_its_scenes_from_a_folder(tmp_path):
    plan = Plan(folder=kitti(tmp_path / "data"), scenes=1, validation=1)
    assert (len(plan.training_data), len(plan.validation_data)) == (1, 1)
    np.testing.assert_allclose(plan.validation_data.boxes[0][0, :2], CAR[:2], atol=1e-4)
    with pytest.raises(ConfigError, match="has 2 frames, and 1600 for training with 100 for measuring were asked for"):
        _ = Plan(folder=tmp_path / "data").training_data


def text(content):
    return lambda path: path.write_text(content)


@pytest.mark.parametrize(("file", "spoil", "said"), [
    ("label_2/000001.txt", Path.unlink, "label_2/000001.txt cannot be read .*not whole"),
    ("label_2/000000.txt", text("Car 0 0\n"), "line 1: 3 fields where a KITTI label has 15"),
    ("calib/000000.txt", text("P0: 1\n"), "is no KITTI calibration: R0_rect"),
    ("velodyne/000000.bin", text("12345"), "has 5 bytes, which are no rows of 4 float32"),
    ("velodyne/000000.bin", np.full((9, 4), np.nan, "<f4").tofile, "KITTI frame 000000 has coordinates that are not finite"),
    ("velodyne/000000.bin", np.full((9, 4), 500.0, "<f4").tofile, "KITTI frame 000000 is empty"),
])  # fmt: skip
def test_a_kitti_folder_that_is_not_whole_is_named(file, spoil, said, tmp_path):
    folder = kitti(tmp_path / "data")
    spoil(folder / "training" / file)
    with pytest.raises(ConfigError, match=said):
        read_scenes(folder, GRID)


def test_a_nuscenes_folder_that_is_not_whole_is_named(tmp_path):
    folder = nuscenes(tmp_path / "data")
    for content, said in {"[]": "instance.json has no row 'i'", "{": "instance.json is no json"}.items():
        (folder / "v1.0-mini" / "instance.json").write_text(content)
        with pytest.raises(ConfigError, match=said):
            read_scenes(folder, GRID)
    with pytest.raises(ConfigError, match="is neither a KITTI folder"):
        read_scenes(tmp_path, GRID)
