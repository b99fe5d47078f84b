"""Measurements on gold annotation, in records of a tiny model: what they say is what counting by hand says."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from harness_world import make_treebank, make_world
from safetensors.numpy import load_file

from quicksilver.measure.words import ConstituentsResult, WordClassesResult, WordSignalsResult, inside
from quicksilver.records.record import Record
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.run import ensure
from quicksilver.runtime import Trace
from quicksilver.runtime.errors import ConfigError

FUSION = [f"modules.token_fusion.{option}" for option in ("rule=capacity", "tau_fuse=null", "max_group=3")]
HALTING = [
    "modules=[halting]",
    *(f"modules.halting.{option}" for option in ("tau_drift=p60", "tau_entropy=null", "resume_layers=0")),
]


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
    more = ["modules=[token_fusion]", *FUSION, "protocol=continuation", "measure.constituents.enabled=true"]
    (record,) = ensure([compose([*words, *more])])
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


def test_a_class_is_that_of_the_tokens_own_word(halted: Record, words: list[str]):
    config = compose([*words, "modules=[]"])
    windows = RunContext().windows(config, "test")
    tokens = pd.read_parquet(halted.path / "words.parquet")
    vocabulary = RunContext().model(config).tokenizer.convert_ids_to_tokens(range(257))
    spelled = tokens.groupby(["window", "word"]).agg(ids=("token_id", list), kind=("class", "first"), pieces=("pieces", "first"))
    whole = spelled[spelled["ids"].map(len) == spelled["pieces"]]
    kinds = {"the": "determiner", "a": "determiner", "in": "preposition", "dog": "content", "saw": "content", ".": "other"}
    for row in whole.itertuples():
        word = "".join(vocabulary[one] for one in row.ids)
        assert kinds.get(word, row.kind) == row.kind
    assert len(whole) > 100
    assert windows.annotated is not None
    assert (tokens["slot"] < 96).all()


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
    small = [*words, "protocol.window_tokens=22", "protocol.prompt_tokens=16", *HALTING]
    (record,) = ensure([compose(small)])
    found = record.measured("word_classes", WordClassesResult)
    assert found.counted.long_sentences > 0
    assert found.counted.sentences > 0


def test_annotation_is_part_of_what_a_record_is_of(words: list[str], tmp_path):
    bank = make_treebank(tmp_path / "bank")
    config = [*words, "modules=[]", f"dataset.files.test={bank}"]
    before = RunContext().identity(compose(config))
    file = bank / "dep" / "two.conllu"
    file.write_text(file.read_text().replace("\tVBD\t", "\tVBN\t"))
    after = RunContext().identity(compose(config))
    assert before.digests["text"] == after.digests["text"]
    assert before.fingerprint != after.fingerprint


def test_without_annotation_or_trees_there_is_no_number(words: list[str], tmp_path):
    with pytest.raises(ConfigError, match=r"measure\.word_classes\.enabled needs annotation.*dataset=gum"):
        compose(["modules=[halting]", "measure=words"])
    with pytest.raises(ConfigError, match=r"measure\.word_classes\.depth=1"):
        compose([*words, "measure.word_classes.depth=1"])
    flat = tmp_path / "flat.conllu"
    flat.write_text((make_treebank(tmp_path / "bank") / "dep" / "two.conllu").read_text())
    more = ["modules=[halting_attention]", "protocol=continuation", "measure.constituents.enabled=true"]
    with pytest.raises(ConfigError, match="needs gold trees"):
        ensure([compose([*words, *more, f"dataset.files.test={flat}"])])
