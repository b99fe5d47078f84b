"""A real Slurm on this machine alone, and a sweep on it whose worker and head are killed.

    python scripts/try_slurm.py                     # 12 runs, as a test: about a minute of work
    python scripts/try_slurm.py --runs 200 --speed  # the whole trial; --speed also times one worker beside two

Needs root and the packages slurmctld, slurmd, slurm-client and munge (Debian: apt-get install slurm-wlm munge). What it starts it stops; its
files lie in a temporary folder. The steps: the sweep is started with two workers; one worker is killed while it makes a run; then the command
itself; the same command goes on; every run has its record once, equal to that of the same sweep in one process.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scancel", "sinfo", "squeue")
# Nothing here asks the kernel for more than a container gives: processes are found by their parents, tasks are not bound.
CONF = """
ClusterName=quicksilver
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=2
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class Trouble(Exception):
    """The trial did not go as it should."""


def missing() -> str | None:
    """Why there can be no trial on this machine; None: there can."""
    absent = [program for program in PROGRAMS if _which(program) is None]
    if absent:
        return f"{absent[0]} is not installed: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else f"Slurm's daemons are started as root, and this is {getpass.getuser()}"


def _which(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


@contextmanager
def slurm(folder: Path, cpus: int = 2) -> Iterator[dict[str, str]]:
    """Start munge and a Slurm of one node; within, programs with this environment talk to it."""
    folder.mkdir(parents=True)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, ports=_free_ports(2), cpus=cpus))
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str | Path) -> None:
        log = (folder / f"{command[0]}.out").open("wb")
        program = [_which(str(command[0])) or str(command[0]), *map(str, command[1:])]
        daemons.append(subprocess.Popen(program, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True))

    try:
        start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        _until(lambda: (folder / "munge.socket").exists(), 30, "munged does not start")
        start("slurmctld", "-D", "-f", conf)
        start("slurmd", "-D", "-f", conf, "-N", host)

        def idle() -> bool:
            states = subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True, env=environment).stdout.split()
            return states == ["idle"]

        _until(idle, 60, f"Slurm does not come up (logs in {folder})")
        yield environment
    finally:
        subprocess.run(["scancel", "--partition=main", "--signal=KILL", "--full"], env=environment, capture_output=True)
        subprocess.run(["scancel", "--partition=main"], env=environment, capture_output=True)
        time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _until(ready: Callable[[], bool], limit_s: float, otherwise: str) -> None:
    end = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > end:
            raise Trouble(otherwise)
        time.sleep(0.1)


# --- the trial ------------------------------------------------------------------------------------------------------------------


def trial(folder: Path, runs: int, speed: bool) -> dict[str, float | int]:
    """Kill a worker, kill the head, go on, compare; returns what was counted.

    Raises:
        Trouble: a record is missing, there twice or another than a serial sweep's, or the status was wrong.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from harness_world import make_world

    world = make_world(folder / "world")
    sweep = ["modules=[random_halting]", f"seed=range(0,{runs})", "measure=sweep", "dataset.windows=3", "name=trial"]
    on_slurm = ["hydra/launcher=submitit_slurm", "workers=2", "hydra.launcher.cpus_per_task=1"]
    found: dict[str, float | int] = {"runs": runs}
    with slurm(folder / "slurm") as environment:

        def command(results: str, *more: str) -> subprocess.Popen[str]:
            words = ["run", "-m", *world, *sweep, f"results_dir={folder / results}", *more]
            log = (folder / f"{results}.log").open("a")
            return subprocess.Popen(
                [sys.executable, "-m", "quicksilver", *words], cwd=ROOT, env=environment, stdout=log, stderr=log, text=True
            )

        # Every look at the status must agree with the records on disk at that moment.
        def done(results: str = "slurm_two") -> int:
            before = len(_records(folder / results))
            counts = _counts(folder / results)
            after = len(_records(folder / results))
            if (
                counts and not before - 1 <= counts["done"] <= after
            ):  # one record is the dense run's, which is none of the sweep's
                raise Trouble(f"the status said {counts['done']} done between {before} and {after} records")
            return counts.get("done", 0)

        head = command("slurm_two", *on_slurm)
        _until(lambda: done() >= max(1, runs // 6) or head.poll() is not None, 900, "no run was done in a quarter of an hour")
        worker = _a_worker(folder / "slurm_two")
        os.kill(worker, signal.SIGKILL)
        found["done_when_the_worker_was_killed"] = at_kill = done()
        _until(
            lambda: done() >= min(runs - 1, at_kill + max(1, runs // 6)) or head.poll() is not None,
            900,
            "nothing is made after a worker's death",
        )
        head.kill()
        head.wait()
        found["done_when_the_head_was_killed"] = done()
        again = command("slurm_two", *on_slurm)
        _until(lambda: again.poll() is not None, 3600, "the sweep does not end")
        if again.returncode:
            raise Trouble(f"the second command ended with {again.returncode}: {(folder / 'slurm_two.log').read_text()[-2000:]}")
        serial = command("serial")
        if serial.wait():
            raise Trouble(f"the serial sweep failed: {(folder / 'serial.log').read_text()[-2000:]}")
        _compare(_records(folder / "slurm_two"), _records(folder / "serial"), runs + 1)
        if done() != runs:
            raise Trouble(f"the status says {done()} of {runs}")
        page = (folder / "slurm_two" / "sweeps" / "trial" / "index.html").read_text()
        if page.count('data-state="done"') != runs:
            raise Trouble("the page does not show every run as done")
        if speed:
            for workers in (1, 2):
                began = time.monotonic()
                timed = command(f"workers_{workers}", *[word.replace("workers=2", f"workers={workers}") for word in on_slurm])
                if timed.wait():
                    raise Trouble(f"the sweep with {workers} workers failed")
                found[f"seconds_with_{workers}_workers"] = round(time.monotonic() - began, 1)
            found["times_as_fast"] = round(found["seconds_with_1_workers"] / found["seconds_with_2_workers"], 2)
    return found


def _records(results: Path) -> dict[str, tuple[float, int]]:
    """Nats and operations of every record, by fingerprint."""
    found = {}
    for path in (results / "runs").glob("[!.]*/record.json"):
        content = json.loads(path.read_text())
        found[path.parent.name] = (content["nll_nats"], content["executed_flops"])
    return found


def _counts(results: Path) -> dict[str, int]:
    from quicksilver.harness.sweep import Sweep
    from quicksilver.runtime.errors import ConfigError

    try:
        states = [state.state for state in Sweep.load(results, "trial").states()]
    except ConfigError:
        return {}
    return {state: states.count(state) for state in ("done", "running", "failed", "waiting")}


def _a_worker(results: Path) -> int:
    """A process that makes a run now."""
    from quicksilver.harness.store import Store

    found: list[int] = []

    def look() -> bool:
        found.extend(who.pid for who in Store(results).in_the_making().values())
        return bool(found)

    _until(look, 120, "nobody makes a run")
    return found[0]


def _compare(ours: dict[str, tuple[float, int]], serial: dict[str, tuple[float, int]], expected: int) -> None:
    if len(serial) != expected:
        raise Trouble(f"the serial sweep made {len(serial)} records, not {expected}")
    lost, more = sorted(serial.keys() - ours.keys()), sorted(ours.keys() - serial.keys())
    if lost or more:
        raise Trouble(f"{len(lost)} records are lost and {len(more)} are of no run")
    wrong = [name for name, numbers in serial.items() if numbers != ours[name]]
    if wrong:
        raise Trouble(
            f"{len(wrong)} records are not those of a serial sweep: {wrong[0]} has {ours[wrong[0]]}, not {serial[wrong[0]]}"
        )


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=12, help="of the sweep (default: 12)")
    parser.add_argument("--speed", action="store_true", help="time one worker and two: give the machine to it alone")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    asked = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"No trial: {reason}.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped then as well
    folder = Path(tempfile.mkdtemp(prefix="quicksilver-slurm-"))
    try:
        print(json.dumps(trial(folder, asked.runs, asked.speed), indent=1))
    except Trouble as error:
        print(f"{error}. Files: {folder}", file=sys.stderr)
        asked.keep = True
        return 1
    finally:
        if not asked.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
