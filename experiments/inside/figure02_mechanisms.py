"""Figure 2: the four mechanisms on one sentence: (a) halting, (b) KV skipping, (c) fusion, (d) bit-widths.

Each panel is the run that another figure shows larger: 9, 10, 11 and 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from quicksilver.records.record import Record
from quicksilver.report.artefacts import Outcome, Row, find
from quicksilver.report.figure import GREY, PALETTE, Figure, panels, style

from . import fused_tokens, kv_entries, sentences

READS = sentences.READ
TEXT = sentences.SENTENCE
PANELS = {
    "overridden": "(a) Dynamic token halting",
    "all four": "(b) KV skipping",
    "fusing": "(c) Token fusion",
    "quantization": "(d) Bit-widths",
}
# forced, natural and full tokens of (a): colour, marker, dash; in the paper red, blue and grey
KINDS: dict[str, tuple[str, str, Any, str]] = {
    "full": (GREY, "", "-", "goes through all layers"),
    "natural": (PALETTE[2], "o", "-", "halts by itself"),
    "forced": (PALETTE[1], "s", (0, (3, 1)), "forced to halt"),
}


def rows() -> list[Row]:
    """The runs of figures 9, 10, 11 and 13."""
    return [sentences.overridden(), sentences.everything(), fused_tokens.fusing(), sentences.quantization()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Two by two; the token axes are the same sentence."""
    records = {key: sentences.measured(outcomes, key)[1] for key in PANELS}
    tokens = sentences.labels(records["fusing"].texts[TEXT].tokens)
    with style():
        drawing, axes = panels(2, 2, size=(11, 7.4))
        frames = [
            _halting(axes[0, 0], records["overridden"]),
            _entries(axes[0, 1], records["all four"]),
            _lives(axes[1, 0], records["fusing"]),
            _widths(axes[1, 1], records["quantization"]),
        ]
        for axis, title in zip(axes.flat, PANELS.values(), strict=True):
            axis.set_title(title, weight="bold", pad=18)
        for axis in axes.flat[1:]:
            axis.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=5)
            axis.set(xlabel="token", ylabel="layer")
    caption = sentences.caption(
        outcomes,
        TEXT,
        "(a) Drift relative to the state, by layer; a curve ends where its token halts. (b) K/V entries under all four "
        "mechanisms. (c) Fusion alone, in steps: a dashed line ends in a neighbour, a thick line carries several tokens. (d) "
        "Bit-widths by entropy, decided at half the depth. Figures 9, 10, 11 and 13 show the panels larger, with their "
        "thresholds.",
    )
    frame = pd.concat([one.assign(panel=key) for key, one in zip(PANELS, frames, strict=True)], ignore_index=True)
    return Figure(name, "Figure 2: the mechanisms on one sentence", frame, drawing, caption)


def _halting(axes: Axes, record: Record) -> pd.DataFrame:
    frame = find("figure", "9").experiment.curves(record)  # type: ignore[attr-defined]
    for kind, (colour, marker, dash, _) in KINDS.items():
        for _, token in frame[frame["kind"] == kind].groupby("slot"):
            gone = token[token["layer"] <= token["halts_after_layer"]]
            axes.plot(
                gone["layer"],
                gone["drift_relative"],
                color=colour,
                linestyle=dash,
                linewidth=0.8,
                marker="",
                alpha=0.5 if kind == "full" else 0.9,
            )
            if kind != "full":
                axes.plot(
                    gone["layer"].iloc[-1:],
                    gone["drift_relative"].iloc[-1:],
                    color=colour,
                    marker=marker,
                    markersize=4.5,
                    markeredgecolor="white",
                )
    axes.set(xlabel="layer", ylabel="relative drift (ratio)", yscale="log", xlim=(1.5, record.model.layers + 0.5))
    axes.set_yticks([0.1, 0.2, 0.5], ["0.1", "0.2", "0.5"])
    axes.minorticks_off()
    counts = frame.groupby("kind")["slot"].nunique()
    handles = [
        Line2D(
            [],
            [],
            color=colour,
            linestyle=dash,
            marker=marker,
            markersize=4.5,
            linewidth=1,
            label=f"{words} ({counts.get(kind, 0)})",
        )
        for kind, (colour, marker, dash, words) in KINDS.items()
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2)
    return frame[["layer", "slot", "token", "kind", "drift_relative"]]


def _entries(axes: Axes, record: Record) -> pd.DataFrame:
    signals = record.signals(TEXT)
    frame = signals.loc[signals["layer"] > 0, ["layer", "slot", "token"]].assign(entry=kv_entries.entries(signals))
    kv_entries.draw_entries(axes, sentences.layers(frame, "entry"))
    axes.legend(
        handles=kv_entries.entries_legend(frame["entry"], short=True),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=4,
        borderaxespad=0.2,
    )
    return frame


def _lives(axes: Axes, record: Record) -> pd.DataFrame:
    signals = record.signals(TEXT)
    frame = fused_tokens.lives(signals)
    fused_tokens.draw_lives(axes, signals, range(len(frame)), across=False)
    axes.legend(
        handles=fused_tokens.lives_legend(short=True), loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2
    )
    return frame.rename(columns={"until": "layer"})


def _widths(axes: Axes, record: Record) -> pd.DataFrame:
    signals = record.signals(TEXT)
    frame = signals.loc[signals["layer"] > 0, ["layer", "slot", "token", "bits", "entropy_nats"]].assign(
        held=sentences.held(signals)
    )
    states = sentences.layers(frame, "held")
    n_layers, n_tokens = states.shape
    sentences.draw_held(axes, states, origin="lower", extent=(-0.5, n_tokens - 0.5, 0.5, n_layers + 0.5))
    for edge in range(1, n_tokens):
        axes.axvline(edge - 0.5, color="white", linewidth=0.4, linestyle="-", marker="")
    axes.legend(
        handles=sentences.held_legend(frame["held"], record.model.dtype),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=4,
        borderaxespad=0.2,
    )
    return frame
