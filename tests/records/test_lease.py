"""Leases: one holder at a time, on one machine and between machines that share nothing but a folder."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from quicksilver.records import lease
from quicksilver.records.store import Store

fork = multiprocessing.get_context("fork")  # the child must not import torch again
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a run.lock"


def on_host(name: str) -> None:
    """From here on this process is one of another machine: its process numbers mean nothing here, and flock would not be seen."""
    lease.host_name = lambda: name


def silent_for(path: Path, seconds: float) -> None:
    """As after so long without a heartbeat."""
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def test_one_holds_it_until_it_is_given_up(path):
    held = lease.take(path)
    assert held is not None
    assert lease.take(path) is None
    who = lease.holder(path)
    assert (who.pid, who.host) == (os.getpid(), lease.host_name())
    held.release()
    assert not lease.is_held(path)
    assert lease.holder(path) is None
    assert list(path.parent.iterdir()) == []
    assert lease.take(path) is not None


def holding(path: Path, ready, host: str | None = None) -> None:
    if host is not None:
        on_host(host)
    assert lease.take(path) is not None
    ready.set()
    signal.pause()


@pytest.fixture
def elsewhere(path):
    """A process that holds the lease; of another machine where it is asked for."""
    processes = []

    def start(host: str | None = None):
        ready = fork.Event()
        process = fork.Process(target=holding, args=(path, ready, host))
        process.start()
        processes.append(process)
        assert ready.wait(30)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


def kill(process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)


def test_of_a_killed_process_of_this_machine_it_is_taken_at_once(path, elsewhere):
    process = elsewhere()
    assert lease.take(path) is None
    kill(process)
    taken = lease.take(path)
    assert lease.holder(path) == taken.holder


def test_of_another_machine_only_silence_tells(path, elsewhere):
    kill(elsewhere("node-2"))
    assert lease.take(path) is None  # its process number says nothing here: a process of this machine may have it as well
    assert lease.holder(path).host == "node-2"
    silent_for(path, lease.LEASE_S / 2)
    assert lease.take(path) is None
    silent_for(path, lease.LEASE_S + 5)
    assert lease.take(path) is not None


def test_a_heartbeat_keeps_it(path):
    held = lease.take(path)
    silent_for(path, lease.LEASE_S + 5)
    lease._heart.beat()
    on_another = lease._machine
    try:
        lease._machine = lambda: "node-2"
        assert lease.take(path) is None
        silent_for(path, lease.LEASE_S + 5)
        taken = lease.take(path)
        assert taken is not None
    finally:
        lease._machine = on_another
    held.release()  # late: it is another's by now, and stays his
    assert lease.holder(path) == taken.holder


def test_a_process_number_that_was_given_again_is_no_holder(path):
    held = lease.take(path)
    path.write_text(path.read_text().replace(f'"process_started": "{held.holder.process_started}"', '"process_started": "1"'))
    assert not lease.is_held(path)


def test_a_lease_that_is_being_written_is_held(path):
    path.write_text("")
    assert lease.take(path) is None
    silent_for(path, lease.LEASE_S + 5)
    assert lease.take(path) is not None


def test_what_was_taken_between_a_look_and_the_removal_goes_back(path, monkeypatch):
    held = lease.take(path)
    monkeypatch.setattr(lease, "_abandoned", lambda _: "what a dead process had written")
    lease.remove_abandoned(path)
    monkeypatch.undo()
    assert lease.holder(path) == held.holder


# --- the store of two machines -----------------------------------------------------------------------------------------------------
FINGERPRINT = "beef" * 5


def drafting(root: Path, ready, host: str) -> None:
    on_host(host)
    with Store(root).turn(FINGERPRINT), Store(root).draft(FINGERPRINT):
        ready.set()
        signal.pause()


def test_a_draft_of_another_machine_stays_as_long_as_it_is_touched(tmp_path):
    ready = fork.Event()
    writer = fork.Process(target=drafting, args=(tmp_path, ready, "node-2"))
    writer.start()
    store = Store(tmp_path)
    try:
        assert ready.wait(30)
        assert store.clean() == []
        assert {name: who.host for name, who in store.in_the_making().items()} == {FINGERPRINT: "node-2"}
    finally:
        kill(writer)
    assert store.clean() == []  # dead, which nobody here can know yet
    for left in (*store.drafts.glob("*.lease"), *tmp_path.glob("locks/*.lock")):
        silent_for(left, lease.LEASE_S + 5)
    assert len(store.clean()) == 1
    assert store.in_the_making() == {}
    with store.turn(FINGERPRINT, waiting=lambda: pytest.fail("a dead machine's turn is waited for")):
        pass
