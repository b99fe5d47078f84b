"""Figure 11: tokens that go into their neighbours, layer by layer, as a tree that grows upwards."""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import Figure, panels, style

from . import fused_tokens, sentences

READS = sentences.READ
TEXT = sentences.SENTENCE


def rows() -> list[Row]:
    """One run."""
    return [fused_tokens.fusing()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """A column a token; the words that a super-token carries stand above it."""
    _, record = sentences.measured(outcomes, "fusing")
    signals = record.signals(TEXT)
    frame, n_layers = fused_tokens.lives(signals), int(signals["layer"].max())
    words = fused_tokens.phrases(signals)
    frame["carries"] = frame["slot"].map(words).fillna("")
    with style():
        drawing, axes = panels(size=(10, 4.8))
        panel = axes[0, 0]
        fused_tokens.draw_lives(panel, signals, range(len(frame)), across=False)
        panel.set_xticks(frame["slot"], sentences.labels(frame["token"]), rotation=90, fontsize=6.5)
        panel.set_yticks(range(1, n_layers + 1))
        panel.set(xlabel="token", ylabel="layer")
        for slot, text in words.items():
            panel.text(
                slot,
                n_layers + 0.7,
                fused_tokens.phrase(text),
                rotation=40,
                ha="left",
                va="bottom",
                fontsize=6.5,
                rotation_mode="anchor",
            )
        panel.legend(handles=fused_tokens.lives_legend(), loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=3)
    merged = (frame["into"] != frame["slot"]).sum()
    caption = sentences.caption(
        outcomes,
        TEXT,
        "Each column is a token, going up through the layers. At every second layer from 0.4 of the depth on, the closest neighbours are fused into "
        f"one token in the place of the later one. {merged} of {len(frame)} tokens are fused into a neighbour, {len(words)} super-tokens are left, with "
        "the text they carry above them.",
    )
    return Figure(name, "Figure 11: tokens that go into their neighbours", frame, drawing, caption)
