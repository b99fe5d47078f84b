"""What each token has, layer by layer: K/V entries (Figure 10), a neighbour that it is fused into (11, 12), bits (13, 14, 19)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch

from quicksilver.records.record import TRACE, Record
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.figure import DASHES, HATCHES, PALETTE, Figure, legend_below, panels, style

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
    """Figure 10: which K/V entries are written and which are skipped, layer by layer and token by token."""
    record = sentences.measured(outcomes, "all four")
    frame = sentences.in_layers(record.signals(TEXT), "active", "kv", "carrier")
    frame["entry"] = entries(frame)
    from . import trace_counts  # reads traces, with torch: who plans or lists does not wait for it

    shares = trace_counts.of_prompts(record, "tokens", "kv")
    shares = shares.assign(entries_pct=100 * shares["kv"] / shares["tokens"])
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


@artefact(sentences.runs("fusing"), sentences.READ)
def figure11_fusion_by_layer(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 11: tokens that go into their neighbours, layer by layer, as a tree that grows upwards."""
    signals = sentences.measured(outcomes, "fusing").signals(TEXT)
    words, n_layers = phrases(signals), int(signals["layer"].max())
    frame = lives(signals).assign(carries=lambda found: found["slot"].map(words).fillna(""))
    with style():
        drawing, axes = panels(size=(10, 4.8))
        panel = axes[0, 0]
        draw_lives(panel, signals, range(len(frame)), across=False)
        draw.labels_below(panel, sentences.labels(frame["token"]))
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
    words, n_layers = phrases(signals), int(signals["layer"].max())
    frame = lives(signals).assign(carries=lambda found: found["slot"].map(words).fillna(""))
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


# --- bit-widths -----------------------------------------------------------------------------------------------------------------
_RUNS = sentences.runs("quantization")
UNTOUCHED = "untouched"  # in the model's own dtype
UNTOUCHED_BITS = 16  # as records write it, whatever the dtype is
# How a token is held in a layer. From dark to light: readable in grey.
HELD = {
    UNTOUCHED: PALETTE[0], "8 bits": "#553a7a", "4 bits": PALETTE[3], "2 bits": "#b5851f", "halted": "#ffffff", "carried": "#bdbdbd",
}  # fmt: skip
_MARKERS = {8: "o", 4: "s", 2: "^"}
DEPTHS = (10 / 30, 15 / 30, 20 / 30)  # App. O: layers 10, 15 and 20 of 30


def held(signals: pd.DataFrame) -> pd.Series:
    """How each token is held in each layer, one of `HELD`: its bits or untouched, or halted, or carried by a neighbour it was fused with."""
    state = signals["bits"].map(width).where(signals["active"], "halted")
    return state.where(signals["carrier"] == signals["slot"], "carried")


def width(bits: int) -> str:
    """`8 bits`, or `untouched`."""
    return UNTOUCHED if bits == UNTOUCHED_BITS else f"{bits} bits"


def draw_held(axes: Axes, states: pd.DataFrame) -> None:
    """A picture of `HELD` states with a row a layer, the first below, and a column a token."""
    n_layers, n_tokens = states.shape
    codes = states.replace({name: code for code, name in enumerate(HELD)}).to_numpy(dtype=float)
    colours: dict[str, Any] = {"cmap": ListedColormap(list(HELD.values())), "vmin": -0.5, "vmax": len(HELD) - 0.5}
    extent = (-0.5, n_tokens - 0.5, 0.5, n_layers + 0.5)
    axes.imshow(codes, aspect="auto", interpolation="nearest", **colours, origin="lower", extent=extent)
    axes.grid(visible=False)


def held_keys(present: Iterable[str], dtype: str) -> list[Patch]:
    """Legend of the states that are there, in a model of `dtype`."""
    words = {UNTOUCHED: f"{dtype}, untouched", "halted": "halted: not computed", "carried": "carried by a neighbour"}
    looks = {name: {"facecolor": colour} for name, colour in HELD.items()}
    return draw.keys_of(looks, present, words, edgecolor="#808080", linewidth=0.5)


@artefact(_RUNS, sentences.READ)
def figure13_bit_widths(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 13: bit-width of each token by layer, from the layer at which widths are decided."""
    record = sentences.measured(outcomes, "quantization")
    frame = sentences.in_layers(record.signals(TEXT), "bits", "active", "carrier", "entropy_nats")
    frame["held"] = held(frame)
    states = sentences.layers(frame, "held")
    n_layers, n_tokens = states.shape
    with style():
        drawing, axes = panels(size=(max(6.0, 0.175 * n_tokens + 1.2), 3.8))
        panel = axes[0, 0]
        draw_held(panel, states)
        draw.labels_below(panel, sentences.labels(record.texts[TEXT].tokens))
        draw.separate_columns(panel, n_tokens)
        if (frame["bits"] < UNTOUCHED_BITS).any():
            decided = int(frame.loc[frame["bits"] < UNTOUCHED_BITS, "layer"].min())
            draw.horizontal(panel, decided - 0.5, linewidth=1, linestyle="--")
            panel.text(n_tokens - 0.3, decided - 0.5, "widths\ndecided", va="center")
        panel.set(xlabel="token", ylabel="layer")
        draw.legend_above(panel, held_keys(frame["held"], record.model.dtype), ncols=len(HELD))
    counts = frame.loc[frame["layer"] == n_layers, "bits"].value_counts().sort_index(ascending=False)
    caption = sentences.caption(
        outcomes,
        TEXT,
        "Bit-width of each token in each layer: of the inputs of linear layers and of its K/V entries. Below the dashed line everything is "
        f"{record.model.dtype}. The paper decides after layer 15 of 30.",
    )
    finding = f"In the last layer {_counted(counts, '{} tokens are at {}')}"
    return Figure(name, "Figure 13: bit-width of each token by layer", frame, drawing, caption, finding=finding)


# --- Figure 14 --------------------------------------------------------------------------------------------------------------------
def decision(record: Record) -> tuple[int, float, float]:
    """The layer, from 1, after which widths are decided, and the two thresholds there in nats."""
    tau = record.thresholds["adaptive_quantization"]
    layer = sentences.layer_after(record.config["modules"]["adaptive_quantization"]["depth"], record.model.layers)
    return layer, tau["tau_low"][layer - 1], tau["tau_high"][layer - 1]


@artefact(_RUNS, sentences.read_of_windows("run.entropy_nats"))
def figure14_precision_by_entropy(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 14: entropy of each token where widths are decided, and the width it gets."""
    record = sentences.measured(outcomes, "quantization")
    decided, low, high = decision(record)
    frames = []
    for text in range(len(record.texts)):  # entropy of each token after the deciding layer, and its width from then on
        signals = record.signals(text)
        after = signals.loc[signals["layer"] == decided, ["slot", "token", "entropy_nats"]].reset_index(drop=True)
        then = signals[signals["layer"] == decided + 1].reset_index(drop=True)
        frames.append(after.assign(text=text, width_bits=then["bits"]))
    frame = pd.concat(frames, ignore_index=True)
    sentence, windows = frame[frame["text"] == TEXT], frame[frame["text"] >= sentences.WINDOW]
    right_end, share = len(sentence) - 0.3, windows["width_bits"].value_counts(normalize=True)
    with style():
        drawing, axes = panels(1, 2, size=(10, 3.6), width_ratios=[3, 1])
        left, right = axes[0]
        left.vlines(sentence["slot"], 0, sentence["entropy_nats"], color="#d8d8d8", linewidth=0.8, zorder=1)
        look: dict[str, Any] = {"s": 26, "edgecolor": "black", "linewidth": 0.4, "zorder": 3}
        for bits, marker in _MARKERS.items():
            members, label = sentence[sentence["width_bits"] == bits], width(bits)
            left.scatter(members["slot"], members["entropy_nats"], marker=marker, color=HELD[label], label=label, **look)
        for tau, label in ((low, "tau_low"), (high, "tau_high")):
            draw.horizontal(left, tau, linestyle="--")
            left.text(right_end, tau, f" {label}\n {tau:.2f}", va="center")
        draw.labels_below(left, sentences.labels(sentence["token"]))
        left.set(xlabel="token", ylabel=f"entropy after layer {decided} (nats)", xlim=(-0.7, right_end), ylim=(0, None))
        left.grid(visible=False, axis="x")
        draw.legend_above(left, bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
        values, names = [float((share * 100).get(bits, 0.0)) for bits in _MARKERS], list(map(width, _MARKERS))
        right.barh(range(len(names)), values, color=[HELD[name] for name in names], edgecolor="black", linewidth=0.4)
        for i, value in enumerate(values):
            right.text(value, i, f" {value:.0f}%", va="center")
        right.set_yticks(range(len(names)), names)
        right.invert_yaxis()
        right.set(xlabel="tokens (%)", xlim=(0, max(values) * 1.2), title="Running text")
        right.grid(visible=False, axis="y")
    caption = sentences.caption(
        outcomes,
        TEXT,
        f"Left: entropy of each token after layer {decided}, where bit-widths are decided (logit lens). Below tau_low a token gets 2 bits, up to "
        f"tau_high 4, above it 8. Right: the widths of {len(windows)} tokens of the run's text ({windows['text'].nunique()} windows).",
        "The thresholds are the 30th and the 70th percentile on calibrating text. Tokens of a short sentence have little context, so that their "
        "entropies lie higher.",
    )
    finding = f"Of running text {_counted(share.sort_index(ascending=False), '{:.0%} is at {}')}"
    return Figure(name, "Figure 14: bit-width by entropy", frame, drawing, caption, finding=finding)


def _counted(shares: pd.Series, form: str) -> str:
    """Each share, and its width in words."""
    return ", ".join(form.format(share, width(int(bits))) for bits, share in shares.items())


# --- Figure 19 --------------------------------------------------------------------------------------------------------------------
@artefact(_RUNS, sentences.read_of_windows("dense.entropy_nats"))
def figure19_entropy_and_widths(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 19: entropy by layer as histograms, and the bit-widths that come of it, on running text."""
    record = sentences.measured(outcomes, "quantization")
    columns = ["layer", "slot", "bits", "active", "carrier", "dense_entropy_nats"]
    texts = range(sentences.WINDOW, len(record.texts))
    frame = pd.concat([record.signals(text)[columns].assign(text=text) for text in texts], ignore_index=True)
    frame["held"] = held(frame)
    n_layers = record.model.layers
    chosen = [sentences.layer_after(depth, n_layers) for depth in DEPTHS]
    inner = frame[frame["layer"] > 0]
    with style():
        drawing, axes = panels(1, 3, size=(11, 3.4), width_ratios=[1, 0.8, 1.7])
        left, middle, right = axes[0]
        edges = np.linspace(0, frame.loc[frame["layer"].isin(chosen), "dense_entropy_nats"].max(), 25).tolist()
        for layer, colour, hatch, dash in zip(chosen, (PALETTE[0], PALETTE[2], PALETTE[3]), HATCHES, DASHES, strict=False):
            values = frame.loc[frame["layer"] == layer, "dense_entropy_nats"]
            weights, label = np.full(len(values), 100 / len(values)), f"layer {layer}: {values.mean():.2f}"
            left.hist(values, edges, weights=weights, histtype="stepfilled", color=colour, alpha=0.12, hatch=hatch)
            look: dict[str, Any] = {"histtype": "step", "color": colour, "linestyle": dash, "linewidth": 1.4, "label": label}
            left.hist(values, edges, weights=weights, **look)
        left.set(xlabel="entropy of the logit lens (nats)", ylabel="tokens (%)", title="Dense model, three layers")
        left.set_ylim(0, 1.3 * left.get_ylim()[1])
        left.legend(loc="upper left", title="mean, nats", ncols=2)
        spread = inner.groupby("layer")["dense_entropy_nats"].quantile([0.25, 0.75]).unstack()
        band: dict[str, Any] = {"color": PALETTE[2], "alpha": 0.25, "linewidth": 0, "label": "middle half"}
        middle.fill_between(spread.index, spread[0.25], spread[0.75], **band)
        mean = inner.groupby("layer")["dense_entropy_nats"].mean()
        middle.plot(spread.index, mean, color=PALETTE[0], linestyle="-", marker="o", label="mean")
        middle.set(xlabel="layer", ylabel="entropy (nats)", ylim=(0, None), title="Dense model, by layer")
        middle.set_xticks(range(1, n_layers + 1, 3))
        middle.legend(loc="lower right")
        draw_held(right, sentences.layers(inner[inner["text"] == sentences.WINDOW], "held"))
        right.set(xlabel="token of the first window (slot)", ylabel="layer", title="Bit-widths of one window")
        right.set_yticks(range(1, n_layers + 1, 3))
        handles = held_keys(frame["held"], record.model.dtype)
        right.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, columnspacing=1)
    mean, (first, *_, last) = frame.groupby("layer")["dense_entropy_nats"].mean(), chosen
    of_layers, deep = mean.loc[1:], frame[frame["layer"] == last]["dense_entropy_nats"]
    tau = record.thresholds["adaptive_quantization"]["tau_low"][last - 1]
    share = frame.loc[frame["layer"] == mean.index.max(), "bits"].value_counts(normalize=True).sort_index(ascending=False)
    caption = sentences.caption(
        outcomes,
        None,
        f"Left, middle: entropy of the logit lens in the dense model, {(frame['layer'] == 1).sum()} tokens of {frame['text'].nunique()} windows. "
        f"Layers {', '.join(map(str, chosen))} stand for 10, 15 and 20 of the paper's 30. Between them the mean "
        f"{'falls' if mean[last] < mean[first] else 'rises'} from {mean[first]:.2f} to {mean[last]:.2f} nats; the paper says that it falls with "
        f"depth. Right: widths from the deciding layer on, over all windows {_counted(100 * share, '{:.0f}% at {}')}.",
        f"Over all layers the mean is lowest in layer {of_layers.idxmin()} ({of_layers.min():.2f}) and highest in layer {of_layers.idxmax()} ({of_layers.max():.2f}).",
        f"In layer {last}, {100 * (deep < 1.0).mean():.0f}% of the tokens are below the paper's tau_low of 1.0 (it says more than 45%), "
        f"{100 * (deep < tau).mean():.0f}% below the calibrated {tau:.2f}.",
    )
    change = f"from {mean[first]:.2f} to {mean[last]:.2f} nats between layers {first} and {last}"
    # One row a token, `entropy_nats_L` and `bits_L` of each layer L: half the bytes of a row a token and layer.
    wide = inner.pivot(index=["text", "slot"], columns="layer", values=["dense_entropy_nats", "bits"])
    wide.columns = pd.Index([f"{name.removeprefix('dense_')}_{layer}" for name, layer in wide.columns])
    drawn = wide.round(3).astype({name: "Int64" for name in wide.columns if name.startswith("bits")}).reset_index()
    finding = f"Mean entropy goes {change}; the paper says that it falls"
    return Figure(name, "Figure 19: entropy and bit-widths", drawn, drawing, caption, finding=finding)
