"""What figures share: plain lines, legends above the axes, tokens along an axis, stacked and labelled cells."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quicksilver.report.figure import DASHES, MARKERS, PALETTE, heat_look, whiskers, write_cells
from quicksilver.report.table import ENDS

if TYPE_CHECKING:  # a table of the same file needs no matplotlib
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

_PLAIN: Mapping[str, Any] = {"linestyle": "-", "marker": ""}  # not the dashes and markers that the style goes through
_RULE: Mapping[str, Any] = {"color": "black", "linewidth": 0.8, **_PLAIN}


def look(place: int, **more: Any) -> dict[str, Any]:
    """Colour, dash and marker of the series at this place."""
    return {"color": PALETTE[place], "linestyle": DASHES[place], "marker": MARKERS[place], **more}


def line(axes: Axes, x: Any, y: Any, **look: Any) -> None:
    """A solid line without markers, unless `look` says otherwise."""
    axes.plot(x, y, **{**_PLAIN, **look})


def points(axes: Axes, x: Any, y: Any, **look: Any) -> None:
    """Markers without a line."""
    axes.plot(x, y, linestyle="", **look)


def horizontal(axes: Axes, y: float, **look: Any) -> None:
    """A thin black line across the axes."""
    axes.axhline(y, **{**_RULE, **look})


def vertical(axes: Axes, x: float, **look: Any) -> None:
    """A thin black line up the axes."""
    axes.axvline(x, **{**_RULE, **look})


def line_key(label: str, **look: Any) -> Line2D:
    """A line in a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{**_PLAIN, **look})


def intervals(axes: Axes, x: Any, rows: Any, column: str, *, times: float = 1.0, across: bool = False, **look: Any) -> Any:
    """A column of a frame, or of one row, `times` as large, with error bars to its ends; `across`: along x, at the heights `x`."""
    value, low, high = (times * rows[f"{column}{end}"] for end in ENDS)
    error = whiskers(value, low, high)
    return axes.errorbar(value, x, xerr=error, **look) if across else axes.errorbar(x, value, yerr=error, **look)


def heatmap(
    drawing: Any,
    axes: Axes,
    values: np.ndarray,
    form: Callable[[float], str],
    columns: Any,
    rows: Any,
    *,
    around_0: bool = True,
    **options: Any,
) -> None:
    """Numbers as colours and in words, with a colour bar; `columns` and `rows` are the labels below and on the left."""
    drawing.colorbar(axes.imshow(values, **options, **heat_look(values, signed=around_0)), ax=axes)
    write_cells(axes, values, {at: form(value) for at, value in np.ndenumerate(values) if not np.isnan(value)})
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(False)


def keys_of(
    looks: Mapping[str, Mapping[str, Any]], present: Iterable[str], labels: Mapping[str, str], **look: Any
) -> list[Patch]:
    """Legend patches of those states in `looks` that are present, called as in `labels` or by their names."""
    from matplotlib.patches import Patch

    there = set(present)
    return [Patch(label=labels.get(name, name), **{**look, **own}) for name, own in looks.items() if name in there]


def with_halo(bars: ErrorbarContainer) -> None:
    """A white outline around error bars, so that they can be seen in dark bars."""
    from matplotlib.patheffects import withStroke

    for part in bars.get_children():
        part.set_path_effects([withStroke(linewidth=2.6, foreground="white")])


def legend_above(axes: Axes, handles: Sequence[Any] | None = None, **options: Any) -> None:
    """A legend over the upper left corner of the axes, where it covers nothing."""
    axes.legend(handles=handles, loc="lower left", **{"bbox_to_anchor": (0, 1.0), **options})


def labels_below(axes: Axes, labels: Sequence[str]) -> None:
    """One upright label a column: the tokens of a text, in columns 0, 1, …"""
    axes.set_xticks(range(len(labels)), labels, rotation=90)


def separate_columns(axes: Axes, columns: int) -> None:
    """Thin white lines between the columns of a picture."""
    for edge in range(1, columns):
        vertical(axes, edge - 0.5, color="white", linewidth=0.4)


def folded(technique: str, width: int) -> str:
    """The name of a bar on several lines; no line ends with the + of a step."""
    return textwrap.fill(technique.replace("+ ", "+\u00a0"), width, break_long_words=False)
