"""Table quantization_grid: entropy thresholds five by five, with their utility (E.5, E.9), and the paper's three pairs of thresholds.

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
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.reported import reported
from quicksilver.report.table import Column, Lines, Table, number, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

UNIFORM = "uniform 8 bits"
SWEEP = sweeps.Sweep(
    "e9_grid",
    "The grid of E.9 on min-max scaled entropies, calibrating part",
    ("prompt_paper_flops_saved_pct", "paper_flops_saved_pct", "kv_bytes_saved_pct"),
    {UNIFORM: ("modules=[adaptive_quantization_uniform8]",)},
    UNIFORM,
)
LOW, HIGH = "modules.adaptive_quantization.tau_low", "modules.adaptive_quantization.tau_high"
LAMBDAS = (0.0, 5.0, 50.0, 150.0)  # beside the paper's own


def lambda_of_the_paper() -> float:
    """λ = 15 (E.9)."""
    return reported()["e9.lambda"].values["lambda"]


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
    return rows.assign(delta_flops=saved, utility=lambda_of_the_paper() * pd.Series(saved, rows.index) - rows["base_delta_ppl"])


def best(rows: pd.DataFrame, factor: float) -> Mapping[str, Any] | None:
    """The point of the grid that λ = `factor` chooses; None: none was measured."""
    measured = rows.dropna(subset=["utility"])
    if measured.empty:
        return None
    return measured.loc[(factor * measured["delta_flops"] - measured["base_delta_ppl"]).idxmax()].to_dict()


def legend(rows: pd.DataFrame) -> tuple[str, ...]:
    """What is measured against what, and what each λ chooses."""
    own = lambda_of_the_paper()
    chosen = []
    for factor in sorted({own, *LAMBDAS}):
        point = best(rows, factor)
        if point is not None:
            chosen.append(f"λ = {factor:g}: ({point[LOW]}, {point[HIGH]})")
    return (
        "Tokens whose entropy is below τ_low get 2 bits, up to τ_high 4, above 8. Everything is compared with all tokens at 8 bits from the "
        "same layer on. ΔFLOPs: operations of the prompt saved beyond that, in the paper's ledger. ΔPPL: perplexity added. "
        f"U = λ·ΔFLOPs - ΔPPL is the paper's measure of worth, λ = {own:g} (E.9).",
        "The run at 8 bits quantises the tokens after the prompt too; the grid leaves those alone, because scaling entropies needs all of them.",
        "Best point (τ_low, τ_high) by λ: " + ("; ".join(chosen) or "nothing was measured") + ".",
    )


def _utility(row: Mapping[str, Any]) -> Lines:
    return (signed(number(row, "utility"), 2),)


def _delta_flops(row: Mapping[str, Any]) -> Lines:
    saved = number(row, "delta_flops")
    return (signed(None if saved is None else 100 * saved),)


COLUMNS = (Column("E.9", "ΔFLOPs %", _delta_flops), Column("E.9", "U", _utility))


def draw(rows: pd.DataFrame) -> Drawing:
    """Heatmaps of ΔFLOPs, ΔPPL and U over the thresholds, the best point framed, and cost over saving. Call it inside `style()`."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    from quicksilver.report.figure import GREY, PALETTE, heat_look, panels, whiskers, write_cells

    drawing, plots = panels(2, 2, size=(7.2, 6.0))
    halo = withStroke(linewidth=3.6, foreground="white")
    points = rows.dropna(subset=["utility"])
    chosen = best(rows, lambda_of_the_paper())
    shown = (
        ("delta_flops", "ΔFLOPs against uniform 8 bits, %", 100.0, 1),
        ("base_delta_ppl", "ΔPPL against uniform 8 bits, perplexity", 1.0, 2),
        ("utility", f"U = {lambda_of_the_paper():g}·ΔFLOPs - ΔPPL, perplexity", 1.0, 2),
    )
    for plot, (column, title, factor, decimals) in zip(plots.flat, shown, strict=False):
        matrix = factor * points.pivot(index=LOW, columns=HIGH, values=column)
        values = matrix.to_numpy(dtype=float)
        drawing.colorbar(plot.imshow(values, origin="lower", aspect="auto", **heat_look(values)), ax=plot)
        texts = {(i, j): f"{value:.{decimals}f}" for (i, j), value in np.ndenumerate(values) if not math.isnan(value)}
        write_cells(plot, values, texts)
        if chosen is not None:
            corner = matrix.columns.get_loc(chosen[HIGH]) - 0.5, matrix.index.get_loc(chosen[LOW]) - 0.5
            plot.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="black", linewidth=1.6, path_effects=[halo]))
        plot.set_xticks(range(len(matrix.columns)), matrix.columns)
        plot.set_yticks(range(len(matrix.index)), matrix.index)
        plot.set_xlabel("τ_high, on entropies scaled to 0…1")
        plot.set_ylabel("τ_low, on entropies scaled to 0…1")
        plot.set_title(title, fontsize=8)
        plot.grid(False)
    plane = plots[1][1]
    spread = whiskers(points["base_delta_ppl"], points["base_delta_ppl_low"], points["base_delta_ppl_high"])
    plane.errorbar(
        100 * points["delta_flops"], points["base_delta_ppl"], yerr=spread, fmt="o", color=PALETTE[0], ecolor=GREY, elinewidth=0.6
    )
    front = points[sweeps.front(points["delta_flops"], points["base_delta_ppl"])].sort_values("delta_flops")
    plane.plot(100 * front["delta_flops"], front["base_delta_ppl"], color=PALETTE[1], linestyle="--", marker="", label="front")
    if chosen is not None:
        place = (100 * chosen["delta_flops"], chosen["base_delta_ppl"])
        plane.plot(*place, marker="s", markersize=9, fillstyle="none", linestyle="", color="black", label="greatest U")
    plane.set_xlabel("ΔFLOPs against uniform 8 bits, %")
    plane.set_ylabel("ΔPPL against uniform 8 bits, perplexity")
    plane.set_title("Cost over saving, with 95% intervals", fontsize=8)
    plane.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return drawing


PAIRS = sweeps.Sweep(
    "quantization_thresholds",
    "The paper's pairs of thresholds, each on the entropies it is given for; test part",
    ("paper_flops_saved_pct", "prompt_paper_flops_saved_pct", "kv_bytes_saved_pct"),
    SWEEP.beside,
    UNIFORM,
)
# E.5 and E.9 compare with 8 bits, each with a pair of its own: (0.3, 0.6) on scaled entropies, and (1.0, 2.3).
ANSWERS = {
    **sweeps.answers(PAIRS, "modules=[adaptive_quantization_paper_e]", "e5.quantization", "prompt_paper_flops"),
    **sweeps.answers(PAIRS, "modules=[adaptive_quantization]", "e9.quantization", "prompt_paper_flops"),
}


def rows() -> list[Row]:
    """The grid with the uniform 8 bits it is measured against, then the pairs."""
    return [*SWEEP.rows(), *PAIRS.rows()]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Every point of the grid with its utility; which λ chooses which point stands in the legend."""
    found = utilities(outcomes, sweeps.frame(outcomes, (SWEEP, PAIRS)))
    title = "Thresholds of adaptive quantization: the grid of E.9, and the paper's pairs"
    more = {SWEEP.experiment: COLUMNS}
    return sweeps.table(outcomes, name, title, (SWEEP, PAIRS), rows=found, more=more, legend=legend(found))
