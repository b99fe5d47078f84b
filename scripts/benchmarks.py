"""Every benchmark of this machine within twenty minutes: `make benchmark`, on a quiet one.

    runtime        overhead and realization ratios (scripts/benchmark.py), on fewer layers and rows than it takes by itself
    prediction     a prompt whose tokens are dropped, then predicted, and decoding after it, on gpt2-large's shape (scripts/benchmark.py)
    quantization   what int8 brings (scripts/benchmark_quantization.py)
    break_even     where a mechanism starts to pay (scripts/break_even.py)
    scaling        time against length and depth (scripts/scaling.py)

With `--against REVISION` this code is compared with an earlier one instead (scripts/benchmark_against.py).

Each part runs in a process of its own. Their numbers and pictures go to results/benchmarks/, with a README.md that shows them, and what
scripts/benchmark_lm_eval.py, which needs another package, has left there. A part that would begin after `--minutes` is left out, and that is said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmark_against
import pandas as pd
from break_even import break_even
from scaling import fits
from shapes import ROOT, environment

PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "runtime": (
        "benchmark.py",
        (
            *("--only", "none", "decay", "fusion", "decide", "generate", "repeat"),
            *("--dtypes", "float32"),
            *("--batch", "4"),
            *("--decay-layers", "8"),
            *("--repeats", "5"),
            *("--new-tokens", "17"),
        ),
    ),
    "prediction": (
        "benchmark.py",
        ("--only", "predicted", "--dtypes", "float32", "--shapes", "gpt2-large", "--repeats", "3", "--new-tokens", "17"),
    ),
    "quantization": (
        "benchmark_quantization.py",
        (
            *("--batch", "4"),
            *("--sequence", "256"),
            *("--layers", "2"),
            *("--decode-layers", "12"),
            *("--kernel-rows", "1024"),
            *("--repeats", "3"),
        ),
    ),
    "break_even": ("break_even.py", ("--cell-seconds", "0.5")),
    "scaling": ("scaling.py", ("--repeats", "3")),
}
# What a part writes; those without a suffix are given the folder.
OUTPUTS = {
    "runtime": "benchmark.json",
    "prediction": "benchmark_prediction_gpt2-large.json",
    "quantization": "benchmark_quantization.json",
    "break_even": "",
    "scaling": "",
}


def run(part: str, output: Path, more: Sequence[str]) -> str | None:
    """Run one part; None, or why there is nothing of it."""
    script, words = PARTS[part]
    where = output / OUTPUTS[part]
    command = [sys.executable, str(ROOT / "scripts" / script), *words, *more, "--output", str(where)]
    done = subprocess.run(command, cwd=ROOT)
    return None if done.returncode == 0 else f"{script} ended with exit code {done.returncode}"


def markdown(output: Path, notes: Mapping[str, str], seconds: Mapping[str, float], more: Mapping[str, Sequence[str]]) -> str:
    """What is in the folder, as a page; `more`: the words each part was given beyond its own."""
    around = environment("cpu")
    parts = [
        "# Benchmarks",
        f"{around['machine']}, {around['threads']} threads, torch {around['torch']}, transformers {around['transformers']}. `make benchmark` "
        "makes this page again. Random weights of true shapes, few layers: what is measured is the runtime. Ratios are medians of rounds in "
        "turns; a difference within the A/A noise floor is none.",
    ]
    if (output / "benchmark.json").is_file():
        parts += ["## Runtime", *_runtime(json.loads((output / "benchmark.json").read_text(encoding="utf-8")))]
    for number, path in enumerate(sorted(output.glob("benchmark_prediction_*.json"))):
        parts += ["## Dropped, then predicted, on true shapes"] * (number == 0)
        parts += _runtime(json.loads(path.read_text(encoding="utf-8")))
    if (output / "break_even.csv").is_file():
        frame = pd.read_csv(output / "break_even.csv")
        parts += ["## Where a mechanism starts to pay", "![break-even map](break_even.png)"]
        parts += ["Halting rate from which more time is saved than noise:", _table(break_even(frame))]
        left = frame[frame["status"] != "measured"]
        if len(left):
            parts.append(_table(left[["shape", "phase", "batch", "sequence", "status"]]))
    if (output / "scaling.csv").is_file():
        frame = fits(pd.read_csv(output / "scaling.csv")).round({"exponent": 3, "r_squared": 4})
        parts += ["## Time against length and depth", "![scaling](scaling.png)", "Time ~ axis ^ exponent:", _table(frame)]
    if (output / "benchmark_quantization.json").is_file():
        found = json.loads((output / "benchmark_quantization.json").read_text(encoding="utf-8"))["findings"]
        frame = pd.DataFrame(found)[["part", "what", "name", "speedup", "low", "high"]].round(2)
        parts += ["## int8", "Times as fast as the first of each comparison:", _table(frame)]
    if (output / "benchmark_lm_eval.json").is_file():
        parts += [
            "## lm-evaluation-harness",
            *_lm_eval(json.loads((output / "benchmark_lm_eval.json").read_text(encoding="utf-8"))),
        ]
    ran = {part: " ".join([PARTS[part][0], *PARTS[part][1], *more[part]]) for part in seconds}
    parts += ["## This time", "\n".join(f"- {part}: {taken:.0f} s (`{ran[part]}`)" for part, taken in seconds.items())]
    if notes:
        parts.append("\n".join(f"- {part}: not measured, {why}" for part, why in notes.items()))
    return "\n\n".join(parts) + "\n"


def _runtime(content: Mapping[str, Any]) -> list[str]:
    rows = [
        {
            "section": one["section"], "dtype": one["dtype"], "what": one["what"], "median": f"{one['value']:.3f}{one['unit']}",
            "quartiles": f"{one['low']:.3f} to {one['high']:.3f}", "target": f"{one['target']}{one['unit']}",
            "reached": "yes" if one["reached"] else "no",
            "noise": "" if one["noise_floor"] is None else f"{100 * one['noise_floor']:.1f}%",
        }
        for one in content["findings"]
    ]  # fmt: skip
    options = content["options"]
    sizes = ", ".join(options["shapes"]) if options["only"] == ["predicted"] else f"d = {options['width']}"
    shape = f"{options['batch']} × {options['sequence']} tokens, {sizes}, {options['repeats']} rounds"
    load = content["environment"]["load_average_before"]
    return [f"{shape}; load average before: {load:.1f}.", _table(pd.DataFrame(rows))]


def _lm_eval(content: Mapping[str, Any]) -> list[str]:
    rows = [
        {
            "requests": one["part"], "rounds": one["rounds"], "time over HFLM's": f"{one['ratio']:.3f}", "quartiles": f"{one['low']:.3f} to {one['high']:.3f}",
            "HFLM over itself": f"{one['noise_low']:.3f} to {one['noise_high']:.3f}", "at most 1.05": "yes" if one["reached"] else "no",
        }
        for one in content["findings"]
    ]  # fmt: skip
    options, load = content["options"], content["environment"]["load_average_before"]
    said = f"The adapter without modules on {options['model']}, {options['contexts']} contexts, {options['clock']} clock; load average before: {load:.1f}."
    return [said, _table(pd.DataFrame(rows))]


def _table(frame: pd.DataFrame) -> str:
    lines = ["| " + " | ".join(frame.columns) + " |", "|" + " --- |" * len(frame.columns)]
    lines += [
        "| " + " | ".join("" if pd.isna(cell) else str(cell) for cell in row) + " |" for row in frame.itertuples(index=False)
    ]
    return "\n".join(lines)


def options_of(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=16.0, help="no part begins after that; the longest takes about four")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmarks", help="a folder")
    parser.add_argument("--against", metavar="REVISION", help="is this code slower than that? Nothing else is measured")
    for part in PARTS:
        parser.add_argument(
            f"--{part.replace('_', '-')}", default="", metavar="WORDS", help=f"more options of {PARTS[part][0]}, in one word"
        )
    options = parser.parse_args(arguments)
    return options, {part: getattr(options, part).split() for part in PARTS}


def main(arguments: Sequence[str] | None = None) -> int:
    options, more = options_of(arguments)
    if options.against is not None:
        return benchmark_against.main([options.against, "--output", str(options.output / "against.json")])
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"The machine is busy (load {load:.1f}): what follows carries its noise.", file=sys.stderr, flush=True)
    began = time.monotonic()
    notes: dict[str, str] = {}
    seconds: dict[str, float] = {}
    options.output.mkdir(parents=True, exist_ok=True)
    for part in options.only:
        if time.monotonic() - began > 60 * options.minutes:
            notes[part] = f"the {options.minutes:g} minutes were over"
            continue
        print(f"[{part}]", flush=True)
        started = time.monotonic()
        why = run(part, options.output, more[part])
        seconds[part] = time.monotonic() - started
        if why is not None:
            notes[part] = why
    page = options.output / "README.md"
    page.write_text(markdown(options.output, notes, seconds, more), encoding="utf-8")
    print(f"Written: {page} ({time.monotonic() - began:.0f} s)")
    for part, why in notes.items():
        print(f"{part}: not measured, {why}.", file=sys.stderr)
    return 1 if notes else 0


if __name__ == "__main__":
    sys.exit(main())
