"""Figure 22: halting depth by token, function words against content words.

Left the paper's sentence; right what the run says of a few hundred tokens, because one sentence is no evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.patches import Patch

from quicksilver.data.annotation import FUNCTION_OR_CONTENT, word_classes
from quicksilver.records.record import Record
from quicksilver.records.stats import bootstrap
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.figure import DASHES, HATCHES, PALETTE, Figure, panels, style

from . import sentences

READS = sentences.read_of_windows()
LOOK = {kind: (PALETTE[i], HATCHES[j], DASHES[j]) for kind, i, j in (("function", 1, 1), ("content", 2, 0), ("other", 4, 2))}

LEAST_TOKENS = 50  # for a mean


def rows() -> list[Row]:
    """One run."""
    return [sentences.halting()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Bars for the sentence, survival curves for the windows."""
    _, record = sentences.measured(outcomes, "halting")
    texts = range(len(record.texts))
    frame = pd.concat(
        [depths(record, text) for text in texts if text in (sentences.FOX, *texts[sentences.WINDOW :])], ignore_index=True
    )
    sentence, windows = frame[frame["text"] == sentences.FOX], frame[frame["text"] >= sentences.WINDOW]
    n_layers = record.model.layers
    with style():
        drawing, axes = panels(1, 2, size=(9, 3.4), width_ratios=[1.15, 1])
        left, right = axes[0]
        for kind, members in sentence.groupby("class"):
            colour, hatch, _ = LOOK[str(kind)]
            left.bar(members["slot"], members["halts_after_layer"], color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
        left.set_xticks(sentence["slot"], sentences.labels(sentence["token"]), rotation=90)
        left.axhline(n_layers, color="black", linewidth=0.8, linestyle="--", marker="")
        left.text(len(sentence) - 0.5, n_layers + 0.15, "never halted", ha="right", va="bottom", fontsize=7)
        left.set(
            xlabel="token", ylabel="layers gone through before halting", ylim=(0, 1.25 * n_layers), title="The paper's sentence"
        )
        left.set_yticks(range(0, n_layers + 1, 4))
        left.grid(visible=False, axis="x")
        depth = np.arange(1, n_layers + 1)
        for kind in FUNCTION_OR_CONTENT:
            halts = windows.loc[windows["class"] == kind, "halts_after_layer"].to_numpy()
            if len(halts):
                active = [100 * np.mean(halts >= layer) for layer in depth]
                right.plot(
                    depth,
                    active,
                    color=LOOK[kind][0],
                    linestyle=LOOK[kind][2],
                    label=f"{kind} ({len(halts)})",
                    drawstyle="steps-mid",
                )
        right.set(
            xlabel="layer",
            ylabel="tokens not yet halted (%)",
            ylim=(0, 105),
            title=f"{windows['text'].nunique()} windows of the run's text",
        )
        right.legend(title="part of a … word (tokens)", loc="upper right")
        handles = [
            Patch(facecolor=LOOK[k][0], hatch=LOOK[k][1], edgecolor="white", label=k)
            for k in FUNCTION_OR_CONTENT
            if (sentence["class"] == k).any()
        ]
        left.legend(handles=handles, title="part of a … word", loc="upper left", ncols=3)
    return Figure(name, "Figure 22: function words against content words", frame, drawing, _caption(outcomes, windows, n_layers))


def depths(record: Record, text: int) -> pd.DataFrame:
    """Per token of a text: `class` of its word and `halts_after_layer`, the number of layers if it never halts."""
    signals = record.signals(text)
    tokens = record.texts[text].tokens
    halts = sentences.halted_after(sentences.layers(signals, "active"))
    return pd.DataFrame(
        {"text": text, "slot": halts.index, "token": tokens, "class": word_classes(tokens), "halts_after_layer": halts.to_numpy()}
    )


def _caption(outcomes: Sequence[Outcome], windows: pd.DataFrame, n_layers: int) -> tuple[str, ...]:
    halted = windows.assign(halted=windows["halts_after_layer"] < n_layers).groupby("class")["halted"].mean() * 100
    said = ", ".join(f"{kind} {halted[kind]:.0f}%" for kind in FUNCTION_OR_CONTENT if kind in halted)
    return sentences.caption(
        outcomes,
        sentences.FOX,
        f"Share of the windows' tokens that halt somewhere: {said}. The paper (Table 12) says 68 to 91% of function words and 18.5% of content "
        "words, at layer 15 of 30.",
        "Classes by a closed list of English function words, of the whole word that a token is a part of; other: no letters. Halted tokens "
        "take part again in the last layers, which is not drawn.",
    )


def halt_layer_of_30(panel: Mapping[str, Outcome]) -> Estimate | None:
    """Mean layer after which function words of the windows halt, of those that halt, scaled to the paper's 30 layers."""
    record = panel["halting"].record
    if record is None:
        return None
    found = pd.concat([depths(record, text) for text in range(sentences.WINDOW, len(record.texts))])
    n_layers = record.model.layers
    halted = found[(found["class"] == "function") & (found["halts_after_layer"] < n_layers)]
    if len(halted) < LEAST_TOKENS:
        return None
    return Estimate(*map(float, bootstrap(lambda layers: 30 / n_layers * layers.mean(-1), halted["halts_after_layer"])))


ANSWERS = {
    f"{claim}.function_words.halt_layer_of_30": AnsweredBy(
        "", "halting", of=halt_layer_of_30, note="of function words that halt, in two windows; the interval is over tokens"
    )
    for claim in ("b6", "figure22")
}
