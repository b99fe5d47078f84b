"""What the benchmarks share: models of true shapes with random weights, passes to be timed, options, and what is written.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "benchmarks"
Call = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """One model's sizes; `layers` is the true number."""

    name: str
    family: str
    width: int
    heads: int
    inner: int
    layers: int
    vocabulary: int

    def config(self, layers: int, positions: int, vocabulary: int) -> PretrainedConfig:
        ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        if self.family == "gpt2":
            return GPT2Config(
                n_layer=layers, n_embd=self.width, n_head=self.heads, n_inner=self.inner, vocab_size=vocabulary, n_positions=positions, **ids
            )  # fmt: skip
        return LlamaConfig(
            num_hidden_layers=layers, hidden_size=self.width, num_attention_heads=self.heads, intermediate_size=self.inner,
            vocab_size=vocabulary, max_position_embeddings=positions, **ids,
        )  # fmt: skip


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", "gpt2", 32, 2, 128, 4, 61),  # for tests
        Shape("tiny-llama", "llama", 32, 2, 64, 4, 61),
        Shape("gpt2", "gpt2", 768, 12, 3072, 12, 50257),
        Shape("gpt2-large", "gpt2", 1280, 20, 5120, 36, 50257),
        Shape("llama2-7b", "llama", 4096, 32, 11008, 32, 32000),
    )
}


def model_of(
    shape: Shape, layers: int, positions: int, *, vocabulary: int = 1024, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PreTrainedModel:
    """Random weights, the same every time, made where they are to stay."""
    torch.manual_seed(42)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(layers, positions, vocabulary), dtype=dtype)
    return model.to(device).eval()


def random_ids(batch: int, sequence: int, *, vocabulary: int = 1024, device: str = "cpu") -> torch.Tensor:
    """(B, N) long; id 0 is padding and stays out."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (batch, sequence), generator=generator).to(device)


def environment(device: str) -> dict[str, Any]:
    """What a benchmark ran on."""
    from quicksilver.runtime.quantized.proving import processor

    on_gpu = torch.device(device).type == "cuda"
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name(torch.device(device)) if on_gpu else processor(),
        "threads": torch.get_num_threads(),
    }


# -- passes in turns -------------------------------------------------------------------------------------------------------------

Passes = Callable[[PreTrainedModel, Call], tuple[Call, ...]]  # of a model, and what begins each of them: the steps of one sample


def prompt(ids: torch.Tensor, **how: Any) -> Passes:
    """The forward pass of a prompt (B, N)."""
    return lambda model, begin: (lambda: (begin(), model(ids, **how).logits)[1],)


def decoding(ids: torch.Tensor, n: int) -> Passes:
    """`n` further tokens after the prompt (B, N), whose cache is made once; and what takes them back."""

    def passes(model: PreTrainedModel, begin: Call) -> tuple[Call, ...]:
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values

        def steps() -> None:
            begin()
            for _ in range(n):
                model(ids[:, :1], past_key_values=cache, use_cache=True)

        return steps, lambda: cache.crop(-n)

    return passes


@dataclass(frozen=True)
class Way:
    """What takes its turn: a model under modules.

    Args:
        modules: or what makes them; None: the plain model.
        prepare: called with the model's copy before the modules act. finish: makes what is timed of a pass.
    """

    model: PreTrainedModel
    modules: Sequence[Any] | Callable[[], Sequence[Any]] | None = ()
    execution: Any = "compact"
    prepare: Call | None = None
    finish: Call = lambda step: step


def in_turns(
    ways: Mapping[str, Way], passes: Passes, o: argparse.Namespace, *, clock: Callable[[], float] | None = None,
    failed: dict[str, str] | None = None,
) -> tuple[Any, dict[str, int]]:  # fmt: skip
    """Time the passes of each way in turns, the first one twice a round (A/A).

    Args:
        o: with `warmup`, `repeats` and, if not the CPU, `device`.
        failed: takes why a way does not work, by its name; None: that is raised. A full device always is.

    Returns:
        `measure.latency.Alternation` of the first step, and by name the executed FLOPs of a sample.
    """
    from quicksilver.measure.latency import alternate_steps, shared_weight_copy
    from quicksilver.runtime import apply

    steps: dict[str, tuple[Call, ...]] = {}
    executed: dict[str, int] = {}
    with ExitStack() as stack:
        for name, way in ways.items():
            try:
                model = shared_weight_copy(way.model)
                if way.prepare is not None:
                    way.prepare(model)
                with ExitStack() as only_counted:
                    entered = only_counted if way.modules is None else stack
                    modules = way.modules() if callable(way.modules) else deepcopy(list(way.modules or ()))
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
        times = alternate_steps(steps, o.warmup, o.repeats, getattr(o, "device", "cpu"), clock=clock)[0]
    return times, executed


# -- options and output ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One option of a benchmark; its type is that of its default, a tuple takes several values.

    Args:
        choices: what a word may be. least: the smallest number that is taken.
    """

    default: Any
    help: str = ""
    choices: Collection[str] | None = None
    least: float = 1
    kind: type | None = None

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        flag, several = f"--{name.replace('_', '-')}", isinstance(self.default, tuple)
        if self.default is False:
            parser.add_argument(flag, action="store_true", help=self.help)
            return
        kind: Any = self.kind or type(self.default[0] if several else self.default)
        read = self._number(kind) if kind in (int, float) else kind
        # Several values are a list, as the written options have them.
        default = list(self.default) if several else self.default
        more: dict[str, Any] = {"nargs": "+"} if several else {}
        parser.add_argument(flag, type=read, default=default, choices=self.choices, help=self.help, **more)

    def _number(self, kind: type) -> Callable[[str], Any]:
        def read(text: str) -> Any:
            try:
                value = kind(text)
            except ValueError:
                raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' * (kind is int)}number") from None
            if not self.least <= value < math.inf:
                raise argparse.ArgumentTypeError(f"{text}: give a number of at least {self.least:g}")
            return value

        return read


REPEATS = Option(5, "timed rounds, at least 3", least=3)
WARMUP = Option(1, "rounds before them", least=0)


class Parser(argparse.ArgumentParser):
    """One that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parsed(
    name: str, doc: str | None, options: Mapping[str, Any], arguments: Sequence[str] | None, output: Path | None, **defaults: Any
) -> argparse.Namespace:
    """The options of the benchmark `name` by name, each an `Option` or its default; `output`, where it writes; other `defaults`."""
    parser = Parser(f"benchmark {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, one in options.items():
        (one if isinstance(one, Option) else Option(one)).add_to(parser, option)
    parser.add_argument("--output", type=Path, default=output, help="where it writes")
    parser.set_defaults(**defaults)
    return parser.parse_args(arguments)


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file; options of the name `output` are a place on this machine and stay out."""
    options = content["options"]
    if isinstance(options, argparse.Namespace):
        content = {**content, "options": {key: value for key, value in vars(options).items() if key != "output"}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def say_if_busy() -> float:
    """The load average, with a line where something else runs on this machine."""
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"The machine is busy (load {load:.1f}): what follows carries its noise.", file=sys.stderr, flush=True)
    return load
