"""`quicksilver run -m` and `quicksilver sweep`: runs under one name, made in one process, found again by it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from markupsafe import escape
from repository import ROOT, blocks
from saying import unsaid
from thinning import first

import quicksilver.runs.run as harness_run
from quicksilver.cli import main as console
from quicksilver.cli import progress, sweeping
from quicksilver.models import loading
from quicksilver.records import lease, stats
from quicksilver.records.record import record_frame
from quicksilver.records.store import Draft, Store
from quicksilver.report import sweep_status
from quicksilver.report.sweep_status import Board
from quicksilver.runs.config import hydra_started
from quicksilver.runs.sweep import Manifest, Sweep, SweepRun, claimed, labels
from quicksilver.runtime.errors import QuickSilverError

DEPTHS = ["modules=[static_depth]", "modules.static_depth.depth=0.2,0.5,0.8", "measure=sweep", "dataset.windows=3"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def sweep(prints):
    """Gives words to `quicksilver run -m`, which must end with this exit code; returns what it prints."""
    return lambda *words, code=0: prints("run", "-m", *words, code=code)


def states(results: Path, name: str = "depths") -> list[str]:
    return [state.state for state in Sweep.load(results, name).states()]


@pytest.fixture(scope="module")
def made(world, tmp_path_factory):
    """A finished sweep of three runs: its results folder, what it printed, and how often a model was loaded."""
    results = tmp_path_factory.mktemp("made") / "results"
    loads, load = [], loading.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quicksilver.runs.context.load", lambda *args: loads.append(1) or load(*args))
        assert console.main(["run", "-m", *world, f"results_dir={results}", "name=depths", *DEPTHS]) == 0
    return results, len(loads)


@pytest.fixture
def sweep_folder(tmp_path: Path) -> Path:
    """A results folder with a sweep of one run that failed, and in it a file of somebody else."""
    there = Sweep(tmp_path, Manifest("depths", (), (SweepRun(1, ("seed=0",), ()),)))
    there.create()
    there.failed(there.manifest.runs[0], ValueError("broken"))
    (there.folder / "failed" / "notes.txt").write_text("mine")
    return there.folder


def test_values_in_brackets_are_printed_as_they_are(tmp_path):
    runs = tuple(SweepRun(i, *((f"modules=[{name}]",),) * 2) for i, name in enumerate(("halting", "bold"), start=1))
    there = Sweep(tmp_path, Manifest("brackets", (), runs))
    there.create()
    there.failed(runs[0], ValueError("stages=[/b] is no list"))
    assert all(word in Board(there).text() for word in ("[halting]", "[bold]", "stages=[/b] is no list"))


def test_what_is_tried_again_removes_its_own_failure_alone(sweep_folder):
    there = Sweep.load(sweep_folder.parents[1], "depths")
    there.forget_failures()
    assert [path.name for path in (sweep_folder / "failed").iterdir()] == ["notes.txt"]
    assert [state.state for state in there.states()] == ["waiting"]
    (sweep_folder / "failed" / "notes.txt").unlink()
    there.forget_failures()
    assert not (sweep_folder / "failed").exists()


@pytest.mark.parametrize("place", ["", "failed", "failed/0001.json"])
def test_no_failure_is_removed_through_a_link(sweep_folder, place):
    elsewhere = sweep_folder.parents[1] / "elsewhere"
    (sweep_folder / place).rename(elsewhere)
    (sweep_folder / place).symlink_to(elsewhere)
    before = [(path, path.is_file() and path.read_bytes()) for path in (elsewhere, *elsewhere.rglob("*"))]
    with pytest.raises(QuickSilverError, match="is a link to"):
        Sweep.load(sweep_folder.parents[1], "depths").forget_failures()
    assert [(path, path.is_file() and path.read_bytes()) for path in (elsewhere, *elsewhere.rglob("*"))] == before


@pytest.mark.parametrize(
    "change", [{"name": "../../victim"}, {"number": "../1"}, {"number": 0}, {"fingerprint": "../../victim"}, None]
)
def test_a_manifest_that_is_torn_or_names_what_lies_elsewhere_is_refused(sweep_folder, change, refused):
    path = sweep_folder / "manifest.json"
    content = json.loads(path.read_text())
    (content if change and "name" in change else content["runs"][0]).update(change or {})
    path.write_text(json.dumps(content) if change else path.read_text()[:30])
    assert "is damaged" in refused("list", "sweep", "depths", f"results_dir={sweep_folder.parents[1]}")


def test_a_sweep_loads_a_model_once_and_leaves_its_manifest_and_its_page_beside_the_records(made):
    results, loads = made
    assert loads == 1
    assert len(record_frame(results)) == 4  # with the dense one
    assert states(results) == ["done"] * 3
    assert {path.name for path in results.iterdir()} <= {"runs", "locks", "cache", "sweeps"}
    assert {path.name for path in (results / "sweeps" / "depths").iterdir()} == {"manifest.json", "index.html"}
    empty = [path.name for path in results.rglob("*") if path.is_dir() and not list(path.iterdir())]
    assert {*empty} <= {"locks", ".drafts"}
    manifest = Sweep.load(results, "depths").manifest
    assert manifest.axes == ("modules.static_depth.depth",)
    assert [manifest.label(run) for run in manifest.runs] == ["[1/3] depth=0.2", "[2/3] depth=0.5", "[3/3] depth=0.8"]


def test_the_page_and_the_table_say_what_the_records_say(made, prints, refused):
    results, _ = made
    said = refused("list", "sweep", "depth", f"results_dir={results}")
    assert unsaid(said, "There is no sweep depth", "There are: depths.") == []
    out = prints("list", "sweep", "depths", f"results_dir={results}").out
    assert out.startswith("depths: 3 of 3 done\n")
    page = (results / "sweeps" / "depths" / "index.html").read_text()
    frame = record_frame(results)
    for fingerprint, ppl in frame[frame["dense_fingerprint"].notna()]["ppl"].items():
        assert re.search(rf"\b{re.escape(f'{ppl:.4g}')}\b.*{fingerprint}", out)
        assert fingerprint in page
    assert page.count('data-state="done"') == page.count("<circle") == 3
    assert not re.search("http-equiv|src=", page)  # there is nothing to wait for, and it loads nothing
    links = re.findall(r'href="(.*?)"', page)
    assert len(links) == 3
    assert all((results / "sweeps" / "depths" / link).is_file() for link in links)
    assert prints("list", "sweep", f"results_dir={results}").out == "depths: 3 of 3 done\n"


def test_every_run_has_its_place_and_its_settings_as_its_name(words, results, sweep, monkeypatch):
    mirrored = []
    monkeypatch.setattr(harness_run, "mirror", lambda record, *_, name, group: mirrored.append((name, group)))
    asked = ["modules=[static_depth]", "modules.static_depth.depth=0.2,0.5", "seed=0,1", "measure=sweep", "name=two"]
    out, err = sweep(*words, *asked)
    wanted = [f"[{i}/4] depth={depth} seed={seed}" for i, (depth, seed) in enumerate([(0.2, 0), (0.2, 1), (0.5, 0), (0.5, 1)], 1)]
    assert [line for line in out.splitlines() if line.startswith("[")] == wanted
    assert all(label in err for label in wanted)
    assert [(name.partition(" | ")[0], group) for name, group in mirrored if group] == [(label, "sweep two") for label in wanted]
    assert sorted(labels(results).values()) == [f"two {label}" for label in wanted]


def test_runs_that_are_done_are_not_made_again_and_a_limit_leaves_some_for_later(words, results, sweep, monkeypatch):
    assert "1 later (limit=2)" in sweep(*words, *DEPTHS, "name=depths", "limit=2").err
    assert states(results) == ["done", "done", "waiting"]
    made = []
    run = harness_run._run
    monkeypatch.setattr(harness_run, "_run", lambda step, *rest: made.append(step.config.label) or run(step, *rest))
    sweep(*words, *DEPTHS, "name=depths")
    assert len(made) == 1
    assert states(results) == ["done"] * 3


def test_a_run_that_another_worker_has_begun_with_is_left_to_it_until_it_dies(words, results, sweep):
    sweep(*words, *DEPTHS, "name=depths", "limit=1")
    depths = Sweep.load(results, "depths")
    taken = depths.take(depths.manifest.runs[1])
    assert depths.take(depths.manifest.runs[1]) is None
    assert [run.number for run, _ in claimed(depths, {1, 2, 3}, shard=True)] == [2, 3]  # its windows are shared
    with depths.store.draft("d" * 20):  # and so are those of a dense run that another makes before it
        assert [run.number for run, _ in claimed(depths, {1, 2, 3}, nap_s=0)] == [3, 2]
    assert [run.number for run, _ in claimed(depths, {1, 2, 3}, taken.release, nap_s=0)] == [3, 2]
    assert not list((depths.folder / "taken").iterdir())


def test_a_run_that_fails_is_named_and_tried_again(words, results, sweep, prints, monkeypatch):
    run = harness_run._run

    def broken(step, *rest):
        if step.config.modules and step.config.modules["static_depth"]["depth"] == 0.5:
            raise QuickSilverError("the logits are not finite")
        return run(step, *rest)

    monkeypatch.setattr(harness_run, "_run", broken)
    out, err = sweep(*words, *DEPTHS, "name=depths", code=1)
    assert states(results) == ["done", "failed", "done"]
    assert "[2/3] depth=0.5: the logits are not finite" in err
    assert "the logits are not finite" in out
    assert "2 of 3 done, 1 failed" in prints("list", "sweep", "depths", f"results_dir={results}", code=1).out
    monkeypatch.setattr(harness_run, "_run", run)
    sweep(*words, *DEPTHS, "name=depths")
    assert states(results) == ["done"] * 3
    assert not (results / "sweeps" / "depths" / "failed").exists()


def test_a_worker_that_would_make_another_record_than_the_sweep_waits_for_says_so(words, results, sweep, monkeypatch):
    plan = sweeping.plan

    def elsewhere(configs, place):
        """As on a node that measured other kernels."""
        planned = plan(configs, place)
        return dataclasses.replace(
            planned, wanted=tuple(dataclasses.replace(one, fingerprint="f" * 16) for one in planned.wanted)
        )

    def launch(settings, task, *_):
        with monkeypatch.context() as patch:
            patch.setattr(sweeping, "plan", elsewhere)
            task()

    monkeypatch.setattr(sweeping, "launch", launch)
    err = sweep(*words, *DEPTHS, "name=depths", "hydra/launcher=joblib", "workers=2", code=1).err
    assert states(results) == ["failed"] * 3
    assert re.search(r"The sweep waits for record \w+, and \S+ would make f{16}\..* kernels", err)


@pytest.mark.parametrize(("messages", "made"), [(["x=1 is broken"] * 5, 3), ([*"ababa"], 5), (["a", "a", "", "a", "a"], 5)])
def test_a_sweep_stops_after_three_failures_of_one_kind(messages, made, words, results, sweep, monkeypatch):
    said = iter(messages)
    make = sweeping.make

    def broken(planned, **more):
        message = next(said)
        if not message:
            return make(planned, **more)
        raise QuickSilverError(message) from ImportError()

    monkeypatch.setattr(sweeping, "make", broken)
    depths = "modules.static_depth.depth=0.2,0.3,0.5,0.7,0.8"
    err = sweep(*words, *(depths if "depth=" in word else word for word in DEPTHS), "name=depths", code=1).err
    assert [state != "waiting" for state in states(results)] == [True] * made + [False] * (5 - made)

    assert ("3 runs in a row failed in one way (ImportError), and the next ones would, too: x=1 is broken" in err) == (made == 3)
    assert "the same command" in err


def test_while_it_runs_the_status_says_which_one(words, results, sweep, monkeypatch):
    from quicksilver.measure import bench

    seen, measured = [], bench.run_measurements

    def during(self, *args):
        seen.append(states(results))
        there = Sweep.load(results, "depths")
        assert "as of" in (html := Board(there).html()).lower()
        assert f"Made by <code>{escape(there.manifest.command)}</code>" in html
        return measured(self, *args)

    monkeypatch.setattr(bench, "run_measurements", during)
    sweep(*words, *DEPTHS, "name=depths")
    running = [[*["done"] * i, "running", *["waiting"] * (2 - i)] for i in range(3)]
    assert seen == [["waiting"] * 3, *running]  # the first is the dense run


def test_from_outside_one_sees_how_far_each_run_is_and_who_makes_it(words, results, capsys, prints, monkeypatch):
    from quicksilver.runs import run as making

    seen, counts = [], iter(range(10**6))
    monkeypatch.setattr(making.time, "monotonic", lambda: next(counts))  # a second from each look at the clock to the next
    monkeypatch.setattr(progress, "SAYS_EVERY_S", 0)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    write = Draft.progress

    def look(self, content):
        write(self, content)
        assert console.main(["status", f"results_dir={results}"]) == 0
        seen.append(capsys.readouterr())

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "progress", look)
        assert console.main(["run", "-m", *words, *DEPTHS, "name=depths", "limit=1"]) == 0
        assert console.main(["run", *words, "measure=quick"]) == 0
    me = f"{lease.host_name()}, process {os.getpid()} | slurm 17 on"
    said = "".join(one.out for one in seen)
    assert "depths: 0 of 3 done, 1 running, 2 waiting; 1 at work" in said
    far = r"^  \[1/3\] depth=0\.2: quality, all 3 windows scored, about \d+ s left \| "
    assert re.search(far + re.escape(me), said, re.MULTILINE)
    assert re.search(r"^tiny \| file \| dense \| all: quality, window 4 of 10, ", said, re.MULTILINE)
    logged = "".join(one.err for one in seen)
    assert re.search(r"^\[1/3\] depth=0\.2 \| tiny .*: quality, all 3 windows scored", logged, re.MULTILINE)
    assert not list(results.rglob("progress.json"))  # a record has none
    assert prints("status", f"results_dir={results}").out == "depths: 1 of 3 done, 2 waiting; nobody is at work\n"
    depths = Sweep.load(results, "depths")
    with depths.driver_lock():
        assert prints("status", f"results_dir={results}").out == "depths: 1 of 3 done, 2 waiting; its workers start\n"
        with depths.at_work():  # one that loads its model
            idle = prints("status", f"results_dir={results}").out.splitlines()[1]
    assert idle == f"  loading, or between two runs: {lease.host_name()}, process {os.getpid()}"
    prints("run", "-m", *words, *DEPTHS, "name=depths")
    assert f"Nothing is at work below {results}." in prints("status", f"results_dir={results}").out


def test_all_processes_that_share_a_run_are_named(sweep_folder, prints):
    results, shared = sweep_folder.parents[1], "0" * 20
    store = Store(results)
    with store.draft(shared) as one, store.draft(shared) as other:
        one.progress({"phase": "quality", "windows": [3, 9], "label": "tiny", "left_s": 40.0})
        other.progress({"phase": "quality", "windows": [6, 9], "label": "tiny", "left_s": 20.0})
        said = prints("status", f"results_dir={results}").out
        (other.folder / "progress.json").write_text("[")
        said += prints("status", f"results_dir={results}").out
    me = f"{lease.host_name()}, process {os.getpid()}"  # the one that has most windows says how far the run is
    far = [f"tiny: quality, window {k} of 9, about {left} s left | {me}; with {me}\n" for k, left in ((6, 20), (3, 40))]
    assert [one in said for one in far] == [True, True]


def test_once_no_run_waits_a_sweep_takes_as_long_as_its_longest_run(sweep_folder):
    board = Board(Sweep.load(sweep_folder.parents[1], "depths"))
    done, waiting = {"state": "done", "seconds": 100.0, "left_s": 0.0}, {"state": "waiting", "left_s": 0.0}
    running = [{"state": "running", "left_s": left_s} for left_s in (10.0, 30.0)]
    with board.sweep.at_work():
        assert board.headline([done, done, *running]).endswith("about 30 s left")
        assert board.headline([done, done, *running, waiting]).endswith("about 5 min left")


def test_the_page_reads_and_draws_a_sweep_with_pandas(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, *_ = blocks(ROOT / "docs" / "sweeps-and-budgets.md", "python")
    source = source.replace("results/sweeps/thresholds", f"{made[0]}/sweeps/depths").replace('"results"', repr(str(made[0])))
    names: dict = {}
    exec(source, names)
    assert list(names["runs"]["number"]) == [1, 2, 3]
    assert names["saved_pct"].gt(0).all()
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_a_look_reads_no_record_twice_and_few_where_few_are_enough(made, tmp_path, monkeypatch):
    results = shutil.copytree(made[0], tmp_path / "results")
    read = []
    monkeypatch.setattr(sweep_status, "numbers", lambda record, interval: read.append(record.fingerprint) or {"seconds": 1.0})
    (results / "sweeps" / "depths" / "numbers.json").unlink(missing_ok=True)
    board = Board(Sweep.load(results, "depths"))
    assert [("seconds" in row) for row in board.rows(most=1)] == [True, False, False]
    monkeypatch.setattr(sweep_status, "NEW_NUMBERS", 0)
    assert board.rows() == board.rows() == Board(Sweep.load(results, "depths")).rows()
    assert len(read) == 3
    os.utime(next((results / "runs").glob(read[0])), ns=(0, 0))  # another record in its place
    board.rows()
    assert read[3:] == read[:1]
    (results / "sweeps" / "depths" / "numbers.json").write_text("[]")
    assert len(Board(Sweep.load(results, "depths")).rows()) == 3


def test_a_look_at_many_new_records_leaves_intervals_to_the_next(made, tmp_path, monkeypatch):
    results = shutil.copytree(made[0], tmp_path / "results")
    (results / "sweeps" / "depths" / "numbers.json").unlink(missing_ok=True)
    board = Board(Sweep.load(results, "depths"))
    for module in (sweep_status, stats):
        monkeypatch.setattr(module, "MIN_WINDOWS", 3)
    monkeypatch.setattr(sweep_status, "MOST_INTERVALS", 0)
    points, text = board.rows(), board.text()
    monkeypatch.setattr(sweep_status, "MOST_INTERVALS", 2)
    assert [sum("low" in row for row in board.rows()) for _ in range(2)] == [2, 3]
    assert text.splitlines()[1] == "3 rows have no interval yet: each further look computes 0."
    assert "no interval" not in board.text()
    for before, after in zip(points, board.rows(), strict=True):
        assert before["delta_ppl_pct"] == pytest.approx(after["delta_ppl_pct"], abs=1e-9)


def test_a_worker_goes_through_the_runs_once(sweep_folder, monkeypatch):
    there = Sweep.load(sweep_folder.parents[1], "depths")
    runs = tuple(SweepRun(number, (f"seed={number}",), ()) for number in range(1, 41))
    there.manifest = dataclasses.replace(there.manifest, runs=runs)
    there.forget_failures()
    looks = []
    is_open = Sweep.is_open
    monkeypatch.setattr(Sweep, "is_open", lambda *args: looks.append(1) or is_open(*args))
    for run, _ in claimed(there, range(1, 41), nap_s=0):
        there.failed(run, ValueError())
    assert len(looks) == 2 * len(runs)  # when its turn comes, and once it is held


def test_no_more_workers_start_than_there_are_blocks(words, monkeypatch, sweep):
    launched = []
    monkeypatch.setattr(sweeping, "launch", lambda settings, task, workers, *_: launched.append((workers, task.shard)))
    asked = [*words, "seed=0,1", "measure=sweep", "dataset.windows=40", "protocol.batch_size=4", "hydra/launcher=joblib"]
    said = sweep(*asked, "workers=9", "shard=true").err
    assert launched == [(4, True)]
    assert "workers=9: there is work for 4 (a worker takes a run, or 32 windows of one), so 4 start." in said


def test_workers_that_died_in_an_earlier_command_are_forgotten_and_not_said_to_have_died_in_this_one(
    words, results, monkeypatch, sweep
):
    monkeypatch.setattr(sweeping, "launch", lambda *_: None)
    asked = [*words, "seed=0,1", "measure=sweep", "hydra/launcher=joblib", "workers=2", "name=earlier", f"results_dir={results}"]
    sweep(*asked)
    there = Sweep.load(results, "earlier")
    dead = there.folder / "at_work" / "1-dead.lock"
    with there.at_work(), there.at_work():
        holder = json.loads(next(dead.parent.iterdir()).read_text())
        dead.write_text(json.dumps(holder | {"process_started": "0"}))
        assert [who.pid for who in there.workers()] == [os.getpid()] * 2
    assert there.workers() == []
    assert "workers died," not in sweep(*asked).err
    assert not dead.parent.exists()
    dead.parent.mkdir()
    dead.write_text(json.dumps(holder | {"process_started": "0"}))
    with there.at_work():
        assert not dead.exists()


# --- what is refused before anything starts ------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr(sweeping, "make", lambda *_, **__: pytest.fail("a run was started"))


@pytest.mark.parametrize(("depths", "says"), [
    ("0.2,0.5", "there is a sweep of that name with other runs (3 of them, and now 2)"),
    ("0.2,0.5,0.9", "run 3 had modules.static_depth.depth=0.8, and now modules.static_depth.depth=0.9"),
])  # fmt: skip
def test_another_sweep_of_the_same_name_is_refused(depths, says, made, world, nothing_runs, refused):
    others = [word.replace("0.2,0.5,0.8", depths) for word in DEPTHS]
    assert says in refused("run", "-m", *world, f"results_dir={made[0]}", "name=depths", *others)
    assert states(made[0]) == ["done"] * 3


def test_a_sweep_that_runs_already_is_refused(words, results, nothing_runs, refused):
    there = results / "sweeps" / "depths"
    there.mkdir(parents=True)
    held = lease.take(there / "head.lock")
    said = refused("run", "-m", *words, *DEPTHS, "name=depths")
    assert f"this sweep runs already (process {os.getpid()} of {lease.host_name()}" in said
    held.release()


@pytest.mark.parametrize(
    "way", first(["--config-dir={0}", "hydra.searchpath=[file://{0}]", "--config-dir={0}/dataset --config-dir={0}"])
)
def test_a_list_of_datasets_may_have_one_s_own(words, tmp_path, sweep, way):
    text = next(word.split("=")[1] for word in words if word.startswith("dataset.files.test="))
    (tmp_path / "mine" / "dataset").mkdir(parents=True)
    mine = f"name: my-own\nreader: text\nform: raw\nfiles: {{test: {text}}}\n"
    (tmp_path / "mine" / "dataset" / "my-own.yaml").write_text(mine)
    said = sweep(*words, "dataset=file,my-own", "plan=true", *way.format(tmp_path / "mine").split()).out
    assert unsaid(said, "| my-own |", "2 runs") == []


def test_a_key_that_only_the_swept_datasets_have_is_left_to_the_runs():
    words = ["dataset=sst2,rte", "dataset.task.examples=40"]
    with hydra_started():
        runs = sweeping.runs_of(words, sweeping._settings(words, []), [])
    assert [differing for _, differing in runs] == [("dataset=sst2",), ("dataset=rte",)]
    assert all(words[1] in run for run, _ in runs)


def test_the_command_of_a_sweep_can_be_typed():
    words = ["-m", "modules=[a],[b]", "name=n"]
    assert shlex.split(Manifest("n", (*words[:2],), (), ("/x y",)).command) == ["quicksilver", "run", "--config-dir=/x y", *words]


def test_a_model_larger_than_the_machine_is_refused_before_the_sweep_is_there(words, results, monkeypatch, refused):
    monkeypatch.setattr(loading.memory_check, "host_memory_bytes", lambda: 1000)
    said = refused("run", "-m", *words, *DEPTHS, "name=depths")
    assert "of memory. model.device_map=auto leaves on disk what does not fit" in said
    assert not (results / "sweeps").exists()


def test_an_option_of_a_module_counts_only_in_the_runs_that_have_the_module_and_equal_results_are_named(
    words, results, sweep, refused
):
    asked = [*words, "modules=[static_depth,kv_skipping],[static_exit],[]", "measure=sweep", "dataset.windows=3", "name=own"]
    out = sweep(*asked, "modules.static_depth.depth=0.2,0.21", "modules.static_exit.depth=0.5").out
    with_depth = "modules=[static_depth,kv_skipping]"
    assert [run.differing for run in Sweep.load(results, "own").manifest.runs] == [
        *((with_depth, f"modules.static_depth.depth={depth}") for depth in (0.2, 0.21)), ("modules=[static_exit]",), ("modules=[]",),
    ]  # fmt: skip
    assert states(results, "own") == ["done"] * 4
    same = [line for line in out.splitlines() if " found the same: " in line]
    assert same == ["Runs 1, 2 found the same: what differs between them changed nothing."]
    assert "the module halting is not selected" in refused("run", "-m", *asked, "modules.halting.tau_drift=0.1")
