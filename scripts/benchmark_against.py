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
from itertools import product
from pathlib import Path
from typing import Any

import torch
from benchmarking import RESULTS, ROOT, SHAPES, Option, Row, environment, model_of, parsed, random_ids, save, table

# The class of quicksilver.modules and its options; None: no module. Under plain, the package is not used at all.
MODULES: Mapping[str, tuple[str, Mapping[str, Any]] | None] = {
    **dict.fromkeys(("plain", "no module")),
    "halting, half depth": ("StaticDepth", {"depth": 0.5, "missing_kv": "project"}),
    "KV skipping, half depth": ("StaticDepth", {"depth": 0.5, "missing_kv": "drop"}),
    "fusion": ("TokenFusion", {"rule": "capacity", "fused_share": 0.3, "start": 1 / 3}),
    "quantization": ("AdaptiveQuantization", {"bits": 8}),
}
NAMES = ("revision", "this code", "revision again")
Times = dict[str, dict[str, float]]  # ms by what is timed: prefill and decode


class AgainstError(Exception):
    """What keeps two versions from being compared."""


# --- one process: one version ---------------------------------------------------------------------------------------------------


def timed(options: argparse.Namespace) -> dict[str, Any]:
    """Every pass with the package that this process finds: `times`, and under `absent` why there is none of some."""
    import quicksilver
    from quicksilver import modules as mechanisms
    from quicksilver.runtime.run import apply

    found = Path(str(quicksilver.__file__)).resolve().parents[1]
    if found != options.package.resolve():
        raise AgainstError(f"{options.package} was to be timed, and Python found quicksilver in {found}: unset PYTHONSAFEPATH.")
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    model = model_of(shape, min(options.layers, shape.layers), options.tokens + options.new_tokens)
    ids = random_ids(options.batch, options.tokens)
    times, absent = Times(), dict[str, str]()
    for what, made in MODULES.items():
        try:
            module = [] if made is None else [getattr(mechanisms, made[0])(**made[1])]
            context: Any = nullcontext() if what == "plain" else apply(model, module)
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
    return {"prefill": statistics.median(prefill), "decode": statistics.median(decode)}


# --- both, in turns -------------------------------------------------------------------------------------------------------------


@contextmanager
def checked_out(revision: str, repository: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """A temporary worktree of `revision`, and its full hash; removed in the end."""
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
    """What `timed` returns in a process of its own that imports the package of the folder `package`."""
    words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in OPTIONS if name not in ("rounds", "package")]
    command = [sys.executable, str(Path(__file__).resolve()), "--package", str(package), *words]
    env = {**os.environ, "PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=package, env=env)
    if done.returncode:
        last = (done.stderr.strip() or "nothing was said").splitlines()[-1]
        raise AgainstError(f"timing the package of {package} ended with exit code {done.returncode}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compared(rounds: Sequence[Sequence[Times]]) -> list[Row]:
    """Of rounds of (revision, this code, revision again), each pass that all of them have.

    Returns:
        A row a pass and phase. `ratio`, `low`, `high`: median and quartiles over the rounds of this code's time over the revision's. `noise_floor`:
        the farther quartile, from 1, of the revision's second time over its first. `revision_ms`: the revision's median. `verdict`: `faster`,
        `slower`, or `no difference` where the quartiles hold 1 or the median is within the noise floor.
    """
    # Not at the top: the process that times a revision reads this file with the revision's package, which may not have it.
    from quicksilver.measure.latency import Alternation, LatencySamples

    found = []
    there = [what for what in rounds[0][0] if all(what in times for one in rounds for times in one)]
    for what, phase in product(there, ("prefill", "decode")):
        old, new, again = ([times[what][phase] for times in of_version] for of_version in zip(*rounds, strict=True))
        samples = {"old": LatencySamples(old), "new": LatencySamples(new)}
        times = Alternation(samples, control_ms=again)
        ratio, floor = times.ratio("new", to="old"), times.noise_floor or 0.0
        same = ratio.low <= 1 <= ratio.high or abs(ratio.median - 1) <= floor
        verdict = "no difference" if same else "slower" if ratio.median > 1 else "faster"
        found.append({
            "what": what, "phase": phase, "ratio": ratio.median, "low": ratio.low, "high": ratio.high, "noise_floor": floor,
            "revision_ms": times["old"].median, "verdict": verdict,
        })  # fmt: skip
    return found


OPTIONS: dict[str, Any] = {
    "rounds": Option(7, "at least 3; three processes each", least=3), "shape": Option("gpt2", choices=SHAPES), "layers": 12, "batch": 1,
    "tokens": Option(448, "of the prompt"), "new_tokens": 16, "warmup": Option(1, "passes of each process that are not timed", least=0),
    "repeats": Option(3, "passes of each process, of which the median counts"), "threads": 1,
    "package": Option(None, "time the version in this folder, in this process: for the benchmark's own use", kind=Path),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    revision = words.pop(0) if words and not words[0].startswith("-") else None
    options = parsed("against", __doc__, OPTIONS, words, RESULTS / "against.json")
    try:
        if options.package is None:
            compare(revision, options)
        else:
            print(json.dumps(timed(options)))
    except AgainstError as error:
        print(f"benchmark against: {error}", file=sys.stderr)
        return 2
    return 0


def compare(revision: str | None, options: argparse.Namespace) -> None:
    """Time both versions in turns, print the ratios and write them."""
    if revision is None:
        raise AgainstError("say which revision this code is compared with, for instance HEAD~20.")
    around = environment("cpu") | {"threads": options.threads}
    rounds, absent = list[list[Times]](), dict[str, str]()
    with checked_out(revision) as (there, commit):
        for number in range(options.rounds):
            rounds.append([])
            for name, package in zip(NAMES, (there, ROOT, there), strict=True):
                print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
                answer = one_process(package, options)
                rounds[-1].append(answer["times"])
                absent |= {what: f"{name}: {why}" for what, why in answer["absent"].items()}
    found, here = compared(rounds), _git(ROOT, "describe", "--always", "--dirty").stdout.strip()
    print(table(found), *(f"{what}: not compared, {why}" for what, why in absent.items()), sep="\n")
    times = [dict(zip(NAMES, one, strict=True)) for one in rounds]
    save(options.output, around, options, revision=commit, this_code=here, compared=found, absent=absent, rounds_ms=times)
    print(f"Written: {options.output}")


if __name__ == "__main__":
    sys.exit(main())
