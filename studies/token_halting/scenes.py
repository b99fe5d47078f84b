"""Lidar-like scenes made by seed: flat ground, clutter, cars and pedestrians as rotated boxes, seen by rays from one sensor.

Every ray returns the first surface that it meets. Density that falls with range, sides of a car that are never seen, and shadows behind what
stands in front all follow from that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quicksilver.runtime.errors import ConfigError

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
            raise ConfigError(
                f"A grid of {self.side} × {self.side} pillars of {self.size_m} m: give at least 2 pillars of a positive size."
            )

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

    Raises:
        ConfigError: by `check`, no point in the grid, a box whose centre lies outside it, a number that is not finite.
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
            raise ConfigError(
                f"{name} has {len(outside)} boxes outside the grid, the first at x={x:.1f} m, y={y:.1f} m, where the grid has {bounds}: crop them, "
                "or make the grid larger."
            )
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
        kinds, rough = [], []
        extent = self.grid.extent_m
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
