"""Is this code slower than an earlier one? `python scripts/benchmark_against.py REVISION`, in a clone, on a quiet machine.

The git revision is checked out into a temporary worktree. The same passes of the same random model are then timed under both versions of the
package, each time in a process of its own. One round is three processes: the revision, this code, the revision again. A ratio is this code's
time over the revision's in the same round, so below 1 is faster. The revision over itself is the noise floor (A/A): a ratio no farther from 1 is
no difference. A pass that the revision does not have is left out, and that is said.

prefill   a prompt, without modules and under each mechanism; ms of one pass
decode    tokens after that prompt, one at a time; ms of one token
plain     the model without this package: what it differs by is the machine

This code is what stands in the clone, changes that are not committed included. The answer is written as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from shapes import ROOT, SHAPES, environment, model_of, random_ids

PREFILL, DECODE = "prefill", "decode"
# The class of quicksilver.modules and its options; None: no module. Under plain, the package is not used at all.
PLAIN = "plain"
MODULES: Mapping[str, tuple[str, Mapping[str, Any]] | None] = {
    PLAIN: None,
    "no module": None,
    "halting, half depth": ("StaticDepth", {"depth": 0.5, "missing_kv": "project"}),
    "KV skipping, half depth": ("StaticDepth", {"depth": 0.5, "missing_kv": "drop"}),
    "fusion": ("TokenFusion", {"rule": "capacity", "fused_share": 0.3, "start": 1 / 3}),
    "quantization": ("AdaptiveQuantization", {"bits": 8}),
}
NAMES = ("revision", "this code", "revision again")
Times = dict[str, dict[str, float]]  # ms by what is timed: prefill and decode


class AgainstError(Exception):
    """What keeps two versions from being compared, for the person at the keyboard."""


@dataclass(frozen=True)
class Compared:
    """One pass under both versions.

    Attributes:
        ratio, low, high: median and quartiles over the rounds of this code's time over the revision's.
        noise_floor: the farther quartile, from 1, of the revision's second time over its first.
        revision_ms: the revision's median.
        verdict: `faster`, `slower`, or `no difference`: the ratio's quartiles hold 1, or its median is within the noise floor.
    """

    what: str
    phase: str
    ratio: float
    low: float
    high: float
    noise_floor: float
    revision_ms: float
    verdict: str


# --- one process: one version ---------------------------------------------------------------------------------------------------


def timed(options: argparse.Namespace) -> dict[str, Any]:
    """Every pass with the package that this process finds: `times`, and under `absent` why there is none of some.

    Raises:
        AgainstError: the package that was found is not the one in `options.package`.
    """
    import quicksilver
    from quicksilver import modules as mechanisms
    from quicksilver.runtime.run import apply

    found = Path(str(quicksilver.__file__)).resolve().parents[1]
    if found != options.package.resolve():
        raise AgainstError(f"{options.package} was to be timed, and Python found quicksilver in {found}: unset PYTHONSAFEPATH.")
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    layers = min(options.layers, shape.layers)
    model = model_of(shape, layers, options.tokens + options.new_tokens)
    ids = random_ids(options.batch, options.tokens)
    times: Times = {}
    absent: dict[str, str] = {}
    for what, made in MODULES.items():
        try:
            module = [] if made is None else [getattr(mechanisms, made[0])(**made[1])]
            context: Any = nullcontext() if what == PLAIN else apply(model, module)
            with torch.inference_mode(), context as run:
                times[what] = _times(model, ids, options, run)
        except Exception as error:  # an earlier version may know neither the class nor the option
            absent[what] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return {"times": times, "absent": absent}


def _times(model: Any, ids: torch.Tensor, options: argparse.Namespace, run: Any) -> dict[str, float]:
    prefill, decode = [], []
    for number in range(options.warmup + options.repeats):
        if run is not None:
            run.reset()  # the trace of the pass before
        clock = [time.perf_counter()]
        cache = model(ids, use_cache=True).past_key_values
        clock.append(time.perf_counter())
        for step in range(options.new_tokens):
            model(ids[:, step : step + 1], past_key_values=cache, use_cache=True)
        clock.append(time.perf_counter())
        if number >= options.warmup:
            prefill.append(1e3 * (clock[1] - clock[0]))
            decode.append(1e3 * (clock[2] - clock[1]) / options.new_tokens)
    return {PREFILL: statistics.median(prefill), DECODE: statistics.median(decode)}


# --- both, in turns -------------------------------------------------------------------------------------------------------------


@contextmanager
def checked_out(revision: str, repository: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """A temporary worktree of `revision`, and its full hash; removed in the end.

    Raises:
        AgainstError: no git, no clone, or no such revision.
    """
    if shutil.which("git") is None:
        raise AgainstError("git was not found: it checks the revision out.")
    named = _git(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if named.returncode:
        raise AgainstError(f"{revision} is no revision of {repository}: give a commit, a branch or a tag, such as HEAD~20.")
    commit = named.stdout.strip()
    with tempfile.TemporaryDirectory(prefix="quicksilver-against-") as folder:
        there = Path(folder) / "worktree"
        added = _git(repository, "worktree", "add", "--detach", str(there), commit)
        if added.returncode:
            raise AgainstError(f"git could not check {revision} out: {added.stderr.strip().splitlines()[-1]}")
        try:
            yield there, commit
        finally:
            _git(repository, "worktree", "remove", "--force", str(there))


def _git(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True)


def one_process(package: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What `timed` returns in a process of its own that imports the package of the folder `package`.

    Raises:
        AgainstError: it ended without an answer.
    """
    words = [f"--{name.replace('_', '-')}={value}" for name, value in _passed_on(options).items()]
    command = [sys.executable, str(Path(__file__).resolve()), "--package", str(package), *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        last = (done.stderr.strip() or "nothing was said").splitlines()[-1]
        raise AgainstError(f"timing the package of {package} ended with exit code {done.returncode}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _passed_on(options: argparse.Namespace) -> dict[str, Any]:
    names = ("shape", "layers", "batch", "tokens", "new_tokens", "warmup", "repeats", "threads")
    return {name: getattr(options, name) for name in names}


def compared(rounds: Sequence[Sequence[Times]]) -> list[Compared]:
    """Of rounds of (revision, this code, revision again), each pass that all of them have."""
    found = []
    for what in rounds[0][0]:
        if not all(what in times for one in rounds for times in one):
            continue
        for phase in (PREFILL, DECODE):
            triples = [[times[what][phase] for times in one] for one in rounds]
            low, middle, high = _quartiles([new / old for old, new, _ in triples])
            floors = _quartiles([again / old for old, _, again in triples])
            floor = max(abs(floors[0] - 1), abs(floors[2] - 1))
            same = low <= 1 <= high or abs(middle - 1) <= floor
            verdict = "no difference" if same else "slower" if middle > 1 else "faster"
            old_ms = statistics.median(old for old, _, _ in triples)
            found.append(Compared(what, phase, middle, low, high, floor, old_ms, verdict))
    return found


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def text(found: Sequence[Compared], absent: Mapping[str, str]) -> str:
    """One line a pass, for a terminal."""
    lines = [f"{'':<24} {'':<8} {'ratio':>6}  {'quartiles':<16} {'A/A':>6} {'ms':>9}"]
    lines += [
        f"{one.what:<24} {one.phase:<8} {one.ratio:>6.3f}  {f'{one.low:.3f} to {one.high:.3f}':<16} {one.noise_floor:>6.1%} "
        f"{one.revision_ms:>9.2f}  {one.verdict}"
        for one in found
    ]
    return "\n".join([*lines, *(f"{what}: not compared, {why}" for what, why in absent.items())])


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="a commit, a branch or a tag")
    parser.add_argument("--rounds", type=int, default=7, help="at least 3; three processes each")
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=448, help="of the prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=1, help="passes of each process that are not timed")
    parser.add_argument("--repeats", type=int, default=3, help="passes of each process, of which the median counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmarks" / "against.json")
    parser.add_argument("--package", type=Path, help=argparse.SUPPRESS)  # time one version, in this process
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    try:
        if options.package is not None:
            print(json.dumps(timed(options)))
            return 0
        if options.revision is None:
            raise AgainstError("say which revision this code is compared with, for instance HEAD~20.")
        if options.rounds < 3:
            raise AgainstError(f"--rounds {options.rounds} gives no quartiles: at least 3.")
        compare(options)
    except AgainstError as error:
        print(f"benchmark_against: {error}", file=sys.stderr)
        return 2
    return 0


def compare(options: argparse.Namespace) -> None:
    """Time both versions in turns, print the ratios and write them.

    Raises:
        AgainstError: a revision that is not there, or a process without an answer.
    """
    load = os.getloadavg()[0]
    rounds: list[list[Times]] = []
    absent: dict[str, str] = {}
    with checked_out(options.revision) as (there, commit):
        for number in range(options.rounds):
            times = []
            for name, package in zip(NAMES, (there, ROOT, there), strict=True):
                print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
                answer = one_process(package, options)
                times.append(answer["times"])
                absent |= {what: f"{name}: {why}" for what, why in answer["absent"].items()}
            rounds.append(times)
    found = compared(rounds)
    print(text(found, absent))
    content = {
        "revision": commit,
        "this_code": _git(ROOT, "describe", "--always", "--dirty").stdout.strip(),
        "options": _passed_on(options) | {"rounds": options.rounds},
        "environment": environment("cpu") | {"threads": options.threads, "load_average_before": load},
        "compared": [asdict(one) for one in found],
        "absent": absent,
        "rounds_ms": [dict(zip(NAMES, one, strict=True)) for one in rounds],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"Written: {options.output}")


if __name__ == "__main__":
    sys.exit(main())
