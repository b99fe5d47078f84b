"""Intervals: paired by window, the same in any order of windows, and refused where they would promise too much."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.records import stats
from quicksilver.records.stats import MIN_WINDOWS, bootstrap, false_discovery, paired_perplexity, sign_flip_p
from quicksilver.runtime.errors import ConfigError

RESAMPLES = 400


def draw_windows(seed: int, windows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(20, 60, windows)
    base = tokens * rng.uniform(2.0, 4.0, windows)
    return base + rng.normal(0.5, 1.0, windows), tokens, base


worlds = st.builds(draw_windows, st.integers(0, 10_000), st.integers(MIN_WINDOWS, 40))


@given(worlds, st.floats(-0.3, 0.3) | st.just(0.0))
def test_a_constant_number_of_nats_per_token_is_a_certain_relative_difference(world, nats):
    base, tokens, _ = world
    paired = paired_perplexity(base + nats * tokens, tokens, base, tokens, resamples=RESAMPLES)
    relative = (paired.relative_pct, paired.relative_pct_low, paired.relative_pct_high)
    assert relative == pytest.approx([100 * np.expm1(nats)] * 3, abs=1e-9)
    if nats == 0:  # a run does not differ from itself
        assert (*relative, paired.difference, paired.low, paired.high) == (0,) * 6


@given(worlds, st.randoms(use_true_random=False))
def test_the_order_of_windows_does_not_matter_and_the_other_way_round_has_the_other_sign(world, random):
    nll, tokens, base = world
    order = random.sample(range(len(nll)), len(nll))
    one = paired_perplexity(nll, tokens, base, resamples=RESAMPLES)
    assert one == paired_perplexity(nll[order], tokens[order], base[order], resamples=RESAMPLES)
    assert one.low <= one.high
    assert one.difference == pytest.approx(-paired_perplexity(base, tokens, nll, resamples=RESAMPLES).difference)
    assert one.ppl == pytest.approx(np.exp(nll.sum() / tokens.sum()))


def test_a_95_percent_interval_covers_the_truth_about_that_often():
    rng = np.random.default_rng(3)
    truth, tokens, covered, trials = 0.05, np.full(40, 50), 0, 300
    for trial in range(trials):
        base = 50 * rng.normal(3.0, 0.3, 40)
        nll = base + 50 * (np.log1p(truth) + rng.normal(0, 0.02, 40))
        paired = paired_perplexity(nll, tokens, base, resamples=300, seed=trial)
        covered += paired.relative_pct_low <= 100 * truth <= paired.relative_pct_high
    assert 0.88 <= covered / trials <= 0.99


@pytest.mark.parametrize(("change", "says"), [
    (lambda n, t, b: paired_perplexity(n[:7], t[:7], b[:7]), "at least 8 windows and there are 7"),
    (lambda n, t, b: paired_perplexity(n, t, b[:-1]), "do not pair"),
    (lambda n, t, b: paired_perplexity(n, t, b, t + 1), "different numbers of tokens"),
    (lambda n, t, b: paired_perplexity(np.where(np.arange(len(n)) == 2, np.nan, n), t, b), "finite"),
    (lambda n, t, b: paired_perplexity(n, t * 0, b), "at least one scored token"),
    (lambda n, t, b: paired_perplexity(n, t, b, resamples=10), "at least 100 draws"),
    (lambda n, t, b: paired_perplexity(n, t, b, confidence=1.0), "a share between 0 and 1"),
    (lambda n, t, b: bootstrap(lambda x, y: (x - y).mean(-1), n, b[:-1]), "do not pair: the samples have 11, 12"),
    (lambda n, t, b: sign_flip_p((n - b)[:7]), "at least 8 windows"),
])  # fmt: skip
def test_what_cannot_have_an_interval_gives_no_number(change, says):
    with pytest.raises(ConfigError, match=says):
        change(*draw_windows(0, 12))


def test_samples_are_drawn_together():
    """A statistic that no draw can move is certain, and one that only unpaired draws would move too."""
    x = np.random.default_rng(2).normal(size=30)
    value, low, high = bootstrap(lambda x, y: (x - y).mean(-1), x, x + 0.5)
    assert (value, low, high) == pytest.approx((-0.5, -0.5, -0.5))
    _, low, high = bootstrap(lambda x: x.mean(-1), x)
    assert high - low == pytest.approx(2 * 1.96 * x.std(ddof=1) / np.sqrt(30), rel=0.15)


@given(st.integers(0, 1000), st.randoms(use_true_random=False))
def test_values_that_are_computed_together_have_the_intervals_that_they_have_alone(seed, random):
    x = np.random.default_rng(seed).normal(size=(3, 12))
    together = bootstrap(lambda x: x.mean(-1), x, resamples=RESAMPLES)
    assert together.value.shape == together.low.shape == together.high.shape == (3,)
    assert (together.low < together.value).all()
    assert (together.value < together.high).all()
    order = random.sample(range(12), 12)
    for one, shuffled in zip(together, bootstrap(lambda x: x.mean(-1), x[:, order], resamples=RESAMPLES), strict=True):
        assert (one == shuffled).all()
    x[:, 1:] = x[:, :1]  # what does not vary has no width
    assert bootstrap(lambda x: x.mean(-1), x, resamples=RESAMPLES).low == pytest.approx(x[:, 0])


def test_what_is_drawn_depends_on_the_seed_alone(monkeypatch):
    nll, tokens, base = draw_windows(0, 12)
    assert paired_perplexity(nll, tokens, base, seed=1) == paired_perplexity(nll, tokens, base, seed=1)
    assert paired_perplexity(nll, tokens, base, seed=1).low != paired_perplexity(nll, tokens, base, seed=2).low
    whole = bootstrap(lambda x: x.mean(-1), nll)
    monkeypatch.setattr(stats, "_RESAMPLED_AT_A_TIME", 12 * 7)  # few numbers at a time
    assert bootstrap(lambda x: x.mean(-1), nll) == whole


def test_tossed_signs_tell_a_shift_from_noise_and_do_not_mind_the_order() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=40)
    noise -= noise.mean()
    assert sign_flip_p(noise) > 0.9
    assert sign_flip_p(noise + 2) < 0.001
    assert sign_flip_p(noise + 0.2) == sign_flip_p(np.flip(noise + 0.2))


def test_more_tests_need_smaller_p_values() -> None:
    assert false_discovery([0.03]) == [0.03]
    assert false_discovery([0.03, 0.9, 0.8, 0.7]) == pytest.approx([0.12, 0.9, 0.9, 0.9])
    assert false_discovery([]) == []
