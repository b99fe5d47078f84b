"""Pictures of the inside of a text, from real records of a tiny model: what is drawn is what the record says."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from harness_world import LAYERS, make_world
from matplotlib.colors import to_rgb
from PIL import Image
from thinning import first

from quicksilver.data.annotation import word_classes
from quicksilver.experiments.inside import sentences
from quicksilver.records.store import Store
from quicksilver.report.artefacts import Outcome, find
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure
from quicksilver.runtime.errors import ConfigError

ARTEFACTS = [("table", "5"), *(("figure", number) for number in ("5", "9", "13", "14", "17", "19", "20", "21", "22"))]
SENTENCES = ["abcd efga bcd hagf dcba", "abc de.", "hg abc"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By row key, from one run each."""
    folder = tmp_path_factory.mktemp("inside")
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
        rows = [make() for make in (sentences.halting, sentences.overridden, sentences.quantization, sentences.everything)]
    records = ensure([compose([*words, *row.overrides]) for row in rows])
    store = Store(folder / "results")
    return {row.key: Outcome(row, record, store.dense_of(record)) for row, record in zip(rows, records, strict=True)}


def build(kind, number, outcomes):
    artefact = find(kind, number)
    return artefact.build([outcomes[row.key] for row in artefact.experiment.rows()], artefact.name)


@pytest.fixture(scope="module")
def made(outcomes):
    """Every artefact, built once for all tests that only read."""
    return {(kind, number): build(kind, number, outcomes) for kind, number in ARTEFACTS}


@pytest.mark.parametrize(("kind", "number"), first(ARTEFACTS))
def test_every_artefact_is_made_and_made_the_same_again(made, outcomes, kind, number, tmp_path):
    first, second = made[kind, number].write(tmp_path / "a"), build(kind, number, outcomes).write(tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert all(path.stat().st_size > 200 for path in first)


@pytest.mark.parametrize(("kind", "number"), ARTEFACTS)
def test_each_says_on_what_it_was_measured(made, outcomes, kind, number):
    artefact = find(kind, number)
    text = made[kind, number].text(None)
    record = outcomes[artefact.experiment.rows()[0].key].record
    said = (
        "Model: tiny",
        "Text: file",
        f"Protocol: {record.protocol.name}",
        "execution: compact",
        record.fingerprint[:12],
        "percentiles",
    )
    assert [part for part in said if part not in text] == []


def test_a_token_halts_where_its_score_falls_below_one_and_nowhere_else(made, outcomes):
    frame = made["figure", "20"].frame
    record = outcomes["halting"].record
    low, high = sentences.window(record)
    assert frame["halts"].any()
    assert (frame.loc[frame["halts"], "score"] < 1).all()
    assert frame.loc[frame["halts"], "layer"].between(low, high).all()
    stays = frame[frame["layer"].between(low, high) & ~frame["halts"] & frame["score"].notna()]
    assert (stays["score"] >= 1).all()
    assert frame.loc[~frame["active"], "score"].isna().all()


def test_the_animation_has_a_picture_a_layer_and_ends_as_the_figure(made):
    first = made["figure", "20"]
    animation = Image.open(io.BytesIO(first.extras["gif"]))
    assert animation.n_frames == LAYERS
    dark = []
    for frame in range(LAYERS):
        animation.seek(frame)
        dark.append((np.asarray(animation.convert("L")) < 200).mean())
    assert dark == sorted(dark)
    assert dark[0] < dark[-1]


def test_forced_and_full_words_are_drawn_as_such(made, outcomes):
    frame = made["figure", "9"].frame
    low, _ = sentences.window(outcomes["overridden"].record)
    by_word = frame.groupby(frame["token"].str.strip())
    assert (by_word.get_group("a")["kind"] == "forced").all()
    assert (by_word.get_group("a")["halts_after_layer"] == low).all()
    assert (by_word.get_group("d")["kind"] == "full").all()
    assert (frame.loc[frame["kind"] == "natural", "halts_after_layer"] < LAYERS).all()
    gone = frame[(frame["layer"] > frame["halts_after_layer"]) & (frame["layer"] == frame["halts_after_layer"] + 1)]
    assert (gone["drift_relative"] == 0).all()


def test_widths_follow_the_entropy_and_its_thresholds(made, outcomes):
    record = outcomes["quantization"].record
    tau = record.thresholds["adaptive_quantization"]
    decided = sentences.layer_after(0.5, LAYERS)
    low, high = tau["tau_low"][decided - 1], tau["tau_high"][decided - 1]
    frame = made["figure", "14"].frame
    expected = np.select([frame["entropy_nats"] < low, frame["entropy_nats"] > high], [2, 8], 4)
    # Widths change nothing in the layers before, so what decided is what the record says.
    assert (frame["width_bits"] == expected).all()
    widths = made["figure", "13"].frame
    assert set(widths.loc[widths["layer"] <= decided, "held"]) == {sentences.UNTOUCHED}
    sentence = frame[frame["text"] == sentences.SENTENCE].set_index("slot")["width_bits"]
    last = widths[widths["layer"] == LAYERS].set_index("slot")["bits"]
    assert (last == sentence).all()


def test_the_walkthrough_agrees_with_the_record(made, outcomes):
    table = made["table", "5"]
    signals = outcomes["all four"].record.signals(sentences.SENTENCE)
    last = signals[signals["layer"] == LAYERS].set_index("slot")
    frame = table.frame.set_index("slot")
    fused = frame["fused_into"].notna()
    assert fused.any()
    assert (fused == (last["carrier"] != last.index)).all()
    assert frame["parts"].sum() == len(frame)
    assert (frame.loc[fused, "parts"] == 0).all()
    assert frame["halts_after_layer"].dropna().between(1, LAYERS - 1).all()
    assert (frame["bits"].fillna(16) == last["bits"]).all()
    assert "".join(frame["token"]) == SENTENCES[0].replace(" ", "")


def test_drift_index_and_attribution_are_those_of_the_record(made, outcomes):
    frame = made["figure", "21"].frame
    signals = outcomes["halting"].record.signals(sentences.SENTENCE)
    pd.testing.assert_series_equal(frame["error_attribution_nats"], signals["dense_gradient_x_state"].abs(), check_names=False)
    assert (frame.groupby("slot")["loss_change_nats"].nunique() <= 1).all()


def test_trajectories_show_tokens_that_did_what_is_said_of_them(made, outcomes):
    frame = made["figure", "17"].frame
    signals = outcomes["all four"].record.signals(sentences.SENTENCE)
    active, carrier = sentences.layers(signals, "active").astype(bool), sentences.layers(signals, "carrier")
    for role, slot in frame.dropna(subset="role").groupby("role")["slot"].first().items():
        if role == "goes through all layers":
            assert active[slot].all()
        elif role == "halts":
            assert not active[slot].all()
        else:
            assert (carrier.loc[LAYERS, slot] != slot) == (role == "is fused into the next")


def test_a_run_without_a_record_is_named(outcomes):
    failed = Outcome(outcomes["halting"].row, reason="failed")
    with pytest.raises(ConfigError, match="'halting'.*failed"):
        find("figure", "20").build([failed], "figure20")


def test_words_are_put_together_before_they_are_classed():
    tokens = ["The", " qu", "ick", " f", "ox", ",", " not", " 42", "\n", "with", "in", " be", "lief"]
    assert word_classes(tokens) == [
        *("function", "content", "content", "content", "content", "other", "function", "other", "other"),
        *("function", "function", "content", "content"),
    ]


def test_widths_can_be_told_apart_in_grey():
    grey = [np.dot(to_rgb(sentences.HELD[sentences.width(bits)]), (0.2126, 0.7152, 0.0722)) for bits in (16, 8, 4, 2)]
    assert min(np.diff(grey)) > 0.1


@pytest.mark.parametrize("number", ["13", "19"])
def test_what_is_not_quantized_is_called_by_the_models_dtype(made, number):
    figure = made["figure", number]
    legends = [axes.get_legend() for axes in figure.drawing.axes]
    words = [text.get_text() for legend in legends if legend is not None for text in legend.get_texts()]
    assert "float32, untouched" in words
    assert "16 bits" not in " ".join((*words, *figure.caption))


def test_tokens_can_be_read():
    assert sentences.labels([" a", "", " ", "\n", "x\ty", "$5", "\ufffd"]) == ["a", "␣", "␣", "⏎", "x⏎y", r"\$5", "·"]


def test_drawing_needs_no_torch(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; from quicksilver.report.artefacts import find; assert find('table', '5').experiment.rows(); "
        "import quicksilver.records.record, quicksilver.cli.commands.reproduce; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
