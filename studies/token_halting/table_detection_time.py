"""Table detection_time: where the time of a scene goes, how much of the saved operations is saved of it by size, and what the study costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number

from . import results

PARTS, SIZES, COST = "parts", "sizes", "cost"
LAYER = "layer "
IN_ENCODER = ("a pass's begin and end", "runtime", "decide", "gather", "scatter", LAYER)
MEANS = {
    "a pass's begin and end": "the encoder and the runtime around its layers: begin and end of a pass",
    "runtime": "the runtime: planning and bookkeeping",
    "decide": "the gates, and writing down whom they halt",
    "gather": "packing the tokens that are left",
    "scatter": "putting their states back",
}


def rows() -> list[Row]:
    """None: the study has frames of its own (docs/learned-halting.md)."""
    return []


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel for each of the three."""
    found = pd.concat([_parts(), _sizes(), _cost()], ignore_index=True)
    panels = (
        Panel(
            PARTS, "Where the time of one scene goes, milliseconds, one thread", PARTS_COLUMNS, _said("parts", "--timing-only")
        ),
        Panel(SIZES, "The encoder's time by size, one thread", SIZES_COLUMNS, _said("sizes", "--sizes-only")),
        Panel(COST, "What the study takes, minutes", COST_COLUMNS, _said("cost", "--cost-only --processes 2")),
    )
    return Table(name, "Time of the detector that halts", found, panels, LEGEND)


def _said(frame: str, option: str) -> tuple[str, ...]:
    made = results.frame(frame)
    if made.empty:
        return (f"Not measured on this machine: {results.COMMAND} {option}.",)
    load = f" Load average when it began: {made['load_average'].max():.1f}." if "load_average" in made else ""
    return (f"Made by `{results.COMMAND} {option}`.{load}",)


def _parts() -> pd.DataFrame:
    each = results.frame("parts")
    if each.empty:
        return pd.DataFrame(columns=["panel", "section", "what"])
    wide = each.pivot(index="part", columns="run", values=["latency_ms", "tokens", "flops"])
    wide.columns = [f"{run}_{what.removeprefix('latency_')}" for what, run in wide.columns]
    order = list(dict.fromkeys(each[each["run"] == "halted"]["part"]))
    found = wide.loc[
        [*(one for one in order if one.startswith(IN_ENCODER)), *(one for one in order if not one.startswith(IN_ENCODER))]
    ]
    found = found.reset_index()
    inside = found["part"].str.startswith(IN_ENCODER)
    found["section"] = inside.map({True: "Encoder", False: "Around it"})
    found["what"] = [_what(one) for one in found["part"]]
    sums = [
        _sum(found[found["part"].str.startswith(LAYER)], "Encoder", "all layers"),
        _sum(found[inside], "Encoder", "the whole encoder"),
    ]
    encoder, around = found[inside], found[~inside]
    whole = _sum(found, "Around it", "points to boxes")
    return pd.concat([encoder, *sums, around, whole], ignore_index=True).assign(panel=PARTS)


def _what(part: str) -> str:
    return f"{LAYER}{int(part.removeprefix(LAYER)) + 1}" if part.startswith(LAYER) else MEANS.get(part, part)


def _sum(rows: pd.DataFrame, section: str, what: str) -> pd.DataFrame:
    """One row: milliseconds, and operations where every part has them."""
    total = rows[["dense_ms", "halted_ms", "dense_flops", "halted_flops"]].sum(min_count=1)
    if rows["halted_flops"].isna().any():
        total[["dense_flops", "halted_flops"]] = None
    return pd.DataFrame([{**total, "section": section, "what": what}])


def _sizes() -> pd.DataFrame:
    made = results.frame("sizes")
    if made.empty:
        return pd.DataFrame(columns=["panel", "section"])
    found = results.realized(made)
    half = (
        found[["width", "pillars", "scenes_a_pass", "dense_ms"]]
        .assign(width=2 * found["width"])
        .rename(columns={"dense_ms": "half_ms"})
    )
    found = found.merge(half, on=["width", "pillars", "scenes_a_pass"], how="left")
    return found.assign(panel=SIZES, section=[_passes(one) for one in found["scenes_a_pass"]])


def _passes(scenes: int) -> str:
    return "One scene a pass" if scenes == 1 else f"{scenes} scenes a pass, padded to the one with the most tokens left"


def _cost() -> pd.DataFrame:
    made = results.frame("cost")
    if made.empty:
        return pd.DataFrame(columns=["panel", "section", "what"])
    by_part = made.groupby("what", sort=False)[["count", "seconds_each", "seconds"]].mean().reset_index()
    total = pd.DataFrame([{"what": "one seed, one process", "seconds": by_part["seconds"].sum()}])
    three = pd.DataFrame([{"what": "three seeds, two processes", "seconds": 1.5 * by_part["seconds"].sum()}])
    return pd.concat([by_part, total, three], ignore_index=True).assign(panel=COST, section="")


def _number(key: str, form: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        value = number(row, key)
        return (NO_VALUE,) if value is None else (form.format(value),)

    return cell


def _share(own: str, of: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        one, other = number(row, own), number(row, of)
        return (NO_VALUE,) if one is None or not other else (f"{one / other:.2f}",)

    return cell


PARTS_COLUMNS = (
    Column("", "part", lambda row: (row["what"],), align="left"),
    Column("dense", "ms", _number("dense_ms", "{:.2f}")),
    Column("dense", "tokens", _number("dense_tokens", "{:.0f}")),
    Column("halted at p < ½", "ms", _number("halted_ms", "{:.2f}")),
    Column("halted at p < ½", "tokens", _number("halted_tokens", "{:.0f}")),
    Column("halted ÷ dense", "time", _share("halted_ms", "dense_ms")),
    Column("halted ÷ dense", "FLOPs", _share("halted_flops", "dense_flops")),
)
SIZES_COLUMNS = (
    Column("", "width", _number("width", "{:.0f}")),
    Column("", "pillars", _number("pillars", "{:.0f}")),
    Column("ms a scene", "dense", _number("dense_ms", "{:.1f}")),
    Column("ms a scene", "halted", _number("halted_ms", "{:.1f}")),
    Column("", "FLOPs saved %", _number("flops_saved_pct", "{:.0f}")),
    Column("", "time ÷ dense", _number("latency_ratio", "{:.2f}")),
    Column("", "time ÷ FLOPs saved", _number("realized", "{:.2f}")),
    Column("", "time ÷ dense of half the width", _share("halted_ms", "half_ms")),
    Column("", "noise %", _number("noise_floor_pct", "{:.0f}")),
)
COST_COLUMNS = (
    Column("", "what", lambda row: (row["what"],), align="left"),
    Column("", "steps or scenes", _number("count", "{:.0f}")),
    Column("", "seconds each", _number("seconds_each", "{:.2g}")),
    Column("", "minutes a seed", lambda row: (f"{row['seconds'] / 60:.1f}",)),
)

LEGEND = (
    "Parts: of each scene the least of fifteen runs, mean of eight scenes; dense is the dense control, halted the detector whose gates were trained first and "
    "then both, seed 0.",
    "Only layers and gates have operations that halting changes. FLOPs of a layer: its products and its attention.",
    "Size: drawn weights, 4 layers, heads of 16 columns at width 48 and of 32 elsewhere, gates whose biases leave 35%, 20% and 15% of the tokens after the first three layers: the clock does not ask what was learnt.",
    "Cost: twelve steps of each training, from nothing, four scenes of each evaluation and 40 draws of an interval are timed in two processes at once; the rest is their number.",
)
