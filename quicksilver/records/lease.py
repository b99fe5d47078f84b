"""Who is at work on what, as files that machines sharing a folder all see.

flock is not enough: over NFS it may hold on one machine alone. A lease is a file that only one process can make (`O_EXCL`). It says who
holds it, and its holder touches it every few seconds. Whoever finds one may take it away when the holder is dead: a process of this machine
is looked up; of one on another machine, all there is to see is that the file was not touched for `LEASE_S` seconds of the folder's own clock.

A lease keeps two processes from doing the same work; it does not have to be perfect for records to be whole: the store publishes each in one
rename, and of two the second fails.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import psutil

from quicksilver.runtime.reading import parse_json

HEARTBEAT_S = 15.0
LEASE_S = 180.0  # of silence; many heartbeats, because a busy file server answers late
_LONGEST_NAP_S = 1.0


@dataclass(frozen=True)
class Holder:
    """Who holds a lease.

    Attributes:
        machine: `host` with what tells containers and boots of one host apart.
        process_started: of the process, in the kernel's units: a later process may have its number.
        since: ISO 8601, UTC.
        token: drawn for this lease.
    """

    host: str
    machine: str
    pid: int
    process_started: str
    since: str
    token: str


class Lease:
    """One that this process holds. Made by `take`."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self.path, self.holder = path, holder

    def release(self) -> None:
        """Give it up; nothing happens where it was taken away meanwhile."""
        _heart.stop(self.path)
        found = _read(self.path)
        if found is not None and found.token == self.holder.token:
            self.path.unlink(missing_ok=True)


def take(path: Path) -> Lease | None:
    """The lease of that file, whose folder is there; None: a living process holds it."""
    me = Holder(
        host_name(), _machine(), os.getpid(), _started(os.getpid()) or "", datetime.now(UTC).isoformat(timespec="seconds"),
        secrets.token_hex(8),
    )  # fmt: skip
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            if not remove_abandoned(path):
                return None
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(me)))
        _heart.start(path)
        return Lease(path, me)


def wait(path: Path, waiting: Callable[[], None] | None = None) -> Lease:
    """`take`, as soon as it can be had; `waiting` is called once before a wait."""
    nap_s = 0.01
    lease = take(path)
    if lease is None and waiting is not None:
        waiting()
    while lease is None:
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        lease = take(path)
    return lease


def holder(path: Path) -> Holder | None:
    """Who holds the lease of that file; None: nobody who lives."""
    return None if _abandoned(path) is not None else _read(path)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lease of that file."""
    return path.exists() and _abandoned(path) is None


def remove_abandoned(path: Path) -> bool:
    """Take away a lease whose holder is dead; False: he lives."""
    seen = _abandoned(path)
    if seen is None:
        return False
    stale_path = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        os.rename(path, stale_path)
    except FileNotFoundError:
        return True  # somebody else was faster
    if _text(stale_path) != seen:
        # Between our look and the rename somebody took it: it goes back. Where that cannot be, two do the same work.
        with suppress(OSError):
            os.link(stale_path, path)
    stale_path.unlink(missing_ok=True)
    return True


def _abandoned(path: Path) -> str | None:
    """The content of a lease whose holder is dead, "" of one that is gone; None: he lives, or nobody can tell."""
    try:
        with path.open(encoding="utf-8") as file:  # to open is what makes NFS ask the server
            text, touched = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return ""
    found = _parsed(text)
    if found is not None and found.machine == _machine():
        return None if _started(found.pid) == found.process_started else text
    try:
        return text if _folder_clock(path.parent) - touched > LEASE_S else None
    except OSError:
        return None  # a folder that is only to be read


def _folder_clock(folder: Path) -> float:
    """What the clock of the file server says: clocks of machines differ."""
    probe = folder / f".clock-{secrets.token_hex(4)}"
    try:
        with probe.open("xb") as file:
            return os.fstat(file.fileno()).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _read(path: Path) -> Holder | None:
    return _parsed(_text(path))


def _parsed(text: str) -> Holder | None:
    try:
        return Holder(**parse_json(text))
    except (ValueError, TypeError):
        return None  # just being written, or of another program


def host_name() -> str:
    """As the network knows this machine."""
    return socket.gethostname()


@cache
def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _machine() -> str:
    """Where a process number means the same process: host, boot and namespace of processes."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return " ".join((host_name(), _boot(), space))


def _started(pid: int) -> str | None:
    """When a process of this machine started; None: there is none, or only what is left of one."""
    try:
        # After the name, which may hold anything, in parentheses: state is the 1st field, start time in ticks after boot the 20th.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    else:
        return None if fields[0] in "ZX" else fields[19]
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    return None


class _Heart:
    """Touches the leases of this process until they are given up."""

    def __init__(self) -> None:
        self._paths: set[Path] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, path: Path) -> None:
        with self._lock:
            self._paths.add(path)
            if self._thread is None or not self._thread.is_alive():  # not in a forked child either
                self._thread = threading.Thread(target=self._beat, name="quicksilver-leases", daemon=True)
                self._thread.start()

    def stop(self, path: Path) -> None:
        with self._lock:
            self._paths.discard(path)

    def beat(self) -> None:
        """Touch all of them once."""
        with self._lock:
            paths = list(self._paths)
        for path in paths:
            with suppress(OSError):  # taken away, or the server is gone for a while
                os.utime(path)

    def _beat(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            self.beat()


_heart = _Heart()


def _after_fork() -> None:
    # The parent's leases are the parent's, and its lock may have been held at that moment.
    global _heart
    _heart = _Heart()


os.register_at_fork(after_in_child=_after_fork)
