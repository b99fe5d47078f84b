"""Pictures of the site that answer to the pointer: bokeh documents as json, and the one script that draws them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, HoverTool, Range1d, TapTool
from bokeh.models.annotations import Span, TeeHead, Whisker
from bokeh.plotting import figure

from quicksilver.harness.record import Record

_TOOLS = "pan,box_zoom,wheel_zoom,reset"
# Middle lightness: these read on white and on black, and apart from each other in grey.
INK, SECOND, MARK = "#3b7ea1", "#c8791e", "#b23a48"


def script() -> bytes:
    """BokehJS itself, one file for the whole site."""
    return files("bokeh").joinpath("server", "static", "js", "bokeh.min.js").read_bytes()


def windows(record: Record) -> dict[str, Any] | None:
    """By window: nats a token more than dense, of the run and of its null; of a dense record, nats a token."""
    frame = record.windows
    columns = {"run": "nll_nats", "null": "null_nll_nats"} if "dense_nll_nats" in frame else {"dense": "nll_nats"}
    series = {name: column for name, column in columns.items() if column in frame}
    base = frame["dense_nll_nats"] if "dense_nll_nats" in frame else 0 * frame["nll_nats"]
    text = _windows_template(tuple(series))
    for name, column in series.items():
        values = ((frame[column] - base) / frame["tokens"]).round(5)
        for key, numbers in (("window", frame["window"]), ("nats", values), ("what", [name] * len(frame))):
            text = text.replace(json.dumps([_place(name, key)]), json.dumps(list(numbers)))
    return json.loads(text)


def _place(name: str, key: str) -> str:
    return f"numbers of {name}: {key}"


@cache
def _windows_template(series: tuple[str, ...]) -> str:
    """The document with words in the place of its numbers: a site has hundreds of it, and bokeh takes its time for each."""
    drawn = figure(height=260, sizing_mode="stretch_width", tools=_TOOLS, active_drag=None, toolbar_location="above")
    drawn.xaxis.axis_label = "window"
    drawn.yaxis.axis_label = "NLL (nats a token)" if "dense" in series else "NLL minus dense (nats a token)"
    if "dense" not in series:
        drawn.add_layout(Span(location=0, dimension="width", line_color="#888888", line_dash="dashed", line_width=1))
    for name in series:
        source = ColumnDataSource({key: [_place(name, key)] for key in ("window", "nats", "what")})
        color, marker = (SECOND, "triangle") if name == "null" else (INK, "circle")
        points = drawn.scatter("window", "nats", source=source, marker=marker, size=8, color=color, alpha=0.85, legend_label=name)
        points.nonselection_glyph = points.muted_glyph = None  # nothing is selected: half of the page for nothing
    drawn.add_tools(HoverTool(tooltips=[("", "@what"), ("window", "@window"), ("nats a token", "@nats{0.0000}")]))
    return json.dumps(_item(drawn))


def cost(sweep: Mapping[str, Any]) -> dict[str, Any]:
    """Quality against work of a sweep's records: Δ perplexity in percent with its interval over executed FLOPs saved."""
    records = sweep["records"]
    data = {
        "place": list(range(len(records))),
        "saved": [record["executed_flops_saved_pct"] for record in records],
        "delta": [record["delta_ppl_pct"][0] for record in records],
        "low": [record["delta_ppl_pct"][1] for record in records],
        "high": [record["delta_ppl_pct"][2] for record in records],
        "setting": [
            ", ".join(
                f"{option['name']}={option['values'][at]}" for option, at in zip(sweep["options"], record["at"], strict=True)
            )
            for record in records
        ],
    }
    source = ColumnDataSource(data, name="records")
    now = ColumnDataSource({"saved": [data["saved"][0]], "delta": [data["delta"][0]]}, name="now")
    drawn = figure(height=340, sizing_mode="stretch_width", tools=_TOOLS, active_drag=None, toolbar_location="above")
    drawn.xaxis.axis_label = "executed FLOPs saved (% of dense)"
    drawn.yaxis.axis_label = "Δ perplexity (% of dense)"
    for dimension in ("width", "height"):
        drawn.add_layout(Span(location=0, dimension=dimension, line_color="#888888", line_dash="dashed", line_width=1))
    ends: Any = {f"{end}_head": TeeHead(size=8, line_color=INK, line_alpha=0.5) for end in ("upper", "lower")}
    whisker = Whisker(base="saved", lower="low", upper="high", source=source, line_color=INK, line_alpha=0.5, **ends)
    drawn.add_layout(whisker)
    # Whiskers and the lines through 0 do not count for bokeh's own range.
    reached = [0.0, *(float(value) for value in (*data["low"], *data["high"]) if value is not None)]
    margin = 0.06 * (max(reached) - min(reached)) or 1.0
    drawn.y_range = Range1d(start=min(reached) - margin, end=max(reached) + margin)
    points = drawn.scatter("saved", "delta", source=source, size=9, color=INK, alpha=0.9, nonselection_alpha=0.9)
    drawn.scatter("saved", "delta", source=now, size=20, fill_alpha=0, line_color=MARK, line_width=3)
    drawn.add_tools(
        HoverTool(renderers=[points], tooltips=[("", "@setting"), ("saved", "@saved{0.0}%"), ("Δppl", "@delta{0.00}%")]),
        TapTool(renderers=[points]),
    )
    return _item(drawn)


def _item(drawn: Any) -> dict[str, Any]:
    """The document as json, on a background of the page's own; ids are counted anew, because bokeh's go on with every figure."""
    drawn.background_fill_alpha = drawn.border_fill_alpha = 0
    drawn.toolbar.logo = None
    for legend in drawn.legend:
        legend.background_fill_alpha = 0
        legend.border_line_alpha = 0
        legend.orientation = "horizontal"
        drawn.add_layout(legend, "above")
    text = json.dumps(json_item(drawn))  # its order counts: a model is defined where it is first met
    order = {old: f"p{number}" for number, old in enumerate(dict.fromkeys(re.findall(r'"(p\d+)"', text)))}
    return json.loads(re.sub(r'"(p\d+)"', lambda match: f'"{order[match[1]]}"', text))
