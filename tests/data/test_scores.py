"""Metrics equal scikit-learn's, whatever is right or wrong; and draws of a bootstrap are scored at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.data.scores import METRICS, accuracy, f1, f1_macro, matthews, pearson, scored, spearman


def metrics() -> Any:
    return pytest.importorskip("sklearn.metrics")  # not while tests are collected


classes = st.integers(2, 40).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 2), min_size=n, max_size=n)] * 2))
values = st.integers(3, 40).flatmap(lambda n: st.tuples(*[st.lists(st.integers(-9, 9), min_size=n, max_size=n)] * 2))


@given(classes)
def test_scores_of_classes_are_scikit_learn_s(drawn):
    gold, predicted = (np.array(one, dtype=float) for one in drawn)
    assert accuracy(gold, predicted) == pytest.approx(metrics().accuracy_score(gold, predicted))
    assert f1_macro(gold, predicted) == pytest.approx(metrics().f1_score(gold, predicted, average="macro", zero_division=0.0))
    two = gold.clip(max=1), predicted.clip(max=1)
    assert f1(*two) == pytest.approx(metrics().f1_score(*two, zero_division=0.0))
    if len({*two[0], *two[1]}) == 2:  # scikit-learn warns of a single class
        assert matthews(*two) == pytest.approx(metrics().matthews_corrcoef(*two), abs=1e-9)


@given(values)
def test_correlations_are_scipy_s(drawn):
    from scipy import stats

    x, y = (np.array(one, dtype=float) for one in drawn)
    if x.std() == 0 or y.std() == 0:
        assert pearson(x, y) == spearman(x, y) == 0
    else:
        assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-9)
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)


def test_many_draws_at_once_are_the_same_as_one_by_one():
    rng = np.random.default_rng(0)
    gold, predicted = (rng.integers(0, 2, (7, 30)).astype(float) for _ in range(2))
    for of in (accuracy, matthews, f1, f1_macro, spearman):
        np.testing.assert_allclose(of(gold, predicted), [of(*pair) for pair in zip(gold, predicted, strict=True)])


def test_multirc_asks_for_whole_questions():
    found = scored(["multirc", "accuracy"], [1, 0, 1, 0], [1, 0, 1, 1], ["q1", "q1", "q2", "q2"])
    assert found == {"f1a": pytest.approx(0.8), "accuracy": 0.75, "exact_match": 0.5}
    assert next(iter(scored(["matthews", "accuracy"], [0, 1], [0, 1]))) == "matthews"
    assert set(METRICS) == {"accuracy", "matthews", "f1", "f1_macro", "pearson_spearman", "multirc"}
