"""What a task lost under a module, example by example: the systems of Table 4, paired differences, and the smallest that could have been seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from quicksilver.data.scores import metric
from quicksilver.measure.task import EXAMPLES, TaskResult
from quicksilver.records.record import Record, load_record
from quicksilver.records.stats import bootstrap
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.comparison import MEASURED
from quicksilver.runtime.errors import ConfigError

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


def rows() -> list[Row]:
    """Every task under every system."""
    found = []
    for task, (title, _, more) in TASKS.items():
        for system, (technique, modules, overrides) in SYSTEMS.items():
            words = (
                f"dataset={task}",
                *more,
                "measure=task",
                "protocol=continuation",
                f"modules=[{','.join(modules)}]",
                *overrides,
            )
            found.append(
                Row(PANEL, title, f"{task}.{system}", technique, words, modules, defaults=(f"model={MODELS.get(task, MODEL)}",))
            )
    return found


@cache
def examples(folder: Path) -> pd.DataFrame:
    """examples.parquet of a record."""
    return pd.read_parquet(folder / EXAMPLES)


@dataclass(frozen=True)
class Lost:
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

    Raises:
        ConfigError: the two did not answer the same examples.
    """
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
        row: dict[str, Any] = {
            **{
                "panel": outcome.row.panel,
                "section": outcome.row.section,
                "key": outcome.row.key,
                "task": task,
                "system": system,
            },
            **{"technique": outcome.row.technique, "status": outcome.reason or MEASURED},
        }
        if outcome.record is not None and outcome.dense is not None:
            row |= _measured(outcome.record, outcome.dense)
        found.append(row)
    return pd.DataFrame(found, columns=COLUMNS)


def _measured(record: Record, dense: Record) -> dict[str, Any]:
    result, base = record.measured("task", TaskResult), dense.measured("task", TaskResult)
    row: dict[str, Any] = {
        **{"metric": result.metric, "score": 100 * result.score, "majority": 100 * result.majority, "examples": result.examples},
        **{"truncated": result.truncated, "above_chance": above_chance(dense), "deciding_depth": result.deciding_depth},
        "layers": record.model.layers,
        **{
            f"{ledger}_flops": getattr(result, f"{ledger}_flops") / result.examples for ledger in ("executed", "nominal", "paper")
        },
        **{"model": record.model.name, "weights_digest": record.model.weights_digest, "data": record.data.name},
        **{"record": record.fingerprint, "dense_record": dense.fingerprint},
    }
    if record.fingerprint != dense.fingerprint:
        for ledger in ("executed", "nominal", "paper"):
            row[f"{ledger}_flops_saved_pct"] = 100 * (1 - getattr(result, f"{ledger}_flops") / getattr(base, f"{ledger}_flops"))
        found = lost(record, dense)
        row |= {"lost": found.value, "lost_low": found.low, "lost_high": found.high, "smallest_seen": found.smallest}
        row |= {"mcnemar_p": found.p, "flipped": found.flipped}
    return row


COLUMNS = [
    *(
        "panel",
        "section",
        "key",
        "task",
        "system",
        "technique",
        "status",
        "metric",
        "score",
        "majority",
        "above_chance",
        "examples",
    ),
    *("lost", "lost_low", "lost_high", "smallest_seen", "mcnemar_p", "flipped", "truncated", "deciding_depth", "layers"),
    *("executed_flops_saved_pct", "nominal_flops_saved_pct", "paper_flops_saved_pct"),
    *("executed_flops", "nominal_flops", "paper_flops", "model", "weights_digest", "data", "record", "dense_record"),
]


def loss_of(key: str) -> Any:
    """A claim's estimate: points lost by the row `key`.

    Raises (when asked):
        ConfigError: the dense model is not above chance, so that there is nothing to lose.
    """

    def of(outcomes: Mapping[str, Outcome]) -> Estimate | None:
        outcome = outcomes[key]
        if outcome.record is None or outcome.dense is None:
            return None
        if not above_chance(load_record(outcome.dense.path)):
            base = outcome.dense.measured("task", TaskResult)
            raise ConfigError(
                f"dense {base.metric} {100 * base.score:.1f} on {base.examples} examples is not above chance (majority class "
                f"{100 * base.majority:.1f}): there is nothing to lose"
            )
        found = lost(outcome.record, outcome.dense)
        return Estimate(found.value, found.low, found.high)

    return of


def score_of(key: str) -> Any:
    """A claim's estimate: the score of the row `key` in points, with a bootstrap interval over examples."""

    def of(outcomes: Mapping[str, Outcome]) -> Estimate | None:
        record = outcomes[key].record
        if record is None:
            return None
        frame = examples(record.path)
        _, scored = metric(record.config["dataset"]["task"]["metrics"])
        gold, predicted = (np.asarray(frame[name], dtype=np.float64) for name in ("gold", "prediction"))
        return Estimate(*map(float, bootstrap(lambda y, z: 100 * scored(y, z), gold, predicted, resamples=2000)))

    return of
