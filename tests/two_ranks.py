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

PROMPT, MORE = 20, 4
IDS = torch.arange(2 * (PROMPT + MORE)).view(2, -1) * 7 % 59 + 1


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


@torch.no_grad()
def passes(model, run):
    """Logits of a prompt and of the tokens after it, with a cache."""
    out = model(IDS[:, :PROMPT], use_cache=True)
    logits = [out.logits]
    for at in range(PROMPT, PROMPT + MORE):
        out = model(IDS[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, 1)


def summed(*numbers: int) -> list[int]:
    """Of all ranks."""
    found = torch.tensor(numbers, dtype=torch.int64)
    distributed.all_reduce(found)
    return found.tolist()


def compare(whole, cut) -> dict[str, dict[str, float | bool | int]]:
    found = {}
    for (name, ours), theirs in zip(modules(cut).items(), modules(whole).values(), strict=True):
        with apply(whole, theirs) as run:
            wanted, trace, flops, kv = passes(whole, run), run.trace, run.flops, run.kv_bytes
        with apply(cut, ours) as run:
            logits: list[torch.Tensor] = []
            counted = count_executed(lambda run=run, logits=logits: logits.append(passes(cut, run)))
            flops_here, kv_here, ours_trace = run.flops_of_rank, run.kv_bytes_of_rank, run.trace
            ours_flops, ours_kv = run.flops, run.kv_bytes
        flops_sum, billed, resident = summed(flops_here, kv_here.billed, kv_here.resident)
        found[name] = {
            "difference": float((logits[0] - wanted).abs().max()),
            "same_trace": all(
                torch.equal(a.active(layer), b.active(layer)) and torch.equal(a.kv_present(layer), b.kv_present(layer))
                for a, b in zip(trace.passes, ours_trace.passes, strict=True) for layer in range(trace.n_layers)
            ),
            "left_out": sum(int((~a.kv_present(layer) | ~a.active(layer)).sum()) for a in trace.passes for layer in range(trace.n_layers)),
            "flops_whole": flops.executed, "flops": ours_flops.executed, "flops_summed": flops_sum,
            "flops_of_rank": flops_here, "counted_on_rank": counted, "signals_whole": flops.signals, "signals": ours_flops.signals,
            "kv_whole": [kv.billed, kv.resident], "kv": [ours_kv.billed, ours_kv.resident], "kv_summed": [billed, resident],
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
