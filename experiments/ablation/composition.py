"""What ingredients add to halting with prediction (table composition), and what can be saved where every position is scored (table
all_positions): two tables whose settings were chosen on calibration text, by runs that stand in a panel of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd

from quicksilver.records.stats import Interval, bootstrap
from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.table import Table

from .techniques import composed, options, panel_rows, row_of

PANEL, SEARCH = "continuation", "calibration"
SKIPPING, FUSION, INT8, INT8_FLOAT_KV, HALF = "skipping", "fusion", "int8", "int8.kv", "bfloat16"
NAMES = {
    SKIPPING: "skipped K/V entries",
    FUSION: "fused, not dropped",
    INT8: "int8 products and packed K/V",
    INT8_FLOAT_KV: "int8 products, K/V as they are",
    HALF: "bfloat16",
}
ALL = (SKIPPING, FUSION, HALF)  # int8 and bfloat16 exclude one another: both exchange the weights
GAINS = {
    "prompt_executed_flops_saved_pct": "operations of the prompt",
    "prompt_speedup_pct": "its time",
    "kv_bytes_saved_pct": "K/V bytes",
}

# What was tried on calibration text: share of a prompt's entries skipped, and the depth from which; share of tokens fused away, and which pairs.
SKIPPINGS = ((0.1, 0.4), (0.25, 0.4), (0.5, 0.4), (0.25, 0.55), (0.5, 0.55))
FUSIONS = ((0.196429, "attention"), (0.196429, "l2"))
# Of these the most skipped whose KL is not significantly above the preset's, else the one of least KL; and the fusion of least KL.
SKIPPED: tuple[float, float] = (0.1, 0.4)
FUSED: tuple[float, str] = (0.196429, "attention")


def _skipping(share: float, depth: float) -> tuple[str, ...]:
    return ("kv_skipping_attention", *options("kv_skipping", skipped_share=share, min_depth=depth))


def _fusing(share: float, pairs: str) -> tuple[str, ...]:
    """The oldest are not dropped; as many tokens are fused away before the same layer, the protected spared."""
    schedule = "{drop_before: 3, drop_share: 0.0, predict_before: 10, protect_last: 32}"
    fusing = options("token_fusion", start=0.1875, fused_share=share, criterion=pairs, protect_last=32)
    return ("token_fusion_attention", *options("quicksilver", save="null", schedule=schedule), *fusing)


_INT8 = ("adaptive_quantization_uniform8", *options("adaptive_quantization", execution="int8", depth=0.0))
_SETTINGS = {
    SKIPPING: _skipping(*SKIPPED),
    FUSION: _fusing(*FUSED),
    INT8: _INT8,
    INT8_FLOAT_KV: (*_INT8, *options("adaptive_quantization", kv="false")),
    HALF: ("bfloat16",),
}
_PRESET = ("quicksilver",)
_ALWAYS = ("model=reference-gpt2", "protocol=continuation", "dataset=python-docs")
_NO_NULL = "measure.null_control.enabled=false"


def composition_rows() -> list[Row]:
    """The test panel, then what was tried on calibration text."""
    always = (*_ALWAYS, "dataset.windows=64", _NO_NULL)
    one_left_out, formats = "One left out of the composition", {"bfloat16": "bfloat16", "int8_dynamic": "dynamic int8"}
    made: list[tuple[str, str, str, Sequence[str]]] = [
        ("", "preset", "Dropped, then predicted", ()),
        *(("One ingredient added", f"add.{name}", f"+ {what}", (name,)) for name, what in NAMES.items()),
        ("Composed", "all", f"with {' + '.join(NAMES[name] for name in ALL)}", ALL),
        *((one_left_out, f"out.{name}", f"− {NAMES[name]}", [other for other in ALL if other != name]) for name in ALL),
        (one_left_out, "swap.int8", "int8 and packed K/V in place of bfloat16", (SKIPPING, FUSION, INT8)),
    ]
    return [
        row_of(PANEL, "", "dense", "Dense", "", *always),
        *(
            composed(PANEL, at, key, said, [_PRESET, *map(_SETTINGS.__getitem__, parts)], *always)
            for at, key, said, parts in made
        ),
        *(row_of(PANEL, "Number formats alone", f"alone.{name}", said, name, *always) for name, said in formats.items()),
        *_search_rows(),
    ]


def _search_rows() -> Iterator[Row]:
    calibrating = ("dataset.part=calibration", "dataset.windows=40", "measure=quick", _NO_NULL, "measure.audit.enabled=false")
    always = (*_ALWAYS, *calibrating)
    yield row_of(SEARCH, "", "dense", "Dense", "", *always)
    yield composed(SEARCH, "", "preset", "Dropped, then predicted", [_PRESET], *always)
    for share, depth in SKIPPINGS:
        technique = f"+ {100 * share:g}% of entries skipped from {depth:g} of the depth"
        yield composed(SEARCH, "", f"skipping {share:g} {depth:g}", technique, [_PRESET, _skipping(share, depth)], *always)
    for fused, pairs in FUSIONS:
        technique = f"{100 * fused:.0f}% fused by {pairs}, not dropped"
        yield composed(SEARCH, "", f"fusion {fused:g} {pairs}", technique, [_PRESET, _fusing(fused, pairs)], *always)


@artefact(composition_rows)
def table_composition(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table composition: what each of the four ingredients saves on top of halting with prediction, and at what price.

    The settings were chosen on calibration text by KL to dense, before a test text was scored (`SKIPPED`, `FUSED`; panel `calibration`). The price
    of an ingredient is the rise of KL for each percentage point that it saves of the prompt's time, added to the preset and in the composition.
    """
    frame = comparison.frame(outcomes)
    panels = {PANEL: "The preset at 40% of the prompt's work, composed", SEARCH: "Calibration text: the choice of the settings"}
    said = {}
    for panel, say in {PANEL: findings, SEARCH: choices}.items():
        there = {one.row.key: one for one in outcomes if one.row.panel == panel and one.record is not None}
        said[panel] = say(there, frame[frame["panel"] == panel].set_index("key"))
    title = "The composition: what each ingredient is worth"
    return comparison.table(outcomes, name, title, panels, rows=frame, said=said)


def kl_change(one: Outcome, other: Outcome) -> Interval | None:
    """KL to dense of `one` minus that of `other`, nats a token, with its 95% interval over paired windows; None: not measured."""
    frames = [outcome.record.windows.set_index("window") for outcome in (one, other) if outcome.record is not None]
    if len(frames) < 2 or any("kl_nats" not in frame for frame in frames):
        return None
    both = pd.concat([frame["kl_nats"] for frame in frames], axis=1, keys=["one", "other"], join="inner")
    return bootstrap(lambda a, b: a.mean(axis=-1) - b.mean(axis=-1), both["one"], both["other"])


def choices(there: Mapping[str, Outcome], measured: pd.DataFrame) -> tuple[str, ...]:
    """What the rule takes of the runs on calibration text: outcomes with a record, and the frame, by key."""
    if "preset" not in there:
        return ()
    said, kl = [], measured["kl_nats"].astype(float)
    if skipping := [key for key in there if key.startswith("skipping")]:
        best, why = kl[skipping].idxmin(), "each raises KL significantly; this one least"
        alike = [key for key in skipping if (change := kl_change(there[key], there["preset"])) is not None and change.low <= 0]
        if alike:
            best = measured.loc[alike, "kv_bytes_saved_pct"].astype(float).idxmax()
            why = "most bytes saved at no significant rise of KL"
        said.append(f"Chosen: {measured.at[best, 'technique']} ({why}).")
    if fusing := [key for key in there if key.startswith("fusion")]:
        said.append(f"Chosen: {measured.at[kl[fusing].idxmin(), 'technique']} (least KL).")
    return tuple(said)


def findings(there: Mapping[str, Outcome], measured: pd.DataFrame) -> tuple[str, ...]:
    """One sentence an ingredient: what it changes when it is added and when it is left out, and its price."""
    said = []
    for name, what in NAMES.items():
        pairs = (("added to the preset", f"add.{name}", "preset"), ("in the composition", "all", f"out.{name}"))
        changes = [
            f"{way}: {_change(measured.loc[one], measured.loc[other], kl_change(there[one], there[other]))}"
            for way, one, other in pairs
            if one in there and other in there
        ]
        detail = "; ".join(changes)
        said += [f"{what[0].upper()}{what[1:]}. {detail[0].upper()}{detail[1:]}."] if changes else []
    return tuple(said)


def _change(one: Mapping[str, Any], other: Mapping[str, Any], change: Interval | None) -> str:
    """What `one` saves beyond `other`, how KL to dense moves, and KL × 100 for a point of time where time is saved beyond the noise."""
    more = {column: one[column] - other[column] for column in GAINS}
    shown = [f"{what} {more[column]:+.1f} points" for column, what in GAINS.items() if not pd.isna(more[column])]
    if change is None:
        return ", ".join([*shown, "KL not measured"])
    shown.append(f"KL × 100 {100 * change.value:+.2f} [{100 * change.low:.2f}, {100 * change.high:.2f}]")
    faster = more["prompt_speedup_pct"]
    if pd.isna(faster):
        price = "no time"
    elif faster <= max(one["prompt_noise_floor_pct"], other["prompt_noise_floor_pct"]):
        price = "no time saved beyond the noise"
    else:
        price = f"{100 * change.value / faster:+.3f} for each point of time"
    return ", ".join([*shown, price])


# --- all positions scored --------------------------------------------------------------------------------------------------------
CHOSEN = {"reference-gpt2": 0.0002, "reference-llama": 0.0006}
TEXTS = ("python-docs", "wikitext103")
ERRORS = (0.0001, 0.0002, 0.0003, 0.0004, 0.0006)
TARGET_PCT = 18.0
ALWAYS = ("protocol=all", "measure=quick")
# An oracle says who may leave, a fitted head reads them, their K/V are predicted; all of it fitted on 40 windows of calibration text. Rows of a
# batch keep different numbers of tokens, so one row a batch: else padding would be counted as work.
ORACLE = (
    *("modules.oracle_exit.lookahead=true", "measure.null_control.enabled=false"),
    *("dataset.calibration_windows=40", "protocol.batch_size=1"),
)


def all_positions_rows() -> list[Row]:
    """A panel for each model and text, then what was tried on calibration text."""
    found: list[Row] = []
    members = {"channels": "Channels inside tokens", "paper": "Token halting (paper)"}
    ceiling = {"ceiling": "Ceiling of stopping: an oracle"}
    for (model, error), text in product(CHOSEN.items(), TEXTS):
        always = (*ALWAYS, f"model={model}", f"dataset={text}", "dataset.windows=64")
        sparse = ("channel_sparsity", *options("channel_sparsity", error=error))
        own = {"channels": sparse, "paper": ("halting",), "ceiling": ("oracle_exit", *ORACLE)}
        found += panel_rows(f"{model} {text}", {"": members | (ceiling if text == TEXTS[0] else {})}, *always, own=own)
    for model, error in product(CHOSEN, ERRORS):
        always = (*ALWAYS, f"model={model}", "dataset.part=calibration", "dataset.windows=32")
        sparse = ("channel_sparsity", *options("channel_sparsity", error=error))
        found.append(composed(f"calibration {model}", "", f"{error:g}", f"error {error:g}", [sparse], *always))
    return found


def chosen(frame: pd.DataFrame, model: str) -> float | None:
    """The least error whose run on calibration text saves the target; None: none of those that are there does."""
    tried = frame[(frame["panel"] == f"calibration {model}") & (frame["nominal_flops_saved_pct"] >= TARGET_PCT)]
    return min((float(key) for key in tried["key"]), default=None)


@artefact(all_positions_rows)
def table_all_positions(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table all_positions: what can be saved where every position is scored, and decisions may not look ahead.

    Stopping tokens cannot: each of them is asked for its prediction. The ceiling says by how much: an oracle that has seen the dense model's answers
    chooses who leaves, as many as save 20% on calibration text; exit head and predicted K/V are fitted. Sparsity inside a token can: small input
    channels of every linear map are set to zero (`channel_sparsity`, after TEAL, arXiv 2408.14690). Its error was chosen on calibration text, as the
    least of a fixed list that saves 18% of the nominal operations there, before a test text was scored (`CHOSEN`; the runs behind it are the panel
    `calibration`). No kernel here skips the zeros: executed operations are those of the dense model, and nominal ones say what a sparse kernel could
    leave out.
    """
    frame = comparison.frame(outcomes)
    panels = {f"{model} {text}": f"{model}, {text}: every position scored" for model, text in product(CHOSEN, TEXTS)}
    panels |= {f"calibration {model}": f"{model}, calibration text: the choice of the error" for model in CHOSEN}
    said = {key: comparison.cautions(frame, key) for key in panels}
    for model in CHOSEN:
        error = "none" if (best := chosen(frame, model)) is None else f"error {best:g}"
        said[f"calibration {model}"] += (f"Chosen: {error}, the least that saves {TARGET_PCT:g}% here.",)
    title = "All positions scored: work inside a token, and tokens that stop"
    return comparison.table(outcomes, name, title, panels, rows=frame, said=said, cautious=False)
