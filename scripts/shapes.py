"""Models of the true shapes with random weights, for benchmarks: no checkpoint is needed to know what a layer costs.

Needs torch and transformers alone. The vocabulary is small unless told otherwise, so that the output head, which no module touches,
neither hides nor pays for anything.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent


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


def processor() -> str:
    """The name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment(device: str) -> dict[str, Any]:
    """What a benchmark ran on."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name(torch.device(device)) if on_gpu else processor(),
        "threads": torch.get_num_threads(),
    }
