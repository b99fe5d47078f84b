"""How text is wrapped, and what of a text a page may show; tables and figures share it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def wrapped(lines: Sequence[str], width: int | None) -> list[str]:
    """Wrap at `width` (150 where there is none) with a hanging indent; never inside a word, so that a command can be copied."""
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, width or 150, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    ]


_FOLDERS = re.compile(r"(?<![\w./~-])(?:file://)?~?(?:/[^\s/'\"<>|,;:()\[\]{}]+)+/([^\s/'\"<>|,;:()\[\]{}]+)")


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
    if entry.startswith("folder:/") and "\n" not in entry:
        return f"folder:{Path(entry).name}"
    return Path(entry).name if "\n" not in entry and Path(entry).is_absolute() else _FOLDERS.sub(r"\1", entry)
