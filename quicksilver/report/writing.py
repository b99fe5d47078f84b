"""How text is wrapped and how files are written; tables and figures share it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path


def wrapped(lines: Sequence[str], width: int | None) -> list[str]:
    """Wrap at `width` (150 where there is none) with a hanging indent; never inside a word, so that a command can be copied."""
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, width or 150, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    ]


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write `contents` by file name into `folder`; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in contents.items():
        path = folder / name
        partial = path.with_name(f".{name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(path)
        written.append(path)
    return written
