"""Labelled examples of a task: rows from files or the hub, a template that makes prompts of them, the words a causal model chooses
among, and the metrics that judge its answers, by GLUE's and SuperGLUE's own definitions.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from quicksilver.data.sources import below, from_hub, json_lines
from quicksilver.data.spec import DatasetConfig, Part, SplitConfig, TaskConfig
from quicksilver.runtime.errors import ConfigError, installing
from quicksilver.runtime.reading import read_bytes

BETWEEN = "\n\n"  # examples of one text, and the shots before a prompt
REGRESSION = "pearson_spearman"


@dataclass(frozen=True)
class Example:
    """One labelled row.

    Attributes:
        prompt: the text before the choice.
        choices: the continuations chosen among, each with its leading space.
        gold: number of the right one; of a regression the value.
        row: number of the row in its split.
        group: what is scored together with it (a question of MultiRC); empty where examples stand alone.
    """

    prompt: str
    choices: tuple[str, ...]
    gold: float
    row: int
    group: str = ""


@dataclass(frozen=True)
class TaskExamples:
    """The scored examples of a task, and where they were read."""

    task: TaskConfig
    examples: tuple[Example, ...]
    source: str

    @property
    def digest(self) -> str | None:
        """Of what decides a score and does not stand in `text_of`: wrong choices, groups, values of a regression; None: there is none."""
        task = self.task
        if not (task.choices or task.group or REGRESSION in task.metrics):
            return None
        said = [(one.choices, one.gold, one.group) for one in self.examples]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def read_task(config: DatasetConfig, part: Part = "test", *, root: Path | None = None, cache: Path | None = None) -> TaskExamples:
    """The labelled examples of a task: the validation split (`test`), or those that are fitted and calibrated on (`calibration`).
    Relative files lie in `root`; `cache` keeps what was streamed from the hub. Raises ConfigError: no task, no such file, a hub
    that cannot be reached, a row that the template or the labels do not fit."""
    task = config.task
    if task is None:
        raise ConfigError(f"dataset={config.name} has no labelled examples: take a task, such as dataset=sst2.")
    _check(config.name, task)
    split = task.validation if part == "test" else task.train
    rows, source = _rows(config, task, split, part, root, cache)
    shots = _shots(config, task, root, cache) if part == "test" and task.shots else ""
    try:
        found = [example(task, row, number) for number, row in rows]
    except ConfigError as error:
        raise ConfigError(f"dataset={config.name} ({source}): {error}") from error
    if not found:
        raise ConfigError(f"dataset={config.name}: {source} has no row from {split.first_row} on.")
    if part == "test" and task.examples is not None and task.examples < len(found):
        step = len(found) / task.examples
        found = [found[int(i * step)] for i in range(task.examples)]
    return TaskExamples(task, tuple(replace(one, prompt=shots + one.prompt) for one in found), source)


def text_of(examples: Iterable[Example]) -> str:
    """Prompts with their right answers, as one text."""
    return BETWEEN.join(one.prompt + answer(one) for one in examples)


def answer(one: Example) -> str:
    """The right choice; of a regression the nearest."""
    return one.choices[min(max(round(one.gold), 0), len(one.choices) - 1)]


def example(task: TaskConfig, row: Mapping[str, Any], number: int) -> Example:
    """A row as an example. Raises ConfigError: a field that the row lacks, an empty text, a label that is none, or outside
    `task.labels`."""
    row = {**row, **row["target"]} if isinstance(row.get("target"), Mapping) else row
    plain = {name: value.strip() if isinstance(value, str) else value for name, value in row.items()}
    fields = {name: task.rename.get(name, {}).get(str(row[name]), value) for name, value in plain.items()}
    prompt = _filled("dataset.task.template", task.template, fields, row, number)
    texts = [prompt, *(str(fields.get(name, "")) for name in task.choices)]
    for name in task.choices:
        if name not in row:
            raise ConfigError(f"dataset.task.choices names {name!r}, and row {number} has {', '.join(sorted(row))}.")
    used = [str(fields[name]) for name in _fields(task.template)]
    if not all(text.strip() for text in (*used, *texts)):
        raise ConfigError(f"row {number} is empty where dataset.task.template or choices need a text: {dict(row)!r:.120}.")
    group = _filled("dataset.task.group", task.group, fields, row, number) if task.group else ""
    choices = tuple(f" {text}" for text in texts[1:]) if task.choices else tuple(task.labels)
    return Example(texts[0], choices, _gold(task, row, number), number, group)


def _fields(template: str) -> list[str]:
    """`premise` of `{premise}` and of `{premise[0]}`."""
    return [name.split("[")[0].split(".")[0] for _, name, _, _ in string.Formatter().parse(template) if name]


def _filled(key: str, template: str, fields: Mapping[str, Any], row: Mapping[str, Any], number: int) -> str:
    for name in _fields(template):
        if name not in fields:
            raise ConfigError(f"{key} names {{{name}}}, and row {number} has {', '.join(sorted(map(str, row)))}.")
    try:
        return template.format(**fields)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={template!r} cannot be filled from row {number}: {type(error).__name__}: {error}.") from error


def _gold(task: TaskConfig, row: Mapping[str, Any], number: int) -> float:
    if task.label not in row:
        there = f"row {number} has no {task.label!r}, only {', '.join(sorted(map(str, row)))}"
        remedy = "Name the column with dataset.task.label=…, or take a labelled split."
        raise ConfigError(f"{there}: this split has no labels. {remedy}")
    value = row[task.label]
    spelled = str(value).strip().lower()
    if spelled in ("", "-1", "none"):
        raise ConfigError(f"row {number} has the label {value!r}: this split has no labels (GLUE keeps those of test splits).")
    if REGRESSION in task.metrics:
        try:
            return float(spelled)
        except ValueError:
            raise ConfigError(f"row {number}: the label {value!r} is no number, and the task is a regression.") from None
    if task.choices:
        if spelled.isdecimal() and int(spelled) < len(task.choices):
            return int(spelled)
    else:
        for number_of, spellings in enumerate(task.labels.values()):
            if spelled in (one.lower() for one in spellings):
                return number_of
    there = ", ".join(one for spellings in task.labels.values() for one in spellings) or f"0 to {len(task.choices) - 1}"
    raise ConfigError(f"row {number}: the label {value!r} is none of dataset.task.labels ({there}).")


def _check(name: str, task: TaskConfig) -> None:
    if not task.template.strip():
        raise ConfigError(f"dataset.task.template is empty: dataset={name} needs a prompt with {{field}} of its rows.")
    if bool(task.choices) == bool(task.labels) or len(task.choices or task.labels) < 2:
        raise ConfigError("dataset.task: give labels (two or more words with their spellings), or choices (two or more fields).")
    try:
        _fields(task.template)
    except ValueError as error:
        raise ConfigError(f"dataset.task.template={task.template!r} is no template: {error}.") from error
    wrong = next((metric for metric in task.metrics if metric not in METRICS), None)
    if wrong is not None or not task.metrics:
        problem = " is empty:" if wrong is None else f": there is no {wrong!r};"
        raise ConfigError(f"dataset.task.metrics{problem} there are {', '.join(METRICS)}.")
    for split in (task.train, task.validation):
        if split.end_row is not None and split.end_row <= split.first_row:
            raise ConfigError(f"dataset.task: rows {split.first_row} to {split.end_row} are none: give end_row above first_row.")


def _shots(config: DatasetConfig, task: TaskConfig, root: Path | None, cache: Path | None) -> str:
    """The first training rows, as many of each label as of the others, in their order."""
    rows, _ = _rows(config, task, task.train, "calibration", root, cache)
    most = -(-task.shots // max(len(task.labels), 1))
    taken: list[Example] = []
    for one in (example(task, row, number) for number, row in rows):
        if sum(other.gold == one.gold for other in taken) < most:
            taken.append(one)
        if len(taken) == task.shots:
            break
    if len(taken) < task.shots:
        raise ConfigError(f"dataset.task.shots={task.shots}: the training rows have {len(taken)} that are balanced by label.")
    return "".join(one.prompt + answer(one) + BETWEEN for one in taken)


# --- where rows come from -------------------------------------------------------------------------------------------------------


def _rows(
    config: DatasetConfig, task: TaskConfig, split: SplitConfig, part: Part, root: Path | None, cache: Path | None
) -> tuple[Iterator[tuple[int, dict[str, Any]]], str]:
    """Numbered rows of a split, and where they were read."""
    paths = [below(root, name) for name in split.files]
    missing = next((path for path in paths if not path.is_file()), None)
    if paths and missing is None:
        rows: Iterable[dict[str, Any]] = chain.from_iterable(_file_rows(path, task.columns) for path in paths)
        source = " + ".join(map(str, paths))
    else:
        key = "dataset.task." + ("validation" if part == "test" else "train")
        if config.hub.id is None:
            remedy = f"Give data.root=/folder (QUICKSILVER_DATA), or {key}.files=[/path/of.tsv]."
            without = f"there is no file {missing} for {key}. {remedy}"
            nowhere = f"{key} has no file and dataset.hub no id: give one of them."
            raise ConfigError(f"dataset={config.name}: {without if missing else nowhere}")
        files, other = f"give {key}.files=[/path/of.tsv or .jsonl]", "or take a task that data.root holds, such as dataset=rte"
        name = split.hub or key.rpartition(".")[2]
        content, source = from_hub(
            config, name, lambda rows: "".join(json.dumps(dict(row)) + "\n" for row in rows).encode(),
            offline=("unavailable offline", files, other), kept=cache and cache / "rows.jsonl", wanted=[asdict(config.hub), name],
            what="" if missing is None else f": there is no file {missing}, and of the hub's {config.hub.id}",
        )  # fmt: skip
        rows = _jsonl(Path(source), content.decode("utf-8"))
    return islice(enumerate(rows), split.first_row, split.end_row), source


def _file_rows(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of a tsv file (with a header, or `columns`) or of a jsonl file. Raises ConfigError: a file that cannot be read, a line
    that is no row."""
    try:
        content = read_bytes(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a table of UTF-8 text: {error}.") from error
    if path.suffix == ".jsonl":
        yield from _jsonl(path, content)
        return
    # Quotes are characters here, as in GLUE's own files.
    table = csv.DictReader(io.StringIO(content, newline=""), fieldnames=columns or None, delimiter="\t", quoting=csv.QUOTE_NONE)
    for row in table:
        yield {str(name): value for name, value in row.items() if name is not None and value is not None}


def _jsonl(path: Path, content: str) -> Iterator[dict[str, Any]]:
    for row in json_lines(path, content, dict, "Each line must be a json object."):
        yield from _multirc(row) if isinstance(row.get("passage"), dict) and "questions" in row["passage"] else (row,)


def _multirc(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A passage with its questions and their answers, as the hub has it: a row an answer."""
    for q, question in enumerate(row["passage"]["questions"]):
        asked = {"paragraph": row["passage"]["text"], "question": question["question"]}
        for a, one in enumerate(question["answers"]):
            place = {"paragraph": row.get("idx"), "question": q, "answer": a}
            yield {**asked, "answer": one["text"], "label": one.get("label"), "idx": place}


# --- metrics, over the last axis: a bootstrap asks for thousands of draws at once -----------------------------------------------

Numbers = NDArray[np.float64]
Metric = Callable[[Numbers, Numbers], Numbers]


def accuracy(gold: Numbers, predicted: Numbers) -> Numbers:
    """Share that is right: (…, E) to (…)."""
    return (gold == predicted).mean(-1)


def f1(gold: Numbers, predicted: Numbers, of: float = 1.0) -> Numbers:
    """F1 of the class `of`, 0 where it is neither there nor predicted: (…, E) to (…)."""
    both = ((gold == of) & (predicted == of)).sum(-1)
    either = (gold == of).sum(-1) + (predicted == of).sum(-1)
    return 2 * both / np.maximum(either, 1)


def f1_macro(gold: Numbers, predicted: Numbers) -> Numbers:
    """Mean F1 of the classes that are there or predicted: (…, E) to (…)."""
    classes = np.union1d(gold, predicted)
    there = np.stack([((gold == one) | (predicted == one)).any(-1) for one in classes])
    scores = np.stack([f1(gold, predicted, one) for one in classes])
    return (scores * there).sum(0) / there.sum(0)


def pearson(gold: Numbers, predicted: Numbers) -> Numbers:
    """Correlation, 0 where one side does not vary: (…, E) to (…). Of 0 and 1 it is Matthews' correlation of two classes."""
    x, y = (values - values.mean(-1, keepdims=True) for values in (gold, predicted))
    scale = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return np.where(scale > 1e-12, (x * y).sum(-1) / np.maximum(scale, 1e-12), 0.0)


def spearman(gold: Numbers, predicted: Numbers) -> Numbers:
    """Correlation of ranks: (…, E) to (…)."""
    from scipy.stats import rankdata

    return pearson(rankdata(gold, axis=-1), rankdata(predicted, axis=-1))


# What `dataset.task.metrics` may name -> the numbers it gives; the first is the task's own score.
METRICS: Mapping[str, Mapping[str, Metric]] = {
    "accuracy": {"accuracy": accuracy}, "matthews": {"matthews": pearson}, "f1": {"f1": f1}, "f1_macro": {"f1_macro": f1_macro},
    "pearson_spearman": {"pearson": pearson, "spearman": spearman}, "multirc": {"f1a": f1},
}  # fmt: skip


def metric(names: Sequence[str]) -> tuple[str, Metric]:
    """Name and function of a task's own score."""
    return next(iter(METRICS[names[0]].items()))


def scored(names: Sequence[str], gold: ArrayLike, predicted: ArrayLike, groups: Sequence[str] = ()) -> dict[str, float]:
    """All numbers of some metrics by name, the task's own score first, of (E,) class numbers or values of a regression. `groups`,
    (E,), are judged together: `multirc` adds the share of groups in which all is right."""
    y, z = np.asarray(gold, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    found = {key: float(of(y, z)) for name in names for key, of in METRICS[name].items()}
    if "multirc" in names:
        found["exact_match"] = float(pd.Series(y == z).groupby(list(groups)).all().mean())
    return found


def load_metric(metric: str) -> Callable[[Sequence[float], Sequence[float]], dict[str, float]]:
    """A metric of `evaluate`, to be given gold and predicted, (E,) class numbers or values of a regression; it gives its numbers
    by name. `metric` is the path of a metric script, or a name of the hub with its configuration behind a slash: `accuracy`,
    `glue/sst2`. Raises ConfigError: `evaluate` is not installed, or the metric cannot be had; when called: it refuses the
    answers."""
    asked = f"measure.task.evaluate={metric}"
    try:
        import evaluate
    except ModuleNotFoundError as error:
        raise ConfigError(f"{asked} needs {error.name}, which is not installed: {installing('tasks')}.") from error
    script = metric.endswith(".py")
    if script and not Path(metric).is_file():
        raise ConfigError(f"{asked}: there is no such file.")
    name, _, configuration = (metric, "", "") if script else metric.partition("/")
    try:
        module = evaluate.load(name, config_name=configuration or None, module_type="metric", keep_in_memory=True)
    except Exception as error:  # whatever a script, a hub or the lack of one raises
        raise ConfigError(
            f"{asked} cannot be loaded ({_first_line(error)}). Without a network give the path of a metric script, or leave it out: "
            "score and scores are computed by this package, as scikit-learn computes them."
        ) from error

    def evaluated(gold: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
        kind: Any = int if all(float(one).is_integer() for one in (*gold, *predicted)) else float
        try:
            found = module.compute(references=[kind(one) for one in gold], predictions=[kind(one) for one in predicted])
        except Exception as error:  # the script's own
            raise ConfigError(f"{asked} refuses these answers: {_first_line(error)}.") from error
        return {str(name): float(value) for name, value in found.items()}

    return evaluated


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"
