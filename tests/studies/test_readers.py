"""KITTI and nuScenes folders, written here in their published layout: a box is where it was put, and a folder that is not whole is named."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from quicksilver.runtime.errors import ConfigError
from quicksilver.studies.token_halting.runs import Plan
from quicksilver.studies.token_halting.scenes import KITTI_SENSOR_M, Grid, read_scenes

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
