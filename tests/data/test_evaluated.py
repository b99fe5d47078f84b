"""A metric of `evaluate` says what our own say; one that cannot be had is one clear line."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from quicksilver.data.scores import load_metric, scored
from quicksilver.runtime.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def library():
    """A second to import: not while tests are collected."""
    pytest.importorskip("evaluate", reason="evaluate is not installed: pip install 'quicksilver[tasks]'")


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
def script(tmp_path):
    pytest.importorskip("sklearn")
    path = tmp_path / "of_tasks.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_at_hand_says_what_our_own_metrics_say(script):
    draw = np.random.default_rng(0)
    gold, predicted = draw.integers(0, 2, 80).astype(float), draw.integers(0, 2, 80).astype(float)
    found = load_metric(script)(gold, predicted)
    assert found == pytest.approx(scored(["accuracy", "f1", "matthews"], gold, predicted))


def test_answers_that_it_refuses_are_named(script):
    with pytest.raises(ConfigError, match=r"of_tasks\.py refuses these answers") as caught:
        load_metric(script)([0.0, 1.0, 2.0], [2.0, 1.0, 0.0])  # F1 is of two classes
    assert "\n" not in str(caught.value)


def test_without_a_network_the_message_says_what_there_is(monkeypatch):
    import evaluate

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub\nand a long trace of requests")

    monkeypatch.setattr(evaluate, "load", unreachable)
    with pytest.raises(
        ConfigError, match=r"glue/sst2 cannot be loaded \(ConnectionError: Couldn't reach the hub\)\. Without a network"
    ) as caught:
        load_metric("glue/sst2")([0.0], [1.0])
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no such file"):
        load_metric(str(tmp_path / "none.py"))([0.0], [1.0])


def test_what_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ConfigError, match=r"pip install 'quicksilver\[tasks\]'"):
        load_metric("accuracy")([0.0], [1.0])
