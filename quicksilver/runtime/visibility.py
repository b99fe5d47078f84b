"""Which tokens see which, by slot: spans, masks, and the attention that keys receive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quicksilver.runtime.cache.stores import Entries
from quicksilver.runtime.errors import QuickSilverError

if TYPE_CHECKING:
    from quicksilver.runtime.architecture import Architecture, Rotary
    from quicksilver.runtime.plan import Attended


@dataclass(frozen=True)
class Span:
    """How far back the queries of a layer see: the last `window` slots, their own included, and the first `sinks` of the sequence."""

    window: int
    sinks: int = 0

    @property
    def reach(self) -> int:
        """Tokens of a sequence up to which nothing is out of sight."""
        return self.window + self.sinks

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Slots of queries (B, Q) and keys (B, K) -> (B, Q, K) bool, apart from causality."""
        return (keys[:, None, :] > queries[:, :, None] - self.window) | (keys < self.sinks)[:, None, :]


class Visibility:
    """Which tokens see which in the layers of one model.

    Args:
        arch: the model; its spans are those of the run.
        proportional: a super-token draws attention in proportion to the tokens it stands for.
    """

    def __init__(self, arch: Architecture, proportional: bool) -> None:
        self.arch, self.proportional = arch, proportional
        self.sdpa = arch.attention_implementation == "sdpa"
        # Asked for in every layer of every pass, and a transformers config takes microseconds to answer.
        self.windows = [arch.attention_window(layer) for layer in range(arch.n_layers)]

    def weighs(self, entries: Entries | frozenset[str]) -> bool:
        """Whether entries with these facts weigh differently in attention."""
        return self.proportional and "size" in entries

    def span_reaches_back(self, layer: int, n_columns: int) -> bool:
        """Whether every query among the first `n_columns` reaches back to the first token, as far as the modules' span goes."""
        span = self.arch.spans[layer]
        return span is None or n_columns <= span.reach

    def own_kernel_fits(self, layer: int, n: int, n_columns: int, even: bool) -> bool:
        """Whether the model's plain kernel is right for `n` new tokens, the last of `n_columns`, that attend to themselves alone.

        Args:
            even: no row is padded. Padding behind the tokens is out of a causal kernel's sight, and in that of one that looks ahead.
        """
        window = self.windows[layer]
        return (
            (even or self.arch.causal)
            and self.sdpa
            and (window is None or n <= window)
            and self.span_reaches_back(layer, n_columns)
        )

    def one_token_sees_all(self, layer: int, seen: int) -> bool:
        """Whether one new token after `seen` columns sees every entry of the layer."""
        # By columns seen, not by entries: fewer entries than the window may still reach further back than it does.
        window = self.windows[layer]
        return (window is None or seen < window) and self.span_reaches_back(layer, seen + 1)

    def visible(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Which keys a query may attend to: slots of queries (B, Q) and keys (B, K), valid (B, K) bool or None -> (B, Q, K) bool."""
        if self.arch.causal:
            visible = keys[:, None, :] <= queries[:, :, None]
        else:
            visible = torch.ones(*queries.shape, keys.shape[1], dtype=torch.bool, device=keys.device)
        window, span = self.windows[layer], self.arch.spans[layer]
        if window is not None:
            visible &= keys[:, None, :] > queries[:, :, None] - window
        if span is not None:
            visible &= span.sees(queries, keys)
        if valid is not None:
            visible &= valid[:, None, :]
        return visible

    def mask(
        self,
        layer: int,
        queries: torch.Tensor,
        real: torch.Tensor | None,
        entries: Entries,
        valid: torch.Tensor | None,
        all_seen: bool = False,
    ) -> torch.Tensor | None:
        """The attention mask of a layer: slots of queries (B, A), entries (B, K) -> (B, 1, A, K); None: every query sees every key.

        Boolean for sdpa, additive for eager and where super-tokens weigh more: log size is added to their scores (ToMe, arXiv 2210.09461).

        Args:
            real: (B, A) bool, queries that are tokens; None: all.
            valid: (B, K) bool, columns that are entries; None: all.
            all_seen: every query sees every entry.

        A query that sees no key gets a zero attention output from sdpa.

        Raises:
            QuickSilverError: such a query (a `real` one) under eager attention, which would give it the mean of all values.
        """
        log_size = entries["size"].log() if self.weighs(entries) else None
        if all_seen and valid is None and log_size is None and (self.sdpa or entries["slots"].shape[1]):
            return None
        visible = self.visible(layer, queries, entries["slots"], valid)[:, None]
        dtype = self.arch.model.dtype
        if self.sdpa:
            if log_size is None:
                return visible
            return log_size[:, None, None].to(dtype).expand(visible.shape).masked_fill(~visible, float("-inf"))
        blind = ~visible.any(-1)[:, 0]
        if bool((blind if real is None else blind & real).any()):
            raise QuickSilverError(
                f"At layer {layer} a token has no key left to attend to, and attn_implementation='eager' would give it the mean of "
                "all values: use 'sdpa', or protect the first tokens."
            )
        bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        if log_size is not None:
            bias += log_size[:, None, None].to(dtype)
        return bias.masked_fill(~visible, torch.finfo(dtype).min)

    def attention_received(
        self,
        layer: int,
        before: torch.Tensor,
        rotary: Rotary | None,
        slots: torch.Tensor,
        real: torch.Tensor,
        attended: Attended,
        *,
        last_queries: int | None,
        reduce: str,
        n_slots: int,
    ) -> tuple[torch.Tensor, int]:
        """Attention that keys receive from the last active tokens of a view: a small q·k product, not the full matrix.

        Args:
            before: (B, M, D) states entering the layer, of tokens in `slots` (B, M); real: (B, M) bool, which of them are active.
            attended: what the layer's queries attended to.
            last_queries: of each row; None: all.
            reduce: `sum` over queries of the mean over heads, the `mean` over both, or the `max` over both.
            n_slots: S, beyond every slot of the view and of the keys.

        Returns:
            (B, S) float32 by slot, and the FLOPs it took each rank.
        """
        arch = self.arch
        batch, m = slots.shape
        keys, key_slots = attended.keys, attended.key_slots
        n_queries = m if last_queries is None else min(last_queries, m)
        rank = torch.where(real, slots, -1)
        chosen = rank.topk(n_queries, dim=1).indices  # (B, Q) columns of the view
        is_query = real.gather(1, chosen)

        def of_queries(states: torch.Tensor) -> torch.Tensor:
            return states.gather(1, chosen[..., None].expand(-1, -1, states.shape[-1]))

        picked = None if rotary is None else (of_queries(rotary[0]), of_queries(rotary[1]))
        queries = arch.project_q(layer, of_queries(before), picked)
        groups = arch.n_heads // arch.n_kv_heads
        queries = queries.reshape(batch, arch.own_kv_heads, groups * n_queries, arch.head_dim)
        scores = (queries @ keys.transpose(-1, -2)).float() * arch.scaling(layer)
        cap = arch.score_cap(layer)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.view(batch, arch.own_kv_heads, groups, n_queries, -1)
        if self.proportional and attended.size is not None:
            scores = scores + attended.size.log()[:, None, None, None]
        visible = self.visible(layer, slots.gather(1, chosen), key_slots, attended.valid)
        weights = scores.masked_fill(~visible[:, None, None], torch.finfo(torch.float32).min).softmax(-1)
        weights = weights * (visible & is_query[..., None])[:, None, None]
        if reduce == "max":
            received = arch.ranks.reduced(weights.amax(dim=(1, 2, 3)), "MAX")
        else:
            received = arch.ranks.reduced(weights.sum(dim=(1, 2, 3)), "SUM") / arch.n_heads
            if reduce == "mean":
                received = received / is_query.sum(1, keepdim=True).clamp(min=1)
        by_slot = received.new_zeros(batch, n_slots)
        clean = received if attended.valid is None else received * attended.valid
        by_slot.scatter_add_(1, key_slots.clamp(min=0), clean)
        own = arch.of_rank
        flops = batch * n_queries * 2 * (own.query_params_per_layer + own.n_heads * own.head_dim * keys.shape[2])
        return by_slot, flops
