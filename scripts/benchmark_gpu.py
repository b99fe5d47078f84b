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
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # a clone is enough: nothing has to be installed

from benchmarking import (  # noqa: E402
    RESULTS,
    SHAPES,
    Call,
    Option,
    Shape,
    Way,
    decoding,
    environment,
    in_turns,
    model_of,
    parsed,
    prompt,
    random_ids,
    save,
)  # fmt: skip

from quicksilver.baselines.int8_dynamic import Int8Dynamic  # noqa: E402
from quicksilver.modules import ExponentialDecay, Halting, RandomHalting, StaticDepth  # noqa: E402
from quicksilver.runtime import QuickSilverError, RuntimeModule, apply, architecture_of  # noqa: E402

PARTS = ("invariants", "prefill", "decode", "int8", "faster")
NEEDS_CUDA = "skipped: needs a CUDA device"
OPTIONS: dict[str, Any] = {
    "dry_run": Option(False, "execute every step on the CPU, on tiny shapes; keep nothing"),
    "only": Option(PARTS, choices=PARTS),
    "shapes": Option(("gpt2-large", "llama2-7b"), choices=SHAPES),
    "batch": (1, 8, 64),
    "sequence": Option(512, "tokens of a prompt, of prefill"),
    "context": Option(256, "tokens before those that are decoded"),
    "new_tokens": Option(16, "tokens decoded in one sample"),
    "layers": Option(None, "layers of each model; its true number unless given", kind=int),
    "vocabulary": 1024,
    "dtype": Option("bfloat16", choices=("bfloat16", "float16", "float32")),
    "repeats": Option(10, "timed rounds, at least 3", least=3),
    "warmup": Option(3, least=0),
    "device": "cuda",
}
# Of --dry-run: what the options are then, unless they are given.
DRY: dict[str, Any] = {
    "device": "cpu", "shapes": ["tiny", "tiny-llama"], "batch": [1, 2], "sequence": 24, "context": 8, "new_tokens": 2, "vocabulary": 61,
    "dtype": "float32", "repeats": 3, "warmup": 0,
}  # fmt: skip
Options = argparse.Namespace
Row = dict[str, Any]


# -- invariants ------------------------------------------------------------------------------------------------------------------


def invariants(shape: Shape, o: Options) -> list[Row]:
    """The invariants of docs/design.md on this device, in float32 on few layers: largest difference of a logit, and what is allowed."""
    # Tensor cores would round the factors of float32 products: an invariant is about the runtime.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return _invariants(shape, o)
    finally:
        torch.set_float32_matmul_precision(before)


def _invariants(shape: Shape, o: Options) -> list[Row]:
    model = model_of(shape, min(6, shape.layers), 64, vocabulary=o.vocabulary, device=o.device)
    ids = random_ids(3, 24, vocabulary=o.vocabulary, device=o.device)

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
        "halting changes logits": (halted, plain, None),
    }
    rows = []
    for what, (one, other, most) in found.items():
        difference = float((one - other).abs().max())
        holds = difference > close if most is None else difference <= most
        rows.append(
            {"part": "invariants", "shape": shape.name, "what": what, "difference": difference, "allowed": most, "holds": holds}
        )
    return rows


# -- time ------------------------------------------------------------------------------------------------------------------------


def half_halted(layers: int) -> Halting:
    """Half of a prompt halts at once after a fifth of the depth: static shapes, one decision."""
    at = max(1, layers // 5) / layers
    window = (at, min(1.0, at + 1 / layers))
    return Halting(
        rule="capacity", signal="random", schedule="one_shot", halted_share=0.5, window=window, missing_kv="drop", resume_layers=0
    )


def ways_of(part: str, model: PreTrainedModel, layers: int) -> dict[str, Way]:
    """What a part compares, dense inference first."""
    half, dense = half_halted(layers), {"dense": Way(model, None)}
    if part == "prefill":
        decay = ExponentialDecay(alpha=0.07, missing_kv="drop")
        return dense | {
            "no module": Way(model), "decay 0.07": Way(model, [decay]), "half halted at a fifth": Way(model, [half])
        }  # fmt: skip
    if part == "decode":
        return dense | {"no module": Way(model), "half depth": Way(model, [StaticDepth(depth=0.5, missing_kv="drop")])}
    if part == "int8":
        return dense | {
            "int8 by torch": Way(model, lambda: [Int8Dynamic()]), "int8 by torch, half halted": Way(model, lambda: [Int8Dynamic(), half]),
            "int8 by torchao": Way(model, lambda: [Int8Dynamic(backend="torchao")]),
        }  # fmt: skip
    found = dense | {"half halted, eager": Way(model, [half])}
    # Graphs come last: after a capture that failed, the device may refuse what comes next.
    hows: dict[str, dict[str, Any]] = {"torch.compile": {"prepare": compile_layers}, "CUDA graph": {"finish": captured}}
    for name, how in hows.items():
        found |= {f"dense, {name}": Way(model, None, **how), f"half halted, {name}": Way(model, [half], **how)}
    return found


def measured(part: str, model: PreTrainedModel, shape: Shape, batch: int, o: Options) -> list[Row]:
    """A part's ways in turns, a row each. What one of them raises is a finding, too; a full device is not: it stops the part."""
    ways, failed = ways_of(part, model, model.config.num_hidden_layers), {}
    if not on_cuda(o.device):
        failed = {name: NEEDS_CUDA for name in ways if name.endswith(("torchao", "CUDA graph"))}
    ids = random_ids(batch, o.context if part == "decode" else o.sequence, vocabulary=o.vocabulary, device=o.device)
    passes = decoding(ids, o.new_tokens) if part == "decode" else prompt(ids, use_cache=part == "prefill", logits_to_keep=1)
    tokens = batch * (o.new_tokens if part == "decode" else o.sequence)
    times, executed = in_turns(
        {name: way for name, way in ways.items() if name not in failed}, passes, o,
        failed=failed if part in ("int8", "faster") else None,
    )  # fmt: skip
    noise, found = times.noise_floor or 0.0, []
    for name, samples in times.items():
        ratio, saved = times.ratio(name, to="dense"), 1 - executed[name] / executed["dense"]
        real = saved > noise and abs(1 - ratio.median) > noise  # a ratio of noise is no ratio
        found.append({
            "part": part, "shape": shape.name, "batch": batch, "what": name, "ms": samples.median, "iqr_ms": samples.iqr,
            "tokens_per_s": 1e3 * tokens / samples.median, "time_of_dense": ratio.median, "low": ratio.low, "high": ratio.high,
            "noise_floor_pct": 100 * noise, "samples_ms": samples.ms, "warnings": times.warnings,
            "executed_flops_saved_pct": 100 * saved, "realization": (1 - ratio.median) / saved if real else None,
        })  # fmt: skip
    return found + [failure(part, shape, batch, name, why) for name, why in failed.items()]


def on_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def failure(part: str, shape: Shape, batch: int, what: str, why: str) -> Row:
    return {"part": part, "shape": shape.name, "batch": batch, "what": what, "failed": why}


def compile_layers(model: PreTrainedModel) -> None:
    """torch.compile makes as many versions of a layer's code as there are layers: after 8 it would go on without compiling, and say nothing
    that a table shows."""
    from torch._dynamo import config

    layers = architecture_of(model).layers
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(config, name):
            setattr(config, name, 8 + 4 * len(layers))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


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


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    dry = DRY if "--dry-run" in words else {}
    o = parsed("gpu", __doc__, OPTIONS, words, None if dry else RESULTS / "benchmark_gpu.json", **dry)
    if on_cuda(o.device) and not torch.cuda.is_available():
        print("benchmark gpu: this machine has no CUDA device that torch can use; --dry-run tries every step without one.", file=sys.stderr)  # fmt: skip
        return 1
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        o.output = o.output or Path(folder) / "benchmark_gpu.json"
        return run(o)


def run(o: Options) -> int:
    """Check, then time; returns the exit code."""
    found: list[Row] = []
    for name in o.shapes:
        shape = SHAPES[name]
        if "invariants" in o.only:
            rows = invariants(shape, o)
            add(found, rows, o)
            if broken := [row["what"] for row in rows if not row["holds"]]:
                print(
                    f"benchmark gpu: {name}: {'; '.join(broken)} does not hold on this device: nothing was timed.",
                    file=sys.stderr,
                )
                return 1
        positions = max(o.sequence, o.context + o.new_tokens) + 1
        dtype = getattr(torch, o.dtype)
        model = model_of(shape, o.layers or shape.layers, positions, vocabulary=o.vocabulary, dtype=dtype, device=o.device)
        for part in PARTS[1:]:
            for batch in o.batch if part in o.only else ():
                try:
                    rows = measured(part, model, shape, batch, o)
                except torch.OutOfMemoryError as error:
                    rows = [failure(part, shape, batch, "all", f"out of memory: {str(error).splitlines()[0]}")]
                add(found, rows, o)
        del model
    if not o.dry_run:
        print(f"Saved to {o.output}")
        return 0
    failed = {f"{row['part']}, {row['what']}": row["failed"] for row in found if "failed" in row}
    skipped = sorted({row["what"] for row in found if row.get("failed") == NEEDS_CUDA})
    broken = sorted(f"{what}: {why}" for what, why in failed.items() if why != NEEDS_CUDA)
    print(f"Dry run: {len(found)} rows, times mean nothing. Only a CUDA device can do: {', '.join(skipped) or 'nothing more'}.")
    for line in broken:
        print(f"benchmark gpu: {line}", file=sys.stderr)
    return 1 if broken else 0


def add(found: list[Row], rows: Sequence[Row], o: Options) -> None:
    """Show rows and save all: what was measured stays, whatever comes next."""
    found += rows
    around = environment(o.device) | {"load_average": os.getloadavg()[0]}
    save(o.output, {"environment": around, "options": o, "rows": found})
    for row in rows:
        place = f"{row['part']:<10} {row['shape']:<10} {row.get('batch', ''):>3}  {row['what']:<28}"
        if "failed" in row:
            print(f"{place} {row['failed']}")
        elif row["part"] == "invariants":
            allowed = "" if row["allowed"] is None else f", allowed {row['allowed']:.2g}"
            print(f"{place} {'holds' if row['holds'] else 'BROKEN':<7} difference {row['difference']:.2g}{allowed}")
        else:
            noise, off = row["noise_floor_pct"], 100 * (row["time_of_dense"] - 1)
            said = "itself" if row["what"] == "dense" else "within noise" if abs(off) <= noise else f"{off:+.1f}% of dense"
            real = "" if row.get("realization") is None else f"  realized {row['realization']:.2f}"
            print(f"{place} {row['ms']:9.2f} ms  {row['tokens_per_s']:10.0f} tokens/s  {said:<16} noise {noise:.1f}%{real}")
        for warning in row.get("warnings", ()) if row["what"] == "dense" else ():
            print(f"{'':<10} {warning}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuickSilverError as error:
        sys.exit(f"benchmark gpu: {error}")
