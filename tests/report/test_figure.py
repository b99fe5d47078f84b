"""Figures: the same data gives the same bytes, the picture says what it is, and it can be read in grey."""

import dataclasses
import io
import textwrap
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from quicksilver.report import figure as drawn
from quicksilver.report.figure import PALETTE, Figure, label_ends, label_points, panels, style, whiskers, write_cells
from quicksilver.report.table import COLOUR_MAP, csv
from quicksilver.runtime.errors import ConfigError


def figure(caption: tuple[str, ...] = ("Model: m.", "Records: r."), extras: dict[str, bytes] | None = None) -> Figure:
    frame = pd.DataFrame({"layer": range(5), "share": np.linspace(0, 1, 5)})
    with style():
        drawing, axes = panels(1, 2)
        axes[0, 0].plot(frame["layer"], frame["share"], label="a")
        axes[0, 0].set_xlabel("layer")
        axes[0, 0].legend()
        axes[0, 1].bar(frame["layer"], frame["share"], hatch=drawn.HATCHES[1])
    return Figure("figure04", "A title", frame, drawing, caption, extras or {})


def test_the_same_data_gives_the_same_bytes(tmp_path):
    one, another = figure(extras={"gif": b"G"}), figure(extras={"gif": b"G"})
    # Writing leaves nothing on the drawing; vector graphics are written on demand.
    first, second, again = one.write(tmp_path / "a"), another.write(tmp_path / "b", svg=True), one.write(tmp_path / "c", svg=True)
    assert [path.name for path in first] == ["figure04.png", "figure04.csv", "figure04.json", "figure04.gif"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second[:-1]]
    assert [path.read_bytes() for path in second] == [path.read_bytes() for path in again]
    vector = again[-1]
    assert vector.name == "figure04.svg"
    assert vector not in one.write(tmp_path / "c")
    assert not vector.exists()  # of an older picture
    text = one.text(40)
    assert text.startswith("A title\n=======\n")
    assert "5 rows of layer, share" in text
    assert max(map(len, text.splitlines())) <= 40
    long = dataclasses.replace(one, frame=pd.DataFrame({"value": range(501), "record": "a" * 20}))  # stands in the CSV alone
    assert (long.written().rows, long.written().records, len(csv(long.frame).splitlines())) == ((), ("a" * 20,), 502)


def test_the_title_is_in_the_picture_and_run_data_stand_below_it_on_the_page():
    made_by = ("Model: m.", "Records: r.")
    plain, long = figure(made_by), figure(caption=("Up: cost.", *("A further sentence of the caption. " * 12,) * 3, *made_by))
    # Four lines at most, whole sentences; the rest is said elsewhere, and nothing is lost.
    shown, made = long.shown()
    assert len([line for part in shown for line in textwrap.wrap(part, 112)]) <= 4
    assert (shown[0], made[-2:]) == ("Up: cost.", made_by)
    assert "".join((*shown, *made)).count("A further sentence of the caption.") == 36
    assert plain.shown() == ((), made_by)
    assert (long.written().caption, long.written().legend) == (shown, made)
    found = dataclasses.replace(plain, finding="A finding that is wider than its picture and goes on below. " * 3)
    with style():
        (width, height), *others = (Image.open(io.BytesIO(one.png())).size for one in (plain, long, found))
    assert all(higher > height for _, higher in others)
    assert others[1][0] <= 1.02 * width  # a long finding is folded
    small = figure()
    small.drawing.text(0.5, 0.5, "small", size=7)
    with pytest.raises(ConfigError, match="figure04: 'small' has 7 points, and 8 are the least"):
        small.png()


def test_a_picture_keeps_its_colours_where_there_are_few_of_them_and_is_small(tmp_path):
    """A heatmap may fill the picture; the bar of another must have its own colours all the same."""
    ramp = np.linspace(-1, 1, 256)[None]
    with style():
        drawing, axes = panels(2, 1, size=(7, 5), height_ratios=[30, 1])
        axes[0, 0].imshow(np.random.default_rng(0).normal(size=(60, 60)), cmap="viridis", aspect="auto")
        axes[1, 0].imshow(ramp, cmap="RdBu_r", aspect="auto")
    made = Figure("x", "t", pd.DataFrame(), drawing, ())
    true, small = made._picture("png", {}), made.png()
    for page in ("white", "black"):
        assert np.abs(on_page(true, page) - on_page(small, page)).max() <= 16
    assert len(small) < 250_000


def on_page(picture: bytes, colour: str) -> np.ndarray:
    """RGB values of a picture that lies on a page of that colour."""
    image = Image.open(io.BytesIO(picture)).convert("RGBA")
    page = Image.new("RGBA", image.size, colour)
    page.alpha_composite(image)
    return np.asarray(page.convert("RGB")).astype(int)


def test_a_picture_with_a_colour_map_can_be_read_on_white_and_on_dark_pages():
    values = np.array([[0.0, 1.0]])
    with style():
        drawing, axes = panels(1, 2)
        image = axes[0, 0].imshow(values, cmap="Greys")
        write_cells(axes[0, 0], values, {(0, 0): "a", (0, 1): "b"})
        drawing.colorbar(image, ax=axes[0, 0])
        axes[0, 1].plot([0, 1], color=PALETTE[0], label="a line")
        axes[0, 1].legend()
    picture = Figure("x", "t", pd.DataFrame(), drawing, ()).png()
    assert COLOUR_MAP.encode() in picture[:2000]
    assert COLOUR_MAP.encode() not in figure().png()
    light, dark = (on_page(picture, colour) for colour in ("white", "black"))
    assert (light[0, 0].tolist(), dark[0, 0].tolist()) == ([255] * 3, [0] * 3)  # no ground
    assert [one.get_color() for one in axes[0, 0].texts] == ["black", "white"]  # by their cells
    luma = np.dot(to_rgb(axes[0, 1].lines[0].get_color()), (0.2126, 0.7152, 0.0722))
    assert luma == pytest.approx(0x7A / 255)
    for text in (axes[0, 0].title, axes[0, 1].xaxis.label, axes[0, 1].get_legend().get_texts()[0]):
        assert to_rgb(text.get_color()) == pytest.approx([0x7A / 255] * 3)
    with style():  # others have one
        drawing, axes = panels()
    assert on_page(Figure("x", "t", pd.DataFrame(), drawing, ()).png(), "black")[0, 0].tolist() == [255] * 3


def test_a_pale_area_keeps_its_colour_beside_many_others():
    with style():
        drawing, axes = panels(1, 2, size=(7, 4))
        axes[0, 0].axhspan(0, 1, color="#dedede", linewidth=0)
        axes[0, 1].imshow(np.random.default_rng(0).random((200, 200, 3)), aspect="auto")
    shown = on_page(Figure("x", "t", pd.DataFrame(), drawing, ()).png(), "white")
    assert (shown == 0xDE).all(-1).mean() > 0.1


def test_the_palette_can_be_read_in_grey():
    grey = [np.dot(to_rgb(colour), (0.2126, 0.7152, 0.0722)) for colour in PALETTE]
    assert grey == sorted(grey)
    assert len(PALETTE) == len(set(drawn.MARKERS)) == len(set(map(str, drawn.DASHES))) == len(set(drawn.HATCHES))


def test_an_error_bar_is_never_of_negative_length_and_a_share_never_outside_of_its_range():
    below, above = whiskers(pd.Series([1.0, 2.0, 0.0]), pd.Series([0.5, 2.1, -1.0]), pd.Series([3.0, 2.5, -0.1]))
    assert below.tolist() == [0.5, 0.0, 1.0]
    assert above.tolist() == [2.0, 0.5, 0.0]
    with style():
        _, axes = panels()
        axes[0, 0].errorbar([0], [2.0], yerr=whiskers(2.0, 2.1, 2.5))  # matplotlib refuses what is negative
    assert drawn.percent_of_shares([-0.1, 0.25, 1.2]).tolist() == [0.0, 25.0, 100.0]


# --- names that cover nothing ---------------------------------------------------------------------------------------------------
def texts_of(plot) -> list:
    return [one for one in plot.texts if one.get_text()]


def words(text) -> Bbox:
    """Where it is written, without its arrow."""
    return Text.get_window_extent(text)


def covered(boxes) -> bool:
    return any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_points_that_lie_together_have_names_that_cover_no_other_and_no_legend():
    draw = np.random.default_rng(0)
    with style():
        drawing, axes = panels(size=(4, 3))
        plot = axes[0, 0]
        plot.plot([-1, 1], [-1, 1], linestyle="", label="far")
        plot.legend(loc="center")
        drawing.draw_without_rendering()
        edge = plot.get_legend().get_window_extent()
        near = plot.transData.inverted().transform(((edge.x0 + edge.x1) / 2, edge.y1 + 3)) + draw.normal(0, 0.02, (6, 2))
        points = [(float(x), float(y), f"p{i}") for i, (x, y) in enumerate(near)]
        label_points(drawing, {plot: points})
        drawing.draw_without_rendering()
        boxes = [words(one) for one in texts_of(plot)]
        legend = plot.get_legend().get_window_extent()
        drawing, axes = panels()
        axes[0, 0].set(xlim=(0, 10), ylim=(0, 2))
        label_ends(axes[0, 0], [(10.0, 1.0 + 0.01 * i, f"line {i}", "black") for i in range(4)])
        drawing.draw_without_rendering()
        ends = [words(one) for one in texts_of(axes[0, 0])]
    assert not covered(ends)
    assert all(box.x0 > axes[0, 0].bbox.x1 for box in ends)
    assert len(boxes) == len(points)
    assert not covered(boxes)
    assert not any(box.overlaps(legend) for box in boxes)
    assert all(plot.bbox.contains(box.x0, box.y0) and plot.bbox.contains(box.x1, box.y1) for box in boxes)


def test_a_leader_ends_at_the_near_side_of_its_name():
    with style():
        drawing, axes = panels(size=(4, 3))
        plot = axes[0, 0]
        plot.set(xlim=(0, 10), ylim=(0, 10))
        label_points(drawing, {plot: [(5.0, 5.0, f"a long name {i}") for i in range(9)]})
    leaders = [one for one in plot.texts if not one.get_text()]
    assert leaders
    for leader in leaders:
        own = plot.transData.transform(leader.xy)
        near = [np.clip(own, (box.x0, box.y0), (box.x1, box.y1)) for box in map(words, texts_of(plot))]
        end = own + np.array(leader.get_position()) * drawing.dpi / 72
        assert np.abs(np.array(near) - end).max(1).min() < 1


def test_a_heatmap_has_white_at_zero_and_numbers_that_can_be_read():
    values = np.array([[-9.0, 0.0, 9.0]])
    look = drawn.heat_look(values)
    assert (look["norm"](0.0), look["norm"].vmin, look["norm"].vmax) == (0.5, -9, 9)
    positive = drawn.heat_look(np.array([1.0, np.nan, 3.0]), signed=False)
    assert positive["cmap"] != look["cmap"]
    assert (positive["norm"].vmin, positive["norm"].vmax) == (1, 3)
    with style():
        _, axes = panels()
        axes[0, 0].imshow(values, **look)
        write_cells(axes[0, 0], values, {(0, i): str(i) for i in range(3)})
    assert [one.get_color() for one in axes[0, 0].texts] == ["white", "black", "white"]
