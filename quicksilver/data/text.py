"""The text of a dataset: embedded, from local files, or streamed from the hub. Strings only; tokens are made in `windows.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from quicksilver.data.annotation import Annotation, read_treebank, tag_text
from quicksilver.data.made_here import far_context, python_docs, python_source
from quicksilver.data.sources import below, from_hub, json_lines, kind_of
from quicksilver.data.spec import ANNOTATED, DatasetConfig, FarContext, Part
from quicksilver.data.tasks import read_task, text_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_bytes

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
    """Read one part of a dataset: local files where they are, else the hub. Relative files lie in `root`; `cache` keeps what was
    streamed, so that a resumed run reads the same text without the network. Raises ConfigError: no such part, a missing, empty or
    binary file, a hub that cannot be reached; the message names the offline choices."""
    if config.reader == "pydoc":
        if config.files.test or config.files.calibration or config.hub.id:
            raise ConfigError("dataset.files and dataset.hub have no effect on python-docs, CPython's own: use dataset=file.")
        return Text(python_docs(part), "pydoc_data.topics")
    if config.reader == "python-source":
        return Text(python_source(part), "standard library")
    if config.reader.startswith("far-"):
        kind: FarContext = "copy" if config.reader == "far-copy" else "recall"
        return Text(far_context(kind, part), f"far context by seed: {kind}")
    if config.reader == "task":
        task = read_task(config, part, root=root, cache=cache)
        return Text(text_of(task.examples), task.source)
    if config.reader == "tagged":  # what calibrates needs no tags
        plain = read_text(replace(config, reader="lines", tagger=None), part, root=root, cache=cache)
        if part == "calibration":
            return plain
        assert config.tagger is not None  # checked where the config is composed
        annotation, said = tag_text(plain.text, config.tagger, root, cache)
        return Text(plain.text, f"{plain.source}; {said}", annotation)
    name = getattr(config.files, part)
    path = None if name is None else below(root, name)
    if path is not None and path.exists():
        if config.reader in ANNOTATED:
            text, annotation = read_treebank(path, part, ANNOTATED[config.reader])
            return Text(text, str(path), annotation)
        return Text(_read_file(config, part, path), str(path))
    if config.hub.id is None:
        raise ConfigError(f"dataset={config.name}{_what_is_missing(part, path, root)}")
    return _from_hub(config, part, path, cache)


def _what_is_missing(part: Part, path: Path | None, root: Path | None) -> str:
    key = f"dataset.files.{part}"
    if path is None:
        return f" has no text {'to calibrate on' if part == 'calibration' else 'to score'}: give {key}=/path/of/a/text."
    if root is None and not path.is_absolute():
        remedy = f"give data.root=/folder (or QUICKSILVER_DATA), or {key}=/path/of/the/file."
        where = f"It is looked for below data.root, which is not set: {remedy} `quicksilver list dataset` says what each text is."
        return f": there is no file {path}. {where}"
    return f": there is no file {path}. Give another data.root=/folder, or {key}=/path/of/the/file."


def _read_file(config: DatasetConfig, part: Part, path: Path) -> str:
    where = f"dataset={config.name}: {path}"
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text (byte {error.start}: {error.reason}). Convert it or give text.") from error
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}.") from error
    if "\0" in text:
        raise ConfigError(f"{where} is binary (a zero byte at character {text.index(chr(0))}). Give a text file.")
    if config.reader == "text" and (longest := max(map(len, text.split("\n")))) > LONGEST_LINE:
        most = f"at most {LONGEST_LINE:,} are read: is it a text? Break it into lines."
        raise ConfigError(f"{where} has a line of {longest:,} characters, and {most}")
    if config.reader == "documents":
        field = config.hub.text_field
        needs = (
            f'Each line must be a json object with a text, such as {{"{field}": "…"}}: mend or remove the line, or name another'
        )
        rows = json_lines(path, text, partial(_document, field=field), f"{needs} field with dataset.hub.text_field=…")
        text = "\n\n".join(_slice(config, part, rows))
    if not text.strip():
        raise ConfigError(f"{where} has no text in its {part} part.")
    return text


def _document(row: Mapping[str, Any], field: str) -> str:
    """The text of one row; raises ValueError where there is none in that field, or half of a surrogate pair."""
    if field not in row:
        raise ValueError(f'it has no "{field}"')
    if not isinstance(row[field], str):
        raise ValueError(f'its "{field}" is a json {kind_of(row[field])}')
    row[field].encode("utf-8")
    return str(row[field])


def _slice(config: DatasetConfig, part: Part, documents: Iterable[str]) -> Iterator[str]:
    """The scored documents come first, the calibrating ones right after them."""
    if part == "test":
        return islice(documents, config.documents)
    if config.documents is None or config.calibration_documents is None:
        needs = "dataset.documents and dataset.calibration_documents, so that the parts are disjoint"
        raise ConfigError(f"dataset={config.name}: calibrating needs {needs}.")
    return islice(documents, config.documents, config.documents + config.calibration_documents)


def _from_hub(config: DatasetConfig, part: Part, path: Path | None, cache: Path | None) -> Text:
    def content_of(rows: Iterable[Mapping[str, object]]) -> bytes:
        texts = _texts(config, rows)
        # The hub keeps WikiText without its blank lines' own content; the distributed file has " \n" there.
        lines = config.reader == "lines"
        return ("".join(row or " \n" for row in texts) if lines else "\n\n".join(_slice(config, part, texts))).encode()

    offline = [f"dataset.files.{part}=/path/of/a/local/file", "dataset=python-docs (embedded)"]
    if path is not None:
        offline.insert(0, f"data.root=/folder with {getattr(config.files, part)} in it (or QUICKSILVER_DATA)")
    content, source = from_hub(
        config, getattr(config.hub, part), content_of, kept=cache and cache / "text.txt", offline=offline, streaming=True,
        wanted=[asdict(config.hub), part, config.reader, config.documents, config.calibration_documents],
    )  # fmt: skip
    return Text(content.decode("utf-8"), source)


def _texts(config: DatasetConfig, rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    field = config.hub.text_field
    for row in rows:
        if not isinstance(text := row.get(field), str):
            no_text = f"a row's {field} is {text!r}, no text: name another with dataset.hub.text_field=…"
            raise ConfigError(f"dataset={config.name}: {no_text}")
        yield text
