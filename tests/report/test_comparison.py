"""Each printed number against arithmetic done by hand, on records made by hand."""

import math
from dataclasses import replace
from pathlib import Path

import fakes
import numpy as np
import pandas as pd
import pytest
from saying import refused_in_a_line

from quicksilver.measure.measurement import Quartiles, Spread
from quicksilver.records.times import TimedProcess, timed_processes
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.comparison import LOOKAHEAD, against_dense, cautions, columns, frame, marks
from quicksilver.report.table import amount, interval_cell, signed, speedup_cell, versus_null_cell
from quicksilver.runtime.errors import ConfigError


@pytest.fixture
def dense(tmp_path: Path):
    return fakes.make(tmp_path, "dense all")


def test_differences_are_against_dense_on_the_same_windows(tmp_path, dense):
    run = fakes.make(tmp_path, "run", per_token=0.05, null_per_token=0.10)
    row = against_dense(run, dense)
    tokens = fakes.TOKENS["all"] * fakes.WINDOW_COUNT
    dense_ppl = math.exp(fakes.dense_nats("all").sum() / tokens)
    assert row["dense_ppl"] == pytest.approx(dense_ppl)
    assert row["delta_ppl"] == pytest.approx(math.exp(run.windows["nll_nats"].sum() / tokens) - dense_ppl)
    assert row["delta_ppl_pct"] == pytest.approx(100 * row["delta_ppl"] / dense_ppl)
    assert row["null_delta_ppl"] == pytest.approx(math.exp(run.windows["null_nll_nats"].sum() / tokens) - dense_ppl)
    assert row["versus_null_ppl"] == pytest.approx(row["delta_ppl"] - row["null_delta_ppl"])
    added = (run.windows["nll_nats"] - fakes.dense_nats("all")).sort_values()
    assert row["delta_nats"] == pytest.approx(0.05, rel=0.05)
    assert row["delta_nats_median"] == pytest.approx((added / fakes.TOKENS["all"]).median())
    assert row["worst5_share_pct"] == pytest.approx(100 * added.tail(5).sum() / added.sum())
    # Windows differ by 0.2 nats a token, the run from dense by 0.001 more or less: only a paired interval is this narrow.
    assert row["delta_ppl_low"] < row["delta_ppl"] < row["delta_ppl_high"]
    assert row["delta_ppl_pct_high"] - row["delta_ppl_pct_low"] < 0.2
    assert np.std(fakes.dense_nats("all")) / fakes.TOKENS["all"] > 0.1


@pytest.mark.parametrize("faster", [0.1, -0.2])
def test_savings_are_decreases_in_percent_of_dense(tmp_path, dense, faster):
    run = {"per_token": 0.0, "saved": 0.25, "faster": faster}
    row = against_dense(fakes.make(tmp_path, "run", **run), dense)
    assert [row[f"{ledger}_flops_saved_pct"] for ledger in ("executed", "nominal", "paper")] == pytest.approx([25, 25, 25])
    assert row["speedup_pct"] == pytest.approx(100 * faster)
    assert (row["speedup_pct_low"], row["speedup_pct_high"]) == (pytest.approx(100 * faster - 1), pytest.approx(100 * faster + 1))
    assert "prompt_executed_flops_saved_pct" not in row
    masked = against_dense(fakes.make(tmp_path, "masked", **run, execution="masked"), dense)
    assert not [key for key in masked if "speedup" in key or "latency" in key]  # nothing is saved there
    dense = fakes.make(tmp_path, "dense continuation", "continuation")
    run = fakes.make(tmp_path, "prompt", "continuation", per_token=0.0, prompt_executed_flops=int(fakes.DENSE_FLOPS * 0.8 * 0.6))
    assert against_dense(run, dense)["prompt_executed_flops_saved_pct"] == pytest.approx(40)


def test_simulated_widths_have_no_time_but_all_else(tmp_path, dense):
    from quicksilver.runtime.quantized.linear import FLOAT_PRODUCT, SimulatedExecutor

    for how in (FLOAT_PRODUCT, SimulatedExecutor.kernel, "torch._int_mm"):
        run = fakes.make(tmp_path, how, per_token=0.01, saved=0.25, faster=-0.5, kernels={"adaptive_quantization": how})
        panel = frame([Outcome(Row("p", "", "one", "Quantization", ()), run, dense)])
        assert panel.loc[0, "paper_flops_saved_pct"] == pytest.approx(25)
        speedup = next(column for column in columns(prompt=False) if column.header == "speedup").cell(panel.loc[0].to_dict())
        assert speedup == (("simulated",) if how != "torch._int_mm" else speedup_cell(panel.loc[0].to_dict()))
        assert panel.loc[0, ["speedup_pct", "latency_ms"]].isna().all() == (how != "torch._int_mm")


def test_what_was_not_measured_is_absent_and_printed_as_a_dash(tmp_path, dense):
    run = fakes.make(tmp_path, "run", per_token=0.01, without=("latency", "audit"))
    row = against_dense(run, dense)
    assert not [key for key in row if "speedup" in key or "audit" in key or "null" in key]
    assert speedup_cell(row) == versus_null_cell(row) == interval_cell(row, "null_delta_ppl") == ("-",)
    other = replace(run, data=replace(run.data, token_digest="another"))
    with pytest.raises(ConfigError, match="do not pair"):
        against_dense(other, dense)


@pytest.mark.parametrize(("speedup", "noise", "printed"), [
    (0.9, 1.0, ("≈ 0",)),
    (-0.9, 1.0, ("≈ 0",)),
    (1.0, 1.0, ("≈ 0",)),
    (1.1, 1.0, ("+1.1",)),
    (-12.34, 1.26, ("-12.3",)),
    (5.0, 0.0, ("+5.0",)),
    (5.0, None, ("+5.0", "no floor")),
    (5.0, 43.0, ("±43",)),  # a clock too noisy to tell anything gives no zero
])  # fmt: skip
def test_a_difference_below_the_noise_floor_is_said_to_be_within_noise(speedup, noise, printed):
    assert speedup_cell({"speedup_pct": speedup, "noise_floor_pct": noise}) == printed


def test_a_panel_has_one_noise_floor_pooled_over_its_runs(tmp_path, dense):
    def outcome(panel: str, key: str, floor: float) -> Outcome:
        record = fakes.make(tmp_path, f"{panel} {key}", per_token=0.01, faster=0.05, noise_pct=floor)
        return Outcome(Row(panel, "", key, key, ()), record, dense)

    one = outcome("first", "a", 3.0)
    rows = frame([one, replace(one, row=Row("first", "", "a2", "", ())), outcome("first", "b", 4.0), outcome("second", "c", 8.0)])
    pooled = 3.5  # the median; the record of two rows counts once
    assert rows["pooled_noise_floor_pct"].tolist() == pytest.approx([pooled] * 3 + [8.0])
    assert rows["noise_floor_pct"].tolist() == pytest.approx([pooled, pooled, 4.0, 8.0])  # a noisy run stays one
    (said,) = cautions(rows, "first")
    assert "3.5% of a batch's time, pooled over the dense model's differences from itself in 2 runs." in said
    assert "(at most 4.0%)" in said
    assert "8.0%" in cautions(rows, "second")[0]
    assert cautions(rows.assign(noise_floor_pct=None), "first") == ()


def test_a_null_of_several_draws_says_how_far_they_are_apart():
    rows = pd.DataFrame(
        {"lookahead": [None, True], "null_seeds": [None, 3], "null_ppl_low": [None, 50.0], "null_ppl_high": [None, 51.0]}
    ).assign(null_kind=["shuffle", "random neighbours"])
    fusing, drawn, looking = marks(rows)
    assert fusing.startswith("Null of a run that fuses: the same run with random neighbours fused")
    assert drawn == "Null: the mean of 3 random draws. The perplexities of a row's draws differ by at most 2.0%."
    assert looking == LOOKAHEAD
    assert list(marks(rows.iloc[:1])) == []


@pytest.mark.parametrize(
    ("low", "high", "printed"), [(-0.3, -0.1, "better"), (0.1, 0.3, "worse"), (-0.1, 0.1, "same"), (0, 0.2, "same")]
)
def test_only_an_interval_clear_of_zero_is_a_difference_from_the_null(low, high, printed):
    assert versus_null_cell({"versus_null_ppl_low": low, "versus_null_ppl_high": high}) == (printed,)


def test_intervals_keep_the_digits_that_tell_something():
    def cell(*values: float) -> str:
        names = [f"x{part}{end}" for part in ("", "_pct") for end in ("", "_low", "_high")]
        return interval_cell(dict(zip(names, values, strict=True)), "x")[0]

    assert cell(0.0123, 0.004, 0.02, 1, 1, 1) == "+0.012 [+0.004 +0.020]"
    assert cell(0.5249, -0.004, 1.06, 1, 1, 1) == "+0.52 [0.00 +1.06]"
    assert cell(12.34, 9.96, 15.026, 1, 1, 1) == "+12.3 [+10.0 +15.0]"
    assert cell(4321.0, 4000.4, 5000.0, 1, 1, 1) == "+4321 [+4000 +5000]"


def test_signs_and_amounts():
    assert [signed(1.25, 1), signed(-0.04, 1), signed(0.0, 2), signed(None)] == ["+1.2", "0.0", "0.00", "-"]
    assert [amount(x) for x in (5, 1000, 211e6, 2.06e12, 999.6e9)] == ["5", "1k", "211M", "2.06T", "1T"]


@pytest.mark.parametrize(("faster", "noise_pct", "said"), [
    (0.2, 3.0, "20.0% time saved"),
    (0.05, 7.0, "≈ 0 time saved: 5.0% is within the noise"),
    (0.2, 40.0, "20.0% time saved, not to be told from 0"),
])  # fmt: skip
def test_a_run_says_no_time_saved_inside_the_noise_of_the_clock(faster: float, noise_pct: float, said: str) -> None:
    assert fakes.latency(faster, noise_pct).line().startswith(said)


# --- times of several processes: median and range, compared only on one machine -------------------------------------------------
@pytest.fixture
def outcomes(tmp_path):
    dense = fakes.make(tmp_path, "dense all")
    runs = [fakes.make(tmp_path, name, per_token=0.1, faster=0.9) for name in ("a", "b")]
    return [Outcome(Row("panel", "", one.label, one.label, ()), one, dense) for one in (dense, *runs)]


def process(outcomes, ratio, hour, machine="here", names=("dense all", "a", "b"), day=2, forged=None):
    faster = {name: 0.0 if name == "dense all" else 1 - ratio for name in names}
    results = {fakes.fingerprint(name): fakes.latency(one, 1.0, samples=3) for name, one in faster.items()} | (forged or {})
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


def test_processes_before_the_runs_or_of_another_machine_or_without_a_row_are_left_out(outcomes):
    process(outcomes, 0.4, 9, day=1)  # an hour before the runs were made: they have their own times
    assert speedups(outcomes) == [90, 89, 91]
    process(outcomes, 0.1, 0, machine="there")
    process(outcomes, 0.7, 1)
    process(outcomes, 0.2, 2, names=("a", "b"))
    assert speedups(outcomes) == [30, 30, 30]


@pytest.mark.parametrize("content", [
    "", "[]", "[" * 50_000, '{"table": 3}', {"latency_ratio": Quartiles(0.5, 0.5, 0.5)}, {"latency_ms": Spread(0.0, 0.0, [0.0] * 3)},
])  # fmt: skip
def test_a_file_that_is_none_or_whose_times_cannot_be_is_one_line(outcomes, content):
    if isinstance(content, str):
        path = process(outcomes, 0.7, 0)
        path.write_text(content)
    else:
        forged = replace(fakes.latency(0.3, 1.0, samples=3), **content)
        path = process(outcomes, 0.7, 0, forged={fakes.fingerprint("a"): forged})
    with refused_in_a_line("is no file of `quicksilver time`") as caught:
        timed_processes(path.parents[1])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("words", "said"), [("table", "which table"), ("table 11", "no row with a record"), ("table 11 rounds=2", "rounds=2")]
)
def test_what_cannot_be_timed_is_said_in_one_line(words, said, refused, tmp_path):
    assert said in refused("time", *words.split(), f"results_dir={tmp_path}")
