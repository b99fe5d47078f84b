"""Figure 16: cumulative speedup with energy and emissions per token.

Speed and energy are of the same batch. The method by which joules were had stands at every number; where there is no counter they are an
estimate that follows the clock, and answer no claim.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from quicksilver.measure.latency import LatencyResult
from quicksilver.records.record import Record
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, HATCHES, PALETTE, Figure, panels, style, whiskers
from quicksilver.report.table import number, numbers
from quicksilver.runtime.errors import ConfigError

from . import costs

# row -> what F.2 says of it: (entry of the speedup, entry of the emissions); the full stack is the last step here
STEPS = {
    costs.DENSE: (None, None),
    "cumulative.halting": ("f2.halting", "f2.halting"),
    "cumulative.kv_skipping": (None, "f2.kv_skipping"),
    "cumulative.fusion": (None, "f2.fusion"),
    "cumulative.quantization": ("f2.joint", "f2.joint"),
}
_DENSE_G = reported()["f2.halting"].values["dense_g_per_token"]
STATED = {
    key: ({} if speed is None else {"reported_speedup_pct": reported()[speed].values["speedup_pct"]})
    | ({} if grams is None else {"reported_emissions_pct": 100 * reported()[grams].values["emissions_g_per_token"] / _DENSE_G})
    for key, (speed, grams) in STEPS.items()
}
ENERGY = ("net_j_per_token", "gross_j_per_token", "net_gco2_per_token", "resolution_j_per_token")
COLUMNS = [
    *("key", "technique", "status", "method", *ENERGY, "energy_pct", "record", "reported_speedup_pct", "reported_emissions_pct"),
    *("speedup_pct", "speedup_pct_low", "speedup_pct_high", comparison.FLOOR, "energy_resolution_pct", comparison.POOLED),
]
rows = partial(costs.rows, *STEPS)
_DIAMOND: dict[str, Any] = {"marker": "D", "color": "white", "markeredgecolor": PALETTE[1], "linestyle": ""}  # the paper's number
_BAR: dict[str, Any] = {"width": 0.55, "edgecolor": "black", "linewidth": 0.5, "error_kw": {"elinewidth": 0.8, "capsize": 2}}


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Speedup on the left, energy per token in percent of dense on the right, the paper's numbers beside both."""
    frame = drawn(outcomes)
    members = frame.to_dict("records")
    with style():
        drawing, axes = panels(1, 2, size=(8.6, 3.6))
        _speed(axes[0, 0], members)
        _energy(axes[0, 1], members)
        for plot in axes.flat:
            plot.set_xticks(range(len(members)), [textwrap.fill(row["technique"], 10, break_long_words=False) for row in members])
            plot.set_xlim(-0.6, len(members) - 0.4)
            plot.grid(axis="x", visible=False)
    caption = (
        "Each step has one mechanism more. Left: decrease of the wall clock of a batch against dense inference, which takes turns with it; whiskers: "
        "quartiles; grey band: noise floor (A/A, pooled), within which nothing is a speedup. Right: net joules per token in percent of dense ones of the same "
        "run, with joules, grams of CO₂ and the method at each; no bar: below the resolution.",
        costs.energy_note(outcomes),
        *comparison.noise_note(members, "a batch's time"),
        "The paper: F.2, grams per token of GPT-2 774M on an A100, in percent of its dense 0.51 g.",
        *provenance.notes(outcomes),
    )
    return Figure(name, "Figure 16: speedup and emissions, one mechanism after another", frame, drawing, caption)


def drawn(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """A row a step."""
    found = costs.measured(outcomes, _costs)
    for row in found:
        row |= STATED[row["key"]]
    return pd.DataFrame(found, columns=COLUMNS)


def _costs(record: Record) -> dict[str, Any]:
    energy = costs.energy(record)
    ours = energy.ours
    row: dict[str, Any] = {"method": costs.method(record)}
    row |= {name: getattr(ours, name) for name in ENERGY}
    if record.dense_fingerprint is None or record.simulated:
        return row if isinstance(energy.dense.net_j_per_token, str) else row | {"energy_pct": 100.0}
    latency = record.measured("latency", LatencyResult)
    row |= comparison.time_saved("speedup_pct", latency.latency_ratio) | {comparison.FLOOR: latency.noise_floor_pct}
    if (saved := costs.joules_saved(record)) is not None:
        row |= {"energy_pct": 100 - saved[0], "energy_resolution_pct": saved[1]}
    return row


def _speed(plot: Axes, members: Sequence[Mapping[str, Any]]) -> None:
    for place, row in enumerate(members):
        (value, low, high), floor = numbers(row, "speedup_pct"), number(row, comparison.FLOOR)
        if value is not None and low is not None and high is not None and floor is not None:
            within = abs(value) <= floor
            plot.fill_between([place - 0.42, place + 0.42], -floor, floor, color="#e4e4e4", linewidth=0, zorder=0)
            look: dict[str, Any] = {"color": "white", "hatch": HATCHES[1]} if within else {"color": PALETTE[2]}
            plot.bar(place, value, yerr=whiskers(value, low, high), label="_", **look, **_BAR)
            below = value < 0 and not within
            look = {"textcoords": "offset points", "ha": "center", "va": "top" if below else "bottom", "size": 7}
            end = low if below else max(high, 0)
            plot.annotate("≈ 0\n(noise)" if within else f"{value:+.1f}", (place, end), (0, -4 if below else 4), **look)
        _beside(plot, place, row, "reported_speedup_pct")
    plot.axhline(0, color=GREY, linewidth=0.8, linestyle="-", marker="")
    plot.plot([], [], label="the paper", **_DIAMOND)
    plot.set(ylabel="time gone, % of dense", title="Speed")
    plot.margins(y=0.18)
    plot.legend()


def _energy(plot: Axes, members: Sequence[Mapping[str, Any]]) -> None:
    at: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "size": 6.5}
    for place, row in enumerate(members):
        value, around = number(row, "energy_pct"), number(row, "energy_resolution_pct") or 0.0
        if value is not None:
            plot.bar(place, value, color=PALETTE[4], yerr=around or None, **_BAR)
            said = f"{joules(row['net_j_per_token'])}\n{row['net_gco2_per_token'] * 1e6:.3g} µg\n{row['method']}"
            plot.annotate(said, (place, value + around), (0, 3), **at)
        elif isinstance(row.get("method"), str):
            plot.annotate(f"{costs.BELOW}\n{row['method']}", (place, 0), (0, 4), **at)
        _beside(plot, place, row, "reported_emissions_pct")
    plot.plot([], [], label="the paper, emissions", **_DIAMOND)
    plot.axhline(100, color=GREY, linewidth=0.8, linestyle="-", marker="")
    plot.set(ylabel="net energy per token, % of dense", title="Energy and emissions per token")
    plot.margins(y=0.28)
    plot.set_ylim(bottom=0)
    plot.legend(loc="upper left")


def _beside(plot: Axes, place: int, row: Mapping[str, Any], stated: str) -> None:
    if (value := number(row, stated)) is not None:
        plot.plot(place + 0.38, value, label="_", **_DIAMOND)


def joules(value: float) -> str:
    """`2.48 mJ`."""
    for scale, unit in ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.2g} J"


# --- claims -----------------------------------------------------------------------------------------------------------------------


def _answer(quantity: str) -> Callable[[Record], Estimate | None]:
    def of(record: Record) -> Estimate | None:
        if quantity == "speedup_pct":
            latency = record.measured("latency", LatencyResult)
            return costs.time_saved(latency.latency_ratio, latency.noise_floor_pct)
        energy = costs.energy(record)
        if not energy.measured:
            raise ConfigError(f"energy was not measured, but estimated from the clock ({energy.method})")
        if quantity.endswith("saved_pct"):
            saved = costs.joules_saved(record)
            return saved and Estimate(saved[0], saved[0] - saved[1], saved[0] + saved[1], saved[1])
        grams = (energy.dense if quantity == "dense_g_per_token" else energy.ours).net_gco2_per_token
        return None if isinstance(grams, str) else Estimate(grams, grams, grams)

    return of


_ENTRIES = {f"f2.{step.rpartition('.')[2]}": step for step in [*STEPS][1:]}
ANSWERS = {
    f"{entry}.{quantity}": AnsweredBy(costs.PANEL, key, of_record=_answer(quantity))
    for entry, key in (_ENTRIES | {"f2.joint": costs.JOINT, "faq.energy": costs.JOINT}).items()
    for quantity in reported()[entry].quantities
    if quantity != "added_speedup_pct"
}
