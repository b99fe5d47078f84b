"""Attention in blocks of queries in place of torch's fused kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from quicksilver.modules.checks import count
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.block_attention import attention_in_blocks
from quicksilver.runtime.module import Transform


@dataclass(kw_only=True)
class BlockAttention(Transform):
    """Every layer attends in blocks of queries: two batched products a block and a softmax between them. Causal.

    For narrow heads on a CPU: with heads of 32 numbers it takes half the time of torch 2.13's fused kernel in bfloat16 (docs/measuring.md);
    with heads of 128 the fused kernel is faster. What differs: in bfloat16 scores are rounded before the softmax, where the fused kernel
    keeps them in float32. One new token alone is left to the fused kernel.

    Args:
        block: queries of a head that are computed at once. A causal block of them visits the keys up to its last query, so that larger
            blocks visit more pairs; the ledger counts them.
    """

    changes_weights: ClassVar[bool] = False

    block: int = 64

    def __post_init__(self) -> None:
        self.block = count("block", self.block, low=1)

    def applied(self, architecture: Architecture) -> AbstractContextManager[None]:
        return attention_in_blocks(architecture, self.block)
