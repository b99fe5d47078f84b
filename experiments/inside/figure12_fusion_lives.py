"""Figure 12: the lives of tokens across layers, with the points of fusion, for a stretch of the run's own text."""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import Figure, panels, style

from . import fused_tokens, sentences

READS = sentences.read_of_windows()
TEXT = sentences.WINDOW
STRETCH = range(100, 140)


def rows() -> list[Row]:
    """The run of Figure 11."""
    return [fused_tokens.fusing()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """A row a token; the words that a super-token carries stand to its right."""
    _, record = sentences.measured(outcomes, "fusing")
    signals = record.signals(TEXT)
    n_tokens, n_layers = int(signals["slot"].max()) + 1, int(signals["layer"].max())
    slots = STRETCH if n_tokens >= STRETCH.stop else range(n_tokens)
    frame = fused_tokens.lives(signals)
    words = fused_tokens.phrases(signals)
    frame["carries"] = frame["slot"].map(words).fillna("")
    shown = frame[frame["slot"].isin(slots)]
    with style():
        drawing, axes = panels(size=(6.8, 0.145 * len(slots) + 1.0))
        panel = axes[0, 0]
        fused_tokens.draw_lives(panel, signals, slots, across=True)
        panel.set_yticks(shown["slot"], sentences.labels(shown["token"]), fontsize=6.5)
        panel.set_xticks(range(1, n_layers + 1))
        panel.set(xlabel="layer", ylabel="token")
        for slot, text in words[words.index.isin(slots)].items():
            panel.text(n_layers + 0.7, slot, fused_tokens.phrase(text, 44), ha="left", va="center", fontsize=6.5)
        panel.legend(handles=fused_tokens.lives_legend(), loc="lower left", bbox_to_anchor=(0, 1.0), ncols=1)
    merged = int((shown["into"] != shown["slot"]).sum())
    caption = sentences.caption(
        outcomes,
        TEXT,
        "Each row is a token, going through the layers from left to right. At a cross it is fused into a later neighbour (arrow), which carries it "
        f"from there on: {merged} of these {len(shown)} tokens are fused, {int((shown['carries'] != '').sum())} super-tokens are left, with the text "
        "they carry at the right. A cross without an arrow: the neighbour is not among these rows.",
        f"Tokens {slots.start} to {slots.stop - 1} of a prompt of {n_tokens}. Fusion acts at every second layer from 0.4 of the depth on.",
    )
    return Figure(name, "Figure 12: tokens of running text under fusion", shown, drawing, caption)
