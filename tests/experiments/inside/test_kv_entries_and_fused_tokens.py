"""Figures 2, 10, 11 and 12, from real records of a tiny model: what is drawn is what the record says."""

from __future__ import annotations

import pandas as pd
import pytest
from harness_world import LAYERS, make_world
from matplotlib.patches import FancyArrowPatch

from quicksilver.experiments.inside import fused_tokens, kv_entries, sentences
from quicksilver.records.store import Store
from quicksilver.report.artefacts import Outcome, find
from quicksilver.report.figure import panels, style
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure

SENTENCES = ["abcd efga bcd hagf dcba", "abc de.", "hg abc"]
NUMBERS = ["2", "10", "11", "12"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By row key, from one run each."""
    folder = tmp_path_factory.mktemp("flows")
    words = [word for word in make_world(folder) if not word.startswith("measure")]
    texts = ",".join(f"'{sentence}'" for sentence in SENTENCES)
    words += [
        f"results_dir={folder / 'results'}",
        f"measure.signals.sentences=[{texts}]",
        "measure.signals.windows=1",
        "measure.audit.probes=1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "FORCED", ("a",))
        patch.setattr(sentences, "FULL", ("d",))
        rows = [make() for make in (sentences.overridden, sentences.quantization, sentences.everything, fused_tokens.fusing)]
    records = ensure([compose([*words, *row.overrides]) for row in rows])
    store = Store(folder / "results")
    return {row.key: Outcome(row, record, store.dense_of(record)) for row, record in zip(rows, records, strict=True)}


def build(number, outcomes):
    artefact = find("figure", number)
    return artefact.build([outcomes[row.key] for row in artefact.experiment.rows()], artefact.name)


@pytest.fixture(scope="module")
def made(outcomes):
    """Every figure, drawn when it is first asked for."""

    class Made(dict):
        def __missing__(self, number):
            self[number] = build(number, outcomes)
            return self[number]

    return Made()


@pytest.fixture(scope="module")
def fused(outcomes):
    return outcomes["fusing"].record.signals(sentences.SENTENCE)


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_every_figure_is_made_the_same_again(made, outcomes, number, tmp_path):
    first, second = made[number].write(tmp_path / "a"), build(number, outcomes).write(tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_caption_says_what_was_measured_and_every_axis_what_it_shows(made, number):
    figure = made[number]
    said = " ".join(figure.caption)
    assert [
        part for part in ("Model: tiny", "Protocol: ", "execution: compact", "Records: ", "perplexity") if part not in said
    ] == []
    assert "Thresholds: ," not in said
    for axes in figure.drawing.axes:
        assert axes.get_xlabel()
    assert any(axes.get_ylabel() for axes in figure.drawing.axes)


def test_part_b_of_figure_2_is_found():
    assert find("figure", "2b").name == "figure02"


def test_entries_are_what_the_cache_has(outcomes):
    signals = outcomes["all four"].record.signals(sentences.SENTENCE)
    entries = kv_entries.entries(signals)
    assert set(entries) <= set(kv_entries.ENTRIES)
    assert (entries.isin(["written", "kept"]) == (signals["kv"] & (signals["carrier"] == signals["slot"]))).all()
    assert ((entries == "written") <= signals["active"]).all()
    assert (entries[signals["layer"] == 0] == "written").all()


def test_the_map_has_a_bar_for_each_run_of_equal_entries():
    states = pd.DataFrame([["written", "written", "skipped"], ["written", "skipped", "skipped"]], index=[1, 2])
    with style():
        _, axes = panels()
        kv_entries.draw_entries(axes[0, 0], states)
    bars = [
        (path.vertices[:4, 0].min(), path.vertices[:4, 0].max(), path.vertices[:4, 1].min())
        for c in axes[0, 0].collections
        for path in c.get_paths()
    ]
    assert sorted(bars) == [(-0.5, 0.5, 1.5), (-0.5, 1.5, 0.5), (0.5, 2.5, 1.5), (1.5, 2.5, 0.5)]


def test_a_life_ends_where_a_neighbour_takes_over(fused):
    lives = fused_tokens.lives(fused).set_index("slot")
    carriers = sentences.layers(fused, "carrier")
    merged = lives[lives["into"] != lives.index]
    assert len(merged) > 0
    for slot, life in merged.iterrows():
        assert carriers.loc[life["until"], slot] == slot
        assert carriers.loc[life["until"] + 1, slot] == life["into"] > slot
        assert life["tokens"] == 0
    assert (lives.loc[lives["into"] == lives.index, "until"] == LAYERS).all()
    assert lives["tokens"].sum() == len(lives)


def test_sizes_count_every_token_in_every_layer(fused):
    sizes = fused_tokens.sizes(fused)
    assert (sizes.sum(axis=1) == sizes.shape[1]).all()
    assert (sizes.loc[0] == 1).all()
    assert sizes.loc[LAYERS].tolist() == fused_tokens.lives(fused)["tokens"].tolist()


def test_phrases_are_the_words_that_went_together(fused):
    words = fused_tokens.phrases(fused)
    lives = fused_tokens.lives(fused).set_index("slot")
    assert set(words.index) == set(lives.index[lives["tokens"] > 1])
    for slot, text in words.items():
        assert len(text) == lives.loc[slot, "tokens"]  # one token is one byte here
        assert text in SENTENCES[sentences.SENTENCE]


@pytest.mark.parametrize("across", [True, False])
def test_there_is_an_arrow_for_each_fusion_inside_the_stretch(fused, across):
    lives = fused_tokens.lives(fused)
    for slots in (range(len(lives)), range(4, 10)):
        with style():
            _, axes = panels()
            fused_tokens.draw_lives(axes[0, 0], fused, slots, across=across)
        inside_ = lives[lives["slot"].isin(slots) & lives["into"].isin(slots) & (lives["into"] != lives["slot"])]
        arrows = [patch for patch in axes[0, 0].patches if isinstance(patch, FancyArrowPatch)]
        assert len(arrows) == len(inside_)


def test_a_long_phrase_is_cut_and_white_space_is_one_space():
    assert fused_tokens.phrase(" a\n  b$") == r"a b\$"
    assert fused_tokens.phrase("\n\n") == "⏎"
    assert len(fused_tokens.phrase("word " * 20, 12)) == 12


def test_figure_10_shows_the_share_that_all_prompts_hold(made):
    figure = made["10"]
    shares = figure.frame[figure.frame["entry"] == "all prompts"]
    assert list(shares["layer"]) == list(range(1, LAYERS + 1))
    assert shares["entries_pct"].between(0, 100).all()
    assert shares["entries_pct"].iloc[0] == 100
    assert shares["entries_pct"].min() < 100


def test_figure_2_has_all_four_panels_and_their_data(made):
    figure = made["2"]
    assert list(figure.frame["panel"].unique()) == ["overridden", "all four", "fusing", "quantization"]
    titles = [axes.get_title(loc="left") for axes in figure.drawing.axes]
    assert [title[:3] for title in titles] == ["(a)", "(b)", "(c)", "(d)"]
    counted = figure.frame[figure.frame["panel"] == "overridden"].groupby("kind")["slot"].nunique()
    legend = [text.get_text() for text in figure.drawing.axes[0].get_legend().get_texts()]
    assert f"forced to halt ({counted['forced']})" in legend
