"""What the adapter to lm-evaluation-harness costs: `python scripts/benchmark_lm_eval.py`, on a quiet machine.

lm-eval's own model `hf` (HFLM) and our model `quicksilver` without modules answer the same requests in turns, in one process, on one model.
A ratio above 1 is our time over HFLM's; beside it stands HFLM's over its own, asked a second time in each round (A/A). Log-likelihoods and
texts must be equal; that is looked at first. Each part takes as many rounds as fit into its share of `--seconds`, five at least: under 90
seconds in all on a quiet machine. The numbers go to results/benchmarks/benchmark_lm_eval.json, which the next `make benchmark` shows.

    contexts   every context is asked about once: nothing is shared, both compute the same tokens
    letters    four continuations of one token after each context
    choices    four continuations of several tokens after each context, which ours computes once
    rolling    log-likelihoods of whole texts
    generate   greedy texts

`--clock cpu` counts the processor time of this process instead: fairer on a machine that is shared, with one thread.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmark_quantization import CLOCKS, alternate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.table import Table
from shapes import ROOT, environment

from quicksilver.data.python_docs import python_docs
from quicksilver.lm_eval import QuickSilverLM

PARTS = ("contexts", "letters", "choices", "rolling", "generate")
MOST_SLOWER = 1.05  # what the adapter may cost
NATS = 1e-4  # of a log-likelihood; of a whole text, which is a sum over many tokens, ten times as much
LETTERS = (" A", " B", " C", " D")
LEAST_ROUNDS, MOST_ROUNDS = 5, 25
OUTPUT = "benchmark_lm_eval.json"
Answers = list[Any]


@dataclass(frozen=True)
class Finding:
    """Our time over HFLM's: median and quartiles over rounds; `noise`: HFLM's over its own."""

    part: str
    hflm_ms: float
    ratio: float
    low: float
    high: float
    noise_low: float
    noise_high: float
    apart: float
    rounds: int

    @property
    def reached(self) -> bool:
        return self.ratio <= MOST_SLOWER


def requests(part: str, count: int, words: int) -> list[Instance]:
    """Requests of one part on the text that every CPython carries; contexts of `words` words and up to half as many more."""
    text = python_docs("test").split()
    starts = range(0, count * 3 * words, 3 * words)
    contexts = [" ".join(text[start : start + words + (7 * i) % (words // 2)]) for i, start in enumerate(starts)]
    following = [[" " + " ".join(text[start + k : start + k + 3 + k % 3]) for k in (0, 5, 9, 14)] for start in starts]
    arguments: dict[str, Iterator[tuple[Any, ...]]] = {
        "contexts": ((context, choices[0]) for context, choices in zip(contexts, following, strict=True)),
        "letters": ((context, letter) for context in contexts for letter in LETTERS),
        "choices": ((context, one) for context, choices in zip(contexts, following, strict=True) for one in choices),
        "rolling": ((context,) for context in contexts),
        "generate": ((context, {"until": ["\n\n"], "max_gen_toks": 24}) for context in contexts[: max(1, count // 4)]),
    }
    kind = {"rolling": "loglikelihood_rolling", "generate": "generate_until"}.get(part, "loglikelihood")
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments[part])]


def asked(model: HFLM, part: str, of: list[Instance]) -> Callable[[], Answers]:
    name = {"rolling": "loglikelihood_rolling", "generate": "generate_until"}.get(part, "loglikelihood")
    answer: Callable[..., Answers] = getattr(model, name)
    return lambda: answer(of, disable_tqdm=True)


def apart(part: str, ours: Answers, theirs: Answers) -> float:
    """The largest difference in nats; of texts 0, or infinity where two differ."""
    if part == "generate":
        return 0.0 if ours == theirs else float("inf")
    pairs = zip(ours, theirs, strict=True)
    if part == "rolling":
        return max(abs(a - b) for a, b in pairs)
    return max(abs(a[0] - b[0]) if a[1] == b[1] else float("inf") for a, b in pairs)


def measured(part: str, hflm: HFLM, ours: HFLM, options: argparse.Namespace) -> Finding:
    of = requests(part, options.contexts, options.words)
    began = time.perf_counter()
    difference = apart(part, asked(ours, part, of)(), asked(hflm, part, of)())  # and nothing is cold after it
    round_s = 1.5 * (time.perf_counter() - began)
    fit = int(options.seconds / len(options.parts) / round_s)
    options = argparse.Namespace(**vars(options) | {"repeats": min(max(LEAST_ROUNDS, fit), MOST_ROUNDS), "warmup": 0})
    again = asked(hflm, part, of)
    times = alternate({"hflm": asked(hflm, part, of), "quicksilver": asked(ours, part, of), "hflm again": again}, options)
    ratio, noise = times.ratio("quicksilver", to="hflm"), times.ratio("hflm again", to="hflm")
    return Finding(
        part, times["hflm"].median, ratio.median, ratio.low, ratio.high, noise.low, noise.high, difference, options.repeats
    )


def shown(findings: Sequence[Finding], options: argparse.Namespace) -> Table:
    table = Table(
        title=f"quicksilver without modules over HFLM: {options.model}, batch {options.batch_size}, {options.contexts} contexts, "
        f"{options.clock} clock"
    )
    for header in (
        "requests",
        "rounds",
        "HFLM, ms",
        "ratio",
        "quartiles",
        "HFLM over itself",
        "largest difference",
        f"at most {MOST_SLOWER}",
    ):
        table.add_column(header)
    for one in findings:
        table.add_row(
            one.part, str(one.rounds), f"{one.hflm_ms:.0f}", f"{one.ratio:.3f}", f"{one.low:.3f} to {one.high:.3f}",
            f"{one.noise_low:.3f} to {one.noise_high:.3f}", f"{one.apart:.1e}", "yes" if one.reached else "no",
        )  # fmt: skip
    return table


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference-gpt2", help="a model of conf/model, a folder or a hub id")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--words", type=int, default=48, help="words of a context, at least")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=45.0, help="of rounds, all parts together; what loads comes on top")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmarks" / OUTPUT, help="the numbers, as json")
    options = parser.parse_args(words)
    began, load = time.monotonic(), psutil.getloadavg()[0]
    torch.set_num_threads(options.threads)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as results:
        ours = QuickSilverLM(pretrained=options.model, batch_size=options.batch_size, results_dir=results)
    hflm = HFLM(pretrained=ours.model, tokenizer=ours.tokenizer, batch_size=options.batch_size)
    findings = [measured(part, hflm, ours, options) for part in options.parts]
    Console(width=140).print(shown(findings, options))
    told = {name: value for name, value in vars(options).items() if name != "output"}
    found = [{**asdict(one), "reached": one.reached} for one in findings]
    content = {"environment": {**environment("cpu"), "load_average_before": load}, "options": told, "findings": found}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Written: {options.output} ({time.monotonic() - began:.0f} s)")
    wrong = [one.part for one in findings if one.apart > (10 * NATS if one.part == "rolling" else NATS)]
    if wrong:
        print(f"answers differ: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
