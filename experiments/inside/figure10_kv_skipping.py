"""Figure 10: which K/V entries are written and which are skipped, layer by layer and token by token.

The paper draws three tokens as a scheme; this is a sentence under all four mechanisms, and beside it all prompts of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from quicksilver.records.record import TRACE, Record
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import PALETTE, Figure, panels, style

from . import kv_entries, sentences, trace_counts

READS = (TRACE, *sentences.READ)

TEXT = sentences.SENTENCE


def rows() -> list[Row]:
    """One run."""
    return [sentences.everything()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """The map, and what share of the entries each layer holds."""
    _, record = sentences.measured(outcomes, "all four")
    signals = record.signals(TEXT)
    frame = signals.loc[signals["layer"] > 0, ["layer", "slot", "token", "active", "kv", "carrier"]].copy()
    frame["entry"] = kv_entries.entries(frame)
    shares = held(record)
    with style():
        drawing, axes = panels(1, 2, size=(10, 3.9), width_ratios=[4.4, 1], sharey=True)
        main, side = axes[0]
        kv_entries.draw_entries(main, sentences.layers(frame, "entry"))
        main.set_xticks(
            range(len(record.texts[TEXT].tokens)),
            sentences.labels(record.texts[TEXT].tokens),
            rotation=90,
            fontsize=6.5,
        )
        main.set_yticks(range(1, int(frame["layer"].max()) + 1))
        main.set(xlabel="token", ylabel="layer")
        main.legend(
            handles=kv_entries.entries_legend(frame["entry"]),
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=2,
            borderaxespad=0.3,
        )
        side.barh(shares["layer"], shares["entries_pct"], height=0.8, color=PALETTE[0], edgecolor="white", linewidth=0.3)
        total = shares["kv"].sum() / shares["tokens"].sum()
        side.axvline(100 * total, color=PALETTE[1], linestyle="--", linewidth=1, marker="")
        side.set(xlabel="entries held (%)", xlim=(0, 100), title=f"All prompts: {100 * total:.0f}%")
        side.grid(visible=False, axis="y")
    caption = sentences.caption(
        outcomes,
        TEXT,
        f"Left: the K/V entries of one sentence; {100 * frame['kv'].mean():.0f}% of the dense cache are there. Halted tokens are computed again in "
        "the last layers and have entries there. The first tokens are protected: they keep their entries while they are halted.",
        "Right: the share of K/V entries that each layer holds, over all prompts of the run. Dashed: over all layers together.",
    )
    both = pd.concat([frame, shares.assign(token="", entry="all prompts")], ignore_index=True)
    return Figure(name, "Figure 10: K/V entries, written and skipped", both, drawing, caption)


def held(record: Record) -> pd.DataFrame:
    """Per layer: `tokens` and `kv` entries of all prompts, and their share."""
    layers = trace_counts.by_layer(record)
    found = layers[layers["part"] == "prompt"].groupby("layer", as_index=False)[["tokens", "kv"]].sum()
    return found.assign(entries_pct=100 * found["kv"] / found["tokens"])
