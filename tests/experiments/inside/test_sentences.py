"""Pictures of the inside of a text, from real records of a tiny model: what is drawn is what the record says."""

import io
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pandas as pd
import pytest
from harness_world import LAYERS
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch
from PIL import Image
from thinning import first

from quicksilver.data.annotation import word_classes
from quicksilver.experiments.inside import held as drawn
from quicksilver.experiments.inside import sentences
from quicksilver.records.store import Store
from quicksilver.report.artefacts import Outcome, find
from quicksilver.report.figure import panels, style
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure
from quicksilver.runtime.errors import ConfigError

NUMBERS = ("5", "2", "9", "10", "11", "12", "13", "14", "19", "20", "21", "22")
ARTEFACTS = [("table", "5"), *(("figure", number) for number in NUMBERS)]
SENTENCES = ["abcd efga bcd hagf dcba", "abc de.", "hg abc"]
NAMED = ("modules.halting.forced_ids=[a]", "modules.halting.full_ids=[d]")  # words of these, not of the paper's sentence


@pytest.fixture(scope="module")
def outcomes(world, tmp_path_factory):
    """By row key, from one run each."""
    results = tmp_path_factory.mktemp("inside")
    words = [word for word in world if not word.startswith("measure")]
    texts = ",".join(f"'{sentence}'" for sentence in SENTENCES)
    words += [f"results_dir={results}", f"measure.signals.sentences=[{texts}]"]
    words += ["measure.signals.windows=1", "measure.audit.enabled=false", "dataset.windows=8", "protocol.batch_size=8"]
    rows = [
        replace(row, overrides=(*row.overrides[:-2], *NAMED)) if key == "overridden" else row
        for key, row in sentences.RUNS.items()
    ]
    records = ensure([compose([*words, *row.overrides]) for row in rows])
    store = Store(results)
    return {row.key: Outcome(row, record, store.dense_of(record)) for row, record in zip(rows, records, strict=True)}


def build(kind, number, outcomes):
    artefact = find(kind, number)
    return artefact.build([outcomes[row.key] for row in artefact.experiment.rows()], artefact.name)


@pytest.fixture(scope="module")
def made(outcomes):
    """Every artefact by kind and number, drawn when it is first asked for."""
    return cache(lambda kind, number: build(kind, number, outcomes))


@pytest.fixture(scope="module")
def signals(outcomes):
    """By row key, the signals of the first sentence."""
    return {key: one.record.signals(sentences.SENTENCE) for key, one in outcomes.items()}


# --- every artefact ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "number"), first(ARTEFACTS))
def test_every_artefact_is_made_and_made_the_same_again(made, outcomes, kind, number, tmp_path):
    first, second = made(kind, number).write(tmp_path / "a"), build(kind, number, outcomes).write(tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert all(path.stat().st_size > 200 for path in first)


@pytest.mark.parametrize(("kind", "number"), ARTEFACTS)
def test_each_says_on_what_it_was_measured_and_every_axis_what_it_shows(made, outcomes, kind, number):
    text = " ".join(made(kind, number).text(None).split())  # not as it is wrapped
    keys = [row.key for row in find(kind, number).experiment.rows()]
    said = ["Model: tiny", "Text: file", "execution: compact", "Records: ", "perplexity"]
    said += [part for key in keys for part in (outcomes[key].record.protocol.name, outcomes[key].record.fingerprint[:12])]
    said += ["percentiles"] if keys != ["fusing"] else []  # fusion alone has no threshold
    assert [part for part in said if part not in text] == []
    assert "Thresholds: ," not in text
    if number in ("2", "10", "11", "12"):
        assert all(axes.get_xlabel() for axes in made(kind, number).drawing.axes)
        assert any(axes.get_ylabel() for axes in made(kind, number).drawing.axes)


def test_a_run_without_a_record_is_named(outcomes):
    failed = Outcome(outcomes["halting"].row, reason="failed")
    with pytest.raises(ConfigError, match="'halting'.*failed"):
        find("figure", "20").build([failed], "figure20")


def test_tokens_can_be_read():
    assert sentences.labels([" a", "", " ", "\n", "x\ty", "$5", "\ufffd"]) == ["a", "␣", "␣", "⏎", "x⏎y", r"\$5", "·"]


# --- halting ----------------------------------------------------------------------------------------------------------------------
def test_a_token_halts_where_its_score_falls_below_one_and_nowhere_else(made, outcomes):
    frame = made("figure", "20").frame
    low, high = sentences.window(outcomes["halting"].record)
    assert frame["halts"].any()
    assert (frame.loc[frame["halts"], "score"] < 1).all()
    assert frame.loc[frame["halts"], "layer"].between(low, high).all()
    stays = frame[frame["layer"].between(low, high) & ~frame["halts"] & frame["score"].notna()]
    assert (stays["score"] >= 1).all()
    assert frame.loc[~frame["active"], "score"].isna().all()


def test_the_animation_has_a_picture_a_layer_and_ends_as_the_figure(made):
    animation = Image.open(io.BytesIO(made("figure", "20").extras["gif"]))
    assert animation.n_frames == LAYERS
    dark = []
    for frame in range(LAYERS):
        animation.seek(frame)
        dark.append((np.asarray(animation.convert("L")) < 200).mean())
    assert dark == sorted(dark)
    assert dark[0] < dark[-1]


def test_forced_and_full_words_are_drawn_as_such(made, outcomes):
    frame = made("figure", "9").frame
    low, _ = sentences.window(outcomes["overridden"].record)
    by_word = frame.groupby(frame["token"].str.strip())
    assert (by_word.get_group("a")["kind"] == "forced").all()
    assert (by_word.get_group("a")["halts_after_layer"] == low).all()
    assert (by_word.get_group("d")["kind"] == "full").all()
    assert (frame.loc[frame["kind"] == "natural", "halts_after_layer"] < LAYERS).all()
    assert (frame.loc[frame["layer"] == frame["halts_after_layer"] + 1, "drift_relative"] == 0).all()


def test_drift_index_and_attribution_are_those_of_the_record(made, signals):
    frame, gradient = made("figure", "21").frame, signals["halting"]["dense_gradient_x_state"]
    pd.testing.assert_series_equal(frame["error_attribution_nats"], gradient.abs(), check_names=False)
    assert (frame.groupby("slot")["loss_change_nats"].nunique() <= 1).all()


def test_words_are_put_together_before_they_are_classed():
    tokens = ["The", " qu", "ick", " f", "ox", ",", " not", " 42", "\n", "with", "in", " be", "lief"]
    assert word_classes(tokens) == [
        *("function", "content", "content", "content", "content", "other", "function", "other", "other"),
        *("function", "function", "content", "content"),
    ]


# --- bit-widths -------------------------------------------------------------------------------------------------------------------
def test_widths_follow_the_entropy_and_its_thresholds(made, outcomes):
    decided, low, high = drawn.decision(outcomes["quantization"].record)
    assert decided == sentences.layer_after(0.5, LAYERS)
    frame = made("figure", "14").frame
    # Widths change nothing in the layers before, so what decided is what the record says.
    assert (frame["width_bits"] == np.select([frame["entropy_nats"] < low, frame["entropy_nats"] > high], [2, 8], 4)).all()
    widths = made("figure", "13").frame
    assert set(widths.loc[widths["layer"] <= decided, "held"]) == {drawn.UNTOUCHED}
    sentence = frame[frame["text"] == sentences.SENTENCE].set_index("slot")["width_bits"]
    assert (widths[widths["layer"] == LAYERS].set_index("slot")["bits"] == sentence).all()


def test_widths_can_be_told_apart_in_grey():
    grey = [np.dot(to_rgb(drawn.HELD[drawn.width(bits)]), (0.2126, 0.7152, 0.0722)) for bits in (16, 8, 4, 2)]
    assert min(np.diff(grey)) > 0.1


@pytest.mark.parametrize("number", ["13", "19"])
def test_what_is_not_quantized_is_called_by_the_models_dtype(made, number):
    figure = made("figure", number)
    legends = [axes.get_legend() for axes in figure.drawing.axes]
    words = [text.get_text() for legend in legends if legend is not None for text in legend.get_texts()]
    assert "float32, untouched" in words
    assert "16 bits" not in " ".join((*words, *figure.caption))


# --- one sentence under all four --------------------------------------------------------------------------------------------------
def test_the_walkthrough_agrees_with_the_record(made, signals):
    last = signals["all four"].query("layer == @LAYERS").set_index("slot")
    frame = made("table", "5").frame.set_index("slot")
    fused = frame["fused_into"].notna()
    assert fused.any()
    assert (fused == (last["carrier"] != last.index)).all()
    assert frame["parts"].sum() == len(frame)
    assert (frame.loc[fused, "parts"] == 0).all()
    assert frame["halts_after_layer"].dropna().between(1, LAYERS - 1).all()
    assert (frame["bits"].fillna(16) == last["bits"]).all()
    assert "".join(frame["token"]) == SENTENCES[0].replace(" ", "")


def test_trajectories_show_tokens_that_did_what_is_said_of_them(made, signals):
    frame = made("figure", "17").frame
    active, carrier = (sentences.layers(signals["all four"], name) for name in ("active", "carrier"))
    for role, slot in frame.dropna(subset="role").groupby("role")["slot"].first().items():
        if role in ("goes through all layers", "halts"):
            assert active[slot].all() == (role != "halts")
        else:
            assert (carrier.loc[LAYERS, slot] != slot) == (role == "is fused into the next")


def test_figure_2_has_all_four_panels_and_their_data(made):
    assert find("figure", "2b").name == "figure02"
    figure = made("figure", "2")
    assert list(figure.frame["panel"].unique()) == ["overridden", "all four", "fusing", "quantization"]
    assert [axes.get_title(loc="left")[:3] for axes in figure.drawing.axes] == ["(a)", "(b)", "(c)", "(d)"]
    counted = figure.frame[figure.frame["panel"] == "overridden"].groupby("kind")["slot"].nunique()
    legend = [text.get_text() for text in figure.drawing.axes[0].get_legend().get_texts()]
    assert f"forced to halt ({counted['forced']})" in legend


# --- K/V entries ------------------------------------------------------------------------------------------------------------------
def test_entries_are_what_the_cache_has_and_figure_10_shows_the_share_that_all_prompts_hold(made, signals):
    signals = signals["all four"]
    entries = drawn.entries(signals)
    assert set(entries) <= set(drawn.ENTRIES)
    assert (entries.isin(["written", "kept"]) == (signals["kv"] & (signals["carrier"] == signals["slot"]))).all()
    assert ((entries == "written") <= signals["active"]).all()
    assert (entries[signals["layer"] == 0] == "written").all()
    frame = made("figure", "10").frame
    shares = frame[frame["entry"] == "all prompts"]
    assert list(shares["layer"]) == list(range(1, LAYERS + 1))
    assert shares["entries_pct"].iloc[0] == shares["entries_pct"].max() == 100
    assert 0 <= shares["entries_pct"].min() < 100


def test_the_map_has_a_bar_for_each_run_of_equal_entries():
    states = pd.DataFrame([["written", "written", "skipped"], ["written", "skipped", "skipped"]], index=[1, 2])
    with style():
        _, axes = panels()
        drawn.draw_entries(axes[0, 0], states)
    corners = [path.vertices[:4] for c in axes[0, 0].collections for path in c.get_paths()]
    bars = sorted((one[:, 0].min(), one[:, 0].max(), one[:, 1].min()) for one in corners)
    assert bars == [(-0.5, 0.5, 1.5), (-0.5, 1.5, 0.5), (0.5, 2.5, 1.5), (1.5, 2.5, 0.5)]


# --- fused tokens -----------------------------------------------------------------------------------------------------------------
def test_a_life_ends_where_a_neighbour_takes_over(signals):
    fused = signals["fusing"]
    lives, carriers = drawn.lives(fused).set_index("slot"), sentences.layers(fused, "carrier")
    merged = lives[lives["into"] != lives.index]
    assert len(merged) > 0
    for slot, life in merged.iterrows():
        assert carriers.loc[life["until"], slot] == slot
        assert carriers.loc[life["until"] + 1, slot] == life["into"] > slot
        assert life["tokens"] == 0
    assert (lives.loc[lives["into"] == lives.index, "until"] == LAYERS).all()
    sizes = drawn.sizes(fused)
    assert (sizes.sum(axis=1) == len(lives)).all()
    assert (sizes.loc[0] == 1).all()
    assert sizes.loc[LAYERS].tolist() == lives["tokens"].tolist()


def test_phrases_are_the_words_that_went_together(signals):
    words, lives = drawn.phrases(signals["fusing"]), drawn.lives(signals["fusing"]).set_index("slot")
    assert set(words.index) == set(lives.index[lives["tokens"] > 1])
    for slot, text in words.items():
        assert len(text) == lives.loc[slot, "tokens"]  # one token is one byte here
        assert text in SENTENCES[sentences.SENTENCE]
    assert drawn.phrase(" a\n  b$") == r"a b\$"
    assert drawn.phrase("\n\n") == "⏎"
    assert len(drawn.phrase("word " * 20, 12)) == 12


def test_there_is_an_arrow_for_each_fusion_inside_the_stretch(signals):
    lives = drawn.lives(signals["fusing"])
    for across, slots in product((True, False), (range(len(lives)), range(4, 10))):
        with style():
            _, axes = panels()
            drawn.draw_lives(axes[0, 0], signals["fusing"], slots, across=across)
        inside = lives[lives["slot"].isin(slots) & lives["into"].isin(slots) & (lives["into"] != lives["slot"])]
        assert sum(isinstance(patch, FancyArrowPatch) for patch in axes[0, 0].patches) == len(inside)
