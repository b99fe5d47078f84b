"""Token merging by bipartite matching (ToMe)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F

from quicksilver.modules.checks import Ends, active_first, layer_after, own_columns, share_of
from quicksilver.modules.signals import lowest
from quicksilver.runtime import Architecture, LayerView, TokenPolicy, TokenState
from quicksilver.runtime.options import Count, Share, between


@dataclass(kw_only=True)
class TokenMerging(TokenPolicy):
    """After every layer the most alike pairs of a bipartite matching become one token each.

    Source: "Token Merging: Your ViT But Faster" (Bolya et al., arXiv 2210.09461). The tokens are split into alternating sets A and
    B; each of A draws one edge to the most similar of B (cosine of keys, heads averaged); the r best edges are kept and their
    tokens merged, weighted by size; several of A may go into one of B. What was merged is handed back to all its parts at the end.

    What differs: ToMe merges between attention and MLP of an encoder that sees everything; here between layers of a decoder, and
    the merged token lives in the slot of its *last* part: nothing flows backward inside a prompt, but queries between the parts lose the
    earlier ones. Which pairs merge depends on both, so it acts in prompts only; `lookahead` merges everywhere, where a token's own prediction
    knows what follows it, and marks every number. Keys carry their rotary position where the model has one.

    Args:
        r: share of a row's real tokens merged away after each layer (ToMe's r over its 197 tokens); 0: none, the dense model.
        metric: what is compared: `keys` of the layer, or the `states` leaving it.
        start: fraction of the layers gone through before the first merge; 0: after the first layer.
        proportional: log size is added to the attention scores. Needs a mask, so that the causal kernel is no longer used.
        protect_first, protect_last: tokens that are never merged, as ToMe spares its class token.
        lookahead: as above.
    """

    r: Annotated[float, between(0.0, 0.5)] = 0.05
    metric: Literal["keys", "states"] = "keys"
    start: Share = 0.0
    proportional: bool = True
    protect_first: Count = 4
    protect_last: Count = 1
    lookahead: bool = False
    priority: ClassVar[int] = 30
    causal = False

    @property
    def proportional_attention(self) -> bool:
        return self.proportional and self.r > 0

    def bind(self, architecture: Architecture) -> None:
        self.first_layer = layer_after(self.start, architecture.n_layers)

    def acts_at(self, layer: int) -> bool:
        return self.r > 0 and layer >= self.first_layer

    def wants_attention(self, layer: int) -> bool:
        return self.metric == "keys" and self.acts_at(layer)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        steps = view.layer - self.first_layer
        k = share_of(view.n_tokens, self.r * (steps + 1)) - share_of(view.n_tokens, self.r * steps)  # (B, 1)
        free = tokens.active & ~Ends(self.protect_first, self.protect_last).mask(view)
        metric = view.keys.mean(1) if self.metric == "keys" else view.after  # (B, M, d)
        into = match(metric.float(), free, k)
        view.add_signal_flops(into.numel() * into.shape[1] // 2 * metric.shape[-1])  # half the tokens with the other half
        if bool((into != own_columns(into)).any()):
            tokens.fuse(into)


def match(metric: torch.Tensor, free: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """ToMe's bipartite soft matching.

    Args:
        metric: (B, M, d) float, what is compared, by its cosine.
        free: (B, M) bool, tokens that may take part. Columns are in slot order where they are free.
        k: (B, 1) long, edges a row, fewer where one of the sets has fewer.

    Returns:
        (B, M) long: the column of the last of each token's group, its own where nothing happens.
    """
    columns = own_columns(free)
    nth = free.long().cumsum(1) - 1  # alternating among the free ones, wherever others stand
    a, b = free & (nth % 2 == 0), free & (nth % 2 == 1)
    width = max(1, (free.shape[1] + 1) // 2)
    # (B, W) columns of the members, others behind them
    at_a, at_b = (active_first(members)[0][:, :width] for members in (a, b))
    unit = F.normalize(metric, dim=-1)
    sides = [unit.gather(1, at[..., None].expand(-1, -1, unit.shape[-1])) for at in (at_a, at_b)]
    likeness = sides[0] @ sides[1].transpose(1, 2)  # (B, W, W)
    likeness = likeness.masked_fill(~b.gather(1, at_b)[:, None, :], -math.inf)
    best, partner = likeness.max(-1)  # one edge for each of A
    drawn = lowest(-best, a.gather(1, at_a) & best.isfinite(), k)
    into = columns.scatter(1, at_a, torch.where(drawn, at_b.gather(1, partner), at_a))
    # A group is one of B and those that went into it; it lives in the last of them.
    last = columns.scatter_reduce(1, into, columns, "amax")
    return last.gather(1, into)
