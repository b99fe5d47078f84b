"""The picture of word classes is drawn from losses that are paired by example; what is at chance is grey and says nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_tasks import COUNT, record, wrong
from matplotlib.colors import to_hex

from quicksilver.experiments.tasks import figure03_18_word_classes as drawn
from quicksilver.report.artefacts import Outcome, find
from quicksilver.report.figure import GREY
from quicksilver.runs.choices import choices
from quicksilver.runs.config import compose
from quicksilver.runtime.errors import ConfigError


def outcomes(folder: Path, dense_wrong: np.ndarray) -> list[Outcome]:
    """Content words cost twenty answers more at each depth, their null ten, function words none."""
    dense = record(folder, "dense", dense_wrong, dense=True)
    found = []
    for row in drawn.rows():
        if not row.key.startswith("sst2"):
            continue
        more = 0 if ".function." in row.key else 10 if row.key.endswith(".random") else 20
        found.append(Outcome(row, record(folder, row.key, dense_wrong | wrong(*range(50, 50 + more)), saved=0.1), dense))
    return found


def test_rows_compose_and_their_nulls_stand_beside_them() -> None:
    rows = drawn.rows()
    assert {need for row in rows for need in row.needs} <= set(choices("modules"))
    keys = {row.key for row in rows}
    assert {
        f"sst2.{words}.{depth}{null}" for words in drawn.CLASSES for depth in drawn.DEPTHS for null in ("", ".random")
    } <= keys
    config = compose([*rows[-1].defaults, *rows[-1].overrides])
    assert config.modules["word_class_halting"]["halted"] == "content"
    assert find("figure", "3") == find("figure", "18")


def test_what_is_drawn_is_what_was_lost(tmp_path: Path) -> None:
    made = drawn.figure(outcomes(tmp_path, wrong(*range(20))), "figure")
    frame = made.frame.set_index(["words", "random", "depth_layers"])
    assert len(frame) == 12
    content = frame.loc[("content", False, 8)]
    assert content["lost"] == pytest.approx(100 * 20 / COUNT)
    assert content["lost_low"] < content["lost"] < content["lost_high"]
    assert content["beyond_random"] == pytest.approx(100 * 10 / COUNT)
    assert frame.loc[("function", False, 8)]["lost"] == 0
    assert np.isnan(frame.loc[("content", True, 8)]["beyond_random"])
    text = " ".join(made.text().split())
    assert "content after layer 8 +10.0 [" in text
    assert "Lost beyond as many random tokens" in text
    assert made.png().startswith(b"\x89PNG")


def test_a_task_at_chance_is_grey_and_says_so(tmp_path: Path) -> None:
    made = drawn.figure(outcomes(tmp_path, wrong(*range(0, COUNT, 2))), "figure")
    lines = [line for line in made.drawing.axes[0].get_lines() if len(line.get_xdata()) == len(drawn.DEPTHS)]
    assert lines
    assert {to_hex(line.get_color()) for line in lines} == {GREY}
    assert "is not above chance, so its grey lines say nothing" in " ".join(made.text().split())


def test_nothing_is_drawn_without_a_record() -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        drawn.figure([Outcome(row, reason="failed") for row in drawn.rows()], "figure")
