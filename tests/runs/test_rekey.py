"""Records find their new names, whenever the work is interrupted, and nothing but names changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from harness_world import make_world

from quicksilver import numerics
from quicksilver.cli import main as console
from quicksilver.records.identity import canonical
from quicksilver.records.record import load_record
from quicksilver.records.store import Store
from quicksilver.runs import golden
from quicksilver.runs.config import RunConfig, compose
from quicksilver.runs.parts import is_on
from quicksilver.runs.rekey import _MEASUREMENTS, _SOURCES_OF_VERSION_1, _identity_of_schema_1, rekey
from quicksilver.runs.run import ensure, plan
from quicksilver.runtime.errors import QuickSilverError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two records and a dense one, under the identities of today: the store, and the overrides of the two."""
    folder = tmp_path_factory.mktemp("world")
    words = [*make_world(folder), "modules=[halting]", "modules.halting.tau_entropy=null"]
    both = [["modules.halting.tau_drift=p60"], ["modules.halting.tau_drift=0.9"]]
    ensure([compose([*words, f"results_dir={folder / 'results'}", *more]) for more in both])
    return folder / "results", [[*words, *more] for more in both]


@pytest.fixture
def store(made, tmp_path) -> Store:
    """A copy of these records."""
    shutil.copytree(made[0], tmp_path / "results")
    return Store(tmp_path / "results")


@pytest.fixture
def configs(made, store) -> list[RunConfig]:
    return [compose([*words, f"results_dir={store.root}"]) for words in made[1]]


@pytest.fixture
def renamed_option(monkeypatch):
    """A version whose identities have another form: every record has another name."""
    identity = RunConfig.identity
    monkeypatch.setattr(RunConfig, "identity", lambda self: identity(self) | {"form": 2})


def folders(store: Store) -> set[str]:
    return {p.name for p in store.runs.iterdir() if p.is_dir()}


def contents(store: Store) -> set[tuple[str, str]]:
    """Every file but record.json by what is in it."""
    files = [p for p in store.runs.rglob("*") if p.is_file() and p.name not in ("record.json", ".lock")]
    return {(p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files}


def edit(store: Store, name: str, change) -> None:
    path = store.path(name) / "record.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def flat(config: dict) -> dict:
    """The config as it was when `measure` was flat."""
    measure = config["measure"]
    found = {"name": measure["name"], "batch_windows": measure["batch_windows"]}
    for name, (_, switch, options) in _MEASUREMENTS.items():
        on = name in measure and is_on(name, measure[name])
        found |= {switch: ("shuffle" if on else "none") if switch == "null_control" else on} if switch else {}
        if name in measure:
            found |= {before: measure[name][today] for today, before in options.items() if on or before not in found}
    return {**config, "measure": found}


def to_schema_1(store: Store) -> dict[str, str]:
    """The records as schema 1 had them; new names by old ones."""
    names = {}
    source = _SOURCES_OF_VERSION_1[0]
    for new in folders(store):
        data = load_record(store.path(new)).content
        of = data["identity"]
        content = {
            "config": _identity_of_schema_1(flat(data["config"])),
            "digests": of["digests"],
            "package": "0.1.0",
            "source": source,
        }
        old = hashlib.sha256(json.dumps(canonical(content), sort_keys=True).encode()).hexdigest()[:20]
        names[old] = new
    olds = {new: old for old, new in names.items()}
    for old, new in names.items():

        def back(data, old=old):
            del data["identity"], data["checksum"]
            data["schema_version"], data["fingerprint"] = 1, old
            data["dense_fingerprint"] = data["dense_fingerprint"] and olds[data["dense_fingerprint"]]
            data["package"] = {"version": "0.1.0", "source_digest": source}
            data["config"] = flat(data["config"])
            data |= {"null": data.get("null"), "texts": []}

        edit(store, new, back)
        store.path(new).rename(store.path(old))
    return names


def test_what_has_its_name_keeps_it(store):
    before = folders(store)
    done = rekey(store.root)
    assert (set(done.kept), done.renamed, done.left) == (before, {}, {})


def test_records_of_another_form_of_identity_are_found_again(store, configs, renamed_option):
    before, files = folders(store), contents(store)
    assert not any(step.done for step in plan(configs))
    done = rekey(store.root)
    assert set(done.renamed) == before
    assert folders(store) == set(done.renamed.values())
    assert all(step.done for step in plan(configs))
    assert contents(store) == files
    for name in folders(store):
        record = load_record(store.path(name))
        assert store.dense_of(record).dense_fingerprint is None


def test_schema_1_is_brought_up_to_date(store, configs):
    names, files = to_schema_1(store), contents(store)
    with pytest.raises(QuickSilverError, match=r"schema 1 .*`quicksilver rekey"):
        load_record(store.path(next(iter(names))))
    assert rekey(store.root).renamed == names
    assert all(step.done for step in plan(configs))
    assert contents(store) == files


@pytest.mark.parametrize("step", range(6))
def test_killed_anywhere_it_goes_on_and_loses_nothing(store, configs, renamed_option, monkeypatch, step):
    before, files = len(folders(store)), contents(store)
    left = [step]

    def dying(name):
        real = getattr(os, name)

        def call(*arguments):
            if str(store.runs) in str(arguments[-1]):
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying("replace"))
        patch.setattr(os, "rename", dying("rename"))
        with pytest.raises(KeyboardInterrupt):
            rekey(store.root)
    assert contents(store) == files
    done = rekey(store.root)
    assert done.left == {}
    assert len(folders(store)) == before
    assert all(p.name in ("record.json", "windows.parquet", "trace.safetensors", "events.jsonl") for p in store.runs.glob("*/*"))
    assert all(step.done for step in plan(configs))


def test_records_of_other_numbers_are_left(store, renamed_option, monkeypatch):
    monkeypatch.setattr(numerics, "VERSION", numerics.VERSION + 1)
    before = folders(store)
    done = rekey(store.root)
    assert set(done.left) == before == folders(store)
    assert all("its numbers are of version 1" in why for why in done.left.values())


def test_what_is_damaged_edited_or_unknown_is_left_with_the_reason(store):
    names = to_schema_1(store)
    one, two = sorted(old for old in names if load(store, old)["dense_fingerprint"])
    (dense,) = set(names) - {one, two}
    edit(store, one, lambda data: data["model"].update(weights_digest="ab" * 32))
    edit(store, two, lambda data: data.update(dense_fingerprint="0" * 20))
    edit(store, dense, lambda data: data["package"].update(source_digest="feed"))
    (store.runs / "torn").mkdir()
    (store.runs / "torn" / "record.json").write_text("{")
    left = rekey(store.root).left
    assert "other code" in left[one]  # its dense record is of other code, as far as anyone can tell
    assert "dense record is not there" in left[two]
    assert "other code (source digest feed)" in left[dense]
    assert "cannot be read" in left["torn"]
    edit(store, dense, lambda data: data["package"].update(source_digest=_SOURCES_OF_VERSION_1[0]))
    assert "do not give its fingerprint" in rekey(store.root).left[one]


def load(store: Store, name: str) -> dict:
    return json.loads((store.runs / name / "record.json").read_text())


def test_two_records_of_one_identity_are_not_merged(store, renamed_option):
    first = next(iter(folders(store)))
    shutil.copytree(store.path(first), store.runs / "a copy")
    before = contents(store)
    done = rekey(store.root)
    assert len(done.left) == 1
    assert "there is a record of that identity" in next(iter(done.left.values()))
    assert contents(store) == before


def test_the_command_refuses_when_the_numbers_changed(store, monkeypatch, capsys):
    def changed(*_):
        raise QuickSilverError("The numbers changed.")

    monkeypatch.setattr(golden, "run", lambda: {})
    monkeypatch.setattr(golden, "compare", changed)
    words = ["rekey", f"results_dir={store.root}"]
    assert console.main(words) == 1
    assert "The numbers changed." in capsys.readouterr().err
    monkeypatch.setattr(golden, "compare", lambda *_: None)
    assert console.main(words) == 0
    assert "3 had it" in capsys.readouterr().out


def test_nothing_there_is_nothing_to_do(tmp_path: Path):
    assert rekey(tmp_path / "nowhere").renamed == {}
