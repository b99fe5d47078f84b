"""Losses of a task are paired by example; a task at chance has no verdict; the table says both."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from fake_tasks import COUNT, record, wrong

from quicksilver.experiments.tasks import scores
from quicksilver.measure.task import EXAMPLES
from quicksilver.report.artefacts import Outcome, find
from quicksilver.report.claims.reported import reported
from quicksilver.runs.choices import choices
from quicksilver.runs.config import compose
from quicksilver.runtime.errors import ConfigError


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
    assert found is not None
    assert found.value == pytest.approx(5)
    assert of({row.key: Outcome(row)}) is None
    with pytest.raises(ConfigError, match=r"accuracy 52\.0 on 200 examples is not above chance"):
        of({row.key: Outcome(row, run, chance)})


def test_the_table_says_what_was_lost_and_what_could_have_been_seen(tmp_path: Path) -> None:
    dense = record(tmp_path, "dense", wrong(*range(20)), dense=True)
    run = record(tmp_path, "run", wrong(*range(40)), saved=0.4)
    outcomes = []
    for row in scores.rows():
        task, system = row.key.split(".")
        if task != "sst2":
            outcomes.append(Outcome(row, reason="no record"))
        else:
            outcomes.append(Outcome(row, dense if system == "dense" else run, dense))
    table = scores.table04_tasks(outcomes, "table04")
    text = table.text()
    assert "94.8" in text
    assert "Ours: least attended stop: SST-2 -10.0" in text
    assert "seen from" in text
    frame = table.frame.set_index("key")
    assert frame.loc["sst2.attention", "executed_flops_saved_pct"] == pytest.approx(40)
    assert frame.loc["sst2.attention", "deciding_depth"] == pytest.approx(9.6)
    assert pd.isna(frame.loc["cola.dense", "score"])


def test_a_score_has_its_interval(tmp_path: Path) -> None:
    found = scores.score(record(tmp_path, "run", wrong(*range(40)), saved=0.4))
    assert found.value == pytest.approx(80)
    assert 70 < found.low < 80 < found.high < 90


def test_rows_compose_and_claims_are_there() -> None:
    rows = scores.rows()
    assert len({row.key for row in rows}) == len(rows) == len(scores.TASKS) * len(scores.SYSTEMS)
    assert {name for row in rows for name in row.needs} <= set(choices("modules"))
    for row in [row for row in rows if row.key.startswith("rte")]:
        config = compose(row.words(()))
        assert config.model.name == scores.MODEL
        assert config.dataset.task is not None
    assert compose(rows[0].words(("model=gpt2", "dataset=c4"))).model.name == "gpt2"
    assert all(claim.rpartition(".")[0] in reported() for claim in find("table", "4").answered)
