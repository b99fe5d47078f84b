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
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # a clone is enough: nothing has to be installed

import benchmarking as shared  # noqa: E402
from benchmarking import REALIZED, TIME, Asked, Call, Option, Row, Shape, Way, findings, in_turns, model_of, random_ids  # noqa: E402

from quicksilver.baselines.number_formats import Int8Dynamic  # noqa: E402
from quicksilver.modules import ExponentialDecay, Halting, RandomHalting, StaticDepth  # noqa: E402
from quicksilver.runtime import QuickSilverError, RuntimeModule, apply, architecture_of  # noqa: E402

PARTS = ("invariants", "prefill", "decode", "int8", "faster")
NEEDS_CUDA = "skipped: needs a CUDA device"
OPTIONS: dict[str, Any] = {
    "dry_run": Option(False, "execute every step on the CPU, on tiny shapes; keep nothing"), "only": Option(PARTS, choices=PARTS),
    "shapes": Option(("gpt2-large", "llama2-7b"), choices=shared.SHAPES), "batch": (1, 8, 64),
    "sequence": Option(512, "tokens of a prompt, of prefill"), "context": Option(256, "tokens before those that are decoded"),
    "new_tokens": Option(16, "tokens decoded in one sample"),
    "layers": Option(None, "layers of each model; its true number unless given", kind=int), "vocabulary": 1024,
    "dtype": Option("bfloat16", choices=("bfloat16", "float16", "float32")), "repeats": Option(10, "timed rounds, at least 3", least=3),
    "warmup": Option(3, least=0), "device": "cuda",
}  # fmt: skip
# Of --dry-run: what the options are then, unless they are given.
DRY: dict[str, Any] = {
    "device": "cpu", "shapes": ["tiny", "tiny-llama"], "batch": [1, 2], "sequence": 24, "context": 8, "new_tokens": 2, "vocabulary": 61,
    "dtype": "float32", "repeats": 3, "warmup": 0,
}  # fmt: skip
Options = argparse.Namespace


# -- invariants ------------------------------------------------------------------------------------------------------------------


def invariants(shape: Shape, o: Options) -> list[Row]:
    """The invariants of docs/design.md on this device, in float32 on few layers: largest difference of a logit, and what is allowed."""
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

    # Tensor cores would round the factors of float32 products: an invariant is about the runtime.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        plain, halted = model(ids, use_cache=False).logits, logits(causal())
        close = 1e-3 * float(halted.abs().max())  # kernels on a GPU sum in another order for another shape
        found = (
            ("no module: logits equal", plain, logits([]), ("at most", 0.0)),
            ("compact = masked", halted, logits(causal(), execution="masked"), ("at most", close)),
            ("prefill = token by token", halted, by_token(causal()), ("at most", close)),
            ("alone = in a batch", halted[1:2], logits(causal(), ids[1:2]), ("at most", close)),
            ("halting changes logits", halted, plain, ("at least", close)),
        )
    finally:
        torch.set_float32_matmul_precision(before)
    place = {"section": "invariants", "shape": shape.name}
    return [shared.finding(place, what, [float((one - other).abs().max())], bound) for what, one, other, bound in found]


# -- time ------------------------------------------------------------------------------------------------------------------------


def ways_of(part: str, model: PreTrainedModel) -> dict[str, Way]:
    """What a part compares, dense inference first."""
    # Half of a prompt halts at once after a fifth of the depth: static shapes, one decision.
    layers = model.config.num_hidden_layers
    at = max(1, layers // 5) / layers
    shares: dict[str, Any] = {"rule": "capacity", "signal": "random", "schedule": "one_shot", "halted_share": 0.5}
    half = Halting(**shares, window=(at, min(1.0, at + 1 / layers)), missing_kv="drop", resume_layers=0)
    found = {"dense": Way(model, None)}
    if part == "prefill":
        decay = ExponentialDecay(alpha=0.07, missing_kv="drop")
        return found | {"no module": Way(model), "decay 0.07": Way(model, [decay]), "half halted at a fifth": Way(model, [half])}
    if part == "decode":
        return found | {"no module": Way(model), "half depth": Way(model, [StaticDepth(depth=0.5, missing_kv="drop")])}
    if part == "int8":
        return found | {
            "int8 by torch": Way(model, lambda: [Int8Dynamic()]), "int8 by torch, half halted": Way(model, lambda: [Int8Dynamic(), half]),
            "int8 by torchao": Way(model, lambda: [Int8Dynamic(backend="torchao")]),
        }  # fmt: skip
    found["half halted, eager"] = Way(model, [half])
    # Graphs come last: after a capture that failed, the device may refuse what comes next.
    hows: dict[str, dict[str, Any]] = {"torch.compile": {"prepare": compile_layers}, "CUDA graph": {"finish": captured}}
    for name, how in hows.items():
        found |= {f"dense, {name}": Way(model, None, **how), f"half halted, {name}": Way(model, [half], **how)}
    return found


def measured(part: str, model: PreTrainedModel, place: Row, batch: int, o: Options) -> Iterator[Row]:
    """A part's ways in turns. What one of them raises is a finding, too; a full device is not: it stops the part."""
    ways, failed = ways_of(part, model), {}
    if not shared.on_cuda(o.device):
        failed = {name: NEEDS_CUDA for name in ways if name.endswith(("torchao", "CUDA graph"))}
    ids = random_ids(batch, o.context if part == "decode" else o.sequence, vocabulary=o.vocabulary, device=o.device)
    decoded = shared.decoding(ids, o.new_tokens)
    passes = decoded if part == "decode" else shared.prompt(ids, use_cache=part == "prefill", logits_to_keep=1)
    may_fail = failed if part in ("int8", "faster") else None
    try:
        there = {name: way for name, way in ways.items() if name not in failed}
        times, executed = in_turns(there, passes, o, failed=may_fail)
    except torch.OutOfMemoryError as error:
        yield place | {"what": "all", "failed": f"out of memory: {str(error).splitlines()[0]}"}
        return
    tokens = batch * (o.new_tokens if part == "decode" else o.sequence)
    rows = findings(place, times, executed, [Asked(name, name, TIME) for name in times], warnings=times.warnings)
    for samples, row in zip(times.values(), rows, strict=True):
        noise, saved = row["noise_floor"], row["details"]["executed_flops_saved"]
        real = saved > noise and abs(1 - row["value"]) > noise  # a ratio of noise is no ratio
        yield row | {
            "ms": samples.median, "tokens_per_s": 1e3 * tokens / samples.median, "executed_flops_saved": saved,
            "realization": REALIZED(row["value"], saved) if real else None,
        }  # fmt: skip
    yield from (place | {"what": name, "failed": why} for name, why in failed.items())


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


def rows_of(o: Options) -> Iterator[Row]:
    """Check, then time."""
    for name in o.shapes:
        shape = shared.SHAPES[name]
        if "invariants" in o.only:
            yield from (rows := invariants(shape, o))
            if broken := [row["what"] for row in rows if not row["reached"]]:
                raise QuickSilverError(f"{name}: {'; '.join(broken)} does not hold on this device: nothing was timed.")
        positions, dtype = max(o.sequence, o.context + o.new_tokens) + 1, getattr(torch, o.dtype)
        model = model_of(shape, o.layers or shape.layers, positions, vocabulary=o.vocabulary, dtype=dtype, device=o.device)
        for part in PARTS[1:]:
            for batch in o.batch if part in o.only else ():
                yield from measured(part, model, {"section": part, "shape": name, "batch": batch}, batch, o)
        del model


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    dry = DRY if "--dry-run" in words else {}
    o = shared.parsed("gpu", __doc__, OPTIONS, words, None if dry else shared.RESULTS / "benchmark_gpu.json", **dry)
    if shared.on_cuda(o.device) and not torch.cuda.is_available():
        raise QuickSilverError("this machine has no CUDA device that torch can use; --dry-run tries every step without one.")
    found = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        output, around = o.output or Path(folder) / "benchmark_gpu.json", shared.environment(o.device)
        for row in rows_of(o):
            found.append(row)
            shared.save(output, around, o, findings=found)  # what was measured stays, whatever comes next
            print(shared.table([row]).splitlines()[-1], *row.get("details", {}).get("warnings", ()), sep="\n", flush=True)
    print(shared.table(found))
    if not o.dry_run:
        print(f"Saved to {output}")
        return 0
    failed = {f"{row['section']}, {row['what']}": row["failed"] for row in found if "failed" in row}
    skipped = sorted({row["what"] for row in found if row.get("failed") == NEEDS_CUDA})
    print(f"Dry run: {len(found)} rows, times mean nothing. Only a CUDA device can do: {', '.join(skipped) or 'nothing more'}.")
    if broken := sorted(f"{what}: {why}" for what, why in failed.items() if why != NEEDS_CUDA):
        raise QuickSilverError("; ".join(broken))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuickSilverError as error:
        sys.exit(f"benchmark gpu: {error}")
