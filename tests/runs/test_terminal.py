"""The time left: runs of different cost are weighed, and what finished runs took sets the pace."""

from __future__ import annotations

import pytest

from quicksilver.runs.config import compose
from quicksilver.runs.run import Progress
from quicksilver.runs.terminal import relative_cost, share_done

# Seconds of the first runs of table 11 on one machine, in their order: what the estimate was made from, and must stay near.
MEASURED = (
    (("protocol=all",), 20),
    (("protocol=all", "modules=[halting]"), 38),
    (("protocol=all", "modules=[adaptive_quantization]"), 29),
    (("protocol=all", "modules=[halting,kv_skipping]"), 28),
    (("protocol=continuation",), 17),
    (("protocol=continuation", "modules=[halting]"), 33),
    (("protocol=continuation", "modules=[kv_skipping]"), 27),
    (("protocol=continuation", "modules=[token_fusion]"), 18),
    (("protocol=continuation", "modules=[adaptive_quantization]"), 27),
)


def at(run: int, runs: int, reached: float = 0.0) -> Progress:
    return Progress(run, runs, "a run", "quality", (run + reached) / runs)


def test_half_of_a_dear_run_is_more_than_a_cheap_one():
    costs = (1.0, 4.0, 5.0)
    assert share_done(at(0, 3), costs) == 0
    assert share_done(at(1, 3), costs) == pytest.approx(0.1)
    assert share_done(at(1, 3, 0.5), costs) == pytest.approx(0.3)
    assert share_done(at(2, 3, 1.0), costs) == pytest.approx(1)
    assert share_done(at(1, 4, 0.5), costs) == pytest.approx(1.5 / 4)  # of other runs: all cost the same


def test_it_never_falls():
    costs = [1.0, 2.5, 2.5, 4.0]
    shares = [share_done(at(run, 4, step / 10), costs) for run in range(4) for step in range(11)]
    assert shares == sorted(shares)


def test_the_time_left_is_near_the_time_it_took():
    costs = [relative_cost(compose(overrides)) for overrides, _ in MEASURED]
    seconds = [taken for _, taken in MEASURED]
    for run in range(1, len(seconds)):
        elapsed, left = sum(seconds[:run]), sum(seconds[run:])
        share = share_done(at(run, len(seconds)), costs)
        estimate = elapsed * (1 - share) / share
        assert estimate == pytest.approx(left, rel=0.25)
        equal = at(run, len(seconds)).fraction
        if run == 1:  # a dense run is the cheapest: to count all alike promises too much
            assert abs(estimate - left) < abs(elapsed * (1 - equal) / equal - left)
