"""Launchers of sweeps (conf/hydra/launcher): what each needs is checked before anything starts.

A launcher starts workers, not runs: each worker goes through the sweep's manifest and takes what nobody makes yet, so that a process loads the
model once, and a worker that dies leaves one run to the others. Hydra's plugins do the starting.
"""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from quicksilver.records import lease
from quicksilver.runs.config import RunConfig, quoted
from quicksilver.runs.context import timed_measurements
from quicksilver.runtime.errors import ConfigError, QuickSilverError, installing

SERIAL, SLURM = "basic", "submitit_slurm"
HERE = (SERIAL, "joblib", "submitit_local")  # their workers are on this machine
_EXTRAS = {"joblib": "sweep", "submitit_local": "slurm", SLURM: "slurm", "ray": "ray"}
_JOB = re.compile(r"\d[^|]*\|[A-Z_]+")  # a line of squeue
_LEAST = {
    "timeout_min": 1, "nodes": 1, "tasks_per_node": 1, "cpus_per_task": 1, "array_parallelism": 1, "mem_gb": 0.1, "gpus_per_node": 0,
    "max_num_timeout": 0, "signal_delay_s": 0,
}  # fmt: skip
_DIED = re.compile("has not produced any output|unexpectedly terminated")
_STARTS = 3  # of joblib's workers, where one dies
_OUT_OF_MEMORY = re.compile(r"OUT_OF_ME|oom[_ -]?kill|exceeded (?:\w+ )?memory limit", re.IGNORECASE)


def launcher_name(settings: DictConfig) -> str:
    """The choice of hydra/launcher."""
    return str(settings.runtime.choices["hydra/launcher"])


def workers_of(settings: DictConfig, asked: int | None) -> int:
    """How many workers there are to be, by the key `workers` or the launcher's yaml. Raises ConfigError: no such number."""
    workers = settings.launcher.get("workers", 1) if asked is None else asked
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ConfigError(f"hydra.launcher.workers={workers}: needs a whole number, at least 1.")
    return workers


def check_launcher(settings: DictConfig, configs: Iterable[RunConfig], results_dir: Path, asked: int | None = None) -> int:
    """How many workers a sweep with this section `hydra` gets; `asked`: None: as the launcher's yaml says.
    Raises ConfigError: the launcher's package, Slurm or the partition is not there; runs that are timed would share a machine;
    workers could not see the results folder."""
    name, launcher = launcher_name(settings), settings.launcher
    if name == SERIAL and asked not in (None, 1):
        raise ConfigError(f"workers={asked}: runs are made one by one unless there is a launcher: hydra/launcher=joblib.")
    if name == SERIAL:
        return 1
    workers = workers_of(settings, asked)
    if launcher.get("_target_") not in Plugins.instance().class_name_to_class:
        extra = installing(_EXTRAS[name]) if name in _EXTRAS else "install its package"
        raise ConfigError(f"hydra/launcher={name} is not installed: {extra}, or leave it out: runs are made one by one.")
    for key, least in _LEAST.items():
        value = launcher.get(key)
        kind, said = (int | float, "a number") if key == "mem_gb" else (int, "a whole number")
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind) or value < least):
            raise ConfigError(f"hydra.launcher.{key}={value}: needs {said}, at least {least}.")
    alone, ways = workers == 1, "workers=1"
    if name == SLURM:
        _check_slurm(launcher.get("partition"), results_dir)
        alone = bool(launcher.get("exclusive"))
        ways = "hydra.launcher.exclusive=true, which asks for a whole node for each worker"
    timed = next((timed for config in configs for timed in timed_measurements(config)), None)
    if timed is not None and not alone:
        said = f"hydra/launcher={name}: measure.{timed} reads a clock, and {workers} workers would share a machine. Use {ways}"
        untimed = f"measure=sweep, measure=quick, or measure.{timed}.enabled=false"
        raise ConfigError(f"{said}, or measure nothing that is timed: {untimed}.")
    return workers


# --- Slurm ----------------------------------------------------------------------------------------------------------------------
def _check_slurm(partition: str | None, results_dir: Path) -> None:
    """Raises ConfigError: no Slurm on this machine, one that does not answer, no such partition, or a results folder in this
    machine's memory where the nodes are others."""
    if shutil.which("sbatch") is None:
        raise ConfigError("hydra/launcher=submitit_slurm: this machine has no sbatch. Start it where Slurm is, or use joblib.")
    there = _sinfo("--format=%R")
    if partition is not None and not set(str(partition).split(",")) <= set(there):
        raise ConfigError(f"hydra.launcher.partition={partition}: there is no such partition. There are: {', '.join(there)}.")
    kind, host = _file_system(results_dir), lease.host_name()
    here = {host, host.partition(".")[0], "localhost"}
    if kind in ("tmpfs", "ramfs") and (others := sorted({*_sinfo("--Node", "--format=%N")} - here)):
        said = f"results_dir={results_dir} lies in this machine's memory ({kind}), where {others[0]} cannot see it"
        raise ConfigError(f"{said}: give a folder that all nodes share.")


def _sinfo(*words: str) -> list[str]:
    try:
        answer = subprocess.run(["sinfo", "--noheader", *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"hydra/launcher=submitit_slurm: Slurm does not answer ({error}).") from error
    if answer.returncode:
        why = (answer.stderr.strip() or f"exit code {answer.returncode}").splitlines()[-1]
        raise ConfigError(f"hydra/launcher=submitit_slurm: Slurm does not answer: {why}")
    return sorted(set(answer.stdout.split()))


def _file_system(path: Path) -> str:
    """The kind of file system that a folder, which need not be there yet, would be on."""
    path = path.absolute()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[folder] for folder in (path, *path.parents) if folder in mounts), "")


def waiting_jobs(log_dir: Path) -> int:
    """How many jobs of Slurm that write their logs there wait for a node; 0: none, or nobody can tell."""
    ours = {path.name.partition("_")[0] for path in log_dir.glob("[0-9]*")}
    if not ours or shutil.which("squeue") is None:
        return 0
    states = "--states=PENDING,CONFIGURING,REQUEUED"
    asks = ["squeue", "--noheader", "--array", states, f"--user={getpass.getuser()}", "--format=%F"]
    with suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(asks, capture_output=True, text=True, timeout=20)
        return sum(job.strip() in ours for job in answer.stdout.splitlines())
    return 0


def ask_squeue() -> None:
    """Let submitit ask `squeue` what became of its jobs, no longer `sacct`, which knows nothing without accounting: a dead job would be waited
    for. A job that left the queue has ended."""
    from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

    class Watcher(SlurmInfoWatcher):
        def _make_command(self) -> list[str] | None:
            asks = ["squeue", "--noheader", "--states=all", f"--user={getpass.getuser()}", "--format=%i|%T"]
            return asks if self._registered - self._finished else None

        def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
            lines = (string if isinstance(string, str) else string.decode(errors="replace")).splitlines()
            if not all(map(_JOB.fullmatch, lines)):
                return {}  # nonsense: what was known stays
            seen = super().read_info("\n".join(["JobID|State", *lines]))
            return {job: {"State": "ENDED"} for job in self._registered - self._finished} | seen

    if type(SlurmJob.watcher).__name__ != "Watcher":
        SlurmJob.watcher = Watcher(delay_s=30)


# --- starting -------------------------------------------------------------------------------------------------------------------
def launch(
    settings: DictConfig,
    task: Callable[[Any], Any],
    workers: int,
    log_dir: Path,
    is_over: Callable[[], bool],
    at_work: Callable[[], bool],
) -> None:
    """Start workers and wait for them, within `hydra_started`. Raises QuickSilverError: a worker could not be started, or died;
    what it made is kept.

    Args:
        task: what a worker does; it is sent to it by its name. It is given a config that it need not read.
        log_dir: where a launcher may write log files.
        is_over: whether nothing is left to make; asked often. Jobs of submitit tell of their end a second late: when nothing is left they are
            waited for no longer.
        at_work: whether some worker is alive: when another died, those are waited for.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    overrides = [*settings.overrides.hydra, *quoted([f"hydra.sweep.dir={log_dir}"])]
    cfg = hydra.compose_config(config_name="run", overrides=overrides, run_mode=RunMode.MULTIRUN, from_shell=False)
    with read_write(cfg.hydra), open_dict(cfg.hydra.launcher):
        cfg.hydra.launcher.workers = workers
        OmegaConf.resolve(cfg.hydra.launcher)
        del cfg.hydra.launcher["workers"]
        if cfg.hydra.launcher.get("exclusive") is False:
            del cfg.hydra.launcher["exclusive"]  # sbatch has --exclusive, and nothing for its opposite
    context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks())
    name = launcher_name(settings)
    if name == SLURM:
        ask_squeue()
    try:
        launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=cfg)

        def wait() -> None:
            # No overrides: a worker composes each of its runs itself.
            for answer in launcher.launch([[] for _ in range(workers)], initial_job_idx=0):
                _ = answer.return_value  # raises what the worker raised

        if name == "joblib":
            _wait_again(wait, is_over)
        elif name.startswith("submitit"):
            _until_over(wait, is_over, at_work)
        else:
            wait()
    except QuickSilverError:
        raise
    except Exception as error:  # submitit, joblib and ray have their own kinds
        raise QuickSilverError(f"A worker of hydra/launcher={name} failed: {_why(error)}") from error
    finally:
        for folder in (log_dir / "%j", log_dir):  # of a launcher that wrote no log
            with suppress(OSError):
                folder.rmdir()


def _wait_again(wait: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """`wait()`, and again where a worker died: joblib ends all workers with it. Finished blocks are kept."""
    for left in reversed(range(_STARTS)):
        try:
            return wait()
        except Exception as error:
            if is_over():
                break
            if not left or not _DIED.search(str(error)):
                raise
            said = "A worker died, killed by hand or for want of memory. joblib ended all; they start again."
            print(said, file=sys.stderr, flush=True)
    return None


def _why(error: Exception) -> str:
    """One line of what a launcher raised, which may hold a traceback or a log."""
    text = str(error).strip() or repr(error)
    if _OUT_OF_MEMORY.search(text):
        return "it ran out of memory. Give it more (hydra.launcher.mem_gb), or take a smaller protocol.batch_size."
    if _DIED.search(text):
        state = re.search(r" \(state: \w+\)", text)
        return f"it died{state[0] if state else ''}, killed by hand or for want of memory. Take fewer workers or a smaller protocol.batch_size; with submitit, more hydra.launcher.mem_gb."
    raised = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception): .+)$", text, re.MULTILINE)
    return raised[-1] if raised else f"{type(error).__name__}: {' '.join(text.splitlines()[:2])}"


def _until_over(wait: Callable[[], None], is_over: Callable[[], bool], at_work: Callable[[], bool], every_s: float = 0.1) -> None:
    """`wait()`, but no longer than until `is_over`, and where it raises as long as somebody is `at_work`. Raises what it raised."""
    raised: list[Exception] = []

    def waiting() -> None:
        try:
            wait()
        except Exception as error:  # raised again in the thread that waits
            raised.append(error)

    thread = threading.Thread(target=waiting, name="quicksilver-launcher", daemon=True)
    thread.start()
    while not is_over() and (thread.is_alive() or (raised and at_work())):
        thread.join(every_s)
        time.sleep(0 if thread.is_alive() else 10 * every_s)
    if raised and not is_over():
        raise raised[0]
