"""K/V entries that are skipped (Figure 10) and tokens that are fused into a neighbour (Figures 11 and 12), layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch

from quicksilver.records.record import TRACE, Record
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.figure import PALETTE, Figure, legend_below, panels, style

from .. import drawing as draw
from . import sentences

TEXT = sentences.SENTENCE
STRETCH = range(100, 140)  # tokens of running text that Figure 12 shows

# --- K/V entries ------------------------------------------------------------------------------------------------------------------

# What a token has in the cache of a layer, dark to light: what is said of it, how it looks.
ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "written": ("written: the token takes part", {"facecolor": PALETTE[0]}),
    "kept": ("kept: it is halted, and protected", {"facecolor": PALETTE[2]}),
    "carried": ("none of its own: a neighbour carries it", {"facecolor": "#bdbdbd"}),
    "skipped": ("skipped: it is halted", {"facecolor": "#ffffff", "hatch": "/////"}),
}


def entries(signals: pd.DataFrame) -> pd.Series:
    """What each token has in the cache of each layer, one of `ENTRIES`."""
    held = pd.Series(np.where(signals["active"], "written", "kept"), index=signals.index)
    state = held.where(signals["kv"], "skipped")
    return state.where(signals["carrier"] == signals["slot"], "carried")


def draw_entries(axes: Axes, states: pd.DataFrame) -> None:
    """A map of `ENTRIES`: a row a layer (from 1), a column a token; equal neighbours are one bar, so that hatches run through."""
    for layer, row in states.iterrows():
        values = row.to_numpy()
        edges = np.flatnonzero(np.r_[True, values[1:] != values[:-1], True])
        for start, stop in pairwise(edges):
            _, look = ENTRIES[values[start]]
            bar = [(float(start) - 0.5, float(stop - start))]
            edge = "#9a9a9a" if "hatch" in look else "white"
            axes.broken_barh(bar, (float(layer) - 0.5, 1), edgecolor=edge, linewidth=0, **look)
    n_layers, n_tokens = states.shape
    draw.separate_columns(axes, n_tokens)
    axes.set(xlim=(-0.5, n_tokens - 0.5), ylim=(0.5, n_layers + 0.5))
    axes.grid(visible=False)


def entries_keys(present: Iterable[str], *, short: bool = False) -> list[Patch]:
    """Legend of the entries that are there; `short` for a narrow place."""
    looks = {name: look for name, (_, look) in ENTRIES.items()}
    words = {} if short else {name: said for name, (said, _) in ENTRIES.items()}
    return draw.keys_of(looks, present, words, edgecolor="#9a9a9a", linewidth=0.5)


@artefact(sentences.runs("all four"), (TRACE, *sentences.READ))
def figure10_kv_skipping(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 10: which K/V entries are written and which are skipped, layer by layer and token by token.

    The paper draws three tokens as a scheme; this is a sentence under all four mechanisms, and beside it all prompts of the run.
    """
    record = sentences.measured(outcomes, "all four")
    frame = sentences.in_layers(record.signals(TEXT), "active", "kv", "carrier")
    frame["entry"] = entries(frame)
    shares = held(record)
    with style():
        drawing, axes = panels(1, 2, size=(10, 3.9), width_ratios=[4.4, 1], sharey=True)
        main, side = axes[0]
        draw_entries(main, sentences.layers(frame, "entry"))
        draw.labels_below(main, sentences.labels(record.texts[TEXT].tokens))
        main.set_yticks(range(1, int(frame["layer"].max()) + 1))
        main.set(xlabel="token", ylabel="layer")
        draw.legend_above(main, entries_keys(frame["entry"]), ncols=2, borderaxespad=0.3)
        side.barh(shares["layer"], shares["entries_pct"], height=0.8, color=PALETTE[0], edgecolor="white", linewidth=0.3)
        total = shares["kv"].sum() / shares["tokens"].sum()
        draw.vertical(side, 100 * total, color=PALETTE[1], linestyle="--", linewidth=1)
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
    finding = f"With all four mechanisms, layers hold {100 * total:.0f}% of the dense model's K/V entries of all prompts"
    return Figure(name, "Figure 10: K/V entries, written and skipped", both, drawing, caption, finding=finding)


def held(record: Record) -> pd.DataFrame:
    """Per layer: `tokens` and `kv` entries of all prompts, and their share."""
    from . import trace_counts  # reads traces, with torch: who plans or lists does not wait for it

    found = trace_counts.of_prompts(record, "tokens", "kv")
    return found.assign(entries_pct=100 * found["kv"] / found["tokens"])


# --- fused tokens -----------------------------------------------------------------------------------------------------------------

_ALONE: dict[str, Any] = {"color": PALETTE[2], "linestyle": "-"}
_MERGED: dict[str, Any] = {"color": PALETTE[1], "linestyle": (0, (3, 1))}
_SUPER: dict[str, Any] = {"color": PALETTE[0], "linestyle": "-"}


def lives(signals: pd.DataFrame) -> pd.DataFrame:
    """A row a token: `slot`, `token`, `until`, the last layer (from 1) that it stands in by itself, `into`, the slot that carries it from
    then on (its own where nothing happened), `tokens`, how many it stands for in the end."""
    carriers = sentences.layers(signals, "carrier")
    until = carriers.eq(carriers.columns, axis=1).sum() - 1  # layer 0 is before the first; who was merged away never comes back
    last = carriers.index[-1]
    into = [int(carriers.loc[min(until[slot] + 1, last), slot]) for slot in carriers.columns]
    first = signals[signals["layer"] == 0].set_index("slot")["token"]
    found = pd.DataFrame({"slot": carriers.columns, "token": first.to_numpy(), "until": until.to_numpy(), "into": into})
    return found.assign(tokens=sizes(signals).loc[last].to_numpy())


def sizes(signals: pd.DataFrame) -> pd.DataFrame:
    """How many original tokens each stands for, by layer (from 0) and slot; 0 once a neighbour carries it."""
    carriers = sentences.layers(signals, "carrier")
    return carriers.apply(lambda row: row.value_counts().reindex(carriers.columns, fill_value=0), axis=1)


def phrases(signals: pd.DataFrame) -> pd.Series:
    """By the slot of each super-token at the end: the words that it carries."""
    last = signals[signals["layer"] == signals["layer"].max()].sort_values("slot")
    carried = last.groupby("carrier")["token"].agg(["".join, "size"])
    return carried.loc[carried["size"] > 1, "join"]


def phrase(text: str, most: int = 30) -> str:
    """The words of a super-token on one line, cut after `most` characters."""
    words = " ".join(text.split()).replace("$", r"\$") or "⏎"
    return words if len(words) <= most else f"{words[: most - 1]}…"


def draw_lives(axes: Axes, signals: pd.DataFrame, slots: range, *, across: bool) -> None:
    """The lives of the tokens in `slots`: lines along the layers, arrows where one goes into its neighbour.

    Args:
        across: layers from left to right, a row a token; else upwards, a column a token.
    """
    found, size = lives(signals).set_index("slot"), sizes(signals)
    n_layers = int(size.index[-1])

    def place(slot: float, layer: float) -> tuple[float, float]:
        return (layer, slot) if across else (slot, layer)

    def line(slot: int, start: float, stop: float, **look: Any) -> None:
        draw.line(axes, *zip(place(slot, start), place(slot, stop), strict=True), solid_capstyle="butt", **look)

    for slot in slots:
        end, into = int(found.loc[slot, "until"]) + 0.5, int(found.loc[slot, "into"])
        column = size[slot]
        grown = column[column > 1]
        first = int(grown.index[0]) - 0.5 if len(grown) else end
        merged = into != slot
        line(slot, 0.5, min(first, end), linewidth=1.0, **(_MERGED if merged else _ALONE))
        for layer in range(int(first + 0.5), int(end + 0.5)) if len(grown) else ():
            line(slot, layer - 0.5, layer + 0.5, linewidth=1.2 + 0.9 * (column[layer] - 1), **_SUPER)
        if merged:
            draw.points(axes, *place(slot, end), marker="x", color=_MERGED["color"], markersize=4.5, markeredgewidth=1.2)
            if into in slots:
                # Far arcs are flatter, so that they stay near their layer.
                bend = 0.5 / (into - slot) ** 0.25 if across else -0.5 / (into - slot) ** 0.5
                look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 5.5, "color": _MERGED["color"], "linewidth": 0.8}
                ends, bow = (place(slot, end), place(into, end)), f"arc3,rad={bend}"
                axes.add_patch(FancyArrowPatch(*ends, connectionstyle=bow, shrinkA=2, shrinkB=1, zorder=3, **look))
    along, beside = (axes.set_xlim, axes.set_ylim) if across else (axes.set_ylim, axes.set_xlim)
    along(0.5, n_layers + 0.5)
    beside(*((slots[-1] + 0.7, slots[0] - 0.7) if across else (slots[0] - 0.7, slots[-1] + 0.7)))
    axes.grid(visible=False)


def lives_keys(*, short: bool = False) -> list[Line2D]:
    """Legend of `draw_lives`; `short` for a narrow place."""
    merged, together = "goes into a neighbour (×, arrow)", "super-token: the thicker, the more it carries"
    return [
        draw.line_key("stays alone", linewidth=1.2, **_ALONE),
        draw.line_key("merged" if short else merged, marker="x", markersize=4.5, linewidth=1.0, **_MERGED),
        draw.line_key("super-token" if short else together, linewidth=3, **_SUPER),
    ]


def _named_lives(signals: pd.DataFrame) -> pd.DataFrame:
    frame = lives(signals)
    return frame.assign(carries=frame["slot"].map(phrases(signals)).fillna(""))


@artefact(sentences.runs("fusing"), sentences.READ)
def figure11_fusion_by_layer(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 11: tokens that go into their neighbours, layer by layer, as a tree that grows upwards."""
    signals = sentences.measured(outcomes, "fusing").signals(TEXT)
    frame, n_layers = _named_lives(signals), int(signals["layer"].max())
    words = phrases(signals)
    with style():
        drawing, axes = panels(size=(10, 4.8))
        panel = axes[0, 0]
        draw_lives(panel, signals, range(len(frame)), across=False)
        draw.labels_below(panel, sentences.labels(frame["token"]), slots=frame["slot"])
        panel.set_yticks(range(1, n_layers + 1))
        panel.set(xlabel="token", ylabel="layer")
        look: dict[str, Any] = {"rotation": 40, "ha": "left", "va": "bottom", "rotation_mode": "anchor"}
        for slot, text in words.items():
            panel.text(slot, n_layers + 0.7, phrase(text), **look)
        legend_below(drawing, lives_keys(), ncols=3)
    merged = (frame["into"] != frame["slot"]).sum()
    caption = sentences.caption(
        outcomes,
        TEXT,
        "Each column is a token, going up through the layers. At every second layer from 0.4 of the depth on, the closest neighbours are fused into "
        f"one token in the place of the later one. {merged} of {len(frame)} tokens are fused into a neighbour, {len(words)} super-tokens are left, with "
        "the text they carry above them (shortened where it is long).",
    )
    finding = f"{merged} of {len(frame)} tokens are fused into a neighbour"
    return Figure(name, "Figure 11: tokens that go into their neighbours", frame, drawing, caption, finding=finding)


@artefact(sentences.runs("fusing"), sentences.read_of_windows())
def figure12_fusion_lives(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 12: the lives of tokens across layers, with the points of fusion, for a stretch of the run's own text."""
    signals = sentences.measured(outcomes, "fusing").signals(sentences.WINDOW)
    frame, n_layers = _named_lives(signals), int(signals["layer"].max())
    slots = STRETCH if len(frame) >= STRETCH.stop else range(len(frame))
    shown = frame[frame["slot"].isin(slots)]
    supers = shown[shown["carries"] != ""]
    with style():
        drawing, axes = panels(size=(6.8, 0.145 * len(slots) + 1.0))
        panel = axes[0, 0]
        draw_lives(panel, signals, slots, across=True)
        panel.set_yticks(shown["slot"], sentences.labels(shown["token"]))
        panel.set_xticks(range(1, n_layers + 1))
        panel.set(xlabel="layer", ylabel="token")
        for slot, text in zip(supers["slot"], supers["carries"], strict=True):
            panel.text(n_layers + 0.7, slot, phrase(text, 44), ha="left", va="center")
        draw.legend_above(panel, lives_keys(), ncols=1)
    merged = int((shown["into"] != shown["slot"]).sum())
    caption = sentences.caption(
        outcomes,
        sentences.WINDOW,
        "Each row is a token, going through the layers from left to right. At a cross it is fused into a later neighbour (arrow), which carries it "
        f"from there on: {merged} of these {len(shown)} tokens are fused, {len(supers)} super-tokens are left, with the text "
        "they carry at the right. A cross without an arrow: the neighbour is not among these rows.",
        f"Tokens {slots.start} to {slots.stop - 1} of a prompt of {len(frame)}. Fusion acts at every second layer from 0.4 of the depth on.",
    )
    finding = f"{merged} of {len(shown)} tokens of running text are fused into a neighbour"
    return Figure(name, "Figure 12: tokens of running text under fusion", shown, drawing, caption, finding=finding)
