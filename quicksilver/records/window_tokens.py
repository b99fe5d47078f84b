"""The tokens of a record's windows, for pages that show them. A record has their digest alone: its text is read and tokenised again."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from quicksilver.data.spec import DatasetConfig, Part
from quicksilver.data.text import read_text
from quicksilver.data.windows import encode
from quicksilver.models.loading import locate
from quicksilver.models.spec import ModelConfig
from quicksilver.records.record import Record
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import parse_json

if TYPE_CHECKING:
    import torch


def window_tokens(record: Record, window: int) -> list[str]:
    """The tokens of one window, (N,).
    Raises ConfigError: text or tokenizer cannot be had, or they are not those of the record."""
    config = record.config
    model, dataset = (json.dumps(config[group]) for group in ("model", "dataset"))
    ids, tokenizer = _windows(model, dataset, config["data"]["root"], record.protocol.window_tokens, record.data.token_digest)
    return [tokenizer.decode([number]) for number in ids[window].tolist()]


@cache
def _windows(model: str, dataset: str, root: str | None, window_tokens: int, digest: str) -> tuple[torch.Tensor, Any]:
    """(W, N) ids and the tokenizer, once for all runs on the same windows."""
    from transformers import AutoTokenizer

    folder = Path(root).expanduser() if root else None
    data: DatasetConfig = _typed(DatasetConfig, dataset)
    files = locate(_typed(ModelConfig, model), folder).folder
    tokenizer = AutoTokenizer.from_pretrained(files, local_files_only=True, trust_remote_code=False)
    text = read_text(data, cast(Part, data.part), root=folder).text
    windows = encode(text, tokenizer, window_tokens, data.windows)
    if windows.token_digest != digest:
        raise ConfigError(f"dataset={data.name} has other tokens now than when the run was recorded.")
    return windows.ids, tokenizer


def _typed(schema: type, entries: str) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), parse_json(entries)))
