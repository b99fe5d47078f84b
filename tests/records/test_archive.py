"""Committed records: many in two files, read back as they were written, small, first to be found, and not believed once changed."""

import io
import json
import lzma
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from repository import below
from safetensors.numpy import load_file

from quicksilver.data.spec import FilesConfig
from quicksilver.records import archive
from quicksilver.records.keeping import commit_records
from quicksilver.records.record import PACKED, PACKED_TRACE, SIGNALS, TRACE, Record, check_files, load_record, record_frame
from quicksilver.records.store import KEPT, Store
from quicksilver.runs.config import compose
from quicksilver.runs.jobs import INDEX, RecordIndex
from quicksilver.runs.run import ensure, plan, store_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.trace import Trace

KINDS = ("int64", "float64", "Int64", "object")


@st.composite
def frames(draw):
    """Windows of one record: columns that other records lack, or have with another type."""
    rows = draw(st.integers(1, 5))
    kinds = draw(st.dictionaries(st.sampled_from(["window", "nll_nats", "bytes", "note"]), st.sampled_from(KINDS), min_size=1))
    values = {
        "int64": st.integers(-(2**53), 2**53),
        "float64": st.floats(allow_infinity=False),
        "Int64": st.one_of(st.integers(-(2**53), 2**53), st.none()),
        "object": st.one_of(st.text(max_size=3), st.none()),
    }
    kinds = {name: "object" if name == "note" else kind.replace("object", "float64") for name, kind in kinds.items()}
    columns = {name: draw(st.lists(values[kind], min_size=rows, max_size=rows)) for name, kind in kinds.items()}
    return pd.DataFrame({name: pd.Series(column, dtype=kinds[name]) for name, column in columns.items()})


def written(folder, drawn, lines=()) -> list[dict]:
    """The lines of an archive of these windows."""
    entries = enumerate(map(archive.described, drawn))
    lines = lines or [{"ppl": 2.5, "fingerprint": f"{number:020x}", archive.ENTRY: entry} for number, entry in entries]
    archive.write(folder, lines, {one["fingerprint"]: frame for one, frame in zip(lines, drawn, strict=True)})
    return lines


@given(drawn=st.lists(frames(), min_size=1, max_size=4))
def test_windows_are_read_back_to_the_last_digit(drawn, tmp_path_factory) -> None:
    lines = written(folder := tmp_path_factory.mktemp("records"), drawn)
    assert archive.names(folder) == [one["fingerprint"] for one in lines]
    for one, frame in zip(lines, drawn, strict=True):
        entry = json.loads(archive.text(folder, one["fingerprint"]))[archive.ENTRY]
        assert entry == one[archive.ENTRY]
        pd.testing.assert_frame_equal(archive.windows(folder, one["fingerprint"], entry), frame, check_exact=True)


@pytest.fixture
def two(tmp_path):
    """A folder of two records, and their windows."""
    drawn = [pd.DataFrame({"window": range(size), "nll_nats": np.linspace(1, 2, size)}) for size in (3, 5)]
    return tmp_path, written(tmp_path, drawn), drawn


def test_pandas_opens_both_files_alone(two) -> None:
    folder, lines, drawn = two
    records = pd.read_json(folder / archive.RECORDS, lines=True, dtype={"fingerprint": str})
    assert records["fingerprint"].tolist() == [one["fingerprint"] for one in lines]
    windows = pd.read_parquet(folder / archive.WINDOWS)
    assert windows.groupby("record").size().tolist() == [len(frame) for frame in drawn]
    elsewhere = folder / "without an archive"
    assert (archive.names(elsewhere), archive.text(elsewhere, "0" * 20)) == ([], None)


def test_what_was_changed_or_damaged_is_said_with_the_remedy(two) -> None:
    folder, lines, drawn = two
    entry, name = lines[0][archive.ENTRY], lines[0]["fingerprint"]
    written(folder, [drawn[0].assign(nll_nats=drawn[0]["nll_nats"] + 1e-9), drawn[1]], lines)
    with pytest.raises(ConfigError, match=f"windows of {name} are not those that were recorded.*git checkout"):
        archive.windows(folder, name, entry)
    for file, content, says, read in (
        (archive.WINDOWS, b"cut", "windows.parquet is damaged", lambda: archive.windows(folder, name, entry)),
        (archive.RECORDS, archive.packed(b"{}\n"), "line 1 is no record", lambda: archive.names(folder)),
        (archive.RECORDS, b"cut", "records.jsonl.xz is damaged", lambda: archive.text(folder, name)),
    ):
        (folder / file).write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            read()


@pytest.mark.parametrize("columns", [["count", "name", "truth", "steps", "value"], ["count", "value"]])
def test_columns_are_read_back_as_they_were_whatever_their_kind(columns, tmp_path) -> None:
    path = tmp_path / "odd.parquet"
    pd.DataFrame(
        {
            "count": pd.array([1, None, 3] * 20, dtype="Int64"), "name": ["a", "bb", None] * 20, "truth": [True, False, True] * 20,
            "steps": [[1, 2], [], [3]] * 20, "value": np.linspace(0, 1, 60, dtype="float32"),
        }
    ).to_parquet(path, index=False)  # fmt: skip
    content = archive.columns_of(path, columns)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(content)), pd.read_parquet(path)[columns])
    assert len(content) < path.stat().st_size


# --- records of runs that are committed -------------------------------------------------------------------------------------------
HALTING = ["modules=[halting]", "modules.halting.tau_entropy=null", "modules.halting.tau_drift=0.9"]


@pytest.fixture(scope="module")
def made(world, tmp_path_factory):
    words = [*world, *HALTING, f"results_dir={tmp_path_factory.mktemp('made') / 'results'}"]
    config = compose(words)
    (record,) = ensure([config])
    return config, record, words


def keep(store: Store, record: Record, *parts: str) -> Record:
    """Commit it with these further files; the record that is read then."""
    commit_records(store, {record.fingerprint: set(parts)})
    return load_record(store.root / KEPT / record.fingerprint)


def test_a_kept_record_stays_unless_it_is_renewed(made, tmp_path) -> None:
    config, record, _ = made
    store = Store(shutil.copytree(config.results_dir, tmp_path / "results"))
    keep(store, record)
    (store.path(record.fingerprint) / "record.json").write_text("{")  # another one of its name
    with pytest.raises(ConfigError, match="damaged"):
        keep(store, record)
    renewed = commit_records(store, {record.fingerprint: set()}, renewed=[record.dense_fingerprint])
    assert record.fingerprint in {path.name for path in renewed}
    assert load_record(store.root / KEPT / record.fingerprint).quality == record.quality


def test_a_kept_record_is_whole_without_what_is_large_and_comes_first(made, tmp_path) -> None:
    config, record, words = made
    store = Store(config.results_dir)
    with pytest.raises(ConfigError, match="no run 0123456789abcdef0123, 1123456789abcdef0123. A record needs"):
        commit_records(store, {f"{digit}123456789abcdef0123": set() for digit in range(2)})
    kept = commit_records(store, {record.fingerprint: set()})
    assert {path.name for path in kept} == {record.fingerprint, record.dense_fingerprint}
    again = load_record(store.root / KEPT / record.fingerprint)
    check_files(again)
    assert again.trace_path is None
    assert TRACE in again.content["left_out"]
    assert str(store.root) not in archive.text(store.root / KEPT, record.fingerprint)
    assert again.quality == record.quality
    pd.testing.assert_frame_equal(again.windows, record.windows, check_exact=True)
    assert (again.is_kept, record.is_kept) == (True, False)
    assert not again.path.exists()  # nothing of it is large enough for a folder of its own
    content = below(store.root / KEPT)
    assert sum(map(len, content.values())) < 0.5 * sum(map(len, below(store.runs).values()))
    keep(store, record)
    assert below(store.root / KEPT) == content
    assert store.get(record.fingerprint).path.parent.name == KEPT
    assert store_of(compose([*words, "records=own"])).get(record.fingerprint).path.parent.name == "runs"
    assert set(record_frame(config.results_dir).index) == {record.fingerprint, record.dense_fingerprint}
    (clone := tmp_path / "results").mkdir()  # without runs: nothing is run unless it is asked to
    (store.root / KEPT).rename(clone / KEPT)
    here, own = (compose([*words, f"results_dir={clone}", *more]) for more in ([], ["records=own"]))
    assert [[step.done for step in plan([config]).steps] for config in (here, own)] == [[True, True], [False, False]]
    assert here.identity() == own.identity()


def test_records_are_not_replaced_where_something_else_lies_among_them(made, tmp_path) -> None:
    config, record, _ = made
    store = Store(shutil.copytree(config.results_dir, tmp_path / "results"))
    kept = keep(store, record, TRACE).path.parent
    for name in ("notes.txt", f"{record.fingerprint}/notes.txt", "calibration/notes.txt", ".git/config"):
        (kept / name).parent.mkdir(exist_ok=True)
        (kept / name).write_text("mine")
        before = below(store.root)
        with pytest.raises(ConfigError, match=r"none of the repository's records.*move it away"):
            keep(store, record)
        assert below(store.root) == before
        (kept / name).unlink()
    keep(store, record, TRACE)
    (kept / "link").symlink_to(store.runs)
    with pytest.raises(ConfigError, match="link"):
        keep(store, record)
    (kept / "link").unlink()
    kept.rename(store.root / "elsewhere")
    kept.symlink_to(store.root / "elsewhere")
    before = below(store.root / "elsewhere")
    with pytest.raises(ConfigError, match="is a link to"):
        keep(store, record)
    assert below(store.root / "elsewhere") == before


def test_a_trace_that_is_drawn_is_kept_packed_and_a_folder_of_the_record_has_what_the_run_wrote(made) -> None:
    config, record, _ = made
    store = Store(config.results_dir)
    whole, size = Trace.load(record.trace_path), record.trace_path.stat().st_size
    away = store.root / "away"
    for runs in (store.runs, away):  # from runs/, and again from records/ where the runs are gone
        check_files(kept := keep(store, record, TRACE))
        assert kept.trace_path.name == PACKED_TRACE
        assert kept.trace_path.stat().st_size < 0.5 * size
        assert TRACE not in kept.content["left_out"]
        for one, other in zip(Trace.load(kept.trace_path).passes, whole.passes, strict=True):
            assert torch.equal(one.halt_layer, other.halt_layer)
        with kept.folder() as folder:
            assert {path.name for path in folder.iterdir()} == {"record.json", "windows.parquet", PACKED_TRACE}
            assert json.loads((folder / "record.json").read_text())["fingerprint"] == record.fingerprint
            assert pd.read_parquet(folder / "windows.parquet").equals(kept.windows)
        assert not folder.exists()
        if runs.exists():
            runs.rename(away)
    away.rename(store.runs)
    with record.folder() as folder:
        assert folder == record.path
    kept.trace_path.write_bytes(b"not packed")
    with pytest.raises(ConfigError, match="not a readable trace"):
        Trace.load(kept.trace_path)


@pytest.fixture(scope="module")
def looked_into(world, tmp_path_factory):
    """A run that looked into two sentences, and its store."""
    results = tmp_path_factory.mktemp("signals") / "results"
    words = [word for word in world if not word.startswith("measure")]
    words += ["measure=signals", "measure.signals.sentences=['abc de','hg abc']", "measure.signals.windows=0"]
    (record,) = ensure([compose([*words, *HALTING, f"results_dir={results}"])])
    return Store(results), record


def test_of_a_file_the_parts_that_are_read_are_kept_to_the_last_digit(looked_into) -> None:
    store, record = looked_into
    whole, some = record.signals(0), record.signals(1)[["layer", "slot", "token", "active", "drift_l2"]]
    arrays, parts = load_file(record.path / SIGNALS), [f"{SIGNALS}:{part}" for part in ("0.*", "1.run.active", "1.run.drift_l2")]
    for _ in range(2):  # from runs/, then a second time over what was kept
        check_files(kept := keep(store, record, *parts))
        pd.testing.assert_frame_equal(kept.signals(0), whole)
        pd.testing.assert_frame_equal(kept.signals(1), some)
        assert f"{SIGNALS}:1.run.state_norm" in kept.content["left_out"]
        assert all(np.array_equal(array, arrays[name], equal_nan=True) for name, array in kept.arrays(SIGNALS).items())
        content = {path.name: path.read_bytes() for path in kept.path.iterdir()}
        if store.runs.exists():
            store.runs.rename(store.root / "away")
    (store.root / "away").rename(store.runs)
    keep(store, record, *parts)
    assert {path.name: path.read_bytes() for path in kept.path.iterdir()} == content
    kept = keep(store, record, parts[0])
    assert (kept.texts_with_signals, record.texts_with_signals) == ([0], [0, 1])
    with pytest.raises(ConfigError, match="signals of text 1: make the run with records=own"):
        kept.signals(1)
    kept = keep(store, record)
    assert kept.texts_with_signals == []
    with pytest.raises(ConfigError, match="has no signals.safetensors"):
        kept.arrays(SIGNALS)


def test_a_record_of_which_much_is_read_is_passed_over(looked_into, monkeypatch) -> None:
    store, record = looked_into
    whole = (keep(store, record, SIGNALS).path / f"{SIGNALS}{PACKED}").stat().st_size
    monkeypatch.setattr("quicksilver.records.keeping._LARGE_BYTES", whole - 1)
    assert len(commit_records(store, {record.fingerprint: {f"{SIGNALS}:1.run.active"}})) == 2
    assert [path.name for path in commit_records(store, {record.fingerprint: {SIGNALS}})] == [record.dense_fingerprint]


def test_a_kept_record_that_was_changed_is_refused(made) -> None:
    config, record, _ = made
    store = Store(config.results_dir)
    path = keep(store, record).path.parent / archive.RECORDS
    lines = [json.loads(line) | {"ppl": 1.0} for line in lzma.decompress(path.read_bytes()).splitlines()]
    path.write_bytes(archive.packed("\n".join(json.dumps(line, separators=(",", ":")) for line in lines).encode()))
    with pytest.raises(ConfigError, match="checksum"):
        store.get(record.fingerprint)
    with pytest.raises(ConfigError):
        commit_records(store, {"0" * 20: set()})


def test_a_clone_finds_kept_records_of_texts_that_it_does_not_have(made, tmp_path, monkeypatch) -> None:
    config, record, _ = made
    monkeypatch.delenv("QUICKSILVER_DATA", raising=False)
    store, asked = Store(config.results_dir), ["dataset=elsewhere"]
    keep(store, record)
    answers = RecordIndex(store.root)
    answers.put(asked, config, fingerprint=record.fingerprint)
    answers.put(["dataset=forgotten"], config, fingerprint="0" * 20)
    assert answers.get(asked) is None  # the text may have changed: it is looked at every time
    (text := tmp_path / "text.txt").write_text("one text")
    monkeypatch.setenv("QUICKSILVER_DATA", str(tmp_path))
    dataset = replace(config.dataset, reader="text", task=None, files=FilesConfig(text.name))
    ours = replace(config, model=replace(config.model, path="embedded:any"), dataset=dataset)
    answers.put(asked, ours, fingerprint=record.fingerprint)
    answers.save()
    assert RecordIndex(store.root).get(asked) is not None  # below data.root it is remembered until the file changes
    text.write_text("another text")
    assert RecordIndex(store.root).get(asked) is None
    monkeypatch.delenv("QUICKSILVER_DATA")
    index = answers.index()
    assert len(index["answers"]) == 2
    clone = tmp_path / "results"
    shutil.copytree(store.root / KEPT, clone / KEPT)
    (clone / INDEX).write_text(json.dumps(index))
    assert RecordIndex(clone).get(asked)[0].fingerprint == record.fingerprint
    assert RecordIndex(clone).get(["dataset=forgotten"]) == (None, None)  # known not to be here: nothing is composed to find out
    assert RecordIndex(clone, "own").get(asked) is None
    monkeypatch.setenv("QUICKSILVER_DATA", str(tmp_path))
    assert RecordIndex(clone).get(asked) is None  # a text that is at hand is what counts
    monkeypatch.delenv("QUICKSILVER_DATA")
    (clone / INDEX).write_text(json.dumps(index | {"stamp": "of another version"}))
    assert RecordIndex(clone).get(asked) is None
