"""Names at lines and points of a figure that never cover each other, and heatmaps whose numbers can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Drawing
from matplotlib.transforms import Bbox

from quicksilver.report.figure import DIVERGING, GREY, SEQUENTIAL

_SIZE = 6.5  # points
_STROKE_STEP = 4.0  # pixels


def heat_look(values: np.ndarray) -> dict[str, Any]:
    """Colour map and limits of a heatmap, as `imshow` takes them: around 0 where values have both signs, else from the least to the greatest."""
    low, high = (float(end(values)) if np.isfinite(values).any() else 0.0 for end in (np.nanmin, np.nanmax))
    if low < 0 < high:
        return {"cmap": DIVERGING, "norm": Normalize(-max(-low, high), max(-low, high))}
    return {"cmap": SEQUENTIAL, "norm": Normalize(low, high)}


def write_cells(plot: Axes, values: np.ndarray, texts: Mapping[tuple[int, int], str], size: float = _SIZE) -> None:
    """Text into the cells (row, column) of the heatmap that `plot` shows, black or white, whichever its colour leaves readable."""
    image = plot.images[-1]
    for (row, column), text in texts.items():
        red, green, blue, _ = image.to_rgba(np.array([values[row, column]]))[0]
        dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.5
        plot.text(column, row, text, ha="center", va="center", fontsize=size, color="white" if dark else "black")


def legend_below(drawing: Drawing, handles: Sequence[Any], **options: Any) -> None:
    """A legend for the whole drawing, below all axes, where it covers nothing; `options` as of `Figure.legend`. To be called last."""
    legend = drawing.legend(handles=handles, loc="outside lower center", **options)
    drawing.draw_without_rendering()
    drawing.set_layout_engine("none")  # its room is made
    # The figure's own box, which a legend is bound to, is another one while a tight picture is saved.
    legend.set_bbox_to_anchor((0, 0, 1, 1), drawing.transFigure)


def label_ends(plot: Axes, ends: Sequence[tuple[float, float, str, str]], gap: float = 0.062) -> None:
    """Write each line's name to the right of the axes, at the height of its last point, and join the two; names never cover each other.

    Args:
        ends: x and y of the last point, the name, its colour. Limits and scales of `plot` must be final.
        gap: least distance of two names, as a share of the axes' height.
    """
    plot.get_xlim(), plot.get_ylim()  # limits are worked out when they are asked for
    to_axes = plot.transScale + plot.transLimits
    points = []
    for x, y, text, colour in ends:
        across, up = to_axes.transform((x, y))
        points.append((float(up), float(across), text, colour))
    points.sort()
    heights = spread([up for up, *_ in points], gap)
    for (up, across, text, colour), height in zip(points, heights, strict=True):
        plot.annotate(
            text, (across, up), (1.03, height), "axes fraction", "axes fraction", fontsize=_SIZE, color=colour, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2, "alpha": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Ascending places moved as little as need be, so that neighbours are at least `gap` apart; the mean of those that push each other stays."""
    groups: list[list[float]] = []  # each: the places of its members
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _centre(groups[-1], gap)[0] - _centre(groups[-2], gap)[1] < gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_centre(group, gap)[0] + gap * i for group in groups for i in range(len(group))]


def _centre(group: Sequence[float], gap: float) -> tuple[float, float]:
    """First and last place of a group that is `gap` apart around its mean."""
    half = gap * (len(group) - 1) / 2
    middle = sum(group) / len(group)
    return middle - half, middle + half


def label_points(drawing: Drawing, labels: Mapping[Axes, Sequence[tuple[float, float, str]]], size: float = 5.5) -> None:
    """Write a text beside each point, where it covers no other text, point or legend of its axes; farther away, with a line, where it is tight.

    Args:
        labels: axes to x, y and text of its points. Everything else must be drawn already: places depend on the layout.
        size: of the text in points.
    """
    drawing.draw_without_rendering()
    drawing.set_layout_engine("none")  # or the texts would move what they were placed by
    for plot, points in labels.items():
        legend = plot.get_legend()
        taken = [] if legend is None else [legend.get_window_extent()]
        at = [plot.transData.transform((x, y)) for x, y, _ in points]
        strokes = _strokes(plot)
        dot = size * drawing.dpi / 72 / 3
        taken += [Bbox.from_extents(x - dot, y - dot, x + dot, y + dot) for x, y in at]
        for own, (x, y, text) in zip(at, points, strict=True):
            written = plot.annotate(
                text,
                (x, y),
                (0, 0),
                textcoords="offset points",
                fontsize=size,
                va="bottom",
                in_layout=False,
                annotation_clip=False,
            )
            box = written.get_window_extent()
            place = _free_place(own, box.width, box.height, size * drawing.dpi / 72, taken, strokes, plot.bbox)
            taken.append(Bbox.from_bounds(*place, box.width, box.height))
            offset = (np.array(place) - own) * 72 / drawing.dpi
            written.set_position((float(offset[0]), float(offset[1])))
            if max(abs(offset + np.array([box.width, box.height]) * 36 / drawing.dpi)) > 3 * size:
                plot.annotate(
                    "", (x, y), (float(offset[0]), float(offset[1] + box.height * 36 / drawing.dpi)), textcoords="offset points", in_layout=False,
                    arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 2},
                )  # fmt: skip


def _strokes(plot: Axes) -> np.ndarray:
    """Pixels (M, 2) on the lines and error bars of `plot`, near enough to each other that no text fits between them."""
    paths = [line.get_xydata() for line in plot.lines if line.get_linestyle() not in ("None", "", " ")]
    for bars in plot.collections:
        paths += [path.vertices for path in bars.get_paths()] if isinstance(bars, LineCollection) else []
    found = [np.empty((0, 2))]
    for path in paths:
        corners = plot.transData.transform(np.asarray(path, dtype=float))
        for start, stop in pairwise(corners[np.isfinite(corners).all(axis=1)]):
            share = np.linspace(0, 1, 2 + int(np.hypot(*(stop - start)) / _STROKE_STEP))[:, None]
            found.append(start + share * (stop - start))
    return np.concatenate(found)


def _free_place(
    own: np.ndarray, width: float, height: float, unit: float, taken: Sequence[Bbox], strokes: np.ndarray, inside: Bbox
) -> tuple[float, float]:
    """Lower left corner (pixels) of the nearest place for a text beside the point `own` that covers nothing; of all the one that covers least."""
    best: tuple[float, float] = (0.0, 0.0)
    least = float("inf")
    for distance in (0.6, 1.2, 2.2, 3.4):
        for across, up in ((1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1), (0, -1)):
            x = own[0] + across * distance * unit - (0, width / 2, width)[1 - across]
            y = own[1] + up * distance * unit - (0, height / 2, height)[1 - up]
            box = Bbox.from_bounds(x, y, width, height)
            covered = sum(
                shared.width * shared.height for other in taken if (shared := Bbox.intersection(box, other)) is not None
            )
            crossed = (strokes > (x, y)).all(axis=1) & (strokes < (x + width, y + height)).all(axis=1)
            covered += _STROKE_STEP * float(crossed.sum())
            within = Bbox.intersection(box, inside)
            covered += box.width * box.height - (0 if within is None else within.width * within.height)
            if covered < least:
                best, least = (x, y), covered
            if covered < 1e-6:
                return x, y
    return best
