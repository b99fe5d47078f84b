"""Reading files that somebody else wrote: what is no file, or is far too large, is refused before it is used. Light: no torch."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 2 * 2**30  # of a text or a description; weights are read by safetensors


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read, is a folder, a pipe or a device, or has more than `MOST_BYTES` bytes.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(
            0, "it is a folder" if stat.S_ISDIR(about.st_mode) else "it is a pipe or a device, and no file", os.fspath(path)
        )
    if about.st_size > MOST_BYTES:
        raise OSError(0, f"it has {about.st_size / 2**30:.1f} GiB, and at most {MOST_BYTES / 2**30:g} are read", os.fspath(path))
    return path.read_bytes()


def parse_json(text: str | bytes, **options: Any) -> Any:
    """`json.loads`; raises ValueError for every text that is no json, those of ten thousand brackets included."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """The content of a json file; raises OSError as `read_bytes`, ValueError where it is no json in UTF-8."""
    return parse_json(read_bytes(path).decode("utf-8"))
