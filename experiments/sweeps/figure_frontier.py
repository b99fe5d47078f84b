"""Figure frontier: perplexity against saved work of a prompt, by which tokens leave it, with the paper's bar.

Drawn from the records of `table_frontier`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, label_ends, panels, style, whiskers

from . import frontier

# One technique more than the palette has: a single point, in black.
COLOURS, SHAPES, LINES = (*PALETTE, "#000000"), (*MARKERS, "p"), (*DASHES, "-")
INK = (*PALETTE[:5], "#4f8a65", "#a97b12", "#000000")  # of the names: the two palest colours cannot be read as text
# What costs little is drawn apart: beside random tokens it would all be one line.
_ENDS = ["below", "above"]
_NEAR = 8.0  # % of perplexity


def rows() -> list[Row]:
    """Every technique at every value of its dial."""
    return frontier.rows()


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """All techniques on the left, those that cost little on the right."""
    frame = frontier.frame(outcomes)
    saved, cost = frontier.paper_bar()
    with style():
        drawing, plots = panels(1, 2, size=(10.5, 3.8))
        ends: tuple[list[tuple[float, float, str, str]], ...] = ([], [])
        for place, technique in enumerate(frontier.TECHNIQUES.values()):
            points = frame[frame["section"] == technique.name].dropna(subset=["delta_ppl_pct"])
            middle, gain = points["delta_ppl_pct"], points["prompt_executed_flops_saved_pct"]
            spread = points.assign(
                **dict(zip(_ENDS, whiskers(middle, points["delta_ppl_pct_low"], points["delta_ppl_pct_high"]), strict=True))
            )
            for number, plot in enumerate(plots.flat):
                near = points.index if number == 0 else points.index[middle < _NEAR]
                if near.empty:
                    continue
                x = gain[near] + 0.25 * place * number
                plot.errorbar(
                    x, middle[near], yerr=spread.loc[near, _ENDS].to_numpy().T, color=COLOURS[place], marker=SHAPES[place],
                    linestyle=LINES[place], elinewidth=0.7, capsize=1.5,
                )  # fmt: skip
                last = x.idxmax()
                ends[number].append((float(x[last]), float(middle[last]), technique.name, INK[place]))
        for plot in plots.flat:
            plot.axhline(0, color=GREY, linewidth=0.8, linestyle="-", marker="")
            plot.plot([saved], [cost], marker="*", markersize=11, color="black", linestyle="")
            plot.set_xlabel("executed FLOPs of the prompt saved, % of dense")
            plot.set_ylabel("Δ perplexity of the tokens after it, % of dense")
        plots[0, 1].annotate(
            "the paper", (saved, cost), (-7, 0), textcoords="offset points", ha="right", va="center", fontsize=6.5
        )
        plots[0, 0].set_title("All techniques")
        plots[0, 1].set_title(f"Enlarged: below +{_NEAR:g}%")
        for plot, lines in zip(plots.flat, ends, strict=True):
            label_ends(plot, lines)
    said = (
        "A share of a prompt's tokens leaves it after a fifth of the layers; the name of the line says which ones. Static depth: all tokens but the "
        f"last leave at one depth. Bars: 95% intervals, paired by window. Star: {saved:g}% saved for +{cost:.1f}%, as the paper's abstract says. "
        "In the right picture points are moved sideways a little, so that bars do not cover each other."
    )
    return Figure(name, "Work of a prompt saved against perplexity lost", frame, drawing, (said, *sweeps.notes(outcomes, name)))
