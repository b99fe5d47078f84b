"""Figures 4, 6 and 7: the records of Table 11, drawn. Figures 6 and 7 from hand-made records."""

from __future__ import annotations

import fakes
import pytest

from quicksilver.measure.latency import LatencyResult
from quicksilver.report.artefacts import Outcome, find
from quicksilver.report.claims.reported import reported

TABLE = {(row.panel, row.key): row for row in find("table", "11").experiment.rows()}


def outcomes(results, number):
    dense = {panel: fakes.make(results, f"dense {panel}", panel) for panel in ("all", "continuation")}
    found = []
    for place, row in enumerate(find("figure", number).experiment.rows()):
        if row.key == "baseline":
            found.append(Outcome(row, dense[row.panel], dense[row.panel]))
        elif row.panel == "all" and row.key.endswith("fusion"):
            found.append(Outcome(row, reason="refused under all: looks ahead"))
        else:
            options = {"saved": 0.1, "faster": 0.05 * place - 0.2, "per_token": 0.01, "null_per_token": 0.02}
            found.append(Outcome(row, fakes.make(results, f"{row.panel} {row.key}", row.panel, **options), dense[row.panel]))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By figure: hand-made outcomes, and the figure that is drawn of them."""

    class Made(dict):
        def __missing__(self, number):
            given, artefact = outcomes(tmp_path_factory.mktemp("records"), number), find("figure", number)
            self[number] = given, artefact.build(given, artefact.name)
            return self[number]

    return Made()


@pytest.mark.parametrize("number", ["4", "6", "7"])
def test_the_runs_are_those_of_table_11(number):
    rows = find("figure", number).experiment.rows()
    assert rows
    for row in rows:
        assert row == TABLE[row.panel, row.key]


@pytest.mark.parametrize("number", ["6", "7"])
def test_what_is_drawn_is_measured_or_reported(made, number):
    given, figure = made[number]
    frame = figure.frame.set_index(["panel", "key"])
    for outcome in given:
        if outcome.row.key == "baseline":
            continue
        row = frame.loc[(outcome.row.panel, outcome.row.key)]
        claim = reported()[outcome.row.reported].values
        assert row["reported_speedup_pct"] == claim["speedup_pct"]
        assert row["reported_delta_ppl_pct"] == pytest.approx(100 * claim["delta_ppl"] / 18.2)
        if outcome.record is None:
            assert row["status"] == outcome.reason
            assert row[["speedup_pct", "delta_ppl_pct"]].isna().all()
        else:
            assert row["speedup_pct"] == pytest.approx(
                100 * (1 - outcome.record.measured("latency", LatencyResult).latency_ratio.median)
            )
    assert len(frame) == len(given) - 2
    said = " ".join(figure.caption)
    assert [
        part for part in ("reference-gpt2", "python-docs", "compact", "Protocol all", "Protocol continuation") if part not in said
    ] == []


@pytest.mark.parametrize("number", ["6", "7"])
def test_the_picture_says_why_there_is_no_bar_and_how_high_the_others_are(made, number):
    _, figure = made[number]
    texts = [text.get_text().replace("\n", " ") for axes in figure.drawing.axes for text in axes.texts]
    assert "refused under all: looks ahead" in texts
    for value in figure.frame["speedup_pct"].dropna():
        assert f"{value:+.1f}" in texts
    for axes in figure.drawing.axes[::2]:
        assert "%" in axes.get_ylabel()


@pytest.mark.slow
@pytest.mark.parametrize("number", ["6", "7"])
def test_the_same_records_give_the_same_bytes(made, tmp_path, number):
    artefact, (_, first) = find("figure", number), made[number]
    second = artefact.build(outcomes(tmp_path, number), artefact.name)
    assert (first.svg(), first.png(), first.csv()) == (second.svg(), second.png(), second.csv())


def test_what_a_step_adds_is_the_difference_of_two_speedups(made):
    given = {one.row.key: one for one in made["6"][0] if one.row.panel == "continuation"}
    experiment = find("figure", "6").experiment
    found = experiment.added_speedup(given)
    ratios = [
        given[f"cumulative.{step}"].record.measured("latency", LatencyResult).latency_ratio for step in ("halting", "kv_skipping")
    ]
    assert found.value == pytest.approx(100 * (ratios[0].median - ratios[1].median))
    assert found.high - found.low == pytest.approx(100 * sum(ratio.high - ratio.low for ratio in ratios))
    worst = experiment.worst(given)
    assert worst.low <= worst.value <= worst.high
    assert experiment.worst({"baseline": given["baseline"]}) is None


def test_milliseconds_follow_the_ratio(made):
    given = {one.row.key: one for one in made["7"][0] if one.row.panel == "continuation"}
    record = given["isolated.quantization"].record
    found = find("figure", "7").experiment.saved_ms(given)
    assert found.value == pytest.approx(fakes.DENSE_MS * (1 - record.measured("latency", LatencyResult).latency_ratio.median))
    assert found.low <= found.value <= found.high
