"""Run by torchrun in two processes: a model cut among them is held against the whole one, module by module. Prints one json.

torchrun --nproc-per-node 2 tests/two_ranks.py FAMILY FOLDER
"""

import json
import sys
from pathlib import Path

import tiny
import torch
from torch import distributed

from quicksilver.baselines.eviction import HeavyHitter
from quicksilver.baselines.token_merging import TokenMerging
from quicksilver.measure.flop_counter import count_executed
from quicksilver.models.parallel import load_parallel
from quicksilver.modules import AdaptiveQuantization, Halting, KVSkipping, StagedHalting, TokenFusion
from quicksilver.modules.fitted import ModelShape, Translator, model_digest
from quicksilver.runtime import apply, architecture_of
from quicksilver.runtime.errors import ConfigError

BATCH = tiny.Batch(tuple(tuple(7 * i % 59 + 1 for i in range(first, first + 24)) for first in (0, 24)))
CHUNKS = [20, 1, 1, 1, 1]  # a prompt, and the tokens after it


def modules(model):
    """By name, what meets each way in which heads matter."""
    arch = architecture_of(model)
    shape = ModelShape.of(arch)
    torch.manual_seed(1)
    weight = 0.1 * torch.randn(1 + shape.width, shape.n_layers - 3, 2, shape.n_kv_heads, shape.head_dim)
    predict = Translator(2, weight, shape, model_digest(model)).bound(arch)

    def staged(missing_kv: str, signal: str = "position", **more: object) -> list[StagedHalting]:
        stage = {
            "before": 2, "share": 0.4, "protect_first": 1, "protect_last": 1, "signal": signal, "missing_kv": missing_kv, **more,
        }  # fmt: skip
        return [StagedHalting(stages=[stage], protect_first=0, protect_last=None, missing_kv="project")]

    return {
        "none": [], "project": [Halting(tau_drift=0.9, tau_entropy=3.9, missing_kv="project", resume_layers=0)],
        "zero": staged("zero"), "copy": staged("copy"), "predict": staged("predict", translator=predict),
        "attention": staged("drop", "attention"),
        "kv_skipping": [KVSkipping(criterion="attention", skipped_share=0.4, last_queries=4, protect_first=1)],
        "fusion": [TokenFusion(tau_fuse=30.0, tau_attention=-0.5, max_group=3)], "merging": [TokenMerging(r=0.1)],
        "eviction": [HeavyHitter(heavy=4, recent=4)],
    }  # fmt: skip


def summed(*numbers: int) -> list[int]:
    """Of all ranks."""
    found = torch.tensor(numbers, dtype=torch.int64)
    distributed.all_reduce(found)
    return found.tolist()


def compare(whole, cut) -> dict[str, dict[str, float | bool | int]]:
    found = {}
    for (name, ours), theirs in zip(modules(cut).items(), modules(whole).values(), strict=True):
        wanted, made = tiny.forward(whole, BATCH, theirs, chunks=CHUNKS), list[tiny.Outcome]()
        counted = count_executed(lambda ours=ours, made=made: made.append(tiny.forward(cut, BATCH, ours, chunks=CHUNKS)))
        run, of_whole = made[0].run, wanted.run
        own_kv, kv, kv_whole = run.kv_bytes_of_rank, run.kv_bytes, of_whole.kv_bytes
        flops_sum, billed, resident = summed(run.flops_of_rank, own_kv.billed, own_kv.resident)
        passes = list(zip(wanted.trace.passes, made[0].trace.passes, strict=True))
        layers = range(of_whole.arch.n_layers)
        found[name] = {
            "difference": float((made[0].logits - wanted.logits).abs().max()),
            "same_trace": all(
                torch.equal(a.active(layer), b.active(layer)) and torch.equal(a.kv_present(layer), b.kv_present(layer))
                for a, b in passes for layer in layers
            ),
            "left_out": sum(int((~a.kv_present(layer) | ~a.active(layer)).sum()) for a, _ in passes for layer in layers),
            "flops_whole": of_whole.flops.executed, "flops": run.flops.executed, "flops_summed": flops_sum,
            "flops_of_rank": run.flops_of_rank, "counted_on_rank": counted,
            "signals_whole": of_whole.flops.signals, "signals": run.flops.signals,
            "kv_whole": [kv_whole.billed, kv_whole.resident], "kv": [kv.billed, kv.resident], "kv_summed": [billed, resident],
        }  # fmt: skip
    try:
        apply(cut, [AdaptiveQuantization()])
    except ConfigError as error:
        found["quantization"] = {"refused": str(error)}
    return found


def main() -> None:
    family, folder = sys.argv[1], Path(sys.argv[2])
    distributed.init_process_group("gloo")
    whole = tiny.build(family)
    if distributed.get_rank() == 0:
        whole.save_pretrained(folder)
    distributed.barrier()
    cut = load_parallel(folder)
    assert model_digest(cut) == model_digest(whole)
    ours = compare(whole, cut)
    every: list[object] = [None, None]
    distributed.all_gather_object(every, ours)
    if distributed.get_rank() == 0:
        Path(folder, "found.json").write_text(json.dumps(every))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
