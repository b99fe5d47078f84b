"""Figures 5 and 17: trajectories of tokens through the layers, where one halts and where two are fused.

The paper draws one made-up value a layer. Here: the states on their first two principal components, and their norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from quicksilver.records.record import Record
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import DASHES, MARKERS, PALETTE, Figure, panels, style

from . import sentences

READS = sentences.READ
TEXT = sentences.SENTENCE


@dataclass(frozen=True)
class Shown:
    """A token worth drawing: why, its slot, and the last layer before it halted or was fused (None: it was not)."""

    role: str
    slot: int
    until: int | None = None


def rows() -> list[Row]:
    """One run."""
    return [sentences.everything()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Left the plane of the first two components, right the norm by layer."""
    _, record = sentences.measured(outcomes, "all four")
    signals = record.signals(TEXT)
    shown = chosen(signals)
    names = sentences.labels(record.texts[TEXT].tokens)
    columns = ["layer", "slot", "token", "pca_0", "pca_1", "state_norm", "dense_pca_0", "dense_pca_1", "dense_state_norm"]
    frame = signals[columns].merge(
        pd.DataFrame([(one.slot, one.role, one.until) for one in shown], columns=["slot", "role", "until"]), on="slot", how="left"
    )
    with style():
        drawing, axes = panels(1, 2, size=(10, 4.2), width_ratios=[1.1, 1])
        left, right = axes[0]
        for _, token in frame[(frame["slot"] > 0) & frame["role"].isna()].groupby("slot"):
            left.plot(
                token["dense_pca_0"], token["dense_pca_1"], color="#dedede", linestyle="-", linewidth=0.6, marker="", zorder=1
            )
            right.plot(
                token["layer"], token["dense_state_norm"], color="#dedede", linestyle="-", linewidth=0.6, marker="", zorder=1
            )
        for i, one in enumerate(shown):
            token = frame[frame["slot"] == one.slot]
            label = f"“{names[one.slot]}” {one.role}"
            _trajectory(left, token, one, i, "pca_0", "pca_1", None)
            _trajectory(right, token, one, i, "layer", "state_norm", label)
        for until, word in _events(shown).items():
            right.axvline(until, color="black", linewidth=0.8, linestyle=":", marker="", zorder=0)
            right.text(
                until,
                0.02,
                f" {word} ",
                transform=right.get_xaxis_transform(),
                rotation=90,
                fontsize=6.5,
                ha="right",
                va="bottom",
            )
        explained = [100 * share for share in record.texts[TEXT].pca_explained]
        left.set(
            xlabel=f"first component ({explained[0]:.0f}% of the variance)", ylabel=f"second component ({explained[1]:.0f}%)"
        )
        left.set_title("States, a dot a layer (state units)")
        right.set(xlabel="layer (0: embedding)", ylabel="‖h‖₂ (state units)", title="Norm of the state")
        right.legend(loc="lower right", handlelength=3.5)
    return Figure(
        name, "Figures 5 and 17: trajectories of halting and fusion", frame, drawing, _caption(outcomes, record, signals, shown)
    )


def chosen(signals: pd.DataFrame) -> list[Shown]:
    """Of words that are themselves to the end: the one in the middle of the sentence that never halts, and the one that halts longest;
    and the first two that are fused with each other. What does not happen is left out."""
    active = sentences.layers(signals, "active").astype(bool)
    carrier = sentences.layers(signals, "carrier")
    n_layers, n_tokens = active.index[-1], active.shape[1]
    words = {int(slot) for slot, token in zip(signals["slot"], signals["token"], strict=True) if token.strip().isalpha()}
    alone = [slot for slot in range(1, n_tokens) if (carrier[slot] == slot).all() and (carrier.loc[n_layers] == slot).sum() == 1]
    alone = [slot for slot in alone if slot in words] or alone
    halts = sentences.halted_after(active).loc[alone]
    found = []
    never = [slot for slot in alone if active[slot].all()]
    if never:
        found.append(Shown("goes through all layers", min(never, key=lambda slot: abs(slot - n_tokens // 2))))
    if (halts < n_layers).any():
        found.append(Shown("halts", int(halts.idxmin()), int(halts.min())))
    carried = [slot for slot in range(1, n_tokens) if (carrier[slot] != slot).any()]
    for slot in carried:
        into = int(carrier.loc[n_layers, slot])
        if (carrier.loc[n_layers] == into).sum() == 2:  # a pair
            fused_after = int((carrier[slot] != slot).idxmax()) - 1
            found += [Shown("is fused into the next", slot, fused_after), Shown("carries both", into, fused_after)]
            break
    return found


def _trajectory(axes: Axes, token: pd.DataFrame, one: Shown, i: int, x: str, y: str, label: str | None) -> None:
    colour, marker, dash = PALETTE[(0, 1, 3, 2)[i % 4]], MARKERS[i], DASHES[i]
    end = one.until if one.until is not None and one.role != "carries both" else token["layer"].max()
    before = token[token["layer"] <= end]
    axes.plot(before[x], before[y], color=colour, linestyle=dash, marker=marker, markersize=3, label=label, zorder=3)
    if end < token["layer"].max():
        dense_x, dense_y = (column if column == "layer" else f"dense_{column}" for column in (x, y))
        rest = token[token["layer"] >= end]
        axes.plot(rest[dense_x], rest[dense_y], color=colour, linestyle="-", linewidth=0.8, alpha=0.45, marker="", zorder=2)
    if one.until is not None:
        at = token[token["layer"] == one.until]
        axes.plot(
            at[x],
            at[y],
            color=colour,
            linestyle="",
            marker="*" if one.role == "halts" else "X",
            markersize=11,
            markeredgecolor="black",
            markeredgewidth=0.6,
            zorder=4,
        )


def _events(shown: Sequence[Shown]) -> dict[int, str]:
    """What happens after which layer."""
    events: dict[int, list[str]] = {}
    for one in shown:
        kind = "halting" if one.role == "halts" else "fusion"
        if one.until is not None and kind not in events.setdefault(one.until, []):
            events[one.until].append(kind)
    return {layer: f"{' and '.join(kinds)} point" for layer, kinds in events.items()}


def _caption(outcomes: Sequence[Outcome], record: Record, signals: pd.DataFrame, shown: Sequence[Shown]) -> tuple[str, ...]:
    first = signals[(signals["slot"] == 0) & (signals["layer"] > 0)]["dense_state_norm"].median()
    others = signals[(signals["slot"] > 0) & (signals["layer"] > 0)]["dense_state_norm"].median()
    # A state just merged is the mean of two.
    fused = [one for one in shown if one.role == "carries both"]
    jump = ""
    if fused:
        at = signals[(signals["slot"] == fused[0].slot) & (signals["layer"] == fused[0].until)]
        jump = (
            f" Right after the fusion the carrier's state is {float(at['sdi_l2'].iloc[0]):.0f} away from its dense one, whose norm is "
            f"{float(at['dense_state_norm'].iloc[0]):.0f}."
        )
    return sentences.caption(
        outcomes,
        TEXT,
        "States of a few tokens, layer by layer. Star: the token halts here; cross: it is fused with its neighbour. From there on the faint line in "
        f"its colour shows the same token in the dense model. Grey: the other tokens, dense.{jump}",
        "Drawn: the token nearest the middle of the sentence that never halts, the token that halts first, and the first pair that is fused.",
        "Left: first two principal components of the dense states, over all layers and all tokens but the first, which often lies far off (an "
        f"attention sink; its median norm is {first:.0f}, that of the others {others:.0f}).",
    )
