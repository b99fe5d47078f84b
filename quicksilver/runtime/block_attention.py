"""Attention as products of blocks of queries, for narrow heads on a CPU.

torch's fused kernel visits a tile of scores at a time and makes two small products for each. With heads of 32 numbers those products are so
thin that the kernel takes longer than writing the scores of a block of queries down, in one batched product for all heads.

transformers knows it as `attn_implementation="blocks"`: a model that is loaded so attends so, with and without modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.runtime.architecture import Architecture

BLOCKS = "blocks"  # its name in transformers
BLOCK = 64  # queries of a block, unless the attention module says otherwise


def register(name: str, function: Callable[..., Any]) -> None:
    """`function` may now be asked for by that name; it gets the masks that sdpa gets."""
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def sdpa(*arguments: Any, **options: Any) -> Any:
    """transformers' own, for whatever a function of ours leaves to it."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, **options)


@contextmanager
def attention_function(model: PreTrainedModel, name: str) -> Iterator[None]:
    """All layers of the model attend by the function of that name."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation_internal = name  # transformers' own setter asks whether a kernel of that name can be downloaded
    try:
        yield
    finally:
        config._attn_implementation_internal = before


_BLOCK = "_quicksilver_block"  # on an attention module: queries of a block
_NOT_HERE = ("softcap", "position_bias", "cache")  # options of an attention function that only transformers' own knows


@contextmanager
def attention_in_blocks(architecture: Architecture, block: int) -> Iterator[None]:
    """All layers of the model attend in blocks of `block` queries.

    Raises:
        ConfigError: the model has another attention than sdpa.
    """
    if architecture.attention_implementation != "sdpa":
        raise ConfigError(
            f"Attention in blocks stands in for sdpa, and this model was loaded with "
            f"attn_implementation={architecture.attention_implementation!r}: leave that out."
        )
    attentions = [architecture.attention(layer) for layer in range(architecture.n_layers)]
    for attention in attentions:
        setattr(attention, _BLOCK, block)
    before, architecture.causal_block = architecture.causal_block, block
    try:
        with attention_function(architecture.model, BLOCKS):
            yield
    finally:
        architecture.causal_block = before
        for attention in attentions:
            delattr(attention, _BLOCK)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """query (B, H, Q, head_dim), key and value (B, H_kv, K, head_dim), mask (1 or B, 1, Q, K) -> (B, Q, H, head_dim), as sdpa gives it."""
    queries, keys = query.shape[2], key.shape[2]
    causal = attention_mask is None and getattr(module, "is_causal", True)
    differentiated = torch.is_grad_enabled() and query.requires_grad
    if (
        queries == 1
        or differentiated
        or (causal and queries != keys)
        or options.get("dropout")
        or any(options.get(name) is not None for name in _NOT_HERE)
    ):
        return sdpa(module, query, key, value, attention_mask, **options)
    scaling, block = options.get("scaling"), getattr(module, _BLOCK, BLOCK)
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    batch, heads, _, head_dim = query.shape
    own = key.shape[1]
    groups = heads // own  # queries of the heads that share K and V are rows of one product
    query = query.view(batch, own, groups, queries, head_dim)
    key, value = key.reshape(batch * own, keys, head_dim).transpose(1, 2), value.reshape(batch * own, keys, value.shape[-1])
    out = query.new_empty(batch, queries, own, groups, value.shape[-1])
    later = torch.ones(block, block, dtype=torch.bool, device=query.device).triu_(1) if causal else None
    lowest = torch.finfo(query.dtype).min
    for first in range(0, queries, block):
        end = min(queries, first + block)
        seen, size = (end if causal else keys), end - first
        rows = query[:, :, :, first:end].reshape(batch * own, groups * size, head_dim)
        scores = torch.bmm(rows, key[:, :, :seen]).view(batch, own, groups, size, seen)
        if later is not None:
            scores[..., first:].masked_fill_(later[:size, :size], lowest)
        elif attention_mask is not None:
            part = attention_mask[:, :, None, first:end]  # (1 or B, 1, 1, size, K)
            scores = scores.masked_fill_(~part, lowest) if part.dtype == torch.bool else scores.add_(part)
        weights = scores.softmax(-1)
        made = torch.bmm(weights.view(batch * own, groups * size, seen), value[:, :seen])
        out[:, first:end] = made.view(batch, own, groups, size, -1).permute(0, 3, 1, 2, 4)
    if attention_mask is not None:
        seen_by = attention_mask if attention_mask.dtype == torch.bool else attention_mask > float("-inf")
        out.masked_fill_(~seen_by.any(-1)[:, 0, :, None, None, None], 0.0)  # a query that sees no key gets nothing
    return out.view(batch, queries, heads, -1), None


register(BLOCKS, _attend)
