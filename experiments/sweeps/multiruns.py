"""Hydra multiruns of conf/experiment: the paper's calibrations, options of depth and of halted tokens, and thresholds of bit-widths.

What the paper calibrates on validation text is scored on the calibrating part here, so that the test part has seen none of it. E.5 and E.9 name
different pairs of thresholds, neither on the grid's scale (docs/conflicts.md #18).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from quicksilver.records.stats import bootstrap
from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, PALETTE, Figure, panels, style
from quicksilver.report.sweeps import PROMPT, Sweep
from quicksilver.report.table import ENDS, Column, Table

from .. import drawing as draw

ALONE = {"halting alone": ("modules=[halting]",)}
KV_BYTES = ("kv_bytes_saved_pct", *PROMPT[:2])
OPTIONS = (
    Sweep("minimum_depth", "Between which fractions of the depth tokens may halt"),
    Sweep("resume_layers", "In how many last layers halted tokens take part again"),
    Sweep("missing_kv", "What later layers see of a halted token"),
    Sweep("decision_depth", "At which fraction of the depth bit-widths are decided", ("paper_flops_saved_pct", "executed_flops_saved_pct")),
)  # fmt: skip


class FromTheLast(Sweep):
    """Drawn in a colour for each value of its last axis, with the first as labels."""

    def axes(self) -> tuple[str, ...]:
        """From the last to the first."""
        return super().axes()[::-1]


CONSTANTS = {name: (f"modules=[halting_{name.replace('-', '_')}]",) for name in ("paper-b2", "paper-g2", "paper-fig9")}
_C3 = "C.3: percentiles of the attention that halted tokens get; calibrating part"
KV_SKIPPING = Sweep("c3_kv_skipping", _C3, KV_BYTES, ALONE, "halting alone")
CALIBRATIONS = (
    Sweep("b2_halting", "B.2: percentiles of drift and entropy around the 25th; calibrating part", beside=CONSTANTS),
    Sweep("faq_tau_drift", "FAQ: τ in [0.9, 1.1] as threshold of the absolute drift, which alone decides; test part"),
    Sweep("faq_tau_entropy", "FAQ: τ in [0.9, 1.1] as threshold of the entropy in nats, drift below its median; test part"),
    KV_SKIPPING,
    Sweep("d3_fusion", "D.3: percentiles of the distance of neighbours at layers 10, 15 and 20 of 30; calibrating part", PROMPT),
)
DRAWN = (
    Sweep("b2_halting", "Percentile of drift, of entropy (paper,\u00a0B.2)"),
    Sweep("minimum_depth", "Layers in which tokens may halt"),
    Sweep("resume_layers", "Last layers that halted tokens rejoin"),
    FromTheLast("missing_kv", "K/V of halted tokens, last layers rejoined"),
    Sweep("c3_kv_skipping", "KV skipping: percentile of attention (paper,\u00a0C.3)", KV_BYTES[:1], ALONE, "halting alone"),
    Sweep("d3_fusion", "Fusion: depth, percentile of distance (paper,\u00a0D.3)", PROMPT),
    Sweep("decision_depth", "Depth at which bit-widths are decided", ("paper_flops_saved_pct",)),
    Sweep("faq_tau_entropy", "Entropy threshold, nats (paper,\u00a0FAQ)"),
)


def jobs_of(*wanted: Sweep) -> Callable[[], list[Row]]:
    """What returns every job of these sweeps."""
    return lambda: [row for sweep in wanted for row in sweep.rows()]


@artefact(jobs_of(*OPTIONS))
def table_options(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table options: what depth and the treatment of halted tokens do: decision depth, minimum depth, resuming layers, missing K/V."""
    return sweeps.table(outcomes, name, "Depth, and what becomes of halted tokens: one option at a time", OPTIONS)


@artefact(jobs_of(*CALIBRATIONS), answers=sweeps.answers(KV_SKIPPING, "tau_kv=p95", "c3.kv_threshold"))
def table_calibrations(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table calibrations: the paper's calibrations repeated: halting (B.2, FAQ), KV skipping (C.3), fusion (D.3)."""
    legend = (
        "Where nothing is saved and Δppl is 0, no token met the threshold. A constant that suits one model's drift need not "
        "suit another's.",
        "C.3 asks for less than 0.05 of perplexity added by skipping: that is the difference against halting alone.",
    )
    return sweeps.table(outcomes, name, "Calibrations of the paper, repeated", CALIBRATIONS, legend=legend)


@artefact(jobs_of(*DRAWN))
def figure_sweeps(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure sweeps: what each calibration and option saves against what it costs, with the front of each sweep."""
    return sweeps.figure(outcomes, name, "Saving against cost, option by option", DRAWN)


# --- the grid of E.9 --------------------------------------------------------------------------------------------------------------
# Scored on the part of the text that calibrates, as the paper's is on validation text. Its thresholds are of min-max scaled entropies (E.1), so
# it acts in prompts only, and what it saves is of the prompt. Utility is that of E.9, against a uniform 8 bits.
UNIFORM = "uniform 8 bits"
BESIDE = {UNIFORM: ("modules=[adaptive_quantization_uniform8]",)}
SAVED = ("prompt_paper_flops_saved_pct", "paper_flops_saved_pct", "kv_bytes_saved_pct")
GRID = Sweep("e9_grid", "The grid of E.9 on min-max scaled entropies, calibrating part", SAVED, BESIDE, UNIFORM)
PAIRS = Sweep(
    "quantization_thresholds", "The paper's pairs of thresholds, each on the entropies it is given for; test part",
    ("paper_flops_saved_pct", "prompt_paper_flops_saved_pct", "kv_bytes_saved_pct"), BESIDE, UNIFORM,
)  # fmt: skip
LOW, HIGH = "modules.adaptive_quantization.tau_low", "modules.adaptive_quantization.tau_high"
LAMBDA = reported()["e9.lambda"].values["lambda"]  # 15
LAMBDAS = (0.0, 5.0, 50.0, 150.0)  # beside the paper's own
CHOSEN = "tau_low=0.3 tau_high=0.6"  # E.5, E.9
HALVINGS = 32


def front(outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """Utility of the paper's pair less that of the best one, the mean over random halvings. Windows of one half choose the pair for the other half:
    what wins by luck where it is chosen has none where it is judged."""
    base = outcomes[UNIFORM].record
    grid = {key: one.record.windows for key, one in outcomes.items() if key != UNIFORM and one.record is not None}
    if base is None or CHOSEN not in grid or len(grid) < 2:
        return None
    tokens, whole = (base.windows[name].to_numpy(float) for name in ("tokens", "prompt_paper_flops"))
    found = {key: one[["nll_nats", "prompt_paper_flops"]].to_numpy(float).T for key, one in grid.items()}  # (2, W) each

    def worth(nats_flops: Any, at: Any) -> Any:
        nats, flops = nats_flops[0][at], nats_flops[1][at]
        return LAMBDA * (1 - flops.sum(-1) / whole[at].sum(-1)) - np.exp(nats.sum(-1) / tokens[at].sum(-1))

    rng, bests = np.random.default_rng(0), []
    for _ in range(HALVINGS):
        first = rng.permutation(len(tokens)) % 2 == 0
        best_of = [max(found, key=lambda key, at=at: worth(found[key], at)) for at in (~first, first)]  # type: ignore[misc]
        bests.append(np.where(first, *(found[key] for key in best_of)))

    def apart(at: Any) -> Any:
        return worth(found[CHOSEN], at.astype(int)) - np.mean([worth(one, at.astype(int)) for one in bests], axis=0)

    return Estimate.of(bootstrap(apart, np.arange(len(tokens))))


# E.5 and E.9 compare with 8 bits, each with a pair of its own: (0.3, 0.6) on scaled entropies, and (1.0, 2.3).
ANSWERS = {
    **sweeps.answers(PAIRS, "modules=[adaptive_quantization_paper_e]", "e5.quantization", "paper_flops"),
    **sweeps.answers(PAIRS, "modules=[adaptive_quantization]", "e9.quantization", "paper_flops"),
    **dict.fromkeys(
        ("e5.front.stated", "e9.front.stated"), AnsweredBy(GRID.experiment, CHOSEN, of=front, note="utility of E.9 less that of the pair "
        "which the other half of the windows finds best, mean of 32 halvings; on the part that calibrates"),
    ),
}  # fmt: skip


def utilities(outcomes: Sequence[Outcome], rows: pd.DataFrame) -> pd.DataFrame:
    """`rows` (`sweeps.frame`) with what E.9 computes from the grid, empty where the uniform 8 bits have no record.

    `delta_flops`: share of the prompt's operations in the paper's ledger that go beyond those of a uniform 8 bits. `utility`:
    λ·delta_flops - ΔPPL at the paper's λ, ΔPPL that of `base_delta_ppl`.
    """
    base = sweeps.base_record(outcomes, GRID)
    saved = [
        1 - (one.record.flops("prompt_paper") or math.nan) / (base.flops("prompt_paper") or math.nan)
        if one.record is not None and base is not None and one.row.panel == GRID.experiment
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


@artefact(jobs_of(GRID, PAIRS), answers=ANSWERS)
def table_quantization_grid(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table quantization_grid: entropy thresholds five by five, with their utility (E.5, E.9), and the paper's three pairs of thresholds."""
    found = utilities(outcomes, sweeps.frame(outcomes, (GRID, PAIRS)))
    title = "Thresholds of adaptive quantization: the grid of E.9, and the paper's pairs"
    more = (Column("E.9", "ΔFLOPs %", "{delta_flops:100*+.1f}"), Column("E.9", "U", "{utility:+.2f}"))
    return sweeps.table(outcomes, name, title, (GRID, PAIRS), rows=found, more={GRID.experiment: more}, legend=legend(found))


@artefact(GRID.rows)
def figure_quantization_grid(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure quantization_grid: what each pair of entropy thresholds saves, costs and is worth (E.9)."""
    found = utilities(outcomes, sweeps.frame(outcomes, (GRID,)))
    with style():
        drawing = draw_grid(found)
    cost = [f"base_delta_ppl{end}" for end in ENDS]
    shown = found[["key", *GRID.axes(), "delta_flops", *cost, "utility", "front", "record"]]
    caption = ("ΔFLOPs is drawn in percent; in U it is a fraction.", *legend(found), *sweeps.notes(outcomes, name))
    chosen, finding = best(found), ""
    if chosen is not None:
        what = f"{100 * chosen['delta_flops']:.1f}% fewer FLOPs than 8 bits for {chosen['base_delta_ppl']:+.2f} perplexity"
        finding = f"Best utility {chosen['utility']:.2f} at τ_low {chosen[LOW]}, τ_high {chosen[HIGH]}: {what}"
    return Figure(name, "Grid of entropy thresholds for bit-widths (E.9)", shown, drawing, caption, finding=finding)


def draw_grid(rows: pd.DataFrame) -> Any:
    """Heatmaps of ΔFLOPs, ΔPPL and U over the thresholds, the best point framed, and cost over saving. Call it inside `style()`."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    drawing, plots = panels(2, 2, size=(7.2, 6.0))
    points, chosen = rows.dropna(subset=["utility"]), best(rows)
    shown = (
        ("delta_flops", "ΔFLOPs against uniform 8 bits, %", 100.0, 1),
        ("base_delta_ppl", "ΔPPL against uniform 8 bits, perplexity", 1.0, 2),
        ("utility", f"U = {LAMBDA:g}·ΔFLOPs (as a fraction) - ΔPPL", 1.0, 2),
    )
    for plot, (column, title, factor, decimals) in zip(plots.flat, shown, strict=False):
        matrix = factor * points.pivot(index=LOW, columns=HIGH, values=column)
        values = matrix.to_numpy(dtype=float)
        form, around_0 = f"{{:.{decimals}f}}".format, column != "delta_flops"
        look: dict[str, Any] = {"origin": "lower", "aspect": "auto", "around_0": around_0}
        draw.heatmap(drawing, plot, values, form, matrix.columns, matrix.index, **look)
        if chosen is not None:
            corner = matrix.columns.get_loc(chosen[HIGH]) - 0.5, matrix.index.get_loc(chosen[LOW]) - 0.5
            halo = [withStroke(linewidth=3.6, foreground="white")]
            plot.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="black", linewidth=1.6, path_effects=halo))
        plot.set(xlabel="τ_high, on entropies scaled to 0…1", ylabel="τ_low, on entropies scaled to 0…1")
        plot.set_title(title, fontsize=8)
    plane, gain, cost = plots[1][1], 100 * points["delta_flops"], points["base_delta_ppl"]
    draw.intervals(plane, gain, points, "base_delta_ppl", fmt="o", color=PALETTE[0], ecolor=GREY, elinewidth=0.6)
    front = points[sweeps.front(gain, cost)].sort_values("delta_flops")
    plane.plot(100 * front["delta_flops"], front["base_delta_ppl"], color=PALETTE[1], linestyle="--", marker="", label="front")
    if chosen is not None:
        square: dict[str, Any] = {"marker": "s", "markersize": 9, "fillstyle": "none", "linestyle": "", "color": "black"}
        plane.plot(100 * chosen["delta_flops"], chosen["base_delta_ppl"], **square, label="greatest U")
    plane.set(xlabel="ΔFLOPs against uniform 8 bits, %", ylabel="ΔPPL against uniform 8 bits, perplexity")
    plane.set_title("Cost over saving, with 95% intervals", fontsize=8)
    plane.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return drawing
