"""Files that a reader sees whole or not at all, and which files a command may write or remove: its own, below its folder, through no link."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.reading import read_json

MANIFEST = "manifest.json"


def write_atomically(path: Path | str, content: bytes, *, sync: bool = True) -> None:
    """Write to a new file in the same folder, then rename; a write that is stopped leaves what was there. `sync`: wait until the
    content is on the disk, so that a power cut leaves no empty file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        error.filename = os.fspath(path)  # a full disk names no file, and the partial one means nothing to a person
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write `contents` by plain file name into `folder`; each file appears whole or not at all.
    Raises ConfigError: a name is no plain file name, or a link stands in its place; nothing was written. QuickSilverError: the
    disk is full, or the folder cannot be written; the files before stay."""
    files = {folder / plain_name(name, "a file to write"): content for name, content in contents.items()}
    for path in files:
        refuse_link(path)
    try:
        for path, content in files.items():
            write_atomically(path, content, sync=False)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return [*files]


def check_writable(key: str, folder: Path) -> None:
    """Make `folder`, and refuse one that takes no file, before there is work to lose.
    Raises ConfigError: names the key whose value leads there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{key}={folder}: nothing can be written there ({error.strerror}). Give another place.") from error


def cannot_write(folder: Path, error: OSError) -> QuickSilverError:
    """What to say where `folder` cannot be written."""
    return QuickSilverError(
        f"{folder.absolute()} cannot be written: {error.strerror or error}. The records are kept: free some space, or choose another "
        "folder with results_dir=…, and run the same command again."
    )


# --- names that come out of a file ------------------------------------------------------------------------------------------------
def plain_name(
    name: Any, what: str, kind: str = "plain file name (letters, digits, . _ + -)", pattern: str = r"\w[\w.+-]*"
) -> str:
    """`name`, where it is the name of a file and no path: letters, digits, and . _ + - after the first; else raises ConfigError."""
    if not isinstance(name, str) or not re.fullmatch(pattern, name):
        raise ConfigError(f"{name!r} as {what}: it is no {kind}.")
    return name


def fingerprint_of(name: Any, what: str = "a record") -> str:
    """`name`, where it is a record's fingerprint, 20 hexadecimal digits; else raises ConfigError."""
    return plain_name(name, what, "fingerprint (20 hexadecimal digits)", r"[0-9a-f]{20}")


def own_path(folder: Path, name: str) -> Path:
    """`folder`/`name`; `name` is a path of plain names, and neither `folder` nor anything on the way is a link.
    Raises ConfigError: it leads elsewhere."""
    path = folder
    refuse_link(path)
    for part in name.split("/"):
        path /= plain_name(part, f"a part of {name!r} in {folder}")
        refuse_link(path)
    return path


def refuse_link(path: Path) -> None:
    """Raises ConfigError where `path` is a link."""
    if path.is_symlink():
        where = f"{path} is a link to {os.readlink(path)}"
        raise ConfigError(f"{where}: nothing is written or removed through it. Move the link away and repeat the command.")


# --- a folder that a command fills ------------------------------------------------------------------------------------------------
def publish(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Make `folder` hold `contents`, by relative path. Its manifest names them; what only the one before names is removed.

    Files that no manifest names belong to somebody else and stay, and so does what was changed since it was written.
    Raises ConfigError: before anything is written: the folder or a place in it is a link, there is something in it and no
    manifest, a place is taken by a file that the manifest does not name, or the manifest names what lies elsewhere.
    QuickSilverError: the disk is full, or the folder cannot be written."""
    before = _manifest(folder)
    for name in contents:
        path = own_path(folder, name)
        if path.is_dir() or (path.exists() and name not in before):
            raise ConfigError(f"{path} was not written by this command, which would write over it: move it away.")
        for above in path.parents[: name.count("/")]:
            if above.exists() and not above.is_dir():
                raise ConfigError(f"{above} is no folder, and {name} belongs into it: move it away.")
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    try:
        _write_manifest(folder, before | digests)  # first: what a call that is killed leaves behind is known to be ours
        for name, content in contents.items():
            write_atomically(folder / name, content, sync=False)
        for name in before.keys() - digests.keys():
            with suppress(ConfigError):  # a link leads there: it stays
                path = own_path(folder, name)
                if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == before[name]:  # as it was written
                    path.unlink()
        _write_manifest(folder, digests)
    except OSError as error:
        raise cannot_write(folder, error) from error


def publish_tree(made: Path | str, folder: Path | str) -> None:
    """`publish` what lies in the folder `made`."""
    made = Path(made)
    files = sorted(path for path in made.rglob("*") if path.is_file())
    publish(Path(folder), {path.relative_to(made).as_posix(): path.read_bytes() for path in files})


def _manifest(folder: Path) -> dict[str, str]:
    """Path to digest of what an earlier call wrote."""
    refuse_link(folder)
    path = folder / MANIFEST
    refuse_link(path)
    remedy = f"Move {folder} away, and run the same command again."
    try:
        files: dict[str, str] = read_json(path)["files"]
        for name, digest in files.items():
            for part in (*name.split("/"), digest):
                plain_name(part, f"a part of {name!r}")
    except FileNotFoundError:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} has files and no {MANIFEST} that says they are this command's. {remedy}") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. {remedy}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a manifest that was written here ({error}). {remedy}") from error
    return files


def _write_manifest(folder: Path, files: Mapping[str, str]) -> None:
    lines = json.dumps({"schema_version": 1, "files": dict(sorted(files.items()))}, indent=0)
    write_atomically(folder / MANIFEST, lines.encode() + b"\n")
