"""GLUE and SuperGLUE under adaptive inference: what a task lost, paired by example, the smallest loss that could have been seen; Table 4, and Figures 3 and 18.

A causal model that was fine-tuned on label words answers by the likeliest of them. The paper names no model, prompt, head or split.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from quicksilver.data.tasks import metric
from quicksilver.measure.task import EXAMPLES, TaskResult
from quicksilver.records.record import Record
from quicksilver.records.stats import bootstrap
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.comparison import MEASURED, technique_cell
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, legend_below, letters, panels, style
from quicksilver.report.table import ENDS, Column, Panel, Table, filled, interval_columns, number, signed, with_ends
from quicksilver.runtime.errors import ConfigError

from .. import drawing as draw

READ = (EXAMPLES,)
PANEL = "tasks"
DENSE = "dense"
# dataset in conf/dataset -> what the paper calls it, claim, further overrides
TASKS = {
    "sst2": ("SST-2", "table4.sst2", ()),
    "cola": ("CoLA", "table4.cola", ()),
    "rte": ("RTE", "table4.rte", ()),
    "qnli": ("QNLI", "table4.qnli", ("dataset.task.examples=500",)),
    "boolq": ("BoolQ", "table4.boolq", ("dataset.task.examples=250",)),
}
MODEL = "reference-llama-tasks"
MODELS = {"sst2": "reference-llama-sst2"}  # fine-tuned further on one task: on the others it would forget
_PAPER = ("halting", "kv_skipping", "token_fusion", "adaptive_quantization")
_OLDEST = "[{before: 0.2, share: 0.453, signal: position, missing_kv: drop}]"
# key -> what is printed, modules, overrides. Ours, the oldest and random tokens stop at one depth, as many of them.
SYSTEMS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    DENSE: ("Dense", (), ()),
    "paper": ("The paper's rules, all four", _PAPER, ()),
    "attention": ("Ours: least attended stop", ("halting_attention",), ()),
    "oldest": ("Oldest stop", ("staged_halting",), (f"modules.staged_halting.stages={_OLDEST}",)),
    "random": ("Random tokens stop", ("halting_attention",), ("modules.halting.signal=random",)),
}
CONFIDENT = 0.05  # a task is above chance where McNemar's p against the majority class is below this
_POWER_80 = 1.96 + 0.84  # standard errors that a two-sided test at 5% sees four times in five


def row(task: str, key: str, technique: str, modules: tuple[str, ...], overrides: Sequence[str]) -> Row:
    """A run of a task under these modules, by the model that was fine-tuned for it unless a person names another."""
    title, _, more = TASKS[task]
    always = (f"dataset={task}", *more, "measure=task", "protocol=continuation", f"modules=[{','.join(modules)}]")
    model = f"model={MODELS.get(task, MODEL)}"
    return Row(PANEL, title, f"{task}.{key}", technique, (*always, *overrides), modules, defaults=(model,))


def rows() -> list[Row]:
    """Every task under every system."""
    return [row(task, system, *said) for task in TASKS for system, said in SYSTEMS.items()]


@cache
def examples(folder: Path) -> pd.DataFrame:
    """examples.parquet of a record."""
    return pd.read_parquet(folder / EXAMPLES)


class Lost(NamedTuple):
    """Score lost against dense, in points (100 × the metric), with its 95% interval, paired by example.

    Attributes:
        smallest: the loss that a test of this many examples sees four times in five.
        p: McNemar's, exact: of the examples that one of both gets right and the other wrong.
        flipped: examples whose answer changed.
    """

    value: float
    low: float
    high: float
    smallest: float
    p: float
    flipped: int


def lost(record: Record, dense: Record) -> Lost:
    """What `record` lost against `dense` on the same examples.
    Raises ConfigError: the two did not answer the same examples."""
    ours, theirs = examples(record.path), examples(dense.path)
    if not (ours["row"].equals(theirs["row"]) and ours["gold"].equals(theirs["gold"])):
        raise ConfigError(f"{record.path} and {dense.path} answered different examples: they do not pair.")
    _, of = metric(record.config["dataset"]["task"]["metrics"])
    gold, ran, was = (np.asarray(x, dtype=np.float64) for x in (ours["gold"], ours["prediction"], theirs["prediction"]))
    found = bootstrap(lambda y, z, d: 100 * (of(y, d) - of(y, z)), gold, ran, was, resamples=4000)
    spread = (found.high - found.low) / (2 * 1.96)
    value, low, high = map(float, found)
    return Lost(value, low, high, _POWER_80 * float(spread), mcnemar(was == gold, ran == gold), int((ran != was).sum()))


def mcnemar(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> float:
    """Exact two-sided p of as unequal a split of the discordant examples; 1 where there is none. first, second: (E,) bool, right or not."""
    from scipy.stats import binomtest

    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    both = only_first + only_second
    return 1.0 if both == 0 else float(binomtest(only_first, both, 0.5).pvalue)


def above_chance(dense: Record) -> bool:
    """Whether the dense model beats the most frequent answer: McNemar for accuracy, the bootstrap's lower end for other metrics."""
    frame = examples(dense.path)
    names = dense.config["dataset"]["task"]["metrics"]
    gold, predicted = (np.asarray(frame[name], dtype=np.float64) for name in ("gold", "prediction"))
    if names[0] == "accuracy":
        most = frame["gold"].mode().iloc[0]
        right, base = predicted == gold, gold == most
        return bool(right.mean() > base.mean() and mcnemar(right, base) < CONFIDENT)
    _, of = metric(names)
    return bool(bootstrap(of, gold, predicted, resamples=2000).low > 0)


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row a task and system; scores and losses in points, operations an example."""
    found = []
    for outcome in outcomes:
        task, system = outcome.row.key.split(".")
        row: dict[str, Any] = comparison.described(outcome) | {"task": task, "system": system}
        if outcome.record is not None and outcome.dense is not None:
            row |= measured(outcome.record, outcome.dense)
        found.append(row)
    return pd.DataFrame(found, columns=COLUMNS)


def measured(record: Record, dense: Record) -> dict[str, Any]:
    """Score and loss of a run in points, operations an example, as columns of a frame."""
    result, base = record.measured("task", TaskResult), dense.measured("task", TaskResult)
    row: dict[str, Any] = {
        **{"metric": result.metric, "score": 100 * result.score, "majority": 100 * result.majority, "examples": result.examples},
        **{"truncated": result.truncated, "above_chance": above_chance(dense), "deciding_depth": result.deciding_depth},
        **{"layers": record.model.layers, "model": record.model.name, "weights_digest": record.model.weights_digest},
        **{"data": record.data.name, "record": record.fingerprint, "dense_record": dense.fingerprint},
    }
    differs = record.fingerprint != dense.fingerprint
    for ledger in LEDGERS:
        flops, of_dense = (getattr(one, f"{ledger}_flops") for one in (result, base))
        row |= {f"{ledger}_flops": flops / result.examples}
        row |= {f"{ledger}_flops_saved_pct": 100 * (1 - flops / of_dense)} if differs else {}
    if differs:
        found = lost(record, dense)
        row |= interval_columns("lost", found) | {"smallest_seen": found.smallest, "mcnemar_p": found.p, "flipped": found.flipped}
    return row


LEDGERS = ("executed", "nominal", "paper")
COLUMNS = [
    *("panel", "section", "key", "task", "system", "technique", "status"),
    *("metric", "score", "majority", "above_chance", "examples"),
    *("lost", "lost_low", "lost_high", "smallest_seen", "mcnemar_p", "flipped", "truncated", "deciding_depth", "layers"),
    *(*(f"{ledger}_flops_saved_pct" for ledger in LEDGERS), *(f"{ledger}_flops" for ledger in LEDGERS)),
    *("model", "weights_digest", "data", "record", "dense_record"),
]


# --- claims -----------------------------------------------------------------------------------------------------------------------
def loss_of(key: str) -> Callable[[Mapping[str, Outcome]], Estimate | None]:
    """A claim's estimate: points lost by the row `key`.
    Raises ConfigError (when asked): the dense model is not above chance, so that there is nothing to lose."""

    def of(outcomes: Mapping[str, Outcome]) -> Estimate | None:
        record, dense = outcomes[key].record, outcomes[key].dense
        if record is None or dense is None:
            return None
        if not above_chance(dense):
            base = dense.measured("task", TaskResult)
            raise ConfigError(
                f"dense {base.metric} {100 * base.score:.1f} on {base.examples} examples is not above chance (majority class "
                f"{100 * base.majority:.1f}): there is nothing to lose"
            )
        return Estimate.of(lost(record, dense))

    return of


def score(record: Record) -> Estimate:
    """A claim's estimate: the score in points, with a bootstrap interval over examples."""
    answers, (_, scored) = examples(record.path), metric(record.config["dataset"]["task"]["metrics"])
    gold, predicted = (np.asarray(answers[name], dtype=np.float64) for name in ("gold", "prediction"))
    return Estimate.of(bootstrap(lambda y, z: 100 * scored(y, z), gold, predicted, resamples=2000))


def _answers() -> dict[str, AnsweredBy]:
    """What a task loses, and its score, are answered by the paper's four rules together; its dense score by dense inference."""
    found: dict[str, AnsweredBy] = {}
    for task, (title, claim, _) in TASKS.items():
        for quantity, system in (("score_drop", "paper"), ("dense_score", DENSE), ("quicksilver_score", "paper")):
            key = f"{task}.{system}"
            estimate: dict[str, Any] = {"of": loss_of(key)} if quantity == "score_drop" else {"of_record": score}
            found[f"{claim}.{quantity}"] = AnsweredBy(PANEL, key, note=f"{title}: {SYSTEMS[system][0]}", **estimate)
    return found  # what the paper says of most or of all tasks has no answer here: one task alone is above chance


# --- Table 4 ----------------------------------------------------------------------------------------------------------------------
LEGEND = (
    "score: accuracy, of CoLA Matthews' correlation, in points (× 100); below it that of the most frequent answer. A task on which the dense "
    "model is not above it (McNemar, of CoLA the bootstrap, 5%) says `chance`: there is nothing to lose, and its claim has no verdict.",
    "lost: dense score minus score with its 95% interval, paired by example; below it the smallest loss that so many examples show four times "
    "in five. p: McNemar's, exact; below it how many answers changed.",
    "saved: executed operations of prompts and choices, signals included, in percent of dense; below it by the paper's ledger (Appendix J).",
    "depth: layers that the last token of a prompt goes through, mean: the token that decides.",
    "Ours, the oldest and random tokens: 45% of a prompt's tokens stop at a fifth of the depth and are dropped; they differ in which tokens stop.",
    "The paper: its model, prompt, head and split are not named; its caption says under 1%, its text under 2%, and its CoLA is −1.0.",
    "Prompts of equal length go together (at most 8), so nothing is padding; the paper pads to the longest of a batch. No time is given: "
    "prompts of a few dozen tokens are dominated by what a call costs, whatever is halted.",
)


@artefact(rows, READ, _answers())
def table04_tasks(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table 4: GLUE and SuperGLUE under the paper's rules, ours, and controls: score lost, paired by example, and operations saved."""
    found = frame(outcomes)
    for quantity in ("dense_score", "quicksilver_score", "score_drop"):
        found[f"reported_{quantity}"] = [reported()[TASKS[task][1]].values[quantity] for task in found["task"]]
    lost_and_seen = with_ends("lost", "+.1f", between=" ") + "\nseen from"
    saved = "{executed_flops_saved_pct:+.1f}\npaper {paper_flops_saved_pct:+.1f}"
    columns = (
        Column("", "system", technique_cell, align="left"),
        Column("paper reports", "score", _reported, expendable=3),
        Column("measured", "score", _score),
        Column("measured", "lost", _if_measured("lost", f"{lost_and_seen} {{smallest_seen:.1f}}", "{examples:.0f} examples")),
        Column("measured", "p", _p, expendable=2),
        Column("saved %", "operations", _if_measured("executed_flops_saved_pct", saved, "{executed_flops:1e-9*.2f} G")),
        Column("", "depth", "{deciding_depth:.1f} of {layers:.0f}", expendable=1),
    )
    splits = {}
    for one in outcomes:
        if one.record is not None:
            answers = examples(one.record.path)
            cut = f" ({truncated} cut on the left to fit the context)" if (truncated := int(answers["truncated"].sum())) else ""
            splits[one.row.section] = f"{one.row.section} {len(answers)}{cut}"
    of = f"Labelled rows that nothing was trained on: {', '.join(splits.values())}. MNLI is read from the hub (dataset=mnli)."
    title = "The likeliest label word after the prompt; modules may look ahead inside it"
    panel = Panel(PANEL, title, columns, (*([of] if splits else []), *provenance.notes(outcomes)))
    return Table(name, "Tasks of GLUE and SuperGLUE under adaptive inference", found, (panel,), (*findings(found), *LEGEND))


def _reported(row: Mapping[str, Any]) -> tuple[str, ...]:
    quantity = {DENSE: "dense_score", "paper": "quicksilver_score"}.get(row["system"])
    return ("" if quantity is None else f"{row[f'reported_{quantity}']:.1f}",)


def _score(row: Mapping[str, Any]) -> tuple[str, ...]:
    below = f"\n{'majority' if row['above_chance'] is True else 'chance'} {{majority:.1f}}"
    return filled("{score:.1f}" + below * (row["system"] == DENSE), row)


def _if_measured(key: str, form: str, other: str) -> Callable[[Mapping[str, Any]], tuple[str, ...]]:
    """A cell of the first form where the row has that number, else of the other."""
    return lambda row: filled(other if number(row, key) is None else form, row)


def _p(row: Mapping[str, Any]) -> tuple[str, ...]:
    p = number(row, "mcnemar_p")
    return ("",) if p is None else ("<0.001" if p < 0.001 else f"{p:.3f}", f"{row['flipped']:.0f} changed")


def findings(frame: pd.DataFrame) -> tuple[str, ...]:
    """What the rows say together, of the tasks that can lose something."""
    measured = frame[frame["status"] == MEASURED]
    above, dense = measured["above_chance"].astype(bool), measured["system"] == DENSE
    chance = measured.loc[dense & ~above, "section"]
    said = []
    for technique, members in measured[~dense & above].groupby("technique", sort=False):
        parts = [
            f"{one.section} {signed(-one.lost)} [{signed(-one.lost_high)} {signed(-one.lost_low)}] at {one.executed_flops_saved_pct:.0f}% saved"
            for one in members.itertuples()
        ]
        said.append(f"{technique}: {', '.join(parts)}.")
    return (*said, *([f"Not above chance here, and so without a verdict: {', '.join(chance)}."] if len(chance) else []))


# --- Figures 3 and 18 ------------------------------------------------------------------------------------------------------------
# The paper's "classification accuracy of token t" is defined nowhere: a task has one answer an example. Here all tokens of one class stop after
# layer d and all others go on, for every d by itself, and as many random tokens stop beside them.
PICTURED = ("sst2", "cola", "rte")  # what the model learned, and the two that the paper names
WITH_NULL = ("sst2",)  # elsewhere there is nothing to lose, to whomever
CLASSES = ("function", "content")
DEPTHS = (0.25, 0.5, 0.75)
MODULE = "word_class_halting"
_COLOURS = {"function": PALETTE[3], "content": PALETTE[1]}
_COLUMNS_3 = [
    *("task", "metric", "words", "random", "depth_layers"),
    *(*(f"lost{end}" for end in ENDS), "smallest_seen", "flipped", "mcnemar_p"),
    *(*(f"beyond_random{end}" for end in ENDS), "executed_flops_saved_pct", "score", "dense_score"),
    *("above_chance", "examples", "record"),
]


def word_class_rows() -> list[Row]:
    """Every class at every depth; of the task that has something to lose, its null too."""
    found = []
    for task, words, depth, random in itertools.product(PICTURED, CLASSES, DEPTHS, (False, True)):
        if random and task not in WITH_NULL:
            continue
        said = f"{'as many random tokens as ' if random else ''}{words} words stop after {depth:.0%} of the layers"
        key = f"{words}.{depth}{'.random' if random else ''}"
        options = {"halted": words, "depth": depth, "at_random": str(random).lower()}
        overrides = [f"modules.{MODULE}.{name}={value}" for name, value in options.items()]
        found.append(row(task, key, said, (MODULE,), overrides))
    return found


def word_class_frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row a record: what was lost, paired by example, and what was lost beyond the null."""
    nulls = {one.row.key: one.record for one in outcomes}
    found = []
    for one in outcomes:
        if one.record is None or one.dense is None:
            continue
        key, random = one.row.key.removesuffix(".random"), one.row.key.endswith(".random")
        task, words, depth = key.split(".", 2)
        row = {**measured(one.record, one.dense), "dense_score": 100 * one.dense.measured("task", TaskResult).score}
        row |= {"task": task, "words": words, "random": random, "depth_layers": round(float(depth) * one.record.model.layers)}
        null = nulls.get(f"{one.row.key}.random")
        found.append(row | (interval_columns("beyond_random", lost(one.record, null)) if null is not None else {}))
    return pd.DataFrame(found, columns=_COLUMNS_3)


@artefact(word_class_rows, READ)
def figure03_18_word_classes(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figures 3 and 18: score lost on a task when only its function words, or only its content words, stop at one depth."""
    drawn = word_class_frame(outcomes)
    if drawn.empty:
        raise ConfigError("no run has a record, and there is nothing to draw without one")
    there = [task for task in PICTURED if (drawn["task"] == task).any()]
    tasks = [task for task in there if drawn.loc[drawn["task"] == task, "above_chance"].all()] or there
    with style():
        drawing, axes = panels(1, len(tasks), size=(4 + 3.4 * len(tasks), 4.0))
        for axis, task in zip(axes[0], tasks, strict=True):
            _draw(axis, drawn[drawn["task"] == task], TASKS[task][0])
        axes[0, 0].set_ylabel("points lost (100 × the metric)")
        letters(drawing, 8.5)
        legend_below(drawing, axes[0, 0].get_legend_handles_labels()[0], ncols=2, fontsize=8.5)
    # Whether a class of words is another loss than as many random tokens; nothing where no run has a null.
    beyond = drawn[drawn["beyond_random"].notna()]
    apart = int(((beyond["beyond_random_low"] > 0) | (beyond["beyond_random_high"] < 0)).sum())
    told = f"differs from stopping random tokens in {apart} of {len(beyond)} cases"
    said = told if apart else "is not measurably different from stopping random tokens"
    finding = "" if beyond.empty else f"Stopping one class of words {said}"
    title = "Figures 3 and 18: one class of words stops"
    return Figure(name, title, drawn, drawing, _caption(drawn, outcomes), finding=finding)


def _draw(axis: Axes, rows: pd.DataFrame, title: str) -> None:
    chance = not bool(rows["above_chance"].iloc[0])
    for i, ((words, random), line) in enumerate(rows.groupby(["words", "random"], sort=False)):
        place = CLASSES.index(str(words))
        look: dict[str, Any] = {"color": GREY if chance else _COLOURS[str(words)], "marker": MARKERS[place + 2 * random]}
        look |= {"linestyle": DASHES[2 if random else place], "alpha": 0.75 if random else 1.0, "markersize": 5, "capsize": 2.5}
        label = f"as many random tokens as {words} words" if random else f"{words} words"
        draw.intervals(axis, line["depth_layers"] + 0.25 * (i - 1.5), line, "lost", label=label, **look)
    draw.horizontal(axis, 0)
    axis.set(title=f"{title}{' (dense is at chance)' if chance else ''}", xlabel="layer after which they stop")
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, -1), max(high, 1))  # a hundredth of a point is no scale
    axis.set_xticks(sorted(set(rows["depth_layers"])))


def _caption(drawn: pd.DataFrame, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    said = []
    for task, rows in drawn.groupby("task", sort=False):
        title, first = TASKS[str(task)][0], rows.iloc[0]
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
    chance = [TASKS[str(task)][0] for task, one in above.items() if not one] if above.any() else []
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
    return filled(with_ends(name, "+.1f", " "), row)[0]
