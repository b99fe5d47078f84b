"""Figure 21: Semantic Drift Index and error attribution, by token and layer.

Attribution is gradient times state (R.3 names influence functions, the caption of the figure input-gradient saliency): one backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Rectangle
from scipy.stats import spearmanr

from quicksilver.records.record import Record
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import DIVERGING, PALETTE, SEQUENTIAL, Figure, panels, style

from . import sentences

READS = sentences.read_of_windows("run.nll_nats", "dense.nll_nats")
TEXT = sentences.SENTENCE


def rows() -> list[Row]:
    """One run."""
    return [sentences.halting()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Three heatmaps, and below them what each token's prediction lost."""
    _, record = sentences.measured(outcomes, "halting")
    signals = record.signals(TEXT)
    columns = [
        "layer",
        "slot",
        "token",
        "active",
        "sdi_l2",
        "dense_gradient_x_state",
        "attributed_nats",
        "nll_nats",
        "dense_nll_nats",
    ]
    frame = signals[columns].copy()
    frame["error_attribution_nats"] = frame["dense_gradient_x_state"].abs()
    frame["loss_change_nats"] = frame["nll_nats"] - frame["dense_nll_nats"]
    with style():
        drawing, axes = panels(4, 1, size=(10, 10.4), height_ratios=[1, 1, 1, 0.6])
        _heat(
            drawing,
            axes[0, 0],
            frame,
            "sdi_l2",
            "Semantic Drift Index (SDI) ‖h_dense − h_run‖₂: how far halting moved the state",
            "state units",
        )
        _heat(drawing, axes[1, 0], frame, "error_attribution_nats", "Error attribution |∂L/∂h · h|, dense model", "nats")
        _heat(
            drawing,
            axes[2, 0],
            frame,
            "attributed_nats",
            "Loss that the drift should add, to first order: ∂L/∂h · (h_run − h_dense)",
            "nats",
            signed=True,
        )
        change = frame[frame["layer"] == 0]
        bars = axes[3, 0]
        bars.bar(
            change["slot"],
            change["loss_change_nats"].fillna(0),
            color=np.where(change["loss_change_nats"] > 0, PALETTE[1], PALETTE[2]),
        )
        bars.axhline(0, color="black", linewidth=0.6, linestyle="-", marker="")
        bars.set(ylabel="nats", xlabel="token", title="Change of the loss of this token's own prediction (above 0: worse)")
        for plot in axes.flat:
            plot.set_xticks(range(len(change)), sentences.labels(change["token"]), rotation=90, fontsize=6)
            plot.set_xlim(-0.5, len(change) - 0.5)
        bars.grid(visible=False, axis="x")
    caption = sentences.caption(outcomes, TEXT, *_findings(frame), _harm(record))
    return Figure(name, "Figure 21: semantic drift and error attribution", frame, drawing, caption)


def _heat(drawing: Drawing, axes: Axes, frame: pd.DataFrame, column: str, title: str, unit: str, *, signed: bool = False) -> None:
    table = sentences.layers(frame, column)
    values = table.to_numpy(dtype=float)
    values = np.where(values == 0, np.nan, values)
    size = float(np.nanmax(np.abs(values), initial=0)) or 1.0
    # The last row of the attribution is rounding (see the caption): colours are for the others.
    usual = np.abs(values[:-1])[np.isfinite(values[:-1])]
    norm = (
        Normalize(-size, size)
        if signed
        else LogNorm(min(float(np.quantile(usual, 0.03)) if usual.size else size, size / 10), size)
    )
    image = axes.imshow(
        values, norm=norm, cmap=DIVERGING if signed else SEQUENTIAL, origin="lower", aspect="auto",
        extent=(-0.5, table.shape[1] - 0.5, -0.5, table.index[-1] + 0.5),
    )  # fmt: skip
    halted = ~sentences.layers(frame, "active").astype(bool)
    for slot in halted.columns[halted.any()]:
        axes.add_patch(Rectangle((slot - 0.5, halted[slot].idxmax() - 0.65), 1, 0.3, facecolor="black", edgecolor="none"))
    axes.set(ylabel="layer", title=title)
    axes.set_yticks(range(0, table.index[-1] + 1, 4))
    axes.grid(visible=False)
    bar = drawing.colorbar(image, ax=axes, pad=0.01, extend="neither" if signed else "min")
    bar.ax.minorticks_off()
    bar.set_label(unit)


def _findings(frame: pd.DataFrame) -> tuple[str, ...]:
    last = frame["layer"].max()
    drift = frame[frame["layer"] == last].set_index("slot")["sdi_l2"]
    attribution = frame[frame["layer"].between(1, last - 1)].groupby("slot")["error_attribution_nats"].mean()
    change = frame[frame["layer"] == last].set_index("slot")["loss_change_nats"]
    both = spearmanr(drift.loc[1:], attribution.loc[1:])
    # The prediction of token t+1 is made from the state of token t.
    harm = spearmanr(drift.iloc[:-1], change.iloc[1:].abs())
    estimate = frame[frame["layer"] == last]["attributed_nats"].sum()
    return (
        "The same sentence runs twice, dense and with halting. Black bar: the token halts after this layer. White: both runs are still equal. "
        f"Rank correlation over tokens of drift after the last layer with mean attribution: {both.statistic:+.2f} (p = {both.pvalue:.2g}; the paper "
        f"says that they overlap substantially), with the size of the next token's change of loss: {harm.statistic:+.2f} (p = {harm.pvalue:.2g}).",
        "L: loss of the sentence in the dense model, nats. Row 0 is the embedding, where |∂L/∂x · x| is the paper's saliency. Colours are "
        "logarithmic, except in the third panel. After the last layer gradient times state is 0, because the final norm undoes any scaling.",
        f"The sentence's loss changes by {change.sum():+.1f} nats; to first order the drift after the last layer should change it by {estimate:+.1f}.",
    )


def _harm(record: Record) -> str:
    """Where the loss of the run's windows comes from: from states that were halted, or from those that attend to them."""
    pieces = []
    for text in range(sentences.WINDOW, len(record.texts)):
        signals = record.signals(text)
        first = signals[signals["layer"] == 0].set_index("slot")
        halted = ~sentences.layers(signals, "active").astype(bool).all()
        change = first["nll_nats"] - first["dense_nll_nats"]
        pieces.append(pd.DataFrame({"change": change, "dense": first["dense_nll_nats"], "from_halted": halted.shift(1)}).iloc[1:])
    tokens = pd.concat(pieces)
    said = []
    for kind, members in tokens.groupby("from_halted"):
        what = "that halted" if kind else "that did not"
        said.append(
            f"{members['change'].mean():+.2f} nats where predicted from a token {what} ({len(members)}; dense {members['dense'].mean():.2f})"
        )
    return f"In the run's windows a token's loss changes by {', '.join(said)}."
