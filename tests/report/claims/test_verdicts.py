"""The rule by which claims are judged, held to docs/verdicts.md by drawn numbers."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quicksilver.report.claims.reported import NEARLY, Estimate, Target, by_the_rule, judge, with_its_quality, with_its_saving

RANK = {"not reproduced": 0, "partly": 1, "undecided": 1, "reproduced": 2}
sizes = st.floats(0.01, 1000)
shares = st.floats(-3, 4)  # of the claimed number
slack = st.floats(0, 0.2)
senses = st.sampled_from(["gain", "cost", "match", "level"])


def measured(low: float, high: float, floor: float = 0.0) -> Estimate:
    low, high = min(low, high), max(low, high)
    return Estimate((low + high) / 2, low, high, floor)


def claimed(size: float, rounding: float) -> Target:
    return Target(size * (1 - rounding), size * (1 + rounding))


@given(senses, sizes, slack)
def test_what_is_claimed_exactly_is_reproduced(sense, size, rounding):
    assert judge(sense, claimed(size, rounding), measured(size, size)) == "reproduced"


@given(sizes, slack, shares, shares, st.floats(0, 3))
def test_more_of_a_gain_and_less_of_a_cost_is_never_judged_worse(size, rounding, low, high, better):
    target = claimed(size, rounding)
    for sense, sign in (("gain", 1), ("cost", -1)):
        before = judge(sense, target, measured(low * size, high * size))
        after = judge(sense, target, measured((low + sign * better) * size, (high + sign * better) * size))
        assert RANK[after] >= RANK[before]


@given(senses, sizes, slack, shares, shares, shares, shares)
def test_a_narrower_interval_takes_nothing_back_that_was_ruled_out(sense, size, rounding, low, high, first, second):
    wide = measured(low * size, high * size)
    narrow = measured(*(min(max(share * size, wide.low), wide.high) for share in (first, second)))
    before, after = (judge(sense, claimed(size, rounding), one) for one in (wide, narrow))
    # Only of what was undecided anything may come; what was judged is kept, or is partly so.
    assert before == "undecided" or after in {before, "partly"}


@given(senses, sizes, slack, shares, shares, st.floats(0.001, 1000))
def test_the_unit_does_not_matter(sense, size, rounding, low, high, unit):
    edges = (1 - rounding, 1 + rounding, 0.1, 1.9, (1 - NEARLY) * (1 - rounding), 0.1 * (1 + rounding), 1.9 * (1 + rounding))
    assume(all(abs(end - edge) > 1e-6 for end in (low, high) for edge in edges))
    ours = judge(sense, claimed(size, rounding), measured(low * size, high * size))
    assert judge(sense, claimed(size * unit, rounding), measured(low * size * unit, high * size * unit)) == ours


@given(st.floats(0.05, 0.95), st.floats(-0.5, 1.5), st.floats(-0.5, 1.5))
def test_a_ratio_of_times_is_the_gain_that_it_leaves(ratio, low, high):
    gone = judge("gain", Target(0.995 - ratio, 1.005 - ratio), measured(1 - high, 1 - low))
    assert judge("ratio", Target(ratio - 0.005, ratio + 0.005), measured(low, high)) == gone


@given(sizes, slack, st.floats(0.01, 2), st.floats(0.0, 3))
def test_a_gain_inside_the_noise_of_the_clock_is_none(size, rounding, share, floor):
    estimate = measured(share * size, share * size, floor * size)
    if share <= floor:
        assert judge("gain", claimed(size, rounding), estimate) in ("not reproduced", "undecided")


@given(sizes, st.floats(0, 2))
def test_an_open_side_is_a_gain_or_a_cost(bound, share):
    estimate = measured(share * bound, share * bound)
    assert judge("match", Target(bound, None), estimate) == judge("gain", Target(bound, None), estimate)
    assert judge("match", Target(None, bound), estimate) == judge("cost", Target(None, bound), estimate)


@pytest.mark.parametrize(("sense", "target", "interval", "verdict"), [
    ("gain", (17.5, 18.5), (3, 5), "partly"),
    ("gain", (17.5, 18.5), (-2, 1), "not reproduced"),
    ("gain", (17.5, 18.5), (-30, -25), "not reproduced"),
    ("gain", (17.5, 18.5), (0.001, 0.001), "not reproduced"),
    ("gain", (17.5, 18.5), (15, 19), "reproduced"),
    ("gain", (17.5, 18.5), (40, 45), "reproduced"),
    ("gain", (17.5, 18.5), (-5, 30), "undecided"),
    ("gain", (17.5, 18.5), (-3, 4, 20), "undecided"),  # the noise of the clock is larger than the claim
    ("gain", (17.5, 18.5), (-3, 4, 12), "not reproduced"),
    ("cost", (0.6, 0.7), (-1, 0.3), "reproduced"),
    ("cost", (0.6, 0.7), (0.5, 1.0), "reproduced"),
    ("cost", (0.6, 0.7), (0.8, 1.2), "partly"),
    ("cost", (0.6, 0.7), (0.8, 3.0), "not reproduced"),
    ("cost", (0.6, 0.7), (0.1, 5.0), "undecided"),
    ("cost", (0.0, 1.1), (-6, -5), "reproduced"),
    ("cost", (-0.01, 0.01), (0.1, 0.2), "not reproduced"),
    ("match", (0.05, 0.1), (0.08, 0.12), "reproduced"),
    ("match", (0.05, 0.1), (0.02, 0.03), "partly"),
    ("match", (0.05, 0.1), (0.3, 0.4), "not reproduced"),
    ("match", (-0.5, 0.5), (-0.1, 0.2), "reproduced"),
    ("gain", (-0.5, 0.5), (5, 6), "not reproduced"),
    ("gain", (-0.05, 0.05), (-3.9, -3.1, 4.0), "reproduced"),  # a claimed zero, within the noise of the clock
    ("gain", (-0.05, 0.05), (-3.9, -3.1, 1.0), "not reproduced"),
    ("ratio", (0.395, 0.405), (0.38, 0.42), "reproduced"),
    ("ratio", (0.395, 0.405), (1.4, 1.5), "not reproduced"),
])  # fmt: skip
def test_the_examples_of_the_page(sense, target, interval, verdict):
    assert judge(sense, Target(*target), measured(*interval)) == verdict
    why = by_the_rule(sense, Target(*target), measured(*interval))
    assert (why != "") == (verdict != "reproduced")


def test_the_reason_has_the_numbers_that_the_interval_misses():
    saved, lost = Target(17.5, 18.5), Target(0.6, 0.7)
    noisy = by_the_rule("gain", saved, measured(1.5, 9.0, 8.05))
    assert noisy == "the interval ends below the claim (17.5) and begins below the noise (8.05)"
    assert by_the_rule("gain", saved, measured(3, 5)) == "the interval ends below the claim (17.5)"
    assert by_the_rule("cost", lost, measured(0.1, 5)) == "the interval ends above nearly twice the claim (1.33)"
    assert by_the_rule("gain", Target(0, None), measured(-3, -1)) == "the interval ends below the claim (0)"
    assert by_the_rule("gain", Target(0, None), measured(-3, 1)) == "the interval begins below the claim (0)"
    assert by_the_rule("cost", Target(None, 0), measured(1, 3)) == "the interval begins above the claim (0)"
    assert by_the_rule("gain", Target(-0.05, 0.05), measured(5, 6)) == "the value is not within 0.05 of 0"
    slower = by_the_rule("ratio", Target(0.395, 0.405), measured(1.4, 1.5))
    assert slower == "the interval begins above the claim (0.405) and ends above 1 less a tenth of the gain (0.941)"
    assert by_the_rule("ratio", Target(None, 0.9), measured(0.969, 0.995)) == slower.replace("0.405", "0.9").replace(
        "0.941", "0.99"
    )


def test_a_saving_is_no_better_than_its_quality_and_undecided_where_that_is():
    order = ["not reproduced", "partly", "reproduced"]
    for saving in order:
        found = {quality: with_its_quality(saving, quality) for quality in (*order, "undecided", "not comparable")}
        assert found["reproduced"] == saving
        assert all(order.index(found[quality]) <= order.index(quality) for quality in order)
        assert found["not comparable"] == found["not reproduced"] == "not reproduced"
        assert found["undecided"] == ("not reproduced" if saving == "not reproduced" else "undecided")
    assert with_its_quality("undecided", "not reproduced") == "not reproduced"
    # A quality is reproduced at the claimed saving only.
    assert with_its_saving("reproduced", "reproduced") == "reproduced"
    assert {with_its_saving("reproduced", saving) for saving in ("partly", "not reproduced", "undecided")} == {"partly"}
    assert with_its_saving("not reproduced", "partly") == "not reproduced"
