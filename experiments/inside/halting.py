"""Which tokens halt and when: curves (Figure 9), timeline (20), what goes wrong (21), function against content words (22)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import spearmanr

from quicksilver.data.annotation import FUNCTION_OR_CONTENT, word_classes
from quicksilver.records.record import Record
from quicksilver.records.stats import bootstrap
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.figure import DASHES, DIVERGING, HATCHES, MARKERS, PALETTE, SEQUENTIAL, Figure, panels, style

from .. import drawing as draw
from . import sentences

TEXT = sentences.SENTENCE
_RUNS = sentences.runs("halting")

# --- Figure 9: drift by layer -----------------------------------------------------------------------------------------------------
KINDS = {
    "forced": ("Forced to halt", PALETTE[1]),
    "natural": ("Halt by themselves", PALETTE[2]),
    "full": ("Go through all layers", PALETTE[0]),
}


@artefact(sentences.runs("overridden"), sentences.READ)
def figure09_halting_curves(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 9: drift by layer of tokens that are forced to halt, halt by themselves, or go through all layers."""
    record = sentences.measured(outcomes, "overridden")
    frame, (low, high) = curves(record), sentences.window(record)
    tau, n_layers = record.thresholds["halting"]["tau_drift"], record.model.layers
    with style():
        drawing, axes = panels(1, 3, size=(10, 3.5), sharey=True)
        for panel, (kind, (title, colour)), marker in zip(axes[0], KINDS.items(), MARKERS, strict=False):
            members = frame[frame["kind"] == kind]
            _curves(panel, members, colour, "" if kind == "full" else marker)
            threshold = {"color": "black", "linestyle": "--", "linewidth": 1, "marker": ""}
            panel.step(range(2, n_layers), tau[1 : n_layers - 1], where="mid", **threshold)
            panel.axvspan(low - 0.5, high + 0.5, color="#f2f2f2", zorder=0)
            count = members["slot"].nunique()
            panel.set_title(f"{title}: {count} token{'' if count == 1 else 's'}")
            panel.set(xlabel="layer", xlim=(1.5, n_layers + 0.5), yscale="log")
            panel.set_yticks([0.1, 0.2, 0.3, 0.5], ["0.1", "0.2", "0.3", "0.5"])
            panel.minorticks_off()
        axes[0, 0].set_ylabel("drift relative to the state (ratio)")
        dense = draw.line_key("dense model", color=PALETTE[0], alpha=0.3)
        handles = [draw.line_key("calibrated threshold", color="black", linestyle="--"), dense]
        axes[0, 2].legend(handles=handles, loc="upper center")
    entry = record.config["modules"]["halting"]
    caption = sentences.caption(
        outcomes,
        TEXT,
        "Relative drift ‖h(ℓ) − h(ℓ−1)‖ / ‖h(ℓ)‖: how far each layer moves a token's state. Where a token halts, its curve ends at a marker; "
        "faint: the same token in the dense model. A token halts by itself where its drift and its entropy (not drawn) are both below their "
        "thresholds. Grey: layers after which tokens may halt. "
        f"Forced to halt: {', '.join(entry['forced_ids'])}; kept to the last layer: {', '.join(entry['full_ids'])}.",
        _behind(frame, (low, high)),
        "The paper draws the absolute L2 norm against a threshold of 1.0 (its Figure 9); in this model that norm is "
        f"{record.signals(TEXT)['dense_drift_l2'].median():.0f} in the median.",
    )
    by_themselves, tokens = frame.loc[frame["kind"] == "natural", "slot"].nunique(), frame["slot"].nunique()
    finding = f"{by_themselves} of {tokens} tokens halt by themselves at thresholds that were calibrated on other text"
    return Figure(name, "Figure 9: halting curves, forced, natural and full", frame, drawing, caption, finding=finding)


def curves(record: Record) -> pd.DataFrame:
    """Drift by layer and token, with the token's `kind`, whether it was `told`, and `halts_after_layer`."""
    signals = record.signals(TEXT)
    frame = signals.loc[signals["layer"] > 1, ["layer", "slot", "token", "drift_relative", "dense_drift_relative"]].copy()
    entry = record.config["modules"]["halting"]
    word = frame["token"].str.strip()
    frame["halts_after_layer"] = frame["slot"].map(sentences.halted_after(sentences.layers(signals, "active")))
    frame["told"] = word.isin([*entry["forced_ids"], *entry["full_ids"]])
    natural = np.where(frame["halts_after_layer"] < record.model.layers, "natural", "full")
    frame["kind"] = np.where(word.isin(entry["forced_ids"]), "forced", natural)
    return frame


def _curves(panel: Axes, members: pd.DataFrame, colour: str, marker: str) -> None:
    """A curve a token, with the marker at its end."""
    for _, token in members.groupby("slot"):
        draw.line(panel, token["layer"], token["dense_drift_relative"], color=colour, alpha=0.15, linewidth=0.7)
        gone = token[token["layer"] <= token["halts_after_layer"]]
        if gone.empty:  # halted after layer 1
            continue
        draw.line(panel, gone["layer"], gone["drift_relative"], color=colour, linewidth=1.3 if token["told"].iloc[0] else 0.9)
        end = gone.iloc[-1]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "markeredgecolor": "white"}
        draw.points(panel, end["layer"], end["drift_relative"], **look)


def _behind(frame: pd.DataFrame, window: tuple[int, int]) -> str:
    """How far the tokens after the first forced one move, against the dense model."""
    forced = frame.loc[frame["kind"] == "forced", "slot"]
    if forced.empty:
        return "No token was forced to halt."
    still = frame["layer"].between(*window) & (frame["layer"] <= frame["halts_after_layer"]) & (frame["kind"] != "forced")
    computed, first = frame[still], forced.min()
    parts = []
    for where, members in (("before", computed[computed["slot"] < first]), ("after", computed[computed["slot"] > first])):
        if not members.empty:
            mean = members[["drift_relative", "dense_drift_relative"]].mean()
            parts.append(f"{mean.iloc[0]:.2f} {where} the first forced token (dense {mean.iloc[1]:.2f})")
    return f"Mean drift of the tokens that are computed in the grey layers: {', '.join(parts)}."


# --- Figure 20: the timeline ------------------------------------------------------------------------------------------------------
MILLISECONDS = 500
NORM = LogNorm(0.7, 2, clip=True)
_HALTED: dict[str, Any] = {"facecolor": "#f4f4f4", "edgecolor": "#b0b0b0", "hatch": "////"}
_AGAIN = "#cfcfcf"
_LAST: dict[str, Any] = {"facecolor": "white", "edgecolor": "#b0b0b0", "hatch": "...."}
_WINDOW: dict[str, Any] = {"color": "black", "linewidth": 0.9, "linestyle": (0, (6, 3))}


@artefact(_RUNS, sentences.READ)
def figure20_halting_timeline(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 20: halting timeline of a sentence, coloured by how far each token is from halting, with cut-offs."""
    record = sentences.measured(outcomes, "halting")
    frame = scores(record.signals(TEXT), record.thresholds["halting"])
    with style():
        drawing, axes = panels(size=(10, 4.2))
        animation = _animate(drawing, axes[0, 0], _timeline(drawing, axes[0, 0], frame, sentences.window(record)))
    caption = sentences.caption(
        outcomes,
        TEXT,
        "Colour: how far a token is from halting, the larger of drift and entropy, each divided by its threshold in that layer. Where that falls "
        f"below 1 between the broken lines, the token halts (black bar): {frame['halts'].sum()} of {frame['slot'].nunique()} do. In the last layers "
        "they are computed again (resume_layers), and none halts there.",
    )
    finding = f"{frame['halts'].sum()} of {frame['slot'].nunique()} tokens halt"
    return Figure(name, "Figure 20: halting timeline", frame, drawing, caption, {"gif": animation}, finding=finding)


def scores(signals: pd.DataFrame, thresholds: dict[str, list[float]]) -> pd.DataFrame:
    """Per layer from 1 and token: `score`, `active`, and `halts`, whether it sits out the next layer by this layer's score.

    The score is max(drift / tau_drift, entropy / tau_entropy) of the layer; empty where the token is not computed, or after the last
    layer at which tokens may halt.
    """
    frame = sentences.in_layers(signals, "active", "drift_relative", "entropy_nats")
    tau = pd.DataFrame(thresholds, index=range(1, len(next(iter(thresholds.values()))) + 1)).replace(0.0, np.nan)
    tested = {"drift_relative": "tau_drift", "entropy_nats": "tau_entropy_nats"}
    over = [frame[signal] / frame["layer"].map(tau[threshold]) for signal, threshold in tested.items()]
    until = frame["slot"].map(sentences.halted_after(sentences.layers(frame, "active")))
    frame["score"] = pd.concat(over, axis=1).max(axis=1).where(frame["layer"] <= until)
    frame["halts"] = (frame["layer"] == until) & (frame["layer"] < frame["layer"].max())
    return frame


def _timeline(drawing: Drawing, axes: Axes, frame: pd.DataFrame, window: tuple[int, int]) -> list[Artist]:
    """The timeline; returns what is drawn of the layers."""
    score = sentences.layers(frame, "score")
    n_layers, n_tokens = score.shape
    extent = (-0.5, n_tokens - 0.5, 0.5, n_layers + 0.5)
    image = axes.imshow(score.to_numpy(dtype=float), norm=NORM, cmap=SEQUENTIAL, origin="lower", aspect="auto", extent=extent)
    of_layers: list[Artist] = [image]
    through = frame.groupby("slot")["active"].transform("all")
    for cell in frame.assign(through=through).itertuples():
        x, y = cell.slot - 0.5, cell.layer - 0.5
        if not cell.active or np.isnan(cell.score):
            look = _HALTED if not cell.active else _LAST if cell.through else {"facecolor": _AGAIN}
            of_layers.append(axes.add_patch(Rectangle((x, y), 1, 1, linewidth=0, **look)))
        if cell.halts:
            of_layers.append(axes.add_patch(Rectangle((x, y + 0.85), 1, 0.2, facecolor="black", edgecolor="none", zorder=3)))
    for edge in (window[0] - 0.5, window[1] + 0.5):
        draw.horizontal(axes, edge, **_WINDOW)
    draw.labels_below(axes, sentences.labels(frame.loc[frame["layer"] == 1, "token"]))
    axes.set_yticks(range(1, n_layers + 1))
    axes.set(xlabel="token", ylabel="layer", xlim=(-0.5, n_tokens - 0.5), ylim=(0.5, n_layers + 0.5))
    axes.grid(visible=False)
    colours = drawing.colorbar(image, ax=axes, pad=0.01, ticks=[0.7, 1, 1.4, 2], extend="both")
    colours.ax.set_yticklabels(["0.7", "1: halts below", "1.4", "2"])
    colours.ax.minorticks_off()
    colours.set_label("drift or entropy over its threshold (ratio)")
    handles = [
        Patch(facecolor="black", label="halts after this layer"),
        Patch(label="halted: not computed", **_HALTED),
        Patch(facecolor=_AGAIN, label="computed again"),
        Patch(label="no threshold in the last layer", **_LAST),
        draw.line_key("tokens may halt between these lines", **_WINDOW),
    ]
    draw.legend_above(axes, handles, ncols=3, borderaxespad=0.2)
    return of_layers


def _animate(drawing: Drawing, axes: Axes, of_layers: Sequence[Artist]) -> bytes:
    """A GIF that grows by one layer a picture and rests on the last: the whole picture, uncovered from below."""
    canvas = FigureCanvasAgg(drawing)
    drawing.set_dpi(90)

    def picture(*, whole: bool) -> np.ndarray:
        for artist in of_layers:
            artist.set_visible(whole)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    whole, empty = picture(whole=True), picture(whole=False)
    for artist in of_layers:
        artist.set_visible(True)
    # One palette for all pictures, or colours would flicker.
    palette, frames = Image.fromarray(whole).quantize(256), []
    for edge in np.arange(1.5, axes.get_ylim()[1] + 1):
        row = len(whole) - round(float(axes.transData.transform((0, edge))[1]))
        uncovered = Image.fromarray(np.concatenate([empty[:row], whole[row:]]))
        frames.append(uncovered.quantize(palette=palette, dither=Image.Dither.NONE))
    content = io.BytesIO()
    durations = [MILLISECONDS] * (len(frames) - 1) + [6 * MILLISECONDS]
    frames[0].save(content, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return content.getvalue()


# --- Figure 21: what goes wrong ---------------------------------------------------------------------------------------------------
# column -> title, unit
_HEATMAPS = {
    "sdi_l2": ("Semantic Drift Index (SDI) ‖h_dense − h_run‖₂: how far halting moved the state", "state units"),
    "error_attribution_nats": ("Error attribution |∂L/∂h · h|, dense model", "nats"),
    "attributed_nats": ("Loss that the drift should add, to first order: ∂L/∂h · (h_run − h_dense)", "nats"),
}


def _drift_and_attribution(signals: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """By slot: drift after the last layer, and mean attribution between the first layer and the last."""
    last = signals["layer"].max()
    between = signals[signals["layer"].between(1, last - 1)]
    attribution = between["dense_gradient_x_state"].abs().groupby(between["slot"]).mean()
    return signals[signals["layer"] == last].set_index("slot")["sdi_l2"], attribution


def _ranked(record: Record, of_text: Callable[[pd.DataFrame], Sequence[pd.Series]]) -> Estimate | None:
    """Correlation of the ranks, text by text, of two things over the tokens of the windows."""
    both = [of_text(record.signals(text)) for text in range(sentences.WINDOW, len(record.texts))]
    return Estimate.of(bootstrap(_correlation, *(pd.concat([one[side].rank(pct=True) for one in both]) for side in (0, 1))))


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    x, y = (one - one.mean(-1, keepdims=True) for one in (x, y))
    return (x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1))


def overlap(record: Record) -> Estimate | None:
    """Rank correlation of drift with attribution over the tokens of the windows."""
    return _ranked(record, lambda signals: [one.loc[1:] for one in _drift_and_attribution(signals)])


def entropy_and_drift(record: Record) -> Estimate | None:
    """Rank correlation of entropy with drift after half of the layers, over the tokens of the windows; both of the dense model."""

    def at_half(signals: pd.DataFrame) -> list[pd.Series]:
        half = signals[(signals["layer"] == record.model.layers // 2) & (signals["slot"] > 0)]
        return [half["dense_entropy_nats"], half["dense_drift_l2"]]

    return _ranked(record, at_half)


_READ_21 = sentences.read_of_windows(
    *("run.nll_nats", "dense.nll_nats", "run.sdi_l2", "dense.gradient_x_state", "dense.entropy_nats", "dense.drift_l2")
)
_NOTES_21 = (
    "drift after the last layer, gradient × state; halting at p60; of the tokens of two windows; the interval is over tokens",
    "after half of the layers, where widths are decided; dense model, p60; the interval is over tokens of two windows; other layers differ, "
    "some in sign",
)
_ANSWERS_21 = {
    "figure21.overlap": AnsweredBy("", "halting", of_record=overlap, note=_NOTES_21[0]),
    "e3.entropy_and_drift": AnsweredBy("", "halting", of_record=entropy_and_drift, note=_NOTES_21[1]),
}


@artefact(_RUNS, _READ_21, answers=_ANSWERS_21)
def figure21_failure_heatmaps(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 21: Semantic Drift Index and error attribution, by token and layer.

    Attribution is gradient times state (R.3 names influence functions, the caption of the figure input-gradient saliency): one backward pass.
    """
    record = sentences.measured(outcomes, "halting")
    columns = ["sdi_l2", "dense_gradient_x_state", "attributed_nats", "nll_nats", "dense_nll_nats"]
    frame = record.signals(TEXT)[["layer", "slot", "token", "active", *columns]].copy()
    frame["error_attribution_nats"] = frame["dense_gradient_x_state"].abs()
    frame["loss_change_nats"] = frame["nll_nats"] - frame["dense_nll_nats"]
    with style():
        drawing, axes = panels(4, 1, size=(10.6, 8.6), sharex=True, height_ratios=[1, 1.2, 1, 0.7])
        for plot, column in zip(axes.flat, _HEATMAPS, strict=False):
            _heat(drawing, plot, frame, column)
        change = frame[frame["layer"] == 0]
        bars, height = axes[3, 0], change["loss_change_nats"]
        bars.bar(change["slot"], height.fillna(0), color=np.where(height > 0, PALETTE[1], PALETTE[2]))
        draw.horizontal(bars, 0, linewidth=0.6)
        bars.set(ylabel="nats", xlabel="token", title="Change of the loss of this token's own prediction (above 0: worse)")
        draw.labels_below(bars, sentences.labels(change["token"]))
        bars.set_xlim(-0.5, len(change) - 0.5)
        bars.grid(visible=False, axis="x")
    drift, attribution = _drift_and_attribution(frame)
    at_end = frame[frame["layer"] == frame["layer"].max()].set_index("slot")
    changes = at_end["loss_change_nats"]
    both = spearmanr(drift.loc[1:], attribution.loc[1:])
    # The prediction of token t+1 is made from the state of token t.
    harm = spearmanr(drift.iloc[:-1], changes.iloc[1:].abs())
    caption = sentences.caption(
        outcomes,
        TEXT,
        "The same sentence runs twice, dense and with halting. Black bar: the token halts after this layer. No colour: both runs are still equal. "
        f"Rank correlation over tokens of drift after the last layer with mean attribution: {both.statistic:+.2f} (p = {both.pvalue:.2g}; the paper "
        f"says that they overlap substantially), with the size of the next token's change of loss: {harm.statistic:+.2f} (p = {harm.pvalue:.2g}).",
        "L: loss of the sentence in the dense model, nats. Row 0 is the embedding, where |∂L/∂x · x| is the paper's saliency. Colours are "
        "logarithmic, except in the third panel. After the last layer gradient times state is 0, because the final norm undoes any scaling.",
        f"The sentence's loss changes by {changes.sum():+.1f} nats; to first order the drift after the last layer should change it by "
        f"{at_end['attributed_nats'].sum():+.1f}.",
        _harm(record),
    )
    ranked = f"Rank correlation of drift with error attribution: {both.statistic:+.2f}"
    finding = f"{ranked}; the paper says that they overlap substantially"
    return Figure(name, "Figure 21: semantic drift and error attribution", frame, drawing, caption, finding=finding)


def _heat(drawing: Drawing, axes: Axes, frame: pd.DataFrame, column: str) -> None:
    (title, unit), signed = _HEATMAPS[column], column == "attributed_nats"
    table, halted = sentences.layers(frame, column), ~sentences.layers(frame, "active").astype(bool)
    values = table.to_numpy(dtype=float)
    values = np.where(values == 0, np.nan, values)
    size = float(np.nanmax(np.abs(values), initial=0)) or 1.0
    # The last row of the attribution is rounding (see the caption): colours are for the others.
    usual = np.abs(values[:-1])[np.isfinite(values[:-1])]
    least = min(float(np.quantile(usual, 0.03)) if usual.size else size, size / 10)
    look: dict[str, Any] = {"norm": Normalize(-size, size), "cmap": DIVERGING} if signed else {"norm": LogNorm(least, size)}
    extent = (-0.5, table.shape[1] - 0.5, -0.5, table.index[-1] + 0.5)
    image = axes.imshow(values, origin="lower", aspect="auto", extent=extent, **{"cmap": SEQUENTIAL, **look})
    bar_look: dict[str, Any] = {"facecolor": "black", "edgecolor": "white", "linewidth": 0.5}
    for slot in halted.columns[halted.any()]:
        axes.add_patch(Rectangle((slot - 0.5, halted[slot].idxmax() - 0.65), 1, 0.3, **bar_look))
    axes.set(ylabel="layer", title=title)
    axes.set_yticks(range(0, table.index[-1] + 1, 4))
    there = np.flatnonzero(np.isfinite(values).any(axis=1))
    axes.set_ylim(max(-0.5, int(there[0]) - 2.5) if there.size else -0.5, None)  # below it nothing is drawn
    axes.grid(visible=False)
    bar = drawing.colorbar(image, ax=axes, pad=0.01, extend="neither" if signed else "min")
    bar.ax.minorticks_off()
    bar.set_label(unit)


def _harm(record: Record) -> str:
    """Where the loss of the run's windows comes from: from states that were halted, or from those that attend to them."""
    pieces = []
    for text in range(sentences.WINDOW, len(record.texts)):
        signals = record.signals(text)
        first = signals[signals["layer"] == 0].set_index("slot")
        halted = ~sentences.layers(signals, "active").astype(bool).all()
        change = first["nll_nats"] - first["dense_nll_nats"]
        pieces.append(pd.DataFrame({"change": change, "dense": first["dense_nll_nats"], "from_halted": halted.shift(1)}).iloc[1:])
    said = []
    for kind, members in pd.concat(pieces).groupby("from_halted"):
        what, change, dense = "that halted" if kind else "that did not", members["change"].mean(), members["dense"].mean()
        said.append(f"{change:+.2f} nats where predicted from a token {what} ({len(members)}; dense {dense:.2f})")
    return f"In the run's windows a token's loss changes by {', '.join(said)}."


# --- Figure 22: function and content words ----------------------------------------------------------------------------------------
LOOK = {kind: (PALETTE[i], HATCHES[j], DASHES[j]) for kind, i, j in (("function", 1, 1), ("content", 2, 0), ("other", 4, 2))}


def depths(record: Record, text: int) -> pd.DataFrame:
    """Per token of a text: `class` of its word and `halts_after_layer`, the number of layers if it never halts."""
    tokens, halts = record.texts[text].tokens, sentences.halted_after(sentences.layers(record.signals(text), "active"))
    frame = pd.DataFrame({"text": text, "slot": halts.index, "token": tokens, "class": word_classes(tokens)})
    return frame.assign(halts_after_layer=halts.to_numpy())


@artefact(_RUNS, sentences.read_of_windows())
def figure22_function_words(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 22: halting depth by token, function words against content words."""
    record = sentences.measured(outcomes, "halting")
    texts = (sentences.FOX, *range(sentences.WINDOW, len(record.texts)))
    frame = pd.concat([depths(record, text) for text in texts], ignore_index=True)
    sentence, windows = frame[frame["text"] == sentences.FOX], frame[frame["text"] >= sentences.WINDOW]
    with style():
        drawing, axes = panels(1, 2, size=(9, 3.4), width_ratios=[1.15, 1])
        (left, right), n_layers = axes[0], record.model.layers
        for kind, members in sentence.groupby("class"):
            colour, hatch, _ = LOOK[str(kind)]
            look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
            left.bar(members["slot"], members["halts_after_layer"], **look)
        draw.labels_below(left, sentences.labels(sentence["token"]))
        draw.horizontal(left, n_layers, linestyle="--")
        left.text(len(sentence) - 0.5, n_layers + 0.15, "never halted", ha="right", va="bottom")
        left.set(xlabel="token", ylabel="layers gone through before halting", title="The paper's sentence")
        left.set_ylim(0, 1.25 * n_layers)
        left.set_yticks(range(0, n_layers + 1, 4))
        left.grid(visible=False, axis="x")
        looks = {kind: {"facecolor": LOOK[kind][0], "hatch": LOOK[kind][1]} for kind in FUNCTION_OR_CONTENT}
        handles = draw.keys_of(looks, sentence["class"], {}, edgecolor="white")
        left.legend(handles=handles, title="part of a … word", loc="upper left", ncols=3)
        for kind in FUNCTION_OR_CONTENT:
            halts, depth = windows.loc[windows["class"] == kind, "halts_after_layer"].to_numpy(), np.arange(1, n_layers + 1)
            if len(halts):
                look = {"color": LOOK[kind][0], "linestyle": LOOK[kind][2], "drawstyle": "steps-mid"}
                active = [100 * np.mean(halts >= layer) for layer in depth]
                right.plot(depth, active, label=f"{kind} ({len(halts)})", **look)
        title = f"{windows['text'].nunique()} windows of the run's text"
        right.set(xlabel="layer", ylabel="tokens not yet halted (%)", ylim=(0, 105), title=title)
        right.legend(title="part of a … word (tokens)", loc="upper right")
    halted = windows.assign(halted=windows["halts_after_layer"] < record.model.layers).groupby("class")["halted"].mean() * 100
    said = ", ".join(f"{kind} {halted[kind]:.0f}%" for kind in FUNCTION_OR_CONTENT if kind in halted)
    caption = sentences.caption(
        outcomes,
        sentences.FOX,
        f"Share of the windows' tokens that halt somewhere: {said}. The paper (Table 12) says 68 to 91% of function words and 18.5% of content "
        "words, at layer 15 of 30.",
        "Classes by a closed list of English function words, of the whole word that a token is a part of; other: no letters. Halted tokens "
        "take part again in the last layers, which is not drawn.",
    )
    finding = f"Tokens that halt somewhere, by the word that they belong to: {said}"
    return Figure(name, "Figure 22: function words against content words", frame, drawing, caption, finding=finding)
