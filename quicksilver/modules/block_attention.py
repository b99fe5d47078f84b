"""Attention in blocks of queries in place of torch's fused kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.block_attention import attention_in_blocks
from quicksilver.runtime.module import Transform
from quicksilver.runtime.options import Positive


@dataclass(kw_only=True)
class BlockAttention(Transform):
    """Every layer attends in blocks of queries: two batched products a block and a softmax between them. Causal.

    For narrow heads on a CPU; what it saves of the reference models' time, whose heads have 32 numbers, stands in table quicksilver, beside the
    same rows without it. Wider heads may be slower with it than with torch's fused kernel: measure. What differs: in bfloat16 scores are rounded before the softmax, where the fused kernel
    keeps them in float32. One new token alone is left to the fused kernel.

    Args:
        block: queries of a head that are computed at once. A causal block of them visits the keys up to its last query, so that larger
            blocks visit more pairs; the ledger counts them.
    """

    changes_weights: ClassVar[bool] = False

    block: Positive = 64

    def applied(self, architecture: Architecture) -> AbstractContextManager[None]:
        return attention_in_blocks(architecture, self.block)
