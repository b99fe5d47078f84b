"""A real Slurm on this machine alone, and a sweep on it whose worker and head are killed.

    python scripts/try_slurm.py                      # 12 runs, as a test: about a minute of work
    python scripts/try_slurm.py --runs 200           # the whole trial
    python scripts/try_slurm.py --windows 2000        # one run of so many windows that two workers share, killed five times
    python scripts/try_slurm.py --speed --runs 100    # no trial: one worker and two are timed; give the machine to it alone
    python scripts/try_slurm.py --speed --windows 2000

Needs root and the packages slurmctld, slurmd, slurm-client and munge (Debian: apt-get install slurm-wlm munge). What it starts it stops; its
files lie in a temporary folder. The steps: the sweep is started with two workers; one worker is killed while it makes a run; then the command
itself; the same command goes on; every run has its record once, equal to that of the same sweep in one process. Every tenth of a second the
status and the page are held against the records on disk.
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
import textwrap
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quicksilver.records import lease
from quicksilver.records.store import Store
from quicksilver.runs.sweep import Sweep
from quicksilver.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scancel", "sinfo", "squeue")
PLACES = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # daemons may lie where no user looks
Numbers = dict[str, float | int]
HOST = socket.gethostname().partition(".")[0]


class Trouble(Exception):
    """The trial did not go as it should."""


def missing() -> str | None:
    """Why there can be no trial on this machine; None: there can."""
    for program in PROGRAMS:
        if shutil.which(program, path=PLACES) is None:
            return f"{program} is not installed: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else f"Slurm's daemons are started as root, and this is {getpass.getuser()}"


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start munge and a Slurm of one node; within, programs with this environment talk to it."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key, conf = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [free.getsockname()[1] for free in (one, two)]
    conf.write_text(Path(__file__).with_suffix(".conf").read_text().format(host=HOST, folder=folder, ports=ports))
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons: list[subprocess.Popen[bytes]] = []

    def start(command: str, *words: str) -> None:
        program = [shutil.which(command, path=PLACES) or command, *words]
        with (folder / f"{command}.out").open("wb") as log:
            daemons.append(subprocess.Popen(program, stdout=log, stderr=log, env=environment, start_new_session=True))

    def idle() -> bool:
        states = subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True, env=environment).stdout.split()
        return states == ["idle"]

    try:
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge)
        _until((folder / "munge.socket").exists, 30, "munged does not start")
        start("slurmctld", "-D", "-f", str(conf))
        start("slurmd", "-D", "-f", str(conf), "-N", HOST)
        _until(idle, 60, f"Slurm does not come up (logs in {folder})")
        yield environment
    finally:
        for more in (["--signal=KILL", "--full"], []):
            subprocess.run(["scancel", "--partition=main", *more], env=environment, capture_output=True)
        time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


def _until(ready: Callable[[], bool], limit_s: float, otherwise: str) -> None:
    end = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > end:
            raise Trouble(otherwise)
        time.sleep(0.1)


# --- the trial ------------------------------------------------------------------------------------------------------------------


class Sweeping:
    """Commands that start one sweep in a world of its own, with a Slurm that runs."""

    def __init__(self, folder: Path, environment: dict[str, str], runs: int, windows: int, layers: int, window: int) -> None:
        sys.path.insert(0, str(ROOT / "tests"))
        from harness_world import make_text, make_world

        self.folder, self.environment = folder, environment
        world = make_world(folder / "world", layers=layers, window=window, prompt=window * 3 // 4)
        text = make_text(folder / "world" / "test.txt", seed=1, words=max(150 * window // 32, windows * window // 5))
        text.write_text(textwrap.fill(text.read_text(), 1000))  # longer lines are no text
        asked = ["modules=[random_halting]", f"seed=range(0,{runs})", "measure=sweep", f"dataset.windows={windows}", "name=trial"]
        self.words = [sys.executable, "-m", "quicksilver", "run", "-m", *world, *asked]

    def start(self, results: str, workers: int | None = None, *more: str) -> subprocess.Popen[str]:
        """With workers of Slurm; None: in one process."""
        words = [*self.words, f"results_dir={self.folder / results}"]
        if workers is not None:
            words += ["hydra/launcher=submitit_slurm", f"workers={workers}", "hydra.launcher.cpus_per_task=1", *more]
        with (self.folder / f"{results}.log").open("a") as log:
            return subprocess.Popen(words, cwd=ROOT, env=self.environment, stdout=log, stderr=log, text=True)

    def wait(self, command: subprocess.Popen[str], results: str) -> None:
        """Until it ends. Raises Trouble: it failed."""
        if command.wait():
            raise Trouble(f"the sweep in {results} failed: {(self.folder / f'{results}.log').read_text()[-2000:]}")

    def compare(self, results: str, expected: int) -> None:
        """Make the same sweep in one process. Raises Trouble: its records are not as many as expected, or others than those of `results`."""
        self.wait(self.start("serial"), "serial")
        ours, serial = _records(self.folder / results), _records(self.folder / "serial")
        if len(serial) != expected:
            raise Trouble(f"the serial sweep made {len(serial)} records, not {expected}")
        lost, more = serial.keys() - ours.keys(), ours.keys() - serial.keys()
        if lost or more:
            raise Trouble(f"{len(lost)} records are lost and {len(more)} are of no run")
        if wrong := [f"{name} has {ours[name]}, not {numbers}" for name, numbers in serial.items() if numbers != ours[name]]:
            raise Trouble(f"{len(wrong)} records are not those of a serial sweep: {wrong[0]}")


def _records(results: Path) -> dict[str, tuple[float, int]]:
    """Nats and operations of every record, by fingerprint."""
    contents = {path.parent.name: json.loads(path.read_text()) for path in (results / "runs").glob("[!.]*/record.json")}
    return {name: (content["nll_nats"], content["executed_flops"]) for name, content in contents.items()}


@dataclass
class Watcher:
    """Holds what the status and the page of a sweep say against its records."""

    results: Path
    runs: int
    looks: int = 0
    page_behind: int = 0

    def on_page(self) -> int:
        """How many runs the page says are done."""
        page = self.results / "sweeps" / "trial" / "index.html"
        return page.read_text().count('data-state="done"') if page.exists() else 0

    def makers(self) -> list[int]:
        """Processes that make a run now."""
        return [who.pid for who in Store(self.results).in_the_making().values()]

    def done(self) -> int:
        """How many runs the status says are done.

        Raises Trouble: it is not as many as there are records, more run than there are workers, or a run failed.
        """
        before, page = len(_records(self.results)), self.on_page()
        try:
            counts = Counter(state.state for state in Sweep.load(self.results, "trial").states())
        except ConfigError:
            return 0
        after, done = len(_records(self.results)), counts["done"]
        self.looks += 1
        self.page_behind = max(self.page_behind, done - page)
        # One record is the dense run's, which is none of the sweep's.
        if not before - 1 <= done <= after:
            raise Trouble(f"the status said {done} done between {before} and {after} records")
        if page > after:
            raise Trouble(f"the page said {page} done where there were {after} records")
        if counts.total() != self.runs or counts["running"] > 2 or counts["failed"]:
            raise Trouble(f"the status of {self.runs} runs with 2 workers said {dict(counts)}")
        return done


def trial(folder: Path, runs: int) -> Numbers:
    """Kill a worker, kill the head, go on, compare; returns what was counted.

    Raises Trouble: a record is missing, there twice or another than a serial sweep's, or the status was wrong.
    """
    found: Numbers = {"runs": runs}
    with slurm(folder / "slurm") as environment:
        sweeping = Sweeping(folder, environment, runs, windows=3, layers=6, window=32)
        results, some = folder / "slurm_two", max(1, runs // 6)
        watcher = Watcher(results, runs)
        head = sweeping.start("slurm_two", 2)
        _until(lambda: watcher.done() >= some or head.poll() is not None, 900, "no run was done in a quarter of an hour")
        _until(lambda: bool(watcher.makers()), 120, "nobody makes a run")
        worker = watcher.makers()[0]
        os.kill(worker, signal.SIGKILL)
        found["done_when_the_worker_was_killed"] = at_kill = watcher.done()
        _until(lambda: worker not in watcher.makers(), 5, "the status says that a dead worker makes a run")
        enough = min(runs - 1, at_kill + some)
        _until(lambda: watcher.done() >= enough or head.poll() is not None, 900, "nothing is made after a worker's death")
        head.kill()
        head.wait()
        found["done_when_the_head_was_killed"] = watcher.done()
        again = sweeping.start("slurm_two", 2)
        _until(lambda: watcher.done() == runs or again.poll() is not None, 3600, "the sweep does not end")
        sweeping.wait(again, "slurm_two")
        sweeping.compare("slurm_two", runs + 1)
        if watcher.done() != runs or watcher.on_page() != runs:
            raise Trouble(f"status and page say {watcher.done()} and {watcher.on_page()} of {runs}")
    return found | {"looks_at_the_status": watcher.looks, "runs_the_page_was_behind_at_most": watcher.page_behind}


class BlockWatcher(threading.Thread):
    """Looks at the blocks of runs in the making, fifty times a second: how often each was begun, and how often it was published."""

    def __init__(self, results: Path) -> None:
        super().__init__(daemon=True)
        self.drafts = results / "runs" / ".drafts"
        self.begun, self.published = defaultdict[Path, set[str]](set), defaultdict[Path, set[int]](set)
        self.pids: set[int] = set()

    def run(self) -> None:
        """Until the program ends."""
        while True:
            with suppress(OSError):  # folders go while they are looked at
                for path in self.drafts.glob("*/*/quality-*"):
                    if path.suffix == ".block":
                        self.published[path].add(path.stat().st_ino)
                    elif path.suffix == ".lock" and (who := lease.holder(path)) is not None:
                        self.begun[path].add(who.token)
                        self.pids.add(who.pid)
            time.sleep(0.02)

    def again(self) -> dict[str, int]:
        """Blocks in all; how many were begun, and how many were published, more than once."""
        begun, published = (sum(map(len, found.values())) - len(found) for found in (self.begun, self.published))
        counts = {"blocks": len(self.published), "workers_seen": len(self.pids)}
        return counts | {"blocks_begun_again": begun, "blocks_computed_twice": published}


def one_run(folder: Path, windows: int) -> Numbers:
    """Let two workers share one run; kill a worker and the head, end a job's time and its memory, take the node down; compare.

    Raises Trouble: the record is missing, or another than that of one process; more than two blocks were computed twice.
    """
    found: Numbers = {"windows": windows, "load_before": os.getloadavg()[0]}
    with slurm(folder / "slurm") as environment, ExitStack() as at_the_end:
        sweeping = Sweeping(folder, environment, 1, windows, layers=24, window=256)
        results, log = folder / "shared", folder / "shared.log"
        watcher, looker = Watcher(results, 1), BlockWatcher(results)
        looker.start()
        heads = [sweeping.start("shared", 2)]
        at_the_end.callback(lambda: heads[-1].kill())

        def slurm_does(*words: str, check: bool = True) -> str:
            return subprocess.run(words, env=environment, capture_output=True, text=True, check=check).stdout

        def jobs() -> list[str]:
            return slurm_does("squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i", check=False).split()

        def more_blocks() -> bool:
            """Wait for some blocks, and say whether the run is over; the command goes on where its workers are gone."""
            enough = len(looker.published) + max(1, 2 * windows // 32 // 8)  # of the dense run and of the run

            def made() -> bool:
                there = len(looker.published) >= enough or watcher.done() > 0
                if not there and heads[-1].poll() is not None:
                    heads.append(sweeping.start("shared", 2))
                return there

            _until(made, 900, "no block is made in a quarter of an hour")
            return watcher.done() == 1

        def the_worker() -> None:
            os.kill(watcher.makers()[0], signal.SIGKILL)

        def the_head() -> None:
            heads[-1].kill()
            heads[-1].wait()

        def the_time() -> None:  # Slurm signals the job that its time is nearly over, and ends it after a minute
            job = jobs()[0]
            slurm_does("scontrol", "update", f"JobId={job}", "TimeLimit=1")
            _until(lambda: job not in jobs(), 180, "a job goes on after its time")

        def the_memory() -> None:
            slurm_does("scancel", "--partition=main")
            heads[-1].wait()
            heads.append(sweeping.start("shared", 2, "+hydra.launcher.additional_parameters={mem:200M}"))
            heads[-1].wait(900)
            if "out of memory" not in log.read_text():
                raise Trouble("a job had more memory than it asked for, and nobody says so")

        def the_node() -> None:
            slurm_does("scontrol", "update", f"NodeName={HOST}", "State=DOWN", "Reason=trial")
            time.sleep(3)
            slurm_does("scontrol", "update", f"NodeName={HOST}", "State=RESUME", check=False)  # it may come back by itself

        for kill in (the_worker, the_head, the_memory, the_node, the_time):
            over = more_blocks()
            found[f"blocks_before_{kill.__name__}"] = len(looker.published)
            if over:
                raise Trouble("the run was over before it was killed five times: give it more windows")
            kill()
            print(f"{kill.__name__}, at {len(looker.published)} blocks", file=sys.stderr, flush=True)
        _until(more_blocks, 3600, "the run does not end")
        heads[-1].wait()
        sweeping.compare("shared", 2)
        for record in (folder / "serial" / "runs").glob("[!.]*"):
            for path in (record / "windows.parquet", record / "trace.safetensors"):
                shared = results / "runs" / record.name / path.name
                if path.exists() and path.read_bytes() != shared.read_bytes():
                    raise Trouble(f"{shared} is not that of one process")
        found |= looker.again()
        if found["blocks_computed_twice"] > 2:
            raise Trouble(f"{found['blocks_computed_twice']} blocks were computed twice")
    return found


def speed(folder: Path, runs: int, windows: int | None = None) -> Numbers:
    """Time the same sweep, or one run of so many windows, with one worker and with two, of one thread each.

    Returns:
        Seconds of the whole command, Slurm's daemons running before it; of its parts: until the head hands the workers to Slurm, until the
        first record is there, from that to the last, and until the command ends.
    """
    runs = 1 if windows else runs
    found: Numbers = {"runs": runs, "windows": windows or 24, "load_before": os.getloadavg()[0]}
    with slurm(folder / "slurm") as environment:
        environment |= {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        sweeping = Sweeping(folder, environment, runs, windows or 24, layers=12, window=256)
        for workers in (1, 2):
            results = folder / f"workers_{workers}"
            began = time.time()  # files have their times of this clock
            sweeping.wait(sweeping.start(results.name, workers), results.name)
            handed = min(path.stat().st_mtime for path in (results / "sweeps" / "trial" / "workers").rglob("*_submitted.pkl"))
            ends = sorted(path.stat().st_mtime for path in (results / "runs").glob("[!.]*/record.json"))
            parts = {
                "seconds": time.time() - began, "seconds_until_handed_to_slurm": handed - began,
                "seconds_from_there_to_first_record": ends[0] - handed, "seconds_from_first_to_last_record": ends[-1] - ends[0],
                "seconds_from_last_record_to_end": time.time() - ends[-1],
            }  # fmt: skip
            found |= {f"{of}_with_{workers}": round(seconds, 1) for of, seconds in parts.items()}
            found[f"load_after_{workers}"] = os.getloadavg()[0]
    for of in ("seconds", "seconds_from_first_to_last_record"):  # of one run: its dense run's, and its own
        found[f"times_as_fast_by_{of}"] = round(found[f"{of}_with_1"] / max(found[f"{of}_with_2"], 1e-9), 2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=12, help="of the sweep (default: 12)")
    parser.add_argument("--windows", type=int, help="of one run that the workers share, instead of a sweep")
    parser.add_argument("--speed", action="store_true", help="time one worker and two instead: give the machine to it alone")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    asked = parser.parse_args()
    if (reason := missing()) is not None:
        print(f"No trial: {reason}.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped then as well
    folder = Path(tempfile.mkdtemp(prefix="quicksilver-slurm-"))
    try:
        if asked.speed:
            found = speed(folder, asked.runs, asked.windows)
        else:
            found = one_run(folder, asked.windows) if asked.windows else trial(folder, asked.runs)
        print(json.dumps(found, indent=1))
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
