"""Figures 4, 6 and 7: the records of Table 11, drawn. Figures 6 and 7 from hand-made records."""

import fakes
import pytest

from quicksilver.experiments import drawing as draw
from quicksilver.experiments.ablation import impact
from quicksilver.measure.latency import LatencyResult
from quicksilver.records.record import Record
from quicksilver.report.artefacts import find
from quicksilver.report.claims.reported import reported


def outcomes(results, number):
    rows = find("figure", number).experiment.rows()

    def made(row):
        if row.panel == "all" and row.key.endswith("fusion"):
            return "refused under all: looks ahead"
        return {"saved": 0.1, "faster": 0.05 * rows.index(row) - 0.2, "per_token": 0.01, "null_per_token": 0.02}

    return fakes.outcomes(results, rows, made)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By figure: hand-made outcomes, and the figure that is drawn of them."""
    given = {number: outcomes(tmp_path_factory.mktemp("records"), number) for number in ("6", "7")}
    return {number: (one, find("figure", number).build(one, f"figure0{number}")) for number, one in given.items()}


@pytest.mark.parametrize("number", ["6", "7"])
def test_what_is_drawn_is_measured_or_reported_and_the_picture_says_why_there_is_no_bar(made, number):
    given, figure = made[number]
    frame = figure.frame.set_index(["panel", "key"])
    given = [one for one in given if one.row.key != "baseline"]
    assert len(frame) == len(given)
    for outcome in given:
        row, claim = frame.loc[(outcome.row.panel, outcome.row.key)], reported()[outcome.row.reported].values
        assert row["reported_speedup_pct"] == claim["speedup_pct"]
        assert row["reported_delta_ppl_pct"] == pytest.approx(100 * claim["delta_ppl"] / 18.2)
        if outcome.record is None:
            assert row["status"] == outcome.reason
            assert row[["speedup_pct", "delta_ppl_pct"]].isna().all()
        else:
            ratio = outcome.record.measured("latency", LatencyResult).latency_ratio
            assert row["speedup_pct"] == pytest.approx(100 * (1 - ratio.median))
    said = " ".join(figure.caption)
    assert all(part in said for part in ("reference-gpt2", "python-docs", "compact", "Protocol all", "Protocol continuation"))
    texts = {text.get_text().replace("\n", " ") for axes in figure.drawing.axes for text in axes.texts}
    assert texts >= {"refused under all: looks ahead", *(f"{value:+.1f}" for value in frame["speedup_pct"].dropna())}
    assert all("%" in axes.get_ylabel() for axes in figure.drawing.axes[::2])


def test_simulated_widths_have_no_time_and_the_picture_says_so(made, monkeypatch):
    given, _ = made["7"]
    simulated = {one.record.fingerprint for one in given if one.record is not None and one.row.key == "isolated.quantization"}
    monkeypatch.setattr(Record, "simulated", property(lambda record: record.fingerprint in simulated))
    figure = find("figure", "7").build(given, "figure07")
    apart = impact.least_degrading({one.row.key: one for one in given if one.row.panel == "continuation"})
    cost = figure.frame[figure.frame["panel"] == "continuation"].set_index("key")["delta_ppl_pct"]
    others, ours = (
        cost[[f"isolated.{one}" for one in those]] for those in (("kv_skipping", "quantization"), ("halting", "fusion"))
    )
    assert apart.value == pytest.approx(others.min() - ours.max())
    frame = figure.frame[figure.frame["key"] == "isolated.quantization"]
    assert frame["speedup_pct"].isna().all()
    assert frame["delta_ppl_pct"].notna().all()
    texts = [text.get_text().replace("\n", " ") for axes in figure.drawing.axes for text in axes.texts]
    assert texts.count("simulated: not timed") == 2  # of both protocols
    assert draw.folded("+ Quantization", 12).count("\n") == 0


def test_claims_follow_the_ratio_of_times(made):
    given = {one.row.key: one for one in made["6"][0] if one.row.panel == "continuation"}
    found = impact.added_speedup(given)
    before, after = (
        given[f"cumulative.{step}"].record.measured("latency", LatencyResult).latency_ratio for step in ("halting", "kv_skipping")
    )
    assert found.value == pytest.approx(100 * (before.median - after.median))
    assert found.high - found.low == pytest.approx(100 * sum(ratio.high - ratio.low for ratio in (before, after)))
