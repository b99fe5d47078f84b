"""What a dataset config says. Types of the keys below `dataset`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Optional

from omegaconf import MISSING

# OmegaConf 2.3 reads `Optional[int]` everywhere a config may come from; `int | None` it does not.
# ruff: noqa: UP045

READERS = ("pydoc", "text", "lines", "documents", "treebank", "treebank-upos", "far-copy", "far-recall")
ANNOTATED = {"treebank": "penn", "treebank-upos": "upos"}  # reader -> tag set
MADE_HERE = ("pydoc", "far-copy", "far-recall")  # readers of texts that need no file
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
class DatasetConfig:
    """Which text, cut into which windows.

    Args:
        reader: `pydoc` (pydoc_data.topics), `text` (one file), `lines` (WikiText: lines with their ends), `documents` (jsonl
            with `text`), `treebank` (CoNLL-U, or GUM's folder, by its Penn tags), `treebank-upos` (by universal tags: any language),
            `far-copy`, `far-recall` (texts of their own, made by seed; data/far_context.py).
        form: `raw` or `tokenised` text, for the record: their perplexities do not compare.
        files, hub: where it is; files win where they exist.
        documents, calibration_documents: how many documents are scored, and how many after them calibrate (`documents` reader).
        part: what is scored: `test`, or `calibration` where thresholds are being chosen.
        windows: at most this many windows, spread evenly over the text; null: all.
        calibration_windows: the same for the calibration part.
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
