"""Scenes and pillars: made by seed, shadowed and thinned by range, and boxes that survive the way to targets and back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from quicksilver.runtime import ConfigError
from quicksilver.studies.token_halting.boxes import inside_boxes, matches
from quicksilver.studies.token_halting.pillars import N_FEATURES, batch_of, decode, features
from quicksilver.studies.token_halting.scenes import Grid, Scene, SceneMaker

MAKER = SceneMaker()
SCENES = [MAKER.scene(seed) for seed in range(6)]


def test_a_seed_is_a_scene():
    again = MAKER.scene(3)
    assert np.array_equal(again.points, SCENES[3].points)
    assert not np.array_equal(SCENES[2].points[:50], SCENES[3].points[:50])


def test_density_falls_with_range():
    points = np.concatenate([scene.points for scene in SCENES])
    near, far = (points[:, 0] < 8).sum(), (points[:, 0] > 16).sum()
    assert near > 3 * far


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"points": np.zeros((0, 3), np.float32)}, r"scene 0 is empty: none of its 0 points lies in the grid, x from 0 to 24 m"),
        ({"points": np.full((3, 3), 99.0, np.float32)}, "is empty: none of its 3 points"),
        ({"points": np.full((3, 3), np.nan, np.float32)}, "not finite"),
        ({"boxes": np.array([[30.0, 0, 4, 2, 0]])}, r"1 boxes outside the grid, the first at x=30.0 m, y=0.0 m.*crop them"),
        ({"boxes": np.array([[3.0, 0, 0, 2, 0]])}, "without length or width"),
    ],
)
def test_bad_scenes_are_refused(change, said):
    labels = np.zeros(len(change.get("boxes", SCENES[0].boxes)), np.int64)
    with pytest.raises(ConfigError, match=said):
        batch_of([dataclasses.replace(SCENES[0], **{"labels": labels, **change})], MAKER.grid)


def test_a_grid_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 2 pillars"):
        Grid(side=1)
    assert isinstance(SCENES[0], Scene)
