"""Chance within strata is exact, intervals know clusters, and a model explains what it was made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.measure.strata import (
    against_null,
    crossed,
    deviance_explained,
    expected,
    indicators,
    quantile_bins,
    r_squared,
    wilson,
)


@given(st.integers(0, 10_000))
def test_the_expectation_is_that_of_dealing_the_values_anew(seed: int):
    draw = np.random.default_rng(seed)
    n = 40
    values, strata, member = draw.random(n) < 0.4, draw.integers(3, size=n), draw.random(n) < 0.3
    if not member.any():
        return
    mean, spread = expected(values, member, strata)
    deals = []
    for _ in range(2000):
        dealt = values.copy()
        for stratum in range(3):
            place = np.flatnonzero(strata == stratum)
            dealt[place] = draw.permutation(values[place])
        deals.append(dealt[member].mean())
    assert float(mean) == pytest.approx(np.mean(deals), abs=0.03)
    assert float(spread) == pytest.approx(np.std(deals), abs=0.03)
    both, _ = expected(np.column_stack([values, ~values]), member, strata)
    assert both.sum() == pytest.approx(1)


def test_a_difference_that_a_stratum_explains_is_none():
    draw = np.random.default_rng(0)
    stratum = draw.integers(2, size=4000)
    member = draw.random(4000) < np.where(stratum, 0.8, 0.2)
    values = draw.random(4000) < np.where(stratum, 0.9, 0.1)
    clusters = draw.integers(200, size=4000)
    raw = against_null(values, member, stratum * 0, clusters)
    fair = against_null(values, member, stratum, clusters)
    assert raw.excess_low > 0.15
    assert fair.excess_low < 0 < fair.excess_high
    assert fair.expected == pytest.approx(values[member].mean() - fair.excess)
    assert fair.low <= fair.expected <= fair.high


def test_an_interval_is_wilson_s_and_wider_where_clusters_agree():
    draw = np.random.default_rng(0)
    hits = draw.random(400) < 0.3
    alone = wilson(hits, np.arange(400))
    p, n, z = hits.mean(), 400, 1.96
    middle, half = (p + z**2 / 800) / (1 + z**2 / n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    assert (alone.low, alone.high) == pytest.approx((middle - half, middle + half), abs=0.002)
    together = wilson(np.repeat(hits, 10), np.repeat(np.arange(400), 10))
    assert (together.low, together.high) == pytest.approx((alone.low, alone.high), abs=0.002)
    nobody = wilson(np.zeros(30, dtype=bool), np.repeat(np.arange(3), 10))
    assert nobody.low == 0
    assert nobody.high > 0.5  # three sentences say little
    with pytest.raises(ValueError, match="observation"):
        wilson(np.zeros(0, dtype=bool), np.zeros(0, dtype=int))


def test_bins_and_crossings():
    values = np.array([1.0] * 50 + [2.0] * 30 + list(range(3, 23)))
    bins = quantile_bins(values, 10)
    assert len(set(bins[:50])) == 1
    assert (np.diff(bins) >= 0).all()
    assert len(np.unique(crossed(np.array([0, 0, 1, 1]), np.array([5, 7, 5, 5])))) == 3


def test_models_explain_what_made_the_numbers():
    draw = np.random.default_rng(0)
    x, label = draw.normal(size=3000), draw.integers(3, size=3000)
    noise = draw.normal(size=3000)
    assert r_squared(2 * x + noise, [x]) == pytest.approx(0.8, abs=0.03)
    assert r_squared(noise, [x, indicators(label)]) < 0.01
    assert r_squared(label + 0.01 * noise, [indicators(label)]) > 0.99
    hits = draw.random(3000) < 1 / (1 + np.exp(-3 * x))
    alone, more = deviance_explained(hits, [x]), deviance_explained(hits, [x, indicators(label)])
    assert 0.3 < alone <= more < alone + 0.01
    assert deviance_explained(x > 0, [x]) > 0.98  # separable, and finite
    assert deviance_explained(hits, [np.ones(3000)]) == pytest.approx(0, abs=1e-9)
