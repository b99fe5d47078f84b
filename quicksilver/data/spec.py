"""What a dataset config says. Types of the keys below `dataset`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Optional

from omegaconf import MISSING

# OmegaConf 2.3 reads `Optional[int]` everywhere a config may come from; `int | None` it does not.
# ruff: noqa: UP045

ANNOTATED = {"treebank": "penn", "treebank-upos": "upos", "tagged": "penn"}  # reader -> tag set
MADE_HERE = ("pydoc", "python-source", "far-copy", "far-recall")  # readers of texts that need no file
READERS = (*MADE_HERE, "text", "lines", "documents", *ANNOTATED, "task")
FarContext = Literal["copy", "recall"]
FORMS = ("raw", "tokenised")
Part = Literal["test", "calibration"]
PARTS = ("test", "calibration")


@dataclass
class FilesConfig:
    """Files of a dataset, absolute or relative to data.root; null: none."""

    test: Optional[str] = None
    calibration: Optional[str] = None


@dataclass
class HubDatasetConfig:
    """Where a dataset lies on the hub: id (null: nowhere), config name, commit, and which split is scored or calibrates."""

    id: Optional[str] = None
    config: Optional[str] = None
    revision: Optional[str] = None
    test: str = "test"
    calibration: str = "validation"
    text_field: str = "text"


@dataclass
class SplitConfig:
    """Rows of one split of a task.

    Args:
        files: tsv (with a header, or `task.columns`) or jsonl files, absolute or below data.root, one after another.
        hub: the split's name on the hub; null: `train` or `validation`.
        first_row, end_row: rows of it, counted from 0, the end not included; null: to the end.
    """

    files: list[str] = field(default_factory=list)
    hub: Optional[str] = None
    first_row: int = 0
    end_row: Optional[int] = None


@dataclass
class TaskConfig:
    """How a row becomes a prompt and a choice.

    Args:
        template: the prompt, with `{field}` or `{field[inner]}` of a row.
        labels: label word → the spellings of that label in the data. The model chooses the word of greatest log-likelihood.
        choices: instead of label words, the fields of a row whose texts are chosen among, in the order of the labels 0, 1, …
        label: the field with the gold label.
        group: template of what is scored together (a question of MultiRC); empty: every example alone.
        rename: field → value → text to put into the template.
        columns: names of a tsv's columns where it has no header.
        metrics: accuracy | matthews | f1 | f1_macro | pearson_spearman | multirc; the first is the task's own.
        shots: training examples put before each prompt with their answers.
        examples: at most this many, spread evenly; null: all.
        train, validation: what is fitted or calibrated on, and what is scored.
    """

    template: str = ""
    labels: dict[str, list[str]] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)
    label: str = "label"
    group: str = ""
    rename: dict[str, dict[str, str]] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=lambda: ["accuracy"])
    shots: int = 0
    examples: Optional[int] = None
    train: SplitConfig = field(default_factory=SplitConfig)
    validation: SplitConfig = field(default_factory=SplitConfig)


@dataclass
class TaggerConfig:
    """Who tags a text without annotation.

    Args:
        name: `auto` (a spaCy model where one is installed, else `perceptron`), `perceptron`, or the name of a spaCy model.
        train, test: CoNLL-U files, absolute or below data.root: what a perceptron is trained on, and what any tagger is judged by.
    """

    name: str = "auto"
    train: str = MISSING
    test: str = MISSING


@dataclass
class DatasetConfig:
    """Which text, cut into which windows.

    Args:
        reader: `pydoc` (pydoc_data.topics), `python-source` (packages of the standard library), `far-copy`, `far-recall` (made by seed;
            data/made_here.py), `text` (one file), `lines` (WikiText: lines with their ends), `documents` (jsonl with `text`),
            `treebank` (CoNLL-U, or GUM's folder, by its Penn tags), `treebank-upos` (by universal tags: any language), `tagged` (`lines`,
            tagged by `tagger`), `task` (labelled examples: their prompts and right answers are the text).
        form: `raw` or `tokenised` text, for the record: their perplexities do not compare.
        files, hub: where it is; files win where they exist.
        documents, calibration_documents: how many documents are scored, and how many after them calibrate (`documents` reader).
        part: what is scored: `test`, or `calibration` where thresholds are being chosen.
        windows: at most this many windows, spread evenly over the text; null: all.
        calibration_windows: the same for the calibration part.
        task: of the `task` reader; null: no labels.
        tagger: of the `tagged` reader.
    """

    name: str = MISSING
    reader: str = MISSING
    form: str = "raw"
    files: FilesConfig = field(default_factory=FilesConfig)
    hub: HubDatasetConfig = field(default_factory=HubDatasetConfig)
    documents: Optional[int] = None
    calibration_documents: Optional[int] = None
    part: str = "test"
    windows: Optional[int] = None
    calibration_windows: int = 16
    task: Optional[TaskConfig] = None
    tagger: Optional[TaggerConfig] = None
