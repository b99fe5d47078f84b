"""Peers and ours in one frame: who is on the frontier, what is said about ours, and attributes that are read off the classes."""

from pathlib import Path
from typing import Any

import fakes
import pandas as pd
import pytest
from saying import unsaid
from thinning import first

from quicksilver.experiments.peers import attributes, methods
from quicksilver.measure.deployment import DeploymentResult, Percentiles, ServingResult
from quicksilver.measure.measurement import Quartiles, Spread
from quicksilver.report.artefacts import Outcome, Row, find
from quicksilver.report.table import filled
from quicksilver.runs.choices import choices
from quicksilver.runs.parts import module_entry

# key -> nats a token lost, share of the prompt's time that is left
MEASURED = {
    "one_shot_halting": (0.03, 0.60),
    "prompt_pruning": (0.02, 0.62),
    "token_merging": (0.20, 0.65),
    "heavy_hitter": (0.05, 1.20),
    "int8_dynamic": (0.0, 1.50),
    "bfloat16": (0.0, 0.995),
    "ours.halting_attention": (0.02, 0.61),
}


def outcomes(results: Path, lost_and_left: dict[str, tuple[float, float]], **changes: Any) -> list[Outcome]:
    def made(row: Row) -> dict[str, Any] | str:
        if row.key not in lost_and_left:
            return "failed"
        lost, left = lost_and_left[row.key]
        return {"per_token": lost, "faster": 1 - left, "saved": 0.4, "noise_pct": 2.0, "prompt_timed": True, **changes}

    return fakes.outcomes(results, methods.rows(), made)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return outcomes(tmp_path_factory.mktemp("records"), MEASURED)


def peers() -> set[str]:
    """The modules whose class is a baseline."""
    return {name for name in choices("modules") if module_entry(name)[1]["_target_"].startswith("quicksilver.baselines.")}


def test_every_row_is_a_module_that_there_is_and_the_keys_are_unique() -> None:
    rows = methods.rows()
    assert len({row.key for row in rows}) == len(rows)
    assert {name for row in rows for name in row.needs} <= set(choices("modules"))
    # A pruned model is what others act on (table factorial). Projected K/V is a peer that our own stages can run, SwiftKV without its training, and so are the controls of prediction. Learned halting is the
    # second paper's.
    assert {row.needs[0] for row in rows if row.section not in (methods.DENSE, methods.OURS)} == {
        *(*peers() - {"channel_pruning"}, "quicksilver", "fitted_prediction", "learned_halting")
    }


def test_searched_rows_have_their_models_own_dial_of_least_kl_at_the_budget() -> None:
    searched = [row for row in methods.rows() if row.of_model]
    assert {row.needs[0] for row in searched} == {*methods.FOUND["reference-gpt2"]} == {*methods.FOUND["reference-llama"]}
    for row in searched:
        for model, dials in methods.FOUND.items():
            (module,) = row.needs
            found = dials[module][methods.BUDGET]
            assert found["reached_pct"] >= 40
            assert all(found["kl_nats"] <= other["kl_nats"] for other in found["compared"] if other["reached_pct"] >= 40)
            words = row.words([f"model={model}"])
            assert {*found["overrides"]} <= {*words}, "the run of the table is the run that was searched"


def test_the_frontier_is_of_what_is_beyond_noise_and_interval(usual) -> None:
    frame = methods.frame(usual).set_index("key")
    front = set(frame.index[frame["front"]])
    # bfloat16 is 0.5% faster, which is within the noise, and loses nothing: it ties with dense.
    assert {"dense", "one_shot_halting", "ours.halting_attention"} <= front
    assert not front & {"token_merging", "heavy_hitter", "int8_dynamic", "static_exit"}
    assert frame.loc["one_shot_halting", "versus_int8"] == pytest.approx(0.6 / 1.5)
    assert pd.isna(frame.loc["static_exit", "judged_loss_pct"])


def test_what_is_said_about_ours_names_the_peers_that_are_better(usual, tmp_path: Path) -> None:
    on = " ".join(methods.findings(methods.frame(usual)))
    assert unsaid(on, "Halting, least attended (+39% of the prompt's time", "is beaten by no method of others") == []
    assert unsaid(on, "takes 0.41 of the time of dynamic int8, which takes 1.50", "0.40 of its quantized baseline") == []
    worse = MEASURED | {"ours.halting_attention": (0.04, 0.63)}
    off = " ".join(methods.findings(methods.frame(outcomes(tmp_path, worse))))
    assert "is beaten by Prompt" in off or "is beaten by One" in off
    assert unsaid(off, "Prompt pruning (LazyLLM), +38%", "One-shot halting (DASH), +40%") == []
    assert "Token merging" not in off.partition("is beaten by ")[2]


def test_decoding_is_printed_where_it_was_timed(tmp_path: Path) -> None:
    one = ServingResult(Spread(10.0, 1.0), Percentiles(5.0, 7.0, None), 60, 190.0, 100.0)
    served = DeploymentResult(one, 256, 64, 50.0, 3.0, one, Quartiles(0.5, 0.48, 0.52), 32)
    frame = methods.frame(outcomes(tmp_path, MEASURED, measured={"deployment": served}))
    row = frame.set_index("key", drop=False).loc["bfloat16"]
    cells = {column.header: filled(column.cell, row) for column in methods.COLUMNS}
    assert cells["a decoded token, ÷ dense"] == ("0.50", "noise 3.0%")
    assert cells["prompt speedup %"] == ("≈ 0",)


@pytest.mark.parametrize(("kind", "number"), first([("table", "peers"), ("figure", "8"), ("figure", "15")]))
def test_table_and_figure_are_made_of_what_there_is_and_are_the_same_twice(usual, kind: str, number: str, tmp_path: Path) -> None:
    artefact = find(kind, number)
    claimed = [methods.THREE] * (kind == "figure")
    assert [row.key for row in artefact.experiment.rows()] == [*(row.key for row in methods.rows()), *claimed]
    made = [artefact.build(usual, artefact.name) for _ in range(2)]
    first, second = ([path.read_bytes() for path in one.write(tmp_path / str(i))] for i, one in enumerate(made))
    assert first == second
    text = made[0].text(160)
    assert unsaid(text, "is beaten by", "reference-gpt2") == []


@pytest.fixture(scope="module")
def techniques() -> pd.DataFrame:
    return attributes.techniques()


def test_attributes_are_read_off_the_classes(techniques) -> None:
    found = techniques.set_index("module")
    read = {
        ("halting", "verbs"): "halt",
        ("token_fusion", "verbs"): "fuse, merge_cache",
        ("sink_attention", "verbs"): "evict, span",
        ("heavy_hitter", "acts"): "between passes",
        ("confidence_exit", "acts"): "anywhere",
        ("prompt_lookup", "weights"): "frozen",
        ("int8_dynamic", "excludes"): "adaptive_quantization, bfloat16, channel_sparsity, fastest_linear",
        ("one_shot_halting", "source"): "2604.18103",
    }
    assert {place: found.loc[place] for place in read} == read
    assert not {"static_depth", "random_halting"} & set(found.index)
    # every peer says where it comes from
    assert (found.loc[sorted(peers()), "source"] != "").all()


def test_tables_of_the_paper_s_words_have_what_is_derived_beside_them(techniques) -> None:
    table_1, table_6 = (find("table", number) for number in ("1", "6"))
    assert table_1.experiment.rows() == table_6.experiment.rows() == []
    table = table_1.build([], table_1.name)
    assert set(table.frame["panel"]) == {"paper", "derived"}
    derived = table.frame[table.frame["panel"] == "derived"]
    assert set(derived["class"]) == set(techniques["class"])  # none is forgotten
    assert "the paper" in table.text(200)
    assert unsaid(table_6.build([], table_6.name).text(200), "the paper", "p25", "asked at 10") == []


def test_the_taxonomy_has_a_leaf_for_every_technique(techniques) -> None:
    leaves = attributes.taxonomy(techniques).set_index("module")
    assert set(leaves.index) == set(techniques["module"])
    assert {*leaves.index[leaves["quicksilver"]]} == {"halting", "kv_skipping", "token_fusion", "adaptive_quantization"}
    branch = leaves["branch"]
    assert branch["halting"] == branch["static_exit"] == attributes.BRANCHES["halt"]
    assert branch["predicted_kv"] not in attributes.BRANCHES.values()  # a preset of several
    assert branch["prompt_truncation"] == "which tokens enter"
    assert not {"quicksilver", "quicksilver_50"} & {*leaves.index}
    assert sorted(leaves["height"]) == list(range(len(techniques)))
