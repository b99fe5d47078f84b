"""The frames of the detection study (`python scripts/train_halting.py detection`), read from results/detection: what the table and figures are
made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from quicksilver.report.artefacts import Row, experiments_folder
from quicksilver.report.table import NO_VALUE, Lines, number

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
NOT_HALTED = "the same weights, nobody halted"
PAPER_THRESHOLD = 0.5
CLOCKS = {"encoder": "encoder", "whole": "points to boxes"}


def no_rows() -> list[Row]:
    """The runs of a table or figure that is made of the study's own frames."""
    return []


def cell(key: str, form: str, of: str | None = None, scale: float = 1.0) -> Any:
    """Of a column: `scale` times the row's number `key`, over its number `of` if one is given."""

    def lines(row: Mapping[str, Any]) -> Lines:
        value, divisor = number(row, key), number(row, of) if of else 1.0
        return (NO_VALUE if value is None or not divisor else form.format(scale * value / divisor),)

    return lines


def folder() -> Path:
    """Where the study is written: results/detection of a clone."""
    return experiments_folder().parent / "results" / "detection"


def frame(name: str) -> pd.DataFrame:
    """One frame of the study; empty where it was not made."""
    path = folder() / f"{name}.csv"
    return pd.read_csv(path) if path.is_file() else pd.DataFrame()


def said(detector: str, policy: str) -> str:
    """What a row is called; `dense` of a detector that was trained to halt is the same weights with nobody halted."""
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
    mean["seeds"] = grouped.size()
    found = mean.reset_index()
    apart = frame("differences")
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
