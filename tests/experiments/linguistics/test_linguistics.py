"""Tables and figures on gold annotation, from records of a tiny model: what is printed is what was measured, and what failed is said."""

import pytest
from harness_world import make_treebank, make_world
from thinning import first

from quicksilver.experiments.linguistics import fusion_and_constituents as runs
from quicksilver.measure.words import ConstituentsResult, WordClassesResult
from quicksilver.records.store import Store
from quicksilver.report.artefacts import Outcome, find
from quicksilver.report.claims.ledger import Source, frame
from quicksilver.report.reproduction import jobs_of
from quicksilver.runs.config import compose
from quicksilver.runs.jobs import RecordIndex
from quicksilver.runs.run import ensure
from quicksilver.runtime.errors import ConfigError


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("world")
    world = [word for word in make_world(folder, window=96, prompt=80) if not word.startswith(("dataset", "measure"))]
    bank = make_treebank(folder / "bank", sentences=120, space="")
    world += [f"dataset.files.test={bank}", f"dataset.files.calibration={bank}"]
    world += ["dataset.windows=8", "dataset.calibration_windows=2", "protocol.batch_size=8"]
    world += [f"results_dir={folder / 'results'}", "measure.word_signals.windows=4"]
    rows = [*runs.halting(runs.MAIN, "paper_b2"), *runs.fusion()[:2]]
    tiny = "modules.halting.resume_layers=0"  # six layers
    found = {}
    for row in rows:
        more = [tiny] if row.panel == runs.HALTING else []
        (record,) = ensure([compose([*row.defaults, *row.overrides, *world, *more])])
        found[row.key] = Outcome(row, record, Store(folder / "results").dense_of(record))
    return found


def all_of(number: str, outcomes: dict[str, Outcome], kind: str = "table") -> list[Outcome]:
    return [outcomes.get(row.key, Outcome(row, reason="failed")) for row in find(kind, number).experiment.rows()]


def test_a_user_s_dataset_takes_the_place_of_the_treebank():
    default, chosen = (
        jobs_of(find("table", number), asked, RecordIndex("nowhere")) for number, asked in (("13", []), ("2", ["dataset=ud-ewt"]))
    )
    assert len(chosen) == len(runs.halting())
    for jobs, name in ((default, "gum"), (chosen, "ud-ewt")):
        assert {job.config.dataset.name for job in jobs if job.config is not None} == {name}
    depths = [job.config.modules["token_fusion"]["start"] for job in default]
    assert depths == pytest.approx([12 / 30, 15 / 30, 20 / 30], abs=1e-3)


def test_the_table_of_classes_prints_what_was_measured(outcomes):
    made = find("table", "8").build(all_of("8", outcomes), "table")
    rates = made.frame[made.frame["panel"] == "rates"].set_index("key")
    found = outcomes[runs.MAIN].record.measured("word_classes", WordClassesResult)
    one = found.of("content")
    row = rates.loc[f"{runs.MAIN}.content"]
    assert row["halted_pct"] == pytest.approx(100 * one.halted.value)
    assert row["reported_pct"] == 18.5
    assert row["halted_pct_low"] < row["halted_pct"] < row["halted_pct_high"]
    beyond = made.frame[(made.frame["panel"] == "nulls") & (made.frame["key"] == f"{runs.MAIN}.content")].iloc[0]
    assert beyond["random"] + beyond["random_expected"] == pytest.approx(row["halted_pct"])
    # Nobody halts by the paper's constants, so classes have nothing to say.
    assert [key for key in rates.index if key.startswith("paper_b2")] == ["paper_b2.all"]
    model = made.frame[made.frame["panel"] == "model"]
    assert model["class_adds"].iloc[0] == pytest.approx(model["class_explained"].iloc[0] - model["start_explained"].iloc[0])
    text = made.text()
    assert "Least attended (ours): failed." in text
    assert "several tokens" in text


def test_the_table_of_constituents_prints_what_was_measured(outcomes):
    made = find("table", "13").build(all_of("13", outcomes), "table")
    found = outcomes["layer12"].record.measured("constituents", ConstituentsResult)
    one = next(one for one in found.fused if one.precision)
    row = made.frame.set_index("key").loc["layer12.short"]
    assert row["precision_pct"] == pytest.approx(100 * one.precision["short"].value)
    assert row["random_pct"] + row["beyond_random"] == pytest.approx(row["precision_pct"])
    assert row["reported_pct"] == 78.9
    literally = made.frame[made.frame["key"].str.endswith(".any")]
    assert (literally["precision_pct"] == 100).all()


def test_the_claims_get_verdicts_from_these_records(outcomes):
    numbers = {"table": ("2", "9"), "figure": ("word_signals",)}
    sources = [Source(find(kind, one), all_of(one, outcomes, kind), "make it") for kind, ones in numbers.items() for one in ones]
    ledger = frame(sources).set_index("claim")
    quantities = (
        "table2.content_words.halted_share_pct",
        "table9.layer12.random_precision_pct",
        "e4.collapse.entropy_change_nats",
        "b6.function_words.halt_layer_of_30",
        "m.function_words.higher_rate_points",
    )
    for claim in quantities:
        rows = ledger.loc[[claim]]
        assert rows["measured"].notna().any(), claim
        assert (rows["measured_low"].dropna() <= rows["measured"].dropna()).all()
    why = ledger.loc["table9.layer20.precision_pct", "why"]
    assert "no record" in why or "failed" in why


def test_precision_at_two_depths_is_compared_on_the_same_pairs(outcomes):
    by_depth = {f"layer{depth}": runs.fused(outcomes[f"layer{depth}"].record) for depth in (12, 15)}
    less, more = (one.precision["phrase"].value for one in by_depth.values())
    found = runs._deeper({"layer15": outcomes["layer12"], "layer20": outcomes["layer15"]})
    assert found.value == pytest.approx(100 * (more - less))
    same = runs._deeper({"layer15": outcomes["layer15"], "layer20": outcomes["layer15"]})
    assert (same.low, same.value, same.high) == (0, 0, 0)


@pytest.mark.parametrize("number", first(["halting_by_class", "word_signals", "fusion_and_constituents"]))
def test_figures_are_drawn_from_these_records_and_not_without(number, outcomes):
    artefact = find("figure", number)
    made = artefact.build(all_of(number, outcomes, "figure"), "figure")
    assert len(made.frame) > 10
    assert made.png().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="nothing to draw"):
        artefact.build([Outcome(row, reason="failed") for row in artefact.experiment.rows()], "figure")
