"""Figure 2: the four mechanisms on one sentence: (a) halting, (b) KV skipping, (c) fusion, (d) bit-widths.

Each panel is the run that another figure shows larger: 9, 10, 11 and 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from quicksilver.records.record import Record
from quicksilver.report.artefacts import Outcome
from quicksilver.report.figure import GREY, PALETTE, Figure, panels, style

from .. import drawing as draw
from . import bit_widths, sentences, skipped_and_fused
from .halting import curves

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


rows = sentences.runs(*PANELS)  # those of figures 9, 10, 11 and 13


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """One below the other; the token axes are the same sentence."""
    records = {key: sentences.measured(outcomes, key) for key in PANELS}
    tokens = sentences.labels(records["fusing"].texts[TEXT].tokens)
    with style():
        drawing, axes = panels(len(PANELS), 1, size=(9, 16))
        frames = []
        for axis, (key, title), panel in zip(axes.flat, PANELS.items(), (_halting, _entries, _lives, _widths), strict=True):
            frame, handles = panel(axis, records[key])
            frames.append(frame.assign(panel=key))
            draw.legend_above(axis, handles, ncols=3 if key in ("overridden", "fusing") else 4, borderaxespad=0.2)
            axis.set_title(title, weight="bold", pad=18)
            if key != "overridden":
                draw.labels_below(axis, tokens)
                axis.set(xlabel="token", ylabel="layer")
    entries = "; ".join(f"{name}: {said.partition(': ')[2]}" for name, (said, _) in skipped_and_fused.ENTRIES.items())
    caption = sentences.caption(
        outcomes,
        TEXT,
        "(a) Drift relative to the state, by layer; a curve ends where its token halts. (b) K/V entries under all four mechanisms; "
        f"{entries}. (c) Fusion in steps: a dashed line ends in a neighbour, a thick line carries several tokens. (d) "
        "Bit-widths by entropy. Figures 9, 10, 11 and 13 are larger.",
    )
    title, data = "Figure 2: the mechanisms on one sentence", pd.concat(frames, ignore_index=True)
    return Figure(name, title, data, drawing, caption, finding=_finding(data, len(tokens)))


def _finding(data: pd.DataFrame, tokens: int) -> str:
    """How many tokens each panel has that halt, go into a neighbour, and get fewer than 8 bits."""
    halting, fused, widths = (data[data["panel"] == key] for key in ("overridden", "fusing", "quantization"))
    halted = halting.loc[halting["kind"] != "full", "slot"].nunique()
    merged = int((fused["into"] != fused["slot"]).sum())
    low = widths.loc[widths["bits"] < 8, "slot"].nunique()
    forced = halting.loc[halting["kind"] == "forced", "slot"].nunique()
    return f"Each mechanism alone, on one sentence of {tokens} tokens: {halted} halt ({forced} are forced to), {merged} are fused into a neighbour, {low} get fewer than 8 bits"


def _halting(axes: Axes, record: Record) -> tuple[pd.DataFrame, list[Any]]:
    frame, handles = curves(record), []
    for kind, (colour, marker, dash, words) in KINDS.items():
        members = frame[frame["kind"] == kind]
        for _, token in members.groupby("slot"):
            x, y = (token.loc[token["layer"] <= token["halts_after_layer"], name] for name in ("layer", "drift_relative"))
            draw.line(axes, x, y, color=colour, linestyle=dash, linewidth=0.8, alpha=0.5 if kind == "full" else 0.9)
            if kind != "full":
                end: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5, "markeredgecolor": "white"}
                axes.plot(x.iloc[-1:], y.iloc[-1:], **end)
        look = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4.5, "linewidth": 1}
        handles.append(draw.line_key(f"{words} ({members['slot'].nunique()})", **look))
    axes.set(xlabel="layer", ylabel="relative drift (ratio)", yscale="log", xlim=(1.5, record.model.layers + 0.5))
    axes.set_yticks([0.1, 0.2, 0.5], ["0.1", "0.2", "0.5"])
    axes.minorticks_off()
    return frame[["layer", "slot", "token", "kind", "drift_relative"]], handles


def _entries(axes: Axes, record: Record) -> tuple[pd.DataFrame, list[Any]]:
    signals = record.signals(TEXT)
    frame = sentences.in_layers(signals).assign(entry=skipped_and_fused.entries(signals))
    skipped_and_fused.draw_entries(axes, sentences.layers(frame, "entry"))
    return frame, list(skipped_and_fused.entries_keys(frame["entry"], short=True))


def _lives(axes: Axes, record: Record) -> tuple[pd.DataFrame, list[Any]]:
    signals = record.signals(TEXT)
    frame = skipped_and_fused.lives(signals)
    skipped_and_fused.draw_lives(axes, signals, range(len(frame)), across=False)
    return frame.rename(columns={"until": "layer"}), list(skipped_and_fused.lives_keys(short=True))


def _widths(axes: Axes, record: Record) -> tuple[pd.DataFrame, list[Any]]:
    signals = record.signals(TEXT)
    frame = sentences.in_layers(signals, "bits", "entropy_nats").assign(held=bit_widths.held(signals))
    states = sentences.layers(frame, "held")
    bit_widths.draw_held_upwards(axes, states)
    draw.separate_columns(axes, states.shape[1])
    return frame, list(bit_widths.held_keys(frame["held"], record.model.dtype))
