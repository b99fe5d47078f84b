"""Times of several processes: a table prints their median and range, and compares rows only in those that timed them all on one machine."""

import dataclasses

import fakes
import pytest

from quicksilver.measure.measurement import Quartiles, Spread
from quicksilver.records.times import TimedProcess, timed_processes
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.runtime.errors import ConfigError


@pytest.fixture
def outcomes(tmp_path):
    dense = fakes.make(tmp_path, "dense all")
    runs = [fakes.make(tmp_path, name, per_token=0.1, faster=0.9) for name in ("a", "b")]
    return [Outcome(Row("panel", "", one.label, one.label, ()), one, dense) for one in (dense, *runs)]


def process(outcomes, ratio, hour, machine="here", names=("dense all", "a", "b"), day=2):
    faster = {name: 0.0 if name == "dense all" else 1 - ratio for name in names}
    results = {fakes.fingerprint(name): fakes.latency(one, 1.0, samples=3) for name, one in faster.items()}
    made = TimedProcess("table_x", f"2026-01-{day:02}T{hour:02}:00:00+00:00", machine, 3, results)
    return made.write(outcomes[0].record.path.parents[1])


def speedups(outcomes):
    row = comparison.frame(outcomes).iloc[1]
    return pytest.approx([row[f"speedup_pct{end}"] for end in ("", "_low", "_high")])


def test_a_table_prints_the_median_over_processes_and_their_range(outcomes):
    assert speedups(outcomes) == [90, 89, 91]
    for hour, ratio in enumerate((0.7, 0.5, 0.6)):
        process(outcomes, ratio, hour)
    assert speedups(outcomes) == [40, 30, 50]
    notes = " ".join(provenance.notes(outcomes))
    assert "median over 3 processes (2026-01-02 00:00 to 02:00 UTC)" in notes
    assert "range over processes" in notes


def test_processes_of_another_machine_or_without_a_row_are_left_out(outcomes):
    process(outcomes, 0.1, 0, machine="there")
    process(outcomes, 0.7, 1)
    process(outcomes, 0.2, 2, names=("a", "b"))
    assert speedups(outcomes) == [30, 30, 30]


def test_who_makes_the_runs_anew_prints_their_own_times(outcomes):
    process(outcomes, 0.7, 9, day=1)  # an hour before the runs were made
    assert speedups(outcomes) == [90, 89, 91]


@pytest.mark.parametrize("content", ["", "[]", "[" * 50_000, '{"table": 3}', "forged", "no time"])
def test_a_file_that_is_none_or_whose_times_cannot_be_is_one_line(outcomes, content):
    path = process(outcomes, 0.7, 0)
    impossible = {
        "forged": {"latency_ratio": Quartiles(0.5, 0.5, 0.5)},
        "no time": {"latency_ms": Spread(0.0, 0.0, [0.0] * 3)},
    }
    if content in impossible:
        results = {fakes.fingerprint("a"): dataclasses.replace(fakes.latency(0.3, 1.0, samples=3), **impossible[content])}
        TimedProcess("table_x", "2026-01-01T00:00:00+00:00", "here", 3, results).write(path.parents[1])
    else:
        path.write_text(content)
    with pytest.raises(ConfigError, match="is no file of `quicksilver time`") as caught:
        timed_processes(path.parents[1])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("words", "said"), [("table", "which table"), ("table 11", "no row with a record"), ("table 11 rounds=2", "rounds=2")]
)
def test_what_cannot_be_timed_is_said_in_one_line(words, said, refused, tmp_path):
    assert said in refused("time", *words.split(), f"results_dir={tmp_path}")
