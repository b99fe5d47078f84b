"""The detection study's table, figure and statements, from frames: with a clock, without one, and without a study."""

from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from quicksilver.report.artefacts import find
from quicksilver.studies.token_halting import tables

KEYS = ["detector", "policy", "dial"]
ROWS = [  # detector, policy, dial, tokens, FLOPs saved, AP
    ("no_layers", "dense", 0.0, 0.0, 99.0, 0.2), ("control", "dense", 0.0, 1.0, 0.0, 0.5), ("box", "dense", 0.0, 1.0, 0.0, 0.45),
    ("box", "learned", 0.5, 0.4, 60.0, 0.45), ("random", "dense", 0.0, 1.0, 0.0, 0.4), ("random", "random", 0.5, 0.4, 60.0, 0.3),
    ("wide_control", "dense", 0.0, 1.0, -90.0, 0.6), ("wide_gentle", "learned", 0.5, 0.4, 10.0, 0.55),
]  # fmt: skip
TIMES = {("control", "dense", 0.0): 1.0, ("box", "learned", 0.5): 0.46, ("wide_gentle", "learned", 0.5): 0.95}
WHOLE = {"encoder": (0.0, 60.0), "whole": (0.2, 40.0)}  # what is added to a ratio, FLOPs saved by who halts

FACTS = "pillars layers width seeds scenes steps tuning_steps validation_scenes target_tokens torch"


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A folder for frames, read by the experiments."""
    monkeypatch.setattr(tables, "folder", lambda: tmp_path)
    return tmp_path


def save(folder: Path, name: str, rows: list, columns: list[str]) -> None:
    pd.DataFrame(rows, columns=columns).to_csv(folder / f"{name}.csv", index=False)


def write(folder: Path, times: dict[tuple[str, str, float], float] | None = None) -> None:
    each = [(seed, *row[:4], 1e9, row[4], 0.5, row[5] + seed / 100, row[5] - 0.1) for seed in (0, 1) for row in ROWS]
    columns = ["tokens", "executed_flops", "executed_flops_saved_pct", "kept_in_box", "ap", "ap_unrecycled"]
    save(folder, "evaluations", each, ["seed", *KEYS, *columns])
    pairs = product(("random", "norm", "uniform", "dense control"), (True, False))
    gaps = [("box", "learned", 0.5, *pair, 0.1, 0.05, 0.15) for pair in pairs]
    gaps.append(("wide_gentle", "learned", 0.5, "longer control", True, 0.05, 0.01, 0.09))
    save(folder, "differences", gaps, [*KEYS, "against", "recycled", "difference", "low", "high"])
    save(folder, "about", [(fact, 1) for fact in FACTS.split()], ["fact", "value"])
    if times is not None:
        clock = [
            (*key, clock, ratio + more, saved * (key[1] == "learned"), 2.0)
            for (clock, (more, saved)), (key, ratio) in product(WHOLE.items(), times.items())
        ]
        save(folder, "timing", clock, [*KEYS, "clock", "latency_ratio", "flops_saved_pct", "noise_floor_pct"])


def built(kind: str, number: str):
    artefact = find(kind, number)
    return artefact.build([], artefact.name)


def test_the_same_weights_with_nobody_halted_stand_beside_those_that_halt(study):
    write(study)
    frame = built("table", "detection").frame
    box = frame[frame["section"] == "Learned, box weights"]
    assert box["technique"].tolist() == ["the same weights, no token halted", "Learned, box weights"]
    assert frame[frame["section"] == "Random, at the same rates"]["dial"].tolist() == [0.0, 0.5]


def test_time_is_set_against_the_operations_that_were_saved(study):
    write(study, TIMES)
    frame = built("table", "detection").frame.set_index(KEYS)
    box = frame.loc[("box", "learned", 0.5)]
    assert box["encoder_realized"] == pytest.approx(0.54 / 0.6)
    assert box["whole_realized"] == pytest.approx(0.34 / 0.4)  # its own operations, not the encoder's
    assert frame["encoder_realized"].notna().sum() == 2
    assert "0.90" in built("table", "detection").text(300)


@pytest.mark.parametrize(("times", "verdict", "why"), [
    (TIMES, "reproduced", "its encoder takes 0.95 of the dense detector's time"),
    (TIMES | {("wide_gentle", "learned", 0.5): 1.2}, "not reproduced", "its encoder takes 1.20"),
    (None, "not measured", "the wider detector was not timed"),
])  # fmt: skip
def test_a_wider_detector_is_better_only_at_no_more_time(study, times, verdict, why):
    write(study, times)
    frame = built("table", "token_halting_claims").frame
    (one,) = frame[frame["compared"].str.contains("wider")].itertuples()
    assert one.verdict == verdict
    assert why in one.why


def test_without_a_study_every_statement_says_what_makes_it(study):
    table = built("table", "token_halting_claims")
    assert set(table.frame["verdict"]) == {"not measured"}
    assert table.frame["why"].str.contains("python scripts/train_halting.py detection").all()
    assert built("table", "detection").frame.empty


def test_the_figure_has_a_plot_against_time_where_there_is_a_clock(study):
    write(study)
    plain = built("figure", "detection").drawing
    write(study, TIMES)
    timed = built("figure", "detection").drawing
    assert len(timed.axes) == len(plain.axes) + 2
    assert [one.get_xlabel() for one in timed.axes].count("encoder's time, % of the dense one's") == 2


def test_a_share_of_time_is_of_the_part_that_it_stands_beside(study):
    write(study)
    parts = [
        ("dense", "layer 0", 4.0, 10.0, 100.0), ("halted", "layer 0", 1.0, 5.0, 20.0), ("halted", "decide", 0.5, None, None),
        ("dense", "embedding", 0.4, None, None), ("halted", "embedding", 0.4, None, None),
    ]  # fmt: skip
    save(study, "parts", parts, ["run", "part", "latency_ms", "tokens", "flops"])
    measured = ((8, 10.0, 6.0), (16, 20.0, 9.0))
    sizes = [(width, 64, 1, dense, halted, halted / dense, 0.4, 0.6, 50.0, 1.0, 0.0) for width, dense, halted in measured]
    ratio = ["latency_ratio", "latency_ratio_low", "latency_ratio_high", "flops_saved_pct", "noise_floor_pct", "load_average"]
    save(study, "sizes", sizes, ["width", "pillars", "scenes_a_pass", "dense_ms", "halted_ms", *ratio])
    cost = [(seed, "dense", 10, 6.0 + seed, 60.0 + 10 * seed) for seed in (0, 2)]
    save(study, "cost", cost, ["seed", "what", "count", "seconds_each", "seconds"])
    frame = built("table", "detection_time").frame
    parts = frame[frame["panel"] == "parts"].set_index("what")
    assert parts.loc["the whole encoder", "halted_ms"] == 1.5
    assert parts.loc["all layers", "halted_ms"] == 1.0
    assert parts.loc["all layers", "halted_flops"] == 20.0
    assert pd.isna(parts.loc["the whole encoder", "halted_flops"])  # the ledger has not all of its parts here
    assert parts.loc["points to boxes", "dense_ms"] == pytest.approx(4.4)
    sizes = frame[frame["panel"] == "sizes"].set_index("width")
    assert sizes.loc[8, "realized"] == pytest.approx(0.8)
    assert sizes.loc[16, "halted_ms"] / sizes.loc[16, "half_ms"] == pytest.approx(0.9)  # of what is half as wide
    cost = frame[frame["panel"] == "cost"].set_index("what")["seconds"]
    assert cost["three seeds, two processes"] == pytest.approx(1.5 * 70)
    (plot,) = built("figure", "detection_size").drawing.axes
    assert plot.lines[0].get_ydata().tolist() == pytest.approx([0.8, 1.1])
