"""Sweeps: a Hydra multirun of conf/experiment as a panel of a table and as a picture of what is saved against what it costs.

The axes stand in the experiment's yaml alone: `quicksilver run -m experiment=NAME` makes the same records.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from quicksilver.records.record import Record
from quicksilver.records.stats import paired_records
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy, added_pct
from quicksilver.report.claims.ledger import saved_pct as paired_saved_pct
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.comparison import interval
from quicksilver.report.figure import GREY, MARKERS, PALETTE, Figure, label_points, panels, style, whiskers
from quicksilver.report.table import NO_VALUE, Cell, Column, Lines, Panel, Table, interval_cell, versus_null_cell

if TYPE_CHECKING:
    from quicksilver.runs.dials import Fit


# column of the frame -> heading in a table, label of an axis
SAVED = {
    "executed_flops_saved_pct": ("exec", "executed FLOPs saved, % of dense"),
    "nominal_flops_saved_pct": ("nominal", "nominal FLOPs saved, % of dense"),
    "paper_flops_saved_pct": ("paper", "FLOPs saved in the paper's ledger, % of dense"),
    "prompt_executed_flops_saved_pct": ("exec, prompt", "executed FLOPs of the prompt saved, % of dense"),
    "prompt_nominal_flops_saved_pct": ("nominal, prompt", "nominal FLOPs of the prompt saved, % of dense"),
    "prompt_paper_flops_saved_pct": ("paper, prompt", "FLOPs of the prompt saved in the paper's ledger, % of dense"),
    "kv_bytes_saved_pct": ("KV bytes", "resident KV bytes saved, % of dense"),
}
# What a panel shows unless it says otherwise, the nominal ledger first: on a small model what deciding costs hides the rest.
WHOLE = ("nominal_flops_saved_pct", "executed_flops_saved_pct", "paper_flops_saved_pct")
PROMPT = ("prompt_nominal_flops_saved_pct", "prompt_executed_flops_saved_pct", "kv_bytes_saved_pct")
_PLOTS_A_LINE = 4
_WIDE = 8  # costs that differ by more than this factor are drawn on a logarithmic axis
LEGEND = (
    "Saved is in percent of dense inference: nominal = the dense formula on active tokens; exec = operations of what really ran, signals "
    "and modules included; paper = Appendix J with its constants; prompt = of the prompt alone; KV bytes = resident.",
    "Δppl: perplexity minus dense perplexity on the same windows with its 95% interval; below it the same in percent.",
    "front: ● where no other row of the panel saves more, in the first column of saved, for a smaller Δppl. "
    "Point estimates are compared, not intervals.",
    "Values such as p25 are percentiles of the signal, layer by layer, on the calibrating part of the text.",
)
FRONT = Column("", "front", lambda row: ("●" if row["front"] else "",))


@dataclass(frozen=True)
class Sweep:
    """One multirun as a panel.

    Attributes:
        experiment: its name in conf/experiment; also the panel's key.
        title: what it asks.
        shown: the columns of what is saved, keys of `SAVED`; the first one spans the front and the picture.
        beside: rows outside of the sweep, printed name to further overrides.
        base: the one of them that all others are compared with as well; None: dense inference alone.
    """

    experiment: str
    title: str
    shown: tuple[str, ...] = WHOLE
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    base: str | None = None

    def rows(self) -> list[Row]:
        """The jobs of the sweep in Hydra's order, then what stands beside it."""
        from quicksilver.runs.sweep import sweep_jobs

        jobs = [(" ".join(map(_short, more)), "", (experiment, *more)) for experiment, *more in sweep_jobs(self.experiment)]
        beside = ((key, "Beside the sweep", (f"experiment={self.experiment}", *more)) for key, more in self.beside.items())
        return [Row(self.experiment, section, key, key, overrides) for key, section, overrides in (*jobs, *beside)]

    def axes(self) -> tuple[str, ...]:
        """Keys of which the jobs have more than one value."""
        jobs = [_settings(row) for row in self.rows() if not row.section]
        return tuple(key for key in jobs[0] if len({job[key] for job in jobs}) > 1)


def _settings(row: Row) -> dict[str, str]:
    """Key to value of a job's own overrides; `[halting]` as `halting`."""
    overrides = (override.partition("=") for override in row.overrides[1:])
    return {key: value.strip("[]") if key == "modules" else value for key, _, value in overrides}


def frame(outcomes: Sequence[Outcome], sweeps: Sequence[Sweep]) -> pd.DataFrame:
    """One row an outcome: what was swept, what was measured (see `against_dense`), whether it is on the panel's front."""
    rows = comparison.frame(outcomes)
    rows = rows.drop(columns=list(rows.filter(regex="null|speedup|noise|latency|reported")))
    axes = list(dict.fromkeys(key for sweep in sweeps for key in sweep.axes()))
    settings = [{} if outcome.row.section else _settings(outcome.row) for outcome in outcomes]
    for place, key in enumerate(axes, start=rows.columns.get_loc("technique") + 1):
        rows.insert(place, key, [found.get(key) for found in settings])
    for key in ("nominal", "paper"):  # `against_dense` has the executed one
        rows[f"prompt_{key}_flops_saved_pct"] = [one.record and one.record.flops_saved_pct(f"prompt_{key}") for one in outcomes]
    if any(sweep.base for sweep in sweeps):
        against: list[dict[str, float]] = []
        for one in outcomes:
            ours, base = one.record, base_record(outcomes, next(each for each in sweeps if each.experiment == one.row.panel))
            pair = (ours, base) if ours and base and ours.fingerprint != base.fingerprint else None
            against.append(interval("base_delta_ppl", paired_records(*pair)) if pair else {})
        rows = rows.join(pd.DataFrame(against, index=rows.index, columns=comparison.with_interval("base_delta_ppl"), dtype=float))
    rows["front"] = False
    for sweep in sweeps:
        mine = rows["panel"] == sweep.experiment
        rows.loc[mine, "front"] = front(rows.loc[mine, sweep.shown[0]], rows.loc[mine, "delta_ppl"])
    return rows


def base_record(outcomes: Sequence[Outcome], sweep: Sweep) -> Record | None:
    """The record that all of a sweep are compared with; None: there is none."""
    return next((one.record for one in outcomes if (one.row.panel, one.row.key) == (sweep.experiment, sweep.base)), None)


def front(gain: pd.Series, loss: pd.Series) -> pd.Series:
    """Which rows no other one beats: at least as much gain for at most the loss, one of them strictly. Rows without numbers are not."""
    points = pd.DataFrame({"gain": gain, "loss": loss}).dropna().astype(float)
    best = pd.Series(False, index=gain.index)
    for index, (most, least) in zip(points.index, points.to_numpy(), strict=True):
        as_good = points[(points["gain"] >= most) & (points["loss"] <= least)]
        best[index] = not ((as_good["gain"] > most) | (as_good["loss"] < least)).any()
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
    panels = [panel(sweep, outcomes, (*columns(sweep), *(more or {}).get(sweep.experiment, ()))) for sweep in sweeps]
    return Table(name, title, rows, tuple(panels), (*legend, *LEGEND, *comparison.marks(rows)))


def panel(sweep: Sweep, outcomes: Sequence[Outcome], columns: Sequence[Column], title: str | None = None) -> Panel:
    """A sweep with these columns; below it the command that makes its records, and how they were made."""
    notes = provenance.notes([outcome for outcome in outcomes if outcome.row.panel == sweep.experiment])
    made_by = f"Made by: quicksilver run -m experiment={sweep.experiment}"
    return Panel(sweep.experiment, title or sweep.title, tuple(columns), (made_by, *notes))


def columns(sweep: Sweep) -> tuple[Column, ...]:
    """The printed columns of a panel: what was swept, quality, what was saved, the front."""
    axes = sweep.axes()
    swept = [Column("", _short(key), _setting(key, first=key == axes[0]), align="left") for key in axes]
    return (*swept, *measured_columns(sweep), FRONT)


def measured_columns(sweep: Sweep) -> tuple[Column, ...]:
    """Quality, and what was saved."""
    saved = [Column("saved %", SAVED[key][0], f"{{{key}:+.1f}}", expendable=rank) for rank, key in enumerate(sweep.shown)]
    base = [Column(f"against {sweep.base}", "Δppl", lambda row: interval_cell(row, "base_delta_ppl"))] if sweep.base else []
    return (
        Column("perplexity", "ppl", "{ppl:.2f}", expendable=9),
        Column("perplexity", "Δppl", lambda row: interval_cell(row, "delta_ppl")),
        *base,
        *saved,
    )


def _short(override: str) -> str:
    """`halting.tau_drift=p40` without its groups; a key alone as well."""
    key, equals, value = override.partition("=")
    return f"{key.rpartition('.')[2]}{equals}{value}"


def _setting(key: str, *, first: bool) -> Cell:
    """The value of one axis; a row beside the sweep has its name instead, and a row without a record the reason below."""

    def cell(row: Mapping[str, Any]) -> Lines:
        value = row[key] if isinstance(row[key], str) else row["technique"] if first else NO_VALUE
        if first and row["lookahead"] is True:
            value += " †"
        reason = textwrap.wrap(row["status"], 20) if first and row["status"] != comparison.MEASURED else []
        return (value, *reason)

    return cell


def answers(sweep: Sweep, key: str, claim: str, flops: str | None = None) -> dict[str, AnsweredBy]:
    """What answers a claim about the row `key` against the sweep's base, for a file's ANSWERS: perplexity added, and, of the column
    `flops`, operations saved."""

    def between(compare: Callable[[Record, Record], Estimate]) -> AnsweredBy:
        def estimate(outcomes: Mapping[str, Outcome]) -> Estimate | None:
            ours, base = outcomes[key].record, outcomes[sweep.base or ""].record
            return None if ours is None or base is None else compare(ours, base)

        return AnsweredBy(sweep.experiment, key, of=estimate, note=f"against {sweep.base}", against=sweep.base or "")

    saved = {} if flops is None else {f"{claim}.flops_saved_pct": between(lambda ours, base: paired_saved_pct(ours, base, flops))}
    return {f"{claim}.delta_ppl": between(added_pct), **saved}


def figure(outcomes: Sequence[Outcome], name: str, title: str, sweeps: Sequence[Sweep]) -> Figure:
    """What is saved against what it costs, one plot a sweep, with intervals; the front is joined by a line."""
    rows = frame(outcomes, sweeps)
    with style():
        lines = math.ceil(len(sweeps) / _PLOTS_A_LINE)
        drawing, plots = panels(lines, _PLOTS_A_LINE, size=(2.9 * _PLOTS_A_LINE, 2.7 * lines))
        for plot in plots.flat[len(sweeps) :]:
            plot.remove()
        placed = [(plot, sweep, rows[rows["panel"] == sweep.experiment]) for plot, sweep in zip(plots.flat, sweeps, strict=False)]
        label_points(drawing, {plot: draw_front(plot, mine, sweep) for plot, sweep, mine in placed})
    said = (
        "Each picture varies the options in its title; a point is one run, its label the value of the last of them. Up: perplexity added, with "
        "95% intervals paired by window; right: what is saved. Broken line: the front, the runs that no other beats in both."
    )
    drawn = ["panel", "section", "key", *(key for sweep in sweeps for key in sweep.axes()), *(sweep.shown[0] for sweep in sweeps)]
    costs = [name for name in rows if re.fullmatch(r"(base_)?delta_ppl_pct(_low|_high)?", name)]
    wanted = [*dict.fromkeys(drawn), *costs, "front", "record"]
    lows = rows.loc[rows["section"].eq(""), sorted(one for one in costs if one.endswith("_low"))]
    low = lows.bfill(axis=1).iloc[:, 0].dropna()  # against the base where there is one
    finding = f"In {int((low > 0).sum())} of {len(low)} settings the 95% interval of the cost lies above 0"
    return Figure(name, title, rows[wanted], drawing, (said, *notes(outcomes, name)), finding=finding if len(low) else "")


def notes(outcomes: Sequence[Outcome], name: str) -> tuple[str, ...]:
    """How the points of a picture were measured; its records stand in the file with its data, a caption has no room for them."""
    *lines, _ = provenance.notes(outcomes)
    return (*lines, f"Records: {sum(outcome.record is not None for outcome in outcomes)}, named in {name}.csv.")


def draw_front(plot: Any, rows: pd.DataFrame, sweep: Sweep) -> list[tuple[float, float, str]]:
    """One sweep into `plot` (matplotlib axes): a series for each value of the first of two axes, labelled by the other; the front as a
    line. Against the sweep's base where it has one. Returns x, y and text of the labels, for `label_points`."""
    gain, cost = sweep.shown[0], "base_delta_ppl_pct" if sweep.base else "delta_ppl_pct"
    *outer, inner = sweep.axes()
    swept = rows[rows["section"].eq("")].dropna(subset=[gain, cost]).sort_values(gain, kind="stable")
    series = list(swept.groupby(outer[0], sort=False)) if outer else [("", swept)]
    for place, (value, points) in enumerate(sorted(series, key=lambda one: str(one[0]))):
        spread = whiskers(points[cost], points[f"{cost}_low"], points[f"{cost}_high"])
        look = {"fmt": MARKERS[place], "color": PALETTE[place], "ecolor": GREY, "elinewidth": 0.7, "capsize": 1.5}
        plot.errorbar(points[gain], points[cost], yerr=spread, label=f"{_short(outer[0])}={value}" if outer else None, **look)
    best = swept[swept["front"]]
    plot.plot(best[gain], best[cost], color=PALETTE[1], linestyle="--", marker="", linewidth=1)
    if swept[f"{cost}_low"].min() > 0 and swept[cost].max() > _WIDE * swept[cost].min():
        plot.set_yscale("log")
        from matplotlib.ticker import LogLocator, NullFormatter

        plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plot.yaxis.set_major_formatter("{x:g}")
        plot.yaxis.set_minor_formatter(NullFormatter())
    plot.set_title("\n".join(textwrap.wrap(sweep.title, 40)))
    plot.set_xlabel(SAVED[gain][1])
    plot.set_ylabel(f"Δ perplexity, % of {sweep.base or 'dense'}")
    plot.margins(x=0.15, y=0.12)
    if outer and not swept.empty:
        plot.legend(framealpha=0.6)
    values = swept[inner].astype(str).str.strip("[]").str.replace(",", " to ")
    return list(zip(swept[gain].astype(float), swept[cost].astype(float), values, strict=True))


# --- budgets -------------------------------------------------------------------------------------------------------------------
BUDGET_LEGEND = (
    "asked, reached: percent of dense FLOPs saved, or of perplexity added. The dial was set on calibration data alone "
    "and did not change afterwards. Thresholds given as percentiles keep the numbers that they had on that text.",
    "KL × 100: from the dense model's next-token distribution to the run's, in hundredths of a nat a token. Δ: of perplexity on the same "
    "windows, with its 95% interval. null: the same counts, on random tokens. vs random: perplexity against it, "
    "paired by window. It is better or worse where the interval excludes 0 and the p value, adjusted over all rows, is at most 5%; else same.",
    "kept: whether the budget holds; `inconclusive` where the interval of a cost contains the limit.",
)


def budget_table(fits: Sequence[tuple[Fit, Mapping[str, tuple[Record, Record]]]], name: str) -> Table:
    """A panel a budget: what `comparison.frame` has of every record of the frozen dial, and what was asked and reached. A fit's records are of
    what it was used on after the search: `test`, or another text by name. Each stands beside its dense one."""
    outcomes, asked, panels = [], [], []
    for fit, later in fits:
        dial, budget = fit.dial, fit.budget
        key, setting = f"{dial.name} {budget.slug}", dial.said(fit.chosen.value)
        members = []
        for text, (record, dense) in {"calibrating": (fit.chosen.record, fit.chosen.dense), **later}.items():
            members.append(Outcome(Row(key, "", text, text, dial.at(fit.chosen.value)), record, dense))
            reached = budget.reached(record, dense)
            kept = "yes" if budget.met(reached) else "no"
            if budget.kind == "cost":
                paired = paired_records(record, dense)
                if paired.relative_pct_low <= budget.pct < paired.relative_pct_high:
                    kept = "no" if budget.sure else "inconclusive"
            asked.append(dict(budget=str(budget), dial=setting, asked_pct=budget.pct, reached_pct=reached, kept=kept))
        tried = f"{len(fit.steps)} positions of the dial tried on the calibrating text."
        panels.append(Panel(key, f"To {budget}, by {dial.name}", BUDGET_COLUMNS, (tried, *provenance.notes(members))))
        outcomes += members
    rows = comparison.frame(outcomes)
    for place, (column, found) in enumerate(pd.DataFrame(asked).items(), start=4):
        rows.insert(place, str(column), found)
    rows["prompt_nominal_flops_saved_pct"] = [one.record and one.record.flops_saved_pct("prompt_nominal") for one in outcomes]
    title = "Budgets: set on the calibrating text, used on others"
    return Table(name, title, rows, tuple(panels), (*BUDGET_LEGEND, *comparison.marks(rows)))


def _in_percent(name: str) -> Cell:
    return lambda row: interval_cell(row, name)[1:] or (NO_VALUE,)


BUDGET_COLUMNS = (
    Column("", "text", "{technique}", align="left"),
    Column("", "setting", lambda row: tuple(re.split(r", (?=\w+=)", str(row["dial"]))), align="left"),
    Column("budget, %", "asked", "{asked_pct:g}"),
    Column("budget, %", "reached", "{reached_pct:+.2f}"),
    Column("budget, %", "kept", "{kept}"),
    Column("saved, % of dense FLOPs", "exec", "{executed_flops_saved_pct:+.1f}"),
    Column("saved, % of dense FLOPs", "prompt", "{prompt_executed_flops_saved_pct:+.1f}", expendable=2),
    Column("saved, % of dense FLOPs", "paper", "{paper_flops_saved_pct:+.1f}", expendable=3),
    Column("", "KL × 100", "{kl_nats:100*.2f}"),
    Column("perplexity against dense", "Δ, %", _in_percent("delta_ppl")),
    Column("perplexity against dense", "Δ of null, %", _in_percent("null_delta_ppl"), expendable=4),
    Column("perplexity against dense", "vs random", versus_null_cell, expendable=1),
)
