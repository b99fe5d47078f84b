"""Figure 14: entropy of each token where widths are decided, and the width it gets."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from quicksilver.records.record import Record
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import Figure, panels, style

from . import sentences

READS = sentences.read_of_windows("run.entropy_nats")
TEXT = sentences.SENTENCE
LOOK = {8: ("8 bits", "o"), 4: ("4 bits", "s"), 2: ("2 bits", "^")}


def rows() -> list[Row]:
    """One run."""
    return [sentences.quantization()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Left every token of the sentence, right how the windows' tokens are shared among the widths."""
    _, record = sentences.measured(outcomes, "quantization")
    decided, low, high = decision(record)
    frame = pd.concat([assigned(record, text, decided) for text in range(len(record.texts))], ignore_index=True)
    sentence, windows = frame[frame["text"] == TEXT], frame[frame["text"] >= sentences.WINDOW]
    with style():
        drawing, axes = panels(1, 2, size=(10, 3.6), width_ratios=[3, 1])
        left, right = axes[0]
        _dots(left, sentence)
        for tau, label in ((low, "tau_low"), (high, "tau_high")):
            left.axhline(tau, color="black", linewidth=0.8, linestyle="--", marker="")
            left.text(len(sentence) - 0.3, tau, f" {label}\n {tau:.2f}", va="center", fontsize=6.5)
        left.set_xticks(range(len(sentence)), sentences.labels(sentence["token"]), rotation=90, fontsize=6.5)
        left.set(xlabel="token", ylabel=f"entropy after layer {decided} (nats)", xlim=(-0.7, len(sentence) - 0.3), ylim=(0, None))
        left.grid(visible=False, axis="x")
        left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
        _shares(right, windows)
    caption = sentences.caption(
        outcomes,
        TEXT,
        f"Left: entropy of each token after layer {decided}, where bit-widths are decided (logit lens). Below tau_low a token gets 2 bits, up to "
        f"tau_high 4, above it 8. Right: the widths of {len(windows)} tokens of the run's text ({windows['text'].nunique()} windows).",
        "The thresholds are the 30th and the 70th percentile on calibrating text. Tokens of a short sentence have little context, so that their "
        "entropies lie higher.",
    )
    return Figure(name, "Figure 14: bit-width by entropy", frame, drawing, caption)


def decision(record: Record) -> tuple[int, float, float]:
    """The layer, from 1, after which widths are decided, and the two thresholds there in nats."""
    entry, tau = record.config["modules"]["adaptive_quantization"], record.thresholds["adaptive_quantization"]
    layer = sentences.layer_after(entry["depth"], record.model.layers)
    return layer, tau["tau_low"][layer - 1], tau["tau_high"][layer - 1]


def assigned(record: Record, text: int, decided: int) -> pd.DataFrame:
    """Per token of a text: `entropy_nats` after layer `decided` and its `width_bits` from then on."""
    signals = record.signals(text)
    after = signals.loc[signals["layer"] == decided, ["slot", "token", "entropy_nats"]].reset_index(drop=True)
    then = signals[signals["layer"] == decided + 1].reset_index(drop=True)
    return after.assign(text=text, width_bits=then["bits"])


def _dots(axes: Axes, sentence: pd.DataFrame) -> None:
    axes.vlines(sentence["slot"], 0, sentence["entropy_nats"], color="#d8d8d8", linewidth=0.8, zorder=1)
    for width, (label, marker) in LOOK.items():
        members = sentence[sentence["width_bits"] == width]
        axes.scatter(
            members["slot"],
            members["entropy_nats"],
            s=26,
            marker=marker,
            color=sentences.HELD[label],
            edgecolor="black",
            linewidth=0.4,
            label=label,
            zorder=3,
        )


def _shares(axes: Axes, windows: pd.DataFrame) -> None:
    share = windows["width_bits"].value_counts(normalize=True) * 100
    names = {width: label for width, (label, _) in LOOK.items()}
    values = [float(share.get(width, 0.0)) for width in names]
    axes.barh(
        range(len(names)), values, color=[sentences.HELD[label] for label in names.values()], edgecolor="black", linewidth=0.4
    )
    for i, value in enumerate(values):
        axes.text(value, i, f" {value:.0f}%", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names.values())
    axes.invert_yaxis()
    axes.set(xlabel="tokens (%)", xlim=(0, max(values) * 1.2), title="Running text")
    axes.grid(visible=False, axis="y")
