"""A run in blocks: killed wherever you like it goes on behind its last whole block, and its record is that of an undisturbed one, byte for byte."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import thinning
from hypothesis import given, settings
from hypothesis import strategies as st

from quicksilver.measure import perplexity
from quicksilver.records import store as kept
from quicksilver.records.record import RECORD, WINDOWS, Record
from quicksilver.records.store import Blocks, Store
from quicksilver.runs import run as making
from quicksilver.runs.config import RunConfig, compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.run import ensure, plan
from quicksilver.runtime.errors import QuickSilverError
from quicksilver.runtime.trace import _TENSORS as TENSORS
from quicksilver.runtime.trace import Trace

DENSE_BLOCKS = 3  # ten windows in batches of two, two batches a block
CONTEXT = RunContext()  # the model is loaded once
OF_TIME = ("started", "finished", "seconds", "files", "checksum", "environment")


class Killed(BaseException):
    """As SIGKILL: nothing catches it, and what is on disk stays."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(perplexity, "BLOCK_WINDOWS", 5)
    monkeypatch.setattr(kept, "NAP_S", 0.0)


def config_of(world, results: Path, *words: str) -> RunConfig:
    return compose([*world, f"results_dir={results}", "protocol.batch_size=2", "dataset.windows=10", *words])


def run(world, results: Path, *words: str, **options) -> Record:
    return ensure([config_of(world, results, *words)], context=CONTEXT, **options)[0]


MODULES = {
    "continuation": ["protocol=continuation", "modules=[halting_attention,adaptive_quantization]"],
    "all": ["modules=[random_halting]", "measure.null_control.enabled=true"],
    "fused": ["protocol=continuation", "modules=[token_fusion]", "measure.null_control.enabled=true"],
}


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """Undisturbed records by name, each made as one block."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: run(world, folder, *words) for name, words in MODULES.items()}


def same(one: Record, other: Record) -> None:
    names = {path.name for path in one.path.iterdir()}
    assert names == {path.name for path in other.path.iterdir()}
    for name in names - {RECORD, "events.jsonl"}:
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes(), name
    assert WINDOWS in names
    first, second = ({key: entry for key, entry in of.content.items() if key not in OF_TIME} for of in (one, other))
    first["config"], second["config"] = ({**of["config"], "results_dir": ""} for of in (first, second))
    assert first == second


@contextmanager
def computing() -> Iterator[SimpleNamespace]:
    """What this process computes: the blocks that it `written`, which of them kills it, and what happens `before` and `after` each."""
    seen = SimpleNamespace(written=[], kill_at=0, before=lambda path, block: None, after=lambda found: None)
    compute = Blocks._compute

    def write(self, path, block, how):
        seen.before(path, block)
        found = compute(self, path, block, how)
        seen.written.append(f"{path.parents[1].name[:4]} {path.stem}")
        seen.after(found)
        if len(seen.written) == seen.kill_at:
            raise Killed
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blocks, "_compute", write)
        yield seen


@pytest.fixture
def computed():
    with computing() as seen:
        yield seen


@pytest.mark.parametrize("name", MODULES)
def test_a_run_that_is_killed_at_every_block_gives_the_record_of_one_that_is_not(name, whole, world, tmp_path, computed):
    again, record = 0, None
    while record is None and again < 100:
        computed.kill_at = len(computed.written) + 1
        try:
            record = run(world, tmp_path / "results", *MODULES[name])
        except Killed:
            again += 1
    same(record, whole[name])
    assert len(computed.written) == len(set(computed.written)) == again  # each block once
    assert again % DENSE_BLOCKS == 0
    assert again >= 2 * DENSE_BLOCKS
    assert not list(Store(tmp_path / "results").drafts.iterdir())


def test_windows_that_another_process_scored_are_counted(world, tmp_path, computed):
    """Its last block stood as `window 10 of 10`, and this one then fell back to `window 4 of 10, -5 a second`."""
    computed.kill_at = 3
    with pytest.raises(Killed):
        run(world, tmp_path / "results")
    (first,) = Store(tmp_path / "results").drafts.rglob("quality-000000.block")
    first.unlink()
    seen = []
    run(world, tmp_path / "results", progress=seen.append)
    assert [now.windows for now in seen if now.phase == "quality" and now.windows] == [(6, 10), (8, 10), (10, 10)]
    assert all(now.windows_per_s is None or now.windows_per_s >= 0 for now in seen)


@settings(max_examples=thinning.draws(5))
@given(deaths=st.lists(st.integers(1, 8), max_size=4))
def test_wherever_it_is_killed_no_block_is_computed_twice(deaths, whole, world, tmp_path_factory):
    results, deaths = tmp_path_factory.mktemp("killed"), list(deaths)

    def die(path, block):
        if deaths and len(seen.written) >= deaths[0]:
            deaths.pop(0)
            raise Killed  # in the middle of a block

    with computing() as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(perplexity, "BLOCK_WINDOWS", 4)
        seen.before, record = die, None
        while record is None:
            with suppress(Killed):
                record = run(world, results, *MODULES["all"])
    same(record, whole["all"])
    assert len(seen.written) == len(set(seen.written))


def test_memory_holds_one_block_at_a_time_and_one_number_for_decisions_that_are_alike(world, tmp_path, computed, monkeypatch):
    alive, most = [], []
    computed.before = lambda path, block: most.append(sum(one() is not None for one in alive))
    computed.after = lambda found: alive.append(weakref.ref(found))
    traces = []
    monkeypatch.setattr(perplexity.Trace, "concat", lambda found: traces.extend(found) or found[0])
    run(world, tmp_path / "results")
    assert most == [0] * DENSE_BLOCKS
    held = [getattr(one, name).untyped_storage().nbytes() for trace in traces for one in trace.passes for name in TENSORS]
    assert len(held) == 5 * len(TENSORS)
    assert max(held) <= 2


def killed_run(world, results: Path, computed, after: int = 4) -> list[Path]:
    """Run `all` until so many blocks are there; their files, the dense run's not."""
    computed.kill_at = after
    with pytest.raises(Killed):
        run(world, results, *MODULES["all"])
    computed.written.clear()
    computed.kill_at = 0
    return sorted(Store(results).drafts.rglob("*.block"))


def test_a_damaged_block_is_said_and_computed_again_and_no_other(whole, world, tmp_path, computed, capsys):
    path, *_ = killed_run(world, tmp_path / "results", computed, after=5)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    same(run(world, tmp_path / "results", *MODULES["all"]), whole["all"])
    said = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(said) == 1
    assert f"{path} is damaged (its digest is another): these windows are scored again" in said[0]
    assert len(computed.written) == 2 * DENSE_BLOCKS + DENSE_BLOCKS - 5 + 1


@pytest.mark.parametrize("other", ["code", "size"])
def test_blocks_of_other_code_or_of_another_size_are_left_alone(other, whole, world, tmp_path, computed, capsys, monkeypatch):
    before = {path: path.read_bytes() for path in killed_run(world, tmp_path / "results", computed)}
    if other == "code":
        monkeypatch.setattr(kept, "code_digest", lambda: "another")
    else:
        monkeypatch.setattr(perplexity, "BLOCK_WINDOWS", 2)
    monkeypatch.setattr(Blocks, "remove", lambda self: None)
    same(run(world, tmp_path / "results", *MODULES["all"]), whole["all"])
    assert before
    assert all(path.read_bytes() == content for path, content in before.items())
    said = [line for line in capsys.readouterr().err.splitlines() if "left alone" in line]
    assert len(said) == 1
    assert next(iter(before)).parent.name in said[0]


def test_a_run_that_fails_keeps_its_blocks_and_one_that_is_done_leaves_none(world, tmp_path, computed):
    def fail(path, block):
        if len(computed.written) == 4:
            computed.before = lambda path, block: None
            raise QuickSilverError("the logits are not finite")

    computed.before = fail
    with pytest.raises(QuickSilverError, match="not finite"):
        run(world, tmp_path / "results", *MODULES["all"])
    (blocks,) = Store(tmp_path / "results").drafts.iterdir()
    assert len(list(blocks.rglob("*.block"))) == 4 - DENSE_BLOCKS
    record = run(world, tmp_path / "results", *MODULES["all"])
    assert not blocks.exists()
    blocks.mkdir()  # a process was killed between its record and its blocks
    assert Store(tmp_path / "results").clean() == [record.fingerprint]


def test_the_seconds_of_a_record_are_those_of_all_who_worked_on_it(world, tmp_path, computed, monkeypatch):
    pack = kept.packed
    monkeypatch.setattr(kept, "packed", lambda block, seconds: pack(block, 1000.0))
    killed_run(world, tmp_path / "results", computed, after=5)
    record = run(world, tmp_path / "results", *MODULES["all"])
    assert 2000 < record.seconds < 3000


NUMBERS = {"nll_nats": st.floats(allow_nan=False, allow_infinity=False), "executed_flops": st.integers(0)}


@given(rows=st.lists(st.fixed_dictionaries(NUMBERS)), cut=st.integers(0, 10**6))
def test_a_block_is_read_as_it_was_written_or_not_at_all(rows, cut, whole):
    block = perplexity.Block(rows, perplexity.Trace.load(whole["continuation"].trace_path), 3, 4)
    file = kept.packed(block, 1.5)
    found, seconds = kept.unpacked(file)
    assert (found.rows, found.kv_bytes_billed, found.kv_bytes_resident, seconds) == (rows, 3, 4, 1.5)
    assert kept.packed(found, seconds) == file
    place = cut % len(file)
    for damaged in (file[:place], file[:place] + bytes([file[place] ^ 1]) + file[place + 1 :]):
        with pytest.raises(ValueError, match="digest"):
            kept.unpacked(damaged)


def test_two_processes_share_the_blocks_of_a_run_and_make_one_record(whole, world, tmp_path, computed, monkeypatch):
    """The second comes while the first is in its second block of the run, and does all that is free."""
    step, helped = plan([config_of(world, tmp_path, *MODULES["all"])]).wanted[0], []

    def help_it():
        making._help(step, RunContext(), Store(tmp_path), Blocks(Store(tmp_path), step.fingerprint), lambda *_: None)

    def second(path, block):
        if path.parents[1].name == step.fingerprint and block.start == 4 and not helped:
            helped.append(len(computed.written))
            with pytest.raises(InterruptedError):  # it waits for this block, which the first has
                help_it()
            helped.append(len(computed.written))

    monkeypatch.setattr(kept, "time", SimpleNamespace(monotonic=time.monotonic, sleep=Mock(side_effect=InterruptedError)))
    computed.before = second
    same(run(world, tmp_path, *MODULES["all"]), whole["all"])
    assert helped == [DENSE_BLOCKS + 1, DENSE_BLOCKS + 2]  # the third of the first pass; it has no trace yet for the null
    help_it()  # the record is there
    assert len(computed.written) == len(set(computed.written)) == 3 * DENSE_BLOCKS


def test_a_helper_whose_blocks_the_maker_removed_takes_the_makers_record(tmp_path, monkeypatch):
    store, fingerprint = Store(tmp_path), "0" * 20
    blocks = Blocks(store, fingerprint)
    found = blocks.of_pass("quality", shared=True)(
        [range(5)], lambda block, done: perplexity.Block([{"window": 0}], Trace(1), 0, 0)
    )
    blocks.remove()
    store.path(fingerprint).mkdir(parents=True)
    monkeypatch.setattr(Store, "get", lambda *_: "the record")
    with pytest.raises(kept.SupersededError):
        list(found)


def test_a_process_that_would_wait_for_a_run_helps_unless_a_clock_is_read(world, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(making, "_help", lambda step, *_: asked.append(step.config.label))
    monkeypatch.setattr(Store, "turn", lambda self, fingerprint, waiting: waiting() or nullcontext())
    run(world, tmp_path / "quick", "measure=sweep")
    assert asked == ["tiny | file | dense | all"]
    config = compose([*world, "measure=default"])
    assert making.parts_of(config) == 1
    parts = {1: 1, 5: 1, 6: 2, 11: 3, "null": 100}
    assert {windows: making.parts_of(compose([*world, f"dataset.windows={windows}"])) for windows in parts} == parts
    run(world, tmp_path / "timed", "measure=default", "measure.emissions.enabled=false", "dataset.windows=2")
    assert len(asked) == 1
