"""Table composition: what each of the four ingredients saves on top of halting with prediction, and at what price.

The model's own schedule at 40% of the prompt's work (`modules=[quicksilver]`) with each ingredient added, with all that go together, and with
each of them left out: skipped K/V entries, tokens fused into neighbours where they would be dropped, int8 products with packed K/V, bfloat16.
The settings were chosen on calibration text by KL to dense, before a test text was scored (`SKIPPED`, `FUSED`; the runs behind them are the
panel `calibration`).
The price of an ingredient is the rise of KL to dense for each percentage point that it saves of the prompt's time: when it is added to the
preset, and when it is left out of the composition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.records.stats import Interval, bootstrap
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Panel, Table

PANEL, SEARCH = "continuation", "calibration"
ALWAYS = ("model=reference-gpt2", "protocol=continuation")
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


def modules_of(
    ingredients: Sequence[str], skipped: tuple[float, float] = SKIPPED, fused: tuple[float, str] = FUSED
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules and overrides of the preset with these ingredients."""
    modules, overrides = ["quicksilver"], []
    if SKIPPING in ingredients:
        modules.append("kv_skipping_attention")
        overrides += [f"modules.kv_skipping.skipped_share={skipped[0]}", f"modules.kv_skipping.min_depth={skipped[1]}"]
    if FUSION in ingredients:
        modules.append("token_fusion_attention")
        overrides += [
            "modules.quicksilver.save=null",
            # The oldest are not dropped; as many tokens are fused away before the same layer, the protected spared.
            "modules.quicksilver.schedule={drop_before: 3, drop_share: 0.0, predict_before: 10, protect_last: 32}",
            "modules.token_fusion.start=0.1875",
            f"modules.token_fusion.fused_share={fused[0]}",
            f"modules.token_fusion.criterion={fused[1]}",
            "modules.token_fusion.protect_last=32",
        ]
    if INT8 in ingredients or INT8_FLOAT_KV in ingredients:
        modules.append("adaptive_quantization_uniform8")
        overrides += ["modules.adaptive_quantization.execution=int8", "modules.adaptive_quantization.depth=0.0"]
        overrides += ["modules.adaptive_quantization.kv=false"] * (INT8_FLOAT_KV in ingredients)
    if HALF in ingredients:
        modules.append("bfloat16")
    return tuple(modules), tuple(overrides)


def rows() -> list[Row]:
    """The test panel, then what was tried on calibration text."""
    found = []
    always = (*ALWAYS, "dataset=python-docs", "dataset.windows=64", "measure.null_control.enabled=false")

    def add(section: str, key: str, technique: str, ingredients: Sequence[str]) -> None:
        modules, overrides = modules_of(ingredients)
        found.append(Row(PANEL, section, key, technique, (*always, f"modules=[{','.join(modules)}]", *overrides), modules))

    found.append(Row(PANEL, "", "dense", "Dense", (*always, "modules=[]")))
    add("", "preset", "Dropped, then predicted", ())
    for name in NAMES:
        add("One ingredient added", f"add.{name}", f"+ {NAMES[name]}", (name,))
    add("Composed", "all", f"with {', '.join(NAMES[name] for name in ALL)}", ALL)
    for name in ALL:
        add("One left out of the composition", f"out.{name}", f"− {NAMES[name]}", [other for other in ALL if other != name])
    add("One left out of the composition", "swap.int8", "int8 and packed K/V in place of bfloat16", (SKIPPING, FUSION, INT8))
    for name, technique in (("bfloat16", "bfloat16"), ("int8_dynamic", "dynamic int8")):
        overrides = (*always, f"modules=[{name}]")
        found.append(Row(PANEL, "Number formats alone", f"alone.{name}", technique, overrides, (name,)))
    return found + _search_rows()


def _search_rows() -> list[Row]:
    always = (
        *(*ALWAYS, "dataset=python-docs", "dataset.part=calibration", "dataset.windows=40", "measure=quick"),
        *("measure.null_control.enabled=false", "measure.audit.enabled=false"),
    )
    found = [Row(SEARCH, "", "dense", "Dense", (*always, "modules=[]"))]

    def add(key: str, technique: str, made: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        found.append(Row(SEARCH, "", key, technique, (*always, f"modules=[{','.join(made[0])}]", *made[1]), made[0]))

    add("preset", "Dropped, then predicted", modules_of(()))
    for share, depth in SKIPPINGS:
        made = modules_of((SKIPPING,), skipped=(share, depth))
        add(f"skipping {share:g} {depth:g}", f"+ {100 * share:g}% of entries skipped from {depth:g} of the depth", made)
    for fused, pairs in FUSIONS:
        made = modules_of((FUSION,), fused=(fused, pairs))
        add(f"fusion {fused:g} {pairs}", f"{100 * fused:.0f}% fused by {pairs}, not dropped", made)
    return found


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """The composition, and the choice of its settings."""
    frame = comparison.frame(outcomes)
    by_panel = {panel: [outcome for outcome in outcomes if outcome.row.panel == panel] for panel in (PANEL, SEARCH)}
    said = findings(by_panel[PANEL], frame[frame["panel"] == PANEL])
    panels = (
        Panel(
            PANEL,
            "The preset at 40% of the prompt's work, composed",
            comparison.columns(prompt=True),
            (*said, *comparison.cautions(frame, PANEL), *provenance.notes(by_panel[PANEL])),
        ),
        Panel(
            SEARCH,
            "Calibration text: the choice of the settings",
            comparison.columns(prompt=True),
            (
                *choices(by_panel[SEARCH], frame[frame["panel"] == SEARCH]),
                *comparison.cautions(frame, SEARCH),
                *provenance.notes(by_panel[SEARCH]),
            ),
        ),
    )
    return Table(name, "The composition: what each ingredient is worth", frame, panels, comparison.legend(frame))


def kl_change(one: Outcome, other: Outcome) -> Interval | None:
    """KL to dense of `one` minus that of `other`, nats a token, with its 95% interval over paired windows; None: not measured."""
    if one.record is None or other.record is None:
        return None
    frames = [outcome.record.windows.set_index("window") for outcome in (one, other) if outcome.record is not None]
    if any("kl_nats" not in frame for frame in frames):
        return None
    both = pd.concat([frame["kl_nats"] for frame in frames], axis=1, keys=["one", "other"], join="inner")
    return bootstrap(lambda a, b: a.mean(axis=-1) - b.mean(axis=-1), both["one"], both["other"])


def choices(outcomes: Sequence[Outcome], frame: pd.DataFrame) -> tuple[str, ...]:
    """What the rule takes of the runs on calibration text."""
    there = {outcome.row.key: outcome for outcome in outcomes if outcome.record is not None}
    measured = frame.set_index("key")
    if "preset" not in there:
        return ()
    said = []
    skipping = [key for key in there if key.startswith("skipping")]
    alike = [key for key in skipping if (change := kl_change(there[key], there["preset"])) is not None and change.low <= 0]
    if skipping:
        saved = measured["kv_bytes_saved_pct"]
        best = (
            max(alike, key=lambda key: saved[key])
            if alike
            else min(skipping, key=lambda key: float(measured.loc[key, "kl_nats"]))
        )
        why = (
            "most bytes saved at no significant rise of KL"
            if alike
            else "none without a significant rise of KL, this one the least"
        )
        said.append(f"Chosen: {best} ({why}).")
    fusing = [key for key in there if key.startswith("fusion")]
    if fusing:
        said.append(f"Chosen: {min(fusing, key=lambda key: float(measured.loc[key, 'kl_nats']))} (least KL).")
    return tuple(said)


def findings(outcomes: Sequence[Outcome], frame: pd.DataFrame) -> tuple[str, ...]:
    """One sentence an ingredient: what it changes when it is added and when it is left out, and its price."""
    there = {outcome.row.key: outcome for outcome in outcomes if outcome.record is not None}
    measured = frame.set_index("key")
    said = []
    for name, what in NAMES.items():
        pairs = [(f"add.{name}", "preset"), *([("all", f"out.{name}")] if name in ALL else [])]
        changes = [
            _change(measured.loc[one], measured.loc[other], kl_change(there[one], there[other]))
            for one, other in pairs
            if one in there and other in there
        ]
        ways = ("added to the preset", "in the composition")
        detail = "; ".join(f"{way}: {text}" for way, text in zip(ways, changes, strict=False))
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
        return ", ".join([*shown, "no time"])
    if faster <= max(one["prompt_noise_floor_pct"], other["prompt_noise_floor_pct"]):
        return ", ".join([*shown, "no time saved beyond the noise"])
    return ", ".join([*shown, f"{100 * change.value / faster:+.3f} for each point of time"])
