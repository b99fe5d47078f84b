"""Contextual Token Fusion: which neighbours are carried on as one super-token, and after which layers (paper 2.3, App. D, I)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from quicksilver.modules.calibration import Calibrated, Calibration, Thresholds, is_percentile
from quicksilver.modules.checks import Ends, TokenMask, active_first, check_known_ids, layer_to_act, marked, own_columns, share_of
from quicksilver.modules.signals import Random, Signal, lowest, pooled, slot_draw, without_observers
from quicksilver.runtime import Architecture, CacheView, ConfigError, LayerView, MergePolicy, TokenPolicy, TokenState
from quicksilver.runtime.options import Count, Odd, Positive, Share, TokenIds, at_least, between, check_token_ids, is_list
from quicksilver.runtime.reading import read_json

# -- joining neighbours ------------------------------------------------------------------------------------------------------------
# Rounds of `_grow`. A chain of d neighbours, each closer than the next, takes d rounds by distance. Longer chains (the states of
# repetitive text converge step by step) are cut at places spread evenly; after three such rounds no two of them are side by side.
_BY_DISTANCE, _BY_PLACE = 5, 3


def group_closest(
    distance: torch.Tensor, active: torch.Tensor, size: torch.Tensor, max_group: int | None, k: torch.Tensor | None
) -> torch.Tensor:
    """Join consecutive active tokens, closest first, into groups that go into their last. No host sync, no loop over tokens.

    Args:
        distance: (B, M), of each token to the active one before it; +inf: the two may not be joined.
        active: (B, M) bool.
        size: (B, M) float, original tokens that each stands for.
        max_group: that many original tokens a group may stand for; None: any number.
        k: (B, 1) long, joins a row, fewer where fewer are possible; None: all that are possible.

    Returns:
        (B, M) long: the column of the token that each goes into, its own where nothing happens.
    """
    order, active = active_first(active)
    distance = distance.gather(1, order).masked_fill(~active, math.inf)
    distance = F.pad(distance[:, 1:], (1, 0), value=math.inf)  # the first has none before it
    joined = distance.isfinite() if max_group is None else _grow(distance, size.gather(1, order) * active, max_group)
    if k is not None:
        joined = lowest(distance, joined, k)
    # A group ends where the next token is not joined to it.
    place = own_columns(order)
    ends = torch.where(F.pad(joined[:, 1:], (0, 1)), place.shape[1], place)
    last = ends.flip(1).cummin(1).values.flip(1)
    return torch.empty_like(order).scatter(1, order, order.gather(1, last))


def _grow(distance: torch.Tensor, size: torch.Tensor, max_group: int) -> torch.Tensor:
    """Which tokens join the one before them, (B, M) bool, as if joins were made one by one, closest first, while groups fit.

    A join that is closer than the ones on both sides comes before them in any case, so all such are made at once.
    """
    joined = torch.zeros_like(distance, dtype=torch.bool)
    possible, place = distance.isfinite(), own_columns(distance)
    evenly = (place * 0.6180339887) % 1  # golden ratio: neighbours are far apart, and so are low values
    for key in [distance] * _BY_DISTANCE + [evenly] * _BY_PLACE:
        group = (~joined).cumsum(1) - 1  # of each token
        total = torch.zeros_like(size).scatter_add(1, group, size)
        fits = total.gather(1, group) + total.gather(1, (group - 1).clamp(min=0)) <= max_group
        key = torch.where(possible & ~joined & fits, key, math.inf)
        # By group: the key of the join at its left end.
        left = torch.full_like(key, math.inf).scatter_reduce(1, group, key, "amin")
        beside = F.pad(left, (1, 1), value=math.inf)
        chosen = left.isfinite() & (left < beside[:, :-2]) & (left <= beside[:, 2:])
        joined = joined | (key.isfinite() & chosen.gather(1, group))
    return joined


# -- how far apart two tokens are --------------------------------------------------------------------------------------------------
DISTANCES = ("l2", "relative", "cosine")


@dataclass(frozen=True)
class NeighbourDistance(Signal):
    """Distance of a token's state from that of its left neighbour, +inf where it has none (D.2).

    `l2`: ‖h_t − h_u‖₂ in state units (the paper's); `relative`: over the mean of the two norms; `cosine`: 1 − cos(h_t, h_u).
    """

    kind: Literal["l2", "relative", "cosine"] = "l2"
    name: ClassVar[str] = "neighbour"

    @property
    def key(self) -> str:
        return f"neighbour-{self.kind}"

    def states(self, view: LayerView, tokens: TokenState) -> torch.Tensor:
        """What is compared: (B, M, D)."""
        return view.after

    def score(self, view: LayerView, tokens: TokenState, where: torch.Tensor) -> torch.Tensor:
        neighbour = tokens.left_neighbour()
        states = self.states(view, tokens)
        distance = distance_between(states, states.gather(1, neighbour[..., None].expand_as(states)), self.kind)
        return distance.masked_fill(neighbour == own_columns(neighbour), math.inf)

    def pairs(self, view: LayerView, tokens: TokenState) -> torch.Tensor:
        """The distance of any two tokens, by one matrix product: (B, M, M) float32."""
        x = self.states(view, tokens).float()
        if self.kind == "cosine":
            unit = F.normalize(x, dim=-1)
            return 1 - unit @ unit.transpose(1, 2)
        squares = x.square().sum(-1)
        distance = (squares[:, :, None] + squares[:, None, :] - 2 * (x @ x.transpose(1, 2))).clamp(min=0).sqrt()
        norms = squares.sqrt()
        return distance if self.kind == "l2" else distance / _mean_norm(norms[:, :, None], norms[:, None, :])


@dataclass(frozen=True)
class ContextDivergence(NeighbourDistance):
    """δ_ctx of D.8: the distance between the contexts of a token and of its left neighbour.

    A context is the mean state of the `window` active tokens around (docs/conflicts.md #17: the model's own states, no sentence
    encoder). It looks ahead by half a window.
    """

    window: Positive = 32
    name: ClassVar[str] = "context"
    causal: ClassVar[bool] = False

    @property
    def key(self) -> str:
        return f"context-{self.kind}-{self.window}"

    def states(self, view: LayerView, tokens: TokenState) -> torch.Tensor:
        order, active = active_first(tokens.active)
        # The mean is a difference of two running sums, which would lose its digits in float32.
        states = view.after.double().gather(1, order[..., None].expand_as(view.after)) * active[..., None]
        so_far = F.pad(states.cumsum(1), (0, 0, 1, 0))  # (B, M + 1, D)
        place = own_columns(order)
        first = (place - self.window // 2).clamp(min=0)
        stop = torch.minimum(first + self.window, active.sum(1, keepdim=True)).clamp(min=1)
        first = torch.minimum(first, stop - 1)
        index = torch.stack([first, stop])[..., None].expand(-1, -1, -1, states.shape[-1])
        mean = (so_far.gather(1, index[1]) - so_far.gather(1, index[0])) / (stop - first)[..., None]
        return torch.zeros_like(mean).scatter(1, order[..., None].expand_as(mean), mean).float()


def distance_between(a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
    """Distances of `kind`, see `NeighbourDistance`: (..., D), (..., D) -> (...) float32."""
    a, b = a.float(), b.float()
    if kind == "cosine":
        return 1 - F.cosine_similarity(a, b, dim=-1)
    distance = (a - b).norm(dim=-1)
    return distance if kind == "l2" else distance / _mean_norm(a.norm(dim=-1), b.norm(dim=-1))


def _mean_norm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a + b) / 2).clamp_min(torch.finfo(torch.float32).tiny)


# -- which tokens are never fused --------------------------------------------------------------------------------------------------
def occurrences(ids: torch.Tensor, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Tokens of `ids` (B, N) long that are part of one of the sequences: (B, N) bool."""
    found = torch.zeros_like(ids, dtype=torch.bool)
    for sequence in sequences:
        n = len(sequence)
        if n > ids.shape[1]:
            continue
        starts = (ids.unfold(1, n, 1) == torch.tensor(list(sequence), device=ids.device)).all(-1)  # (B, N - n + 1)
        for i in range(n):
            found |= F.pad(starts, (i, n - 1 - i))
    return found


def check_anchors(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids, none empty; raises ConfigError."""
    if not is_list(value) or any(not isinstance(a, Sequence) or not len(a) for a in value):
        raise ConfigError(f"{name}={value!r} must be a list of sequences of token ids, such as [[24361, 25]] for 'Question:'.")
    return tuple(check_token_ids(f"{name}[{i}]", anchor) for i, anchor in enumerate(value))


def _counts(value: Any, rare_below: int) -> torch.Tensor | None:
    """(V,) long."""
    if (value is None) != (rare_below == 0):
        raise ConfigError(f"rare_below={rare_below} and token_counts={'null' if value is None else 'given'}: give both.")
    if value is None:
        return None
    if isinstance(value, (str, Path)):
        try:
            value = read_json(Path(value))
        except (OSError, ValueError) as error:
            raise ConfigError(f"token_counts={str(value)!r} cannot be read ({error}): give a JSON list of counts.") from None
    counts = value if isinstance(value, torch.Tensor) else torch.tensor(check_token_ids("token_counts", value))
    if counts.dim() != 1:
        raise ConfigError(f"token_counts has shape {tuple(counts.shape)}: give one count per token id, (V,).")
    return counts


# -- the module --------------------------------------------------------------------------------------------------------------------
@dataclass(kw_only=True)
class TokenFusion(TokenPolicy, MergePolicy, Calibrated):
    """Carry neighbours whose states are close on as one super-token, in the slot of the last of them (paper 2.3, App. D, I).

    Neighbours are consecutive tokens of the sequence. A halted token between two others separates them (D.6); a token that was
    merged away does not. `rule="threshold"`, the paper's: neighbours closer than `tau_fuse` fuse, several at once where each is
    close to the next. `rule="capacity"`: in every row exactly the k closest pairs fuse, k a share of the row's own real tokens
    (fewer only where the exemptions and `max_group` leave fewer). A later fusion layer fuses super-tokens again.

    What token t becomes depends on what follows it, so fusion acts in prompts only (docs/fusion-and-causality.md). A sliding window
    sees a super-token as long as it reaches its slot, that of its last part.

    Which tokens are exempt:
        exempt_ids, exempt_mask: by id, or by slot: a bool tensor (S,) or (B, S).
        anchors: sequences of token ids, such as those of "Question:"; every token of an occurrence is exempt (2.3).
        token_counts: how often each token id occurs in some corpus, V numbers or a JSON file of them.
        rare_below: tokens that occur less often than this are exempt (2.3 "rare entities").
        protect_first: so are the first tokens of a sequence, the attention sinks.
        protect_last: and the last tokens of a prompt: the very last one's logits predict what follows.

    Which pairs fuse:
        rule: as above; `capacity` needs no calibration and leaves `tau_fuse` unread.
        tau_fuse: a number, one per layer, or a percentile of the distances between neighbours such as "p15" (D.3).
        fused_share: for `capacity`: share of a row's real tokens merged away, over all fusion layers together, in equal steps.
        criterion: what makes a pair close. `l2`, `relative`, `cosine`: `NeighbourDistance`. `attention`: how much the more
            attended of the two gets from the last `attention_queries` tokens; these are not fused themselves. Not the paper's:
            at 30% it cost a quarter of what likeness cost. `random`, the null: a hash of seed, layer, slot and token id in [0, 1), so that
            under `threshold` each pair fuses with probability `tau_fuse`.
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
            and key are those of this layer: the paper's mean over all L would run the layers above first. For `threshold`, in pairs only.

    While decoding:
        decode_every: after every so many tokens that follow the prompt, the new K/V entries are merged in the layers above
            `start`: the `fused_share` of neighbours whose keys are closest (by `l2` where the criterion is attention), into the
            mean by size. An entry has a slot and no token id, so of the exemptions only `protect_first` and `protect_last` (the
            newest tokens) hold there. 0: never.
        lookahead: fuse outside prompts too, the paper's variant, which leaks; every number it touches is marked.

    Raises:
        ConfigError: by `bind`, options that leave no layer to fuse in; in a run, a `max_group` larger than the prompt, options by id on a
            model that was given embeddings, or `token_counts` of a smaller vocabulary.
    """

    exempt_ids: TokenIds = ()
    exempt_mask: TokenMask = None
    anchors: Annotated[Sequence[Sequence[int]], check_anchors] = ()
    token_counts: Sequence[int] | torch.Tensor | Path | str | None = None
    rare_below: Count = 0
    protect_first: Count = 4
    protect_last: Count = 1
    rule: Literal["threshold", "capacity"] = "threshold"
    tau_fuse: Thresholds | None = "p15"
    fused_share: Share = 0.3
    criterion: Literal["l2", "relative", "cosine", "attention", "random"] = "l2"
    seed: Count = 0
    max_group: Annotated[int, at_least(2)] | None = None
    calibration: Calibration | Path | str | None = None
    start: Share = 0.4
    every: Count = 0
    first: Literal["halting", "fusion"] = "halting"
    merge: Literal["size", "mean", "attention"] = "size"
    proportional: bool = False
    attention_queries: Positive | None = 16
    attention_pool: Odd = 1
    tau_context: Thresholds | None = None
    context_window: Positive = 32
    tau_attention: Annotated[float, between(-1.0, 1.0)] | None = None
    decode_every: Count = 0
    lookahead: bool = False
    halts: ClassVar[bool] = False
    causal = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._counts = _counts(self.token_counts, self.rare_below)
        self._check_rule()
        kind: Any = self.criterion if self.criterion in DISTANCES else "l2"
        self._distance, self._context = NeighbourDistance(kind), ContextDivergence(kind, self.context_window)

    def _check_rule(self) -> None:
        if self.rule == "threshold":
            if self.tau_fuse is None:
                raise ConfigError("rule='threshold' needs tau_fuse: a number, one per layer, or a percentile such as 'p15'.")
            if self.criterion not in DISTANCES and is_percentile(self.tau_fuse):
                given = f"criterion={self.criterion!r} has no percentile tau_fuse={self.tau_fuse!r}"
                raise ConfigError(f"{given}: give a number, or rule='capacity'.")
        if self.tau_attention is not None and (self.rule == "capacity" or self.criterion not in DISTANCES):
            adds = f"tau_attention={self.tau_attention!r} adds pairs that are closer than tau_fuse"
            given = f"has no meaning with rule={self.rule!r} and criterion={self.criterion!r}"
            raise ConfigError(f"{adds}, and {given}: give rule='threshold' and a distance, or leave it out.")
        if self.max_group is not None and self.rule == "capacity" and self.fused_share > 1 - 1 / self.max_group:
            raise ConfigError(f"fused_share={self.fused_share!r} cannot be reached with max_group={self.max_group}: fuse less.")

    @property
    def priority(self) -> int:  # type: ignore[override]
        """Before halting (10), or after KV skipping (20), which acts on what has just halted."""
        return 30 if self.first == "halting" else 5

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

    def compared(self) -> list[tuple[Signal, Thresholds | None]]:
        return [(self._context, self.tau_context), (self._distance, self.tau_fuse if self.rule == "threshold" else None)]

    def bind(self, architecture: Architecture) -> None:
        check_known_ids("exempt_ids", self.exempt_ids, architecture.vocab_size)
        for i, anchor in enumerate(self.anchors):
            check_known_ids(f"anchors[{i}]", anchor, architecture.vocab_size)
        n_layers = architecture.n_layers
        first = layer_to_act("start", self.start, n_layers, "fuse")
        self.layers = tuple(range(first, n_layers - 1, self.every)) if self.every else (first,)
        self._architecture = architecture
        (context, tau_context), (distance, tau_fuse) = self.compared()
        self._tau_fuse = self.resolved("tau_fuse", tau_fuse, architecture, distance.key)
        self._tau_context = self.resolved("tau_context", tau_context, architecture, context.key)

    def acts_at(self, layer: int) -> bool:
        return layer in self.layers

    def wants_attention(self, layer: int) -> bool:
        return "attention" in (self.merge, self.criterion) and self.acts_at(layer)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        if view.slots.shape[1] < 2:
            return
        if self.max_group is not None and view.is_prompt and self.max_group > (longest := int(view.n_tokens.max())):
            larger = f"max_group={self.max_group} is larger than the prompt of {longest} tokens"
            raise ConfigError(f"{larger}: give at most {longest}, or null.")
        exempt = self.exempt(view)
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

    def exempt(self, view: LayerView) -> torch.Tensor:
        """(B, M) bool: never fused."""
        exempt = marked(view, "exempt", self.exempt_ids, self.exempt_mask, Ends(self.protect_first, self.protect_last))
        if not self.anchors and self._counts is None:
            return exempt
        if view.input_ids is None or view.pass_ids is None:
            raise ConfigError("anchors and token_counts select by token id: give the model input_ids, or use exempt_mask.")
        if self.anchors:
            exempt |= occurrences(view.pass_ids, self.anchors).gather(1, view.index)
        if self._counts is not None:
            if (found := len(self._counts)) < (needed := self._architecture.vocab_size):
                raise ConfigError(f"token_counts has {found} numbers for {needed} tokens: give one each.")
            exempt |= self._counts.to(view.input_ids.device)[view.input_ids] < self.rare_below
        return exempt

    def _distances(
        self, view: LayerView, tokens: TokenState, received: torch.Tensor | None, neighbour: torch.Tensor
    ) -> torch.Tensor:
        """Of each token and its left neighbour: (B, M)."""
        if self.criterion != "attention":
            return Random(self.seed)(view, tokens) if self.criterion == "random" else self._distance(view, tokens)
        assert received is not None
        if self.attention_pool > 1:
            received = pooled(received, tokens.active, self.attention_pool)
        if self.attention_queries is not None:
            received = without_observers(received, tokens, self.attention_queries)
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
        free = view.present & (view.slots >= view.n_seen - view.n_new) & (view.slots < view.n_seen - self.protect_last)
        free &= view.slots >= self.protect_first
        last = torch.where(view.present, own_columns(view.slots), -1).cummax(1).values
        before = F.pad(last[:, :-1], (1, 0), value=-1)
        eligible = free & (before >= 0)
        before = before.clamp(min=0)
        # An entry is beside another only if no halted or skipped token lies between them.
        beside = view.slots - view.slots.gather(1, before) == view.size.long()
        eligible &= beside & free.gather(1, before)
        if self.criterion == "random":
            distance = slot_draw(self.seed, view.layer, view.slots)
        else:
            keys = view.keys.transpose(1, 2).flatten(2)  # (B, K, H_kv · head_dim)
            there = keys.gather(1, before[..., None].expand_as(keys))
            distance = distance_between(keys, there, self._distance.kind)
        k = share_of(torch.full_like(view.n_seen, view.n_new), self.fused_share)
        return group_closest(distance.masked_fill(~eligible, math.inf), view.present, view.size, self.max_group, k)
