"""Leases: files that say which process works on what, for all machines that share a folder.

flock may hold on one machine alone over NFS. A lease is a file that one process can make (`O_EXCL`) and its holder touches every few seconds.
A lease is abandoned when its holder is dead: a process of this machine is looked up; one of another machine counts as dead when the file was
not touched for `LEASE_S` seconds of the folder's own clock. A lease saves work. Records are whole without it: each is published in one rename.
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
from dataclasses import asdict, dataclass, field
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
    """Who holds a lease. `machine` tells containers and boots of one host apart, `process_started` processes that had one number after another;
    `since` is ISO 8601, UTC; `token` is drawn for this lease."""

    host: str
    machine: str
    pid: int
    process_started: str
    since: str
    token: str


@dataclass(frozen=True)
class Lease:
    """One that this process holds, made by `take`; released at the end of a `with` block. A thread touches it until then, in this
    process and in none of its children."""

    path: Path
    holder: Holder
    _released: threading.Event = field(default_factory=threading.Event)

    def beat(self) -> None:
        """Touch it once."""
        with suppress(OSError):  # taken away, or the server is gone for a while
            os.utime(self.path)

    def beat_until_released(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            self.beat()

    def release(self) -> None:
        """Give it up; nothing happens where it was taken away meanwhile."""
        self._released.set()
        if _parsed(_text(self.path)) == self.holder:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def take(path: Path) -> Lease | None:
    """The lease of that file, whose folder is there; None: a living process holds it."""
    since, pid = datetime.now(UTC).isoformat(timespec="seconds"), os.getpid()
    me = Holder(host_name(), _machine(), pid, _started(pid) or "", since, secrets.token_hex(8))
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            if not remove_abandoned(path):
                return None
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(me)))
        lease = Lease(path, me)
        try:
            threading.Thread(target=lease.beat_until_released, name="quicksilver-lease", daemon=True).start()
        except BaseException:  # no further thread may start: other processes must not wait for this one
            lease.release()
            raise
        return lease


def wait(path: Path, waiting: Callable[[], None] = lambda: None) -> Lease:
    """`take`, as soon as it can be had; `waiting` is called once before a wait."""
    nap_s, lease = 0.01, take(path)
    if lease is None:
        waiting()
    while lease is None:
        time.sleep(nap_s)
        nap_s, lease = min(2 * nap_s, _LONGEST_NAP_S), take(path)
    return lease


def holder(path: Path) -> Holder | None:
    """The living holder of that file's lease."""
    return None if _abandoned(path) is not None else _parsed(_text(path))


def is_held(path: Path) -> bool:
    """Whether a living process holds the lease of that file."""
    return _abandoned(path) is None


def remove_abandoned(path: Path) -> bool:
    """Take away a lease whose holder is dead; False: the holder is alive."""
    if (seen := _abandoned(path)) is None:
        return False
    stale_path = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        os.rename(path, stale_path)
    except FileNotFoundError:
        return True  # another process was faster
    if _text(stale_path) != seen:
        # Another process took it between the look and the rename: it goes back. Where that cannot be, two do the same work.
        with suppress(OSError):
            os.link(stale_path, path)
    stale_path.unlink(missing_ok=True)
    return True


def _abandoned(path: Path) -> str | None:
    """The content of a lease whose holder is dead, "" of one that is gone; None: alive, or it cannot be told."""
    try:
        with path.open(encoding="utf-8") as file:  # opening makes NFS ask the server
            text, touched = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return ""
    found = _parsed(text)
    if found is not None and found.machine == _machine():
        return None if _started(found.pid) == found.process_started else text
    try:
        return text if _folder_clock(path.parent) - touched > LEASE_S else None
    except OSError:
        return None  # a read-only folder


def _folder_clock(folder: Path) -> float:
    """Now, by the file server's clock: clocks of machines differ."""
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
    return f"{host_name()} {_boot()} {space}"


def _started(pid: int) -> str | None:
    """When a process of this machine started; None: there is none, or only a zombie."""
    try:
        # After the name in parentheses, which may hold anything: state is the 1st field, start time in ticks after boot the 20th.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    return None
