"""`quicksilver reproduce`, the command behind `make reproduce-table`: what a person asks for, what goes wrong, what is said. No model is run here."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import fakes
import pandas as pd
import pytest
from fake_harness import Harness
from repository import ROOT, below, git
from saying import unsaid
from thinning import first

import quicksilver.report.artefacts as report_artefacts
import quicksilver.runs.config as harness_config
import quicksilver.runs.run as harness_run
from quicksilver.measure.latency import Latency
from quicksilver.records import archive
from quicksilver.records.store import Store
from quicksilver.records.times import timed_processes
from quicksilver.report.artefacts import artefacts, find
from quicksilver.report.comparison import Committed, committed, distance
from quicksilver.report.reproduction import FOUND, UNUSABLE, VARIANTS, fill_readme, name_of, with_cells
from quicksilver.report.table import Heading, PrintedPanel, PrintedRow, Section, Written, read
from quicksilver.runs import jobs as answers
from quicksilver.runs.jobs import FAILED, REFUSED
from quicksilver.runtime.errors import ConfigError

OF_ONE = {"isolated.halting", "isolated.kv_skipping", "isolated.quantization"}
ASKED_ABOUT = {*OF_ONE, "cumulative.halting", "cumulative.kv_skipping"}


@pytest.fixture(autouse=True)
def fewer_rows(monkeypatch):
    """Half of Table 11: every row is composed, made and judged anew in most tests."""
    experiment = find("table", "11").experiment
    steps = experiment.steps
    monkeypatch.setattr(experiment, "steps", lambda *of, **more: (row for row in steps(*of, **more) if row.key in ASKED_ABOUT))
    for place, name in ((experiment.fair_trial, "BEST"), (experiment, "BESIDE"), (experiment, "ANSWERS")):
        monkeypatch.setattr(place, name, {})


@pytest.fixture
def reproduce(harness, prints):
    """Gives words (those of Table 11) to `quicksilver reproduce`, which must end with this exit code; returns what it prints."""
    return lambda *words, code=0: prints("reproduce", *(words or ("table", "11")), f"results_dir={harness.results}", code=code)


def frame(harness: Harness, name: str = "table11") -> pd.DataFrame:
    return pd.read_csv(harness.results / "tables" / f"{name}.csv").set_index(["panel", "key"])


FILES = [
    "figure08_15_speed.py", "figure02_mechanisms.py", "figure02b_kv.py", "figure_factorial.py", "figure_.py", "family/table02_pos.py",
    "family/table11_ablation.py", "family/table_factorial.py", "notes.py", "__init__.py", "table3.txt", "table_2x.txt",
]  # fmt: skip
FAMILY = """
from quicksilver.report.artefacts import artefact

def figure_of(outcomes, name):
    "A helper."

@artefact(lambda: [1])
def figure11_lives(outcomes, name):
    "Figure 11: a title."
    return outcomes, name

@artefact(
    rows=list,
    reads=["trace"],
)
def figure_lives(outcomes, name):
    "A title."
"""


def test_files_are_found_by_their_names_and_answer_all_their_numbers_and_parts(tmp_path, monkeypatch):
    (tmp_path / "family").mkdir()  # families are folders
    for name in FILES:
        (tmp_path / name).write_text('"""Figures 8 and 15: a title."""\n')
    (tmp_path / "family" / "lives.py").write_text(FAMILY)  # several in one file
    monkeypatch.setattr(report_artefacts, "experiments_folder", lambda: tmp_path)
    assert [(one.kind, one.number, one.name) for one in artefacts(tmp_path)] == [
        ("table", "2", "table02"), ("table", "11", "table11"), ("table", "factorial", "table_factorial"), ("figure", "2", "figure02"),
        ("figure", "2b", "figure02b"), ("figure", "8/15", "figure08_15"), ("figure", "11", "figure11"),
        ("figure", "factorial", "figure_factorial"), ("figure", "lives", "figure_lives"),
    ]  # fmt: skip
    assert {artefact.title.lower() for artefact in artefacts(tmp_path)} == {"a title"}
    answers = {"figure08_15": ("8", "15", "08", "008", "8/15"), "figure02": ("2", "2a", "2d"), "figure02b": ("2B",)}
    answers["figure_factorial"] = ("factorial", "Factorial")
    assert {number: find("figure", number).name for numbers in answers.values() for number in numbers} == {
        number: name for name, numbers in answers.items() for number in numbers
    }
    assert find("figure", "11").experiment.rows() == [1]
    assert find("figure", "11").experiment.figure([], "made") == ([], "made")
    assert find("figure", "lives").reads == ("trace",)
    for number in ("1", "5", "8/2", "b", "", "factoria", "factorials", "11_factorial"):
        with pytest.raises(ConfigError, match=r"There is no figure .*: 2, 2b, 8/15, 11, factorial, lives; `list` says"):
            find("figure", number)


def test_a_figure_without_its_library_says_what_to_install(tmp_path):
    (tmp_path / "figure08_speed.py").write_text('"""Figure 8: a title."""\nimport matplotlib_of_another_world\n')
    (artefact,) = artefacts(tmp_path)
    with pytest.raises(ConfigError, match="figure 8 needs matplotlib_of_another_world.*pip install"):
        _ = artefact.experiment


def test_it_runs_what_is_missing_and_only_that(harness, reproduce):
    shown = reproduce().out
    assert len(harness.made) == len(set(harness.made))
    assert {"dense all", "halting all", "dense continuation", "halting+kv_skipping continuation"} <= set(harness.made)
    # KV skipping alone follows attention, which is later: refused where every position is scored.
    assert "kv_skipping all" not in harness.made
    assert frame(harness).loc[("all", "isolated.kv_skipping"), "status"] == REFUSED
    assert unsaid(shown, "refused under all:", str(harness.results / "tables" / "table11.md")) == []

    written = below(harness.results / "tables")
    harness.made.clear()
    reproduce()
    assert harness.made == []
    assert below(harness.results / "tables") == written

    (harness.results / "cache" / "answers.json").unlink()  # what is there is found without it
    assert reproduce("table", "11", "plan=true").out == "Every run has its record: nothing would run.\n"


def test_a_failed_run_is_named_and_the_rest_is_built(harness, reproduce):
    harness.broken = {"halting all"}
    said = reproduce(code=1).err
    table = frame(harness)
    assert table.loc[("all", "isolated.halting"), "status"] == table.loc[("all", "cumulative.halting"), "status"] == "failed"
    assert table.loc[("all", "cumulative.kv_skipping"), "status"] == "measured"
    assert table.loc[("continuation", "isolated.halting"), "status"] == "measured"
    assert said.count("the logits of halting all are not finite") == 1
    command = ("quicksilver run", "protocol=all 'modules=[halting]'")
    assert unsaid(said, "all isolated.halting, all cumulative.halting", *command) == []

    harness.broken = set()
    reproduce()
    assert "failed" not in set(frame(harness)["status"])


def test_when_everything_fails_there_is_no_table(harness, reproduce):
    harness.broken = {"dense all"}
    reproduce(code=1)
    statuses = frame(harness)["status"]
    assert "measured" not in set(statuses["all"])  # without its dense run a panel has no number
    assert "measured" in set(statuses["continuation"])
    shutil.rmtree(harness.results)
    harness.broken = {"dense all", "dense continuation"}
    assert reproduce(code=1).out == ""
    assert not (harness.results / "tables").exists()


@pytest.mark.parametrize("what", first([["table", "11"], ["all"]]))
def test_a_model_that_cannot_be_had_is_one_message(reproduce, what, monkeypatch):
    refusal = ConfigError("gpt2-large: the hub cannot be reached. Without a network: model=reference-gpt2.")
    monkeypatch.setattr(harness_run, "plan", Mock(side_effect=refusal))
    monkeypatch.setattr("quicksilver.runs.estimate.check_time", lambda configs, yes: None)
    assert reproduce(*what, "model=gpt2-large", code=2).err.count("cannot be reached") == 1


@pytest.mark.parametrize(("words", "name"), [
    ("model=gpt2-large dataset=wikitext103", "-gpt2-large-wikitext103"), ("model=far-gpt2 dataset=python-source", ""),
    ("measure.latency.repeats=9", "-far-gpt2-python-source-[0-9a-f]+"),
])  # fmt: skip
def test_only_the_default_has_the_plain_name(words, name):
    overrides = words.split()
    assert re.fullmatch(f"table11{name}", name_of("table11", harness_config.compose(overrides), overrides))


def test_a_table_of_which_records_are_missing_never_overwrites_the_repositorys(harness, reproduce, monkeypatch):
    reproduce()
    written = harness.results / "tables" / "table11.md"
    before = written.read_bytes()
    monkeypatch.setattr(archive, "names", lambda folder: [fakes.fingerprint("halting all")])
    shutil.rmtree(Store(harness.results).path(fakes.fingerprint("halting all")))
    harness.broken = {"halting all"}
    reproduce(code=1)
    assert written.read_bytes() == before
    assert written.with_name("table11-mine.md").exists()


# --- against the committed table -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("there", "said"), [
    ({}, "2 rows compared, no difference"),
    ({"value": [1.0, 5.0]}, "at most 3 apart (value)"),
    ({"some": [1.0, 4.0]}, "not comparable, some is nan here and 4.0 there"),  # no empty column hides a difference
    ({"value": [1.0, None]}, "not comparable, value is 2 here and nan there"),
    ({"token_digest": "1234567"}, "not comparable, token_digest is a text here"),
    ({"weights_digest": "other"}, "not comparable, weights_digest is weights here"),
    ({"windows": 64}, "not comparable, windows is 16 here"),
])  # fmt: skip
def test_only_the_same_text_weights_windows_and_columns_are_compared(there, said):
    same = {"token_digest": "a text", "weights_digest": "weights", "windows": 16}
    frame = pd.DataFrame({"key": ["a", "b"], "nothing": [None, None], "value": [1.0, 2.0], "some": [1.0, None]}).assign(**same)
    table = frame.assign(panel="p", status="measured", model="m", dtype="float32", data="d", tokens=9, execution="compact")
    for here in (frame, table):  # a figure's, and a table's
        found = distance(here, Committed(here.assign(**there), "x"), "x.csv")
        assert said in found
        assert ("apart" in found) == ("apart" in said)
    other = Committed(table.assign(status=["measured", "failed"], value=[1.5, 9.0]), "x")
    assert "1 rows compared, at most 0.5 apart (value)" in distance(table, other, "x.csv")


def test_the_committed_version_is_that_of_head(tmp_path):
    of_the_clone = ROOT / "results" / "tables" / "table11.csv"
    (tmp_path / "tables").mkdir()
    csv = Path(shutil.copy(of_the_clone, tmp_path / "tables"))
    made = pd.read_csv(csv)
    assert committed(csv).origin == str(of_the_clone)  # in a folder of one's own, what the package's clone has
    assert committed(csv.rename(csv.with_name("own.csv"))).origin.endswith("as it stood")
    csv.with_name("own.csv").rename(csv)
    git(csv.parent, "init")
    assert committed(csv) is None
    git(csv.parent, "add", ".")
    git(csv.parent, "commit", "-m", "tables")
    csv.write_text("panel,key\n")
    assert committed(csv).origin.endswith("at HEAD")
    assert "no difference" in distance(made, committed(csv), "table11.csv")
    assert committed(csv.with_name("table12.csv")) is None


# --- README ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["table_front", f"table_front-{VARIANTS[0].name}"])
def test_the_readme_takes_tables_figures_rows_alone_and_the_counts_of_verdicts(tmp_path, name):
    readme, results = tmp_path / "README.md", tmp_path / "results"
    marked = ("table11", "figure08_15", f"{name}.rows", "claims")
    readme.write_text("before\n" + "".join(f"<!-- {one}:begin -->\nold\n<!-- {one}:end -->\n" for one in marked))
    panel = PrintedPanel("p", "P", (Heading("", "what"),), (Section("", (PrintedRow(0, (("a",),)),)),), ("Model: m.", "Text: t."))
    found = (f"{FOUND}it saves 4%.", "legend")
    for lacks, folder, written in (
        ("table 11", "tables", Written("table", "table11", "Title", (), (), legend=("a",))),
        ("figure 8", "figures", Written("figure", "figure08_15", "Title", (), (), pictures=("figure08_15.png",))),
        (f"table front{' model=' * ('-' in name)}", "tables", Written("table", name, "Title", ("x",), ((1,),), (panel, panel), found)),
        ("quicksilver claims", ".", Written("table", "claims", "3 reproduced", (), ())),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=lacks):
            fill_readme(readme, results)
        (results / folder).mkdir(parents=True, exist_ok=True)
        (results / folder / f"{written.name}.json").write_bytes(written.json())
    for _ in range(2):
        assert f"table11, figure08_15, {name}, claims" in fill_readme(readme, results)
        table, figure, rows, claims, _ = readme.read_text().split(":end -->\n")
        assert table == "before\n<!-- table11:begin -->\n### Title\n\n**How to read it**\n\n- a\n<!-- table11"
        assert f"]({results}/figures/figure08_15.png)\n<!--" in figure
        assert [rows.count(part) for part in ("| a |", "- It saves 4%.\n", "Model: m. Text: t.", "legend")] == [1, 1, 1, 0]
        assert "[3 reproduced]" in claims


# --- all of them -----------------------------------------------------------------------------------------------------------
EXPERIMENTS = {
    "table01_data.py": """
import pandas as pd
from quicksilver.report.table import Column, Panel, Table
def rows():
    return ()
def table(outcomes, name):
    frame = pd.DataFrame({"panel": ["p"], "section": [""], "a": [1.5]})
    return Table(name, "Data alone", frame, (Panel("p", "P", (Column("", "a", lambda row: (f"{row['a']}",)),)),))
""",
    "figure04_curve.py": """
import pandas as pd
from quicksilver.report.artefacts import Row
from quicksilver.report.figure import Figure, panels, style
def rows():
    return [Row("", "", m, m, ("protocol=all", f"modules=[{m}]")) for m in ("halting", "adaptive_quantization")]
def figure(outcomes, name):
    frame = pd.DataFrame([{"key": o.row.key, "ppl": o.record.quality.ppl if o.record else None} for o in outcomes])
    with style():
        drawing, axes = panels()
        axes[0, 0].bar(frame["key"], frame["ppl"])
    return Figure(name, "Perplexity", frame, drawing, ("Nothing more.",))
""",
    "table09_broken.py": """
from quicksilver.report.artefacts import Row
def rows():
    return [Row("", "", "k", "k", ("protocol=all", "modules=[kv_skipping]", "modules.kv_skipping.criterion=attention", "modules.kv_skipping.tau_kv=0.1"))]
def table(outcomes, name):
    raise ZeroDivisionError("a fault in this file")
""",
}


@pytest.fixture
def experiments(tmp_path, monkeypatch):
    folder = tmp_path / "experiments"
    folder.mkdir()
    for name, code in EXPERIMENTS.items():
        (folder / name).write_text(f'"""Table 1: a title."""\n{code}')
    monkeypatch.setattr(report_artefacts, "experiments_folder", lambda: folder)
    return folder


def files(harness: Harness) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for kind in ("tables", "figures") for p in (harness.results / kind).glob("*")}


def test_one_artefact_that_fails_does_not_stop_the_others(harness, experiments, reproduce):
    said = reproduce("all", code=1)
    kinds = {"table01": ("md", "csv", "tex", "json"), "figure04": ("png", "csv", "json")}
    assert set(files(harness)) == {f"{name}.{kind}" for name, its in kinds.items() for kind in its}
    assert unsaid(said.err, "table 9: nothing could be measured", "quicksilver reproduce table 9") == []  # refused under all
    assert "2 of 3" in said.out

    mended = EXPERIMENTS["table09_broken.py"].replace("criterion=attention", "criterion=halted")
    (experiments / "table09_broken.py").write_text(mended)
    harness.broken = {"adaptive_quantization all"}
    before = files(harness)
    harness.made.clear()
    shutil.rmtree(Store(harness.results).path(fakes.fingerprint("adaptive_quantization all")))
    said = reproduce("all", code=1)
    assert harness.made == ["kv_skipping all"]  # the rest has its records
    assert unsaid(said.err, "ZeroDivisionError", "table 9: a fault in this file", "figure 4: 1 of 2 rows have no record") == []
    assert files(harness)["figure04.csv"] != before["figure04.csv"]

    harness.broken = set()
    (experiments / "table09_broken.py").unlink()
    assert "2 of 2" in reproduce("all").out
    assert files(harness) == before


def test_what_is_there_is_found_without_composing_or_planning(harness, experiments, reproduce, monkeypatch):
    (experiments / "table09_broken.py").unlink()
    reproduce("all")
    before = files(harness)
    composed: list[tuple[str, ...]] = []
    compose = harness_config.compose
    with monkeypatch.context() as patch:
        patch.setattr(harness_config, "compose", lambda overrides=(): composed.append(tuple(overrides)) or compose(overrides))
        patch.setattr(harness_run, "plan", None)
        for more in ([], ["records=any"]):  # a default that is typed finds what is remembered
            reproduce("all", *more)
    assert files(harness) == before
    assert not any("modules" in word for line in composed for word in line)  # no row's

    shutil.rmtree(Store(harness.results).path(fakes.fingerprint("dense all")))
    harness.made.clear()
    reproduce("all")
    assert harness.made == ["dense all"]  # a record without its dense one is no answer


def test_a_changed_file_makes_everything_forgotten_and_a_plan_runs_nothing(harness, experiments, reproduce, monkeypatch):
    (experiments / "table09_broken.py").unlink()
    asked = []
    with monkeypatch.context() as patch:
        estimates = lambda configs, differing: asked.append([one.label for one in configs]) or []
        patch.setattr("quicksilver.runs.estimate.estimates", estimates)
        assert reproduce("all", "plan=true").out == "Every run has its record: nothing would run.\n"
    assert len(asked[0]) >= 2
    assert (harness.made, files(harness)) == ([], {})
    reproduce("all")
    monkeypatch.setattr(answers, "_stamp", lambda: "another")
    monkeypatch.setattr(harness_run, "plan", None)
    with pytest.raises(TypeError):
        reproduce("all")


def test_a_figure_is_made_like_a_table(harness, experiments, reproduce):
    figures = harness.results / "figures"
    said = reproduce("figure", "4").out
    assert unsaid(said, "Drawn: 2 rows of key, ppl.", str(figures / "figure04.png")) == []
    assert ".svg" not in said
    assert str(figures / "figure04.svg") in reproduce("figure", "4", "svg=true").out


def test_a_damaged_record_costs_its_row_and_no_other(harness, reproduce):
    reproduce()
    before = frame(harness)
    windows = Store(harness.results).path(fakes.fingerprint("halting all")) / "windows.parquet"
    windows.write_bytes(b"\0" * windows.stat().st_size)  # as long as before, which a look at its size does not see
    record = Store(harness.results).path(fakes.fingerprint("adaptive_quantization all")) / "record.json"
    record.write_text(json.dumps(json.loads(record.read_text(encoding="utf-8")) | {"paper_flops": "many"}), encoding="utf-8")
    said = reproduce(code=1).err
    after = frame(harness)
    lost = {("all", "isolated.halting"), ("all", "isolated.quantization"), ("all", "cumulative.halting")}
    assert lost <= set(after.index[after["status"].isin([UNUSABLE, FAILED])])
    kept = after.index[after["status"] == "measured"]
    assert len(kept) > len(after) / 2
    assert after.loc[kept, "ppl"].equals(before.loc[kept, "ppl"])
    assert unsaid(said, "windows.parquet is not the file that was recorded", "Move that folder away") == []


def test_numbers_of_the_findings_are_cells_of_committed_tables(tmp_path):
    page = (ROOT / "results" / "findings.md").read_text(encoding="utf-8")
    assert page.count("<!-- ") > 30
    assert with_cells(page, ROOT / "results") == page
    (tmp_path / "tables").mkdir()
    rows = (("all", "40", 12.346), ("all", "50", -3.0))
    (tmp_path / "tables" / "table11.json").write_bytes(Written("table", "table11", "T", ("panel", "key", "ppl"), rows).json())
    at = "<!-- table11 panel=all,key={} ppl -->"
    assert with_cells(f"+1.00%{at.format(40)} 9.9{at.format(50)} 7", tmp_path) == f"+12.35%{at.format(40)} -3.0{at.format(50)} 7"
    for wrong, says in ((at.format(60), "names 0 rows"), (at.format(40).replace("11", "12"), "table12.json is not there")):
        with pytest.raises(ConfigError, match=says):
            with_cells(f"1{wrong}", tmp_path)


LLAMA, GPT2 = "table_front-reference-llama-python-docs", "table_front-reference-gpt2-python-docs"
FAR_LLAMA = "table_front-far-llama-python-source"
SEEDS, USED = "table_seeds", "table_context_used"
SAVED, COST = "prompt_executed_flops_saved_pct", "delta_ppl_pct"


@pytest.mark.parametrize(("said", "cells"), [
    ("default halting costs reference-gpt2 {:+.1f}%, not {:+.1f}%", [
        (SEEDS, f"{model}.continuation", "isolated.halting", COST) for model in ("reference-gpt2-seed43", "reference-gpt2")]),
    ("predicted K/V save {:.1f}% for {:+.1f}%, truncation {:.1f}% for {:+.1f}%; KL × 100 is {:.1f} against {:.1f}. "
     "Tuned halting saves {:.1f}% for {:+.1f}%", [
        *((GPT2, "continuation", key, column) for key in ("40", "truncated") for column in (SAVED, COST)),
        *((GPT2, "continuation", key, "kl_nats") for key in ("40", "truncated")),
        *((GPT2, "continuation", "tuned.halting.15", column) for column in (SAVED, COST))]),
    ("predicted K/V save {:.1f}% for {:+.1f}% [{:.1f}, {:.1f}] of perplexity, truncation {:.1f}% for {:+.1f}%", [
        (FAR_LLAMA, "continuation", key, column) for key, ends in (("40", ("", "_low", "_high")), ("truncated", ("",)))
        for column in (SAVED, *(f"{COST}{end}" for end in ends))]),
    ("KL × 100 is {:.1f} against {:.1f}. On distant context perplexity changes by {:+.1f}% against {:+.1f}%, and {:.0f}% against {:.0f}% of the", [
        (FAR_LLAMA, "continuation", key, column) for column in ("kl_nats", f"recall_{COST}", "agreement") for key in ("40", "truncated")]),
    ("truncation changes far-gpt2's perplexity by {:+.1f}%, prediction by {:+.1f}%; KL × 100 is {:.1f} against {:.1f}", [
        (USED, "far-gpt2.docs.960", key, column) for column in (COST, "kl_nats") for key in ("truncated", "40")]),
    ("KL × 100 on source code is {:.1f} against {:.1f}", [(USED, "far-llama.source.960", key, "kl_nats") for key in ("truncated", "40")]),
    ("50% schedule saves {:.0f} to {:.0f}%", [(USED, "far-gpt2.source.960", "50", SAVED), ("table_lengths", "128 tokens", "50", SAVED)]),
    ("for truncation ({:+.1f}% against {:+.1f}%)", [(LLAMA, "continuation", key, f"recall_{COST}") for key in ("truncated", "40")]),
    ("Truncation saves more time: {:.0f}% of a prompt's, predicted K/V {:.0f}%", [
        ("table11-far-llama-python-source", "continuation", key, "prompt_speedup_pct") for key in ("truncated.last", "predicted.40")]),
    ("on far-gpt2, for {:+.1f} to {:+.1f}%", [("table_lengths", "128 tokens", "50", COST), (USED, "far-gpt2.docs.960", "50", COST)]),
])  # fmt: skip
def test_numbers_of_the_readmes_text_are_cells_of_committed_tables(said, cells):
    found = []
    for table, panel, key, column in cells:
        rows = read(ROOT / "results" / "tables" / f"{table}.json").entries
        (row,) = (row for row in rows if (row["panel"], row["key"]) == (panel, key))
        found.append(100 * row[column] if column == "kl_nats" else row[column])
    assert said.format(*found).replace("-", "−") in (ROOT / "README.md").read_text(encoding="utf-8").replace("-", "−")


def test_a_ledger_that_lacks_rows_does_not_replace_the_written_one(harness, monkeypatch, prints):
    refused = answers.Job("row", (), reason=REFUSED, error=ConfigError("dataset=gum: the text is not at hand"))
    found = {find("table", "11"): ([refused], [])}
    monkeypatch.setattr("quicksilver.cli.commands.reproduce.recorded_of_all", lambda *of, **_: (found, {}))
    said = prints("claims", f"results_dir={harness.results}").err
    assert unsaid(said, "1 rows have no record here", "dataset=gum.") == []
    assert sorted(p.name for p in harness.results.glob("claims*")) == [f"claims-mine.{kind}" for kind in ("csv", "json", "md")]
    # A damaged record that the written ledger names is one that is not here.
    damaged = fakes.fingerprint("damaged")
    (harness.results / "claims.json").write_bytes(Written("table", "claims", "T", (), (), records=(damaged,)).json())
    folder = Store(harness.results).path(damaged)
    folder.mkdir(parents=True)
    (folder / "record.json").write_text("{")
    assert "claims-mine.md" in prints("claims", f"results_dir={harness.results}").out


def test_a_process_times_every_row_once_and_leaves_one_file(harness, reproduce, prints, monkeypatch):
    reproduce()
    monkeypatch.setattr(harness_run, "bench_of", lambda *of: (None, None))
    monkeypatch.setattr(Latency, "run", lambda self, bench: fakes.latency(0.5, 1.0, samples=self.repeats))
    prints("time", "table", "11", "repeats=1", "rounds=4", f"results_dir={harness.results}")
    (found,) = timed_processes(harness.results)
    assert found.results.keys() == set(frame(harness)["record"].dropna())
    reproduce()
    assert set(frame(harness)["speedup_pct"].dropna()) == {50.0}
