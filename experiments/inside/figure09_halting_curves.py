"""Figure 9: drift by layer of tokens that are forced to halt, halt by themselves, or go through all layers.

The paper's own threshold (L2 = 1.0) means nothing for another model: here each layer has its calibrated one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from quicksilver.records.record import Record
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import MARKERS, PALETTE, Figure, panels, style

from . import sentences

READS = sentences.READ
TEXT = sentences.SENTENCE
KINDS = {"forced": "Forced to halt", "natural": "Halt by themselves", "full": "Go through all layers"}
NAMED = 6  # tokens named in a panel


def rows() -> list[Row]:
    """One run, some of whose words are told to halt or not to."""
    return [sentences.overridden()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """A panel a kind; curves end where the token halts, and go on faintly as the dense model's."""
    _, record = sentences.measured(outcomes, "overridden")
    frame = curves(record)
    tau = record.thresholds["halting"]["tau_drift"]
    n_layers = record.model.layers
    with style():
        drawing, axes = panels(1, 3, size=(10, 3.5), sharey=True)
        for panel, (kind, title), colour, marker in zip(
            axes[0], KINDS.items(), (PALETTE[1], PALETTE[2], PALETTE[0]), MARKERS, strict=False
        ):
            members = frame[frame["kind"] == kind]
            named = 0
            for slot, token in members.groupby("slot"):
                gone, depth = token[token["layer"] <= token["halts_after_layer"]], int(token["halts_after_layer"].iloc[0])
                panel.plot(
                    token["layer"],
                    token["dense_drift_relative"],
                    color=colour,
                    alpha=0.15,
                    linestyle="-",
                    linewidth=0.7,
                    marker="",
                )
                if gone.empty:  # halted after layer 1
                    continue
                told = bool(token["told"].iloc[0])
                panel.plot(
                    gone["layer"], gone["drift_relative"], color=colour, linestyle="-", linewidth=1.3 if told else 0.9, marker=""
                )
                end = gone.iloc[-1]
                panel.plot(
                    end["layer"],
                    end["drift_relative"],
                    color=colour,
                    linestyle="",
                    marker=marker,
                    markersize=5,
                    markeredgecolor="white",
                )
                if kind == "natural" and depth < n_layers and named < NAMED and _apart(end, slot, members):
                    panel.annotate(
                        sentences.labels([end["token"]])[0], (end["layer"], end["drift_relative"]), xytext=(0, -9), textcoords="offset points",
                        fontsize=6.5, ha="center", va="top", bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}, zorder=5,
                    )  # fmt: skip
                    named += 1
            panel.step(
                range(2, n_layers), tau[1 : n_layers - 1], where="mid", color="black", linestyle="--", linewidth=1, marker=""
            )
            low, high = sentences.window(record)
            panel.axvspan(low - 0.5, high + 0.5, color="#f2f2f2", zorder=0)
            count = members["slot"].nunique()
            panel.set_title(f"{title}: {count} token{'' if count == 1 else 's'}")
            panel.set(xlabel="layer", xlim=(1.5, n_layers + 0.5), yscale="log")
            panel.set_yticks([0.1, 0.2, 0.3, 0.5], ["0.1", "0.2", "0.3", "0.5"])
            panel.minorticks_off()
        axes[0, 0].set_ylabel("drift relative to the state (ratio)")
        _legend(axes[0, 2])
    entry = record.config["modules"]["halting"]
    words = f"Forced to halt: {', '.join(entry['forced_ids'])}; kept to the last layer: {', '.join(entry['full_ids'])}."
    caption = sentences.caption(
        outcomes,
        TEXT,
        "Relative drift ‖h(ℓ) − h(ℓ−1)‖ / ‖h(ℓ)‖: how far each layer moves a token's state. A curve ends at the marker, where its token halts; "
        "faint: the same token in the dense model. A token halts by itself where its drift and its entropy (not drawn) are both below their "
        f"thresholds. Grey: layers after which tokens may halt. {words}",
        _behind(frame, sentences.window(record)),
        "The paper draws the absolute L2 norm against a threshold of 1.0 (its Figure 9); in this model that norm is "
        f"{record.signals(TEXT)['dense_drift_l2'].median():.0f} in the median.",
    )
    return Figure(name, "Figure 9: halting curves, forced, natural and full", frame, drawing, caption)


def curves(record: Record) -> pd.DataFrame:
    """Drift by layer and token, with the token's `kind`, whether it was `told`, and `halts_after_layer`."""
    signals = record.signals(TEXT)
    frame = signals.loc[signals["layer"] > 1, ["layer", "slot", "token", "drift_relative", "dense_drift_relative"]].copy()
    halts = sentences.halted_after(sentences.layers(signals, "active"))
    entry = record.config["modules"]["halting"]
    word = frame["token"].str.strip()
    frame["halts_after_layer"] = frame["slot"].map(halts)
    frame["told"] = word.isin([*entry["forced_ids"], *entry["full_ids"]])
    natural = np.where(frame["halts_after_layer"] < record.model.layers, "natural", "full")
    frame["kind"] = np.where(word.isin(entry["forced_ids"]), "forced", natural)
    return frame


def _behind(frame: pd.DataFrame, window: tuple[int, int]) -> str:
    """How far the tokens after the first forced one move, against the dense model."""
    forced = frame.loc[frame["kind"] == "forced", "slot"]
    if forced.empty:
        return "No token was forced to halt."
    computed = frame[
        frame["layer"].between(*window) & (frame["layer"] <= frame["halts_after_layer"]) & (frame["kind"] != "forced")
    ]
    parts = []
    for where, members in (
        ("before", computed[computed["slot"] < forced.min()]),
        ("after", computed[computed["slot"] > forced.min()]),
    ):
        if not members.empty:
            parts.append(
                f"{members['drift_relative'].mean():.2f} {where} the first forced token (dense {members['dense_drift_relative'].mean():.2f})"
            )
    return f"Mean drift of the tokens that are computed in the grey layers: {', '.join(parts)}."


def _apart(end: pd.Series, slot: int, members: pd.DataFrame) -> bool:
    """Only the first token that halts at a layer is named, or names would cover each other."""
    return slot == members.loc[members["halts_after_layer"] == end["layer"], "slot"].min()


def _legend(panel: object) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color="black", linestyle="--", marker="", label="calibrated threshold"),
        Line2D([], [], color=PALETTE[0], alpha=0.3, linestyle="-", marker="", label="dense model"),
    ]
    panel.legend(handles=handles, loc="upper center")  # type: ignore[attr-defined]
