"""Table and figure frontier: which tokens may leave a prompt, how much work that saves, and what it costs the tokens after it.

It answers the abstract's "39.6% fewer FLOPs with near-zero perplexity loss (≤ 0.2)", which is +1.1% of its perplexity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from quicksilver.report import comparison, provenance, sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.reported import reported
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, label_ends, panels, style
from quicksilver.report.table import KL_CELL, Column, Panel, Table, interval_cell

from .. import drawing as draw
from ..ablation.techniques import SETTINGS, options

PANEL = "frontier"
ALWAYS = ("protocol=continuation", "measure=sweep", "dataset.windows=64")
SHARES = (0.23, 0.34, 0.453, 0.566)  # of the prompt's tokens that leave after a fifth of the depth
# Without looking: all tokens of the prompt but its last stop at that depth.
DEPTHS = (0.8, 0.7, 0.6, 0.5)
# key -> what is printed, settings without the dial, the dial and its values
TECHNIQUES: dict[str, tuple[str, tuple[str, ...], str, tuple[float, ...]]] = {
    "predicted": ("Predict K/V (ours)", ("quicksilver",), "quicksilver.save", (40, 50)),
    # Trained gates, whose budget is 40% at ½.
    "learned": ("Learned gates", ("learned_halting",), "learned_halting.threshold", (0.5,)),
    "fused": ("Fusion of the least attended", SETTINGS["fusion"], "token_fusion.fused_share", SHARES),
    "position": ("Halting, oldest", SETTINGS["position"], "halting.halted_share", SHARES),
    "attention": ("Halting, least attended", SETTINGS["attention"], "halting.halted_share", SHARES),
    "drift": ("Halting, least drift (paper)", SETTINGS["drift"], "halting.halted_share", SHARES),
    "random": ("Halting, random", SETTINGS["random"], "halting.halted_share", SHARES),
    "truncated": ("Truncation, newest kept", ("prompt_truncation",), "prompt_truncation.keep", DEPTHS),
    "static": ("Static depth", ("static_depth",), "static_depth.depth", DEPTHS),
}


def paper_bar() -> tuple[float, float]:
    """What the abstract says, in percent: FLOPs saved, and perplexity lost of that of Table 3's baseline."""
    joint = reported()["abstract.joint"]
    _, most = joint.bounds["delta_ppl"]
    assert most is not None  # "≤ 0.2"
    return joint.values["flops_saved_pct"], 100 * most / reported()["table3.baseline"].values["ppl"]


def rows() -> list[Row]:
    """A row a technique and value of its dial."""
    found = []
    for key, (title, (module, *settings), dial, values) in TECHNIQUES.items():
        behind = options("static_depth", protect_last=1, missing_kv="drop") if key == "static" else ()
        for value in values:
            turned = f"modules.{dial}={value / 100 if key == 'predicted' else value:g}"
            words = (*ALWAYS, f"modules=[{module}]", *settings, turned, *behind)
            found.append(Row(PANEL, title, f"{key}.{value:g}", f"{value:g}", words))
    return found


def measured(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """`comparison.frame`; `front`: no row saves as much or more of the prompt's work for a smaller Δ perplexity."""
    rows = comparison.frame(outcomes)
    rows["front"] = sweeps.front(rows["prompt_executed_flops_saved_pct"], rows["delta_ppl"])
    return rows


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A section a technique."""
    columns = (
        Column("", "share or depth", "{technique}", align="left"),
        Column("saved %", "exec, prompt", "{prompt_executed_flops_saved_pct:+.1f}"),
        Column("saved %", "KV bytes", "{kv_bytes_saved_pct:+.1f}", expendable=1),
        Column("perplexity", "Δppl", lambda row: interval_cell(row, "delta_ppl")),
        Column("", "KL × 100", KL_CELL, expendable=2),
        sweeps.FRONT,
    )
    saved, cost = paper_bar()
    legend = (
        "share: of the prompt's tokens that leave after a fifth of the depth. Static depth: the depth after which all tokens "
        "but the last leave. Predict K/V: percent of the prompt's work that the schedule saves. Learned gates: the threshold under which gates that were trained for 40% let a token leave.",
        "saved: executed operations of the prompt, signals included, and resident KV bytes, in percent of dense inference.",
        "Δppl: perplexity of the tokens after the prompt minus dense, with its 95% interval; below it the same in percent.",
        "KL × 100: of the dense model's next-token distribution to the run's, hundredths of a nat a token, with its 95% interval.",
        "front: ● where no other row saves as much or more for a smaller Δppl. Point estimates are compared, not intervals.",
        f"The paper's reported point is {saved:g}% of FLOPs, by its own formula, for at most {cost:.1f}% of perplexity (abstract: ≤ 0.2 at 18.2).",
    )
    panel = Panel(PANEL, "Protocol continuation: tokens leave inside the prompt only", columns, provenance.notes(outcomes))
    return Table(name, "What may leave a prompt: saved against lost", measured(outcomes), (panel,), legend)


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """All techniques on the left, those that cost little on the right."""
    # Two techniques more than the palette has: in grey and in black.
    colours, shapes, dashes = (*PALETTE, "#6a6a6a", "#000000"), (*MARKERS, "h", "p"), (*DASHES, "--", "-")
    frame = measured(outcomes)
    saved, cost = paper_bar()
    # % of perplexity: what costs less is drawn apart, beside random tokens it would all be one line. Half of the lines or more lie below it.
    most, near = frame.groupby("section")["delta_ppl_pct"].max().dropna(), 8.0
    while 2 * (most < near).sum() < len(most):
        near *= 2
    with style():
        drawing, plots = panels(1, 2, size=(10.5, 3.8))
        for number, plot in enumerate(plots.flat):
            ends = []
            for place, (title, *_) in enumerate(TECHNIQUES.values()):
                points = frame[frame["section"] == title].dropna(subset=["delta_ppl_pct"])
                points = points[points["delta_ppl_pct"] < near] if number else points
                if points.empty:
                    continue
                x, y = points["prompt_executed_flops_saved_pct"] + 0.04 * place * number, points["delta_ppl_pct"]
                look: dict[str, Any] = {"color": colours[place], "marker": shapes[place], "linestyle": dashes[place]}
                draw.intervals(plot, x, points, "delta_ppl_pct", elinewidth=0.7, capsize=1.5, **look)
                if number or y.max() >= near:
                    ends.append((float(x.max()), float(y[x.idxmax()]), title, colours[place]))
            draw.horizontal(plot, 0, color=GREY)
            plot.axhspan(0, cost, color="#dedede", linewidth=0, zorder=0.5)
            plot.set_xlabel("executed FLOPs of the prompt saved, % of dense")
            plot.set_ylabel("Δ perplexity of the tokens after it, % of dense")
            plot.set_title(f"Enlarged: below +{near:g}%" if number else "All techniques")
            label_ends(plot, ends)
    windows = frame["windows"].dropna()
    said = (
        "A share of a prompt's tokens leaves it after a fifth of the layers; the name of the line says which ones. Static depth: all tokens but the "
        f"last leave at one depth. Bars: 95% intervals, paired by window{f'; {windows.max():g} windows' if len(windows) else ''}. "
        "Table front scores more windows by default, so its numbers differ. "
        f"Grey band: the loss of the paper's abstract, up to +{cost:.1f}%. Its {saved:g}% of FLOPs are counted by another formula and have no place "
        f"on this axis. Lines below +{near:g}% are named in the right picture, where points are moved sideways by at most half a point."
    )
    title, caption = "Work of a prompt saved against perplexity lost", (said, *sweeps.notes(outcomes, name))
    return Figure(name, title, frame, drawing, caption, finding=_finding(frame))


_SAID = {
    "predicted": "K/V predicted",
    "truncated": "truncated",
    "position": "oldest dropped",
    "drift": "least drift dropped (paper)",
}


def _finding(frame: pd.DataFrame) -> str:
    """What about 40% of the work costs, by what becomes of the tokens: the nearest point of each line, with what it saves where that is
    not 40%; nothing where one was not measured."""
    apart = (frame["prompt_executed_flops_saved_pct"] - 40).abs()
    near = frame.loc[apart[apart < 5].index].assign(apart=apart).sort_values("apart").groupby("section").first()
    costs = []
    for key, said in _SAID.items():
        if TECHNIQUES[key][0] not in near.index:
            return ""
        point = near.loc[TECHNIQUES[key][0]]
        saved = f" at {point['prompt_executed_flops_saved_pct']:.0f}%" if point["apart"] > 2 else ""
        costs.append(f"{said} {point['delta_ppl_pct']:+.1f}%{saved}")
    return f"Perplexity when 40% of a prompt's work goes ({frame['windows'].max():g} windows): {', '.join(costs)}"
