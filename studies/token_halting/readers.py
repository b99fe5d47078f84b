"""Scenes of KITTI and nuScenes folders, as they are published, cropped to the grid of the study.

KITTI's object benchmark (Geiger et al. 2012): `velodyne/ID.bin`, `label_2/ID.txt`, `calib/ID.txt`, in the folder or its `training`. nuScenes
(Caesar et al. 2020): the tables of `v1.0-*/` and the sweeps that they name, of LIDAR_TOP. Neither is at hand where this was written: the tests
write folders of the same layout, and nothing more is known of real ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from quicksilver.runtime.errors import ConfigError

from .boxes import inside_boxes
from .scenes import CLASSES, MIN_POINTS, Grid, Scene

KITTI_SENSOR_M = 1.73  # the lidar above the ground
_KITTI_FIELDS = 15  # of a label: type, truncated, occluded, alpha, four of the image, h, w, l, x, y, z, rotation_y
_KITTI_CLASSES = {"Car": "car", "Pedestrian": "pedestrian"}
_NUSCENES_CLASSES = {"vehicle.car": "car", "human.pedestrian": "pedestrian"}  # beginnings of category names
_TABLES = ("sample", "sample_data", "calibrated_sensor", "ego_pose", "sample_annotation", "instance", "category", "sensor")
_sample = itemgetter("sample_token")
Record = Mapping[str, Any]
Box = tuple[str, float, float, float, float, float]  # class, x, y, length, width, yaw
Frame = tuple[str, np.ndarray, list[Box]]  # name, points (P, 3), boxes


def read_scenes(folder: Path, grid: Grid, limit: int | None = None) -> list[Scene]:
    """Frames of a KITTI or nuScenes folder in their order, at most `limit`: points in the grid, heights from the ground, and boxes of `CLASSES`
    whose centre lies in the grid and that hold at least `MIN_POINTS` points.

    Raises:
        ConfigError: a folder of neither layout, a file that is missing or is not what the layout says (names it), no frame.
    """
    root = folder / "training" if (folder / "training").is_dir() else folder
    versions = sorted(folder.glob("v1.0-*"))
    if not (root / "velodyne").is_dir() and not versions:
        raise ConfigError(
            f"{folder} is neither a KITTI folder (velodyne/, label_2/, calib/) nor a nuScenes folder (v1.0-*/, samples/): give the folder that has "
            "these."
        )
    frames = _kitti(root) if (root / "velodyne").is_dir() else _nuscenes(folder, versions[0])
    found = [_cropped(*frame, grid) for frame in islice(frames, limit)]
    if not found:
        raise ConfigError(f"{folder} has no frame with a lidar sweep.")
    return found


def _cropped(name: str, points: np.ndarray, given: list[Box], grid: Grid) -> Scene:
    """One frame, points and boxes outside of the grid left out."""
    boxes = np.array([box[1:] for box in given], dtype=np.float64).reshape(-1, 5)
    labels = np.array([CLASSES.index(box[0]) for box in given], dtype=np.int64)
    if not np.isfinite(points).all() or not np.isfinite(boxes).all():
        raise ConfigError(f"{name} has coordinates that are not finite (NaN or infinite): the file is damaged.")
    points = points[grid.pillar_of(points[:, :2]) >= 0]
    held = inside_boxes(points[points[:, 2] > 0.2, :2].astype(np.float64), boxes).sum(0)  # the ground below a box is not of it
    kept = (grid.pillar_of(boxes[:, :2]) >= 0) & (held >= MIN_POINTS)
    return Scene(points.astype(np.float32), boxes[kept].astype(np.float32), labels[kept]).check(grid, name)


# --- KITTI ------------------------------------------------------------------------------------------------------------------------


def _kitti(root: Path) -> Iterator[Frame]:
    for sweep in sorted((root / "velodyne").glob("*.bin")):
        points = _points(sweep, 4)
        points[:, 2] += KITTI_SENSOR_M
        to_lidar = _lidar_from_camera(root / "calib" / f"{sweep.stem}.txt")
        yield f"KITTI frame {sweep.stem}", points, list(_kitti_boxes(root / "label_2" / f"{sweep.stem}.txt", to_lidar))


def _points(path: Path, columns: int) -> np.ndarray:
    """x, y, z of a file of float32 rows: (P, 3)."""
    content = _bytes(path)
    if not content or len(content) % (4 * columns):
        raise ConfigError(
            f"{path} has {len(content)} bytes, which are no rows of {columns} float32: it is empty, cut short, or another format."
        )
    return np.frombuffer(content, dtype="<f4").reshape(-1, columns)[:, :3].copy()


def _lidar_from_camera(path: Path) -> np.ndarray:
    """(4, 4): from the rectified camera's coordinates to the lidar's."""
    lines = dict(line.split(":", 1) for line in _text(path).splitlines() if ":" in line)
    try:
        rectified, forward = np.eye(4), np.eye(4)
        rectified[:3, :3] = np.array(lines["R0_rect"].split(), dtype=float).reshape(3, 3)
        forward[:3] = np.array(lines["Tr_velo_to_cam"].split(), dtype=float).reshape(3, 4)
        return np.linalg.inv(rectified @ forward)
    except (KeyError, ValueError, np.linalg.LinAlgError) as error:
        raise ConfigError(
            f"{path} is no KITTI calibration: R0_rect (9 numbers) or Tr_velo_to_cam (12) is missing or wrong ({error})."
        ) from None


def _kitti_boxes(path: Path, to_lidar: np.ndarray) -> Iterator[Box]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        cells = line.split()
        if cells and len(cells) < _KITTI_FIELDS:
            raise ConfigError(f"{path}, line {number}: {len(cells)} fields where a KITTI label has {_KITTI_FIELDS}.")
        if not cells or cells[0] not in _KITTI_CLASSES:
            continue  # DontCare, Cyclist, Tram …
        try:
            _, width, length, x, y, z, rotation = map(float, cells[8:15])
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}.") from None
        place = to_lidar @ np.array([x, y, z, 1.0])
        # About the camera's axis down, from its axis to the right: the lidar's axis ahead is a quarter turn on.
        yield _KITTI_CLASSES[cells[0]], place[0], place[1], length, width, -rotation - math.pi / 2


# --- nuScenes ---------------------------------------------------------------------------------------------------------------------


def _nuscenes(folder: Path, version: Path) -> Iterator[Frame]:
    """In the coordinates of the vehicle: x ahead, y to the left, z from the ground."""
    rows = {name: _table(version / f"{name}.json") for name in _TABLES}
    by_token = {name: {row["token"]: row for row in members} for name, members in rows.items()}
    notes = {sample: list(group) for sample, group in groupby(sorted(rows["sample_annotation"], key=_sample), _sample)}
    lidar = {row["token"] for row in rows["sensor"] if row["channel"] == "LIDAR_TOP"}

    def named(table: str, token: str) -> Record:
        try:
            return by_token[table][token]
        except KeyError:
            raise ConfigError(
                f"{table}.json has no row {token!r}, which another table names: the tables are not of one release."
            ) from None

    def boxes(sample: str, pose: Record) -> Iterator[Box]:
        back = _turn(pose["rotation"]).T
        for note in notes.get(sample, []):
            category = named("category", named("instance", note["instance_token"])["category_token"])["name"]
            kind = next((ours for theirs, ours in _NUSCENES_CLASSES.items() if category.startswith(theirs)), None)
            if kind is None:
                continue
            place = back @ (np.array(note["translation"]) - np.array(pose["translation"]))
            ahead = back @ _turn(note["rotation"])[:, 0]
            width, length, _ = note["size"]
            yield kind, place[0], place[1], length, width, math.atan2(ahead[1], ahead[0])

    for sweep in sorted(rows["sample_data"], key=lambda row: (row["timestamp"], row["token"])):
        sensor = named("calibrated_sensor", sweep["calibrated_sensor_token"])
        if sweep["is_key_frame"] and sensor["sensor_token"] in lidar:
            pose, sample = named("ego_pose", sweep["ego_pose_token"]), sweep["sample_token"]
            points = _points(folder / sweep["filename"], 5).astype(np.float64) @ _turn(sensor["rotation"]).T
            yield f"nuScenes sample {sample}", points + np.array(sensor["translation"]), list(boxes(sample, pose))


def _table(path: Path) -> list[Record]:
    try:
        content = json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is no json ({error}): it is cut short or damaged.") from None
    if not isinstance(content, list):
        raise ConfigError(f"{path} holds no list of rows: is it a table of nuScenes?")
    return content


def _turn(quaternion: list[float]) -> np.ndarray:
    """(3, 3) of w, x, y, z."""
    return Rotation.from_quat(quaternion, scalar_first=True).as_matrix()


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text ({error}).") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): the folder is not whole.") from None
