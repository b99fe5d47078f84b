"""What the benchmarks share: models of true shapes with random weights, passes timed in turns, findings, options, output.

Needs torch and transformers alone, and no checkpoint. The vocabulary is small unless told otherwise, so that the output head, which no module
touches, neither hides nor pays for anything.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

if TYPE_CHECKING:
    from quicksilver.runtime import RuntimeModule

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "benchmarks"
Call = Callable[..., Any]
Row = dict[str, Any]


class Shape(NamedTuple):
    """One model's sizes; `layers` is the true number."""

    name: str
    family: str
    width: int
    heads: int
    inner: int
    layers: int


SHAPES = {shape.name: shape for shape in (
    Shape("tiny", "gpt2", 32, 2, 128, 4), Shape("tiny-llama", "llama", 32, 2, 64, 4),  # for tests
    Shape("gpt2", "gpt2", 768, 12, 3072, 12), Shape("gpt2-large", "gpt2", 1280, 20, 5120, 36),
    Shape("tinyllama", "llama", 2048, 32, 5632, 22), Shape("llama2-7b", "llama", 4096, 32, 11008, 32),
)}  # fmt: skip


def model_of(
    shape: Shape, layers: int, positions: int, *, vocabulary: int = 1024, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PreTrainedModel:
    """Random weights, the same every time, made where they are to stay. Raises ConfigError: heads that do not divide the width."""
    from quicksilver.runtime.errors import ConfigError

    if shape.width % shape.heads:
        raise ConfigError(f"--width {shape.width} --heads {shape.heads}: the width must be a multiple of the heads.")
    inner = {"n_inner" if shape.family == "gpt2" else "intermediate_size": shape.inner}
    config = AutoConfig.for_model(
        shape.family, num_hidden_layers=layers, hidden_size=shape.width, num_attention_heads=shape.heads, vocab_size=vocabulary,
        max_position_embeddings=positions, bos_token_id=0, eos_token_id=0, pad_token_id=0, **inner,
    )  # fmt: skip
    torch.manual_seed(42)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


def random_ids(batch: int, sequence: int, *, vocabulary: int = 1024, device: str = "cpu") -> torch.Tensor:
    """(B, N) long; id 0 is padding and stays out."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (batch, sequence), generator=generator).to(device)


# -- passes in turns -------------------------------------------------------------------------------------------------------------

Passes = Callable[[PreTrainedModel, Call], tuple[Call, ...]]  # of a model, and what begins each of them: the steps of one sample


def prompt(ids: torch.Tensor, **how: Any) -> Passes:
    """The forward pass of a prompt (B, N)."""
    return lambda model, begin: (lambda: (begin(), model(ids, **how).logits)[1],)


def decoding(ids: torch.Tensor, n: int, *, anew: bool = True) -> Passes:
    """`n` further tokens after the prompt (B, N), whose cache is made once; and what takes them back. anew: each sample begins a run."""

    def passes(model: PreTrainedModel, begin: Call) -> tuple[Call, ...]:
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values

        def steps() -> None:
            if anew:
                begin()
            for _ in range(n):
                model(ids[:, :1], past_key_values=cache, use_cache=True)

        return steps, lambda: cache.crop(-n)

    return passes


class Way(NamedTuple):
    """What takes its turn: a model under modules.

    Args:
        modules: or what makes them; None: the plain model.
        prepare: called with the model's copy before the modules act. finish: makes what is timed of a pass.
    """

    model: PreTrainedModel
    modules: Sequence[RuntimeModule] | Callable[[], Sequence[RuntimeModule]] | None = ()
    execution: Any = "compact"
    prepare: Call = lambda model: None
    finish: Call = lambda step: step


def in_turns(
    ways: Mapping[str, Way], passes: Passes, o: argparse.Namespace, *, failed: dict[str, str] | None = None
) -> tuple[Any, dict[str, int]]:
    """Time the passes of each way in turns, the first one at both ends of a round (A/A).

    Args:
        o: with `warmup`, `repeats` and, where they are options, `device` and `clock`.
        failed: takes why a way does not work, by its name; None: that is raised. A full device always is.

    Returns:
        `measure.latency.Alternation` of the first step, and by name the executed FLOPs of a sample.
    """
    from quicksilver.measure.latency import shared_weight_copy
    from quicksilver.runtime import apply

    steps: dict[str, tuple[Call, ...]] = {}
    executed: dict[str, int] = {}
    with ExitStack() as stack:
        for name, way in ways.items():
            try:
                model = shared_weight_copy(way.model)
                way.prepare(model)
                with ExitStack() as only_counted:
                    entered = only_counted if way.modules is None else stack
                    weights = {
                        id(weight): weight for weight in way.model.parameters()
                    }  # a map may hold the model that it is bound to
                    modules = way.modules() if callable(way.modules) else deepcopy(list(way.modules or ()), weights)
                    run = entered.enter_context(apply(model, modules, execution=way.execution))
                    made = passes(model, run.reset)
                    for step in made:
                        step()
                    executed[name] = run.flops.executed
                if way.modules is None:
                    made = passes(model, lambda: None)
                steps[name] = (way.finish(made[0]), *made[1:])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler raises
                if failed is None:
                    raise
                failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return timed(steps, o), executed


def timed(steps: Mapping[str, Sequence[Call]], o: argparse.Namespace) -> Any:
    """The first step of each in turns, on the device and by the clock of the options."""
    from quicksilver.measure.latency import alternate_steps

    clock = CLOCKS[getattr(o, "clock", "wall")]
    return alternate_steps(steps, o.warmup, o.repeats, getattr(o, "device", "cpu"), clock=clock)[0]


# -- what was found --------------------------------------------------------------------------------------------------------------

Value = Callable[[float, float], float]  # of the time over the first way's, and the share of FLOPs saved; monotonic in the time
SLOWER_PCT: Value = lambda time, saved: 100 * (time - 1)
REALIZED: Value = lambda time, saved: (1 - time) / saved
TIMES_AS_FAST: Value = lambda time, saved: 1 / time
TIME: Value = lambda time, saved: time


class Asked(NamedTuple):
    """A number of one way, and the bound that it should keep: ("at least" | "at most", bound)."""

    way: str
    what: str
    value: Value
    bound: tuple[str, float] | None = None


def finding(place: Row, what: str, values: Sequence[float], bound: tuple[str, float] | None, **more: Any) -> Row:
    """One number as it is written; values: its median and quartiles, or it alone."""
    row = {**place, "what": what, "value": values[0], "low": min(values), "high": max(values), "details": {}}
    if bound is not None:
        kind, limit = bound
        row |= {"target": f"{kind} {limit:g}", "reached": values[0] >= limit if kind == "at least" else values[0] <= limit}
    return row | more


def findings(place: Row, times: Any, executed: Mapping[str, int], asked: Iterable[Asked], **details: Any) -> list[Row]:
    """What was asked of ways that took turns; `{saved}` in a text is the percentage of FLOPs that the way saves."""
    samples, first = {name: samples.ms for name, samples in times.items()}, next(iter(times))
    details |= {"samples_ms": samples, "control_ms": times.control_ms, "load_average": [times.load_before, times.load_after]}
    found = []
    for way, what, value, bound in asked:
        ratio, share = times.ratio(way, to=first), 1 - executed[way] / executed[first] if executed else math.nan
        numbers = [value(time, share) for time in (ratio.median, ratio.low, ratio.high)]
        what, own = what.format(saved=f"{100 * share:.1f}%"), {"executed_flops_saved": share, "time_saved": 1 - ratio.median}
        found.append(finding(place, what, numbers, bound, noise_floor=times.noise_floor, details=details | own))
    return found


def table(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """Rows as columns of text or as a Markdown table; lists and mappings are left out."""
    names = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list | dict)))
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    if markdown:
        cells.insert(1, ["---"] * len(names))
        return "\n".join("| " + " | ".join(line) + " |" for line in cells)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def on_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def environment(device: str) -> Row:
    """What a benchmark ran on, and the load average now."""
    from quicksilver.runtime.quantized.proving import processor

    return {
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "machine": torch.cuda.get_device_name(torch.device(device)) if on_cuda(device) else processor(), "threads": torch.get_num_threads(),
        "load_average_before": os.getloadavg()[0],
    }  # fmt: skip


def save(path: Path, around: Row, options: argparse.Namespace, **content: Any) -> None:
    """Write a JSON file; the option `output` is a place on this machine and stays out."""
    kept = {key: value for key, value in vars(options).items() if key != "output"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": around, "options": kept, **content}, indent=1) + "\n", encoding="utf-8")


def say_if_busy() -> None:
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"The machine is busy (load {load:.1f}): what follows carries its noise.", file=sys.stderr, flush=True)


# -- options ---------------------------------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """One option of a benchmark; its type is that of its default, a tuple takes several values.

    Args:
        choices: what a word may be. least: the smallest number that is taken.
    """

    default: Any
    help: str = ""
    choices: Collection[str] | None = None
    least: float = 1
    kind: Any = None


def _number(kind: type, least: float, text: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' * (kind is int)}number") from None
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number of at least {least:g}")
    return value


CLOCKS: dict[str, Callable[[], float] | None] = {"wall": None, "cpu": time.process_time}
CLOCK = Option("wall", choices=CLOCKS)
REPEATS = Option(5, "timed rounds, at least 3", least=3)
TIMED: dict[str, Option] = {"repeats": REPEATS, "warmup": Option(1, "rounds before them", least=0)}


class Parser(argparse.ArgumentParser):
    """One that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parsed(
    name: str, doc: str | None, options: Mapping[str, Any], arguments: Sequence[str] | None, output: Path | None, **defaults: Any
) -> argparse.Namespace:
    """The options of the benchmark `name` by name, each an `Option` or its default; `output`, where it writes; other `defaults`."""
    parser = Parser(f"benchmark {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, one in options.items():
        default, said, choices, least, given = one if isinstance(one, Option) else Option(one)
        flag, several = f"--{name.replace('_', '-')}", isinstance(default, tuple)
        if default is False:
            parser.add_argument(flag, action="store_true", help=said)
            continue
        kind = given or type(default[0] if several else default)
        read = partial(_number, kind, least) if kind in (int, float) else kind
        # Several values are a list, as the written options have them.
        more: Row = {"nargs": "+", "default": list(default)} if several else {"default": default}
        parser.add_argument(flag, type=read, choices=choices, help=said, **more)
    parser.add_argument("--output", type=Path, default=output, help="where it writes")
    parser.set_defaults(**defaults)
    return parser.parse_args(arguments)
