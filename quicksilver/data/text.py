"""The text of a dataset: embedded, from local files, or streamed from the hub. Strings only; tokens are made in `windows.py`."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from quicksilver.data.annotation import Annotation
from quicksilver.data.made_here import far_context, python_docs, python_source
from quicksilver.data.spec import ANNOTATED, DatasetConfig, Part
from quicksilver.data.treebank import read_treebank
from quicksilver.models.hub import fetching
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import parse_json, read_bytes

LONGEST_LINE = 1_000_000  # characters; a tokenizer takes minutes for more


@dataclass(frozen=True)
class Text:
    """One part of a dataset.

    Attributes:
        source: where it was read, for the record.
        annotation: its words, tags and constituents, where the dataset has them.
        digest: sha256 of its UTF-8 bytes.
    """

    text: str
    source: str
    annotation: Annotation | None = None

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_text(config: DatasetConfig, part: Part = "test", *, root: Path | None = None, cache: Path | None = None) -> Text:
    """Read one part of a dataset: local files where they are, else the hub.

    Args:
        root: data.root, where relative files lie.
        cache: folder that keeps what was streamed, so that a resumed run reads the same text without the network.

    Raises:
        ConfigError: no such part, a missing, empty or binary file, a hub that cannot be reached. The message names the offline
            choices.
    """
    if config.reader == "pydoc":
        if config.files.test or config.files.calibration or config.hub.id:
            raise ConfigError(
                "dataset.files and dataset.hub have no effect on python-docs, which CPython carries: use dataset=file."
            )
        return Text(python_docs(part), "pydoc_data.topics")
    if config.reader == "python-source":
        try:
            return Text(python_source(part), "standard library")
        except FileNotFoundError as error:
            raise ConfigError(str(error)) from error
    if config.reader.startswith("far-"):
        kind = config.reader.removeprefix("far-")
        return Text(far_context(kind, part), f"far context by seed: {kind}")
    if config.reader == "task":
        from quicksilver.data.tasks import read_task, text_of

        task = read_task(config, part, root=root, cache=cache)
        return Text(text_of(task.examples), task.source)
    if config.reader == "tagged":
        return _tagged(config, part, root, cache)
    path = _local_path(config, part, root)
    if path is not None and path.exists():
        if config.reader in ANNOTATED:
            text, annotation = read_treebank(path, part, ANNOTATED[config.reader])
            return Text(text, str(path), annotation)
        return Text(_read_file(config, part, path), str(path))
    if config.hub.id is None:
        raise ConfigError(_missing_file(config, part, path, root))
    return _from_hub(config, part, path, cache)


def _tagged(config: DatasetConfig, part: Part, root: Path | None, cache: Path | None) -> Text:
    """A text of lines with tags that are not gold; what calibrates needs none."""
    from quicksilver.data.tagging import tag_text

    plain = read_text(replace(config, reader="lines", tagger=None), part, root=root, cache=cache)
    if part == "calibration":
        return plain
    assert config.tagger is not None  # checked where the config is composed
    annotation, said = tag_text(plain.text, config.tagger, root, cache)
    return Text(plain.text, f"{plain.source}; {said}", annotation)


def _local_path(config: DatasetConfig, part: Part, root: Path | None) -> Path | None:
    name = getattr(config.files, part)
    if name is None:
        return None
    path = Path(name).expanduser()
    return path if path.is_absolute() or root is None else root / path


def _missing_file(config: DatasetConfig, part: Part, path: Path | None, root: Path | None) -> str:
    key = f"dataset.files.{part}"
    if path is None:
        use = "to calibrate on" if part == "calibration" else "to score"
        return f"dataset={config.name} has no text {use}: give {key}=/path/of/a/text."
    if root is None and not path.is_absolute():
        return (
            f"dataset={config.name}: there is no file {path}. It is looked for below data.root, which is not set: give "
            f"data.root=/folder "
            f"(or QUICKSILVER_DATA), or {key}=/path/of/the/file."
        )
    return f"dataset={config.name}: there is no file {path}. Give another data.root=/folder, or {key}=/path/of/the/file."


def _read_file(config: DatasetConfig, part: Part, path: Path) -> str:
    try:
        content = read_bytes(path)
    except OSError as error:
        raise ConfigError(f"dataset={config.name}: {path} cannot be read: {error.strerror}.") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"dataset={config.name}: {path} is not UTF-8 text (byte {error.start}: {error.reason}). Convert it, or give a "
            f"text file."
        ) from error
    if "\0" in text:
        raise ConfigError(
            f"dataset={config.name}: {path} is binary (a zero byte at character {text.index(chr(0))}). Give a text file."
        )
    if config.reader == "text" and (longest := max(map(len, text.split("\n")))) > LONGEST_LINE:
        raise ConfigError(
            f"dataset={config.name}: {path} has a line of {longest:,} characters, and at most {LONGEST_LINE:,} are read: is it a text? Break it "
            "into lines."
        )
    if config.reader == "documents":
        text = _join(_slice(config, part, _jsonl(path, text, config.hub.text_field)))
    if not text.strip():
        raise ConfigError(f"dataset={config.name}: {path} has no text in its {part} part.")
    return text


def _jsonl(path: Path, content: str, text_field: str) -> Iterator[str]:
    # Not splitlines: it also cuts at U+2028, U+0085 and others, which may stand inside a json string. Blank lines are no documents.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield _document(line, text_field)
        except ValueError as error:
            raise ConfigError(
                f'{path}, line {number}: {error}. Each line must be a json object with a text, such as {{"{text_field}": "…"}}: mend or '
                f"remove the line, or name another field with dataset.hub.text_field=…"
            ) from error


def _document(line: str, text_field: str) -> str:
    """The text of one line.

    Raises:
        ValueError, RecursionError: no json, no object, no text in that field, half of a surrogate pair.
    """
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"a json {_kind(row)} is no object")
    if text_field not in row:
        raise ValueError(f'it has no "{text_field}"')
    if not isinstance(row[text_field], str):
        raise ValueError(f'its "{text_field}" is a json {_kind(row[text_field])}')
    row[text_field].encode("utf-8")
    return row[text_field]


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _slice(config: DatasetConfig, part: Part, documents: Iterable[str]) -> Iterator[str]:
    """The scored documents come first, the calibrating ones right after them."""
    if part == "test":
        return islice(documents, config.documents)
    if config.documents is None or config.calibration_documents is None:
        raise ConfigError(
            f"dataset={config.name}: calibrating needs dataset.documents and dataset.calibration_documents, so that the "
            f"parts are disjoint."
        )
    return islice(documents, config.documents, config.documents + config.calibration_documents)


def _join(documents: Iterable[str]) -> str:
    return "\n\n".join(documents)


def _from_hub(config: DatasetConfig, part: Part, path: Path | None, cache: Path | None) -> Text:
    hub = config.hub
    split = getattr(hub, part)
    source = f"hub:{hub.id}/{hub.config or 'default'}@{hub.revision or 'main'}:{split}"
    wanted = json.dumps([asdict(hub), part, config.reader, config.documents, config.calibration_documents], sort_keys=True)
    kept = cache / f"{hashlib.sha256(wanted.encode()).hexdigest()[:20]}.txt" if cache is not None else None
    if kept is not None and kept.is_file():
        return Text(kept.read_bytes().decode("utf-8"), source)
    offline = [f"dataset.files.{part}=/path/of/a/local/file", "dataset=python-docs (embedded)"]
    if path is not None:
        offline.insert(0, f"data.root=/folder with {getattr(config.files, part)} in it (or QUICKSILVER_DATA)")
    import datasets

    datasets.config.STREAMING_READ_MAX_RETRIES = 2  # the default keeps a person waiting for minutes
    with fetching(f"dataset={config.name}", str(hub.id), "dataset", offline):
        rows = _stream(config, datasets.load_dataset(hub.id, hub.config, split=split, revision=hub.revision, streaming=True))
        # The hub keeps WikiText without its blank lines' own content; the distributed file has " \n" there.
        text = "".join(row or " \n" for row in rows) if config.reader == "lines" else _join(_slice(config, part, rows))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        new = kept.with_name(f".{kept.name}-{secrets.token_hex(4)}")
        new.write_bytes(text.encode("utf-8"))
        os.replace(new, kept)
    return Text(text, source)


def _stream(config: DatasetConfig, rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    field = config.hub.text_field
    for row in rows:
        if not isinstance(text := row.get(field), str):
            raise ConfigError(
                f"dataset={config.name}: a row's {field} is {text!r}, no text: name another with dataset.hub.text_field=…"
            )
        yield text
