"""Records appear whole or not at all: kills, races, full disks, damage; and leases, by which one process at a time makes a run."""

import errno
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import fakes
import pandas as pd
import pytest
from repository import below
from safetensors import SafetensorError
from saying import refused_in_a_line, unsaid

from quicksilver.measure.latency import LatencyResult
from quicksilver.measure.measurement import Result
from quicksilver.records import lease
from quicksilver.records.record import CHECKSUM, EVENTS, checksum, load_record, record_frame
from quicksilver.records.store import Store
from quicksilver.runtime.errors import ConfigError, QuickSilverError

PRINT, OTHER = fakes.fingerprint("a run"), fakes.fingerprint("another run")
fork = multiprocessing.get_context("fork")  # the child must not import torch again
# Python 3.12 warns of forking beside torch's threads; the child here only writes files.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@dataclass(frozen=True)
class Ours(Result):
    """What a measurement of one's own found."""

    median: float
    samples: list[float] = field(default_factory=list)


def frame_of(ppl: float) -> pd.DataFrame:
    nats, flops = [math.log(ppl), 5 * math.log(ppl)], [fakes.DENSE_FLOPS / 2] * 2
    return pd.DataFrame({"window": [0, 1], "tokens": [3, 3], "nll_nats": nats, "executed_flops": flops})


def content(name: str = "a run", ppl: float = 2.0, **more) -> dict:
    """The entries of a whole record that scored 6 tokens."""
    fakes.put(found := fakes.described(name), "quality", fakes.quality(frame_of(ppl)))
    return {**found, **more}


def make_record(store: Store, name: str = "a run", **more):
    written = content(name, **more)
    return fakes.publish(store.root, written, frame_of(written["ppl"]))


def hidden(store: Store) -> list[str]:
    return [p.name for p in store.drafts.iterdir()] if store.drafts.is_dir() else []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def test_a_record_is_read_back_as_it_was_written_and_what_was_not_measured_is_named(store):
    assert store.get(PRINT) is None
    made = make_record(store, ours={"median": 1.5, "samples": [1.0, 2.0]})
    record = store.get(PRINT)
    assert record == made
    assert record.measured("ours", Ours) == Ours(1.5, [1.0, 2.0])
    assert list(record.windows["nll_nats"]) == [math.log(2), 5 * math.log(2)]
    assert sorted(p.name for p in record.path.iterdir()) == ["record.json", "windows.parquet"]
    assert record.trace_path is None
    assert hidden(store) == []
    for name, result in (("theirs", Ours), ("latency", LatencyResult)):  # of its own section, and of the top
        assert record.found(name, result) is None
        with pytest.raises(ConfigError, match=rf"has no '{name}'.*measure=default"):
            record.measured(name, result)


NO_SPACE = "Error while serializing: I/O error: No space left on device (os error 28)"
FULL = [OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EDQUOT)] + [SafetensorError(NO_SPACE)]


@pytest.mark.parametrize("failure", [RuntimeError(), *FULL], ids=repr)
def test_a_run_that_fails_leaves_nothing_and_a_full_disk_is_one_message(store, failure):
    make_record(store, "another run")
    with pytest.raises((RuntimeError, QuickSilverError)) as caught, store.draft(PRINT) as draft:
        draft.write("windows.parquet", Mock(side_effect=failure))
    if failure in FULL:
        assert unsaid(str(caught.value), f"The disk that holds {store.root} is full.", "Free some space") == []
    assert store.get(PRINT) is None
    assert store.get(OTHER) is not None
    assert hidden(store) == []


@pytest.mark.parametrize("name", ["beef", "../beef", "/etc", "BEEF" * 5, ""])
def test_nothing_is_made_or_asked_for_but_by_fingerprint(store, name):
    for ask in (store.path, store.get, store.folder, lambda name: store.draft(name).__enter__(), store.turn):
        with pytest.raises(ConfigError, match="no fingerprint"):
            ask(name)
    assert not store.root.exists() or not any(path.is_file() for path in store.root.rglob("*"))


def test_what_could_not_be_read_again_or_crashes_before_the_rename_is_not_published(store, monkeypatch):
    with pytest.raises(ConfigError, match=r"execution is 'guess', not one of 'compact', 'masked', 'decide'"):
        make_record(store, execution="guess")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make_record(store)
    assert store.get(PRINT) is None
    assert hidden(store) == []
    assert make_record(store).quality.ppl == pytest.approx(2)


@contextmanager
def forked(target, *given) -> Iterator[multiprocessing.Process]:
    """A child process that has begun: its function sets the event that it is given second. It is dead behind the block."""
    ready = fork.Event()
    process = fork.Process(target=target, args=(given[0], ready, *given[1:]))
    process.start()
    try:
        assert ready.wait(30)
        yield process
    finally:
        kill(process)


def kill(process) -> None:
    process.kill()  # SIGKILL
    process.join(30)


def on_host(name: str) -> None:
    """From here on this process is one of another machine: its process numbers mean nothing here, and flock would not be seen."""
    lease.host_name = lambda: name


def drafting(root: Path, ready, host: str = lease.host_name()) -> None:
    on_host(host)
    with Store(root).turn(PRINT), Store(root).draft(PRINT):
        ready.set()
        signal.pause()


def test_what_a_killed_run_left_is_cleaned_and_what_a_living_one_writes_is_not(store):
    with forked(drafting, store.root) as writer, store.draft("beef" * 5) as mine:
        assert store.clean() == []  # both are alive
        kill(writer)
        assert [name.split("-")[0] for name in store.clean()] == [PRINT]
        mine.event("still here")
    assert store.get(PRINT) is None
    assert hidden(store) == []


def test_cleaning_leaves_what_only_looks_like_a_draft(store, tmp_path):
    (mine := store.drafts / "thesis").mkdir(parents=True)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (store.drafts / f"{'0' * 20}-1-01234567").symlink_to(elsewhere)
    assert store.clean() == []
    assert mine.is_dir()
    assert elsewhere.is_dir()
    (store.drafts / f"{'0' * 20}-1-89abcdef").mkdir()
    assert len(store.clean()) == 1


def racing_writer(root: Path, value: float, start, results) -> None:
    store = Store(root)
    with store.draft(PRINT) as draft:
        draft.event("started", value=value)
        draft.write("windows.parquet", frame_of(value).to_parquet)
        start.wait(30)
        results.put((value, store.publish(draft, content(ppl=value)).quality.ppl))


def test_of_two_writers_of_one_record_the_loser_takes_the_winner_s(store):
    start, results = fork.Barrier(2), fork.Queue()
    writers = [fork.Process(target=racing_writer, args=(store.root, value, start, results)) for value in (3.0, 2.0)]
    for writer in writers:
        writer.start()
    answers = [results.get(timeout=60) for _ in writers]
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    kept = store.get(PRINT)
    assert {found for _, found in answers} == {kept.quality.ppl}  # both were handed the one that stayed
    assert json.loads((kept.path / EVENTS).read_text())["value"] == pytest.approx(kept.quality.ppl)  # all files are one writer's
    assert hidden(store) == []


def waiting_runner(root: Path, waits, results) -> None:
    store = Store(root)
    with store.turn(PRINT, waiting=waits.set):
        results.put("found" if store.get(PRINT) else "made")


def test_a_second_command_waits_for_the_first_and_finds_its_record(store):
    waits, results = fork.Event(), fork.Queue()
    with store.turn(PRINT):
        second = fork.Process(target=waiting_runner, args=(store.root, waits, results))
        second.start()
        assert waits.wait(30)
        make_record(store)
    assert results.get(timeout=30) == "found"
    second.join(30)


def whole(entries: dict) -> str:
    """record.json with the checksum that whoever edits a record by hand would have to make as well."""
    return json.dumps({**entries, CHECKSUM: checksum(entries)})


def overwritten(content: str | bytes, name: str = "record.json"):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


DAMAGE = {
    "no record.json": (lambda p: (p / "record.json").unlink(), "it has no record.json"),
    "cut short": (overwritten('{"schema_version": 1, '), "record.json is damaged"),
    "not text": (overwritten(b"\xff\xfe\x00"), "record.json is damaged"),
    "not an object": (overwritten("[]"), "no schema_version"),
    "another run's": (overwritten(whole(content("another run", files={}))), f"belongs to the run {OTHER}"),
    "a lost file": (lambda p: (p / "windows.parquet").unlink(), "windows.parquet is missing"),
    "a torn file": (overwritten("PAR1", "windows.parquet"), "windows.parquet is cut short"),
    "another schema": (overwritten('{"schema_version": 99}'), "schema 99 and this version of QuickSilver reads schema 4"),
}


@pytest.mark.parametrize(("spoil", "says"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_record_is_reported_by_path_with_the_remedy_and_stays_untouched(store, spoil, says):
    folder = make_record(store).path
    spoil(folder)
    before = below(folder)
    for read in (lambda: store.get(PRINT), lambda: record_frame(store.root)):
        with refused_in_a_line(says, "Move that folder away") as caught:
            read()
        assert str(caught.value).startswith(str(folder))
    assert below(folder) == before


def test_the_frame_has_one_row_a_record_in_order_of_their_start(store):
    assert len(record_frame(store.root)) == 0
    first = make_record(store, "b", started="2026-01-02", ours={"median": 3.0})
    second = make_record(store, "a", started="2026-01-03", ours={"median": 7.0, "samples": [7.0]})
    with store.draft(PRINT):
        frame = record_frame(store.root)  # a run in the making is no record
    assert list(frame.index) == [first.fingerprint, second.fingerprint]
    assert list(frame["ours.median"]) == [3.0, 7.0]
    assert not {"ours.samples", "checksum"} & set(frame)


def test_a_record_names_its_dense_one_or_says_that_it_is_gone(tmp_path):
    store, dense = Store(tmp_path), fakes.make(tmp_path, "dense all")
    record = fakes.make(tmp_path, "a run", per_token=0.1)
    assert store.dense_of(record) == store.dense_of(dense) == dense
    dense.path.rename(store.root / "elsewhere")
    with pytest.raises(QuickSilverError, match="run the same command again"):
        store.dense_of(record)


# --- numbers that cannot be so ----------------------------------------------------------------------------------------------------
EDITS = {
    "not a number": ({"ppl": float("nan")}, "NaN is no number"),
    "a perplexity that its nats do not give": ({"ppl": 1.9}, "ppl is 1.9, which"),
    "text for a number": ({"ppl": "2.0"}, "ppl is '2.0', not a number"),
    "half a token": ({"tokens": 6.5}, "tokens is 6.5, not a whole number"),
    "no tokens": ({"tokens": 0}, "it scored 0 tokens"),
    "one operation": ({"executed_flops": 1}, "executed_flops is 1, of"),
    "more than could be": ({"executed_flops": 10**15}, "executed_flops is 1000000000000000, of"),
    "fewer than none": ({"nominal_flops": -1}, "nominal_flops is -1"),
    "other weights": ({"model": {"weights_digest": "ab" * 32}}, "the digest of its weights is not the one in its identity"),
    "another text": ({"data": {"digest": "ab" * 32}}, "the digest of its text is not the one in its identity"),
    "another identity": ({"identity": {"numerics_version": 99}}, "identity is not that of its fingerprint"),
    "no model": ({"model": None}, "model is None, not an object"),
    "a section that is missing": ({"environment": {"threads": "all"}}, "environment.threads is 'all', not a whole number"),
    "a negative time": ({"prompt_ms": -1.0}, "prompt_ms is -1, and below 0"),
    "a share above 1": ({"words": [{"halted_share": 1.5}]}, "halted_share is 1.5, and no share from 0 to 1"),
    "a negative divergence": ({"kl_nats": -0.5}, "kl_nats is -0.5, and below 0"),
    "negative bytes": ({"kv_bytes_resident": -1}, "bytes of the KV cache are negative"),
}


def merged(entries: dict, changes: dict) -> dict:
    return {**entries, **{k: {**entries[k], **v} if isinstance(v, dict) and v else v for k, v in changes.items()}}


@pytest.mark.parametrize(("changes", "says"), EDITS.values(), ids=EDITS)
def test_numbers_that_cannot_be_so_are_refused_with_one_line(tmp_path, changes, says):
    record = fakes.make(tmp_path, "a run", per_token=0.1)
    (record.path / "record.json").write_text(whole(merged(dict(record.content), changes)))
    with refused_in_a_line(says):
        load_record(record.path)


def test_any_edit_of_record_json_is_noticed(tmp_path):
    record = fakes.make(tmp_path, "a run", per_token=0.1)
    path = record.path / "record.json"
    text = path.read_text()
    path.write_text(text.replace('"bits_per_byte": 1.25', '"bits_per_byte": 1.24', 1))  # as plausible as before
    with pytest.raises(ConfigError, match="its checksum is another"):
        load_record(record.path)
    path.write_text(json.dumps(json.loads(text)))  # the same entries, laid out otherwise
    assert load_record(record.path).quality.bits_per_byte == 1.25


def test_windows_must_add_up_to_what_the_record_says(tmp_path):
    record = fakes.make(tmp_path, "a run", per_token=0.1)
    other = fakes.make(tmp_path / "other", "a run", per_token=0.2)
    content = {key: value for key, value in record.content.items() if key not in ("files", CHECKSUM)}
    mixed = fakes.publish(tmp_path / "mixed", content, other.windows)
    with pytest.raises(ConfigError, match=r"nll_nats of windows.parquet does not add up"):
        _ = mixed.windows


# --- leases: one holder at a time, on one machine and between machines that share nothing but a folder --------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a run.lock"


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


def holding(path: Path, ready, host: str = lease.host_name()) -> None:
    on_host(host)
    assert lease.take(path) is not None
    ready.set()
    signal.pause()


def test_of_a_killed_process_of_this_machine_it_is_taken_at_once(path):
    with forked(holding, path):
        assert lease.take(path) is None
    taken = lease.take(path)
    assert lease.holder(path) == taken.holder


def test_of_another_machine_only_silence_tells(path):
    with forked(holding, path, "node-2"):
        pass
    assert lease.take(path) is None  # its process number says nothing here: a process of this machine may have it as well
    assert lease.holder(path).host == "node-2"
    silent_for(path, lease.LEASE_S / 2)
    assert lease.take(path) is None
    silent_for(path, lease.LEASE_S + 5)
    assert lease.take(path) is not None


def test_a_heartbeat_keeps_it(path):
    held = lease.take(path)
    silent_for(path, lease.LEASE_S + 5)
    held.beat()
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
def test_a_draft_of_another_machine_stays_as_long_as_it_is_touched(tmp_path):
    store = Store(tmp_path)
    with forked(drafting, tmp_path, "node-2"):
        assert store.clean() == []
        assert {name: who.host for name, who in store.in_the_making().items()} == {PRINT: "node-2"}
    assert store.clean() == []  # dead, which nobody here can know yet
    for left in (*store.drafts.glob("*.lease"), *tmp_path.glob("locks/*.lock")):
        silent_for(left, lease.LEASE_S + 5)
    assert len(store.clean()) == 1
    assert store.in_the_making() == {}
    with store.turn(PRINT, waiting=lambda: pytest.fail("a dead machine's turn is waited for")):
        pass
