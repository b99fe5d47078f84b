"""Entropy thresholds of bit-widths five by five, with their utility (E.5, E.9), and the paper's three pairs of thresholds.

The grid is scored on the part of the text that calibrates, as the paper's is on validation text. Its thresholds are of min-max scaled
entropies (E.1), so it acts in prompts only, and what it saves is of the prompt. Utility is that of E.9, against a uniform 8 bits.

Claims: E.5 and E.9 (8.6% for 0.10 of perplexity), which name different pairs, neither on the grid's scale (docs/conflicts.md #18).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.claims.reported import reported
from quicksilver.report.table import Column, Table, signed_cell

from .multiruns import jobs_of

if TYPE_CHECKING:  # a table needs no matplotlib
    from matplotlib.figure import Figure as Drawing

    from quicksilver.report.figure import Figure

UNIFORM = "uniform 8 bits"
BESIDE = {UNIFORM: ("modules=[adaptive_quantization_uniform8]",)}
SAVED = ("prompt_paper_flops_saved_pct", "paper_flops_saved_pct", "kv_bytes_saved_pct")
SWEEP = sweeps.Sweep("e9_grid", "The grid of E.9 on min-max scaled entropies, calibrating part", SAVED, BESIDE, UNIFORM)
PAIRS = sweeps.Sweep(
    "quantization_thresholds", "The paper's pairs of thresholds, each on the entropies it is given for; test part",
    ("paper_flops_saved_pct", "prompt_paper_flops_saved_pct", "kv_bytes_saved_pct"), BESIDE, UNIFORM,
)  # fmt: skip
LOW, HIGH = "modules.adaptive_quantization.tau_low", "modules.adaptive_quantization.tau_high"
LAMBDA = reported()["e9.lambda"].values["lambda"]  # 15
LAMBDAS = (0.0, 5.0, 50.0, 150.0)  # beside the paper's own
# E.5 and E.9 compare with 8 bits, each with a pair of its own: (0.3, 0.6) on scaled entropies, and (1.0, 2.3).
ANSWERS = {
    **sweeps.answers(PAIRS, "modules=[adaptive_quantization_paper_e]", "e5.quantization", "prompt_paper_flops"),
    **sweeps.answers(PAIRS, "modules=[adaptive_quantization]", "e9.quantization", "prompt_paper_flops"),
}


def utilities(outcomes: Sequence[Outcome], rows: pd.DataFrame) -> pd.DataFrame:
    """`rows` (`sweeps.frame`) with what E.9 computes from the grid, empty where the uniform 8 bits have no record.

    `delta_flops`: share of the prompt's operations in the paper's ledger that go beyond those of a uniform 8 bits. `utility`:
    λ·delta_flops - ΔPPL at the paper's λ, ΔPPL that of `base_delta_ppl`.
    """
    base = sweeps.base_record(outcomes, SWEEP)
    saved = [
        1 - (one.record.flops("prompt_paper") or math.nan) / (base.flops("prompt_paper") or math.nan)
        if one.record is not None and base is not None and one.row.panel == SWEEP.experiment
        else math.nan
        for one in outcomes
    ]
    return rows.assign(delta_flops=saved, utility=LAMBDA * pd.Series(saved, rows.index) - rows["base_delta_ppl"])


def best(rows: pd.DataFrame, factor: float = LAMBDA) -> Mapping[str, Any] | None:
    """The point of the grid that λ = `factor` chooses; None: none was measured."""
    measured = rows.dropna(subset=["utility"])
    if measured.empty:
        return None
    return measured.loc[(factor * measured["delta_flops"] - measured["base_delta_ppl"]).idxmax()].to_dict()


def legend(rows: pd.DataFrame) -> tuple[str, ...]:
    """What is measured against what, and what each λ chooses."""
    points = {factor: point for factor in sorted({LAMBDA, *LAMBDAS}) if (point := best(rows, factor)) is not None}
    chosen = "; ".join(f"λ = {factor:g}: ({point[LOW]}, {point[HIGH]})" for factor, point in points.items())
    return (
        "Tokens whose entropy is below τ_low get 2 bits, up to τ_high 4, above 8. Everything is compared with all tokens at 8 bits from the "
        "same layer on. ΔFLOPs: operations of the prompt saved beyond that, in the paper's ledger. ΔPPL: perplexity added. "
        f"U = λ·ΔFLOPs - ΔPPL is the paper's measure of worth, λ = {LAMBDA:g} (E.9).",
        "The run at 8 bits quantises the tokens after the prompt too; the grid leaves those alone, because scaling entropies needs all of them.",
        f"Best point (τ_low, τ_high) by λ: {chosen or 'nothing was measured'}.",
    )


@artefact(jobs_of(SWEEP, PAIRS), answers=ANSWERS)
def table_quantization_grid(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table quantization_grid: entropy thresholds five by five, with their utility (E.5, E.9), and the paper's three pairs of thresholds."""
    found = utilities(outcomes, sweeps.frame(outcomes, (SWEEP, PAIRS)))
    title = "Thresholds of adaptive quantization: the grid of E.9, and the paper's pairs"
    more = (Column("E.9", "ΔFLOPs %", signed_cell("delta_flops", times=100)), Column("E.9", "U", signed_cell("utility", 2)))
    return sweeps.table(outcomes, name, title, (SWEEP, PAIRS), rows=found, more={SWEEP.experiment: more}, legend=legend(found))


@artefact(SWEEP.rows)
def figure_quantization_grid(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure quantization_grid: what each pair of entropy thresholds saves, costs and is worth (E.9)."""
    from quicksilver.report.figure import Figure, style

    found = utilities(outcomes, sweeps.frame(outcomes, (SWEEP,)))
    with style():
        drawing = draw(found)
    cost = [f"base_delta_ppl{end}" for end in ("", "_low", "_high")]
    shown = found[["key", *SWEEP.axes(), "delta_flops", *cost, "utility", "front", "record"]]
    caption = (*legend(found), *sweeps.notes(outcomes, name))
    return Figure(name, "Grid of entropy thresholds for bit-widths (E.9)", shown, drawing, caption)


def draw(rows: pd.DataFrame) -> Drawing:
    """Heatmaps of ΔFLOPs, ΔPPL and U over the thresholds, the best point framed, and cost over saving. Call it inside `style()`."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    from quicksilver.report.figure import GREY, PALETTE, heat_look, panels, whiskers, write_cells

    drawing, plots = panels(2, 2, size=(7.2, 6.0))
    points, chosen = rows.dropna(subset=["utility"]), best(rows)
    shown = (
        ("delta_flops", "ΔFLOPs against uniform 8 bits, %", 100.0, 1),
        ("base_delta_ppl", "ΔPPL against uniform 8 bits, perplexity", 1.0, 2),
        ("utility", f"U = {LAMBDA:g}·ΔFLOPs - ΔPPL, perplexity", 1.0, 2),
    )
    for plot, (column, title, factor, decimals) in zip(plots.flat, shown, strict=False):
        matrix = factor * points.pivot(index=LOW, columns=HIGH, values=column)
        values = matrix.to_numpy(dtype=float)
        drawing.colorbar(plot.imshow(values, origin="lower", aspect="auto", **heat_look(values)), ax=plot)
        write_cells(plot, values, {at: f"{value:.{decimals}f}" for at, value in np.ndenumerate(values) if not math.isnan(value)})
        if chosen is not None:
            corner = matrix.columns.get_loc(chosen[HIGH]) - 0.5, matrix.index.get_loc(chosen[LOW]) - 0.5
            look: dict[str, Any] = {
                "edgecolor": "black",
                "linewidth": 1.6,
                "path_effects": [withStroke(linewidth=3.6, foreground="white")],
            }
            plot.add_patch(Rectangle(corner, 1, 1, fill=False, **look))
        plot.set_xticks(range(len(matrix.columns)), matrix.columns)
        plot.set_yticks(range(len(matrix.index)), matrix.index)
        plot.set(xlabel="τ_high, on entropies scaled to 0…1", ylabel="τ_low, on entropies scaled to 0…1")
        plot.set_title(title, fontsize=8)
        plot.grid(False)
    plane, gain, cost = plots[1][1], 100 * points["delta_flops"], points["base_delta_ppl"]
    spread = whiskers(cost, points["base_delta_ppl_low"], points["base_delta_ppl_high"])
    plane.errorbar(gain, cost, yerr=spread, fmt="o", color=PALETTE[0], ecolor=GREY, elinewidth=0.6)
    front = points[sweeps.front(gain, cost)].sort_values("delta_flops")
    plane.plot(100 * front["delta_flops"], front["base_delta_ppl"], color=PALETTE[1], linestyle="--", marker="", label="front")
    if chosen is not None:
        look = {"marker": "s", "markersize": 9, "fillstyle": "none", "linestyle": "", "color": "black"}
        plane.plot(100 * chosen["delta_flops"], chosen["base_delta_ppl"], **look, label="greatest U")
    plane.set(xlabel="ΔFLOPs against uniform 8 bits, %", ylabel="ΔPPL against uniform 8 bits, perplexity")
    plane.set_title("Cost over saving, with 95% intervals", fontsize=8)
    plane.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return drawing
