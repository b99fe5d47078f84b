"""Figure 13: bit-width of each token by layer, from the layer at which widths are decided."""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import Figure, panels, style

from . import sentences

READS = sentences.READ
TEXT = sentences.SENTENCE


def rows() -> list[Row]:
    """One run."""
    return [sentences.quantization()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """A row a token, a column a layer."""
    _, record = sentences.measured(outcomes, "quantization")
    signals = record.signals(TEXT)
    frame = signals.loc[signals["layer"] > 0, ["layer", "slot", "token", "bits", "active", "carrier", "entropy_nats"]].copy()
    frame["held"] = sentences.held(frame)
    states = sentences.layers(frame, "held").T  # tokens × layers
    n_tokens, n_layers = states.shape
    with style():
        drawing, axes = panels(size=(6.2, 0.135 * n_tokens + 0.9))
        panel = axes[0, 0]
        sentences.draw_held(panel, states, extent=(0.5, n_layers + 0.5, n_tokens - 0.5, -0.5))
        panel.set_yticks(range(n_tokens), sentences.labels(record.texts[TEXT].tokens), fontsize=6.5)
        panel.set_xticks(range(1, n_layers + 1))
        for edge in range(1, n_tokens):
            panel.axhline(edge - 0.5, color="white", linewidth=0.5, linestyle="-", marker="")
        decided = int(frame.loc[frame["bits"] < 16, "layer"].min()) if (frame["bits"] < 16).any() else None
        if decided is not None:
            panel.axvline(decided - 0.5, color="black", linewidth=1, linestyle="--", marker="")
            panel.text(decided - 0.5, -0.8, "widths decided", ha="center", va="bottom", fontsize=7)
        panel.set(xlabel="layer", ylabel="token")
        panel.legend(
            handles=sentences.held_legend(frame["held"], record.model.dtype),
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
            title="held at",
        )
    counts = frame.loc[frame["layer"] == n_layers, "bits"].value_counts().sort_index(ascending=False)
    caption = sentences.caption(
        outcomes,
        TEXT,
        "Bit-width of each token in each layer: of the inputs of linear layers and of its K/V entries. In the last layer "
        + ", ".join(f"{count} tokens are at {sentences.width(int(bits))}" for bits, count in counts.items())
        + f". Before the dashed line everything is {record.model.dtype}. The paper decides after layer 15 of 30.",
    )
    return Figure(name, "Figure 13: bit-width of each token by layer", frame, drawing, caption)
