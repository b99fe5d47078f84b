"""Metrics of the tasks, GLUE's and SuperGLUE's own definitions, over the last axis: a bootstrap asks for thousands of draws at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
        right: dict[str, bool] = {}
        for group, ok in zip(groups, y == z, strict=True):
            right[group] = right.get(group, True) and bool(ok)
        found["exact_match"] = float(np.mean(list(right.values())))
    return found
