"""Metrics equal scikit-learn's, draws of a bootstrap are scored at once; a metric of `evaluate` says what our own say, or is one clear line."""

import sys
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quicksilver.data.tasks import METRICS, accuracy, f1, f1_macro, load_metric, matthews, pearson, scored, spearman
from quicksilver.runtime.errors import ConfigError


def metrics() -> Any:
    return pytest.importorskip("sklearn.metrics")  # not while tests are collected


pytestmark = pytest.mark.filterwarnings("ignore")
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
    x, y = (np.array(one, dtype=float) for one in drawn)
    varies = x.std() != 0 and y.std() != 0
    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic if varies else 0, abs=1e-9)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic if varies else 0, abs=1e-9)


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


# -- metrics of `evaluate` -------------------------------------------------------------------------------------------------------
SCRIPT = """
import datasets
import evaluate
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


class OfTasks(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="-", citation="-", inputs_description="-", features=features)

    def _compute(self, predictions, references):
        two = references, predictions
        return {"accuracy": accuracy_score(*two), "f1": f1_score(*two), "matthews": matthews_corrcoef(*two)}
"""


@pytest.fixture
def evaluate():
    """A second to import: not while tests are collected."""
    return pytest.importorskip("evaluate", reason="evaluate is not installed: pip install 'quicksilver-lm[tasks]'")


def test_a_script_at_hand_says_what_our_own_metrics_say_and_answers_that_it_refuses_are_named(evaluate, tmp_path):
    pytest.importorskip("sklearn")
    (tmp_path / "of_tasks.py").write_text(SCRIPT)
    draw = np.random.default_rng(0)
    gold, predicted = draw.integers(0, 2, 80).astype(float), draw.integers(0, 2, 80).astype(float)
    metric = load_metric(str(tmp_path / "of_tasks.py"))
    assert metric(gold, predicted) == pytest.approx(scored(["accuracy", "f1", "matthews"], gold, predicted))
    with pytest.raises(ConfigError, match=r"of_tasks\.py refuses these answers") as caught:
        metric([0.0, 1.0, 2.0], [2.0, 1.0, 0.0])  # F1 is of two classes
    assert "\n" not in str(caught.value)


def test_a_metric_that_cannot_be_had_is_one_line_with_the_remedy(evaluate, tmp_path, monkeypatch):
    unreachable = Mock(side_effect=ConnectionError("Couldn't reach the hub\nand a long trace of requests"))
    monkeypatch.setattr(evaluate, "load", unreachable)
    says = r"glue/sst2 cannot be loaded \(ConnectionError: Couldn't reach the hub\)\. Without a network"
    with pytest.raises(ConfigError, match=says) as caught:
        load_metric("glue/sst2")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"there is no such file"):
        load_metric(str(tmp_path / "none.py"))
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ConfigError, match=r"pip install '.+\[tasks\]'"):
        load_metric("accuracy")
