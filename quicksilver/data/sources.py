"""Where texts and rows are: files below data.root, or the hub, whose answer is kept in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quicksilver.data.spec import DatasetConfig
from quicksilver.files import write_atomically
from quicksilver.models.hub import fetching
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import parse_json

T = TypeVar("T")
_KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}


def below(root: Path | None, name: str) -> Path:
    """A file that a config names: absolute, or below data.root where that is set."""
    path = Path(name).expanduser()
    return path if path.is_absolute() or root is None else root / path


def kind_of(value: object) -> str:
    """What json calls it."""
    return _KINDS[type(value)]


def json_lines(path: Path, content: str, take: Callable[[dict[str, Any]], T], needs: str) -> Iterator[T]:
    """What `take` makes of the json object in each line that is not blank. Raises ConfigError: a line that is no json object, or
    one for which `take` raises ValueError; `needs` says what a line must be."""
    # Not splitlines: it also cuts at U+2028, U+0085 and others, which may stand inside a json string.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError(f"a json {kind_of(row)} is no object")
            taken = take(row)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}. {needs}") from error
        yield taken


def from_hub(
    config: DatasetConfig,
    split: str,
    make: Callable[[Any], bytes],
    *,
    kept: Path | None,
    wanted: object,
    offline: Sequence[str],
    what: str = "",
    streaming: bool = False,
) -> tuple[bytes, str]:
    """Content that `make` draws from the rows of a split, and its source for the record. Raises ConfigError: a hub that cannot be
    reached. `offline` is what a person without a network may give, `what` stands in messages behind the dataset's name. `kept` is
    a file in the folder that keeps what was fetched, its stem to be replaced by a digest of `wanted`; None: not kept."""
    hub = config.hub
    source = f"hub:{hub.id}/{hub.config or 'default'}@{hub.revision or 'main'}:{split}"
    if kept is not None:
        kept = kept.with_stem(hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:20])
        if kept.is_file():
            return kept.read_bytes(), source
    import datasets

    datasets.config.STREAMING_READ_MAX_RETRIES = 2  # the default keeps a person waiting for minutes
    with fetching(f"dataset={config.name}{what}", str(hub.id), "dataset", offline):
        content = make(datasets.load_dataset(hub.id, hub.config, split=split, revision=hub.revision, streaming=streaming))
    if kept is not None:
        write_atomically(kept, content)
    return content, source
