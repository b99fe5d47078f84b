"""Records of task runs with made-up answers, for tests of what is made of them. Nothing here is a test."""

from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pandas as pd

from quicksilver.experiments.tasks import scores
from quicksilver.measure.task import EXAMPLES, TaskResult
from quicksilver.records.record import Record

COUNT = 200
GOLD = np.arange(COUNT) % 2


def record(
    results: Path, name: str, wrong: np.ndarray[Any, Any], task: str = "sst2", *, dense: bool = False, saved: float = 0.0
) -> Record:
    """A record whose answers are wrong where `wrong` (E,) bool says so."""
    predicted = np.where(wrong, 1 - GOLD, GOLD).astype(float)
    metric = "matthews" if task == "cola" else "accuracy"
    operations = int(1e11 * (1 - saved))
    value, operated = float((predicted == GOLD).mean()), (operations,) * 3
    found = TaskResult(metric, value, {}, 0.5, COUNT, 0, 20 * COUNT, *operated, 0, 16.0 * (1 - saved))
    config = {"name": task, "task": {"metrics": [metric]}}
    made = fakes.make(
        results, name if not dense else "dense continuation", "continuation", per_token=None if dense else 0.01, measured={"task": found},
        config={"seed": 0, "model": {"name": scores.MODEL}, "dataset": config, "measure": {"name": "task"}},
    )  # fmt: skip
    frame = pd.DataFrame({"row": range(COUNT), "gold": GOLD.astype(float), "prediction": predicted, "truncated": False})
    frame.to_parquet(made.path / EXAMPLES)
    return made


def wrong(*some: int) -> np.ndarray[Any, Any]:
    return np.isin(np.arange(COUNT), some)
