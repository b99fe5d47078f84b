"""Launchers: their configs compose, their workers make every run once, and what cannot work is refused before anything starts."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import try_slurm
from repository import ROOT

from quicksilver.cli import main as console
from quicksilver.cli import sweeping
from quicksilver.records.record import record_frame
from quicksilver.runs import launchers
from quicksilver.runs.choices import choices
from quicksilver.runs.config import compose, hydra_started
from quicksilver.runs.context import RunContext
from quicksilver.runs.sweep import Manifest, Sweep
from quicksilver.runtime.errors import ConfigError, QuickSilverError

DEPTHS = ["modules=[static_depth]", "modules.static_depth.depth=0.2,0.5,0.8", "measure=sweep", "dataset.windows=3", "name=depths"]


@cache
def settings_of(*words: str):
    with hydra_started():
        return sweeping._settings(words, [])


def test_every_launcher_composes(subtests):
    for name in choices("hydra/launcher"):
        with subtests.test(name):
            settings = settings_of(f"hydra/launcher={name}", "hydra.launcher.workers=3")
            assert launchers.launcher_name(settings) == name
            assert settings.launcher._target_.startswith(f"hydra_plugins.hydra_{name.split('_')[0]}_launcher.")
            assert settings.launcher.workers == 3
    with pytest.raises(ConfigError):
        settings_of("hydra/launcher=joblib", "hydra.launcher.jobs=3")


def program(folder: Path, name: str, answer: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Programs of a Slurm that has two partitions and a node, called as the launcher's check calls them."""
    program(tmp_path, "sbatch", "")
    program(tmp_path, "sinfo", 'case "$*" in *Node*) echo node-7;; *) printf "cpu\\ngpu\\n";; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def checked(*words: str, measure: str = "sweep", workers: int | None = None, results: str = "results") -> int:
    return launchers.check_launcher(settings_of(*words), [compose([f"measure={measure}"])], Path(results), workers)


SLURM, JOBLIB, TIMED = "hydra/launcher=submitit_slurm", "hydra/launcher=joblib", {"measure": "default"}
ALONE = r"measure\.latency reads a clock.*{}.*measure=sweep"


def test_workers_are_those_asked_for_or_the_launchers_own(cluster):
    assert (checked(), checked(JOBLIB), checked(SLURM, "hydra.launcher.partition=gpu")) == (1, 2, 4)
    assert (checked(JOBLIB, workers=5), checked(JOBLIB, workers=1, **TIMED)) == (5, 1)
    assert checked(SLURM, "hydra.launcher.exclusive=true", **TIMED) == 4


@pytest.mark.parametrize(("words", "more", "says"), [
    ([], {"workers": 2}, "unless there is a launcher"),
    ([JOBLIB, "hydra.launcher.workers=0"], {}, "workers=0: needs a whole number"),
    ([SLURM, "hydra.launcher.mem_gb=lots"], {}, "hydra.launcher.mem_gb=lots: needs a number, at least 0.1"),
    (["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=0"], {}, "timeout_min=0: needs a whole number, at least 1"),
    ([SLURM, "hydra.launcher.nodes=1.5"], {}, "nodes=1.5: needs a whole number, at least 1"),
    ([JOBLIB], TIMED, ALONE.format("Use workers=1")),
    (["hydra/launcher=submitit_local"], TIMED, ALONE.format("Use workers=1")),
    ([SLURM], TIMED, ALONE.format("exclusive=true")),
    ([SLURM, "hydra.launcher.partition=gup"], {}, "partition=gup: there is no such partition. There are: cpu, gpu"),
])  # fmt: skip
def test_what_cannot_work_is_refused(cluster, words, more, says):
    with pytest.raises(ConfigError, match=says):
        checked(*words, **more)


def test_no_slurm_one_that_does_not_answer_and_a_folder_that_its_nodes_cannot_see(cluster, monkeypatch):
    monkeypatch.setattr(launchers, "_file_system", lambda _: "tmpfs")
    with pytest.raises(ConfigError, match="node-7 cannot see it"):
        checked(SLURM, results="/dev/shm/results")
    monkeypatch.setattr(launchers.lease, "host_name", lambda: "node-7")
    assert checked(SLURM, results="/dev/shm/results") == 4
    program(cluster, "sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(ConfigError, match="does not answer: slurm_load_partitions: Unable to contact"):
        checked(SLURM)
    monkeypatch.setattr(launchers.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="no sbatch"):
        checked(SLURM)


def test_a_launcher_that_is_not_installed_names_its_extra(monkeypatch):
    plugins = dict(launchers.Plugins.instance().class_name_to_class)
    plugins.pop("hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher", None)
    monkeypatch.setattr(launchers.Plugins.instance(), "class_name_to_class", plugins)
    says = r"hydra/launcher=ray is not installed: pip install '.+\[ray\]' in an environment of its own"
    with pytest.raises(ConfigError, match=says):
        checked("hydra/launcher=ray")


def test_a_worker_that_does_not_see_the_manifest_says_so_and_makes_nothing(tmp_path):
    with pytest.raises(QuickSilverError, match=r"cannot see .*depths: give a results_dir that all nodes share"):
        sweeping.Worker(str(tmp_path / "elsewhere"), "depths", (1, 2))()


@pytest.fixture(scope="module")
def first_made(world, tmp_path_factory) -> Path:
    results = tmp_path_factory.mktemp("first") / "results"
    assert console.main(["run", "-m", *world, f"results_dir={results}", *DEPTHS, "limit=1"]) == 0
    return results


@pytest.fixture
def begun(first_made, tmp_path) -> Path:
    """A results folder with a sweep of three runs, of which the first is made."""
    return shutil.copytree(first_made, tmp_path / "results")


def test_a_worker_makes_what_is_left(begun, capsys):
    sweeping.Worker(str(begun), "depths", (1, 2))()
    assert [state.state for state in Sweep.load(begun, "depths").states()] == ["done", "done", "waiting"]
    assert "[2/3] depth=0.5" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "joblib shard=true", "submitit_local", "ray"])
def test_two_workers_make_what_one_process_makes(launcher, world, tmp_path):
    """In processes of their own: joblib, submitit and Ray start workers that import everything."""
    if launcher == "ray":
        pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs the extra ray")
    found = {}
    for name, more in {"serial": [], "two": [*f"hydra/launcher={launcher}".split(), "workers=2"]}.items():
        words = [*world, f"results_dir={tmp_path / name}", *DEPTHS, *more]
        command = [sys.executable, "-m", "quicksilver", "run", "-m", *words]
        made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
        assert made.returncode == 0, made.stderr
        frame = record_frame(tmp_path / name)
        found[name] = dict(zip(frame.index, frame["nll_nats"], strict=True))
        assert (tmp_path / name / "sweeps" / "depths" / "index.html").read_text().count('data-state="done"') == 3
    assert found["two"] == found["serial"]
    assert len(found["two"]) == 4


def test_jobs_of_submitit_are_waited_for_until_everything_is_made_and_no_longer():
    ended = threading.Event()
    looks = iter([False, False, True])
    launchers._until_over(ended.wait, lambda: next(looks), lambda: False, every_s=0.0)  # the job itself has not ended
    assert not ended.is_set()
    ended.set()
    died = Mock(side_effect=RuntimeError("UncompletedJobError"))
    with pytest.raises(RuntimeError, match="UncompletedJobError"):
        launchers._until_over(died, lambda: False, lambda: False)
    looks = iter([False, False, True, True])
    launchers._until_over(died, lambda: next(looks), lambda: True, every_s=0.0)  # another worker makes the rest
    launchers._until_over(died, lambda: True, lambda: False)  # all is made: what became of a worker matters no more


def test_workers_of_joblib_start_again_where_one_died_and_not_for_ever(capsys):
    wait = Mock(side_effect=[RuntimeError("A worker process was unexpectedly terminated."), None])
    launchers._wait_again(wait, lambda: False)
    assert wait.call_count == 2
    assert "start again" in capsys.readouterr().err
    for error, times in ((RuntimeError("unexpectedly terminated"), 3), (ValueError("another"), 1)):
        wait = Mock(side_effect=error)
        with pytest.raises(type(error), match=str(error)):
            launchers._wait_again(wait, lambda: False)
        assert wait.call_count == times


def test_a_worker_that_was_killed_is_counted_once_and_leaves_nothing(tmp_path):
    sweep = Sweep(tmp_path, Manifest("one", (), ()))
    with sweep.at_work():
        path = next((sweep.folder / "at_work").glob("*.lock")).with_name("9.lock")
        killed = "import os, pathlib; from quicksilver.records import lease; lease.take(pathlib.Path({!r})); os._exit(9)"
        subprocess.run([sys.executable, "-c", killed.format(str(path))], check=False)
        assert [sweep.forget_dead_workers(), sweep.forget_dead_workers()] == [1, 0]
        assert len(sweep.workers()) == 1
    assert not (sweep.folder / "at_work").exists()


class UncompletedJobError(Exception):
    """As submitit raises it."""


@pytest.fixture
def job_ends():
    """submitit's handler of the signal that announces the end of a job: it raises."""

    def end(*_):
        raise UncompletedJobError("Job not requeued because: timed-out too many times.")

    before = signal.signal(signal.SIGUSR2, end)
    yield end
    assert signal.signal(signal.SIGUSR2, before) is end  # the worker has put it back


@pytest.mark.parametrize("within", ["work_through", "_load"])
def test_the_end_of_a_job_is_no_failure_of_the_run_that_it_hits(within, begun, monkeypatch, job_ends):
    def hit(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGUSR2)
        except Exception as error:  # as transformers does, whatever an import raises
            raise ImportError("Could not import GPT2LMHeadModel") from error

    monkeypatch.setattr(*((sweeping, "make") if within == "work_through" else (RunContext, "model")), hit)
    with pytest.raises(QuickSilverError, match=r"time of this worker's job was over\. Job not requeued"):
        sweeping.Worker(str(begun), "depths", (1, 2, 3))()
    assert [state.state for state in Sweep.load(begun, "depths").states()] == ["done", "waiting", "waiting"]


def test_jobs_that_are_dead_are_seen_without_accounting(cluster, monkeypatch):
    pytest.importorskip("submitit")
    from submitit.slurm.slurm import SlurmJob

    monkeypatch.setattr(SlurmJob, "watcher", SlurmJob.watcher)
    launchers.ask_squeue()
    jobs = ("7_0", "7_1", "7_2")
    for job in jobs:
        SlurmJob.watcher.register_job(job)
    for answer, states in {
        "echo '7_0|RUNNING\n7_[1-2%2]|PENDING'": "RUNNING PENDING PENDING",
        "echo '7_0|OUT_OF_MEMORY\n7_1|RUNNING'": "OUT_OF_MEMORY RUNNING ENDED",
        "echo 'slurm: hello'": "OUT_OF_MEMORY RUNNING ENDED",  # an answer that is none, and no answer: what was known stays
        "exit 1": "OUT_OF_MEMORY RUNNING ENDED",
        "": "OUT_OF_MEMORY ENDED ENDED",
    }.items():
        program(cluster, "squeue", answer)
        SlurmJob.watcher.update()
        assert " ".join(SlurmJob.watcher.get_state(job, "cache") for job in jobs) == states


def test_jobs_of_a_sweep_that_wait_are_counted(cluster, tmp_path):
    for name in ("7_0", "7_1", "notes"):
        (tmp_path / "workers" / name).mkdir(parents=True)
    assert launchers.waiting_jobs(tmp_path / "workers") == 0  # no Slurm
    program(cluster, "squeue", "printf '7\\n7\\n12\\n'")
    assert launchers.waiting_jobs(tmp_path / "workers") == 2
    assert launchers.waiting_jobs(tmp_path / "elsewhere") == 0


@pytest.mark.parametrize(("text", "says"), [
    ("Job 7 has not produced any output (state: OUT_OF_MEMORY)\nlog", "it ran out of memory"),
    ("Job 7\nslurmstepd: error: StepId=7.0 exceeded memory limit (900 > 500), being killed", "hydra.launcher.mem_gb"),
    ("failed during processing with trace:\nTraceback\n  here\na.b.QuickSilverError: it is broken\nlogs", "Error: it is broken"),
    ("Job 7 (task: 0)\nhas not produced any output (state: ENDED)", "it died (state: ENDED), killed by hand or for want of memory"),
])  # fmt: skip
def test_what_a_launcher_raises_is_one_line_that_says_why(text, says):
    assert says in (said := launchers._why(RuntimeError(text)))
    assert "\n" not in said


def test_a_worker_has_its_model_before_it_claims_a_run(begun, monkeypatch):
    seen = []

    def work_through(board, plan_of, *_, **__):
        sweep = board.sweep
        loaded = plan_of(sweep.manifest.runs[0]).context._loaded is not None
        seen.append((loaded, list((sweep.folder / "taken").glob("*"))))

    monkeypatch.setattr(sweeping, "work_through", work_through)
    sweeping.Worker(str(begun), "depths", (1, 2))()
    sweeping.Worker(str(begun), "depths", (1,))()  # nothing is left for it
    assert seen == [(True, []), (False, [])]
    assert gc.isenabled()


@pytest.mark.slow
def test_a_sweep_on_slurm_survives_the_death_of_a_worker_and_of_its_head(tmp_path):
    reason = try_slurm.missing()
    if reason is not None:
        pytest.skip(reason)
    found = try_slurm.trial(tmp_path / "trial", runs=8)
    assert found["runs"] == 8
    assert 0 < found["done_when_the_head_was_killed"] <= 8
    assert found["looks_at_the_status"] > 1
