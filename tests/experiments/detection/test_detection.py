"""The detection study's table, figure and statements, from frames: with a clock, without one, and without a study."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from quicksilver.report.artefacts import find

KEYS = ["detector", "policy", "dial"]
ROWS = [  # detector, policy, dial, tokens, FLOPs saved, AP
    ("no_layers", "dense", 0.0, 0.0, 99.0, 0.2),
    ("control", "dense", 0.0, 1.0, 0.0, 0.5),
    ("box", "dense", 0.0, 1.0, 0.0, 0.45),
    ("box", "learned", 0.5, 0.4, 60.0, 0.45),
    ("random", "dense", 0.0, 1.0, 0.0, 0.4),
    ("random", "random", 0.5, 0.4, 60.0, 0.3),
    ("wide_control", "dense", 0.0, 1.0, -90.0, 0.6),
    ("wide_box", "learned", 0.5, 0.4, 10.0, 0.55),
]
TIMES = {("control", "dense", 0.0): 1.0, ("box", "learned", 0.5): 0.46, ("wide_box", "learned", 0.5): 0.95}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A folder for frames, read by the experiments."""
    module = find("table", "detection").experiment.study
    monkeypatch.setattr(module, "folder", lambda: tmp_path)
    return tmp_path


def write(folder: Path, times: dict[tuple[str, str, float], float] | None = None) -> None:
    each = pd.DataFrame(
        [(seed, *row[:3], row[3], 1e9, row[4], 0.5, row[5] + seed / 100, row[5] - 0.1) for seed in (0, 1) for row in ROWS],
        columns=["seed", *KEYS, "tokens", "executed_flops", "executed_flops_saved_pct", "kept_in_box", "ap", "ap_unrecycled"],
    )
    each.to_csv(folder / "evaluations.csv", index=False)
    gaps = [
        ("box", "learned", 0.5, against, recycled, 0.1, 0.05, 0.15)
        for against in ("random", "norm", "uniform", "dense control")
        for recycled in (True, False)
    ]
    pd.DataFrame(gaps, columns=[*KEYS, "against", "recycled", "difference", "low", "high"]).to_csv(
        folder / "differences.csv", index=False
    )
    facts = (
        "pillars",
        "layers",
        "width",
        "seeds",
        "scenes",
        "steps",
        "tuning_steps",
        "validation_scenes",
        "target_tokens",
        "torch",
    )
    pd.DataFrame({"fact": facts, "value": 1}).to_csv(folder / "about.csv", index=False)
    if times is not None:
        clock = [(*key, ratio, 2.0) for key, ratio in times.items()]
        pd.DataFrame(clock, columns=[*KEYS, "latency_ratio", "noise_floor_pct"]).to_csv(folder / "timing.csv", index=False)


def built(kind: str, number: str):
    artefact = find(kind, number)
    return artefact.build([], artefact.name)


def test_the_same_weights_with_nobody_halted_stand_beside_those_that_halt(study):
    write(study)
    frame = built("table", "detection").frame
    box = frame[frame["section"] == "Learned, box weights"]
    assert box["technique"].tolist() == ["the same weights, nobody halted", "Learned, box weights"]
    assert frame[frame["section"] == "Random, at the same rates"]["dial"].tolist() == [0.0, 0.5]


def test_time_is_set_against_the_operations_that_were_saved(study):
    write(study, TIMES)
    frame = built("table", "detection").frame.set_index(KEYS)
    assert frame.loc[("box", "learned", 0.5), "time_of_flops_saved"] == pytest.approx(0.54 / 0.6)
    assert frame["time_of_flops_saved"].notna().sum() == 2
    assert "0.90" in built("table", "detection").text(300)


@pytest.mark.parametrize(
    ("times", "verdict", "why"),
    [
        (TIMES, "reproduced", "it takes 0.95 of the dense detector's time"),
        (TIMES | {("wide_box", "learned", 0.5): 1.2}, "not reproduced", "it takes 1.20"),
        (None, "not measured", "the wider detector was not timed"),
    ],
)
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
    assert [one.get_xlabel() for one in timed.axes].count("time of one scene, % of the dense detector's") == 2
