"""Is a difference more than noise? Every interval is made here: `scipy.stats.bootstrap` over windows, paired, because both runs scored the
same windows, so their common difficulty cancels.

The intervals are percentile intervals: BCa has none where a run equals its baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.records.record import Record

MIN_WINDOWS = 8  # below it a percentile interval of resampled windows covers far less than it says
RESAMPLES = 10_000
_RESAMPLED_AT_A_TIME = 400_000  # numbers held at once: 3 MB stay in the cache, which halves the time


class Interval(NamedTuple):
    """A statistic of all windows and the ends of its interval: numbers, or (K,) each for a statistic of K values."""

    value: Any
    low: Any
    high: Any


def bootstrap(
    statistic: Callable[..., NDArray[np.float64]],
    *samples: ArrayLike,
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """`statistic` of paired samples with its percentile interval; what stands at one place of every sample is drawn together.
    Raises ConfigError: fewer than 8 observations, samples that do not pair, numbers that are not finite.

    Args:
        statistic: of as many arrays as there are samples, each (…, R, W), to (R,), or to (K, R) for K values; also without R.
        samples: (W,) each, or (…, W): observations along the last axis.
        resamples: bootstrap draws.
        seed: of the draws. The order of the observations does not matter.
        confidence: share of the draws inside the interval.
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    _check_observations(arrays)
    if resamples < 100 or not 0 < confidence < 1:
        raise ConfigError(f"resamples={resamples} and confidence={confidence}: at least 100 draws, and a share between 0 and 1.")
    return _bootstrap(statistic, tuple((array.tobytes(), array.shape) for array in arrays), resamples, seed, confidence)


@lru_cache(maxsize=4096)
def _bootstrap(
    statistic: Callable[..., NDArray[np.float64]],
    samples: tuple[tuple[bytes, tuple[int, ...]], ...],
    resamples: int,
    seed: int,
    confidence: float,
) -> Interval:
    """Of samples as the bytes of float64, with their shapes. Tables, figures, claims and pages ask for the same intervals: those of a named
    function, unlike a lambda, are found again."""
    from scipy import stats  # takes longer to import than everything else that a run needs of the harness

    arrays = [np.frombuffer(content).reshape(shape) for content, shape in samples]
    size = arrays[0].shape[-1]
    rows = np.concatenate([array.reshape(-1, size) for array in arrays])
    order = np.lexsort(rows[::-1])  # the same windows in another order draw the same resamples
    arrays = [array[..., order] for array in arrays]
    batch = max(1, _RESAMPLED_AT_A_TIME // (len(arrays) * max(array.size for array in arrays)))
    found = stats.bootstrap(
        arrays, lambda *drawn, axis: statistic(*drawn), n_resamples=resamples, batch=min(batch, resamples), vectorized=True, paired=True,
        axis=-1, confidence_level=confidence, method="percentile", rng=np.random.default_rng(seed),
    )  # fmt: skip
    return Interval(statistic(*arrays), *found.confidence_interval)


def _check_observations(arrays: Sequence[NDArray[np.float64]]) -> None:
    sizes = {array.shape[-1] for array in arrays}
    if len(sizes) > 1:
        raise ConfigError(f"windows do not pair: the samples have {', '.join(map(str, sorted(sizes)))} of them.")
    (size,) = sizes
    if size < MIN_WINDOWS:
        needs = f"an interval needs at least {MIN_WINDOWS} windows and there are {size}"
        raise ConfigError(f"{needs}: raise dataset.windows, or take a longer text.")
    if not all(np.isfinite(array).all() for array in arrays):
        raise ConfigError("an interval needs finite numbers in every window.")


@dataclass(frozen=True)
class PairedInterval:
    """Perplexity of a run minus that of its baseline on the same windows, with a percentile bootstrap interval.
    `difference`, `low`, `high` are in perplexity; `relative_pct…` are 100 · (ppl / baseline_ppl − 1)."""

    ppl: float
    baseline_ppl: float
    difference: float
    low: float
    high: float
    relative_pct: float
    relative_pct_low: float
    relative_pct_high: float
    windows: int
    confidence: float
    resamples: int


def paired_perplexity(
    nll_nats: ArrayLike,
    tokens: ArrayLike,
    baseline_nll_nats: ArrayLike,
    baseline_tokens: ArrayLike | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = 0.95,
) -> PairedInterval:
    """Difference of two perplexities with its interval; windows are resampled because tokens inside one are dependent.

    Perplexity is exp(Σ nats / Σ tokens) over the drawn windows, so windows of unequal length weigh as they should.
    Raises ConfigError: fewer than 8 windows, windows that do not pair, numbers that are not finite.

    Args:
        nll_nats, baseline_nll_nats: (W,) summed negative log-likelihood of each window.
        tokens, baseline_tokens: (W,) scored tokens of each window; the baseline's must be the same (None: they are).
        resamples, seed, confidence: as `bootstrap`.
    """
    nll, base = np.asarray(nll_nats, dtype=np.float64), np.asarray(baseline_nll_nats, dtype=np.float64)
    count = np.asarray(tokens, dtype=np.float64)
    _check_windows(nll, count, base, baseline_tokens)
    found = bootstrap(_perplexities, nll, base, count, resamples=resamples, seed=seed, confidence=confidence)
    ppl, baseline_ppl, difference, relative = map(float, found.value)
    (low, relative_low), (high, relative_high) = (map(float, ends[2:]) for ends in (found.low, found.high))
    relatives = (relative, relative_low, relative_high)
    return PairedInterval(ppl, baseline_ppl, difference, low, high, *relatives, len(nll), confidence, resamples)


def _check_windows(
    nll: NDArray[np.float64], tokens: NDArray[np.float64], base: NDArray[np.float64], baseline_tokens: ArrayLike | None
) -> None:
    if not (nll.shape == base.shape == tokens.shape and nll.ndim == 1):
        raise ConfigError(f"windows do not pair: {nll.shape} nats, {tokens.shape} token counts and {base.shape} baseline nats.")
    if baseline_tokens is not None and not np.array_equal(tokens, np.asarray(baseline_tokens, dtype=np.float64)):
        raise ConfigError("windows do not pair: the two runs scored different numbers of tokens in a window.")
    if not (tokens > 0).all():
        raise ConfigError("an interval needs at least one scored token in every window.")


def _perplexities(nll: NDArray[np.float64], base: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """(4, …): both, their difference, and the relative one in percent, of sums over the last axis."""
    ppl, baseline_ppl = (np.exp(nats.sum(-1) / tokens.sum(-1)) for nats in (nll, base))
    return np.stack([ppl, baseline_ppl, ppl - baseline_ppl, 100 * (ppl / baseline_ppl - 1)])


def paired_records(
    record: Record, baseline: Record, *, column: str = "nll_nats", baseline_column: str = "nll_nats", **options: int | float
) -> PairedInterval:
    """`paired_perplexity` of two records, windows joined by number; `column="null_nll_nats"` takes a record's null instead of
    the run.
    Raises ConfigError: records of different text or protocol, a column that one of them does not have."""
    return paired_perplexity(*pairs_of(record, baseline, column, baseline_column), **options)  # type: ignore[arg-type]


def pairs_of(
    record: Record, baseline: Record, column: str = "nll_nats", baseline_column: str = "nll_nats"
) -> tuple[NDArray[np.float64], ...]:
    """Nats and tokens of each window of a record, then of its baseline, (W,) each. Raises ConfigError: as `paired_records`."""
    both = f"{record.path} and {baseline.path}"
    if record.data.token_digest != baseline.data.token_digest or record.protocol != baseline.protocol:
        raise ConfigError(f"{both} scored different text, or by different protocols: they do not pair.")
    for one, needed in ((record, column), (baseline, baseline_column)):
        if needed not in one.windows:
            raise ConfigError(f"{one.path}/windows.parquet has no column {needed}; it has {', '.join(one.windows.columns)}.")
    ours, theirs = record.windows, baseline.windows
    if not np.array_equal(ours["window"], theirs["window"]) or not ours["window"].is_unique:
        ours, theirs = ours.set_index("window"), theirs.set_index("window")
        if set(ours.index) != set(theirs.index) or not ours.index.is_unique or len(ours) != len(theirs):
            raise ConfigError(f"{both} scored different windows: they do not pair.")
        theirs = theirs.loc[ours.index]
    columns = (ours[column], ours["tokens"], theirs[baseline_column], theirs["tokens"])
    return tuple(values.to_numpy(np.float64) for values in columns)


def check_pairs(record: Record, baseline: Record, column: str = "nll_nats", baseline_column: str = "nll_nats") -> None:
    """Raise what `paired_records` would, without drawing anything."""
    nll, tokens, baseline_nll, baseline_tokens = pairs_of(record, baseline, column, baseline_column)
    _check_windows(nll, tokens, baseline_nll, baseline_tokens)
    _check_observations([nll, baseline_nll])


def sign_flip_p(differences: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> float:
    """How often paired differences (W,) whose signs are tossed have a mean as far from 0 as these: a two-sided permutation test.
    Raises ConfigError: fewer than 8 windows, numbers that are not finite."""
    values = np.sort(np.asarray(differences, dtype=np.float64))
    if len(values) < MIN_WINDOWS or not np.isfinite(values).all():
        raise ConfigError(f"a test needs at least {MIN_WINDOWS} windows with finite numbers; there are {len(values)}.")
    return _sign_flip_p(values.tobytes(), resamples, seed)


@lru_cache(maxsize=4096)
def _sign_flip_p(differences: bytes, resamples: int, seed: int) -> float:
    from scipy import stats

    values = np.frombuffer(differences)
    draws = {"n_resamples": resamples, "rng": np.random.default_rng(seed)}
    return float(stats.permutation_test((values,), np.mean, permutation_type="samples", vectorized=True, **draws).pvalue)


def mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis, for `bootstrap`."""
    return np.asarray(values.mean(axis=-1))


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """P values of a family of tests, adjusted so that those below 5% hold at most 5% false discoveries (Benjamini and Hochberg, 1995)."""
    from scipy import stats

    return [float(p) for p in stats.false_discovery_control(p_values)] if len(p_values) else []
