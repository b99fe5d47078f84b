"""Measurements on gold annotation, in records of a tiny model: what they say is what counting by hand says. Chance within strata is exact,
intervals know clusters, and a model explains what it was made of."""

import numpy as np
import pandas as pd
import pytest
import torch
from harness_world import make_treebank, make_world
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tiny import refused
from transformers import AutoTokenizer

from quicksilver.measure import strata as stats
from quicksilver.measure.words import ConstituentsResult, WordClassesResult, WordSignalsResult, inside
from quicksilver.records.record import Record
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.run import ensure
from quicksilver.runtime import Trace

FUSION = ["modules=[token_fusion]"] + [f"modules.token_fusion.{one}" for one in ("rule=capacity", "tau_fuse=null", "max_group=3")]
HALTING = ["modules=[halting]"] + [f"modules.halting.{one}" for one in ("tau_drift=p60", "tau_entropy=null", "resume_layers=0")]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("world")
    world = [word for word in make_world(folder, window=96, prompt=80) if not word.startswith(("dataset", "measure"))]
    bank = make_treebank(folder / "bank", sentences=120, space="")
    return [
        *world, "dataset=gum", f"dataset.files.test={bank}", f"dataset.files.calibration={bank}", "dataset.windows=12",
        "dataset.calibration_windows=4", "measure=words", f"results_dir={folder / 'results'}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def halted(words: list[str]) -> Record:
    (record,) = ensure([compose([*words, *HALTING, "measure.word_signals.enabled=true"])])
    return record


@pytest.fixture(scope="module")
def fused(words: list[str]) -> Record:
    (record,) = ensure([compose([*words, *FUSION, "protocol=continuation", "measure.constituents.enabled=true"])])
    return record


def test_rates_are_those_of_the_trace(halted: Record):
    found = halted.measured("word_classes", WordClassesResult)
    tokens = pd.read_parquet(halted.path / "words.parquet")
    trace = Trace.load(halted.trace_path)
    layers = np.concatenate([one.halt_layer.numpy() for one in trace.passes])
    assert (tokens["halt_layer"] == layers[tokens["window"], tokens["slot"]] + 1).all()
    gone = (tokens["halt_layer"] <= found.layer).groupby(tokens["class"])
    assert 0 < gone.mean().mean() < 1
    for name, share in gone.mean().items():
        one = found.of(str(name))
        assert one.halted.value == pytest.approx(share)
        assert one.halted.low < share < one.halted.high
        assert one.by_layer[found.layer - 1] == pytest.approx(share)
        assert one.nulls["random"].expected == pytest.approx((tokens["halt_layer"] <= found.layer).mean())
        assert one.nulls["random"].excess == pytest.approx(share - one.nulls["random"].expected)
    first = tokens[(tokens["piece"] == 0) & (tokens["class"] == "content")]
    assert found.of("content").halted_words["first"] == pytest.approx((first["halt_layer"] <= found.layer).mean())
    assert found.of("all").tokens == len(tokens) == found.counted.tokens
    explained = {tuple(one.terms): one.deviance_explained for one in found.model}
    assert explained["position",] <= explained["position", "log frequency"] + 1e-6
    assert 0 < explained["class",] < 1
    assert "halted by layer" in found.line()


def test_a_class_is_that_of_the_tokens_own_word(halted: Record):
    tokens = pd.read_parquet(halted.path / "words.parquet")
    letters = AutoTokenizer.from_pretrained(halted.model.source.removeprefix("folder:")).convert_ids_to_tokens(range(257))
    tokens["text"] = [letters[one] for one in tokens["token_id"]]
    spelled = tokens.groupby(["window", "word"]).agg({"text": "".join, "class": "first", "pieces": "first"})
    whole = spelled[spelled["text"].str.len() == spelled["pieces"]]
    assert len(whole) > 100
    kinds = {"the": "determiner", "a": "determiner", "in": "preposition", "dog": "content", "saw": "content", ".": "other"}
    known = whole[whole["text"].isin(kinds)]
    assert set(known["text"]) == {*kinds}
    assert (known["class"] == known["text"].map(kinds)).all()


def test_signals_are_the_dense_model_s_and_add_up(halted: Record):
    found = halted.measured("word_signals", WordSignalsResult)
    arrays = load_file(halted.path / "word_signals.safetensors")
    tokens = pd.read_parquet(halted.path / "words.parquet")
    mine = (tokens["class"] == "content").to_numpy()
    at = (slice(None), tokens["window"][mine].to_numpy(), tokens["slot"][mine].to_numpy())
    assert found.entropy_nats["content"].mean == pytest.approx(arrays["entropy_nats"][at].mean(1, dtype=float).tolist(), rel=1e-3)
    explained = found.drift_explained
    for less, more in (("position", "log frequency"), ("log frequency", "word start"), ("word start", "class")):
        assert all(a <= b + 1e-6 for a, b in zip(explained[less], explained[more], strict=True))
    gone = (tokens["halt_layer"] <= found.attention.layer).to_numpy()
    assert found.attention.token_share == pytest.approx(gone.mean())
    received = arrays["attention_received"][:, tokens["window"], tokens["slot"]].astype(float)
    assert found.attention.mass_share == pytest.approx((received[:, gone].sum(1) / received.sum(1)).tolist(), rel=1e-3)
    assert "class adds" in found.line()


def test_precision_is_that_of_counting_the_pairs(fused: Record):
    found = fused.measured("constituents", ConstituentsResult)
    pairs = pd.read_parquet(fused.path / "pairs.parquet")
    assert {"within word", "no word", "two words"} == set(pairs["kind"])
    two = pairs[pairs["kind"] == "two words"]
    everywhere = inside(two)
    assert everywhere["any"].all()  # read literally, the paper's definition cannot fail
    assert set(two.loc[everywhere["np_vp"], "label"]) == {"NP", "VP"}
    last = found.closest[-1]
    assert last.pairs == pytest.approx(0.15 * len(pairs), abs=2)
    chosen = pairs[f"rank_{last.layer}"] <= last.pairs
    assert last.within_word == (pairs["kind"][chosen] == "within word").sum()
    assert last.precision["short"].value == pytest.approx(everywhere["short"][chosen[two.index]].mean())
    assert last.nulls["short"]["random"].expected == pytest.approx(everywhere["short"].mean())
    (one,), (grouped,) = found.fused, found.grouped
    assert one.pairs > 0
    trace = Trace.load(fused.trace_path)
    joined = sum(int((event.into[:, :80] != torch.arange(80)).sum()) for p in trace.passes for event in p.fusions)
    assert one.pairs == joined  # a token that another one carries is one pair of neighbours
    mine = pairs["fused_after"] == one.layer
    assert one.pairs == mine.sum()
    assert one.precision["short"].value == pytest.approx(everywhere["short"][mine[two.index]].mean())
    assert grouped.pairs >= one.pairs
    assert "random" in found.line()


def test_a_long_sentence_is_skipped_and_counted(words: list[str]):
    (record,) = ensure([compose([*words, "protocol.window_tokens=22", "protocol.prompt_tokens=16", *HALTING])])
    counted = record.measured("word_classes", WordClassesResult).counted
    assert min(counted.long_sentences, counted.sentences) > 0


def test_annotation_is_part_of_what_a_record_is_of(words: list[str], tmp_path):
    file = make_treebank(tmp_path) / "dep" / "two.conllu"
    config = compose([*words, "modules=[]", f"dataset.files.test={tmp_path}"])
    before = RunContext().identity(config)
    file.write_text(file.read_text().replace("\tVBD\t", "\tVBN\t"))
    after = RunContext().identity(config)
    assert before.digests["text"] == after.digests["text"]
    assert before.fingerprint != after.fingerprint


def test_without_annotation_or_trees_there_is_no_number(words: list[str], tmp_path):
    with refused(r"measure\.word_classes\.enabled needs annotation.*dataset=gum"):
        compose(["modules=[halting]", "measure=words"])
    with refused(r"measure\.word_classes\.depth=1"):
        compose([*words, "measure.word_classes.depth=1"])
    more = ["modules=[halting_attention]", "protocol=continuation", "measure.constituents.enabled=true"]
    with refused("needs gold trees"):
        ensure([compose([*words, *more, f"dataset.files.test={make_treebank(tmp_path) / 'dep' / 'two.conllu'}"])])


# -- statistics --------------------------------------------------------------------------------------------------------------------
@given(st.integers(0, 10_000))
def test_the_expectation_is_that_of_dealing_the_values_anew(seed: int):
    draw = np.random.default_rng(seed)
    n = 40
    values, strata, member = draw.random(n) < 0.4, draw.integers(3, size=n), draw.random(n) < 0.3
    if not member.any():
        return
    mean, spread = stats.expected(values, member, strata)
    deals = []
    for _ in range(2000):
        dealt = values.copy()
        for stratum in range(3):
            place = np.flatnonzero(strata == stratum)
            dealt[place] = draw.permutation(values[place])
        deals.append(dealt[member].mean())
    assert float(mean) == pytest.approx(np.mean(deals), abs=0.03)
    assert float(spread) == pytest.approx(np.std(deals), abs=0.03)
    both, _ = stats.expected(np.column_stack([values, ~values]), member, strata)
    assert both.sum() == pytest.approx(1)


def test_a_difference_that_a_stratum_explains_is_none():
    draw = np.random.default_rng(0)
    stratum = draw.integers(2, size=4000)
    member = draw.random(4000) < np.where(stratum, 0.8, 0.2)
    values = draw.random(4000) < np.where(stratum, 0.9, 0.1)
    clusters = draw.integers(200, size=4000)
    raw = stats.against_null(values, member, stratum * 0, clusters)
    fair = stats.against_null(values, member, stratum, clusters)
    assert raw.excess_low > 0.15
    assert fair.excess_low < 0 < fair.excess_high
    assert fair.expected == pytest.approx(values[member].mean() - fair.excess)
    assert fair.low <= fair.expected <= fair.high


def test_an_interval_is_wilson_s_and_wider_where_clusters_agree():
    draw = np.random.default_rng(0)
    hits = draw.random(400) < 0.3
    alone = stats.wilson(hits, np.arange(400))
    p, n, z = hits.mean(), 400, 1.96
    middle, half = (p + z**2 / 800) / (1 + z**2 / n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    assert (alone.low, alone.high) == pytest.approx((middle - half, middle + half), abs=0.002)
    together = stats.wilson(np.repeat(hits, 10), np.repeat(np.arange(400), 10))
    assert (together.low, together.high) == pytest.approx((alone.low, alone.high), abs=0.002)
    nobody = stats.wilson(np.zeros(30, dtype=bool), np.repeat(np.arange(3), 10))
    assert nobody.low == 0
    assert nobody.high > 0.5  # three sentences say little
    with pytest.raises(ValueError, match="observation"):
        stats.wilson(np.zeros(0, dtype=bool), np.zeros(0, dtype=int))


def test_bins_and_crossings():
    bins = stats.quantile_bins(np.array([1.0] * 50 + [2.0] * 30 + list(range(3, 23))), 10)
    assert len(set(bins[:50])) == 1
    assert (np.diff(bins) >= 0).all()
    assert len(np.unique(stats.crossed(np.array([0, 0, 1, 1]), np.array([5, 7, 5, 5])))) == 3


def test_models_explain_what_made_the_numbers():
    draw = np.random.default_rng(0)
    x, label = draw.normal(size=3000), draw.integers(3, size=3000)
    noise = draw.normal(size=3000)
    assert stats.r_squared(2 * x + noise, [x]) == pytest.approx(0.8, abs=0.03)
    assert stats.r_squared(noise, [x, stats.indicators(label)]) < 0.01
    assert stats.r_squared(label + 0.01 * noise, [stats.indicators(label)]) > 0.99
    hits = draw.random(3000) < 1 / (1 + np.exp(-3 * x))
    alone, more = stats.deviance_explained(hits, [x]), stats.deviance_explained(hits, [x, stats.indicators(label)])
    assert 0.3 < alone <= more < alone + 0.01
    assert stats.deviance_explained(x > 0, [x]) > 0.98  # separable, and finite
    assert stats.deviance_explained(hits, [np.ones(3000)]) == pytest.approx(0, abs=1e-9)
