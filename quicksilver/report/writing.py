"""How text is wrapped and how files are written; tables and figures share it."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quicksilver.runtime.errors import QuickSilverError


def wrapped(lines: Sequence[str], width: int | None) -> list[str]:
    """Wrap at `width` (150 where there is none) with a hanging indent; never inside a word, so that a command can be copied."""
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, width or 150, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    ]


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write `contents` by file name into `folder`; each file appears whole or not at all.

    Raises:
        QuickSilverError: the disk is full, or the folder cannot be written; the files before stay.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            path = folder / name
            partial = path.with_name(f".{name}.{os.getpid()}")
            try:
                partial.write_bytes(content)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
            written.append(path)
    except OSError as error:
        raise QuickSilverError(
            f"{folder.absolute()} cannot be written: {error.strerror or error}. The records are kept: free some space, or choose another "
            "folder with results_dir=…, and run the same command again."
        ) from error
    return written


_FOLDERS = re.compile(r"(?<![\w./:~-])(?:file://)?~?(?:/[^\s/'\"<>|,;:()\[\]{}]+)+/([^\s/'\"<>|,;:()\[\]{}]+)")


def without_folders(entry: Any) -> Any:
    """Local files by their names, also inside sentences: where they lie is nobody else's business, and would make a page another one elsewhere.

    Args:
        entry: text, or mappings and lists of it; anything else comes back as it is.
    """
    if isinstance(entry, Mapping):
        return {without_folders(key): without_folders(value) for key, value in entry.items()}
    if isinstance(entry, list | tuple):
        return type(entry)(map(without_folders, entry))
    if not isinstance(entry, str):
        return entry
    return Path(entry).name if "\n" not in entry and Path(entry).is_absolute() else _FOLDERS.sub(r"\1", entry)
