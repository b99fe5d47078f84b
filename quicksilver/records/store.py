"""Where records live, and why none of them is ever half written.

A run writes into a draft, `runs/.drafts/<fingerprint>-…`, and renames it when everything is on disk: what is in `runs` without a dot is whole.
Beside each draft lies the lease of its writer (lease.py), from before the directory is made until after it is gone: a draft without a living
holder may be removed by anybody. Processes after the same fingerprint take turns; if two write it all the same (a lease ran out), the second
rename fails and its writer keeps the first's record.

Windows that an unfinished run has scored lie in blocks, and whoever makes the run goes on behind them:

results/runs/.drafts/<fingerprint>/<windows of a block>-<code>/
    quality-000064.block    the windows from 64 on: a line with the digest of the rest, a line of json (rows, bytes), the decisions' tensors
    quality-000064.lock     the lease of the process that computes them

A block appears in one rename, and goes once the record of its run is there. Blocks of other code or of another size have a folder of their own:
no record is made of both. Several processes may make the same run: each takes the next free block (`lease.py`), and all of them get all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from quicksilver.files import fingerprint_of, write_atomically
from quicksilver.records import archive, lease
from quicksilver.records.record import CALIBRATIONS, CHECKSUM, EVENTS, RECORD, Record, checksum, load_record, record_of
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.reading import parse_json, read_json

if TYPE_CHECKING:
    from quicksilver.measure.perplexity import Block, Compute, Keep

KEPT = "records"  # beside runs/: committed records (archive.py)
PROGRESS = "progress.json"  # in a draft: how far it is
NAP_S = 0.2  # where all blocks that are left are computed elsewhere
_LEASE = ".lease"
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
        """Say how far it is, where the disk takes it."""
        with suppress(OSError):
            write_atomically(self.folder / PROGRESS, json.dumps(content).encode(), sync=False)


class Store:
    """The records below one results folder. Safe to use from several processes at once.
    Raises ConfigError: something at that place that is no folder.

    Args:
        records: which count. `any`: all, committed ones first; `checked`: those made on this machine; `own`: of these, those that took no
            number from a committed one (runs/run.py).
    """

    def __init__(self, results_dir: Path | str, records: str = "any"):
        self.root = Path(results_dir)
        _check_folder(self.root)
        self.runs = self.root / "runs"
        self.drafts = self.runs / ".drafts"
        self.kept = self.root / KEPT if records == "any" else None
        self._own = records == "own"
        self.kept_calibrations = None if self._own else self.root / KEPT / CALIBRATIONS  # committed ones, where they count

    def path(self, fingerprint: str) -> Path:
        return self.runs / fingerprint_of(fingerprint)

    def get(self, fingerprint: str) -> Record | None:
        """The record of that fingerprint; None: it has not been made.
        Raises ConfigError: something is there that is not a whole record of this schema."""
        folder = self.folder(fingerprint)
        record = load_record(folder) if folder.parent == self.kept or folder.exists() else None
        return None if record is not None and self._own and record.confirmed is not None else record

    def folder(self, fingerprint: str) -> Path:
        """Where that record is, or would be made: a committed one comes first, so that committed tables stay what they are."""
        if self.kept is not None and archive.text(self.kept, fingerprint) is not None:
            return self.kept / fingerprint
        return self.path(fingerprint)

    def has(self, fingerprint: str) -> bool:
        """Whether that record is there and counts; whether it is whole, `get` finds out."""
        folder = self.folder(fingerprint)
        return (folder.parent == self.kept or folder.exists()) and (not self._own or self._is_own(fingerprint))

    def folders(self) -> dict[str, Path]:
        """Where all records are that count, by fingerprint; committed ones first."""
        there = [one.name for one in os.scandir(self.runs) if not one.name.startswith(".")] if self.runs.is_dir() else []
        there = [one for one in there if not self._own or self._is_own(one)]
        kept = {} if self.kept is None else {name: self.kept / name for name in archive.names(self.kept)}
        return {name: self.runs / name for name in there} | kept

    def named(self, begins: str) -> str:
        """The whole fingerprint of a record of which this is the beginning.
        Raises ConfigError: there is none, or more than one."""
        found = [name for name in self.folders() if name.startswith(begins)]
        if not found:
            said = "`quicksilver show` shows the newest; results_dir=FOLDER is another place."
            raise ConfigError(f"{begins}: no record below {self.root.resolve()} begins so. {said}")
        if len(found) > 1:
            raise ConfigError(f"{begins} begins {len(found)} fingerprints, such as {', '.join(found[:3])}: write more.")
        return found[0]

    def dense_of(self, record: Record) -> Record:
        """The dense record a record's differences are against (a dense record is its own).
        Raises QuickSilverError: it is not there any more."""
        dense = record if record.dense_fingerprint is None else self.get(record.dense_fingerprint)
        if dense is None:
            lost = self.runs / str(record.dense_fingerprint)
            said = f"{record.path} is compared with the dense record {lost}, which is not there: run the same command again."
            raise QuickSilverError(said)
        return dense

    # --- who works on what ---
    def take(self, path: Path) -> lease.Lease | None:
        """`lease.take` of a file in a folder that is made if need be."""
        with self.writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            return lease.take(path)

    def wait(self, path: Path, waiting: Callable[[], None] = lambda: None) -> lease.Lease:
        """`lease.wait` likewise."""
        with self.writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            return lease.wait(path, waiting)

    def turn(self, fingerprint: str, waiting: Callable[[], None] = lambda: None) -> lease.Lease:
        """The right to make this record. Blocks while another process makes it; calls `waiting` once before it blocks."""
        return self.wait(self.root / "locks" / f"{fingerprint_of(fingerprint)}.lock", waiting)

    def in_the_making(self) -> dict[str, lease.Holder]:
        """Fingerprints of the runs that living processes make now, and their makers, in the order they began."""
        return {fingerprint: who for fingerprint, who, _ in self.at_work()}

    def at_work(self) -> list[tuple[str, lease.Holder, dict[str, Any]]]:
        """All that living processes make, in the order they began: fingerprint, process, and the draft's progress."""
        found = []
        for path in self.drafts.glob(f"*{_LEASE}"):
            if (who := lease.holder(path)) is not None:
                found.append((path.name.partition("-")[0], who, read_object(path.with_suffix("") / PROGRESS)))
        return sorted(found, key=lambda one: (one[1].since, one[0]))

    @contextmanager
    def draft(self, fingerprint: str) -> Iterator[Draft]:
        """A directory to write a record into. It is removed when the block fails, and published by `publish`."""
        folder = self.drafts / f"{fingerprint_of(fingerprint)}-{os.getpid()}-{secrets.token_hex(4)}"
        with self.wait(folder.with_name(folder.name + _LEASE)):
            try:
                with self.writing():
                    folder.mkdir()
                yield Draft(self, folder, fingerprint)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # gone already when it was published

    def publish(self, draft: Draft, data: Mapping[str, Any]) -> Record:
        """Write record.json and make the draft a record, in one rename. If another process was first, its record is returned.
        Raises ConfigError: it could not be read again. Nothing was published. QuickSilverError: the disk is full, or the
        folder cannot be written."""
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
                # It took a part from a committed record, and this one did not; any other would have been found before.
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
            return []  # nothing there, or a read-only folder of finished records
        removed = []
        with self.writing():
            for path in sorted(self.drafts.iterdir()):
                # A living draft's lease is there before and after its folder. Another name, or a link, is not ours.
                draft, blocks = _DRAFT.fullmatch(path.name), re.fullmatch(r"[0-9a-f]{20}", path.name)
                dead = draft and path.is_dir() and not lease.is_held(path.with_name(path.name + _LEASE))
                # Blocks beside a record that was only confirmed are of a run that measures it, with records=own.
                over = blocks and self.path(path.name).exists() and self._is_own(path.name)
                if (dead or over) and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path.name)
            for path in sorted((*self.drafts.glob(f"*{_LEASE}"), *self.root.glob("locks/*.lock"))):
                lease.remove_abandoned(path)
        return removed

    def _is_own(self, fingerprint: str) -> bool:
        """Whether that record was measured in this folder, not only confirmed; a damaged one counts as measured."""
        with suppress(QuickSilverError):
            return load_record(self.path(fingerprint)).confirmed is None
        return True

    # --- small files ---
    def write_json(self, relative: str, data: Any) -> Path:
        """Write a small json file below the results folder in one rename."""
        path = self.root / relative
        with self.writing():
            write_atomically(path, (json.dumps(data, indent=1) + "\n").encode(), sync=False)
        return path

    def write_cache(self, relative: str, data: Any) -> None:
        """`write_json` for what can be found out again: a read-only folder or a full disk stops no run."""
        with suppress(QuickSilverError):
            self.write_json(relative, data)

    def on_this_machine(
        self, relative: str, machine: str, key: str, is_whole: Callable[[Any], bool], measure: Callable[[], Any]
    ) -> Any:
        """What a small file keeps under the machine and the key, where it is whole, as json has it; else it is measured now, and kept there."""
        kept = read_object(self.root / relative)
        here = kept[machine] if isinstance(kept.get(machine), dict) else {}
        if not is_whole(here.get(key)):
            here = here | {key: measure()}
            self.write_cache(relative, kept | {machine: here})
        return here[key]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Writes below the results folder: what the disk refuses becomes one message.
        Raises QuickSilverError: the disk is full, or the folder cannot be written."""
        try:
            yield
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
            kept = "Windows that were scored in whole blocks, and finished records, are kept."
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)
            if full:
                said = f"The disk that holds {self.root.absolute()} is full. {kept}"
                raise QuickSilverError(f"{said} Free some space and run the same command again.") from error
            where, why = getattr(error, "filename", None) or self.root.absolute(), getattr(error, "strerror", None) or error
            raise QuickSilverError(f"{where} cannot be written: {why}. {kept} Give another folder: results_dir=…") from error


def _check_folder(root: Path) -> None:
    """Refuse a results folder that is a file, lies below one, is a link that ends nowhere, or has a name that no disk takes."""
    why = ""
    try:
        if not root.is_dir():
            root.stat()
            why = "is no folder"
    except FileNotFoundError:
        if root.is_symlink():
            why = f"is a link to {os.readlink(root)}, which is not there"
    except (OSError, ValueError) as error:
        why = f"cannot be a folder: {getattr(error, 'strerror', None) or error}"
    if why:
        raise ConfigError(f"results_dir={root} {why}. Give another folder: results_dir=…")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a json file that can be found out again: empty where the file is missing or damaged."""
    with suppress(OSError, ValueError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}


def described(path: Path) -> dict[str, Any]:
    """`files` of record.json says so of a file."""
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _to_disk(path: Path) -> None:
    # A rename may reach the disk before the data it publishes: without this, a power cut could leave a record of empty files.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- blocks of windows --------------------------------------------------------------------------------------------------------------
class SupersededError(Exception):
    """The record is there: another process has made it of the blocks."""


class Blocks:
    """The blocks of one run; `seconds`: that others, or a process that was killed, spent on the blocks that were read here."""

    def __init__(self, store: Store, fingerprint: str) -> None:
        self._store, self._fingerprint = store, fingerprint_of(fingerprint)
        self.folder = store.drafts / self._fingerprint
        self.seconds = 0.0

    def of_pass(self, name: str, shared: bool = False) -> Keep:
        """What `score` is given to keep the blocks of one pass. `shared`: other processes make the same run; one of them may finish
        it, and then `SupersededError` is raised."""

        def keep(blocks: Sequence[range], compute: Compute) -> Iterable[Block]:
            folder = self._folder_of(len(blocks[0]))
            paths = {block: folder / f"{name}-{block.start:06d}.block" for block in blocks}
            mine: set[range] = set()

            def made(block: range) -> Block:
                done = sum(len(one) for one, path in paths.items() if one != block and path.exists())
                return self._compute(paths[block], block, lambda block: compute(block, done))

            while left := [block for block in blocks if not paths[block].exists()]:
                taken = len(mine)
                for block in left:
                    self._check_superseded(shared)
                    try:
                        held = lease.take(paths[block].with_suffix(".lock"))
                    except FileNotFoundError:  # the folder, if another process finished the run just now
                        self._check_superseded(shared)
                        raise
                    if held is None:
                        continue
                    try:
                        with held:
                            if not paths[block].exists():
                                made(block)
                                mine.add(block)
                    except BaseException:
                        with suppress(OSError):  # others are there, or whole blocks
                            folder.rmdir()
                            self.folder.rmdir()
                        raise
                if len(mine) == taken:
                    time.sleep(NAP_S)  # all that is left is computed elsewhere
            # Those computed here are read again, too: memory does not grow with what is behind.
            return (self._read(path, block in mine, shared) or made(block) for block, path in paths.items())

        return keep

    def _check_superseded(self, shared: bool) -> None:
        """Raises SupersededError where another process finished the run."""
        there = shared and self._store.path(self._fingerprint).exists()
        # With records=own, one that was only confirmed is none.
        if there and self._store.get(self._fingerprint) is not None:
            raise SupersededError

    def _compute(self, path: Path, block: range, compute: Callable[[range], Block]) -> Block:
        began = time.monotonic()
        found = compute(block)
        with self._store.writing():
            write_atomically(path, packed(found, time.monotonic() - began), sync=False)
        return found

    def _read(self, path: Path, mine: bool, shared: bool) -> Block | None:
        """The block; None: its file is damaged, which is said. The seconds of one that is `mine` are counted already. Raises
        SupersededError: another process finished the run and removed it."""
        try:
            block, seconds = unpacked(path.read_bytes())
        except (ValueError, OSError) as error:
            self._check_superseded(shared)
            _say(f"{path} is damaged ({error}): these windows are scored again, all others are taken as they are.")
            return None
        self.seconds += 0 if mine else seconds
        return block

    def _folder_of(self, windows: int) -> Path:
        folder = self.folder / f"{windows}-{code_digest()}"
        with self._store.writing():
            others = ", ".join(sorted(path.name for path in self.folder.glob("*") if path != folder))
            if others and not folder.exists():
                _say(f"{self.folder} has blocks of other code, or of another number of windows ({others}): they are left alone.")
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def remove(self) -> None:
        """Once the record is there."""
        shutil.rmtree(self.folder, ignore_errors=True)


def packed(block: Block, seconds: float) -> bytes:
    """A block as a file, with the seconds that it took."""
    from safetensors.torch import save

    tensors, trace = block.trace.to_tensors()
    about = {
        "rows": block.rows, "kv_bytes_billed": block.kv_bytes_billed, "kv_bytes_resident": block.kv_bytes_resident, "trace": trace,
        "host": lease.host_name(), "seconds": seconds,
    }  # fmt: skip
    content = json.dumps(about).encode() + b"\n" + save(tensors)
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unpacked(file: bytes) -> tuple[Block, float]:
    """What `packed` was given. Raises ValueError: not a byte of it may have changed."""
    from safetensors.torch import load

    from quicksilver.measure.perplexity import Block
    from quicksilver.runtime.trace import Trace

    digest, _, content = file.partition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise ValueError("its digest is another")
    first, _, tensors = content.partition(b"\n")
    about: dict[str, Any] = parse_json(first)
    trace = Trace.from_tensors(load(tensors), about["trace"]).compact()
    return Block(about["rows"], trace, about["kv_bytes_billed"], about["kv_bytes_resident"]), about["seconds"]


@cache
def code_digest() -> str:
    """Of this package's code and of the libraries that compute."""
    import torch
    import transformers

    whole = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        with suppress(OSError):
            whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


def _say(line: str) -> None:
    print(f"quicksilver: {line}", file=sys.stderr, flush=True)
