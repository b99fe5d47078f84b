"""The null at exactly a trace's budget: its decisions on other tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from quicksilver.modules.checks import check_count
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.pass_state import Fusion, Precision
from quicksilver.runtime.trace import PassTrace, Trace


def shuffled(trace: Trace, seed: int, protect_first: int = 4, protect_last: int = 1) -> Trace:
    """The same decisions on other tokens: the null at exactly the trace's budget, per layer and row.

    In each pass and row the decisions (halting depth, what is kept of it, resumption, K/V, fusion, bits) are permuted, each
    token's together, among the real tokens that are not protected; protected ones keep their own. A token that is to be merged
    away goes into the next one to its right that goes on, weighted by size; where none does, it goes on itself. Where a pass is
    a single token nothing changes.

    Args:
        seed: of the permutations.
        protect_first: attention sinks. `KVSkipping` spares them by default, so a fair null must spare them too.
        protect_last: the last tokens of a prompt, of which `Halting` spares one when it looks at the whole prompt.

    Raises:
        ConfigError: a trace in which K/V entries were merged while decoding, or evicted.
    """
    check_count("protect_first", protect_first)
    check_count("protect_last", protect_last)
    generator = torch.Generator().manual_seed(seed)
    passes = []
    for p in (p.cpu() for p in trace.passes):
        if p.merges:
            raise ConfigError(
                "A trace in which K/V entries were merged while decoding cannot be shuffled: run with decode_every=0, or compare "
                "with criterion='random'."
            )
        if p.evictions:
            raise ConfigError(
                "A trace in which K/V entries were evicted cannot be shuffled: compare with a module that evicts at random."
            )
        nth = p.valid.long().cumsum(1)  # 1 = the row's first token of this pass
        protected = p.first_column + nth <= protect_first
        if p.first_column == 0 and p.valid.shape[1] > 1:  # a prompt; elsewhere no token is known to be the last
            protected |= nth > p.valid.sum(1, keepdim=True) - protect_last
        free = p.valid & ~protected
        draw = torch.rand(free.shape, generator=generator).masked_fill(~free, 2.0)
        source = draw.argsort(dim=1, stable=True)
        target = (~free).to(torch.uint8).argsort(dim=1, stable=True)
        taken = torch.empty_like(source).scatter(1, target, source)  # (B, N): from which token each has its decisions
        if p.fusions:
            taken = _last_goes_on(p, free, taken)

        def permuted(x: torch.Tensor, taken: torch.Tensor = taken) -> torch.Tensor:
            return x.gather(1, taken)

        moved: dict[str, Any] = {
            name: permuted(getattr(p, name)) for name in ("halt_layer", "halted_kv", "resume_layer", "kv_layer", "fused_layer")
        }
        precisions = tuple(Precision(event.layer, permuted(event.bits)) for event in p.precisions)
        passes.append(_fused_again(dataclasses.replace(p, **moved, precisions=precisions)))
    return Trace(trace.n_layers, passes)


def _last_goes_on(p: PassTrace, free: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """`taken`, with the last free token of each row going as deep as any: every token that is merged away then has one to go into."""
    columns = torch.arange(free.shape[1]).expand(free.shape)
    depth = torch.where(free & (p.fused_layer == p.n_layers - 1).gather(1, taken), p.halt_layer.gather(1, taken), -1)
    deepest = torch.where(depth == depth.amax(1, keepdim=True), columns, -1).amax(1, keepdim=True)
    last = torch.where(free, columns, -1).amax(1, keepdim=True)
    last = torch.where(last < 0, deepest, last)
    swapped = taken.scatter(1, last, taken.gather(1, deepest))
    return swapped.scatter(1, deepest, taken.gather(1, last))


def _fused_again(p: PassTrace) -> PassTrace:
    """`p` with the fusions that its `fused_layer` asks for."""
    n = p.valid.shape[1]
    columns = torch.arange(n).expand(p.valid.shape)
    fused_layer, size, fusions = p.fused_layer, torch.ones(p.valid.shape), []
    for layer in sorted({fusion.layer for fusion in p.fusions}):
        goes_on = p.valid & (p.halt_layer > layer) & (fused_layer > layer)
        target = torch.where(goes_on, columns, n).flip(1).cummin(1).values.flip(1)
        leaves = p.valid & (fused_layer == layer)
        fused_layer = fused_layer.masked_fill(leaves & (target == n), p.n_layers - 1)
        into = torch.where(leaves & (target < n), target, columns)
        fusions.append(Fusion(layer, into, size))
        size = torch.zeros_like(size).scatter_add(1, into, size)
    return dataclasses.replace(p, fused_layer=fused_layer, fusions=tuple(fusions))
