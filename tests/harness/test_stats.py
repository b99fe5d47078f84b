"""Intervals: paired by window, the same in any order of windows, and refused where they would promise too much."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.harness.stats import MIN_WINDOWS, paired_perplexity
from quicksilver.runtime.errors import ConfigError

RESAMPLES = 400


def draw_windows(seed: int, windows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(20, 60, windows)
    base = tokens * rng.uniform(2.0, 4.0, windows)
    return base + rng.normal(0.5, 1.0, windows), tokens, base


worlds = st.builds(draw_windows, st.integers(0, 10_000), st.integers(MIN_WINDOWS, 40))


@given(worlds)
def test_a_run_does_not_differ_from_itself(world):
    nll, tokens, _ = world
    paired = paired_perplexity(nll, tokens, nll, tokens, resamples=RESAMPLES)
    assert paired.difference == paired.low == paired.high == 0
    assert paired.relative_pct == paired.relative_pct_low == paired.relative_pct_high == 0


@given(worlds, st.floats(-0.3, 0.3))
def test_a_constant_number_of_nats_per_token_is_a_certain_relative_difference(world, nats):
    base, tokens, _ = world
    paired = paired_perplexity(base + nats * tokens, tokens, base, resamples=RESAMPLES)
    expected = 100 * (np.exp(nats) - 1)
    assert paired.relative_pct == pytest.approx(expected, abs=1e-9)
    assert paired.relative_pct_low == pytest.approx(expected, abs=1e-9)
    assert paired.relative_pct_high == pytest.approx(expected, abs=1e-9)


@given(worlds, st.randoms(use_true_random=False))
def test_the_order_of_windows_does_not_matter(world, random):
    nll, tokens, base = world
    order = list(range(len(nll)))
    random.shuffle(order)
    assert paired_perplexity(nll, tokens, base, resamples=RESAMPLES) == paired_perplexity(
        nll[order], tokens[order], base[order], resamples=RESAMPLES
    )


@given(worlds)
def test_the_interval_holds_the_estimate_and_the_other_way_round_has_the_other_sign(world):
    nll, tokens, base = world
    one = paired_perplexity(nll, tokens, base, resamples=RESAMPLES)
    other = paired_perplexity(base, tokens, nll, resamples=RESAMPLES)
    assert one.low <= one.high
    assert one.difference == pytest.approx(-other.difference)
    assert one.ppl == pytest.approx(np.exp(nll.sum() / tokens.sum()))


def test_perplexity_is_a_ratio_of_sums():
    tokens = np.array([100] * 7 + [1])
    nll = np.array([100.0] * 7 + [50.0])  # one short, hard window must not weigh like the long ones
    assert paired_perplexity(nll, tokens, nll, resamples=RESAMPLES).ppl == pytest.approx(np.exp(750 / 701))


def test_a_95_percent_interval_covers_the_truth_about_that_often():
    rng = np.random.default_rng(3)
    truth, tokens, covered, trials = 0.05, np.full(40, 50), 0, 300
    for trial in range(trials):
        base = 50 * rng.normal(3.0, 0.3, 40)
        nll = base + 50 * (np.log1p(truth) + rng.normal(0, 0.02, 40))
        paired = paired_perplexity(nll, tokens, base, resamples=300, seed=trial)
        covered += paired.relative_pct_low <= 100 * truth <= paired.relative_pct_high
    assert 0.88 <= covered / trials <= 0.99


def test_pairing_sees_what_separate_intervals_would_miss():
    rng = np.random.default_rng(5)
    tokens = np.full(24, 64)
    base = 64 * rng.normal(3.0, 0.8, 24)  # windows differ a lot from each other …
    nll = base + 64 * rng.normal(0.01, 0.002, 24)  # … and hardly between the runs
    paired = paired_perplexity(nll, tokens, base, resamples=2000)
    assert 0 < paired.relative_pct_low < paired.relative_pct_high < 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda n, t, b: (n[:7], t[:7], b[:7], None), "at least 8 windows and there are 7"),
        (lambda n, t, b: (n, t, b[:-1], None), "do not pair"),
        (lambda n, t, b: (n, t, b, t + 1), "different numbers of tokens"),
        (lambda n, t, b: (np.where(np.arange(len(n)) == 2, np.nan, n), t, b, None), "finite"),
        (lambda n, t, b: (n, t * 0, b, None), "at least one scored token"),
    ],
)
def test_what_cannot_have_an_interval_gives_no_number(change, says):
    nll, tokens, base, base_tokens = change(*draw_windows(0, 12))
    with pytest.raises(ConfigError, match=says):
        paired_perplexity(nll, tokens, base, base_tokens, resamples=RESAMPLES)


def test_seeds_and_draws_are_checked():
    nll, tokens, base = draw_windows(0, 12)
    assert paired_perplexity(nll, tokens, base, seed=1) == paired_perplexity(nll, tokens, base, seed=1)
    assert paired_perplexity(nll, tokens, base, seed=1).low != paired_perplexity(nll, tokens, base, seed=2).low
    for bad in ({"resamples": 10}, {"confidence": 1.0}):
        with pytest.raises(ConfigError):
            paired_perplexity(nll, tokens, base, **bad)
