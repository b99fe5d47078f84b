"""records=checked: committed quality results are reused where the first windows are the same here."""

import json
import math
import shutil

import fakes
import pytest

from quicksilver.cli.progress import summary
from quicksilver.records import archive
from quicksilver.records.keeping import commit_records
from quicksilver.records.record import CHECKSUM, checksum, load_record
from quicksilver.records.store import CALIBRATIONS, KEPT, Store
from quicksilver.report.provenance import confirmation
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure, plan
from quicksilver.runs.sweep import Manifest, Sweep, SweepRun

DRIFT = ["modules=[halting]", "modules.halting.tau_entropy=null", "modules.halting.tau_drift=0.9"]
TIMED = ["measure.latency.enabled=true"]


@pytest.fixture(scope="module")
def committed(world, tmp_path_factory):
    return cloned([*world, *DRIFT, *TIMED], tmp_path_factory.mktemp("committed"))


@pytest.fixture
def clone(committed, tmp_path):
    """The words of a run, and a results folder in which the repository has its record."""
    words, kept = committed
    folder = shutil.copytree(kept.path.parents[1], tmp_path / "clone")
    return [*words, f"results_dir={folder}"], load_record(folder / KEPT / kept.fingerprint)


def cloned(words, tmp_path):
    made, clone = tmp_path / "made", tmp_path / "clone"
    (record,) = ensure([compose([*words, f"results_dir={made}"])])
    commit_records(Store(made), {record.fingerprint: set()})
    clone.mkdir()
    (made / KEPT).rename(clone / KEPT)
    return [*words, f"results_dir={clone}", "records=checked"], load_record(clone / KEPT / record.fingerprint)


def shifted(nats: float, kernel: str | None = None):
    """An edit of `change`: every token costs so many nats more, and another kernel computed."""

    def edit(frame, content) -> None:
        frame["nll_nats"] += nats * frame["tokens"]
        content["nll_nats"] = float(frame["nll_nats"].sum())
        content["ppl"] = content["ppl"] * math.exp(nats)
        if kernel is not None:
            content["kernels"] = {"int8_dynamic": kernel}

    return edit


def change(record, edit) -> None:
    """Other windows and another line, whole as the repository might have them."""
    folder = record.path.parent
    records = {name: load_record(folder / name) for name in archive.names(folder)}
    frames = {name: one.windows.copy() for name, one in records.items()}
    contents = {name: dict(one.content) for name, one in records.items()}
    edit(frames[record.fingerprint], contents[record.fingerprint])
    for name, content in contents.items():
        content[archive.ENTRY] = archive.described(frames[name])
        content[CHECKSUM] = checksum(content)
    archive.write(folder, [*contents.values()], frames)


def test_a_batch_is_scored_again_times_are_measured_and_the_record_that_is_kept_says_so(clone) -> None:
    words, kept = clone
    (found,) = ensure([compose(words)])
    assert found.path.parent.name == "runs"
    assert (found.confirmed.windows, found.confirmed.of, found.confirmed.agrees) == (4, 10, True)
    assert found.confirmed.largest_difference_nats < 1e-5
    assert found.quality == kept.quality
    assert "confirmed    quality is the repository's: 4 of 10 windows were scored again" in summary(found)
    assert found.windows.equals(kept.windows)
    assert found.content["latency_ms"]["samples"] != kept.content["latency_ms"]["samples"]
    assert "nats a token from the repository's record" in confirmation([found])
    assert fakes.events(found)[2:4] == ["confirm", "latency"]
    assert [step.done for step in plan([compose(words)]).steps] == [True, True]
    store = Store(found.path.parents[1])
    commit_records(store, {found.fingerprint: set()})
    timed = load_record(kept.path)
    assert timed.content["latency_ms"] == found.content["latency_ms"]
    assert timed.quality == kept.quality
    assert "made again; 4 of 10 windows verified identical" in confirmation([timed])
    store.runs.rename(store.root / "away")
    (again,) = ensure([compose(words)])
    assert again.confirmed.agrees


def twice_the_work(frame, content) -> None:
    frame["executed_flops"] *= 2
    content["executed_flops"] *= 2


@pytest.mark.parametrize(("edit", "apart"), [(shifted(0.01), 0.01), (twice_the_work, 0.0)])
def test_what_comes_out_otherwise_is_measured_as_a_whole(edit, apart, clone) -> None:
    words, kept = clone
    true = kept.quality
    change(kept, edit)
    (found,) = ensure([compose(words)])
    assert not found.confirmed.agrees
    assert found.confirmed.largest_difference_nats == pytest.approx(apart, rel=1e-3, abs=1e-5)
    assert (found.quality.ppl, found.quality.executed_flops) == (pytest.approx(true.ppl), true.executed_flops)
    assert "measured here as a whole" in confirmation([found])
    assert (found.path / "trace.safetensors").exists()


@pytest.mark.processor
def test_what_a_number_format_leaves_is_confirmed_and_another_kernel_is_measured(world, tmp_path, capsys) -> None:
    words, kept = cloned([*world, *TIMED, "dataset.windows=4", "modules=[int8_dynamic]"], tmp_path)
    kernel = kept.kernels["int8_dynamic"]

    def made_after(edit):
        shutil.rmtree(tmp_path / "clone" / "runs", ignore_errors=True)
        change(kept, edit)
        (found,) = ensure([compose(words)])
        return found

    found = made_after(shifted(0.02))
    assert (found.confirmed.agrees, found.confirmed.number_format) == (True, "integer")
    assert "1 agrees within the rounding of integer, so" in confirmation([found])
    capsys.readouterr()
    assert not made_after(shifted(-0.02, "saturating on cpu")).confirmed.agrees
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "saturating" in line]
    made_by = "the repository's record was made by saturating, which is not exact or not here, and this"
    assert said.startswith(f"{kept.fingerprint}: {made_by}")
    assert "measured here as a whole. records=any" in said
    assert not made_after(shifted(0.5, kernel)).confirmed.agrees


def test_own_measures_what_was_only_confirmed_and_takes_its_place(clone) -> None:
    words, kept = clone
    ensure([compose(words)])
    own = compose([*words, "records=own"])
    assert [step.done for step in plan([own]).steps] == [False, False]
    store = Store(compose(words).results_dir)
    sweep = Sweep(store.root, Manifest("one", (), (SweepRun(1, (), (), kept.fingerprint),), records="own"))
    assert ([one.state for one in sweep.states()], sweep.is_open(sweep.manifest.runs[0])) == (["waiting"], True)
    blocks = store.drafts / kept.fingerprint
    blocks.mkdir(parents=True)
    assert store.clean() == []  # another command, while a run with records=own leaves its blocks there
    assert blocks.is_dir()
    (found,) = ensure([own])
    assert found.confirmed is None
    assert found.quality.nll_nats == pytest.approx(kept.quality.nll_nats)
    assert ([one.state for one in sweep.states()], sweep.is_open(sweep.manifest.runs[0])) == (["done"], False)
    store.clean()
    assert {path.name for path in store.runs.iterdir() if path != store.drafts} == {kept.fingerprint, kept.dense_fingerprint}
    (again,) = ensure([compose(words)])
    assert again.confirmed is None  # all of it was measured here: nothing better is to be had


@pytest.mark.parametrize("more", [[], ["measure.signals.enabled=true", "measure.signals.windows=1"]])
def test_a_damaged_record_and_measurements_that_windows_do_not_determine_are_made(more, clone) -> None:
    words, kept = clone
    if not more:
        (kept.path.parent / archive.WINDOWS).write_bytes(b"cut")
    (found,) = ensure([compose([*words, *more])])
    assert found.confirmed is None


def test_calibrations_of_the_repository_are_read_where_its_records_count(clone) -> None:
    words, kept = clone
    asks = [*(word for word in words if "tau_drift" not in word and word not in TIMED), "modules.halting.tau_drift=p50"]
    config = compose(asks)
    ensure([config])
    (path,) = (Store(config.results_dir).root / CALIBRATIONS).glob("*.json")
    calibration = json.loads(path.read_text())
    percentiles = calibration["percentiles"]
    calibration["percentiles"] = {key: [row and [0.0] * len(row) for row in rows] for key, rows in percentiles.items()}
    path.unlink()
    (kept.path.parent / CALIBRATIONS).mkdir(exist_ok=True)
    (kept.path.parent / CALIBRATIONS / path.name).write_text(json.dumps(calibration))
    continuation = ["protocol=continuation", "protocol.window_tokens=32", "protocol.prompt_tokens=24"]
    (checked,), (own,) = (ensure([compose([*asks, *continuation, *counting])]) for counting in ([], ["records=own", "seed=1"]))
    assert checked.calibration.signals == own.calibration.signals
    of_checked, of_own = ({bound for layers in one.thresholds["halting"].values() for bound in layers} for one in (checked, own))
    assert of_checked == {0.0} != of_own
