"""Where records live, and why none of them is ever half written.

A run writes into a draft, `runs/.drafts/<fingerprint>-…`, and renames it when everything is on disk: what is in `runs` without
a dot is whole, whatever happened. Beside each draft lies the lease of the process that writes it (lease.py), from before the
directory is made until after it is gone; whoever finds one without a living holder, on this machine or another that shares the folder, may
remove it. What passes have scored stays there, in blocks (blocks.py), until the record is there. Two processes after the same fingerprint take turns; if both write it all the same (a lease ran out), the second rename fails and
its writer keeps the first's record.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from quicksilver.files import fingerprint_of, write_atomically
from quicksilver.records import archive, lease
from quicksilver.records.record import CALIBRATIONS, CHECKSUM, EVENTS, RECORD, Record, checksum, load_record, record_of
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.reading import read_json

KEPT = "records"  # beside runs/: records that the repository has (keeping.py)
PROGRESS = "progress.json"  # in a draft: how far it is
_LEASE = ".lease"
_FINGERPRINT = re.compile(r"[0-9a-f]{20}")
_DRAFT = re.compile(r"[0-9a-f]{20}-\d+-[0-9a-f]{8}(-before)?")  # names of `Store.draft`


class Draft:
    """A record in the making: files are written below `folder`, what happens is appended to events.jsonl."""

    def __init__(self, store: Store, folder: Path, fingerprint: str):
        self._store, self.folder, self.fingerprint = store, folder, fingerprint

    def event(self, what: str, **details: Any) -> None:
        """Append a line to events.jsonl."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": what, **details}
        with self._store.writing(), (self.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """Write one file of the record: `write` is given its path."""
        with self._store.writing():
            write(self.folder / name)

    def progress(self, content: Mapping[str, Any]) -> None:
        """Say to whoever looks from outside how far it is; a disk that does not take it stops nobody."""
        with suppress(OSError):
            write_atomically(self.folder / PROGRESS, json.dumps(content).encode(), sync=False)


class Store:
    """The records below one results folder. Safe to use from several processes at once."""

    def __init__(self, results_dir: Path | str, records: str = "any"):
        """
        Args:
            records: which count, as the config's key says. `any`: all that are there, those of the repository first; `checked`: those made on this machine;
                `own`: of these, those that took no number from the repository's (confirming.py).

        Raises:
            ConfigError: something at that place that is no folder.
        """
        self.root = Path(results_dir)
        _check_folder(self.root)
        self.runs = self.root / "runs"
        self.drafts = self.runs / ".drafts"
        self.kept = self.root / KEPT if records == "any" else None
        self._own = records == "own"

    @property
    def kept_calibrations(self) -> Path | None:
        """Where the repository has calibrations; None: what it has does not count."""
        return None if self._own else self.root / KEPT / CALIBRATIONS

    def path(self, fingerprint: str) -> Path:
        return self.runs / fingerprint_of(fingerprint)

    def get(self, fingerprint: str) -> Record | None:
        """The record of that fingerprint; None: it has not been made.

        Raises:
            ConfigError: something is there that is not a whole record of this schema.
        """
        folder = self.folder(fingerprint)
        record = load_record(folder) if folder.parent == self.kept or folder.exists() else None
        return None if record is not None and self._own and record.confirmed is not None else record

    def folder(self, fingerprint: str) -> Path:
        """Where that record is, or would be made: one that the repository has comes first, so that its tables stay what they are."""
        there = self.kept is not None and archive.text(self.kept, fingerprint) is not None
        return self.kept / fingerprint if self.kept is not None and there else self.path(fingerprint)

    def folders(self) -> dict[str, Path]:
        """Where the records are that there are, by fingerprint; the repository's first."""
        there = [one.name for one in os.scandir(self.runs) if not one.name.startswith(".")] if self.runs.is_dir() else []
        kept = {} if self.kept is None else {name: self.kept / name for name in archive.names(self.kept)}
        return {name: self.runs / name for name in there} | kept

    def dense_of(self, record: Record) -> Record:
        """The dense record a record's differences are against (a dense record is its own).

        Raises:
            QuickSilverError: it is not there any more.
        """
        if record.dense_fingerprint is None:
            return record
        dense = self.get(record.dense_fingerprint)
        if dense is None:
            raise QuickSilverError(
                f"{record.path} is compared with the dense record {self.path(record.dense_fingerprint)}, which is not there: "
                f"run the same command again."
            )
        return dense

    @contextmanager
    def turn(self, fingerprint: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the right to make this record. Blocks while another process makes it; calls `waiting` once before it blocks."""
        with self.writing():
            folder = self.root / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            held = lease.wait(folder / f"{fingerprint_of(fingerprint)}.lock", waiting)
        try:
            yield
        finally:
            held.release()

    def in_the_making(self) -> dict[str, lease.Holder]:
        """Fingerprints of the runs that living processes make now, and who they are, in the order they began."""
        return {fingerprint: who for fingerprint, who, _ in self.at_work()}

    def at_work(self) -> list[tuple[str, lease.Holder, dict[str, Any]]]:
        """All that living processes make, in the order they began: fingerprint, process, and what its draft says of how far it is (runs/run.py)."""
        found = []
        for path in self.drafts.glob(f"*{_LEASE}"):
            who, said = lease.holder(path), {}
            with suppress(OSError, ValueError):
                said = read_json(path.with_name(path.name.removesuffix(_LEASE)) / PROGRESS)
            if who is not None:
                found.append((path.name.partition("-")[0], who, said if isinstance(said, dict) else {}))
        return sorted(found, key=lambda one: (one[1].since, one[0]))

    @contextmanager
    def draft(self, fingerprint: str) -> Iterator[Draft]:
        """A directory to write a record into. It is removed when the block fails, and published by `publish`."""
        with self.writing():
            self.drafts.mkdir(parents=True, exist_ok=True)
            folder = self.drafts / f"{fingerprint_of(fingerprint)}-{os.getpid()}-{secrets.token_hex(4)}"
            held = lease.wait(folder.with_name(folder.name + _LEASE))
        try:
            with self.writing():
                folder.mkdir()
            yield Draft(self, folder, fingerprint)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # gone already when it was published
            held.release()

    def publish(self, draft: Draft, data: Mapping[str, Any]) -> Record:
        """Write record.json and make the draft a record, in one rename. If another process was first, its record is returned.

        Raises:
            ConfigError: it could not be read again. Nothing was published.
            QuickSilverError: the disk is full, or the folder cannot be written.
        """
        with self.writing():
            (draft.folder / PROGRESS).unlink(missing_ok=True)
            names = sorted(p.name for p in draft.folder.iterdir())
            content = {**data, "files": {name: described(draft.folder / name) for name in names}}
            written = json.dumps({**content, CHECKSUM: checksum(content)}, indent=1, allow_nan=False)
            record_of(draft.folder, json.loads(written))
            (draft.folder / RECORD).write_text(f"{written}\n", encoding="utf-8")
            for name in (*names, RECORD):
                _to_disk(draft.folder / name)
            final = self.path(draft.fingerprint)
            if self._own and final.is_dir():
                # It took a part from the repository's, and this one did not; any other would have been found before.
                final.rename(draft.folder.with_name(draft.folder.name + "-before"))
            try:
                os.rename(draft.folder, final)
            except OSError as error:
                # ENOENT with a record in place: a file server that answered the first try too late was asked twice.
                again = error.errno == errno.ENOENT and final.is_dir()
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) and not again:
                    raise
            _to_disk(self.runs)
            return load_record(final)

    def clean(self) -> list[str]:
        """Remove what killed processes left behind; returns the names. Directories of living processes stay."""
        if not self.drafts.is_dir() or not os.access(self.drafts, os.W_OK):
            return []  # nothing there, or a folder of finished records that is only to be read
        removed = []
        with self.writing():
            for path in sorted(self.drafts.iterdir()):
                # The lease of a living draft is there before its folder and longer: without one, its writer is dead.
                # What else has such a name, a link too, is not ours.
                ours = _DRAFT.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
                done = _FINGERPRINT.fullmatch(path.name) and self.path(path.name).exists() and not path.is_symlink()  # blocks
                if done or (ours and not lease.is_held(path.with_name(path.name + _LEASE))):
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path.name)
            for path in sorted((*self.drafts.glob(f"*{_LEASE}"), *self.root.glob("locks/*.lock"))):
                lease.remove_abandoned(path)
        return removed

    def write_json(self, relative: str, data: Any) -> Path:
        """Write a small json file below the results folder in one rename (caches: digests, calibrations)."""
        path = self.root / relative
        with self.writing():
            write_atomically(path, (json.dumps(data, indent=1) + "\n").encode(), sync=False)
        return path

    def write_cache(self, relative: str, data: Any) -> None:
        """`write_json` for what can be found out again: a folder that is read-only, or a full disk, does not stop anybody."""
        with suppress(QuickSilverError):
            self.write_json(relative, data)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Writes below the results folder: what the disk refuses becomes one message.

        Raises:
            QuickSilverError: the disk is full, or the folder cannot be written.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
            raise QuickSilverError(self._cannot_write(error)) from error

    def _cannot_write(self, error: Exception) -> str:
        number, filename = getattr(error, "errno", None), getattr(error, "filename", None)
        kept = "Windows that were scored in whole blocks, and finished records, are kept."
        if number in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error):
            return f"The disk that holds {self.root.absolute()} is full. {kept} Free some space and run the same command again."
        why = getattr(error, "strerror", None) or error
        return f"{filename or self.root.absolute()} cannot be written: {why}. {kept} Choose another folder with results_dir=…"


def _check_folder(root: Path) -> None:
    """Refuse a results folder that is a file, lies below one, is a link that ends nowhere, or has a name that no disk takes."""
    remedy = "Give another folder: results_dir=…"
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        if root.is_symlink():
            raise ConfigError(f"results_dir={root} is a link to {os.readlink(root)}, which is not there. {remedy}") from None
        return
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"results_dir={root} cannot be a folder: {why}. {remedy}") from error
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"results_dir={root} is no folder. {remedy}")


def described(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _to_disk(path: Path) -> None:
    # A rename may reach the disk before the data it publishes: without this, a power cut could leave a record of empty files.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
