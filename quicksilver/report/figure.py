"""A figure that is written the same way everywhere: PNG to look at, CSV with what was drawn, JSON with all that is said; SVG on demand.

The picture carries its title and the first lines of its caption, so that it says what it is wherever it is copied to. The same drawing gives the same
bytes: no dates, no software names, no random ids.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from quicksilver.files import write_files
from quicksilver.report.table import COLOUR_MAP, Written, csv, values, wrapped, written_of
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:  # matplotlib is for who draws: a file that makes a table as well imports this one
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing
    from matplotlib.transforms import Bbox
    from PIL.Image import Image

# Ordered from dark to light; lines and bars differ by dash, marker and hatch as well. None is so pale that thin lines and text could not be read
# in it, on white or turned around on dark pages (contrast 3:1).
PALETTE = ("#14213d", "#9b2226", "#6a4c93", "#1f7a8c", "#ca6702", "#4f8a65", "#a97b12")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 1)))
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "++++", "oooo")
SEQUENTIAL = "viridis"  # lightness rises all the way: heatmaps stay readable in grey
DIVERGING = "RdBu_r"  # for values of both signs: white is 0
GREY = "#8a8a8a"

LETTERS = 8.0  # points: nothing in a picture is smaller
_CHARACTERS_AN_INCH = 16  # of the caption's font, with a little room to spare
_BOLD_AN_INCH = 12  # of the finding's
_DPI = 160
_COLOURS = 256
_AREAS = 64  # the most frequent colours of a picture
_ON_BOTH = "#7a7a7a"  # can be read on white and on dark pages, 4:1
_CAPTION_LINES = 4
_MOST_ROWS = 500  # in the JSON: longer frames are drawn from traces, and nobody looks records up in them
_SENTENCE_ENDS = re.compile(r"(?<=[a-z0-9)%”\]][.!?]) (?=[A-Z])")
_RUN_DATA = re.compile(r"(Protocol \w+: )?Model: |Made by `")  # `provenance.notes` begin so, and what a study says of itself
MADE = "How it was made"


@dataclass(frozen=True)
class Figure:
    """A drawing with what it shows.

    Attributes:
        name: base name of the files, for example `figure08_15`.
        title: one line above the picture.
        frame: what is drawn, in pandas; written as CSV.
        drawing: made inside `style()`, see `panels`.
        caption: what is shown, then how it was made (`report.provenance.notes`). The first sentences of what is shown stand in the picture,
            as many as fit into four lines. All others stand under "How it was made" in text and on pages.
        extras: further files by their suffix, for example `{"gif": …}`.
        finding: what was found, a sentence made of the data. It stands above the title in the picture, and only there.
        records, claims: as of a `Table`.
    """

    name: str
    title: str
    frame: pd.DataFrame
    drawing: Drawing
    caption: tuple[str, ...]
    extras: Mapping[str, bytes] = field(default_factory=dict)
    records: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    finding: str = ""

    def text(self, width: int | None = None) -> str:
        """For a terminal of `width` columns: the title, the caption, how it was made, and which data were drawn."""
        data = f"Drawn: {len(self.frame)} rows of {', '.join(map(str, self.frame.columns))}."
        shown, made = self.shown()
        lines = [*wrapped(shown, width), "", MADE, "-" * len(MADE), *wrapped((*made, data), width)]
        return "\n".join([self.title, "=" * len(self.title), "", *lines]) + "\n"

    def shown(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The caption in two: what stands in the picture, at most four lines about what it shows, and how the figure was made."""
        characters = int(self.drawing.get_figwidth() * _CHARACTERS_AN_INCH)
        for place, part in enumerate(self.caption):
            if _RUN_DATA.match(part):
                return self.caption[:place], self.caption[place:]
            sentences = _SENTENCE_ENDS.split(part)
            for count in range(len(sentences)):
                head = (*self.caption[:place], " ".join(sentences[: count + 1]))
                if sum(len(textwrap.wrap(one, characters)) for one in head) > _CAPTION_LINES:
                    below = (*self.caption[:place], *([" ".join(sentences[:count])] if count else []))
                    return below, (" ".join(sentences[count:]), *self.caption[place + 1 :])
        return self.caption, ()

    def svg(self) -> bytes:
        """The picture with title and caption; text as paths, so that it looks the same without the font, and as metadata, to be read."""
        words = {"Title": self.title, "Description": "\n".join(self.caption)}
        return self._picture("svg", {"Date": None, "Creator": None, **words})

    def png(self) -> bytes:
        """The picture with title and caption, 160 dots an inch, in 256 colours: a third of the bytes, and no difference to see."""
        from PIL import Image
        from PIL.PngImagePlugin import PngInfo

        content, about = io.BytesIO(), PngInfo()
        if self._has_colour_map():
            about.add_text(COLOUR_MAP, "true")  # for pages in dark colours, which turn other pictures around
        whole = Image.open(io.BytesIO(self._picture("png", {"Software": None})))
        _in_few_colours(whole).save(content, "PNG", optimize=True, pnginfo=about)
        return content.getvalue()

    def written(self) -> Written:
        """What is written, as data; the rows of a long frame stand in the CSV alone."""
        rows, (caption, legend) = values(self.frame) if len(self.frame) <= _MOST_ROWS else (), self.shown()
        pictures = tuple(f"{self.name}.{suffix}" for suffix in ("png", *self.extras))
        return written_of("figure", self, rows, caption=caption, legend=legend, pictures=pictures)

    def write(self, folder: Path, *, svg: bool = False) -> list[Path]:
        """Write `<name>.png`, `.csv`, `.json`, the extras and, if asked, `.svg` into `folder`; each file appears whole or not at all.

        An older `.svg` is removed where none is asked for: pages would show it in the place of the new picture.
        """
        if not svg:
            (folder / f"{self.name}.svg").unlink(missing_ok=True)
        contents = {"png": self.png(), "csv": csv(self.frame).encode(), "json": self.written().json(), **self.extras}
        contents |= {"svg": self.svg()} if svg else {}
        return write_files(folder, {f"{self.name}.{suffix}": content for suffix, content in contents.items()})

    def _has_colour_map(self) -> bool:
        from matplotlib.image import AxesImage

        return bool(self.drawing.findobj(AxesImage))

    def _picture(self, kind: str, metadata: Mapping[str, Any]) -> bytes:
        from matplotlib.text import Text

        inches, height = self.drawing.get_figwidth(), self.drawing.get_figheight()
        lines = [line for part in self.shown()[0] for line in textwrap.wrap(part, int(inches * _CHARACTERS_AN_INCH))]
        # Outside the canvas, where no layout engine moves them; the tight bounding box takes them in.
        below: dict[str, Any] = dict(va="top", ha="left", size=LETTERS, color="#333333", linespacing=1.3)
        bold: dict[str, Any] = dict(weight="bold", size=10)
        for text in self.drawing.findobj(Text):
            said, points = text.get_text(), float(text.get_fontsize())
            if text.get_visible() and said.strip() and points < LETTERS:
                raise ConfigError(f"{self.name}: {said!r} has {points:g} points, and {LETTERS:g} are the least.")
        above, texts = 0.08, list[Text]()
        for head, look in ((self.title, {"size": LETTERS} if self.finding else bold), (self.finding, bold)):
            folded = textwrap.wrap(head, int(inches * (_CHARACTERS_AN_INCH if "weight" not in look else _BOLD_AN_INCH)))
            texts.append(self.drawing.text(0, 1 + above / height, "\n".join(folded), va="bottom", ha="left", **look))
            above += 0.17 * len(folded)
        texts.append(self.drawing.text(0, -0.08 / height, "\n".join(lines), **below))
        content, both = io.BytesIO(), self._has_colour_map()
        if both:
            _for_both_pages(self.drawing)
        saved: dict[str, Any] = dict(format=kind, dpi=_DPI, bbox_inches="tight", pad_inches=0.12, transparent=both)
        try:
            with style():
                self.drawing.savefig(content, metadata=dict(metadata), **saved)
        finally:
            for text in texts:
                text.remove()
        return content.getvalue()


def _for_both_pages(drawing: Drawing) -> None:
    """Make one picture of white and of dark pages, for a transparent ground: what is dark gets a middle lightness. A map and what is drawn in it stay
    as they are."""
    from matplotlib.image import AxesImage
    from matplotlib.legend import Legend

    images = drawing.findobj(AxesImage)
    mapped = {one.axes for one in images} | {one.colorbar.ax for one in images if one.colorbar is not None}
    for root in (*drawing.axes, *drawing.texts, *drawing.legends):
        kept: set[Any] = set()
        legends = root.findobj(Legend)
        if root in mapped:
            kept = {*root.lines, *root.patches, *root.collections, *(patch for one in legends for patch in one.get_patches())}
            kept |= {text for text in root.texts if root.viewLim.contains(*text.get_position())}
        if root in drawing.axes:
            look: dict[str, Any] = {"color": _ON_BOTH, "labelcolor": _ON_BOTH, "grid_color": _ON_BOTH, "grid_alpha": 0.3}
            root.tick_params(which="both", **look)
        for legend in legends:
            legend.get_frame().set_alpha(0)
        for one in root.findobj():
            if one not in kept:
                _brighten(one)


def _brighten(one: Any) -> None:
    """Colours of an artist that are darker than `_ON_BOTH`, made as light as that."""
    from matplotlib.colors import to_rgb, to_rgba_array

    luma = (0.2126, 0.7152, 0.0722)
    for part in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
        if (part == "color" and hasattr(one, "get_edgecolor")) or not hasattr(one, f"set_{part}"):
            continue
        colours = to_rgba_array(getattr(one, f"get_{part}")())
        rgb, seen = np.maximum(colours[:, :3], 1e-3), colours[:, 3] > 0
        factor = np.maximum(1.0, to_rgb(_ON_BOTH) @ np.array(luma) / (rgb @ luma))
        if (factor[seen] > 1).any():
            found = np.column_stack([np.minimum(factor[:, None] * rgb, 1.0), colours[:, 3]])
            getattr(one, f"set_{part}")(found if len(found) > 1 else tuple(found[0]))


def _in_few_colours(whole: Image) -> Image:
    """The picture in `_COLOURS`: those of areas as they are, or a grey band would turn purple, then always the one that is farthest from all of
    them: a colour bar is small, and must not change its colours."""
    from PIL import Image

    pixels, places = np.asarray(whole.convert("RGBA")).astype(np.int64), (1 << 24, 1 << 16, 1 << 8, 1)
    codes, back, counts = np.unique(pixels @ places, return_inverse=True, return_counts=True)
    there = codes[:, None] // places % 256
    seen = there.astype(np.float32)
    seen[:, :3] *= seen[:, 3:] / 255  # two colours that hardly cover are alike
    often, chosen = np.argsort(-counts, kind="stable"), list[int]()
    away, nearest = np.full(len(there), np.inf, np.float32), np.zeros(len(there), np.uint8)
    while len(chosen) < _COLOURS and away.max() > 0:
        one = int(often[len(chosen)] if len(chosen) < _AREAS else away.argmax())
        distance = ((seen - seen[one]) ** 2).sum(1)
        nearest[distance < away] = len(chosen)
        away = np.minimum(away, distance)
        chosen.append(one)
    found = Image.fromarray(nearest[back].reshape(pixels.shape[:2]))
    mode = "RGB" if (there[:, 3] == 255).all() else "RGBA"
    found.putpalette(there[chosen][:, : len(mode)].astype(np.uint8).tobytes(), mode)
    return found


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure, inside the block: draw in it."""
    import matplotlib
    from cycler import cycler

    cycle = cycler(color=PALETTE) + cycler(linestyle=DASHES) + cycler(marker=MARKERS)
    with matplotlib.rc_context({"axes.prop_cycle": cycle}, Path(__file__).with_suffix(".mplstyle")):
        yield


def panels(rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.0, 3.6), **options: Any) -> tuple[Drawing, np.ndarray]:
    """An empty drawing of `size` inches and its axes (rows, columns); `options` go to `Figure.subplots`. Call it inside `style()`."""
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=size, layout="constrained")
    return drawing, drawing.subplots(rows, columns, squeeze=False, **options)


def whiskers(value: Any, low: Any, high: Any) -> list[Any]:
    """Lengths of error bars below and above `value`, as matplotlib wants them: (2, 1) of numbers, (2, N) of columns.

    A percentile interval may leave its own estimate out, if only by rounding, and matplotlib refuses bars of negative length: such a bar ends
    at the estimate.
    """
    return [np.atleast_1d(np.maximum(0.0, np.asarray(length, dtype=float))) for length in (value - low, high - value)]


def percent_of_shares(shares: Any) -> np.ndarray:
    """Shares as percent from 0 to 100: a band of chance that was computed as mean and standard deviations does not know where shares end."""
    return np.asarray(100 * np.clip(np.asarray(shares, dtype=float), 0.0, 1.0))


# --- names that cover nothing, and heatmaps whose numbers can be read ----------------------------------------------------------
_STROKE_STEP = 4.0  # pixels
_NAMES_APART = 0.062  # at least, as a share of the height of the axes


def heat_look(values: np.ndarray, *, signed: bool = True) -> dict[str, Any]:
    """Colour map and limits of a heatmap, as `imshow` takes them: around 0 for what may have both signs, else from the least to the greatest."""
    from matplotlib.colors import Normalize

    low, high = (float(end(values)) if np.isfinite(values).any() else 0.0 for end in (np.nanmin, np.nanmax))
    if signed:
        return {"cmap": DIVERGING, "norm": Normalize(-max(-low, high), max(-low, high))}
    return {"cmap": SEQUENTIAL, "norm": Normalize(low, high)}


def write_cells(plot: Axes, values: np.ndarray, texts: Mapping[tuple[int, int], str]) -> None:
    """Text into the cells (row, column) of the heatmap that `plot` shows, black or white, whichever its colour leaves readable."""
    image = plot.images[-1]
    for (row, column), text in texts.items():
        red, green, blue, _ = image.to_rgba(np.array([values[row, column]]))[0]
        dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.5
        plot.text(column, row, text, ha="center", va="center", color="white" if dark else "black")


def letters(drawing: Drawing, points: float) -> None:
    """No letter of the drawing smaller than `points`, for a picture that is shown narrower than it is drawn. To be called before `legend_below`."""
    from matplotlib.text import Text

    for plot in drawing.axes:
        plot.tick_params(labelsize=points)
    for text in drawing.findobj(Text):
        text.set_fontsize(max(points, text.get_fontsize()))


def legend_below(drawing: Drawing, handles: Sequence[Any], **options: Any) -> None:
    """A legend for the whole drawing, below all axes, where it covers nothing; `options` as of `Figure.legend`. To be called last."""
    legend = drawing.legend(handles=handles, loc="outside lower center", **options)
    drawing.draw_without_rendering()
    drawing.set_layout_engine("none")  # its room is made
    # The figure's own box, which a legend is bound to, is another one while a tight picture is saved.
    legend.set_bbox_to_anchor((0, 0, 1, 1), drawing.transFigure)


def label_ends(plot: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name to the right of the axes, at the height of its last point, and join the two; names never cover each other.

    Args:
        ends: x and y of the last point, the name, its colour. Limits and scales of `plot` must be final.
    """
    from scipy.optimize import isotonic_regression

    plot.get_xlim(), plot.get_ylim()  # limits are worked out when they are asked for
    to_axes = plot.transScale + plot.transLimits
    points = sorted((*reversed(to_axes.transform((x, y)).tolist()), text, colour) for x, y, text, colour in ends)
    least = _NAMES_APART * np.arange(len(points))
    # Moved as little as need be, so that neighbours are far enough apart (least squares).
    heights = isotonic_regression(np.array([up for up, *_ in points]) - least).x + least
    for (up, across, text, colour), height in zip(points, heights, strict=True):
        plot.annotate(
            text, (across, up), (1.03, height), "axes fraction", "axes fraction", color=colour, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2, "alpha": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def label_points(drawing: Drawing, labels: Mapping[Axes, Sequence[tuple[float, float, str]]]) -> None:
    """Write a text beside each point, where it covers no other text, point or legend of its axes; farther away, with a line, where it is tight.

    Args:
        labels: axes to x, y and text of its points. Everything else must be drawn already: places depend on the layout.
    """
    from matplotlib.transforms import Bbox

    drawing.draw_without_rendering()
    drawing.set_layout_engine("none")  # or the texts would move what they were placed by
    for plot, points in labels.items():
        legend = plot.get_legend()
        taken = [] if legend is None else [legend.get_window_extent()]
        at = [plot.transData.transform((x, y)) for x, y, _ in points]
        strokes = _strokes(plot)
        dot = LETTERS * drawing.dpi / 72 / 3
        taken += [Bbox.from_extents(x - dot, y - dot, x + dot, y + dot) for x, y in at]
        for own, (x, y, text) in zip(at, points, strict=True):
            look: dict[str, Any] = {"textcoords": "offset points", "in_layout": False}
            written = plot.annotate(text, (x, y), (0, 0), fontsize=LETTERS, va="bottom", annotation_clip=False, **look)
            box = written.get_window_extent()
            place = _free_place(own, box.width, box.height, LETTERS * drawing.dpi / 72, taken, strokes, plot.bbox)
            taken.append(Bbox.from_bounds(*place, box.width, box.height))
            across, up = (np.array(place) - own) * 72 / drawing.dpi
            half = np.array([box.width, box.height]) * 36 / drawing.dpi
            written.set_position((float(across), float(up)))
            if max(abs(np.array([across, up]) + half)) > 3 * LETTERS:
                arrow = {"arrowstyle": "-", "color": GREY, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 2}
                near = float(np.clip(0, across, across + 2 * half[0])), float(np.clip(0, up, up + 2 * half[1]))
                plot.annotate("", (x, y), near, arrowprops=arrow, **look)


def _strokes(plot: Axes) -> np.ndarray:
    """Pixels (M, 2) on the lines and error bars of `plot`, near enough to each other that no text fits between them."""
    from matplotlib.collections import LineCollection

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
    """Lower left corner (pixels) of the nearest place for a text beside the point `own` that covers nothing and whose leader crosses nothing; of all
    the one that covers least, then crosses least."""
    from matplotlib.transforms import Bbox

    best, least = (0.0, 0.0), (float("inf"), 0.0)
    for distance in (0.6, 1.2, 0.4, 2.2, 3.4):
        for across, up in ((1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1), (0, -1)):
            x = own[0] + across * distance * unit - (0, width / 2, width)[1 - across]
            y = own[1] + up * distance * unit - (0, height / 2, height)[1 - up]
            box = Bbox.from_bounds(x, y, width, height)
            covered = sum(_shared(box, other) for other in taken) + width * height - _shared(box, inside)
            covered += _STROKE_STEP * float(((strokes > (x, y)) & (strokes < (x + width, y + height))).all(axis=1).sum())
            leader = np.linspace(own, (x + width / 2, y + height / 2), 24)
            leader = leader[np.hypot(*(leader - own).T) > unit]
            crossed = float((np.abs(strokes[:, None] - leader).max(-1) < _STROKE_STEP).sum())
            crossed += sum(other.contains(*place) for other in taken for place in leader)
            found = (round(covered, 6), crossed if distance > 2 else 0.0)
            if found < least:
                best, least = (x, y), found
            if least == (0.0, 0.0):
                return best
    return best


def _shared(one: Bbox, other: Bbox) -> float:
    """Area of what two boxes have in common."""
    both = one.intersection(one, other)
    return 0.0 if both is None else both.width * both.height
