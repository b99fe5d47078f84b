"""Figures 3 and 18: score lost on a task when only its function words, or only its content words, stop at one depth.

The paper's "classification accuracy of token t" is defined nowhere: a task has one answer an example. Here all tokens of one class stop after
layer d and all others go on, for every d by itself, and as many random tokens stop beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from quicksilver.measure.task import TaskResult
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, legend_below, letters, panels, style, whiskers
from quicksilver.report.table import interval_columns, numbers, signed
from quicksilver.runtime.errors import ConfigError

from . import scores

READS = scores.READ
TASKS = ("sst2", "cola", "rte")  # what the model learned, and the two that the paper names
WITH_NULL = ("sst2",)  # elsewhere there is nothing to lose, to whomever
CLASSES = ("function", "content")
DEPTHS = (0.25, 0.5, 0.75)
MODULE = "word_class_halting"
_COLOURS = {"function": PALETTE[3], "content": PALETTE[1]}
_COLUMNS = [
    *("task", "metric", "words", "random", "depth_layers"),
    *("lost", "lost_low", "lost_high", "smallest_seen", "flipped", "mcnemar_p"),
    *("beyond_random", "beyond_random_low", "beyond_random_high", "executed_flops_saved_pct", "score", "dense_score"),
    *("above_chance", "examples", "record"),
]


def rows() -> list[Row]:
    """Every class at every depth; of the task that has something to lose, its null too."""
    found = []
    for task, words, depth, random in itertools.product(TASKS, CLASSES, DEPTHS, (False, True)):
        if random and task not in WITH_NULL:
            continue
        said = f"{'as many random tokens as ' if random else ''}{words} words stop after {depth:.0%} of the layers"
        key = f"{words}.{depth}{'.random' if random else ''}"
        options = {"halted": words, "depth": depth, "at_random": str(random).lower()}
        overrides = [f"modules.{MODULE}.{name}={value}" for name, value in options.items()]
        found.append(scores.row(task, key, said, (MODULE,), overrides))
    return found


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row a record: what was lost, paired by example, and what was lost beyond the null."""
    nulls = {one.row.key: one.record for one in outcomes}
    found = []
    for one in outcomes:
        if one.record is None or one.dense is None:
            continue
        key, random = one.row.key.removesuffix(".random"), one.row.key.endswith(".random")
        task, words, depth = key.split(".", 2)
        row = {**scores.measured(one.record, one.dense), "dense_score": 100 * one.dense.measured("task", TaskResult).score}
        row |= {"task": task, "words": words, "random": random, "depth_layers": round(float(depth) * one.record.model.layers)}
        null = nulls.get(f"{one.row.key}.random")
        found.append(row | (interval_columns("beyond_random", scores.lost(one.record, null)) if null is not None else {}))
    return pd.DataFrame(found, columns=_COLUMNS)


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """One picture a task in which the dense model is above chance; where it is in none, all of them in grey."""
    drawn = frame(outcomes)
    if drawn.empty:
        raise ConfigError("no run has a record, and there is nothing to draw without one")
    there = [task for task in TASKS if (drawn["task"] == task).any()]
    tasks = [task for task in there if drawn.loc[drawn["task"] == task, "above_chance"].all()] or there
    with style():
        drawing, axes = panels(1, len(tasks), size=(4 + 3.4 * len(tasks), 4.0))
        for axis, task in zip(axes[0], tasks, strict=True):
            _draw(axis, drawn[drawn["task"] == task], scores.TASKS[task][0])
        axes[0, 0].set_ylabel("points lost (100 × the metric)")
        letters(drawing, 8.5)
        legend_below(drawing, axes[0, 0].get_legend_handles_labels()[0], ncols=2, fontsize=8.5)
    return Figure(
        name, "Figures 3 and 18: one class of words stops", drawn, drawing, _caption(drawn, outcomes), finding=_finding(drawn)
    )


def _finding(drawn: pd.DataFrame) -> str:
    """Whether a class of words is another loss than as many random tokens; nothing where no run has a null."""
    beyond = drawn[drawn["beyond_random"].notna()]
    apart = int(((beyond["beyond_random_low"] > 0) | (beyond["beyond_random_high"] < 0)).sum())
    told = f"differs from stopping random tokens in {apart} of {len(beyond)} cases"
    said = told if apart else "is not measurably different from stopping random tokens"
    return "" if beyond.empty else f"Stopping one class of words {said}"


def _draw(axis: Axes, rows: pd.DataFrame, title: str) -> None:
    chance = not bool(rows["above_chance"].iloc[0])
    for i, ((words, random), line) in enumerate(rows.groupby(["words", "random"], sort=False)):
        place = CLASSES.index(str(words))
        look: dict[str, Any] = {"color": GREY if chance else _COLOURS[str(words)], "markersize": 5, "capsize": 2.5}
        look |= {
            "marker": MARKERS[place + 2 * random],
            "linestyle": DASHES[2 if random else place],
            "alpha": 0.75 if random else 1.0,
        }
        error = whiskers(line["lost"], line["lost_low"], line["lost_high"])
        label = f"as many random tokens as {words} words" if random else f"{words} words"
        axis.errorbar(line["depth_layers"] + 0.25 * (i - 1.5), line["lost"], yerr=error, label=label, **look)
    axis.axhline(0, color="black", linewidth=0.8, marker="")
    axis.set(title=f"{title}{' (dense is at chance)' if chance else ''}", xlabel="layer after which they stop")
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, -1), max(high, 1))  # a hundredth of a point is no scale
    axis.set_xticks(sorted(set(rows["depth_layers"])))


def _caption(drawn: pd.DataFrame, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    said = []
    for task, rows in drawn.groupby("task", sort=False):
        title, first = scores.TASKS[str(task)][0], rows.iloc[0]
        if not first["above_chance"]:
            dense = f"dense {first['metric']} {first['dense_score']:.1f}"
            said.append(f"{title}: {dense} is not above chance, so nothing can be lost there.")
            continue
        chosen = rows[~rows["random"].astype(bool)].to_dict("records")
        parts = [f"{one['words']} after layer {one['depth_layers']} {_interval(one, 'lost')}" for one in chosen]
        said.append(f"{title}, {first['examples']} examples, dense {first['dense_score']:.1f}, points lost: {', '.join(parts)}.")
        beyond = [one for one in chosen if pd.notna(one["beyond_random"])]
        if beyond:
            parts = [f"{one['words']} {one['depth_layers']} {_interval(one, 'beyond_random')}" for one in beyond]
            said.append(f"Lost beyond as many random tokens: {', '.join(parts)}.")
    missing = len(outcomes) - len(drawn)
    above = drawn.groupby("task", sort=False)["above_chance"].first()
    chance = [scores.TASKS[str(task)][0] for task, one in above.items() if not one] if above.any() else []
    return (
        *((f"Not drawn: {' and '.join(chance)}, where the dense model is not above chance.",) if chance else ()),
        "Bars: 95% intervals, paired by example. So few examples cannot show a loss as small as the paper's 0.2 points.",
        "Function words: a closed list of English, whole words of one token; content words: all other tokens with letters; the first token "
        "and the deciding last one of a prompt never stop. Stopped tokens are dropped: later layers do not see them.",
        *said,
        *((f"{missing} of {len(outcomes)} runs have no record.",) if missing else ()),
        *provenance.notes(outcomes),
    )


def _interval(row: Mapping[Any, Any], name: str) -> str:
    value, low, high = map(signed, numbers(row, name))
    return f"{value} [{low} {high}]"
