"use strict";
// Charts that answer to the pointer: numbers on the page, drawn by Bokeh. Each returns a figure.

// Middle lightness: these read on white and on black, and apart from each other in grey.
const INK = "#3b7ea1", SECOND = "#c8791e", MARK = "#b23a48";

function plot(height, across, up, zeros, more = {}) {
  const drawn = Bokeh.Plotting.figure({
    height, sizing_mode: "stretch_width", tools: "pan,box_zoom,wheel_zoom,reset", active_drag: null, toolbar_location: "above",
    background_fill_alpha: 0, border_fill_alpha: 0, x_axis_label: across, y_axis_label: up, ...more,
  });
  drawn.toolbar.logo = null;
  for (const dimension of zeros) drawn.add_layout(new Bokeh.Span({ location: 0, dimension, line_color: "#888888", line_dash: "dashed", line_width: 1 }));
  return drawn;
}

const CHARTS = {
  // By window: nats a token more than dense, of the run and of its null; of a dense record, nats a token.
  windows({ window, series }) {
    const dense = "dense" in series, items = [];
    const drawn = plot(260, "window", dense ? "NLL (nats a token)" : "NLL minus dense (nats a token)", dense ? [] : ["width"]);
    for (const [name, nats] of Object.entries(series)) {
      const source = new Bokeh.ColumnDataSource({ data: { window, nats, what: window.map(() => name) } });
      const [color, marker] = name === "null" ? [SECOND, "triangle"] : [INK, "circle"];
      const points = drawn.scatter({ field: "window" }, { field: "nats" }, { source, marker, color, size: 8, alpha: 0.85 });
      items.push(new Bokeh.LegendItem({ label: { value: name }, renderers: [points] }));
    }
    drawn.add_layout(new Bokeh.Legend({ items, orientation: "horizontal", background_fill_alpha: 0, border_line_alpha: 0 }), "above");
    drawn.add_tools(new Bokeh.HoverTool({ tooltips: [["", "@what"], ["window", "@window"], ["nats a token", "@nats{0.0000}"]] }));
    return drawn;
  },

  // The leaderboard: KL to dense over the prompt's work that is saved; what no other record beats has another colour and marker.
  board({ method, saved, kl, place }) {
    const drawn = plot(340, "executed FLOPs of the prompt saved (%)", "KL to dense × 100 (nats a token)", [], { y_axis_type: "log" });
    const items = [];
    for (const label of [...new Set(place)].sort()) {
      const best = label === "on the front";
      const [color, marker] = best ? [SECOND, "diamond"] : label.startsWith("not") ? [MARK, "triangle"] : [INK, "circle"];
      const of = (column) => column.filter((_, i) => place[i] === label);
      const source = new Bokeh.ColumnDataSource({ data: { method: of(method), saved: of(saved), kl: of(kl) } });
      const points = drawn.scatter({ field: "saved" }, { field: "kl" }, { source, marker, color, size: best ? 12 : 8, alpha: 0.85 });
      items.push(new Bokeh.LegendItem({ label: { value: label }, renderers: [points] }));
    }
    drawn.add_layout(new Bokeh.Legend({ items, orientation: "horizontal", background_fill_alpha: 0, border_line_alpha: 0 }), "above");
    drawn.add_tools(new Bokeh.HoverTool({ tooltips: [["", "@method"], ["saved", "@saved{0.0}%"], ["KL × 100", "@kl{0.000}"]] }));
    return drawn;
  },

  // Quality against work of a sweep's records: Δ perplexity in percent with its interval over executed FLOPs saved. A ring marks the shown record.
  cost({ sweep }) {
    const { records, options } = sweeps[sweep], saved = records.map((one) => one.executed_flops_saved_pct);
    const [delta, low, high] = [0, 1, 2].map((end) => records.map((one) => one.delta_ppl_pct[end]));
    const setting = records.map((one) => options.map((option, k) => `${option.name}=${option.values[one.at[k]]}`).join(", "));
    const source = new Bokeh.ColumnDataSource({ name: "records", data: { saved, delta, low, high, setting } });
    const now = new Bokeh.ColumnDataSource({ name: "now", data: { saved: saved.slice(0, 1), delta: delta.slice(0, 1) } });
    // Whiskers and the lines through 0 do not count for Bokeh's own range.
    const reached = [0, ...low, ...high].filter((value) => value !== null), least = Math.min(...reached), most = Math.max(...reached);
    const margin = 0.06 * (most - least) || 1, y_range = new Bokeh.Range1d({ start: least - margin, end: most + margin });
    const drawn = plot(340, "executed FLOPs saved (% of dense)", "Δ perplexity (% of dense)", ["width", "height"], { y_range });
    const head = () => new Bokeh.TeeHead({ size: 8, line_color: INK, line_alpha: 0.5 });
    const ends = { base: { field: "saved" }, lower: { field: "low" }, upper: { field: "high" }, lower_head: head(), upper_head: head() };
    drawn.add_layout(new Bokeh.Whisker({ source, ...ends, line_color: INK, line_alpha: 0.5 }));
    const at = [{ field: "saved" }, { field: "delta" }];
    const points = drawn.scatter(...at, { source, size: 9, color: INK, alpha: 0.9, nonselection_alpha: 0.9 });
    drawn.scatter(...at, { source: now, size: 20, fill_alpha: 0, line_color: MARK, line_width: 3 });
    const tooltips = [["", "@setting"], ["saved", "@saved{0.0}%"], ["Δppl", "@delta{0.00}%"]];
    drawn.add_tools(new Bokeh.HoverTool({ renderers: [points], tooltips }), new Bokeh.TapTool({ renderers: [points] }));
    return drawn;
  },
};
