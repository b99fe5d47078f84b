"""Figure frontier: perplexity against saved work of a prompt, by which tokens leave it, with the paper's bar.

Drawn from the records of `table_frontier`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, panels, style

from . import frontier

# What costs little is drawn apart: beside random tokens it would all be one line.
_NEAR = 8.0  # % of perplexity


def rows() -> list[Row]:
    """Every technique at every value of its dial."""
    return frontier.rows()


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """All techniques on the left, those that cost little on the right."""
    frame = frontier.frame(outcomes)
    saved, cost = frontier.paper_bar()
    with style():
        drawing, plots = panels(1, 2, size=(7.4, 3.4))
        for place, technique in enumerate(frontier.TECHNIQUES.values()):
            points = frame[frame["section"] == technique.name].dropna(subset=["delta_ppl_pct"])
            middle, gain = points["delta_ppl_pct"], points["prompt_executed_flops_saved_pct"]
            spread = [middle - points["delta_ppl_pct_low"], points["delta_ppl_pct_high"] - middle]
            for number, plot in enumerate(plots.flat):
                near = points.index if number == 0 else points.index[middle < _NEAR]
                plot.errorbar(
                    gain[near] + 0.25 * place * number, middle[near], yerr=[part[near] for part in spread], label=technique.name,
                    color=PALETTE[place], marker=MARKERS[place], linestyle=DASHES[place], elinewidth=0.7, capsize=1.5,
                )  # fmt: skip
        for plot in plots.flat:
            plot.axhline(0, color=GREY, linewidth=0.8, linestyle="-", marker="")
            plot.plot([saved], [cost], marker="*", markersize=11, color="black", linestyle="", label="the paper's bar")
            plot.set_xlabel("executed FLOPs of the prompt saved, % of dense")
            plot.set_ylabel("Δ perplexity of the tokens after it, % of dense")
        plots[0, 0].set_title("All techniques")
        plots[0, 1].set_title(f"Those below +{_NEAR:g}%")
        plots[0, 0].legend()
    said = (
        "Tokens leave a prompt after a fifth of its depth, or all stop at one depth (static); bars: 95% intervals, paired by window. "
        f"Right saves more, up is worse. Star: {saved:g}% for +{cost:.1f}%, what the abstract says. On the right points are moved aside a little."
    )
    return Figure(name, "What may leave a prompt", frame, drawing, (said, *sweeps.notes(outcomes, name)))
