"""Table 11: the rows that are run, and what is printed of their records."""

from pathlib import Path

import fakes
import pytest

from quicksilver.experiments.sweeps import table_fair_trial as fair_trial
from quicksilver.report.artefacts import Outcome, find
from quicksilver.report.claims.reported import reported
from quicksilver.report.comparison import COLUMNS
from quicksilver.runs.config import compose
from quicksilver.runs.parts import build_modules

ARTEFACT = find("table", "11")
ROWS = ARTEFACT.experiment.rows()
PANELS = ("all", "continuation")
WITHOUT = {
    ("all", "cumulative.quantization"): "no such kernel here",
    ("continuation", "cumulative.quantization"): "no such kernel here",
    ("all", "isolated.kv_skipping"): "refused under all: looks ahead",
    ("all", "cumulative.halting"): "failed",
}


def outcomes(results: Path) -> list[Outcome]:
    """Every row with a record of its own, apart from a few that show each reason for none."""
    options = {"saved": 0.2, "per_token": 0.03, "null_per_token": 0.02}

    def made(row):
        more = {"faster": 0.005 * ROWS.index(row), "lookahead": row.key == "budget.drift"}
        return WITHOUT.get((row.panel, row.key)) or options | more

    return fakes.outcomes(results, ROWS, made)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return outcomes(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def table(made):
    return ARTEFACT.experiment.table(made, ARTEFACT.name)


def line(text: str, panel: str, technique: str) -> str:
    part = text[text.index(f"Protocol {panel}:") :]
    return next(found for found in part.splitlines() if found.strip().startswith(technique))


def test_every_row_of_the_paper_has_its_row_in_both_panels_and_halting_alone_is_also_the_first_step():
    paper = {claim for claim in reported() if claim.startswith("table11.")}
    for panel in PANELS:
        rows = {row.key: row for row in ROWS if row.panel == panel}
        assert {row.reported for row in rows.values() if row.reported} == paper
        assert len(rows) == sum(row.panel == panel for row in ROWS)
        assert rows["isolated.halting"].overrides == rows["cumulative.halting"].overrides


@pytest.fixture(scope="module")
def configs():
    """The run of every row, by panel and key."""
    return {(row.panel, row.key): compose(row.overrides) for row in ROWS}


def test_every_row_is_a_valid_run(configs):
    for (panel, key), config in configs.items():
        assert config.protocol.name == panel
        assert len(build_modules(config.modules)) == len(config.modules), key
        assert bool(config.modules) == (key != "baseline")


def test_the_compared_signals_differ_in_nothing_else(configs):
    modules = {key: config.modules for (_, key), config in configs.items() if key.startswith("budget.")}
    fused = modules.pop("budget.fusion")["token_fusion"]
    budgets = [dict(found["halting"]) for found in modules.values()]
    signals = [budget.pop("signal") for budget in budgets]
    assert signals == [{"name": "attention", "last_queries": 64, "pool": 9}, "position", "drift"]
    assert all(budget == budgets[0] for budget in budgets)
    assert (fused["fused_share"], fused["start"]) == (budgets[0]["halted_share"], budgets[0]["window"][0])


def test_the_best_chance_is_what_won_on_calibration_text_under_the_tables_own_protocol(configs):
    best = {key: config for (_, key), config in configs.items() if key.startswith("best.")}
    tested = {row.key: row for row in fair_trial.rows() if row.panel == fair_trial.TEST}
    budgets = {"halting": 15, "halting_prompt": 15, "kv_skipping": 5, "fusion": 15}
    pairs = {f"best.{mechanism}": f"{mechanism}.{budget}" for mechanism, budget in budgets.items()}
    assert best.keys() == pairs.keys()
    for key, won in pairs.items():
        config = compose(tested[won].overrides)
        assert best[key].dataset.part == "test"
        assert (config.modules, config.decision_layers) == (best[key].modules, best[key].decision_layers)


def test_reported_stands_beside_measured(table):
    assert list(table.frame.columns) == COLUMNS
    assert list(table.frame["key"]) == [row.key for row in ROWS]
    text = table.text()
    assert line(text, "all", "Token halting").split()[2:5] == ["+18", "+22", "+0.12"]
    assert line(text, "all", "+ KV skipping").split()[3:6] == ["+27", "+34", "+0.16"]
    assert "+20.0" in line(text, "continuation", "oldest")
    assert line(text, "continuation", "oldest").split()[1:4] == ["-", "-", "-"]
    assert "1000 ms" in line(text, "all", "Dense baseline")
    assert "2T" in line(text, "all", "Dense baseline")


@pytest.mark.parametrize(("technique", "reason"), [
    ("+ Quantization", "no such kernel here"),
    ("KV skipping", "refused under all:\nlooks ahead"),
    ("+ Token halting", "failed"),
])  # fmt: skip
def test_a_row_without_a_record_says_why_and_shows_no_measured_number(table, technique, reason):
    text = table.text()
    found = line(text, "all", technique)
    assert set(found.split()[-8:]) == {"-"}
    below = text[text.index(found) + len(found) :].splitlines()[1:]
    assert [part.strip() for part in below[: reason.count("\n") + 1]] == reason.split("\n")
    row = table.frame[(table.frame["panel"] == "all") & (table.frame["status"] == reason.replace("\n", " "))]
    measured = [name for name in COLUMNS[5:] if not name.startswith("reported_")]
    assert row[measured].isna().all(axis=None)


def test_looking_ahead_is_marked_and_explained_where_it_is_there(table, made):
    assert all("least drift (paper) †" in text for text in (table.text(), table.contents()["md"]))
    assert sum(line.startswith("† marks results") for line in table.legend) == 1
    plain = [outcome for outcome in made if outcome.row.key != "budget.drift"]
    assert "†" not in ARTEFACT.experiment.table(plain, "table11").text()


def test_the_notes_name_everything_the_numbers_depend_on(table):
    said = ["reference-gpt2", "9.0 M", "float32", "a1b2c3d4a1b2", "python-docs", "raw", "16 windows of 512 tokens", "batch 8"]
    said += ["compact", "A Processor", "2 threads", "timed on 4 windows", "torch 2.13.0"]
    for panel, tokens in (("all", 511), ("continuation", 64)):
        notes = " ".join(next(found for found in table.panels if found.key == panel).notes)
        own = [f"{tokens * 16} tokens", panel, fakes.fingerprint(f"dense {panel}")[:12]]
        assert [words for words in (*said, *own) if words not in notes] == []


def test_the_printed_table_fits_and_the_same_records_give_the_same_bytes(table, made):
    assert max(map(len, table.text().splitlines())) <= 180
    assert max(map(len, table.text(100).splitlines())) <= 100
    again = ARTEFACT.experiment.table(made, ARTEFACT.name)
    assert (again.text(), again.contents()) == (table.text(), table.contents())
