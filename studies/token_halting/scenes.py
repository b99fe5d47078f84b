"""Lidar-like scenes made by seed: flat ground, clutter, cars and pedestrians as rotated boxes, seen by rays from one sensor.

Every ray returns the first surface that it meets. Density that falls with range, sides of a car that are never seen, and shadows behind what
stands in front all follow from that."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial.transform import Rotation

from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from .model import Detections


CLASSES = ("car", "pedestrian")
_ON_THE_ROAD = 0.8  # share of cars that go along the road, or across it
MIN_POINTS = 5  # a box with fewer returns is nothing a detector could be asked for


@dataclass(frozen=True)
class Grid:
    """Pillars seen from above: x ahead of the sensor, y to its left, metres.

    Pillar `row · side + column` spans x from row · size_m and y from (column − side / 2) · size_m.
    """

    side: int = 24
    size_m: float = 1.0

    def __post_init__(self) -> None:
        if self.side < 2 or self.size_m <= 0:
            given = f"A grid of {self.side} × {self.side} pillars of {self.size_m} m"
            raise ConfigError(f"{given}: give at least 2 pillars of a positive size.")

    @property
    def n_pillars(self) -> int:
        return self.side**2

    @property
    def extent_m(self) -> float:
        return self.side * self.size_m

    def centres(self) -> np.ndarray:
        """(N, 2) float64, metres."""
        along = (np.arange(self.side) + 0.5) * self.size_m
        x, y = np.meshgrid(along, along - self.extent_m / 2, indexing="ij")
        return np.stack([x.ravel(), y.ravel()], axis=1)

    def pillar_of(self, xy: np.ndarray) -> np.ndarray:
        """The pillar of each place (K, 2), −1 outside: (K,) int64."""
        row = np.floor(xy[:, 0] / self.size_m).astype(np.int64)
        column = np.floor((xy[:, 1] + self.extent_m / 2) / self.size_m).astype(np.int64)
        inside = (row >= 0) & (row < self.side) & (column >= 0) & (column < self.side)
        return np.where(inside, row * self.side + column, -1)


@dataclass(frozen=True)
class Scene:
    """Points (P, 3) float32 in metres, boxes (K, 5) float32 as x, y, length, width in metres and yaw in radians, labels (K,) int64 into
    `CLASSES`.
    """

    points: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray

    def check(self, grid: Grid, name: str = "the scene") -> Scene:
        bounds = f"x from 0 to {grid.extent_m:g} m and y within ±{grid.extent_m / 2:g} m"
        if not np.isfinite(self.points).all() or not np.isfinite(self.boxes).all():
            raise ConfigError(f"{name} has coordinates that are not finite (NaN or infinite): leave these points and boxes out.")
        if not (grid.pillar_of(self.points[:, :2]) >= 0).any():
            raise ConfigError(f"{name} is empty: none of its {len(self.points)} points lies in the grid, {bounds}.")
        outside = self.boxes[grid.pillar_of(self.boxes[:, :2]) < 0]
        if len(outside):
            x, y = outside[0, :2]
            there = f"the first at x={x:.1f} m, y={y:.1f} m, where the grid has {bounds}"
            raise ConfigError(f"{name} has {len(outside)} boxes outside the grid, {there}: crop them, or make the grid larger.")
        if (self.boxes[:, 2:4] <= 0).any():
            raise ConfigError(f"{name} has a box without length or width.")
        return self


@dataclass(frozen=True)
class SceneMaker:
    """Draws scenes.

    Args:
        grid: what is looked at.
        cars, pedestrians, clutter: least and greatest number that is placed; who is hidden or outside is not labelled.
        beams, azimuths: rays, by elevation and by direction.
        noise_m: standard deviation of a return along its ray.
    """

    grid: Grid = Grid()
    cars: tuple[int, int] = (2, 6)
    pedestrians: tuple[int, int] = (2, 7)
    clutter: tuple[int, int] = (4, 9)
    beams: int = 36
    azimuths: int = 240
    noise_m: float = 0.02

    def scene(self, seed: int) -> Scene:
        """The scene of a seed; the same one everywhere."""
        rng = np.random.default_rng([20230305, seed])
        solids, kinds, rough = self._placed(rng)
        points, hit = self._returns(rng, solids, rough)
        seen = np.bincount(hit[hit >= 0], minlength=len(solids))
        labelled = (kinds >= 0) & (seen >= MIN_POINTS) & (self.grid.pillar_of(solids[:, :2]) >= 0)
        boxes = solids[labelled][:, [0, 1, 2, 3, 5]].astype(np.float32)
        return Scene(points.astype(np.float32), boxes, kinds[labelled])

    def _placed(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Solids (S, 6): x, y, length, width, height, yaw; their class, −1 for clutter; roughness of their surface in metres."""
        wanted: list[tuple[int, tuple[float, ...], float]] = []
        uniform = rng.uniform
        for _ in range(rng.integers(self.cars[0], self.cars[1] + 1)):
            wanted.append((0, (uniform(3.7, 4.8), uniform(1.6, 2.0), uniform(1.4, 1.7)), 0.0))
        for _ in range(rng.integers(self.pedestrians[0], self.pedestrians[1] + 1)):
            wanted.append((1, (uniform(0.6, 0.9), uniform(0.5, 0.8), uniform(1.55, 1.9)), 0.03))
        for _ in range(rng.integers(self.clutter[0], self.clutter[1] + 1)):
            sort = rng.integers(4)
            if sort == 0:  # a hedge, of a car's size
                wanted.append((-1, (uniform(1.5, 5.5), uniform(0.8, 2.2), uniform(0.9, 1.8)), 0.15))
            elif sort == 1:  # a wall
                wanted.append((-1, (uniform(5.0, 10.0), 0.3, uniform(1.5, 3.0)), 0.0))
            elif sort == 2:  # a pole or trunk, of a pedestrian's width
                wanted.append((-1, (width := uniform(0.3, 0.7), width, uniform(2.5, 4.0)), 0.03))
            else:  # a bin, lower than a pedestrian
                wanted.append((-1, (uniform(0.5, 1.0), uniform(0.5, 0.9), uniform(0.7, 1.2)), 0.0))
        solids: list[tuple[float, ...]] = []
        kinds, rough, extent = [], [], self.grid.extent_m
        for kind, (length, width, height), roughness in wanted:
            reach = 0.5 * math.hypot(length, width)
            for _ in range(20):  # as many tries; a crowded scene has fewer
                x, y, yaw = rng.uniform(1.0, extent), rng.uniform(-extent / 2, extent / 2), rng.uniform(-math.pi, math.pi)
                if kind == 0 and rng.random() < _ON_THE_ROAD:
                    yaw = rng.normal(0, 0.1) + rng.choice([0.0, 0.0, math.pi / 2])
                if all(math.hypot(x - s[0], y - s[1]) > 0.85 * (reach + 0.5 * math.hypot(s[2], s[3])) for s in solids):
                    solids.append((x, y, length, width, height, yaw))
                    kinds.append(kind)
                    rough.append(roughness)
                    break
        return np.array(solids).reshape(-1, 6), np.array(kinds, dtype=np.int64), np.array(rough)

    def _returns(self, rng: np.random.Generator, solids: np.ndarray, rough: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the rays meet: points (P, 3), and which solid each lies on, −1 for the ground."""
        origin = np.array([-3.0, 0.0, 1.9])
        azimuth = np.linspace(-1.3, 1.3, self.azimuths)
        elevation = np.deg2rad(np.linspace(-26.0, 1.0, self.beams))
        a, e = (part.ravel() for part in np.meshgrid(azimuth, elevation, indexing="ij"))
        a = a + rng.normal(0, 0.001, a.shape)
        ray = np.stack([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)], axis=1)  # (R, 3)
        with np.errstate(divide="ignore", invalid="ignore"):
            nearest = np.where(ray[:, 2] < 0, -origin[2] / ray[:, 2], np.inf)
            hit = np.full(len(ray), -1)
            for number, (x, y, length, width, height, yaw) in enumerate(solids):
                cos, sin = math.cos(yaw), math.sin(yaw)
                turn = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
                start = turn @ (origin - np.array([x, y, height / 2]))
                along = ray @ turn.T
                half = np.array([length, width, height]) / 2
                one, two = (-half - start) / along, (half - start) / along  # slabs (Kay and Kajiya 1986)
                near, far = np.minimum(one, two).max(1), np.maximum(one, two).min(1)
                first = (near <= far) & (near > 0) & (near < nearest)
                nearest = np.where(first, near, nearest)
                hit = np.where(first, number, hit)
        spread = np.where(hit >= 0, rough[hit] if len(solids) else 0.0, 0.0)
        distance = nearest + rng.normal(0, 1, len(ray)) * (self.noise_m + spread)
        back = np.isfinite(nearest) & (nearest < 40) & (rng.random(len(ray)) > 0.05)  # one in twenty returns is lost
        points, hit = origin + ray[back] * distance[back, None], hit[back]
        inside = self.grid.pillar_of(points[:, :2]) >= 0
        return points[inside], hit[inside]


Match = tuple[np.ndarray, np.ndarray, int]  # scores of a scene's detections of a class, which of them are right, number of boxes
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


def matches(found: Detections, boxes: np.ndarray, labels: np.ndarray, label: int, iou: float) -> Match:
    """One scene's detections of a class. Greedy, best score first; a box is found once."""
    own, there = found.boxes[found.labels == label], boxes[labels == label]
    right, taken, ious = np.zeros(len(own), dtype=bool), np.zeros(len(there), dtype=bool), all_ious(own, there)
    for i in range(len(own)):
        open_ious = np.where(taken, -1.0, ious[i])
        if len(there) and open_ious.max() >= iou:
            taken[open_ious.argmax()] = right[i] = True
    return found.scores[found.labels == label], right, len(there)


def average_precision(right: np.ndarray, n_boxes: int, times: np.ndarray) -> float:
    """Mean over forty recalls of the best precision at that recall or a higher one (KITTI since 2019); NaN without boxes.

    Args:
        right: (K,) bool, detections from the best score down. times: (K,) how often each of them is there.
    """
    if not n_boxes:
        return float("nan")
    hits = (right * times).cumsum()
    precision = hits / np.maximum(times.cumsum(), 1)
    best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)  # a recall that is not reached has precision 0
    return float(best[np.searchsorted(hits / n_boxes, RECALLS - 1e-12)].mean())


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
    """
    root = folder / "training" if (folder / "training").is_dir() else folder
    versions = sorted(folder.glob("v1.0-*"))
    if not (kitti := (root / "velodyne").is_dir()) and not versions:
        layouts = "a KITTI folder (velodyne/, label_2/, calib/) nor a nuScenes folder (v1.0-*/, samples/)"
        raise ConfigError(f"{folder} is neither {layouts}: give the folder that has these.")
    frames = _kitti(root) if kitti else _nuscenes(folder, versions[0])
    if not (found := [_cropped(*frame, grid) for frame in islice(frames, limit)]):
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
        said = f"{path} has {len(content)} bytes, which are no rows of {columns} float32"
        raise ConfigError(f"{said}: it is empty, cut short, or another format.")
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
        wrong = f"R0_rect (9 numbers) or Tr_velo_to_cam (12) is missing or wrong ({error})"
        raise ConfigError(f"{path} is no KITTI calibration: {wrong}.") from None


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
        if token in by_token[table]:
            return by_token[table][token]
        raise ConfigError(f"{table}.json has no row {token!r}, which another table names: the tables are not of one release.")

    def boxes(sample: str, pose: Record) -> Iterator[Box]:
        back = _turn(pose["rotation"]).T
        for note in notes.get(sample, []):
            category = named("category", named("instance", note["instance_token"])["category_token"])["name"]
            kind = next((ours for theirs, ours in _NUSCENES_CLASSES.items() if category.startswith(theirs)), None)
            if kind is not None:
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
