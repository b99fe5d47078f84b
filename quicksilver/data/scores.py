"""Metrics of the tasks, GLUE's and SuperGLUE's own definitions, over the last axis: a bootstrap asks for thousands of draws at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from quicksilver.runtime.errors import ConfigError, installing

Numbers = NDArray[np.float64]
Metric = Callable[[Numbers, Numbers], Numbers]


def accuracy(gold: Numbers, predicted: Numbers) -> Numbers:
    """Share that is right: (…, E) to (…)."""
    return (gold == predicted).mean(-1)


def matthews(gold: Numbers, predicted: Numbers) -> Numbers:
    """Matthews correlation of two classes, 0 where one side has a single class: (…, E) to (…)."""
    return pearson(gold, predicted)  # of 0 and 1 the two are one number


def f1(gold: Numbers, predicted: Numbers, of: float = 1.0) -> Numbers:
    """F1 of the class `of`, 0 where it is neither there nor predicted: (…, E) to (…)."""
    both = ((gold == of) & (predicted == of)).sum(-1)
    either = (gold == of).sum(-1) + (predicted == of).sum(-1)
    return 2 * both / np.maximum(either, 1)


def f1_macro(gold: Numbers, predicted: Numbers) -> Numbers:
    """Mean F1 of the classes that are there or predicted: (…, E) to (…)."""
    classes = np.union1d(gold, predicted)
    there = np.stack([((gold == one) | (predicted == one)).any(-1) for one in classes])
    scores = np.stack([f1(gold, predicted, one) for one in classes])
    return (scores * there).sum(0) / there.sum(0)


def pearson(gold: Numbers, predicted: Numbers) -> Numbers:
    """Correlation, 0 where one side does not vary: (…, E) to (…)."""
    x, y = (values - values.mean(-1, keepdims=True) for values in (gold, predicted))
    scale = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return np.where(scale > 1e-12, (x * y).sum(-1) / np.maximum(scale, 1e-12), 0.0)


def spearman(gold: Numbers, predicted: Numbers) -> Numbers:
    """Correlation of ranks: (…, E) to (…)."""
    from scipy.stats import rankdata

    return pearson(rankdata(gold, axis=-1), rankdata(predicted, axis=-1))


# What `dataset.task.metrics` may name -> the numbers it gives; the first is the task's own score.
METRICS: Mapping[str, Mapping[str, Metric]] = {
    "accuracy": {"accuracy": accuracy},
    "matthews": {"matthews": matthews},
    "f1": {"f1": f1},
    "f1_macro": {"f1_macro": f1_macro},
    "pearson_spearman": {"pearson": pearson, "spearman": spearman},
    "multirc": {"f1a": f1},
}


def metric(names: Sequence[str]) -> tuple[str, Metric]:
    """Name and function of a task's own score."""
    return next(iter(METRICS[names[0]].items()))


def scored(names: Sequence[str], gold: ArrayLike, predicted: ArrayLike, groups: Sequence[str] = ()) -> dict[str, float]:
    """All numbers of some metrics by name, the task's own score first.

    Args:
        names: of `METRICS`.
        gold, predicted: (E,) class numbers, or values of a regression.
        groups: (E,) what is judged together: `multirc` adds the share of groups in which all is right.
    """
    y, z = np.asarray(gold, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    found = {key: float(of(y, z)) for name in names for key, of in METRICS[name].items()}
    if "multirc" in names:
        found["exact_match"] = float(pd.Series(y == z).groupby(list(groups)).all().mean())
    return found


def load_metric(metric: str) -> Callable[[Sequence[float], Sequence[float]], dict[str, float]]:
    """A metric, to be given gold and predicted: (E,) class numbers, or values of a regression. It gives its numbers by name.

    Args:
        metric: path of a metric script; or a name of the hub, with its configuration behind a slash: `accuracy`, `glue/sst2`.

    Raises:
        ConfigError: `evaluate` is not installed, or the metric cannot be had; when called: it refuses the answers.
    """
    try:
        import evaluate
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"measure.task.evaluate={metric} needs {error.name}, which is not installed: {installing('tasks')}."
        ) from error
    script = metric.endswith(".py")
    if script and not Path(metric).is_file():
        raise ConfigError(f"measure.task.evaluate={metric}: there is no such file.")
    name, _, configuration = (metric, "", "") if script else metric.partition("/")
    try:
        module = evaluate.load(name, config_name=configuration or None, module_type="metric", keep_in_memory=True)
    except Exception as error:  # whatever a script, a hub or the lack of one raises
        raise ConfigError(
            f"measure.task.evaluate={metric} cannot be loaded ({_first_line(error)}). Without a network give the path of a metric script, or "
            "leave it out: score and scores are computed by this package, as scikit-learn computes them."
        ) from error

    def evaluated(gold: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
        kind: Any = int if all(float(one).is_integer() for one in (*gold, *predicted)) else float
        try:
            found = module.compute(references=[kind(one) for one in gold], predictions=[kind(one) for one in predicted])
        except Exception as error:  # the script's own
            raise ConfigError(f"measure.task.evaluate={metric} refuses these answers: {_first_line(error)}.") from error
        return {str(name): float(value) for name, value in found.items()}

    return evaluated


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"
