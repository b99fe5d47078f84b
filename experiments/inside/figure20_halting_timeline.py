"""Figure 20: halting timeline of a sentence, coloured by how far each token is from halting, with cut-offs.

The extra GIF shows the same layer by layer (Q.1).
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import SEQUENTIAL, Figure, panels, style

from . import sentences

READS = sentences.READ
TEXT = sentences.SENTENCE
MILLISECONDS = 500
NORM = LogNorm(0.7, 2, clip=True)


def rows() -> list[Row]:
    """One run."""
    return [sentences.halting()]


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """The timeline, and as a GIF its growth."""
    _, record = sentences.measured(outcomes, "halting")
    window = sentences.window(record)
    frame = scores(record.signals(TEXT), record.thresholds["halting"])
    with style():
        drawing, axes = panels(size=(10, 4.2))
        animation = _animate(drawing, axes[0, 0], _draw(drawing, axes[0, 0], frame, window))
    halted = sentences.halted_after(sentences.layers(frame, "active"))
    last = frame["layer"].max()
    caption = sentences.caption(
        outcomes,
        TEXT,
        "Colour: how far a token is from halting, the larger of drift and entropy, each divided by its threshold in that layer. Where that falls "
        f"below 1 between the broken lines, the token halts (black bar): {int((halted < last).sum())} of {len(halted)} do. In the last layers they "
        "are computed again (resume_layers), and none halts there.",
    )
    return Figure(name, "Figure 20: halting timeline", frame, drawing, caption, {"gif": animation})


def scores(signals: pd.DataFrame, thresholds: dict[str, list[float]]) -> pd.DataFrame:
    """Per layer from 1 and token: `score`, `active`, and `halts`, whether it sits out the next layer by this layer's score.

    The score is max(drift / tau_drift, entropy / tau_entropy) of the layer; empty where the token is not computed, or after the last
    layer at which tokens may halt.
    """
    frame = signals[signals["layer"] > 0][["layer", "slot", "token", "active", "drift_relative", "entropy_nats"]].copy()
    tau = pd.DataFrame(thresholds, index=range(1, len(next(iter(thresholds.values()))) + 1)).replace(0.0, np.nan)
    over = [frame["drift_relative"] / frame["layer"].map(tau["tau_drift"])]
    over.append(frame["entropy_nats"] / frame["layer"].map(tau["tau_entropy_nats"]))
    halted = sentences.halted_after(sentences.layers(frame, "active"))
    before = frame["layer"] <= frame["slot"].map(halted)
    frame["score"] = pd.concat(over, axis=1).max(axis=1).where(before)
    frame["halts"] = (frame["layer"] == frame["slot"].map(halted)) & (frame["layer"] < frame["layer"].max())
    return frame


def _draw(drawing: Drawing, axes: Axes, frame: pd.DataFrame, window: tuple[int, int]) -> list[Artist]:
    """The timeline; returns what is drawn of the layers."""
    score = sentences.layers(frame, "score")
    n_layers, n_tokens = score.shape
    extent = (-0.5, n_tokens - 0.5, 0.5, n_layers + 0.5)
    image = axes.imshow(score.to_numpy(dtype=float), norm=NORM, cmap=SEQUENTIAL, origin="lower", aspect="auto", extent=extent)
    of_layers: list[Artist] = [image]
    for cell in frame.itertuples():
        corner = (cell.slot - 0.5, cell.layer - 0.5)
        if not cell.active:
            of_layers.append(
                axes.add_patch(Rectangle(corner, 1, 1, facecolor="#f4f4f4", edgecolor="#b0b0b0", hatch="////", linewidth=0))
            )
        elif np.isnan(cell.score):
            of_layers.append(axes.add_patch(Rectangle(corner, 1, 1, facecolor="#cfcfcf", edgecolor="none")))
        if cell.halts:
            of_layers.append(
                axes.add_patch(Rectangle((corner[0], corner[1] + 0.85), 1, 0.2, facecolor="black", edgecolor="none", zorder=3))
            )
    for edge in (window[0] - 0.5, window[1] + 0.5):
        axes.axhline(edge, color="black", linewidth=0.9, linestyle=(0, (6, 3)), marker="")
    first = frame[frame["layer"] == 1]
    axes.set_xticks(range(n_tokens), sentences.labels(first["token"]), rotation=90, fontsize=6.5)
    axes.set_yticks(range(1, n_layers + 1))
    axes.set(xlabel="token", ylabel="layer", xlim=(-0.5, n_tokens - 0.5), ylim=(0.5, n_layers + 0.5))
    axes.grid(visible=False)
    bar = drawing.colorbar(image, ax=axes, pad=0.01, ticks=[0.7, 1, 1.4, 2], extend="both")
    bar.ax.set_yticklabels(["0.7", "1: halts below", "1.4", "2"])
    bar.ax.minorticks_off()
    bar.set_label("drift or entropy over its threshold (ratio)")
    handles = [
        Patch(facecolor="black", label="halts after this layer"),
        Patch(facecolor="#f4f4f4", edgecolor="#b0b0b0", hatch="////", label="halted: not computed"),
        Patch(facecolor="#cfcfcf", label="computed again"),
        Line2D(
            [], [], color="black", linewidth=0.9, linestyle=(0, (6, 3)), marker="", label="tokens may halt between these lines"
        ),
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2)
    return of_layers


def _animate(drawing: Drawing, axes: Axes, of_layers: Sequence[Artist]) -> bytes:
    """A GIF that grows by one layer a picture and rests on the last: the whole picture, uncovered from below."""
    canvas = FigureCanvasAgg(drawing)
    drawing.set_dpi(90)
    canvas.draw()
    whole = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    for artist in of_layers:
        artist.set_visible(False)
    canvas.draw()
    empty = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    for artist in of_layers:
        artist.set_visible(True)
    pictures = []
    for edge in np.arange(1.5, axes.get_ylim()[1] + 1):
        row = len(whole) - round(float(axes.transData.transform((0, edge))[1]))
        pictures.append(np.concatenate([empty[:row], whole[row:]]))
    # One palette for all pictures, or colours would flicker.
    palette = Image.fromarray(whole).quantize(256)
    frames = [Image.fromarray(picture).quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    content = io.BytesIO()
    durations = [MILLISECONDS] * (len(frames) - 1) + [6 * MILLISECONDS]
    frames[0].save(content, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return content.getvalue()
