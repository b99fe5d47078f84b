"""Names cover nothing, and numbers in a heatmap can be read on their colour."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from quicksilver.report.figure import heat_look, label_ends, label_points, legend_below, panels, spread, style, write_cells


@given(st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=12))
def test_places_are_apart_in_their_order_and_moved_only_where_they_must(places):
    places.sort()
    found = spread(places, 0.1)
    assert all(b - a > 0.1 - 1e-9 for a, b in pairwise(found))
    if all(b - a >= 0.1 for a, b in pairwise(places)):
        assert found == pytest.approx(places)
    assert sum(found) == pytest.approx(sum(places))


def texts_of(plot) -> list:
    return [one for one in plot.texts if one.get_text()]


def words(text) -> Bbox:
    """Where it is written, without its arrow."""
    return Text.get_window_extent(text)


def covered(boxes) -> bool:
    return any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_lines_that_end_together_have_names_that_can_be_read_beside_them():
    with style():
        drawing, axes = panels(size=(5, 3))
        plot = axes[0, 0]
        ends = [(10.0, 1.0 + 0.01 * i, f"line {i}", "black") for i in range(4)]
        for x, y, _, _ in ends:
            plot.plot([0, x], [0, y])
        label_ends(plot, ends)
        drawing.draw_without_rendering()
        boxes = [words(one) for one in texts_of(plot)]
    assert not covered(boxes)
    assert all(box.x0 > plot.bbox.x1 for box in boxes)
    assert [one.get_text() for one in sorted(texts_of(plot), key=lambda one: words(one).y0)] == [one[2] for one in ends]


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
    assert len(boxes) == len(points)
    assert not covered(boxes)
    assert not any(box.overlaps(legend) for box in boxes)
    assert all(plot.bbox.contains(box.x0, box.y0) and plot.bbox.contains(box.x1, box.y1) for box in boxes)


def test_a_legend_below_covers_no_axes_while_a_tight_picture_is_saved(tmp_path):
    with style():
        drawing, axes = panels(size=(5, 3))
        lines = axes[0, 0].plot(range(3), label="a line")
        legend_below(drawing, lines)
        drawing.text(0, -0.3, "a caption far below")
        drawing.savefig(tmp_path / "a.png", bbox_inches="tight")
        legend = drawing.legends[0].get_window_extent()
    assert 0 <= legend.y0 < legend.y1 <= axes[0, 0].get_tightbbox().y0 + 1


def test_signed_values_have_white_at_zero_and_others_a_scale_of_their_own():
    signed = heat_look(np.array([[-1.0, 4.0], [np.nan, 0.0]]))
    assert signed["norm"](0.0) == 0.5
    assert (signed["norm"].vmin, signed["norm"].vmax) == (-4, 4)
    positive = heat_look(np.array([1.0, 3.0]))
    assert positive["cmap"] != signed["cmap"]
    assert (positive["norm"].vmin, positive["norm"].vmax) == (1, 3)


def test_numbers_are_white_on_dark_cells_and_black_on_light_ones():
    values = np.array([[-9.0, 0.0, 9.0]])
    with style():
        _, axes = panels()
        axes[0, 0].imshow(values, **heat_look(values))
        write_cells(axes[0, 0], values, {(0, i): str(i) for i in range(3)})
    assert [one.get_color() for one in axes[0, 0].texts] == ["white", "black", "white"]
