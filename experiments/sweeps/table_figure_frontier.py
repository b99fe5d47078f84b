"""Table and figure frontier: which tokens may leave a prompt, how much of its work that saves, and what it costs the tokens after it.

It answers the abstract's "39.6% fewer FLOPs with near-zero perplexity loss (≤ 0.2)", which is +1.1% of its perplexity: which technique comes
nearest at that budget, and where the frontier lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from quicksilver.report import comparison, provenance, sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.reported import reported
from quicksilver.report.sweeps import front
from quicksilver.report.table import Column, Panel, Table, interval_cell, kl_cell, number, signed

if TYPE_CHECKING:  # a table needs no matplotlib
    from quicksilver.report.figure import Figure

PANEL = "frontier"
SHARES = (0.23, 0.34, 0.453, 0.566)  # of the prompt's tokens that leave after a fifth of the depth
# Without looking: all tokens of the prompt but its last stop at that depth.
DEPTHS = (0.8, 0.7, 0.6, 0.5)
THRESHOLDS = (0.5,)  # of trained gates, whose budget is 40% at ½


@dataclass(frozen=True)
class Technique:
    """One line of the frontier.

    Attributes:
        name: what is printed.
        overrides: of a value of the dial.
        dial: its values.
    """

    name: str
    overrides: Callable[[float], tuple[str, ...]]
    dial: tuple[float, ...] = SHARES


def _halting(*more: str) -> Callable[[float], tuple[str, ...]]:
    return lambda share: ("modules=[halting_attention]", *more, f"modules.halting.halted_share={share}")


def _static(depth: float) -> tuple[str, ...]:
    where = "modules.static_depth"
    return ("modules=[static_depth]", f"{where}.depth={depth}", f"{where}.protect_last=1", f"{where}.missing_kv=drop")


def _truncated(share: float) -> tuple[str, ...]:
    return ("modules=[prompt_truncation]", f"modules.prompt_truncation.keep={share}")


def _predicted(pct: float) -> tuple[str, ...]:
    return ("modules=[quicksilver]", f"modules.quicksilver.save={pct / 100:g}")


def _learned(threshold: float) -> tuple[str, ...]:
    return ("modules=[learned_halting]", f"modules.learned_halting.threshold={threshold:g}")


TECHNIQUES = {
    "predicted": Technique("Dropped, then predicted (budget)", _predicted, (40, 50)),
    "learned": Technique("Learned (p below)", _learned, THRESHOLDS),
    "fused": Technique(
        "Fusion of the least attended",
        lambda share: ("modules=[token_fusion_attention]", f"modules.token_fusion.fused_share={share}"),
    ),
    "position": Technique("Halting, oldest", _halting("modules.halting.signal=position")),
    "attention": Technique("Halting, least attended", _halting()),
    "drift": Technique("Halting, least drift (paper)", _halting("modules.halting.signal=drift")),
    "random": Technique("Halting, random", _halting("modules.halting.signal=random")),
    "truncated": Technique("Truncation, newest kept", _truncated, DEPTHS),
    "static": Technique("Static depth", _static, DEPTHS),
}


def paper_bar() -> tuple[float, float]:
    """What the abstract says, in percent: FLOPs saved, and perplexity lost of that of Table 3's baseline."""
    joint = reported()["abstract.joint"]
    _, most = joint.bounds["delta_ppl"]
    assert most is not None  # "≤ 0.2"
    return joint.values["flops_saved_pct"], 100 * most / reported()["table3.baseline"].values["ppl"]


def rows() -> list[Row]:
    """A row a technique and value of its dial."""
    always = ("protocol=continuation", "measure=sweep", "dataset.windows=64")
    return [
        Row(PANEL, technique.name, f"{key}.{value:g}", f"{value:g}", (*always, *technique.overrides(value)))
        for key, technique in TECHNIQUES.items()
        for value in technique.dial
    ]


def measured(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """`comparison.frame`; `front`: no row saves as much or more of the prompt's work for a smaller Δ perplexity."""
    rows = comparison.frame(outcomes)
    rows["front"] = front(rows["prompt_executed_flops_saved_pct"], rows["delta_ppl"])
    return rows


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A section a technique."""
    frame = measured(outcomes)
    columns = (
        Column("", "share or depth", lambda row: (row["technique"],), align="left"),
        Column("saved %", "exec, prompt", lambda row: (signed(number(row, "prompt_executed_flops_saved_pct")),)),
        Column("saved %", "KV bytes", lambda row: (signed(number(row, "kv_bytes_saved_pct")),), expendable=1),
        Column("perplexity", "Δppl", lambda row: interval_cell(row, "delta_ppl")),
        Column("", "KL × 100", kl_cell, expendable=2),
        Column("", "front", lambda row: ("●" if row["front"] else "",)),
    )
    saved, cost = paper_bar()
    legend = (
        "share: of the prompt's tokens that leave after a fifth of the depth. Static depth: the depth after which all tokens "
        "but the last leave. p below: the threshold under which gates that were trained for 40% let a token leave.",
        "saved: executed operations of the prompt, signals included, and resident KV bytes, in percent of dense inference.",
        "Δppl: perplexity of the tokens after the prompt minus dense, with its 95% interval; below it the same in percent.",
        "KL × 100: of the dense model's next-token distribution to the run's, hundredths of a nat a token, with its 95% interval.",
        "front: ● where no other row saves as much or more for a smaller Δppl. Point estimates are compared, not intervals.",
        f"The paper's reported point is {saved:g}% of FLOPs, by its own formula, for at most {cost:.1f}% of perplexity (abstract: ≤ 0.2 at 18.2).",
    )
    panel = Panel(PANEL, "Protocol continuation: tokens leave inside the prompt only", columns, provenance.notes(outcomes))
    return Table(name, "What may leave a prompt: saved against lost", frame, (panel,), legend)


# What costs little is drawn apart: beside random tokens it would all be one line.
_ENDS = ["below", "above"]
_NEAR = 8.0  # % of perplexity


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """All techniques on the left, those that cost little on the right."""
    from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, label_ends, panels, style, whiskers

    # Two techniques more than the palette has: in grey and in black.
    colours, shapes, dashes = (*PALETTE, GREY, "#000000"), (*MARKERS, "h", "p"), (*DASHES, "--", "-")
    ink = (*PALETTE[:5], "#4f8a65", "#a97b12", "#6a6a6a", "#000000")  # of names: pale colours cannot be read
    frame = measured(outcomes)
    saved, cost = paper_bar()
    with style():
        drawing, plots = panels(1, 2, size=(10.5, 3.8))
        ends: tuple[list[tuple[float, float, str, str]], ...] = ([], [])
        for place, technique in enumerate(TECHNIQUES.values()):
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
                    x, middle[near], yerr=spread.loc[near, _ENDS].to_numpy().T, color=colours[place], marker=shapes[place],
                    linestyle=dashes[place], elinewidth=0.7, capsize=1.5,
                )  # fmt: skip
                last = x.idxmax()
                ends[number].append((float(x[last]), float(middle[last]), technique.name, ink[place]))
        for plot in plots.flat:
            plot.axhline(0, color=GREY, linewidth=0.8, linestyle="-", marker="")
            plot.axhspan(0, cost, color="0.5", alpha=0.25, linewidth=0)
            plot.set_xlabel("executed FLOPs of the prompt saved, % of dense")
            plot.set_ylabel("Δ perplexity of the tokens after it, % of dense")
        plots[0, 0].set_title("All techniques")
        plots[0, 1].set_title(f"Enlarged: below +{_NEAR:g}%")
        for plot, lines in zip(plots.flat, ends, strict=True):
            label_ends(plot, lines)
    said = (
        "A share of a prompt's tokens leaves it after a fifth of the layers; the name of the line says which ones. Static depth: all tokens but the "
        f"last leave at one depth. Bars: 95% intervals, paired by window. Grey band: the loss of the paper's abstract, up "
        f"to +{cost:.1f}%; its {saved:g}% of FLOPs are counted by another formula, of another model, and have no place on this axis. "
        "In the right picture points are moved sideways a little, so that bars do not cover each other."
    )
    return Figure(name, "Work of a prompt saved against perplexity lost", frame, drawing, (said, *sweeps.notes(outcomes, name)))
