"""What the runtime costs and saves on this machine, within twenty minutes; needs a clone of the repository.

quicksilver benchmark
quicksilver benchmark only=[runtime,scaling] minutes=5
quicksilver benchmark against=HEAD~20

Writes numbers and pictures to results/benchmarks/, with a README.md that shows them.

Keys of its own:
  only=[…]          parts: runtime, prediction, quantization, break_even, scaling
  minutes=16        no part begins after that
  against=REVISION  is this code slower than that one? Both in turns; nothing else is measured
  output=FOLDER     default: results/benchmarks
  runtime=OPTIONS   further options of that part of scripts/benchmark.py, in one word; in the same way prediction, quantization, break_even, scaling
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quicksilver.cli.arguments import split
from quicksilver.runtime.errors import ConfigError

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "benchmark.py"
PARTS = ("runtime", "prediction", "quantization", "break_even", "scaling")


@dataclass
class Options:
    """The command's own keys, as its help has them."""

    only: list[str] | None = None
    minutes: float = 16.0
    against: str | None = None
    output: str | None = None
    runtime: str = ""
    prediction: str = ""
    quantization: str = ""
    break_even: str = ""
    scaling: str = ""


def main(words: Sequence[str]) -> int:
    """Run scripts/benchmark.py; returns its exit code.

    Raises:
        ConfigError: a part that there is not, a key of a run, or no clone.
    """
    options, overrides = split(words, Options, "benchmark")
    if overrides:
        raise ConfigError(f"{overrides[0]}: a benchmark has shapes of its own and no run. Keys: {', '.join(vars(options))}.")
    if options.only is not None and (not options.only or set(options.only) - set(PARTS)):
        unknown = next((part for part in options.only if part not in PARTS), "[]")
        raise ConfigError(f"only={unknown}: there is no such part. Parts: {', '.join(PARTS)}.")
    if not 0 < options.minutes < math.inf:
        raise ConfigError(f"minutes={options.minutes:g}: give a number above 0, such as 16.")
    if not SCRIPT.is_file():
        raise ConfigError("quicksilver benchmark needs a clone of the repository: its scripts are not in the installed package.")
    return subprocess.run(command(options)).returncode


def command(options: Options) -> list[str]:
    """The command line of scripts/benchmark.py, or of scripts/benchmark_against.py."""
    output = Path(options.output) if options.output else None
    if options.against is not None:
        words = [sys.executable, str(SCRIPT.with_name("benchmark_against.py")), options.against]
        return [*words, *(["--output", str(output / "against.json")] if output else [])]
    words = [sys.executable, str(SCRIPT), "all", "--minutes", str(options.minutes)]
    words += ["--only", *options.only] if options.only else []
    words += ["--output", str(output)] if output else []
    for part in PARTS:
        more = getattr(options, part)
        words += [f"--{part.replace('_', '-')}={more}"] if more else []
    return words
