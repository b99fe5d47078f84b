"""Is a difference more than noise? Bootstrap over windows, paired: both runs scored the same windows, so their common
difficulty cancels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.harness.record import Record

MIN_WINDOWS = 8  # below it a percentile interval of resampled windows covers far less than it says
_RESAMPLED_AT_A_TIME = 4_000_000  # entries of the index matrix held at once: 32 MB


@dataclass(frozen=True)
class PairedInterval:
    """Perplexity of a run minus that of its baseline on the same windows, with a percentile bootstrap interval.

    `difference`, `low`, `high` are in perplexity; `relative_pct…` are 100 · (ppl / baseline_ppl − 1).
    """

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
    resamples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> PairedInterval:
    """Difference of two perplexities with its interval; windows are the resampled unit because tokens inside one are dependent.

    Perplexity is exp(Σ nats / Σ tokens) over the drawn windows: a ratio of sums, so windows of unequal length weigh as they
    should.

    Args:
        nll_nats, baseline_nll_nats: (W,) summed negative log-likelihood of each window.
        tokens, baseline_tokens: (W,) scored tokens of each window; the baseline's must be the same (None: they are).
        resamples: bootstrap draws.
        seed: of the draws. The order of the windows does not matter.
        confidence: share of the draws inside the interval.

    Raises:
        ConfigError: fewer than 8 windows, windows that do not pair, numbers that are not finite.
    """
    nll, base = np.asarray(nll_nats, dtype=np.float64), np.asarray(baseline_nll_nats, dtype=np.float64)
    count = np.asarray(tokens, dtype=np.float64)
    if not (nll.shape == base.shape == count.shape and nll.ndim == 1):
        raise ConfigError(f"windows do not pair: {nll.shape} nats, {count.shape} token counts and {base.shape} baseline nats.")
    if baseline_tokens is not None and not np.array_equal(count, np.asarray(baseline_tokens, dtype=np.float64)):
        raise ConfigError("windows do not pair: the two runs scored different numbers of tokens in a window.")
    if len(nll) < MIN_WINDOWS:
        raise ConfigError(
            f"an interval needs at least {MIN_WINDOWS} windows and there are {len(nll)}: raise dataset.windows, or take a "
            f"longer text."
        )
    if not (np.isfinite(nll).all() and np.isfinite(base).all() and (count > 0).all()):
        raise ConfigError("an interval needs finite nats and at least one scored token in every window.")
    if resamples < 100 or not 0 < confidence < 1:
        raise ConfigError(f"resamples={resamples} and confidence={confidence}: at least 100 draws, and a share between 0 and 1.")

    order = np.lexsort((count, base, nll))  # the same windows in another order draw the same resamples
    nll, base, count = nll[order], base[order], count[order]
    ppl, baseline_ppl = _ppl(nll.sum(), count.sum()), _ppl(base.sum(), count.sum())

    rng = np.random.default_rng(seed)
    drawn, drawn_base = np.empty(resamples), np.empty(resamples)
    step = max(1, _RESAMPLED_AT_A_TIME // len(nll))
    for start in range(0, resamples, step):
        stop = min(start + step, resamples)
        index = rng.integers(0, len(nll), size=(stop - start, len(nll)))
        n = count[index].sum(1)
        drawn[start:stop] = _ppl(nll[index].sum(1), n)
        drawn_base[start:stop] = _ppl(base[index].sum(1), n)

    tails = [50 * (1 - confidence), 50 * (1 + confidence)]
    low, high = np.percentile(drawn - drawn_base, tails)
    low_pct, high_pct = np.percentile(100 * (drawn / drawn_base - 1), tails)
    return PairedInterval(
        ppl=float(ppl),
        baseline_ppl=float(baseline_ppl),
        difference=float(ppl - baseline_ppl),
        low=float(low),
        high=float(high),
        relative_pct=float(100 * (ppl / baseline_ppl - 1)),
        relative_pct_low=float(low_pct),
        relative_pct_high=float(high_pct),
        windows=len(nll),
        confidence=confidence,
        resamples=resamples,
    )


def _ppl(nats: NDArray[np.float64] | np.float64, tokens: NDArray[np.float64] | np.float64) -> NDArray[np.float64] | np.float64:
    return np.exp(nats / tokens)


def paired_records(
    record: Record, baseline: Record, *, column: str = "nll_nats", baseline_column: str = "nll_nats", **options: int | float
) -> PairedInterval:
    """`paired_perplexity` of two records, windows joined by number; `column="null_nll_nats"` takes a record's null instead of
    the run.

    Raises:
        ConfigError: records of different text or protocol, a column that one of them does not have.
    """
    if record["data"]["token_digest"] != baseline["data"]["token_digest"] or record["protocol"] != baseline["protocol"]:
        raise ConfigError(
            f"{record.path} and {baseline.path} scored different text or under different protocols: their windows do not pair."
        )
    _need(record, column)
    _need(baseline, baseline_column)
    ours = record.windows[["window", "tokens", column]].rename(columns={column: "nll"})
    theirs = baseline.windows[["window", "tokens", baseline_column]].rename(columns={baseline_column: "nll"})
    both = ours.merge(theirs, on="window", suffixes=("", "_baseline"), validate="one_to_one")
    if len(both) != len(ours) or len(both) != len(theirs):
        raise ConfigError(f"{record.path} and {baseline.path} scored different windows: they do not pair.")
    return paired_perplexity(both["nll"], both["tokens"], both["nll_baseline"], both["tokens_baseline"], **options)  # type: ignore[arg-type]


def _need(record: Record, column: str) -> None:
    columns: Sequence[str] = list(record.windows.columns)
    if column not in columns:
        raise ConfigError(f"{record.path}/windows.parquet has no column {column}; it has {', '.join(columns)}.")
