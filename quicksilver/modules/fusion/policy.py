"""Which tokens of a prompt are fused, and after which layers (paper 2.3, App. D, I)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from quicksilver.modules.checks import check_choice, check_count, check_number, check_odd, layer_after
from quicksilver.modules.fusion.cache import merge_new_entries
from quicksilver.modules.fusion.distances import DISTANCES, ContextDivergence, NeighbourDistance
from quicksilver.modules.fusion.exemptions import Exemptions
from quicksilver.modules.fusion.grouping import group_closest, own_columns
from quicksilver.modules.signals import Random, Signal, pooled, share_of
from quicksilver.modules.thresholds import (
    Calibrated,
    Calibration,
    Thresholds,
    check_thresholds,
    is_percentile,
    resolve_thresholds,
)
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import MergePolicy, TokenPolicy
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.view import CacheView, LayerView

RULES = ("threshold", "capacity")


@dataclass(kw_only=True)
class TokenFusion(Exemptions, TokenPolicy, MergePolicy, Calibrated):
    """Carry neighbours whose states are close on as one super-token, in the slot of the last of them (paper 2.3, App. D, I).

    Neighbours are consecutive tokens of the sequence. A halted token between two others separates them (D.6); a token that was
    merged away does not. `rule="threshold"`, the paper's: neighbours closer than `tau_fuse` fuse, several at once where each is
    close to the next. `rule="capacity"`: in every row exactly the k closest pairs fuse, k a share of the row's own real tokens
    (fewer only where the exemptions and `max_group` leave fewer), so that shapes do not depend on the data. A later fusion layer
    fuses super-tokens again.

    What token t becomes depends on what follows it, so fusion acts in prompts only (docs/fusion-and-causality.md). A sliding window
    sees a super-token as long as it reaches its slot, that of its last part.

    The null at the same budget is `criterion="random"`: random neighbours.

    The options, by what they are about. Which tokens are exempt: `Exemptions`.

    Which pairs fuse:
        rule: as above; `capacity` needs no calibration and leaves `tau_fuse` unread.
        tau_fuse: a number, one per layer, or a percentile of the distances between neighbours such as "p15" (D.3).
        fused_share: for `capacity`: share of a row's real tokens merged away, over all fusion layers together, in equal steps.
        criterion: what makes a pair close. `l2`, `relative`, `cosine`: `NeighbourDistance`. `attention`: how much the more
            attended of the two gets from the last `attention_queries` tokens; these are not fused themselves. Not the paper's:
            at 30% it cost a quarter of what likeness cost (docs/fusion-and-causality.md). `random`: a hash of seed, layer, slot and
            token id in [0, 1), so that under `threshold` each pair fuses with probability `tau_fuse`.
        seed: of `random`.
        max_group: original tokens a super-token may stand for; None: any number.
        calibration: a `Calibration` or the path of one; percentiles need it.

    Where in the model:
        start: fraction of the layers gone through before tokens fuse (docs/conflicts.md #12).
        every: fuse again every so many layers from there on; 0: once.
        first: which mechanism chooses first at a layer (docs/conflicts.md #16): `halting` (2.4), or `fusion` (Table 6).

    What a super-token is:
        merge: its state is the mean of its parts: weighted by the original tokens in each (`size`), plain (`mean`, D.2), or
            weighted by the attention each gets from the last `attention_queries` tokens (`attention`, I.3).
        proportional: it draws attention as all its original tokens would: log size is added to its scores (ToMe, arXiv
            2210.09461). Needs a mask, so that the causal kernel is no longer used.

    Attention, for `criterion="attention"` and `merge="attention"`:
        attention_queries: the prompt's last so many tokens observe; None: all of them, and all may be fused.
        attention_pool: for the criterion, an odd number: a token counts as the most attended of so many around it.

    Further conditions of the paper:
        tau_context: δ_ctx (D.8): only tokens whose contexts (`ContextDivergence`) are closer than this fuse; as `tau_fuse`.
        context_window: tokens a context is the mean of.
        tau_attention: 2.3: any two tokens, neighbours or not, fuse too when they are closer than `tau_fuse` and the cosine of the
            later one's query and the earlier one's key, all heads joined and positions left out, is above this; -1 to 1. Query
            and key are those of this layer: the paper's mean over all L layers would run the layers above first. For `threshold`,
            and in pairs only.

    While decoding:
        decode_every: after every so many tokens that follow the prompt, the new K/V entries are merged in the layers above
            `start`: the `fused_share` of neighbours whose keys are closest (by `l2` where the criterion is attention), into the
            mean by size. An entry has a slot and no token id, so of the exemptions only `protect_first` and `protect_last` (the
            newest tokens) hold there. 0: never.

    Elsewhere:
        lookahead: fuse outside prompts too, the paper's variant, which leaks; every number it touches is marked.

    Raises:
        ConfigError: an option out of range; by `bind`, options that leave no layer to fuse in; in a run, a `max_group` larger
            than the prompt.
    """

    rule: Literal["threshold", "capacity"] = "threshold"
    tau_fuse: Thresholds | None = "p15"
    fused_share: float = 0.3
    criterion: Literal["l2", "relative", "cosine", "attention", "random"] = "l2"
    seed: int = 0
    max_group: int | None = None
    calibration: Calibration | Path | str | None = None
    start: float = 0.4
    every: int = 0
    first: Literal["halting", "fusion"] = "halting"
    merge: Literal["size", "mean", "attention"] = "size"
    proportional: bool = False
    attention_queries: int | None = 16
    attention_pool: int = 1
    tau_context: Thresholds | None = None
    context_window: int = 32
    tau_attention: float | None = None
    decode_every: int = 0
    lookahead: bool = False

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, RULES)
        check_choice("criterion", self.criterion, (*DISTANCES, "attention", "random"))
        check_choice("merge", self.merge, ("size", "mean", "attention"))
        check_choice("first", self.first, ("halting", "fusion"))
        check_number("start", self.start, 0.0, 1.0)
        check_number("fused_share", self.fused_share, 0.0, 1.0)
        for name in ("every", "decode_every", "seed"):
            check_count(name, getattr(self, name))
        if self.attention_queries is not None:
            check_count("attention_queries", self.attention_queries, 1)
        check_odd("attention_pool", self.attention_pool)
        self.check_exemptions()
        self._check_rule()
        kind: Any = self.criterion if self.criterion in DISTANCES else "l2"
        self._distance, self._context = NeighbourDistance(kind), ContextDivergence(kind, self.context_window)
        self._random = Random(self.seed)

    def _check_rule(self) -> None:
        for name, tau in (("tau_fuse", self.tau_fuse), ("tau_context", self.tau_context)):
            if tau is not None:
                check_thresholds(name, tau)
        if self.rule == "threshold":
            if self.tau_fuse is None:
                raise ConfigError("rule='threshold' needs tau_fuse: a number, one per layer, or a percentile such as 'p15'.")
            if self.criterion not in DISTANCES and is_percentile(self.tau_fuse):
                raise ConfigError(
                    f"criterion={self.criterion!r} gives numbers from 0 to 1, and tau_fuse={self.tau_fuse!r} is a percentile of "
                    "measured distances: give a number, or rule='capacity'."
                )
        if self.tau_attention is not None:
            check_number("tau_attention", self.tau_attention, -1.0, 1.0)
            if self.rule == "capacity" or self.criterion not in DISTANCES:
                raise ConfigError(
                    f"tau_attention={self.tau_attention!r} adds pairs that are closer than tau_fuse, and has no meaning with "
                    f"rule={self.rule!r} and criterion={self.criterion!r}: give rule='threshold' and a distance, or leave it out."
                )
        if self.max_group is not None:
            check_count("max_group", self.max_group, 2)
            if self.rule == "capacity" and self.fused_share > 1 - 1 / self.max_group:
                raise ConfigError(
                    f"fused_share={self.fused_share!r} cannot be reached in groups of at most max_group={self.max_group} tokens: "
                    f"give at most {1 - 1 / self.max_group:.3g}, or a larger max_group."
                )

    halts: ClassVar[bool] = False

    @property
    def priority(self) -> int:  # type: ignore[override]
        """Before halting (10), or after KV skipping (20), which acts on what has just halted."""
        return 30 if self.first == "halting" else 5

    @property
    def causal(self) -> bool:
        return False

    @property
    def proportional_attention(self) -> bool:
        return self.proportional

    @property
    def merges_cache(self) -> bool:
        return self.decode_every > 0

    def null(self, seed: int) -> TokenFusion | None:
        """Random neighbours at the same rate. None for `threshold`: its rate is known after a run only, and `shuffled` matches it."""
        if self.rule != "capacity":
            return None
        # The observing tokens are not fused by attention, so a fair null must not fuse them either.
        observers = (self.attention_queries or 0) if self.criterion == "attention" else 0
        return replace(self, criterion="random", seed=seed, protect_last=max(self.protect_last, observers))

    def calibration_signals(self) -> list[Signal]:
        asked: list[tuple[Signal, Thresholds | None]] = [(self._context, self.tau_context)]
        if self.rule == "threshold":
            asked.append((self._distance, self.tau_fuse))
        return [] if self.calibration is not None else [signal for signal, tau in asked if is_percentile(tau)]

    def bind(self, architecture: Architecture) -> None:
        self.check_known(architecture.vocab_size)
        n_layers = architecture.n_layers
        first = layer_after(self.start, n_layers)
        self.layers = tuple(range(first, n_layers - 1, self.every)) if self.every else (first,)
        if first >= n_layers - 1:
            raise ConfigError(
                f"start={self.start!r} leaves no layer to save anything in: the model has {n_layers} layers. "
                "Give a smaller fraction."
            )
        self._architecture = architecture

        def resolve(name: str, tau: Thresholds | None, key: str) -> list[float] | None:
            return None if tau is None else resolve_thresholds(name, tau, architecture, self.calibration, key)

        self._tau_fuse = resolve("tau_fuse", self.tau_fuse, self._distance.key) if self.rule == "threshold" else None
        self._tau_context = resolve("tau_context", self.tau_context, self._context.key)

    def acts_at(self, layer: int) -> bool:
        return layer in self.layers

    def wants_attention(self, layer: int) -> bool:
        return "attention" in (self.merge, self.criterion) and self.acts_at(layer)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        if view.slots.shape[1] < 2:
            return
        self._check_group(view)
        exempt = self.exempt(view, self._architecture)
        neighbour = tokens.left_neighbour()
        received = view.attention_received(self.attention_queries) if self.wants_attention(view.layer) else None
        distance = self._distances(view, tokens, received, neighbour)
        eligible = (neighbour != own_columns(neighbour)) & ~exempt & ~exempt.gather(1, neighbour) & distance.isfinite()
        if self._tau_context is not None:
            eligible &= self._context(view, tokens) < self._tau_context[view.layer]
        k = None
        if self._tau_fuse is not None:
            eligible &= distance < self._tau_fuse[view.layer]
        else:
            step, steps = self.layers.index(view.layer), len(self.layers)
            so_far, then = (share_of(view.n_tokens, self.fused_share * done / steps) for done in (step, step + 1))
            k = then - so_far
        into = group_closest(distance.masked_fill(~eligible, math.inf), tokens.active, tokens.size, self.max_group, k)
        if self.tau_attention is not None:
            into = self._pair_by_attention(view, tokens, into, exempt)
        if bool((into != own_columns(into)).any()):
            tokens.fuse(into, self._weights(tokens, received))

    def _check_group(self, view: LayerView) -> None:
        if self.max_group is not None and view.is_prompt and self.max_group > (longest := int(view.n_tokens.max())):
            raise ConfigError(
                f"max_group={self.max_group} is larger than the prompt of {longest} tokens: "
                f"give at most {longest}, or null for groups of any size."
            )

    def _distances(
        self, view: LayerView, tokens: TokenState, received: torch.Tensor | None, neighbour: torch.Tensor
    ) -> torch.Tensor:
        """Of each token and its left neighbour: (B, M)."""
        if self.criterion == "random":
            return self._random(view, tokens)
        if self.criterion != "attention":
            return self._distance(view, tokens)
        assert received is not None
        if self.attention_pool > 1:
            received = pooled(received, tokens.active, self.attention_pool)
        if self.attention_queries is not None:
            # Fewer queries see the observing tokens, so their low sums say nothing.
            taking_part = tokens.active | tokens.newly_halted
            from_end = taking_part.flip(1).cumsum(1).flip(1)  # 1 = the row's last token
            received = received.masked_fill(taking_part & (from_end <= self.attention_queries), math.inf)
        return torch.maximum(received, received.gather(1, neighbour))

    def _weights(self, tokens: TokenState, received: torch.Tensor | None) -> torch.Tensor | None:
        if self.merge == "attention":
            assert received is not None
            return received.clamp_min(torch.finfo(torch.float32).tiny ** 0.5)  # parts without attention weigh the same
        return torch.ones_like(tokens.size) if self.merge == "mean" else None

    def _pair_by_attention(self, view: LayerView, tokens: TokenState, into: torch.Tensor, exempt: torch.Tensor) -> torch.Tensor:
        """`into` with further pairs, of tokens that no group has yet: two that are each other's closest, by 2.3."""
        assert self._tau_fuse is not None
        assert self.tau_attention is not None
        columns = own_columns(into)
        grouped = (into != columns).scatter_reduce(1, into, into != columns, "amax")
        free = tokens.active & ~exempt & ~grouped
        fits = free[:, :, None] & free[:, None, :] & (view.slots[:, :, None] > view.slots[:, None, :])  # later, earlier
        if self.max_group is not None:
            fits &= tokens.size[:, :, None] + tokens.size[:, None, :] <= self.max_group
        distance = self._distance.pairs(view, tokens)
        view.add_signal_flops(2 * distance.numel() * self._architecture.width)
        fits &= (distance < self._tau_fuse[view.layer]) & (self._alignment(view) > self.tau_attention)
        if self._tau_context is not None:
            view.add_signal_flops(2 * distance.numel() * self._architecture.width)
            fits &= self._context.pairs(view, tokens) < self._tau_context[view.layer]
        distance = distance.masked_fill(~fits, math.inf)
        either_way = torch.minimum(distance, distance.transpose(1, 2))
        closest = either_way.min(-1)
        mutual = closest.values.isfinite() & (closest.indices.gather(1, closest.indices) == columns)
        return torch.where(mutual & (view.slots < view.slots.gather(1, closest.indices)), closest.indices, into)

    def _alignment(self, view: LayerView) -> torch.Tensor:
        """Cosine of each token's query with each token's key in this layer, heads joined: (B, M queries, M keys) float32."""
        arch = self._architecture
        queries = arch.ranks.all_heads(arch.project_q(view.layer, view.before, None))
        keys = arch.ranks.all_heads(arch.project_kv(view.layer, view.before, None)[0])
        keys = keys.repeat_interleave(arch.n_heads // arch.n_kv_heads, dim=1)
        own, width = arch.of_rank, arch.n_heads * arch.head_dim
        weights = own.query_params_per_layer + own.projection_params_per_layer
        batch, m = view.slots.shape
        view.add_signal_flops(2 * batch * m * (weights + m * width))
        q, k = (F.normalize(x.transpose(1, 2).flatten(2).float(), dim=-1) for x in (queries, keys))
        return q @ k.transpose(1, 2)

    def merge_cache(self, view: CacheView) -> torch.Tensor | None:
        if view.layer <= self.layers[0] or view.n_new < self.decode_every:
            return None
        return merge_new_entries(
            view, kind="random" if self.criterion == "random" else self._distance.kind, share=self.fused_share,
            max_group=self.max_group, protect_first=self.protect_first, protect_last=self.protect_last, seed=self.seed,
        )  # fmt: skip
