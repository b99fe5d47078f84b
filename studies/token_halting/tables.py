"""Tables of the detection study, made of its frames in results/detection (`python scripts/train_halting.py detection`)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, artefact, experiments_folder
from quicksilver.report.claims.ledger import Statement
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.table import NO_VALUE, Cell, Column, Lines, Panel, Table, filled, number, with_ends

COMMAND = "python scripts/train_halting.py detection"
LABELS = {
    ("no_layers", "dense"): "No transformer layer",
    ("control", "dense"): "Dense, trained as long",
    ("longer", "dense"): "Dense, then as long again at a tenth of the rate",
    ("box", "learned"): "Learned, box weights",
    ("uniform", "learned"): "Learned, uniform weights",
    ("reading", "learned"): "Learned, box weights, gates that only read",
    ("frozen", "learned"): "Learned, box weights, gates alone on the dense detector",
    ("gentle", "learned"): "Learned, gates alone, then both at a tenth of the rate",
    ("random", "random"): "Random, at the same rates",
    ("norm", "norm"): "Smallest feature norm, same rates",
    ("static", "static"): "Static depth, dense detector",
    ("box", "resumed"): "Learned, box weights, last layer resumed",
    ("wide_control", "dense"): "Wider, dense",
    ("taught", "learned"): "Learned, gates alone, then both, taught by the dense detector of as many steps",
    ("wide_gentle", "learned"): "Wider, gates alone, then both at a tenth of the rate",
}
SECTIONS = {"no_layers": "Dense", "control": "Dense", "longer": "Dense", "wide_control": "Wider", "wide_gentle": "Wider"}
NOT_HALTED = "the same weights, no token halted"
PAPER_THRESHOLD = 0.5
CLOCKS = {"encoder": "encoder", "whole": "points to boxes"}


def _ratio(row: Mapping[str, Any], key: str, of: str) -> Lines:
    """The row's number `key` over its number `of`."""
    value, divisor = number(row, key), number(row, of)
    return (NO_VALUE if value is None or not divisor else f"{value / divisor:.2f}",)


def folder() -> Path:
    """Where the study is written: results/detection of a clone."""
    return experiments_folder().parent / "results" / "detection"


def frame(name: str) -> pd.DataFrame:
    """One frame of the study; empty where it was not made."""
    path = folder() / f"{name}.csv"
    return pd.read_csv(path) if path.is_file() else pd.DataFrame()


def said(detector: str, policy: str) -> str:
    """What a row is called; `dense` of a detector that was trained to halt is the same weights with no token halted."""
    return LABELS.get((detector, policy), NOT_HALTED)


def section(detector: str, policy: str) -> str:
    """Where a row stands: with the others of its detector."""
    if (detector, policy) not in LABELS:
        return next(name for (other, _), name in LABELS.items() if other == detector)
    return SECTIONS.get(detector, LABELS[detector, policy])


def facts() -> dict[str, str]:
    """What the study is of, by name."""
    found = frame("about")
    return {} if found.empty else dict(zip(found["fact"], found["value"].astype(str), strict=True))


def note() -> tuple[str, ...]:
    """Sentences that say how it was measured."""
    said = facts()
    if not said:
        return (f"The study was not made on this machine: {COMMAND}.",)
    each = frame("evaluations")
    wider = f" ({said['wide']} the wider one)" if "wide" in said and "wide_gentle" in set(each.get("detector", ())) else ""
    return (
        f"Made by `{COMMAND}`: {said['pillars']} pillars a scene, {said['layers']} layers of width {said['width']}{wider}, seeds {said['seeds']}, "
        f"{said['scenes']} scenes for training ({said['steps']} steps dense, then {said['tuning_steps']} each), "
        f"{said['validation_scenes']} others for measuring; target {said['target_tokens']} of token-layers; torch {said['torch']}.",
    )


def summary() -> pd.DataFrame:
    """Mean and spread over seeds of every detector, policy and dial, with the paired differences beside it."""
    each = frame("evaluations")
    if each.empty:
        return each
    keys = ["detector", "policy", "dial"]
    grouped = each.groupby(keys, sort=False)
    mean = grouped.mean(numeric_only=True).drop(columns="seed")
    for column in ("ap", "ap_unrecycled"):
        mean[f"{column}_low"], mean[f"{column}_high"] = grouped[column].min(), grouped[column].max()
    found, apart = mean.assign(seeds=grouped.size()).reset_index(), frame("differences")
    for against, recycled, name in (
        ("dense control", True, "vs_dense"), ("longer control", True, "vs_longer"),
        ("random", True, "vs_random"), ("random", False, "vs_random_unrecycled"),
    ):  # fmt: skip
        chosen = apart[(apart["against"] == against) & (apart["recycled"] == recycled)]
        names = {"difference": name, "low": f"{name}_low", "high": f"{name}_high"}
        found = found.merge(chosen.rename(columns=names)[[*keys, *names.values()]], on=keys, how="left")
    timed = frame("timing")
    for clock in CLOCKS if not timed.empty else ():
        own = realized(timed[timed["clock"] == clock].drop(columns="clock")).set_index(keys).add_prefix(f"{clock}_")
        found = found.merge(own.reset_index(), on=keys, how="left")
    return found


def realized(timed: pd.DataFrame) -> pd.DataFrame:
    """With `realized`: of the operations that a row saves, the share by which its time fell; none where it saves next to nothing."""
    saved = timed["flops_saved_pct"].where(timed["flops_saved_pct"].abs() > 1)
    return timed.assign(realized=100 * (1 - timed["latency_ratio"]) / saved)


# -- table detection ---------------------------------------------------------------------------------------------------------------
def _ap(key: str) -> str:
    return f"{{{key}:.3f}}\n{{{key}_low:.3f}} to {{{key}_high:.3f}}"


_difference = partial(with_ends, spec="+.3f", between=" ")


def _noise(found: pd.DataFrame, clock: str, said: str) -> tuple[str, ...]:
    """The noise floor of a clock, one for all rows."""
    floor = f"{clock}_{comparison.FLOOR}"
    timed = (row for row in found.to_dict("records") if number(row, floor) is not None)
    rows = [row | {"record": f"{row['detector']} {row['dial']}", comparison.FLOOR: row[floor]} for row in timed]
    comparison.pool_noise(rows)
    return comparison.noise_note(rows, f"a scene's time, {said}")


def _realized(clock: str) -> Cell:
    form = f"{{{clock}_realized:.2f}}\nof {{{clock}_flops_saved_pct:+.1f}}%"
    return lambda row: filled(form, row) if row[f"{clock}_flops_saved_pct"] > 0 else (NO_VALUE,)


def _technique(row: Mapping[str, Any]) -> Lines:
    dials = {"learned": "p < {:g}", "random": "rates of p < {:g}", "norm": "rates of p < {:g}", "static": "depth {:g}"}
    return (row["technique"], *(form.format(row["dial"]) for policy, form in dials.items() if policy == row["policy"]))


DETECTION_COLUMNS = (
    Column("", "technique", _technique, align="left"), Column("computed %", "token-layers", "{tokens:100*.0f}"),
    Column("computed %", "in boxes, last layer", "{kept_in_box:100*.0f}", expendable=3),
    Column("", "FLOPs saved %", "{executed_flops_saved_pct:+.1f}"),
    Column("AP", "recycled", _ap("ap")), Column("AP", "not recycled", _ap("ap_unrecycled")),
    Column("difference of AP", "to dense", _difference("vs_dense")),
    Column("difference of AP", "to dense, trained longer", _difference("vs_longer")),
    Column("difference of AP", "to random", _difference("vs_random"), expendable=1),
    Column("difference of AP", "to random, not recycled", _difference("vs_random_unrecycled"), expendable=1),
    *(Column(said, name, cell, expendable=2) for clock, said in CLOCKS.items() for name, cell in (
        ("time ÷ dense", f"{{{clock}_latency_ratio:.2f}}"), ("time ÷ FLOPs saved", _realized(clock)),
    )),
)  # fmt: skip

DETECTION_LEGEND = (
    "AP: average precision at forty recalls, mean of two classes and of all seeds; below it the least and the greatest of the seeds.",
    "recycled: the head reads the frozen states of halted tokens; not recycled: it sees nothing of them. The detectors were trained with recycling.",
    "p < 0.5 is the paper's rule; the other thresholds turn the same gates. Random and norm: as many tokens halt after each layer as under "
    "the gates with box weights, and the detector was trained further under that rule, for as many steps as all others.",
    "Differences are paired by scene and seed, with 95% bootstrap intervals over scenes. Dense means trained as long, without halting.",
    "FLOPs: executed, of encoder and head, mean of all scenes and seeds. computed: token-layers that ran; in boxes, last layer: tokens inside "
    "labelled boxes that the last layer computes.",
    "Time: one scene a pass, in turns with the dense detector. Encoder: embedded pillars in, states out, what the "
    "paper accelerates. Points to boxes: with features, embedding, head, decoding and suppression, which no halting shortens. Time ÷ FLOPs saved: how "
    "much of the operations that each clock's own part saves, in the scenes that were timed (below), is saved of its time.",
    "Gates alone: trained on the dense detector, whose weights stay. At a tenth of the rate: from there on both are trained, for as many steps again; trained longer "
    "is the dense detector with these steps.",
    "Gates that only read: the derivative of a score goes to the gate's weights and not on into the detector's states.",
)


@artefact(list)
def table_detection(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table detection: learned token halting on a detector of cars and pedestrians, beside random halting, feature norm and static depth.

    A section for each way to choose.
    """
    found = summary()
    if found.empty:
        found = pd.DataFrame(columns=["panel", "section", "technique"])
    else:
        keys = list(zip(found["detector"], found["policy"], strict=True))
        found.insert(0, "panel", "detection")
        found.insert(1, "section", [section(*key) for key in keys])
        found.insert(2, "technique", [said(*key) for key in keys])
        fewer = found["seeds"] < found["seeds"].max()
        found.loc[fewer, "technique"] += " (seeds: " + found.loc[fewer, "seeds"].astype(str) + ")"
    notes = (*note(), *(line for clock, part in CLOCKS.items() for line in _noise(found, clock, part)))
    title = "Rotated boxes found, mean of cars (IoU 0.5) and pedestrians (IoU 0.3)"
    panel = Panel("detection", title, DETECTION_COLUMNS, notes)
    return Table(name, "Token halting on a detector", found, (panel,), DETECTION_LEGEND)


# -- table detection_time ----------------------------------------------------------------------------------------------------------
PARTS, SIZES, COST = "parts", "sizes", "cost"
LAYER = "layer "
SEVERAL = "scenes a pass, padded to the one with the most tokens left"
IN_ENCODER = ("a pass's begin and end", "runtime", "decide", "gather", "scatter", LAYER)
MEANS = {
    "a pass's begin and end": "the encoder and the runtime around its layers: begin and end of a pass",
    "runtime": "the runtime: planning and bookkeeping",
    "decide": "the gates, and recording which tokens they halt",
    "gather": "packing the tokens that are left",
    "scatter": "putting their states back",
}


def _made(name: str, option: str) -> tuple[str, ...]:
    made = frame(name)
    if made.empty:
        return (f"Not measured on this machine: {COMMAND} {option}.",)
    load = f" Load average when it began: {made['load_average'].max():.1f}." if "load_average" in made else ""
    return (f"Made by `{COMMAND} {option}`.{load}",)


def _parts(each: pd.DataFrame) -> pd.DataFrame:
    wide = each.pivot(index="part", columns="run", values=["latency_ms", "tokens", "flops"])
    wide.columns = [f"{run}_{what.removeprefix('latency_')}" for what, run in wide.columns]
    order = dict.fromkeys(each[each["run"] == "halted"]["part"])
    found = wide.loc[sorted(order, key=lambda part: not part.startswith(IN_ENCODER))].reset_index()
    inside = found["part"].str.startswith(IN_ENCODER)
    found["section"] = inside.map({True: "Encoder", False: "Around it"})
    layer = lambda part: f"{LAYER}{int(part.removeprefix(LAYER)) + 1}"
    found["what"] = [layer(one) if one.startswith(LAYER) else MEANS.get(one, one) for one in found["part"]]
    layers = _sum(found[found["part"].str.startswith(LAYER)], "Encoder", "all layers")
    encoder, whole = _sum(found[inside], "Encoder", "the whole encoder"), _sum(found, "Around it", "points to boxes")
    return pd.concat([found[inside], layers, encoder, found[~inside], whole], ignore_index=True).assign(panel=PARTS)


def _sum(rows: pd.DataFrame, section: str, what: str) -> pd.DataFrame:
    """One row: milliseconds, and operations where every part has them."""
    total = rows[["dense_ms", "halted_ms", "dense_flops", "halted_flops"]].sum(min_count=1)
    if rows["halted_flops"].isna().any():
        total[["dense_flops", "halted_flops"]] = None
    return pd.DataFrame([{**total, "section": section, "what": what}])


def _sizes(made: pd.DataFrame) -> pd.DataFrame:
    found, keys = realized(made), ["width", "pillars", "scenes_a_pass"]
    half = found[[*keys, "dense_ms"]].assign(width=2 * found["width"]).rename(columns={"dense_ms": "half_ms"})
    sections = {1: "One scene a pass"}
    found = found.merge(half, on=keys, how="left")
    return found.assign(panel=SIZES, section=[sections.get(n, f"{n} {SEVERAL}") for n in found["scenes_a_pass"]])


def _cost(made: pd.DataFrame) -> pd.DataFrame:
    by_part = made.groupby("what", sort=False)[["count", "seconds_each", "seconds"]].mean().reset_index()
    seed = by_part["seconds"].sum()
    totals = {"what": ["one seed, one process", "three seeds, two processes"], "seconds": [seed, 1.5 * seed]}
    return pd.concat([by_part, pd.DataFrame(totals)], ignore_index=True).assign(panel=COST, section="")


PARTS_COLUMNS = (
    Column("", "part", "{what}", align="left"),
    Column("dense", "ms", "{dense_ms:.2f}"), Column("dense", "tokens", "{dense_tokens:.0f}"),
    Column("halted at p < ½", "ms", "{halted_ms:.2f}"), Column("halted at p < ½", "tokens", "{halted_tokens:.0f}"),
    Column("halted ÷ dense", "time", partial(_ratio, key="halted_ms", of="dense_ms")),
    Column("halted ÷ dense", "FLOPs", partial(_ratio, key="halted_flops", of="dense_flops")),
)  # fmt: skip
SIZES_COLUMNS = (
    Column("", "width", "{width:.0f}"), Column("", "pillars", "{pillars:.0f}"),
    Column("ms a scene", "dense", "{dense_ms:.1f}"), Column("ms a scene", "halted", "{halted_ms:.1f}"),
    Column("", "FLOPs saved %", "{flops_saved_pct:.0f}"), Column("", "time ÷ dense", "{latency_ratio:.2f}"),
    Column("", "time ÷ FLOPs saved", "{realized:.2f}"),
    Column("", "time ÷ dense of half the width", partial(_ratio, key="halted_ms", of="half_ms")),
    Column("", "noise %", "{noise_floor_pct:.0f}"),
)  # fmt: skip
COST_COLUMNS = (
    Column("", "what", "{what}", align="left"), Column("", "steps or scenes", "{count:.0f}"),
    Column("", "seconds each", "{seconds_each:.2g}"), Column("", "minutes a seed", lambda row: (f"{row['seconds'] / 60:.1f}",)),
)  # fmt: skip
TIME_LEGEND = (
    "Parts: of each scene the least of fifteen runs, mean of eight scenes; dense is the dense control, halted the detector whose gates were trained first and "
    "then both, seed 0.",
    "Only layers and gates have operations that halting changes. FLOPs of a layer: its products and its attention.",
    "Size: random weights, 4 layers, heads of 16 columns at width 48 and of 32 elsewhere, gates whose biases leave 35%, 20% and 15% of the tokens after the first three layers. Time does not depend on what was learnt.",
    "Cost: twelve steps of each training, from nothing, four scenes of each evaluation and 40 draws of an interval are timed in two processes at once; the rest is their number.",
)


@artefact(list)
def table_detection_time(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table detection_time: where the time of a scene goes, how much of the saved operations is saved of it by size, and what the study costs.

    A panel for each of the three.
    """
    rows = [make(frame(of)) for of, make in ((PARTS, _parts), (SIZES, _sizes), (COST, _cost)) if not frame(of).empty]
    found = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=["panel", "section", "what"])
    about = {
        PARTS: ("Where the time of one scene goes, milliseconds, one thread", PARTS_COLUMNS, "--timing-only"),
        SIZES: ("The encoder's time by size, one thread", SIZES_COLUMNS, "--sizes-only"),
        COST: ("What the study takes, minutes", COST_COLUMNS, "--cost-only --processes 2"),
    }
    panels = tuple(Panel(of, title, columns, _made(of, option)) for of, (title, columns, option) in about.items())
    return Table(name, "Time of the detector that halts", found, panels, TIME_LEGEND)


# -- table token_halting_claims ----------------------------------------------------------------------------------------------------
PAPER = "arXiv 2303.05078 (Ye et al., token halting)"
PARETO = "Our method significantly improves the Pareto frontier of efficiency versus accuracy when compared with the existing approaches"
NON_UNIFORM = "A non-uniform token sparsity loss is employed to improve the learning of the halting module"
BY_NORM = "AP of learned halting minus that of halting by feature norm, the best rule here, at the same rates"
BY_BOX = "AP with box weights minus that with uniform weights"
DEPENDS = "deciding whether or not to halt a token needs to depend on the input"
BY_CHANCE = "AP of learned halting minus that of random halting at the same rates"
BETTER = {  # of detector box: quote, what is compared, against, with recycling
    "pareto": (PARETO, BY_NORM, "norm", True),
    "pareto.unrecycled": (PARETO, f"{BY_NORM}, without recycling", "norm", False),
    "input_dependent": (DEPENDS, BY_CHANCE, "random", True),
    "box_weights": (NON_UNIFORM, BY_BOX, "uniform", True),
    "box_weights.unrecycled": (NON_UNIFORM, f"{BY_BOX}, without recycling", "uniform", False),
}
WIDER = "By halting tokens and increasing model capacity, we are able to improve the baseline model's performance without increasing the model's latency"
RECYCLED = "our framework allows halted tokens to be reused to inform the model's predictions through a straightforward token recycling mechanism"
PSEUDO = "a theoretical analysis is conducted to evaluate the accuracy of the pseudo-gradient"


def statements() -> list[Statement]:
    """Every statement with what the study says about it; without a study none was measured."""
    each, slopes = frame("evaluations"), frame("gradients")
    found = [
        _statement(name, quote, compared, _gap("box", against, recycled), "95% over scenes, mean of seeds")
        for name, (quote, compared, against, recycled) in BETTER.items()
    ]
    gain = None
    if not each.empty:
        box = _at_half(each, "box", policy="learned")
        gain = _spread(box["ap"] - box["ap_unrecycled"])
    spread = "from the least to the greatest of the seeds"
    recycling = _statement("recycling", RECYCLED, "AP with recycling minus without", gain, spread)
    own = None if slopes.empty else _spread(slopes[slopes["estimate"] == "both"]["correlation"])
    compared = "correlation of the pseudo-gradient with the effect of turning the decision round"
    said = "from the least to the greatest, layer by layer, kept and halted tokens apart"
    return [*found, recycling, _wider(each), _statement("pseudo_gradient", PSEUDO, compared, own, said)]


def _statement(name: str, quote: str, compared: str, estimate: Estimate | None, why: str, fails: bool = False) -> Statement:
    why = why if estimate is not None else f"no such study here: {COMMAND}"
    return Statement(f"token_halting.{name}", PAPER, quote, compared, estimate, why, fails)


def _spread(values: pd.Series) -> Estimate:
    return Estimate(values.mean(), values.min(), values.max())


def _at_half(frame: pd.DataFrame, detector: str, **values: object) -> pd.DataFrame:
    """The rows of a detector at the paper's threshold with these values."""
    for column, value in {"detector": detector, "dial": PAPER_THRESHOLD, **values}.items():
        frame = frame[frame[column] == value]
    return frame


def _gap(detector: str, against: str, recycled: bool) -> Estimate | None:
    if (apart := frame("differences")).empty:
        return None
    (one,) = _at_half(apart, detector, policy="learned", against=against, recycled=recycled).itertuples()
    return Estimate(one.difference, one.low, one.high)


def _wider(each: pd.DataFrame) -> Statement:
    compared = "AP of a wider detector that halts minus that of the dense one trained for as many steps, at no more time"
    name, timed = "wide_gentle", frame("timing")
    trained = name in set(each.get("detector", ()))
    if not trained or name not in set(timed.get("detector", ())):
        why = f"the wider detector was not {'timed' if trained else 'trained'}: {COMMAND} --more wide"
        return Statement("token_halting.wider", PAPER, WIDER, compared, None, why)
    seeds = each.loc[each["detector"] == name, "seed"].nunique()
    ratio = float(_at_half(timed, name, clock="encoder")["latency_ratio"].iloc[0])
    why = f"seeds: {seeds}; its encoder takes {ratio:.2f} of the dense detector's time"
    return _statement("wider", WIDER, compared, _gap(name, "longer control", True), why, ratio > 1)


def _words(row: Mapping[str, object], key: str, width: int = 34) -> Lines:
    return tuple(textwrap.wrap(str(row[key]), width)) or ("",)


CLAIMS_COLUMNS = (
    Column("", "the paper states", partial(_words, key="quote", width=44), align="left"),
    Column("", "compared", partial(_words, key="compared"), align="left"),
    Column("", "measured", "{difference:+.3f} [{low:+.3f} {high:+.3f}]"), Column("", "verdict", "{verdict}", align="left"),
    Column("", "why", partial(_words, key="why"), align="left"),
)  # fmt: skip
CLAIMS_LEGEND = (
    "reproduced: the interval lies above 0; not reproduced: below; undecided: it holds 0. The paper's text at hand prints no number.",
    "On small detectors of made scenes, not on the Waymo Open Dataset: a verdict does not say that the paper is wrong.",
)


@artefact(list, statements=statements)
def table_token_halting_claims(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table token_halting_claims: what the second paper's abstract and introduction state (arXiv 2303.05078), beside what was measured here.

    They print no number, so the rule of docs/verdicts.md has nothing to compare with: a statement that something is better is reproduced where the
    interval of the difference lies above 0, not reproduced where it lies below, and undecided where it holds 0. The ledger has them, too.
    """
    rows = []
    for one in statements():
        ends = (None, None, None) if one.estimate is None else (one.estimate.value, one.estimate.low, one.estimate.high)
        rows.append(("claims", "", one.quote, one.compared, *ends, one.verdict, one.why))
    columns = ["panel", "section", "quote", "compared", "difference", "low", "high", "verdict", "why"]
    title = "Statements of the abstract and the introduction, at the paper's threshold p < ½"
    panel, found = Panel("claims", title, CLAIMS_COLUMNS, note()), pd.DataFrame(rows, columns=columns)
    return Table(name, "What arXiv 2303.05078 states, and what was measured", found, (panel,), CLAIMS_LEGEND)
