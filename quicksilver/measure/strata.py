"""Shares of clustered observations, what chance alone gives within strata, and how much a model with covariates explains.

Chance is exact: values dealt anew among the observations of a stratum have a hypergeometric mean and variance, so nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z = 1.959963984540054  # 95%
_ROUNDS = 40
_RIDGE = 1e-6  # per observation: keeps classes that are perfectly told from each other finite

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Share:
    """A share, 0 to 1, with the ends of its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class AgainstNull:
    """A share beside what chance within strata gives, 0 to 1.

    Attributes:
        expected: mean under the null; low, high: where 95% of deals to chance lie.
        excess: the share minus `expected`, with the ends of its 95% interval by cluster.
    """

    expected: float
    low: float
    high: float
    excess: float
    excess_low: float
    excess_high: float

    @property
    def chance(self) -> Share:
        """What chance gives, and where 95% of deals lie."""
        return Share(self.expected, self.low, self.high)

    @property
    def beyond(self) -> Share:
        """The share less chance: `excess` with its interval."""
        return Share(self.excess, self.excess_low, self.excess_high)


def _number(labels: NDArray) -> NDArray[np.int64]:
    """Equal labels (n,) as the same number, from 0."""
    return np.unique(labels, return_inverse=True)[1]


def mean_and_error(values: Floats, clusters: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Mean of values (…, n) and its standard error, clustered: (…) each."""
    mean, number = values.mean(-1), _number(clusters)
    sums = np.apply_along_axis(lambda row: np.bincount(number, weights=row), -1, values - mean[..., None])  # (…, clusters)
    count = sums.shape[-1]
    return mean, np.sqrt((sums**2).sum(-1) * count / max(1, count - 1)) / values.shape[-1]


def wilson(hits: NDArray[np.bool_] | Floats, clusters: NDArray[np.int64]) -> Share:
    """Share of hits (n,) with Wilson's interval at the number of independent observations that the clusters (n,) leave (design
    effect). Raises ValueError: no observation."""
    n, count = len(hits), len(np.unique(clusters))
    if n == 0:
        raise ValueError("a share needs an observation")
    mean, error = mean_and_error(np.asarray(hits, dtype=float), clusters)
    p = float(mean)
    binomial = p * (1 - p) / n
    # Where all agree, or there is one cluster, the data do not say how alike a cluster's members are: a cluster counts as one.
    effective = float(count) if binomial == 0 or count == 1 else n / max(1.0, float(error) ** 2 / binomial)
    middle = (p + Z**2 / (2 * effective)) / (1 + Z**2 / effective)
    half = Z * np.sqrt(p * (1 - p) / effective + Z**2 / (4 * effective**2)) / (1 + Z**2 / effective)
    return Share(p, float(min(p, max(0.0, middle - half))), float(max(p, min(1.0, middle + half))))


def crossed(*strata: NDArray[np.int64]) -> NDArray[np.int64]:
    """Strata (n,) that agree in all of the given ones."""
    return np.unique(np.column_stack(strata), axis=0, return_inverse=True)[1].reshape(-1)


def quantile_bins(values: Floats, bins: int) -> NDArray[np.int64]:
    """The bin of every value (n,), of about equally many values each; equal values share one."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1]))
    return np.searchsorted(edges, values, side="right")


def expected(values: Floats, member: NDArray[np.bool_], strata: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Mean of the members' values, (n,) or (n, K), and its standard deviation, when the values are dealt anew within each
    stratum: two arrays (K,), or numbers as () arrays. `member` and `strata` are (n,)."""
    number = _number(strata)
    size, inside = np.bincount(number), np.bincount(number, weights=member)
    columns = np.asarray(values, dtype=float).reshape(len(values), -1)
    mean, square = (
        np.stack([np.bincount(number, weights=one) for one in (columns**power).T], axis=1) / size[:, None] for power in (1, 2)
    )
    total = inside.sum()
    rest = np.where(size > 1, (size - inside) / np.maximum(1, size - 1), 0.0)
    average = (inside[:, None] * mean).sum(0) / total
    deviation = np.sqrt(((inside * rest)[:, None] * np.maximum(square - mean**2, 0.0)).sum(0)) / total
    return average.reshape(np.shape(values)[1:]), deviation.reshape(np.shape(values)[1:])


def against_null(
    values: Floats, member: NDArray[np.bool_], strata: NDArray[np.int64], clusters: NDArray[np.int64]
) -> AgainstNull:
    """The members' mean of values (n,) beside that of chance within `strata` (n,)."""
    values, number = np.asarray(values, dtype=float), _number(strata)
    average, deviation = (float(one) for one in expected(values, member, strata))
    stratum_mean = (np.bincount(number, weights=values) / np.bincount(number))[number]
    excess, error = (float(one) for one in mean_and_error((values - stratum_mean)[member], clusters[member]))
    return AgainstNull(
        average, average - Z * deviation, average + Z * deviation, excess, excess - Z * error, excess + Z * error
    )  # fmt: skip


# --- models -----------------------------------------------------------------------------------------------------------------------


def indicators(labels: NDArray) -> Floats:
    """(n, K-1): one column for each distinct label but the first."""
    number = _number(labels)
    return np.eye(number.max() + 1)[number][:, 1:]


def design(columns: Sequence[Floats]) -> Floats:
    """Columns (n,) or (n, k) side by side, standardised, behind a column of ones; what does not vary is left out."""
    wide = np.concatenate([np.asarray(one, dtype=float).reshape(len(one), -1) for one in columns], axis=1)
    spread = wide.std(0)
    wide = (wide - wide.mean(0))[:, spread > 0] / spread[spread > 0]
    return np.concatenate([np.ones((len(wide), 1)), wide], axis=1)


def r_squared(values: Floats, columns: Sequence[Floats]) -> float:
    """Share of the variance of values (n,) that a linear model of the columns explains."""
    x = design(columns)
    coefficients = np.linalg.solve(x.T @ x + _RIDGE * len(x) * np.eye(x.shape[1]), x.T @ values)
    left = values - x @ coefficients
    return 1 - float((left**2).sum() / ((values - values.mean()) ** 2).sum())


def deviance_explained(hits: NDArray[np.bool_], columns: Sequence[Floats]) -> float:
    """Share of the deviance of hits (n,) that a logistic model of the columns explains (McFadden)."""
    from scipy.special import expit, xlog1py, xlogy

    def log_loss(p: Floats) -> float:
        return -float((xlogy(y, p) + xlog1py(1 - y, -p)).sum())

    y, x = np.asarray(hits, dtype=float), design(columns)
    coefficients = np.zeros(x.shape[1])
    coefficients[0] = np.log(y.mean() / (1 - y.mean()))
    penalty = _RIDGE * len(y) * np.eye(x.shape[1])
    for _ in range(_ROUNDS):
        p = expit(x @ coefficients)
        gradient = x.T @ (y - p) - penalty @ coefficients
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + penalty, gradient)
        coefficients += step * min(1.0, 5.0 / max(1e-12, float(np.abs(step).max())))
        if np.abs(step).max() < 1e-8:
            break
    return 1 - log_loss(np.clip(expit(x @ coefficients), 1e-12, 1 - 1e-12)) / log_loss(np.full(len(y), y.mean()))
