"""What a GPU makes of it: `python scripts/benchmark_gpu.py` needs torch and transformers, this repository, and nothing else.

gpt2-large and llama2-7b with random weights of their true shapes, bfloat16, batch 1 to 64. Before anything is timed the invariants are
checked on the device: what is wrong there has no speed. Every comparison takes turns with dense inference, whose distance from itself
(A/A) is the noise floor.

    invariants  no module: equal logits; compact = masked; the same decisions alone and in a batch; prefill = token by token
    prefill     batch × 512 tokens: no module, exponential decay of active tokens, half of the prompt halted at once; realization
                ratio: time saved over executed FLOPs saved
    decode      one token after another, after a prompt: no module, every token stopped at half depth
    int8        prefill with int8 products in place of the linear layers, by torch and by torchao, and with half of the prompt halted
    faster      dense and halting with `torch.compile`, and as CUDA graphs; what does not work is said, with the error

Writes benchmark_gpu.json and prints a table. `--dry-run` needs no GPU: every step is executed on the CPU on shapes for tests, what only a CUDA
device can do is named and skipped, and nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # a clone is enough: nothing has to be installed

from shapes import ROOT, SHAPES, Shape, environment, model_of, random_ids  # noqa: E402

from quicksilver.baselines.int8_dynamic import Int8Dynamic  # noqa: E402
from quicksilver.measure.latency import Alternation, alternate, shared_weight_copy  # noqa: E402
from quicksilver.modules import ExponentialDecay, Halting, RandomHalting, StaticDepth  # noqa: E402
from quicksilver.runtime import QuickSilverError, RuntimeModule, apply, architecture_of  # noqa: E402

PARTS = ("invariants", "prefill", "decode", "int8", "faster")
NEEDS_CUDA = "skipped: needs a CUDA device"
# Of --dry-run: what the options are then, unless they are given.
DRY: dict[str, Any] = {
    "device": "cpu", "shapes": ["tiny", "tiny-llama"], "batch": [1, 2], "sequence": 24, "context": 8, "new_tokens": 2, "vocabulary": 61,
    "dtype": "float32", "repeats": 3, "warmup": 0,
}  # fmt: skip
Call = Callable[[], object]
Row = dict[str, Any]


def half_halted(layers: int) -> Halting:
    """Half of a prompt halts at once after a fifth of the depth: static shapes, one decision."""
    at = max(1, layers // 5) / layers
    return Halting(rule="capacity", signal="random", schedule="one_shot", halted_share=0.5, window=(at, min(1.0, at + 1 / layers)), missing_kv="drop", resume_layers=0)  # fmt: skip


def policies(layers: int) -> dict[str, Callable[[], list[RuntimeModule]]]:
    """What is timed, by name."""
    return {
        "no module": lambda: [],
        "decay 0.07": lambda: [ExponentialDecay(alpha=0.07, missing_kv="drop")],
        "half halted at a fifth": lambda: [half_halted(layers)],
    }


# -- invariants ------------------------------------------------------------------------------------------------------------------


def invariants(shape: Shape, options: argparse.Namespace) -> list[Row]:
    """The invariants of docs/design.md Â§8 on this device, in float32 on few layers: largest difference of a logit, and what is allowed."""
    # Tensor cores would round the factors of float32 products: an invariant is about the runtime.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return _invariants(shape, options)
    finally:
        torch.set_float32_matmul_precision(before)


def _invariants(shape: Shape, options: argparse.Namespace) -> list[Row]:
    model = model_of(shape, min(6, shape.layers), 64, vocabulary=options.vocabulary, device=options.device)
    ids = random_ids(3, 24, vocabulary=options.vocabulary, device=options.device)

    def logits(modules: Sequence[RuntimeModule], rows: torch.Tensor = ids, **how: Any) -> torch.Tensor:
        with apply(model, modules, **how):
            return model(rows, use_cache=False).logits

    def by_token(modules: Sequence[RuntimeModule]) -> torch.Tensor:
        cache, parts = None, []
        with apply(model, modules):
            for column in ids.split(1, dim=1):
                output = model(column, use_cache=True, past_key_values=cache)
                cache = output.past_key_values
                parts.append(output.logits)
        return torch.cat(parts, dim=1)

    def causal() -> list[RuntimeModule]:
        return [RandomHalting(rate=0.3, window=(0.0, 1.0), missing_kv="drop", resume_layers=1)]

    plain, halted = model(ids, use_cache=False).logits, logits(causal())
    close = 1e-3 * float(halted.abs().max())  # kernels on a GPU sum in another order for another shape
    found = {
        "no module: logits equal": (plain, logits([]), 0.0),
        "compact = masked": (halted, logits(causal(), execution="masked"), close),
        "prefill = token by token": (halted, by_token(causal()), close),
        "alone = in a batch": (halted[1:2], logits(causal(), ids[1:2]), close),
    }
    rows = []
    for what, (one, other, most) in found.items():
        difference = float((one - other).abs().max())
        rows.append(
            {
                "part": "invariants",
                "shape": shape.name,
                "what": what,
                "difference": difference,
                "allowed": most,
                "holds": difference <= most,
            }
        )
    moved = float((halted - plain).abs().max())
    rows.append({"part": "invariants", "shape": shape.name, "what": "halting changes logits", "difference": moved, "allowed": None, "holds": moved > close})  # fmt: skip
    return rows


# -- time ------------------------------------------------------------------------------------------------------------------------


def ways(model: PreTrainedModel, layers: int, stack: ExitStack) -> dict[str, tuple[PreTrainedModel, Call]]:
    """Every policy on a copy of the model with shared weights, and what is called before each of its passes."""
    found: dict[str, tuple[PreTrainedModel, Call]] = {}
    for name, make in policies(layers).items():
        other = shared_weight_copy(model)
        found[name] = (other, stack.enter_context(apply(other, make())).reset)
    return found


def executed(model: PreTrainedModel, modules: Sequence[RuntimeModule], call: Call) -> int:
    with apply(model, modules) as run:
        call()
        return run.flops.executed


def prefill(model: PreTrainedModel, shape: Shape, batch: int, options: argparse.Namespace) -> list[Row]:
    ids = random_ids(batch, options.sequence, vocabulary=options.vocabulary, device=options.device)

    def call(which: PreTrainedModel, before: Call = lambda: None) -> Call:
        def fn() -> None:
            before()
            which(ids, use_cache=True, logits_to_keep=1)

        return fn

    dense = executed(model, [], call(model))
    saved = {name: 1 - executed(model, make(), call(model)) / dense for name, make in policies(options.depth(shape)).items()}
    with ExitStack() as stack:
        fns = {"dense": call(model)}
        fns |= {name: call(which, before) for name, (which, before) in ways(model, options.depth(shape), stack).items()}
        times = alternate(fns, options.warmup, options.repeats, options.device)
    return rows_of("prefill", shape, batch, times, saved, batch * options.sequence)


def decode(model: PreTrainedModel, shape: Shape, batch: int, options: argparse.Namespace) -> list[Row]:
    ids = random_ids(batch, options.context, vocabulary=options.vocabulary, device=options.device)
    half = StaticDepth(depth=0.5, missing_kv="drop")

    def steps(which: PreTrainedModel, before: Call = lambda: None) -> Call:
        cache = which(ids, use_cache=True, logits_to_keep=1).past_key_values

        def fn() -> None:
            before()
            for _ in range(options.new_tokens):
                which(ids[:, :1], use_cache=True, past_key_values=cache)
            cache.crop(-options.new_tokens)

        return fn

    def flops(modules: Sequence[RuntimeModule]) -> int:
        """Of the decoded tokens alone: the prompt's pass is forgotten before them."""
        with apply(model, modules) as run:
            steps(model, run.reset)()
            return run.flops.executed

    saved = {"no module": 0.0, "half depth": 1 - flops([half]) / flops([])}
    with ExitStack() as stack:
        fns = {"dense": steps(model)}
        for name, modules in {"no module": [], "half depth": [half]}.items():
            other = shared_weight_copy(model)
            fns[name] = steps(other, stack.enter_context(apply(other, modules)).reset)
        times = alternate(fns, options.warmup, options.repeats, options.device)
    return rows_of("decode", shape, batch, times, saved, batch * options.new_tokens)


def rows_of(part: str, shape: Shape, batch: int, times: Alternation, saved: Mapping[str, float], tokens: int) -> list[Row]:
    noise = times.noise_floor or 0.0
    found = []
    for name, samples in times.items():
        ratio = times.ratio(name, to="dense")
        row: Row = {
            "part": part, "shape": shape.name, "batch": batch, "what": name, "ms": samples.median, "iqr_ms": samples.iqr,
            "tokens_per_s": 1e3 * tokens / samples.median, "time_of_dense": ratio.median, "low": ratio.low, "high": ratio.high,
            "noise_floor_pct": 100 * noise, "samples_ms": samples.ms, "warnings": times.warnings,
        }  # fmt: skip
        if name in saved:
            row["executed_flops_saved_pct"] = 100 * saved[name]
            # A ratio of noise is no ratio.
            real = saved[name] > noise and abs(1 - ratio.median) > noise
            row["realization"] = (1 - ratio.median) / saved[name] if real else None
        found.append(row)
    return found


# -- integers --------------------------------------------------------------------------------------------------------------------


def int8(model: PreTrainedModel, shape: Shape, batch: int, options: argparse.Namespace) -> list[Row]:
    """Prefill, dense and with int8 products, alone and with half of the prompt halted: in turns, as far as each of them works."""
    ids = random_ids(batch, options.sequence, vocabulary=options.vocabulary, device=options.device)
    half = half_halted(options.depth(shape))
    asked: dict[str, Callable[[], list[RuntimeModule]]] = {
        "dense": lambda: [],
        "int8 by torch": lambda: [Int8Dynamic()],
        "int8 by torch, half halted": lambda: [Int8Dynamic(), half],
        "int8 by torchao": lambda: [Int8Dynamic(backend="torchao")],
    }
    fns: dict[str, Call] = {}
    failures: list[Row] = []
    with ExitStack() as stack:
        for name, make in asked.items():
            if name.endswith("torchao") and not on_cuda(options.device):
                failures.append(failure("int8", shape, batch, name, NEEDS_CUDA))
                continue
            with finding(failures, "int8", shape, batch, name):
                call = _prefill_call(shared_weight_copy(model), ids, make(), stack)
                call()
                fns[name] = call
        times = alternate(fns, options.warmup, options.repeats, options.device)
    return rows_of("int8", shape, batch, times, {}, batch * options.sequence) + failures


# -- compiled, captured ----------------------------------------------------------------------------------------------------------


def faster(model: PreTrainedModel, shape: Shape, batch: int, options: argparse.Namespace) -> list[Row]:
    """Dense and half-halted prefill, eager, with compiled layers, and as CUDA graphs: in turns, as far as each of them works."""
    ids = random_ids(batch, options.sequence, vocabulary=options.vocabulary, device=options.device)
    kinds: dict[str, list[RuntimeModule]] = {"dense": [], "half halted": [half_halted(options.depth(shape))]}
    fns: dict[str, Call] = {}
    failures: list[Row] = []
    with ExitStack() as stack:
        stack.enter_context(compiled_for(options.depth(shape)))
        for name, modules in kinds.items():
            call = _prefill_call(shared_weight_copy(model), ids, modules, stack)
            call()
            fns["dense" if name == "dense" else f"{name}, eager"] = call
        for name, modules in kinds.items():
            with finding(failures, "faster", shape, batch, f"{name}, torch.compile"):
                other = shared_weight_copy(model)
                for layer in architecture_of(other).layers:
                    layer.forward = torch.compile(layer.forward, dynamic=True)
                call = _prefill_call(other, ids, modules, stack)
                call()
                fns[f"{name}, torch.compile"] = call
        # Last: after a capture that failed, the device may refuse what comes next.
        for name, modules in kinds.items():
            if not on_cuda(options.device):
                failures.append(failure("faster", shape, batch, f"{name}, CUDA graph", NEEDS_CUDA))
                continue
            with finding(failures, "faster", shape, batch, f"{name}, CUDA graph"):
                fns[f"{name}, CUDA graph"] = captured(_prefill_call(shared_weight_copy(model), ids, modules, stack))
        times = alternate(fns, options.warmup, options.repeats, options.device)
    return rows_of("faster", shape, batch, times, {}, batch * options.sequence) + failures


def on_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def failure(part: str, shape: Shape, batch: int, what: str, why: str) -> Row:
    return {"part": part, "shape": shape.name, "batch": batch, "what": what, "failed": why}


@contextmanager
def finding(failures: list[Row], part: str, shape: Shape, batch: int, what: str) -> Iterator[None]:
    """Within, whatever is raised is a finding, one row of `failures`; a full device is not: it stops the part."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler raises
        lines = str(error).splitlines()
        failures.append(failure(part, shape, batch, what, f"{type(error).__name__}: {lines[0][:200] if lines else ''}"))


@contextmanager
def compiled_for(layers: int) -> Iterator[None]:
    """Within, torch.compile makes as many versions of a layer's code as there are layers: after 8 it would go on without compiling, and say
    nothing that a table shows."""
    from torch._dynamo import config

    most: dict[str, Any] = {
        name: 8 + 4 * layers for name in ("recompile_limit", "accumulated_recompile_limit") if hasattr(config, name)
    }
    with config.patch(most):
        yield


def _prefill_call(model: PreTrainedModel, ids: torch.Tensor, modules: Sequence[RuntimeModule], stack: ExitStack) -> Call:
    if not modules:
        return lambda: model(ids, use_cache=False, logits_to_keep=1)
    run = stack.enter_context(apply(model, modules))

    def fn() -> None:
        run.reset()
        model(ids, use_cache=False, logits_to_keep=1)

    return fn


def captured(call: Call) -> Call:
    """The call as a CUDA graph; raises where something in it waits for the device."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# -- the run ---------------------------------------------------------------------------------------------------------------------


class Options(argparse.Namespace):
    def depth(self, shape: Shape) -> int:
        """Layers that are built."""
        return self.layers or shape.layers


def options_of(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="execute every step on the CPU, on tiny shapes; keep nothing")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["gpt2-large", "llama2-7b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a prompt, of prefill")
    parser.add_argument("--context", type=int, default=256, help="tokens before those that are decoded")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens decoded in one sample")
    parser.add_argument("--layers", type=int, default=None, help="layers of each model; its true number unless given")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds, at least 3")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmarks" / "benchmark_gpu.json")
    words = sys.argv[1:] if arguments is None else arguments
    if "--dry-run" in words:
        parser.set_defaults(**DRY, output=None)
    return parser.parse_args(words, namespace=Options())


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    if on_cuda(options.device) and not torch.cuda.is_available():
        print("benchmark_gpu: this machine has no CUDA device that torch can use; --dry-run tries every step without one.", file=sys.stderr)  # fmt: skip
        return 1
    if options.output is None:
        with tempfile.TemporaryDirectory() as folder:
            options.output = Path(folder) / "benchmark_gpu.json"
            return run(options)
    return run(options)


def run(options: Options) -> int:
    """Check, then time; returns the exit code."""
    found: list[Row] = []
    timed = {"prefill": prefill, "decode": decode, "int8": int8, "faster": faster}
    with torch.inference_mode():
        for name in options.shapes:
            shape = SHAPES[name]
            if "invariants" in options.only:
                found += invariants(shape, options)
                show(found[-5:])
                broken = [row["what"] for row in found if row["part"] == "invariants" and not row["holds"]]
                if broken:
                    save(found, options)
                    print(
                        f"benchmark_gpu: {name}: {'; '.join(broken)} does not hold on this device: nothing was timed.",
                        file=sys.stderr,
                    )
                    return 1
            positions = max(options.sequence, options.context + options.new_tokens) + 1
            model = model_of(
                shape, options.depth(shape), positions, vocabulary=options.vocabulary, dtype=getattr(torch, options.dtype), device=options.device
            )  # fmt: skip
            for part, measure in timed.items():
                for batch in options.batch if part in options.only else ():
                    try:
                        rows = measure(model, shape, batch, options)
                    except torch.OutOfMemoryError as error:
                        rows = [failure(part, shape, batch, "all", f"out of memory: {str(error).splitlines()[0]}")]
                    show(rows)
                    found += rows
                    save(found, options)  # what was measured stays, whatever comes next
            del model
    save(found, options)
    if options.dry_run:
        skipped = sorted({row["what"] for row in found if row.get("failed") == NEEDS_CUDA})
        broken = sorted(
            {f"{row['part']}, {row['what']}: {row['failed']}" for row in found if row.get("failed", NEEDS_CUDA) != NEEDS_CUDA}
        )
        print(
            f"Dry run: {len(found)} rows, times mean nothing. Only a CUDA device can do: {', '.join(skipped) or 'nothing more'}."
        )
        for line in broken:
            print(f"benchmark_gpu: {line}", file=sys.stderr)
        return 1 if broken else 0
    print(f"Saved to {options.output}")
    return 0


def save(found: Sequence[Row], options: Options) -> None:
    around = environment(options.device) | {"load_average": os.getloadavg()[0]}
    shown = {key: value for key, value in vars(options).items() if key != "output"}  # a place on this machine
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        json.dumps({"environment": around, "options": shown, "rows": list(found)}, indent=1) + "\n", encoding="utf-8"
    )


def show(rows: Sequence[Row]) -> None:
    """One line a row: plain text, nothing but Python."""
    for row in rows:
        place = f"{row['part']:<10} {row['shape']:<10} {row.get('batch', ''):>3}  {row['what']:<28}"
        if "failed" in row:
            print(f"{place} {row['failed']}")
        elif row["part"] == "invariants":
            print(f"{place} {'holds' if row['holds'] else 'BROKEN':<7} difference {row['difference']:.2g}" + ("" if row["allowed"] is None else f", allowed {row['allowed']:.2g}"))  # fmt: skip
        else:
            noise, off = row["noise_floor_pct"], 100 * (row["time_of_dense"] - 1)
            said = "itself" if row["what"] == "dense" else "within noise" if abs(off) <= noise else f"{off:+.1f}% of dense"
            real = row.get("realization")
            print(f"{place} {row['ms']:9.2f} ms  {row['tokens_per_s']:10.0f} tokens/s  {said:<16} noise {noise:.1f}%" + ("" if real is None else f"  realized {real:.2f}"))  # fmt: skip
        for warning in row.get("warnings", ()) if row["what"] == "dense" else ():
            print(f"{'':<10} {warning}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuickSilverError as error:
        sys.exit(f"benchmark_gpu: {error}")
