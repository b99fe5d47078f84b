"""What a model config says. Types of the keys below `model`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from omegaconf import MISSING

# ruff: noqa: UP045  OmegaConf 2.3 reads `Optional[str]`, not `str | None`

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("sdpa", "blocks", "eager")
PARALLEL = ("tensor", *(f"tensor:{2**power}" for power in range(7)))
DEVICES = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?|xpu(:\d{1,3})?")


@dataclass
class ModelConfig:
    """Which frozen model.

    Args:
        name: label in records and tables.
        path: `embedded:NAME` (shipped with the package), `data:FOLDER` (below data.root), a local folder, or a hub id. A hub id
            is looked for as a folder `name` below data.root first.
        revision: branch, tag or commit of a hub id; null: the hub's default branch.
        dtype: float32 | bfloat16 | float16, of the weights and of the arithmetic.
        device_map: `cpu`, `cuda:0` …, or `auto`: a GPU if there is one, several if the model needs them.
        attn_implementation: `sdpa` or `eager` of transformers, or `blocks`, for narrow heads on a CPU (runtime/block_attention.py).
        parallel: `tensor`: the model is cut among the processes that torchrun started; `tensor:2`: among two each, and the pairs share the
            windows; null: every process has all of it.
        adapter: `my_family.MyFamilyArchitecture`, the class of a file of one's own that knows a family the package does not
            (docs/adding-a-family.md); null: the package's.
    """

    name: str = MISSING
    path: str = MISSING
    revision: Optional[str] = None
    dtype: str = "float32"
    device_map: str = "cpu"
    attn_implementation: str = "sdpa"
    parallel: Optional[str] = None
    adapter: Optional[str] = None
