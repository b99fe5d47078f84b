"""Figure 19: entropy by layer as histograms, and the bit-widths that come of it, on running text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import DASHES, HATCHES, PALETTE, Figure, panels, style

from . import sentences

READS = sentences.read_of_windows("dense.entropy_nats")
DEPTHS = (10 / 30, 15 / 30, 20 / 30)  # App. O: layers 10, 15 and 20 of 30


def rows() -> list[Row]:
    """One run."""
    return [sentences.quantization()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Histograms of the dense model's entropies; widths of the first window, layer by token."""
    _, record = sentences.measured(outcomes, "quantization")
    windows = range(sentences.WINDOW, len(record.texts))
    columns = ["layer", "slot", "bits", "active", "carrier", "dense_entropy_nats"]
    frame = pd.concat([record.signals(text)[columns].assign(text=text) for text in windows], ignore_index=True)
    frame["held"] = sentences.held(frame)
    n_layers = record.model.layers
    chosen = [sentences.layer_after(depth, n_layers) for depth in DEPTHS]
    tau = record.thresholds["adaptive_quantization"]
    with style():
        drawing, axes = panels(1, 3, size=(11, 3.4), width_ratios=[1, 0.8, 1.7])
        left, middle, right = axes[0]
        _histograms(left, frame, chosen)
        spread = frame[frame["layer"] > 0].groupby("layer")["dense_entropy_nats"].quantile([0.25, 0.5, 0.75]).unstack()
        middle.fill_between(
            spread.index, spread[0.25], spread[0.75], color=PALETTE[2], alpha=0.25, linewidth=0, label="middle half"
        )
        middle.plot(spread.index, spread[0.5], color=PALETTE[0], linestyle="-", marker="o", label="median")
        middle.set(xlabel="layer", ylabel="entropy (nats)", ylim=(0, None), title="Dense model, by layer")
        middle.set_xticks(range(1, n_layers + 1, 3))
        middle.legend(loc="lower right")
        first = sentences.layers(frame[(frame["text"] == sentences.WINDOW) & (frame["layer"] > 0)], "held")
        sentences.draw_held(right, first, origin="lower", extent=(-0.5, first.shape[1] - 0.5, 0.5, n_layers + 0.5))
        right.set(xlabel="token of the first window (slot)", ylabel="layer", title="Bit-widths of one window")
        right.set_yticks(range(1, n_layers + 1, 3))
        handles = sentences.held_legend(frame["held"], record.model.dtype)
        right.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, columnspacing=1)
    return Figure(
        name, "Figure 19: entropy and bit-widths", _drawn(frame), drawing, _caption(outcomes, frame, chosen, tau["tau_low"])
    )


def _drawn(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a token, `entropy_nats_L` and `bits_L` of each layer L, half the bytes of a row a token and layer."""
    wide = frame[frame["layer"] > 0].pivot(index=["text", "slot"], columns="layer", values=["dense_entropy_nats", "bits"])
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
    inner = mean.loc[1:]
    deep = frame[frame["layer"] == chosen[-1]]["dense_entropy_nats"]
    share = frame.loc[frame["layer"] == mean.index.max(), "bits"].value_counts(normalize=True).sort_index(ascending=False)
    said = ", ".join(f"{100 * part:.0f}% at {sentences.width(int(bits))}" for bits, part in share.items())
    trend = "falls" if mean[chosen[-1]] < mean[chosen[0]] else "rises"
    return sentences.caption(
        outcomes,
        None,
        f"Left, middle: entropy of the logit lens in the dense model, {frame.loc[frame['layer'] == 1].shape[0]} tokens of "
        f"{frame['text'].nunique()} windows. Layers {', '.join(map(str, chosen))} stand for 10, 15 and 20 of the paper's 30. Between them the mean {trend} "
        f"from {mean[chosen[0]]:.2f} to {mean[chosen[-1]]:.2f} nats; the paper says that it falls with depth. Right: widths from the deciding layer "
        f"on, over all windows {said}.",
        f"Over all layers the mean is lowest in layer {inner.idxmin()} ({inner.min():.2f}) and highest in layer {inner.idxmax()} ({inner.max():.2f}).",
        f"In layer {chosen[-1]}, {100 * (deep < 1.0).mean():.0f}% of the tokens are below the paper's tau_low of 1.0 (it says more than 45%), "
        f"{100 * (deep < tau_low[chosen[-1] - 1]).mean():.0f}% below the calibrated {tau_low[chosen[-1] - 1]:.2f}.",
    )
