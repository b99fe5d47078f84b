"""Peers by their own code: presses of kvpress, weights of torchao, and methods of this package, on the same windows and weights.

    python scripts/peers_kvpress.py
    python scripts/peers_kvpress.py --kept 0.2 0.6 --windows 64 --output results/benchmarks/benchmark_kvpress.json

kvpress 0.5 needs transformers below 5.3, so it has an environment of its own (--environment; made at the first call, about 3 minutes).
Each method keeps a share of the prompt's K/V. A press computes the prompt densely and compresses its cache then. torchao keeps all K/V and
stores the weights in fewer bits; products stay in float32. Written are, by method and share: perplexity against dense with its interval, KL and
top-1 agreement to dense.

Methods of one name differ where the papers leave room. StreamingLLM here limits the prompt's queries too. H2O here sums attention
and always keeps recent tokens; the press divides by the number of queries, keeps no recent tokens, and chooses for each head.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

VERSIONS = ("torch==2.13.0", "kvpress==0.5.0", "transformers>=5.2,<5.3", "torchao==0.18.0")
PRESSES = {
    "SnapKV": "SnapKVPress", "Expected Attention": "ExpectedAttentionPress", "TOVA": "TOVAPress", "KeyDiff": "KeyDiffPress",
    "StreamingLLM": "StreamingLLMPress", "H2O (observed attention)": "ObservedAttentionPress",
}  # fmt: skip
MEASURED = ("nll_nats", "kl_nats", "top1_agreement")  # by window
WEIGHTS = ("int8 weights (torchao)", "int4 weights in groups of 32 (torchao)")
EAGER = ("ObservedAttentionPress", "TOVAPress", "SnapKVPress")  # they read attention weights


# --- in the peers' environment: torch, transformers, kvpress and torchao alone ------------------------------------------------------


def press_all(folder: Path) -> None:
    """Score the windows that lie in `folder` under every press and weight format, and write rows.json there."""
    import kvpress
    import torchao.quantization as ao
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    windows = load_file(folder / "windows.safetensors")["ids"]
    rows: dict[str, dict[str, list[float]]] = {}

    def load(attention: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32, attn_implementation=attention).eval()

    four_bits = ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.granularity.PerGroup(32))  # type: ignore[attr-defined]
    for name, config in zip(WEIGHTS, (ao.Int8WeightOnlyConfig(), four_bits), strict=True):
        ao.quantize_(quantized := load("sdpa"), config)
        rows[f"{name} 1"] = scored(load("sdpa"), windows, asked["prompt_tokens"], None, quantized)
    for attention in ("sdpa", "eager"):
        model = load(attention)
        if attention == "sdpa":
            rows["dense"] = scored(model, windows, asked["prompt_tokens"], None)
        for name, cls in PRESSES.items():
            for kept in asked["kept"] if (attention == "eager") == (cls in EAGER) else ():
                press = getattr(kvpress, cls)(compression_ratio=1 - kept)
                rows[f"{name} {kept:g}"] = scored(model, windows, asked["prompt_tokens"], press)
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


@torch.no_grad()
def scored(model: Any, windows: torch.Tensor, prompt: int, press: Any, other: Any = None) -> dict[str, list[float]]:
    """By window (W, N): nats of the scored tokens, and KL and top-1 agreement to dense a scored token; `other` is the model with other weights."""
    found: dict[str, list[float]] = {name: [] for name in MEASURED}
    for ids in windows.split(1):
        dense, logits = _logits(model, ids, prompt, None), _logits(other or model, ids, prompt, press)
        nll = F.cross_entropy(logits, ids[0, prompt:], reduction="sum").item()
        p, q = dense.log_softmax(-1), logits.log_softmax(-1)
        values = (nll, (p.exp() * (p - q)).sum(-1).mean().item(), (p.argmax(-1) == q.argmax(-1)).float().mean().item())
        for column, value in zip(found.values(), values, strict=True):
            column.append(value)
    return found


def _logits(model: Any, ids: torch.Tensor, prompt: int, press: Any) -> torch.Tensor:
    """Logits (S, V) of the tokens behind the prompt; ids (1, N). The rest keeps its positions in the text."""
    from transformers import DynamicCache

    cache, n = DynamicCache(), ids.shape[1]
    with nullcontext() if press is None else press(model):
        first = model(ids[:, :prompt], past_key_values=cache, use_cache=True).logits[:, -1:]
    rest = model(ids[:, prompt : n - 1], past_key_values=cache, use_cache=True, position_ids=torch.arange(prompt, n - 1)[None])
    return torch.cat([first, rest.logits], dim=1)[0]


# --- in this package's environment --------------------------------------------------------------------------------------------------


def environment(folder: Path) -> Path:
    """The peers' Python, installed if it is not there."""
    python = folder / "bin" / "python"
    if not python.is_file():
        print(f"Making {folder} with {', '.join(VERSIONS)} …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *VERSIONS], check=True)
    return python


def of_this_package(prompt: int, kept: float) -> Iterator[tuple[str, list[Any]]]:
    """Methods here that keep as many entries of a prompt's K/V in each layer."""
    from quicksilver.baselines.eviction import HeavyHitter, SinkAttention
    from quicksilver.baselines.prompts import PromptTruncation

    count = round(kept * prompt)
    yield "StreamingLLM, here", [SinkAttention(window=count - 4, sinks=4)]
    yield "H2O, here", [HeavyHitter(heavy=count // 2, recent=count - count // 2)]
    yield "Prompt truncation, here", [PromptTruncation(keep=count)]


def compared(model: str, dataset: str, kept: list[float], limit: int, python: Path) -> dict[str, Any]:
    """Every method at every share, by its own code and here; see the module."""
    from safetensors.torch import save_file

    from quicksilver.measure.perplexity import DenseLogits, Protocol, score
    from quicksilver.runs.config import compose
    from quicksilver.runs.context import RunContext

    config = compose([f"model={model}", f"dataset={dataset}", f"dataset.windows={limit}", "protocol=continuation"])
    context = RunContext()
    loaded, windows = context.model(config), context.windows(config, "test")
    protocol = Protocol("continuation", config.protocol.window_tokens, config.protocol.prompt_tokens)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_file({"ids": windows.ids.contiguous()}, folder / "windows.safetensors")
        asked = {"model": str(loaded.files.folder), "prompt_tokens": protocol.prompt_tokens, "kept": kept}
        (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
        subprocess.run([str(python), str(Path(__file__).resolve()), "--inside", str(folder)], check=True)
        rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    dense = score(loaded.model, windows.ids, protocol)
    for share in kept:
        for name, modules in of_this_package(protocol.prompt_tokens, share):
            frame = score(loaded.model, windows.ids, protocol, modules=modules, dense=DenseLogits(loaded.model, protocol)).windows
            rows[f"{name} {share:g}"] = {column: frame[column].tolist() for column in MEASURED}
    apart = max(abs(a - b) for a, b in zip(rows["dense"]["nll_nats"], dense.windows["nll_nats"], strict=True))
    options = {"model": model, "dataset": dataset, "windows": len(windows.ids), "prompt_tokens": protocol.prompt_tokens}
    return {
        "options": options, "weights_digest": context.files(config)[1], "token_digest": windows.token_digest, "versions": VERSIONS,
        "dense_largest_difference_nats": apart / protocol.scored_tokens,
        "findings": [_summary(name, found, rows["dense"], protocol.scored_tokens) for name, found in rows.items() if name != "dense"],
    }  # fmt: skip


def _summary(name: str, found: dict[str, list[float]], dense: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    import numpy as np

    from quicksilver.records.stats import paired_perplexity

    paired = paired_perplexity(np.array(found["nll_nats"]), np.full(len(found["nll_nats"]), tokens), np.array(dense["nll_nats"]))
    method, _, kept = name.rpartition(" ")
    return {
        "method": method.removesuffix(", here"), "own_code": not method.endswith(", here"), "kept_share": float(kept),
        "ppl_pct": paired.relative_pct, "ppl_pct_low": paired.relative_pct_low, "ppl_pct_high": paired.relative_pct_high,
        "kl_nats": float(np.mean(found["kl_nats"])), "top1_agreement": float(np.mean(found["top1_agreement"])),
    }  # fmt: skip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference-llama")
    parser.add_argument("--dataset", default="python-docs")
    parser.add_argument("--kept", type=float, nargs="+", default=[0.2, 0.6], help="shares of the prompt's K/V")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--environment", type=Path, default=Path.home() / ".cache" / "quicksilver" / "peers")
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/benchmark_kvpress.json"))
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.inside is not None:
        press_all(asked.inside)
        return 0
    wrong = [share for share in asked.kept if not 0 < share < 1]
    if wrong:
        parser.error(f"--kept {wrong[0]:g}: give shares above 0 and below 1, such as 0.2.")
    from benchmarking import table

    from quicksilver.files import write_atomically

    found = compared(asked.model, asked.dataset, asked.kept, asked.windows, environment(asked.environment))
    apart = f"{found['dense_largest_difference_nats']:.1e} nats a token"
    print(table(found["findings"]), f"Dense windows differ by at most {apart} between the two environments.", sep="\n")
    write_atomically(asked.output, (json.dumps(found, indent=1) + "\n").encode())
    print(f"Written: {asked.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
