"""Figure 16: cumulative speedup with energy and emissions per token.

Speed and energy are of the same batch. The method by which joules were had stands at every number; where there is no counter they are an
estimate that follows the clock, and answer no claim.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from quicksilver.measure.latency import LatencyResult
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, HATCHES, PALETTE, Figure, panels, style, whiskers
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
_BESIDE = 0.38  # of a bar's place: where the paper's number stands


def rows() -> list[Row]:
    """Dense inference, and one mechanism more at each step."""
    return costs.rows(tuple(STEPS))


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
    found = [_step(outcome) for outcome in outcomes]
    comparison.pool_noise(found)
    return pd.DataFrame(found)


def _step(outcome: Outcome) -> dict[str, Any]:
    speed, emissions = STEPS[outcome.row.key]
    row: dict[str, Any] = {"key": outcome.row.key, "technique": outcome.row.technique, "status": outcome.reason or "measured"}
    if speed is not None:
        row["reported_speedup_pct"] = reported()[speed].values["speedup_pct"]
    if emissions is not None:
        dense_g = reported()["f2.halting"].values["dense_g_per_token"]
        row["reported_emissions_pct"] = 100 * reported()[emissions].values["emissions_g_per_token"] / dense_g
    record = outcome.record
    if record is None:
        return row
    found = costs.energy(record).ours
    row |= {
        "method": costs.method(record),
        "net_j_per_token": found.net_j_per_token,
        "gross_j_per_token": found.gross_j_per_token,
    }
    row |= {"net_gco2_per_token": found.net_gco2_per_token, "resolution_j_per_token": found.resolution_j_per_token}
    if record.dense_fingerprint is not None and not record.simulated:
        latency = record.measured("latency", LatencyResult)
        ratio = latency.latency_ratio
        row |= {"speedup_pct": 100 * (1 - ratio.median), "speedup_pct_low": 100 * (1 - ratio.high)}
        row |= {"speedup_pct_high": 100 * (1 - ratio.low), comparison.FLOOR: latency.noise_floor_pct}
        saved = costs.joules_saved(record)
        if saved is not None:
            row |= {"energy_pct": 100 - saved[0], "energy_resolution_pct": saved[1]}
    elif costs.j_per_token(record, "dense") is not None:
        row["energy_pct"] = 100.0
    return row | {"record": record.fingerprint}


def _has(row: Mapping[str, Any], key: str) -> bool:
    return key in row and pd.notna(row[key])


def _speed(plot: Axes, members: Sequence[Mapping[str, Any]]) -> None:
    for place, row in enumerate(members):
        if _has(row, "speedup_pct"):
            value, floor = row["speedup_pct"], row[comparison.FLOOR]
            within = abs(value) <= floor
            plot.fill_between([place - 0.42, place + 0.42], -floor, floor, color="#e4e4e4", linewidth=0, zorder=0)
            spread = whiskers(value, row["speedup_pct_low"], row["speedup_pct_high"])
            plot.bar(
                place, value, width=0.55, color="white" if within else PALETTE[2], edgecolor="black", linewidth=0.5,
                hatch=HATCHES[1] if within else "", yerr=spread, error_kw={"elinewidth": 0.8, "capsize": 2}, label="_",
            )  # fmt: skip
            below = value < 0 and not within
            plot.annotate(
                "≈ 0\n(noise)" if within else f"{value:+.1f}",
                (place, row["speedup_pct_low"] if below else max(row["speedup_pct_high"], 0)),
                (0, -4 if below else 4),
                textcoords="offset points",
                ha="center",
                va="top" if below else "bottom",
                size=7,
            )
        if _has(row, "reported_speedup_pct"):
            plot.plot(
                place + _BESIDE,
                row["reported_speedup_pct"],
                marker="D",
                color="white",
                markeredgecolor=PALETTE[1],
                linestyle="",
                label="_",
            )
    plot.axhline(0, color=GREY, linewidth=0.8, linestyle="-", marker="")
    plot.plot([], [], marker="D", color="white", markeredgecolor=PALETTE[1], linestyle="", label="the paper")
    plot.set_ylabel("time gone, % of dense")
    plot.set_title("Speed")
    plot.margins(y=0.18)
    plot.legend()


def _energy(plot: Axes, members: Sequence[Mapping[str, Any]]) -> None:
    for place, row in enumerate(members):
        if _has(row, "energy_pct"):
            value = row["energy_pct"]
            around = row["energy_resolution_pct"] if _has(row, "energy_resolution_pct") else 0.0
            plot.bar(
                place, value, width=0.55, color=PALETTE[4], edgecolor="black", linewidth=0.5, yerr=around or None,
                error_kw={"elinewidth": 0.8, "capsize": 2},
            )  # fmt: skip
            said = f"{costs.joules(row['net_j_per_token'])}\n{row['net_gco2_per_token'] * 1e6:.3g} µg\n{row['method']}"
            plot.annotate(said, (place, value + around), (0, 3), textcoords="offset points", ha="center", size=6.5)
        elif _has(row, "method"):
            plot.annotate(
                f"{costs.BELOW}\n{row['method']}", (place, 0), (0, 4), textcoords="offset points", ha="center", size=6.5
            )
        if _has(row, "reported_emissions_pct"):
            plot.plot(
                place + _BESIDE,
                row["reported_emissions_pct"],
                marker="D",
                color="white",
                markeredgecolor=PALETTE[1],
                linestyle="",
            )
    plot.plot([], [], marker="D", color="white", markeredgecolor=PALETTE[1], linestyle="", label="the paper, emissions")
    plot.axhline(100, color=GREY, linewidth=0.8, linestyle="-", marker="")
    plot.set_ylabel("net energy per token, % of dense")
    plot.set_title("Energy and emissions per token")
    plot.margins(y=0.28)
    plot.set_ylim(bottom=0)
    plot.legend(loc="upper left")


# --- claims ---------------------------------------------------------------------------------------------------------------------


def _of(key: str, quantity: str) -> Callable[[Mapping[str, Outcome]], Estimate | None]:
    def of(outcomes: Mapping[str, Outcome]) -> Estimate | None:
        record = outcomes[key].record
        if record is None:
            return None
        if quantity == "speedup_pct":
            latency = record.measured("latency", LatencyResult)
            ratio = latency.latency_ratio
            middle, low, high = (100 * (1 - end) for end in (ratio.median, ratio.high, ratio.low))
            return Estimate(middle, low, high, latency.noise_floor_pct)
        energy = costs.energy(record)
        if not energy.measured:
            raise ConfigError(f"energy was not measured, but estimated from the clock ({energy.method})")
        saved = costs.joules_saved(record)
        if quantity.endswith("saved_pct"):
            return None if saved is None else Estimate(saved[0], saved[0] - saved[1], saved[0] + saved[1], saved[1])
        grams = (energy.dense if quantity == "dense_g_per_token" else energy.ours).net_gco2_per_token
        return None if isinstance(grams, str) else Estimate(grams, grams, grams)

    return of


ANSWERS = {
    f"{entry}.{quantity}": AnsweredBy(costs.PANEL, key, of=_of(key, quantity))
    for entry, key in {
        "f2.halting": "cumulative.halting",
        "f2.kv_skipping": "cumulative.kv_skipping",
        "f2.fusion": "cumulative.fusion",
        "f2.quantization": "cumulative.quantization",
        "f2.joint": "cumulative.quantization",
        "faq.energy": "cumulative.quantization",
    }.items()
    for quantity in reported()[entry].quantities
    if quantity != "added_speedup_pct"
}
