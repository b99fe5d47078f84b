"""Bit-widths by entropy: of one sentence (Figures 13 and 14) and of running text (Figure 19)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from quicksilver.records.record import Record
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.figure import DASHES, HATCHES, PALETTE, Figure, panels, style

from .. import drawing as draw
from . import sentences

TEXT = sentences.SENTENCE
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


def draw_held(axes: Axes, states: pd.DataFrame, **options: Any) -> None:
    """A picture of `HELD` states (rows, columns), with the options of `imshow`."""
    codes = states.replace({name: code for code, name in enumerate(HELD)}).to_numpy(dtype=float)
    colours: dict[str, Any] = {"cmap": ListedColormap(list(HELD.values())), "vmin": -0.5, "vmax": len(HELD) - 0.5}
    axes.imshow(codes, aspect="auto", interpolation="nearest", **colours, **options)
    axes.grid(visible=False)


def draw_held_upwards(axes: Axes, states: pd.DataFrame) -> None:
    """`draw_held` with a row a layer, the first below, and a column a token."""
    n_layers, n_tokens = states.shape
    draw_held(axes, states, origin="lower", extent=(-0.5, n_tokens - 0.5, 0.5, n_layers + 0.5))


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
        draw_held_upwards(panel, states)
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
    finding = "In the last layer " + ", ".join(f"{count} tokens are at {width(int(bits))}" for bits, count in counts.items())
    return Figure(name, "Figure 13: bit-width of each token by layer", frame, drawing, caption, finding=finding)


# --- Figure 14 --------------------------------------------------------------------------------------------------------------------


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


@artefact(_RUNS, sentences.read_of_windows("run.entropy_nats"))
def figure14_precision_by_entropy(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 14: entropy of each token where widths are decided, and the width it gets."""
    record = sentences.measured(outcomes, "quantization")
    decided, low, high = decision(record)
    frame = pd.concat([assigned(record, text, decided) for text in range(len(record.texts))], ignore_index=True)
    sentence, windows = frame[frame["text"] == TEXT], frame[frame["text"] >= sentences.WINDOW]
    right_end = len(sentence) - 0.3
    with style():
        drawing, axes = panels(1, 2, size=(10, 3.6), width_ratios=[3, 1])
        left = axes[0, 0]
        _dots(left, sentence)
        for tau, label in ((low, "tau_low"), (high, "tau_high")):
            draw.horizontal(left, tau, linestyle="--")
            left.text(right_end, tau, f" {label}\n {tau:.2f}", va="center")
        draw.labels_below(left, sentences.labels(sentence["token"]))
        left.set(xlabel="token", ylabel=f"entropy after layer {decided} (nats)", xlim=(-0.7, right_end), ylim=(0, None))
        left.grid(visible=False, axis="x")
        draw.legend_above(left, bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
        _shares(axes[0, 1], windows)
    caption = sentences.caption(
        outcomes,
        TEXT,
        f"Left: entropy of each token after layer {decided}, where bit-widths are decided (logit lens). Below tau_low a token gets 2 bits, up to "
        f"tau_high 4, above it 8. Right: the widths of {len(windows)} tokens of the run's text ({windows['text'].nunique()} windows).",
        "The thresholds are the 30th and the 70th percentile on calibrating text. Tokens of a short sentence have little context, so that their "
        "entropies lie higher.",
    )
    share = windows["width_bits"].value_counts(normalize=True).sort_index(ascending=False)
    finding = f"Of running text {', '.join(f'{one:.0%} is at {width(int(bits))}' for bits, one in share.items())}"
    return Figure(name, "Figure 14: bit-width by entropy", frame, drawing, caption, finding=finding)


def _dots(axes: Axes, sentence: pd.DataFrame) -> None:
    axes.vlines(sentence["slot"], 0, sentence["entropy_nats"], color="#d8d8d8", linewidth=0.8, zorder=1)
    look: dict[str, Any] = {"s": 26, "edgecolor": "black", "linewidth": 0.4, "zorder": 3}
    for bits, marker in _MARKERS.items():
        members, label = sentence[sentence["width_bits"] == bits], width(bits)
        axes.scatter(members["slot"], members["entropy_nats"], marker=marker, color=HELD[label], label=label, **look)


def _shares(axes: Axes, windows: pd.DataFrame) -> None:
    share = windows["width_bits"].value_counts(normalize=True) * 100
    values, names = [float(share.get(bits, 0.0)) for bits in _MARKERS], list(map(width, _MARKERS))
    axes.barh(range(len(names)), values, color=[HELD[name] for name in names], edgecolor="black", linewidth=0.4)
    for i, value in enumerate(values):
        axes.text(value, i, f" {value:.0f}%", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="tokens (%)", xlim=(0, max(values) * 1.2), title="Running text")
    axes.grid(visible=False, axis="y")


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
        _histograms(left, frame, chosen)
        spread = inner.groupby("layer")["dense_entropy_nats"].quantile([0.25, 0.75]).unstack()
        band: dict[str, Any] = {"color": PALETTE[2], "alpha": 0.25, "linewidth": 0, "label": "middle half"}
        middle.fill_between(spread.index, spread[0.25], spread[0.75], **band)
        mean = inner.groupby("layer")["dense_entropy_nats"].mean()
        middle.plot(spread.index, mean, color=PALETTE[0], linestyle="-", marker="o", label="mean")
        middle.set(xlabel="layer", ylabel="entropy (nats)", ylim=(0, None), title="Dense model, by layer")
        middle.set_xticks(range(1, n_layers + 1, 3))
        middle.legend(loc="lower right")
        draw_held_upwards(right, sentences.layers(inner[inner["text"] == sentences.WINDOW], "held"))
        right.set(xlabel="token of the first window (slot)", ylabel="layer", title="Bit-widths of one window")
        right.set_yticks(range(1, n_layers + 1, 3))
        handles = held_keys(frame["held"], record.model.dtype)
        right.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, columnspacing=1)
    caption = _caption(outcomes, frame, chosen, record.thresholds["adaptive_quantization"]["tau_low"])
    upper, lower = (frame.loc[frame["layer"] == chosen[end], "dense_entropy_nats"].mean() for end in (0, -1))
    change = f"from {upper:.2f} to {lower:.2f} nats between layers {chosen[0]} and {chosen[-1]}"
    finding = f"Mean entropy goes {change}; the paper says that it falls"
    return Figure(name, "Figure 19: entropy and bit-widths", _drawn(inner), drawing, caption, finding=finding)


def _drawn(inner: pd.DataFrame) -> pd.DataFrame:
    """One row a token, `entropy_nats_L` and `bits_L` of each layer L, half the bytes of a row a token and layer."""
    wide = inner.pivot(index=["text", "slot"], columns="layer", values=["dense_entropy_nats", "bits"])
    wide.columns = pd.Index([f"{name.removeprefix('dense_')}_{layer}" for name, layer in wide.columns])
    whole = {name: "Int64" for name in wide.columns if name.startswith("bits")}
    return wide.round(3).astype(whole).reset_index()


def _histograms(axes: Axes, frame: pd.DataFrame, chosen: Sequence[int]) -> None:
    edges = np.linspace(0, frame.loc[frame["layer"].isin(chosen), "dense_entropy_nats"].max(), 25).tolist()
    for layer, colour, hatch, dash in zip(chosen, (PALETTE[0], PALETTE[2], PALETTE[3]), HATCHES, DASHES, strict=False):
        values = frame.loc[frame["layer"] == layer, "dense_entropy_nats"]
        weights = np.full(len(values), 100 / len(values))
        axes.hist(values, edges, weights=weights, histtype="stepfilled", color=colour, alpha=0.12, hatch=hatch)
        label = f"layer {layer}: {values.mean():.2f}"
        axes.hist(values, edges, weights=weights, histtype="step", color=colour, linestyle=dash, linewidth=1.4, label=label)
    axes.set(xlabel="entropy of the logit lens (nats)", ylabel="tokens (%)", title="Dense model, three layers")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.legend(loc="upper left", title="mean, nats", ncols=2)


def _caption(
    outcomes: Sequence[Outcome], frame: pd.DataFrame, chosen: Sequence[int], tau_low: Sequence[float]
) -> tuple[str, ...]:
    mean = frame.groupby("layer")["dense_entropy_nats"].mean()
    inner, (first, *_, last) = mean.loc[1:], chosen
    deep, tau = frame[frame["layer"] == last]["dense_entropy_nats"], tau_low[last - 1]
    share = frame.loc[frame["layer"] == mean.index.max(), "bits"].value_counts(normalize=True).sort_index(ascending=False)
    said = ", ".join(f"{100 * part:.0f}% at {width(int(bits))}" for bits, part in share.items())
    return sentences.caption(
        outcomes,
        None,
        f"Left, middle: entropy of the logit lens in the dense model, {(frame['layer'] == 1).sum()} tokens of {frame['text'].nunique()} windows. "
        f"Layers {', '.join(map(str, chosen))} stand for 10, 15 and 20 of the paper's 30. Between them the mean "
        f"{'falls' if mean[last] < mean[first] else 'rises'} from {mean[first]:.2f} to {mean[last]:.2f} nats; the paper says that it falls with "
        f"depth. Right: widths from the deciding layer on, over all windows {said}.",
        f"Over all layers the mean is lowest in layer {inner.idxmin()} ({inner.min():.2f}) and highest in layer {inner.idxmax()} ({inner.max():.2f}).",
        f"In layer {last}, {100 * (deep < 1.0).mean():.0f}% of the tokens are below the paper's tau_low of 1.0 (it says more than 45%), "
        f"{100 * (deep < tau).mean():.0f}% below the calibrated {tau:.2f}.",
    )
