"""Sweeps: a Hydra multirun of conf/experiment as a panel of a table and as a picture of what is saved against what it costs.

The axes stand in the experiment's yaml alone: `python -m quicksilver.run -m experiment=NAME` makes the same records.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from quicksilver.report import ablation, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.effects import NO_VALUE, interval_cell, number, signed
from quicksilver.report.tables import Column, Lines, Panel, Table

if TYPE_CHECKING:
    from quicksilver.report.figures import Figure

LEDGERS = {
    "executed_flops_saved_pct": "exec",
    "prompt_executed_flops_saved_pct": "prompt",
    "nominal_flops_saved_pct": "nominal",
    "paper_flops_saved_pct": "paper",
    "prompt_paper_flops_saved_pct": "paper, prompt",
    "kv_bytes_saved_pct": "KV bytes",
}
LONG = {
    "exec": "executed FLOPs saved, % of dense",
    "prompt": "executed FLOPs of the prompt saved, % of dense",
    "nominal": "nominal FLOPs saved, % of dense",
    "paper": "FLOPs saved in the paper's ledger, % of dense",
    "paper, prompt": "FLOPs of the prompt saved in the paper's ledger, % of dense",
    "KV bytes": "resident KV bytes saved, % of dense",
}
LEGEND = (
    "Saved is in percent of dense inference: exec = operations of what really ran, signals and modules included; prompt = exec, of "
    "the prompt alone; nominal = the dense formula on active tokens; paper = Appendix J with its constants; KV bytes = resident.",
    "Δppl: perplexity minus dense perplexity on the same windows with its 95% interval; below it the same in percent.",
    "front: ● where no other row of the panel saves as much or more for a smaller Δppl, point against point.",
    "Values such as p25 are percentiles of the signal, layer by layer, on the calibrating part of the text.",
)


@dataclass(frozen=True)
class Sweep:
    """One multirun as a panel.

    Attributes:
        experiment: its name in conf/experiment; also the panel's key.
        title: what it asks.
        shown: the columns of what is saved, keys of `LEDGERS`; the first one spans the front and the picture.
        beside: rows outside of the sweep, printed name to further words of the command line.
    """

    experiment: str
    title: str
    shown: tuple[str, ...] = ("executed_flops_saved_pct", "nominal_flops_saved_pct", "paper_flops_saved_pct")
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """The jobs of the sweep in Hydra's order, then what stands beside it."""
        from quicksilver.harness.config import sweep_jobs

        rows = []
        for experiment, *words in sweep_jobs(self.experiment):
            technique = ", ".join(word.rpartition(".")[2] for word in words)
            rows.append(Row(self.experiment, "", technique, technique, (experiment, *words)))
        for technique, words in self.beside.items():
            rows.append(Row(self.experiment, "Beside the sweep", technique, technique, (f"experiment={self.experiment}", *words)))
        return rows

    def axes(self) -> tuple[str, ...]:
        """Keys of which the jobs have more than one value."""
        jobs = [_settings(row) for row in self.rows() if not row.section]
        return tuple(key for key in jobs[0] if len({job[key] for job in jobs}) > 1)


def _settings(row: Row) -> dict[str, str]:
    """Key to value of a job's own words."""
    return dict(word.split("=", 1) for word in row.overrides[1:])


def frame(outcomes: Sequence[Outcome], sweeps: Sequence[Sweep]) -> pd.DataFrame:
    """One row an outcome: what was swept, what was measured (see `effects`), whether it is on the panel's front."""
    rows = ablation.frame(outcomes)
    rows = rows.drop(
        columns=[name for name in rows if any(part in name for part in ("null", "speedup", "noise", "latency", "reported"))]
    )
    axes = list(dict.fromkeys(key for sweep in sweeps for key in sweep.axes()))
    settings = [{} if outcome.row.section else _settings(outcome.row) for outcome in outcomes]
    for place, key in enumerate(axes, start=rows.columns.get_loc("technique") + 1):
        rows.insert(place, key, [found.get(key) for found in settings])
    rows["prompt_paper_flops_saved_pct"] = [_prompt_paper(outcome) for outcome in outcomes]
    rows["front"] = False
    for sweep in sweeps:
        mine = rows["panel"] == sweep.experiment
        rows.loc[mine, "front"] = front(rows.loc[mine, sweep.shown[0]], rows.loc[mine, "delta_ppl"])
    return rows


def _prompt_paper(outcome: Outcome) -> float | None:
    record = outcome.record
    if record is None or not record.get("dense_prompt_paper_flops"):
        return None
    return 100 * (1 - record["prompt_paper_flops"] / record["dense_prompt_paper_flops"])


def front(gain: pd.Series, loss: pd.Series) -> pd.Series:
    """Which rows no other one beats: at least as much gain for at most the loss, one of them strictly. Rows without numbers are not."""
    points = pd.DataFrame({"gain": gain, "loss": loss}).dropna().astype(float)
    best = pd.Series(False, index=gain.index)
    for index, point in points.iterrows():
        as_good = (points["gain"] >= point["gain"]) & (points["loss"] <= point["loss"])
        better = as_good & ((points["gain"] > point["gain"]) | (points["loss"] < point["loss"]))
        best[index] = not better.any()
    return best


def table(
    outcomes: Sequence[Outcome],
    name: str,
    title: str,
    sweeps: Sequence[Sweep],
    *,
    rows: pd.DataFrame | None = None,
    more: Mapping[str, Sequence[Column]] | None = None,
    legend: Sequence[str] = (),
) -> Table:
    """A panel a sweep.

    Args:
        rows: `frame(outcomes, sweeps)` with further columns; None: that frame.
        more: further printed columns by experiment.
        legend: sentences before those that every sweep has.
    """
    rows = frame(outcomes, sweeps) if rows is None else rows
    panels = []
    for sweep in sweeps:
        notes = provenance.notes([outcome for outcome in outcomes if outcome.row.panel == sweep.experiment])
        command = f"Made by: python -m quicksilver.run -m experiment={sweep.experiment}"
        panels.append(
            Panel(sweep.experiment, sweep.title, (*columns(sweep), *(more or {}).get(sweep.experiment, ())), (command, *notes))
        )
    marks = (ablation.LOOKAHEAD,) if rows["lookahead"].eq(True).any() else ()
    return Table(name, title, rows, tuple(panels), (*legend, *LEGEND, *marks))


def columns(sweep: Sweep) -> tuple[Column, ...]:
    """The printed columns of a panel: what was swept, quality, what was saved, the front."""
    axes = sweep.axes()
    swept = [Column("", _short(key), _setting(key, first=key == axes[0]), align="left") for key in axes]
    saved = [Column("saved %", LEDGERS[key], _saved(key), expendable=number) for number, key in enumerate(sweep.shown)]
    return (
        *swept,
        Column("perplexity", "ppl", lambda row: (_number(number(row, "ppl"), 2),), expendable=9),
        Column("perplexity", "Δppl", lambda row: interval_cell(row, "delta_ppl")),
        *saved,
        Column("", "front", lambda row: ("●" if row["front"] else "",)),
    )


def _short(key: str) -> str:
    return key.rpartition(".")[2]


def _number(value: float | None, decimals: int) -> str:
    return NO_VALUE if value is None else f"{value:.{decimals}f}"


def _saved(key: str) -> Callable[[Mapping[str, Any]], Lines]:
    return lambda row: (signed(number(row, key)),)


def _setting(key: str, *, first: bool) -> Callable[[Mapping[str, Any]], Lines]:
    """The value of one axis; a row beside the sweep has its name instead, and a row without a record the reason below."""

    def cell(row: Mapping[str, Any]) -> Lines:
        value = row[key] if isinstance(row[key], str) else row["technique"] if first else NO_VALUE
        if first and row["lookahead"] is True:
            value += " †"
        reason = textwrap.wrap(row["status"], 20) if first and row["status"] != ablation.MEASURED else []
        return (value, *reason)

    return cell


def figure(outcomes: Sequence[Outcome], name: str, title: str, sweeps: Sequence[Sweep]) -> Figure:
    """What is saved against what it costs, one plot a sweep, with intervals; the front is joined by a line."""
    from quicksilver.report.figures import Figure, panels, style

    rows = frame(outcomes, sweeps)
    with style():
        drawing, plots = panels(1, len(sweeps), size=(3.6 * len(sweeps) + 0.4, 3.2))
        for plot, sweep in zip(plots[0], sweeps, strict=True):
            draw_front(plot, rows[rows["panel"] == sweep.experiment], sweep)
    caption = (
        "Perplexity against dense over what is saved; bars: 95% intervals, paired by window. Line: the front. Up is worse, right saves more.",
        *provenance.notes(outcomes),
    )
    drawn = ["panel", "section", "key", *(key for sweep in sweeps for key in sweep.axes()), *(sweep.shown[0] for sweep in sweeps)]
    wanted = [*dict.fromkeys(drawn), "delta_ppl_pct", "delta_ppl_pct_low", "delta_ppl_pct_high", "front", "record"]
    return Figure(name, title, rows[wanted], drawing, caption)


def draw_front(plot: Any, rows: pd.DataFrame, sweep: Sweep) -> None:
    """One sweep into `plot` (matplotlib axes): points labelled by their settings, rows beside the sweep as squares, the front as a line."""
    from quicksilver.report.figures import GREY, PALETTE

    gain = sweep.shown[0]
    measured = rows.dropna(subset=[gain, "delta_ppl_pct"])
    for beside, marker, colour in ((False, "o", PALETTE[0]), (True, "s", PALETTE[3])):
        points = measured[measured["section"].ne("") == beside]
        if points.empty:
            continue
        middle = points["delta_ppl_pct"]
        spread = [middle - points["delta_ppl_pct_low"], points["delta_ppl_pct_high"] - middle]
        plot.errorbar(points[gain], middle, yerr=spread, fmt=marker, color=colour, ecolor=GREY, elinewidth=0.7, capsize=1.5)
        for _, point in points.iterrows():
            label = point["technique"] if beside else ", ".join(str(point[key]) for key in sweep.axes())
            place = (point[gain], point["delta_ppl_pct"])
            plot.annotate(label, place, xytext=(3, 3), textcoords="offset points", fontsize=5.5)
    best = measured[measured["front"]].sort_values(gain)
    plot.plot(best[gain], best["delta_ppl_pct"], color=PALETTE[1], linestyle="--", marker="", linewidth=1)
    plot.set_title(sweep.title if len(sweep.title) < 44 else "\n".join(textwrap.wrap(sweep.title, 44)))
    plot.set_xlabel(LONG[LEDGERS[gain]])
    plot.set_ylabel("Δ perplexity, % of dense")
    plot.margins(x=0.18, y=0.12)
