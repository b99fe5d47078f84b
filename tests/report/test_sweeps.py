"""Sweeps and the factorial: which runs they are, what is computed of their records, what is printed and drawn."""

import math
from functools import cache
from pathlib import Path

import fakes
import numpy as np
import pandas as pd
import pytest
import thinning
import yaml
from repository import ROOT, blocks
from thinning import first

from quicksilver.experiments.ablation import quantization as strategies
from quicksilver.experiments.ablation import table_figure_factorial as factorial
from quicksilver.experiments.sweeps import multiruns
from quicksilver.records.store import Store
from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row, find
from quicksilver.report.claims.ledger import Source
from quicksilver.report.claims.reported import reported
from quicksilver.report.figure import Figure
from quicksilver.runs import config
from quicksilver.runs.choices import config_dir
from quicksilver.runs.parts import build_modules
from quicksilver.runtime.errors import QuickSilverError

TABLES = ("calibrations", "options", "quantization_grid", "factorial")
FIGURES = ("factorial", "sweeps", "quantization_grid")
RUNS = {(kind, name): find(kind, name) for kind, names in (("table", TABLES), ("figure", FIGURES)) for name in names}


compose = cache(config.compose)  # a fifth of a second, and every row is asked for more than once


def outcomes(rows: list[Row], results: Path) -> list[Outcome]:
    """A record for every row that has modules, the farther down the more saved and the more lost."""
    found = []
    one_of_each = {row.panel: row for row in rows}
    protocols = {panel: compose(row.overrides).protocol.name for panel, row in one_of_each.items()}
    for number, row in enumerate(rows):
        protocol = protocols[row.panel]
        dense = Store(results).get(fakes.fingerprint(f"dense {protocol}")) or fakes.make(results, f"dense {protocol}", protocol)
        if "modules=[]" in row.overrides:
            found.append(Outcome(row, dense, dense))
            continue
        share = (number + 1) / (len(rows) + 1) / 2
        flops = {f"{who}prompt_paper_flops": int(1e9 * (1 - share * (who == ""))) for who in ("", "dense_")}
        kept = {"kv_bytes_resident": int(1e6 * (1 - share)), "dense_kv_bytes": 1_000_000}
        record = fakes.make(results, f"{row.panel} {row.key}", protocol, per_token=share, saved=share, **flops, **kept)
        found.append(Outcome(row, record, dense))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By kind and name: hand-made records, and what the file makes of them, made when it is first asked for."""

    def make(kind, name):
        artefact = RUNS[kind, name]
        there = outcomes(list(artefact.experiment.rows()), tmp_path_factory.mktemp(name))
        return there, artefact.build(there, artefact.name)

    return cache(make)


# --- the runs -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", first(sorted(TABLES, key=lambda name: len(RUNS["table", name].experiment.rows()))))
def test_every_row_is_a_run_of_its_own_and_one_that_may_run(name):
    rows = RUNS["table", name].experiment.rows()
    assert len({(row.panel, row.key) for row in rows}) == len(rows)
    for row in rows:
        config = compose(row.overrides)
        modules = build_modules(config.modules)
        assert config.protocol.name == "continuation" or all(module.causal for module in modules)
        assert not {"null_control", "latency"} & set(config.identity()["measure"])


def test_the_words_of_a_person_win_over_those_of_an_experiment():
    (row, *_) = RUNS["table", "options"].experiment.rows()
    windows = [compose((*words, *row.overrides)).dataset.windows for words in ((), ("dataset.windows=9", "seed=3"))]
    assert windows == [16, 9]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_runs_that_a_table_has_made(name):
    made = {row.overrides for artefact in RUNS.values() if artefact.kind == "table" for row in artefact.experiment.rows()}
    assert {row.overrides for row in RUNS["figure", name].experiment.rows()} <= made


def test_the_grid_is_that_of_the_paper():
    bounds = reported()["e5.grid"].bounds
    rows = [row for row in multiruns.GRID.rows() if not row.section]
    assert len(rows) == 25
    for key, claim in ((multiruns.LOW, "tau_low"), (multiruns.HIGH, "tau_high")):
        values = {compose(row.overrides).modules["adaptive_quantization"][claim] for row in rows}
        assert (min(values), max(values)) == bounds[claim]
        assert key in multiruns.GRID.axes()


def test_the_factorial_combines_what_stands_alone_in_table_11():
    rows = {row.key: compose(row.overrides).modules for row in factorial.rows() if row.key not in factorial.BESIDE}
    assert set(rows) == {chosen or "dense" for chosen in factorial.SETS}
    members = [row for row in find("table", "11").experiment.rows() if row.panel == "continuation"]
    alone = {row.key: compose(row.overrides).modules for row in members}
    for letter, (_, claim, _) in factorial.FACTORS.items():
        assert rows[letter] == alone[f"isolated.{claim}"]
    for key, modules in rows.items():
        parts = [rows[letter] for letter in key] if key != "dense" else []
        assert modules == {name: entry for part in parts for name, entry in part.items()}


# --- what is computed -----------------------------------------------------------------------------------------------------------
def test_the_front_is_what_nothing_beats():
    gain = pd.Series([10.0, 20.0, 20.0, 30.0, 5.0, math.nan], index=list("abcdef"))
    loss = pd.Series([1.0, 2.0, 3.0, 2.5, 1.0, 0.0], index=list("abcdef"))
    found = sweeps.front(gain, loss)
    assert list(found.index[found]) == ["a", "b", "d"]
    assert sweeps.front(pd.Series([1.0, 1.0]), pd.Series([2.0, 2.0])).tolist() == [True, True]


def test_additive_responses_have_main_effects_and_interactions_are_what_two_do_to_each_other():
    size = {"H": 3.0, "K": -1.0, "F": 0.5, "Q": 10.0}
    additive = {chosen: np.array([7.0 + sum(size[letter] for letter in chosen)]) for chosen in factorial.SETS}
    joint = {chosen: np.array([4.0 * ("H" in chosen and "Q" in chosen)]) for chosen in factorial.SETS}
    for response, wanted in ((additive, size), (joint, {"H": 2.0, "Q": 2.0, "HQ": 4.0})):  # half of the time Q is there
        for chosen in factorial.SETS[1:]:
            assert factorial.contrast(response, chosen)[0] == pytest.approx(wanted.get(chosen, 0.0), abs=1e-12)


def test_a_factorial_with_a_hole_says_so_and_has_no_interactions(made, tmp_path):
    there, _ = made("table", "factorial")
    holed = [Outcome(one.row, reason="failed") if one.row.key == "KF" else one for one in there]
    table = factorial.table(holed, "table_factorial")
    assert [panel.key for panel in table.panels] == ["factorial"]
    assert "no interactions" in table.text()
    assert "failed" in table.text()
    with pytest.raises(QuickSilverError, match="record of every combination"):
        RUNS["figure", "factorial"].build(holed, "figure_factorial")


def test_the_effects_of_the_factorial_are_those_of_its_cells(made):
    frame = made("table", "factorial")[1].frame
    cells = frame[frame["panel"] == "factorial"].set_index("key")
    synergy = frame[frame["panel"] == factorial.SYNERGY].set_index("key")
    for ledger in factorial.LEDGERS:
        saved = cells[f"{ledger}_flops_saved_pct"]
        wanted = saved["HKFQ"] - sum(saved[letter] for letter in "HKFQ")
        found, low, high = (synergy.loc["HKFQ", f"synergy_{ledger}{end}"] for end in ("", "_low", "_high"))
        assert found == pytest.approx(wanted, abs=1e-6)
        assert low - 1e-6 <= wanted <= high + 1e-6
    effects = frame[frame["panel"] == factorial.EFFECTS].set_index("key")
    log_ppl = np.log(cells["ppl"])
    with_h = [key for key in cells.index if "H" in key]
    pairs = [log_ppl[key] - log_ppl[key.replace("H", "") or "dense"] for key in with_h]
    assert effects.loc["H", "effect_nats"] == pytest.approx(np.mean(pairs))


def test_utility_is_that_of_e_9(made):
    frame = made("table", "quantization_grid")[1].frame
    points = frame[frame["panel"] == multiruns.GRID.experiment].set_index("key")
    base = points.loc[multiruns.UNIFORM]
    assert math.isnan(base["utility"])
    point = points.iloc[3]
    saved = 1 - (1 - point["prompt_paper_flops_saved_pct"] / 100) / (1 - base["prompt_paper_flops_saved_pct"] / 100)
    assert point["utility"] == pytest.approx(15 * saved - (point["ppl"] - base["ppl"]), rel=1e-6)
    best = points["utility"].idxmax()
    low, high = points.loc[best, [multiruns.LOW, multiruns.HIGH]]
    assert f"λ = 15: ({low}, {high})" in made("table", "quantization_grid")[1].text()
    there, _ = made("table", "quantization_grid")
    grid = {one.row.key: one for one in there if one.row.panel == multiruns.GRID.experiment}
    found = multiruns.front(grid)
    assert found.low <= found.value <= found.high
    chosen = grid[multiruns.CHOSEN]
    alike = dict.fromkeys(grid, chosen) | {multiruns.UNIFORM: grid[multiruns.UNIFORM]}
    assert multiruns.front(alike).value == 0  # it is the best itself
    assert multiruns.front({**grid, multiruns.UNIFORM: Outcome(chosen.row)}) is None
    holed = [Outcome(one.row, reason="failed") if one.row.key == multiruns.UNIFORM else one for one in there]
    table = RUNS["table", "quantization_grid"].experiment.table(holed, "table_quantization_grid")
    assert table.frame["utility"].isna().all()
    assert "nothing was measured" in table.text()


def test_claims_are_answered_against_the_base(made):
    for name, claims in (("quantization_grid", ("e9.quantization", "e5.quantization")), ("calibrations", ("c3.kv_threshold",))):
        there, table = made("table", name)
        source = Source(RUNS["table", name], there, "make …")
        answers = dict(source.answers)
        for claim in claims:
            answer = answers[f"{claim}.delta_ppl"]
            estimate = answer.of(source.panels[answer.panel])
            row = table.frame[(table.frame["panel"] == answer.panel) & (table.frame["key"] == answer.key)].iloc[0]
            ends = [row[f"base_delta_ppl_pct{end}"] for end in ("", "_low", "_high")]
            assert (estimate.value, estimate.low, estimate.high) == pytest.approx(ends, rel=0.1)
            assert estimate.value == pytest.approx(ends[0])


def test_stability_is_that_of_the_worst_combination(made):
    there, table = made("table", "factorial")
    by_key = {one.row.key: one for one in there}
    worst = factorial.worst(by_key)
    cells = table.frame[(table.frame["panel"] == "factorial") & ~table.frame["key"].isin(factorial.BESIDE)]
    assert worst.value == pytest.approx(cells["delta_ppl_pct"].max())
    assert factorial.worst({**by_key, "H": Outcome(by_key["H"].row, reason="failed")}) is None
    answers = dict(Source(RUNS["table", "factorial"], there, "make …").answers)
    assert answers["p4.stability.delta_ppl"].of(by_key) == worst


# --- what is printed and drawn --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TABLES)
def test_a_printed_table_fits_and_names_what_it_is_of(made, name):
    there, table = made("table", name)
    text = table.text()
    assert max(map(len, text.splitlines())) <= 150
    assert {panel.key for panel in table.panels} >= {one.row.panel for one in there}
    assert "calibrating part" in text or name in ("options", "factorial")
    for panel in {one.row.panel for one in there}:
        assert f"-m experiment={panel}" in text
    if thinning.whole or name == TABLES[0]:
        assert text == RUNS["table", name].experiment.table(there, table.name).text()


@pytest.mark.parametrize("name", first(FIGURES))
def test_every_axis_of_a_figure_has_its_unit(made, name):
    _, figure = made("figure", name)
    assert isinstance(figure, Figure)
    for axes in figure.drawing.axes:
        if axes.get_visible() and axes.get_label() != "<colorbar>" and axes.lines:
            assert axes.get_xlabel()
            assert axes.get_ylabel()
    assert any("reference-gpt2" in line for line in figure.caption)


# --- Tables 3 and 10 ------------------------------------------------------------------------------------------------------------
def test_the_percentiles_give_the_papers_savings_back():
    covered = 2 * reported()["table3.uniform8"].values["flops_saved_pct"]
    found = strategies.paper_percentiles()
    low, high = (found["entropy_aware"][name] / 100 for name in ("tau_low", "tau_high"))
    four, two = (found[claim]["tau_low"] / 100 for claim in ("no_2bit", "aggressive"))
    mixes = {"entropy_aware": (low, high - low, 1 - high), "no_2bit": (0.0, four, 1 - four), "aggressive": (two, 1 - two, 0.0)}
    for claim, mix in mixes.items():
        charge = sum(share * width / 16 for share, width in zip(mix, (2, 4, 8), strict=True))
        assert covered * (1 - charge) == pytest.approx(reported()[f"table3.{claim}"].values["flops_saved_pct"], abs=0.05)


@pytest.mark.parametrize("number", first(["3", "10"]))
def test_every_row_of_the_paper_stands_in_both_panels(number):
    rows = find("table", number).experiment.rows()
    wanted = ["baseline", *strategies.STRATEGIES, *strategies.paper_percentiles()]
    for panel in strategies.PANELS:
        claims = [row.reported for row in rows if row.panel == panel and row.reported]
        assert claims == [f"table3.{claim}" for claim in wanted]
    for row in rows:
        config = compose(row.overrides)
        build_modules(config.modules)
        assert config.protocol.name == row.panel
        assert ("null_control" not in config.identity()["measure"]) == (row.key == "uniform8")


CONFIG = {"seed": 0, "modules": {}, "model": {"name": "m"}, "dataset": {"name": "d"}}


def test_the_shares_of_widths_are_those_of_the_trace(tmp_path):
    import torch

    from quicksilver.runtime.pass_state import Precision
    from quicksilver.runtime.trace import PassTrace, Trace

    shape, layers = (2, 4), 4
    halted, resumed, skipped, fused = (torch.full(shape, layers) for _ in range(4))
    bits = torch.tensor([[2, 4, 8, 8], [2, 8, 8, 8]], dtype=torch.uint8)
    one = PassTrace(
        layers, 0, torch.ones(shape, dtype=torch.bool), halted, torch.zeros(shape, dtype=torch.uint8), resumed, skipped, fused,
        precisions=(Precision(1, bits),),
    )  # fmt: skip
    fakes.make(tmp_path, "dense all")
    assert strategies.shares(fakes.make(tmp_path, "no widths", per_token=0.1)) == {}
    files = {"trace.safetensors": Trace(layers, [one]).save}
    record = fakes.make(tmp_path, "run", per_token=0.1, saved=0.2, config=CONFIG, files=files)
    # With bits/16 the mean charge is 3/8, with App. J's own β it is 3/4.
    assert strategies.app_j_factor(record) == pytest.approx(0.25 / 0.625)
    row = Row("all", "", "run", "", ())
    (table_row,) = strategies.frame([Outcome(row, record, Store(tmp_path).dense_of(record))]).to_dict("records")
    assert table_row["app_j_flops_saved_pct"] == pytest.approx(0.4 * table_row["paper_flops_saved_pct"]) == pytest.approx(8)
    assert strategies.shares(record) == {
        "two_bit_share_pct": 25.0, "four_bit_share_pct": 12.5, "eight_bit_share_pct": 62.5, "mean_bits": 6.0
    }  # fmt: skip


def test_tables_3_and_10_print_reported_beside_measured(tmp_path):
    def config(*overrides: str) -> dict:
        return {**CONFIG, "modules": compose(overrides).modules}

    own = {panel: fakes.make(tmp_path, f"dense {panel}", panel, config=config("modules=[]")) for panel in strategies.PANELS}
    for number in ("3", "10"):
        artefact, found = find("table", number), []
        for row in artefact.experiment.rows():
            record = dense = own[row.panel]
            if row.key != "baseline":
                name, null = f"{number} {row.panel} {row.key}", 0.02
                changes = {"per_token": 0.03, "null_per_token": null, "saved": 0.2, "config": config(*row.overrides)}
                record = fakes.make(tmp_path, name, row.panel, **changes)
            found.append(Outcome(row, record, dense))
        text = artefact.build(found, artefact.name).text()
        assert max(map(len, text.splitlines())) <= 150
        (line, *_) = [line for line in text.splitlines() if line.strip().startswith("Entropy-aware 4/8")]
        assert line.split()[2:5] == ["2.3", "18.4", "33.2"]
        assert "p45, p77.5" in text
        assert ("of log V" in text) == (number == "10")


# --- the page ---------------------------------------------------------------------------------------------------------------------
def test_what_the_page_shows_is_what_there_is(made):
    page = ROOT / "docs" / "sweeps-and-budgets.md"
    experiment, dial = map(yaml.safe_load, blocks(page, "yaml"))
    there = config_dir()
    assert experiment == yaml.safe_load((there / "experiment" / "d3_fusion.yaml").read_text(encoding="utf-8"))
    assert dial == yaml.safe_load((there / "budget" / "halting_attention.yaml").read_text(encoding="utf-8"))
    _, source = blocks(page, "python")  # the first is run by tests/cli/test_sweeping.py
    names: dict = {}
    exec(compile(source, str(page), "exec"), names)
    outcomes = [one for one in made("table", "calibrations")[0] if one.row.panel == "d3_fusion"]
    assert [one.row for one in outcomes] == names["rows"]()
    assert "start  tau_fuse" in names["table"](outcomes, "table_depth_of_fusion").text()
    for name in TABLES:
        assert f"| `{name}` |" in page.read_text(encoding="utf-8")
