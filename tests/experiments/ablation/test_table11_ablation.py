"""Table 11: the rows that are run, and what is printed of their records."""

from __future__ import annotations

from pathlib import Path

import fakes
import pytest

from quicksilver.experiments.sweeps import table_fair_trial as fair_trial
from quicksilver.records.store import Store
from quicksilver.report.artefacts import Outcome, find
from quicksilver.report.claims.reported import reported
from quicksilver.report.comparison import COLUMNS
from quicksilver.runs.choices import choices
from quicksilver.runs.config import compose
from quicksilver.runs.parts import build_modules

ARTEFACT = find("table", "11")
ROWS = ARTEFACT.experiment.rows()
AVAILABLE = [row for row in ROWS if set(row.needs) <= set(choices("modules"))]


def outcomes(results: Path) -> list[Outcome]:
    """Every row with a record of its own, apart from a few that show each reason for none."""
    found = []
    dense = {panel: fakes.make(results, f"dense {panel}", panel) for panel in ("all", "continuation")}
    for number, row in enumerate(ROWS):
        if row.key == "baseline":
            found.append(Outcome(row, dense[row.panel], dense[row.panel]))
        elif row.key == "cumulative.quantization":
            found.append(Outcome(row, reason="not in this version"))
        elif (row.panel, row.key) == ("all", "isolated.kv_skipping"):
            found.append(Outcome(row, reason="refused under all: looks ahead"))
        elif (row.panel, row.key) == ("all", "cumulative.halting"):
            found.append(Outcome(row, reason="failed"))
        else:
            record = fakes.make(
                *(results, f"{row.panel} {row.key}", row.panel),
                **{"saved": 0.2, "faster": 0.005 * number, "per_token": 0.03, "null_per_token": 0.02},
                lookahead=row.key == "budget.drift",
            )
            found.append(Outcome(row, record, Store(results).dense_of(record)))
    return found


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return ARTEFACT.experiment.table(outcomes(tmp_path_factory.mktemp("results")), ARTEFACT.name)


def line(text: str, panel: str, technique: str) -> str:
    part = text[text.index(f"Protocol {panel}:") :]
    return next(found for found in part.splitlines() if found.strip().startswith(technique))


def test_every_row_of_the_paper_has_its_row_in_both_panels():
    paper = {claim for claim in reported() if claim.startswith("table11.")}
    for panel in ("all", "continuation"):
        rows = [row for row in ROWS if row.panel == panel]
        assert {row.reported for row in rows if row.reported} == paper
        assert len({row.key for row in rows}) == len(rows)


def test_halting_alone_and_halting_first_are_one_run():
    for panel in ("all", "continuation"):
        pair = [row.overrides for row in ROWS if row.panel == panel and row.key in ("isolated.halting", "cumulative.halting")]
        assert pair[0] == pair[1]


@pytest.mark.parametrize("row", AVAILABLE, ids=lambda row: f"{row.panel} {row.key}")
def test_every_row_that_this_version_can_run_is_a_valid_run(row):
    config = compose(row.overrides)
    assert config.protocol.name == row.panel
    assert len(build_modules(config.modules)) == len(config.modules)
    assert bool(config.modules) == (row.key != "baseline")


def test_the_compared_signals_differ_in_nothing_else():
    budgets, signals = [], []
    for row in AVAILABLE:
        if row.key.startswith("budget.") and row.key != "budget.fusion":
            module = dict(compose(row.overrides).modules["halting"])
            signals.append(module.pop("signal"))
            budgets.append(module)
    assert signals == [{"name": "attention", "last_queries": 64, "pool": 9}, "position", "drift"]
    assert all(budget == budgets[0] for budget in budgets)
    (fused,) = (compose(row.overrides).modules["token_fusion"] for row in AVAILABLE if row.key == "budget.fusion")
    assert (fused["fused_share"], fused["start"]) == (budgets[0]["halted_share"], budgets[0]["window"][0])


def test_the_best_chance_is_what_won_on_calibration_text_under_the_tables_own_protocol():
    best = {row.key: compose(row.overrides) for row in AVAILABLE if row.key.startswith("best.")}
    assert {key: config.dataset.part for key, config in best.items()} == dict.fromkeys(
        ("best.halting", "best.kv_skipping", "best.fusion"), "test"
    )
    for row in fair_trial.rows():
        same = {"halting.15": "best.halting", "kv_skipping.5": "best.kv_skipping", "fusion.15": "best.fusion"}.get(row.key)
        if same is not None:
            tested = compose(row.overrides)
            assert (tested.modules, tested.decision_layers) == (best[same].modules, best[same].decision_layers)


def test_the_frame_has_the_declared_columns_and_one_row_a_row(table):
    assert list(table.frame.columns) == COLUMNS
    assert list(table.frame["key"]) == [row.key for row in ROWS]


def test_reported_stands_beside_measured(table):
    text = table.text()
    assert line(text, "all", "Token halting").split()[2:5] == ["+18", "+22", "+0.12"]
    assert line(text, "all", "+ KV skipping").split()[3:6] == ["+27", "+34", "+0.16"]
    assert "+20.0" in line(text, "continuation", "oldest")
    assert line(text, "continuation", "oldest").split()[1:4] == ["-", "-", "-"]
    assert "1000 ms" in line(text, "all", "Dense baseline")
    assert "2T" in line(text, "all", "Dense baseline")


@pytest.mark.parametrize(
    ("panel", "technique", "reason"),
    [
        ("all", "+ Quantization", "not in this version"),
        ("all", "KV skipping", "refused under all:\nlooks ahead"),
        ("all", "+ Token halting", "failed"),
    ],
)
def test_a_row_without_a_record_says_why_and_shows_no_measured_number(table, panel, technique, reason):
    text = table.text()
    found = line(text, panel, technique)
    assert set(found.split()[-8:]) == {"-"}
    below = text[text.index(found) + len(found) :].splitlines()[1:]
    assert [part.strip() for part in below[: reason.count("\n") + 1]] == reason.split("\n")
    row = table.frame[(table.frame["panel"] == panel) & (table.frame["status"] == reason.replace("\n", " "))]
    measured = [name for name in COLUMNS[5:] if not name.startswith("reported_")]
    assert row[measured].isna().all(axis=None)


def test_looking_ahead_is_marked_and_explained(table):
    assert "least drift (paper) †" in table.text()
    assert "least drift (paper) †" in table.contents()["md"]
    assert sum(written.startswith("† marks results") for written in table.legend) == 1


def test_nothing_is_explained_that_is_not_there(tmp_path):
    plain = [outcome for outcome in outcomes(tmp_path) if outcome.row.key != "budget.drift"]
    assert "†" not in ARTEFACT.experiment.table(plain, "table11").text()


def test_the_notes_name_everything_the_numbers_depend_on(table):
    for panel, tokens in (("all", 511), ("continuation", 64)):
        notes = " ".join(next(found for found in table.panels if found.key == panel).notes)
        said = [
            "reference-gpt2",
            "9.0 M",
            "float32",
            "a1b2c3d4a1b2",
            "python-docs",
            "raw",
            "16 windows of 512 tokens",
            f"{tokens * 16} tokens",
        ]
        said += [
            panel,
            "batch 8",
            "compact",
            "A Processor",
            "2 threads",
            "timed on 4 windows",
            "torch 2.13.0",
            fakes.fingerprint(f"dense {panel}")[:12],
        ]
        assert [words for words in said if words not in notes] == []


def test_the_printed_table_fits_180_columns_or_as_many_as_there_are(table):
    assert max(map(len, table.text().splitlines())) <= 180
    assert [line for line in table.text(100).splitlines() if len(line) > 100] == []


def test_the_same_records_give_the_same_bytes(table, tmp_path):
    again = ARTEFACT.experiment.table(outcomes(tmp_path), ARTEFACT.name)
    assert (again.text(), again.contents()) == (table.text(), table.contents())
