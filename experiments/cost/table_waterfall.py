"""Table waterfall: how much of what a mechanism promises arrives: operations, kernel time, wall clock, joules.

Nominal operations are what a perfect implementation would run, executed ones what ran; the policy is priced alone (everything decided,
everything executed); kernel time is that of the model's own parts; then the clock, and the energy.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import NO_VALUE, Column, Panel, Table, number, time_cell

from . import costs

HEADINGS = {
    "nominal_saved_pct": ("operations", "nominal"),
    "executed_saved_pct": ("operations", "executed"),
    "kernel_saved_pct": ("time", "kernels"),
    "wall_saved_pct": ("time", "wall clock"),
    "joules_saved_pct": ("energy", "joules"),
}


def rows() -> list[Row]:
    """Every mechanism alone, one after another, and the attention budget."""
    return costs.rows()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Percent of dense inference saved at each stage."""
    frame = costs.waterfall(outcomes)
    stages = [
        Column(group, heading, lambda row, stage=stage: costs.stage_cell(row, stage))  # type: ignore[misc]
        for stage, (group, heading) in HEADINGS.items()
    ]
    columns = (
        Column("", "technique", lambda row: (row["technique"],), align="left"),
        *stages[:2],
        Column("time", "policy costs", lambda row: time_cell(number(row, "policy_pct"), number(row, comparison.FLOOR))),
        *stages[2:],
        Column("", "realized", lambda row: (NO_VALUE if (ratio := number(row, "realization")) is None else f"{ratio:.2f}",)),
    )
    legend = (
        "Operations, time, energy: percent of dense inference that is saved, of a prompt (energy: of the prompt and the tokens "
        "after it). Nominal: the dense formula on active tokens. Executed: what ran, signals and modules included.",
        "policy costs: what deciding takes, in percent of dense time, measured with every token computed all the same.",
        "kernels: time of embedding, attention, MLP, norms and head, without what the runtime adds around them.",
        "realized: wall clock saved over executed operations saved; 1: every operation not executed is time not spent. "
        f"{NO_VALUE} where one of the two is within the noise of the clock, or no operation was saved.",
        "within: the difference is within the noise floor of the panel, which stands below it: how far dense inference is from itself (A/A), the "
        "root mean square over the runs; or within that of the row's own run, where it is larger. below resolution: idle windows differ by as "
        "much.",
        costs.energy_note(outcomes),
    )
    title = "Waterfall: from operations to joules"
    notes = (*comparison.noise_note(frame.to_dict("records"), "a prompt's time"), *provenance.notes(outcomes))
    panel = Panel(costs.PANEL, "Saved against dense inference, stage by stage", columns, notes)
    return Table(name, title, frame, (panel,), legend)
