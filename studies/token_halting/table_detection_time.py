"""Table detection_time: where the time of a scene goes, how much of the saved operations is saved of it by size, and what the study costs."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from quicksilver.report.artefacts import Outcome
from quicksilver.report.table import Column, Panel, Table

from . import results

PARTS, SIZES, COST = "parts", "sizes", "cost"
LAYER = "layer "
SEVERAL = "scenes a pass, padded to the one with the most tokens left"
IN_ENCODER = ("a pass's begin and end", "runtime", "decide", "gather", "scatter", LAYER)
MEANS = {
    "a pass's begin and end": "the encoder and the runtime around its layers: begin and end of a pass",
    "runtime": "the runtime: planning and bookkeeping",
    "decide": "the gates, and writing down whom they halt",
    "gather": "packing the tokens that are left",
    "scatter": "putting their states back",
}

rows = results.no_rows


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
    order = dict.fromkeys(each[each["run"] == "halted"]["part"])
    found = wide.loc[sorted(order, key=lambda part: not part.startswith(IN_ENCODER))].reset_index()
    inside = found["part"].str.startswith(IN_ENCODER)
    found["section"] = inside.map({True: "Encoder", False: "Around it"})
    found["what"] = [_what(one) for one in found["part"]]
    layers = _sum(found[found["part"].str.startswith(LAYER)], "Encoder", "all layers")
    sums = (layers, _sum(found[inside], "Encoder", "the whole encoder"))
    whole = _sum(found, "Around it", "points to boxes")
    return pd.concat([found[inside], *sums, found[~inside], whole], ignore_index=True).assign(panel=PARTS)


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
    found, keys = results.realized(made), ["width", "pillars", "scenes_a_pass"]
    half = found[[*keys, "dense_ms"]].assign(width=2 * found["width"]).rename(columns={"dense_ms": "half_ms"})
    sections = {1: "One scene a pass"}
    found = found.merge(half, on=keys, how="left")
    return found.assign(panel=SIZES, section=[sections.get(n, f"{n} {SEVERAL}") for n in found["scenes_a_pass"]])


def _cost() -> pd.DataFrame:
    made = results.frame("cost")
    if made.empty:
        return pd.DataFrame(columns=["panel", "section", "what"])
    by_part = made.groupby("what", sort=False)[["count", "seconds_each", "seconds"]].mean().reset_index()
    seed = by_part["seconds"].sum()
    totals = {"what": ["one seed, one process", "three seeds, two processes"], "seconds": [seed, 1.5 * seed]}
    return pd.concat([by_part, pd.DataFrame(totals)], ignore_index=True).assign(panel=COST, section="")


PARTS_COLUMNS = (
    Column("", "part", lambda row: (row["what"],), align="left"),
    Column("dense", "ms", results.cell("dense_ms", "{:.2f}")),
    Column("dense", "tokens", results.cell("dense_tokens", "{:.0f}")),
    Column("halted at p < ½", "ms", results.cell("halted_ms", "{:.2f}")),
    Column("halted at p < ½", "tokens", results.cell("halted_tokens", "{:.0f}")),
    Column("halted ÷ dense", "time", results.cell("halted_ms", "{:.2f}", of="dense_ms")),
    Column("halted ÷ dense", "FLOPs", results.cell("halted_flops", "{:.2f}", of="dense_flops")),
)
SIZES_COLUMNS = (
    Column("", "width", results.cell("width", "{:.0f}")),
    Column("", "pillars", results.cell("pillars", "{:.0f}")),
    Column("ms a scene", "dense", results.cell("dense_ms", "{:.1f}")),
    Column("ms a scene", "halted", results.cell("halted_ms", "{:.1f}")),
    Column("", "FLOPs saved %", results.cell("flops_saved_pct", "{:.0f}")),
    Column("", "time ÷ dense", results.cell("latency_ratio", "{:.2f}")),
    Column("", "time ÷ FLOPs saved", results.cell("realized", "{:.2f}")),
    Column("", "time ÷ dense of half the width", results.cell("halted_ms", "{:.2f}", of="half_ms")),
    Column("", "noise %", results.cell("noise_floor_pct", "{:.0f}")),
)
COST_COLUMNS = (
    Column("", "what", lambda row: (row["what"],), align="left"),
    Column("", "steps or scenes", results.cell("count", "{:.0f}")),
    Column("", "seconds each", results.cell("seconds_each", "{:.2g}")),
    Column("", "minutes a seed", lambda row: (f"{row['seconds'] / 60:.1f}",)),
)

LEGEND = (
    "Parts: of each scene the least of fifteen runs, mean of eight scenes; dense is the dense control, halted the detector whose gates were trained first and "
    "then both, seed 0.",
    "Only layers and gates have operations that halting changes. FLOPs of a layer: its products and its attention.",
    "Size: drawn weights, 4 layers, heads of 16 columns at width 48 and of 32 elsewhere, gates whose biases leave 35%, 20% and 15% of the tokens after the first three layers: the clock does not ask what was learnt.",
    "Cost: twelve steps of each training, from nothing, four scenes of each evaluation and 40 draws of an interval are timed in two processes at once; the rest is their number.",
)
