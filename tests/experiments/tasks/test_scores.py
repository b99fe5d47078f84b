"""Losses of a task are paired by example; a task at chance has no verdict; the table says both."""

from itertools import product
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from saying import unsaid

from quicksilver.experiments.tasks import scores
from quicksilver.measure.task import EXAMPLES, TaskResult
from quicksilver.records.record import Record
from quicksilver.report.artefacts import Outcome, find
from quicksilver.report.claims.reported import reported
from quicksilver.report.figure import GREY
from quicksilver.runs.config import compose
from quicksilver.runtime.errors import ConfigError

# --- records of task runs with made-up answers ----------------------------------------------------------------------------------
COUNT = 200
GOLD = np.arange(COUNT) % 2


def record(
    results: Path, name: str, wrong: np.ndarray[Any, Any], task: str = "sst2", *, dense: bool = False, saved: float = 0.0
) -> Record:
    """A record whose answers are wrong where `wrong` (E,) bool says so."""
    predicted = np.where(wrong, 1 - GOLD, GOLD).astype(float)
    metric = "matthews" if task == "cola" else "accuracy"
    operations = int(1e11 * (1 - saved))
    value, operated = float((predicted == GOLD).mean()), (operations,) * 3
    found = TaskResult(metric, value, {}, 0.5, COUNT, 0, 20 * COUNT, *operated, 0, 16.0 * (1 - saved))
    config = {"name": task, "task": {"metrics": [metric]}}
    made = fakes.make(
        results, name if not dense else "dense continuation", "continuation", per_token=None if dense else 0.01, measured={"task": found},
        config={"seed": 0, "model": {"name": scores.MODEL}, "dataset": config, "measure": {"name": "task"}},
    )  # fmt: skip
    frame = pd.DataFrame({"row": range(COUNT), "gold": GOLD.astype(float), "prediction": predicted, "truncated": False})
    frame.to_parquet(made.path / EXAMPLES)
    return made


def wrong(*some: int) -> np.ndarray[Any, Any]:
    return np.isin(np.arange(COUNT), some)


# --- losses and scores ----------------------------------------------------------------------------------------------------------
def test_a_loss_is_paired_by_example(tmp_path: Path) -> None:
    dense = record(tmp_path, "dense", wrong(*range(20)), dense=True)
    found = scores.lost(record(tmp_path, "run", wrong(*range(10, 40))), dense)
    assert found.value == pytest.approx(100 * (30 - 20) / COUNT)
    assert found.low < found.value < found.high
    assert found.flipped == 30  # ten are right now, twenty are wrong
    assert found.p == pytest.approx(scores.mcnemar(~wrong(*range(20)), ~wrong(*range(10, 40))))
    assert found.smallest > found.value / 3
    same = scores.lost(record(tmp_path, "same", wrong(*range(20))), dense)
    assert (same.value, same.low, same.high, same.p, same.flipped) == (0, 0, 0, 1, 0)
    own = scores.score(dense)
    assert own.value == pytest.approx(90)
    assert 80 < own.low < 90 < own.high < 96


def test_mcnemar_is_the_binomial_test_of_what_differs() -> None:
    assert scores.mcnemar(wrong(0, 1, 2, 3, 4), wrong()) == pytest.approx(2 / 2**5)
    assert scores.mcnemar(wrong(0, 1), wrong(2, 3)) == 1


def test_other_examples_do_not_pair(tmp_path: Path) -> None:
    dense, run = (record(tmp_path, name, wrong()) for name in ("dense", "run"))
    pd.read_parquet(run.path / EXAMPLES).iloc[1:].to_parquet(run.path / EXAMPLES)
    with pytest.raises(ConfigError, match="answered different examples"):
        scores.lost(run, dense)


def test_a_task_at_chance_has_nothing_to_lose(tmp_path: Path) -> None:
    good = record(tmp_path / "good", "good", wrong(*range(20)), dense=True)
    chance = record(tmp_path / "chance", "chance", wrong(*range(96)), dense=True)
    assert scores.above_chance(good)
    assert not scores.above_chance(chance)
    row = next(row for row in scores.rows() if row.key == "sst2.attention")
    of = scores.loss_of(row.key)
    run = record(tmp_path, "run", wrong(*range(30)))
    found = of({row.key: Outcome(row, run, good)})
    assert found.value == pytest.approx(5)
    assert of({row.key: Outcome(row)}) is None
    with pytest.raises(ConfigError, match=r"accuracy 52\.0 on 200 examples is not above chance"):
        of({row.key: Outcome(row, run, chance)})


def test_the_table_says_what_was_lost_and_what_could_have_been_seen(tmp_path: Path) -> None:
    dense = record(tmp_path, "dense", wrong(*range(20)), dense=True)
    run = record(tmp_path, "run", wrong(*range(40)), saved=0.4)
    outcomes = [
        Outcome(row, dense if row.key == "sst2.dense" else run, dense)
        if row.key.startswith("sst2")
        else Outcome(row, reason="none")
        for row in scores.rows()
    ]
    table = scores.table04_tasks(outcomes, "table04")
    text = table.text()
    assert unsaid(text, "94.8", "Ours: least attended stop: SST-2 -10.0", "seen from") == []
    frame = table.frame.set_index("key")
    assert frame.loc["sst2.attention", "executed_flops_saved_pct"] == pytest.approx(40)
    assert frame.loc["sst2.attention", "deciding_depth"] == pytest.approx(9.6)
    assert pd.isna(frame.loc["cola.dense", "score"])


def test_rows_compose_and_claims_are_there() -> None:
    rows = scores.rows()
    assert len({row.key for row in rows}) == len(rows) == len(scores.TASKS) * len(scores.SYSTEMS)
    for row in [row for row in rows if row.key.startswith("rte")]:
        config = compose(row.words(()))
        assert config.model.name == scores.MODEL
        assert config.dataset.task is not None
    assert compose(rows[0].words(("model=gpt2", "dataset=c4"))).model.name == "gpt2"
    assert all(claim.rpartition(".")[0] in reported() for claim in find("table", "4").answered)


# --- Figures 3 and 18: one class of words stops ----------------------------------------------------------------------------------
def outcomes(folder: Path, dense_wrong: np.ndarray) -> list[Outcome]:
    """Content words cost twenty answers more at each depth, their null ten, function words none."""
    dense = record(folder, "dense", dense_wrong, dense=True)
    found = []
    for row in scores.word_class_rows():
        if not row.key.startswith("sst2"):
            continue
        more = 0 if ".function." in row.key else 10 if row.key.endswith(".random") else 20
        found.append(Outcome(row, record(folder, row.key, dense_wrong | wrong(*range(50, 50 + more)), saved=0.1), dense))
    return found


def test_classes_compose_and_their_nulls_stand_beside_them() -> None:
    rows = scores.word_class_rows()
    wanted = product(("sst2",), scores.CLASSES, map(str, scores.DEPTHS), ("", ".random"))
    assert {".".join(one[:3]) + one[3] for one in wanted} <= {row.key for row in rows}
    config = compose([*rows[-1].defaults, *rows[-1].overrides])
    assert config.modules["word_class_halting"]["halted"] == "content"
    assert find("figure", "3") == find("figure", "18")


def test_what_is_drawn_is_what_was_lost(tmp_path: Path) -> None:
    made = scores.figure03_18_word_classes(outcomes(tmp_path, wrong(*range(20))), "figure")
    frame = made.frame.set_index(["words", "random", "depth_layers"])
    assert len(frame) == 12
    content = frame.loc[("content", False, 8)]
    assert content["lost"] == pytest.approx(100 * 20 / COUNT)
    assert content["lost_low"] < content["lost"] < content["lost_high"]
    assert content["beyond_random"] == pytest.approx(100 * 10 / COUNT)
    assert frame.loc[("function", False, 8)]["lost"] == 0
    assert np.isnan(frame.loc[("content", True, 8)]["beyond_random"])
    text = " ".join(made.text().split())
    assert unsaid(text, "content after layer 8 +10.0 [", "Lost beyond as many random tokens") == []
    assert made.png().startswith(b"\x89PNG")


def test_a_task_at_chance_is_grey_and_says_so_and_nothing_is_drawn_without_a_record(tmp_path: Path) -> None:
    made = scores.figure03_18_word_classes(outcomes(tmp_path, wrong(*range(0, COUNT, 2))), "figure")
    lines = [line for line in made.drawing.axes[0].get_lines() if len(line.get_xdata()) == len(scores.DEPTHS)]
    assert lines
    assert {to_hex(line.get_color()) for line in lines} == {GREY}
    assert "is not above chance, so nothing can be lost there" in " ".join(made.text().split())
    with pytest.raises(ConfigError, match="nothing to draw"):
        scores.figure03_18_word_classes([Outcome(row, reason="failed") for row in scores.word_class_rows()], "figure")
