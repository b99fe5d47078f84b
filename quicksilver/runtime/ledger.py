"""What a run cost, computed from the shapes of what ran and from its trace: three FLOP ledgers (docs/design.md §5).

A multiply-accumulate counts two. Matrix products and attention are counted; norms, activations and other elementwise work are not, in
none of the ledgers. `executed` equals an interposed count of the same run (`quicksilver.measure.flops`) within 1%.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from quicksilver.runtime.pass_state import MISSING_KV
from quicksilver.runtime.trace import PassTrace
from quicksilver.runtime.visibility import Span

if TYPE_CHECKING:
    from quicksilver.runtime.architecture import Architecture


# What a token's layer costs at a width, relative to 16 bits. β = bits/16 in the L/2 layers after half depth saves 25% at a uniform 8
# bits; Table 3 says 26.4%, which is 19 of the 36 layers of gpt2-large (19/36 · 1/2). App. J itself says {1.0, 0.5, 0.25}, "normalised to
# 8-bit": with it 8 bits save nothing (docs/conflicts.md #22).
BETA: Mapping[int, float] = {16: 1.0, 8: 0.5, 4: 0.25, 2: 0.125}
BETA_APP_J: Mapping[int, float] = {16: 1.0, 8: 1.0, 4: 0.5, 2: 0.25}


PREDICT = MISSING_KV.index("predict")


@dataclass(frozen=True)
class Flops:
    """Floating-point operations.

    Attributes:
        executed: what ran, padding of uneven rows and signals included.
        nominal: the dense formula on active tokens and present keys: what a perfect implementation would run; no signals.
        paper: App. J, Σ β · (4d² + 8d² + 2h(d + h log N)) over active tokens, for comparison with the paper's numbers only
            (docs/conflicts.md #21, #22). The only ledger in which a bit-width saves anything: in the others an integer product counts
            as many operations as a float one. It knows no maps: an MLP is charged where one stands in for it.
        signals: the part of `executed` spent on deciding (logit lens, attention probes).
        skippable: what a transform took off `nominal`: products that ran although one factor is zero.
        dense_nominal, dense_paper: the same formulas with every token that the model was given (a truncated prompt: what is left) active in
            every layer.
    """

    executed: int = 0
    nominal: int = 0
    paper: int = 0
    signals: int = 0
    dense_nominal: int = 0
    dense_paper: int = 0
    skippable: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Flops) -> Flops:
        return Flops(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class LayerWork:
    """One call of one layer: `tokens` through it in each of `batch` rows (padding included), `keys` attended (None: causal among
    themselves), `projected` further tokens a row whose K/V alone were computed, `translation_flops` a row to predict the K/V of later
    layers; `mapped` of the tokens without their MLP, and `map_flops` a row for what stands in for it."""

    batch: int
    tokens: int
    keys: int | None
    projected: int = 0
    translation_flops: int = 0
    mapped: int = 0
    map_flops: int = 0

    def flops(self, arch: Architecture, causal_block: int = 1) -> int:
        pairs = _causal_pairs(self.tokens, causal_block) if self.keys is None else self.tokens * self.keys
        linear = 2 * arch.linear_params_per_layer * self.tokens + 2 * arch.projection_params_per_layer * self.projected
        if self.mapped or self.map_flops:
            linear += self.map_flops - 2 * arch.mlp_params_per_layer * self.mapped
        return self.batch * (linear + self.translation_flops // arch.shares + 4 * arch.n_heads * arch.head_dim * pairs)


@dataclass
class PassWork:
    """What one pass ran; filled by the run with host-side integers only.

    Attributes:
        signal_flops: spent on deciding, by all ranks together; signal_flops_of_rank: by this process.
        causal_block: queries of a causal product that visit as many keys as the last of them (Architecture.causal_block).
    """

    layers: list[LayerWork]
    signal_flops: int = 0
    signal_flops_of_rank: int = 0
    causal_block: int = 1
    translation_flops_per_token: Mapping[int, int] = field(default_factory=dict)  # by source layer of the translators
    map_flops_per_token: Mapping[int, int] = field(default_factory=dict)  # of what stands in for an MLP, by layer
    past_real: torch.Tensor | int | None = None  # (B,) long, real tokens before the pass, or of all rows; None: every column seen
    past_lengths: list[torch.Tensor | int] | None = None  # entries cached before the pass, by layer: (B,) long, or of all rows

    def executed(self, arch: Architecture) -> int:
        """By all ranks together."""
        return sum(w.flops(arch, self.causal_block) for w in self.layers) + self.signal_flops

    def executed_by_rank(self, arch: Architecture) -> int:
        """By this process."""
        return sum(w.flops(arch.of_rank, self.causal_block) for w in self.layers) + self.signal_flops_of_rank


def head_flops(arch: Architecture, tokens: int) -> Flops:
    """The output head on `tokens` tokens; it is not in the paper's formula."""
    flops = 2 * arch.vocab_size * arch.width * tokens
    return Flops(executed=flops, nominal=flops, dense_nominal=flops)


def pass_flops(arch: Architecture, work: PassWork, trace: PassTrace, beta: Mapping[int, float] = BETA) -> Flops:
    """The ledgers of one pass, without the output head; `beta` is what the paper's charges a token by its width."""
    valid, decided = trace.valid, trace.decided
    before = trace.first_column if work.past_real is None else work.past_real
    past_real = torch.as_tensor(before, device=valid.device).expand(valid.shape[0])
    in_pass = valid.long().cumsum(1)  # (B, N), tokens of the pass up to each
    slots = past_real[:, None] + in_pass - 1

    def visible_pairs(spans: Sequence[Span], queries: torch.Tensor, keys: torch.Tensor, past: torch.Tensor) -> int:
        """Query-key pairs that attention must evaluate: queries, keys (B, N) bool, past (B,) long, entries before the pass.

        The trace does not say which slots those entries have: as many of them are counted as a span may see.
        """
        earlier = past[:, None].expand_as(slots)
        if not spans:
            seen = keys.long().cumsum(1) if arch.causal else keys.sum(1, keepdim=True).expand_as(keys)
            return int((seen + earlier)[queries].sum())
        # Keys among the first 0, 1, … N tokens of a row's pass: (B, N + 1).
        among = torch.zeros_like(slots).scatter_add(1, (in_pass - 1).clamp(min=0), keys.long()).cumsum(1)
        among = torch.cat([torch.zeros_like(among[:, :1]), among], dim=1)
        end = in_pass if arch.causal else in_pass[:, -1:].expand_as(in_pass)
        before = past_real[:, None]
        oldest = recent = sinks = torch.zeros_like(slots)  # slots are seen from `recent` on, and from `oldest` to `sinks`
        for span in spans:
            first = (slots + 1 - span.window).clamp(min=0)
            recent = recent.maximum(first)
            if span.sinks:
                sinks = torch.full_like(slots, span.sinks)
            else:
                oldest = oldest.maximum(first)
        sinks = sinks.minimum(recent)
        oldest = oldest.minimum(sinks)
        upto_oldest, upto_recent, upto_sinks = (among.gather(1, (slot - before).clamp(min=0)) for slot in (oldest, recent, sinks))
        seen = among.gather(1, end) - upto_recent + upto_sinks - upto_oldest
        earlier = earlier.minimum((before - recent).clamp(min=0) + sinks.minimum(before) - oldest.minimum(before))
        return int((seen + earlier)[queries].sum())

    def of_layer(layer: int, own: list[Span], spans: list[Span], cached: torch.Tensor | int) -> tuple[int, int, float, float]:
        """Nominal, the same of the dense model, the paper's, the same of the dense model."""
        active, present = trace.active(layer), trace.kv_present(layer)
        past = torch.as_tensor(cached, device=valid.device).expand(valid.shape[0])
        predicted = (trace.halted_kv == PREDICT) & (trace.halt_layer == layer - 1)
        projected = present & ~active & ((trace.halted_kv == MISSING_KV.index("project")) | predicted)
        nominal = work.translation_flops_per_token.get(layer, 0) * int((projected & (trace.halted_kv == PREDICT)).sum())
        nominal += 2 * arch.linear_params_per_layer * int(active.sum()) + 2 * arch.kv_params_per_layer * int(projected.sum())
        if layer in work.map_flops_per_token:
            saved = 2 * arch.mlp_params_per_layer - work.map_flops_per_token[layer]
            nominal -= saved * sum(int((active & mapping.tokens).sum()) for mapping in trace.mappings)
        nominal += 4 * arch.n_heads * arch.head_dim * visible_pairs(spans, active, present, past)
        dense = 4 * arch.n_heads * arch.head_dim * visible_pairs(own, valid, valid, past_real)
        dense += 2 * arch.dense_linear_params_per_layer * int(valid.sum())
        charge = _charge(trace.bits(layer), beta) if trace.precisions else None
        return nominal, dense, _paper_layer(arch, active, past, charge), _paper_layer(arch, valid, past_real)

    totals: list[Any] = [0, 0, 0.0, 0.0]
    alike: dict[tuple[object, ...], tuple[int, int, float, float]] = {}  # where nothing was decided, layers cost the same
    for layer, span in enumerate(arch.spans):
        own = [] if (window := arch.attention_window(layer)) is None else [Span(window)]
        cached = work.past_lengths[layer] if work.past_lengths else 0
        key = (*own, span, cached if isinstance(cached, int) else tuple(cached.tolist()))
        if decided or key not in alike:
            alike[key] = of_layer(layer, own, own if span is None else [*own, span], cached)
        totals = [total + more for total, more in zip(totals, alike[key], strict=True)]
    nominal, dense_nominal, paper, dense_paper = totals
    return Flops(work.executed(arch), nominal, round(paper), work.signal_flops, dense_nominal, round(dense_paper))


def _causal_pairs(tokens: int, block: int) -> int:
    """Query-key pairs that are visited where each block of queries visits the keys up to its last query."""
    whole, rest = divmod(tokens, block)
    return block * block * whole * (whole + 1) // 2 + rest * tokens


def _charge(bits: torch.Tensor, beta: Mapping[int, float]) -> torch.Tensor:
    """β of each token: bits (B, N) uint8 -> (B, N) float64."""
    charge = torch.ones(bits.shape, dtype=torch.float64, device=bits.device)
    for width, factor in beta.items():
        charge[bits == width] = factor
    return charge


def _paper_layer(arch: Architecture, active: torch.Tensor, past: torch.Tensor, charge: torch.Tensor | None = None) -> float:
    """App. J for one layer: 4Nd² + 2Nh(d + h log N) + 8Nd², N the active tokens of a sequence, natural logarithm.

    `charge` (B, N): β of each token (K, "Quantization-Aware FLOP Scaling"); None: 1.
    """
    d, h = arch.width, arch.n_heads
    total = 0.0
    charged = active.sum(1) if charge is None else (charge * active).sum(1)
    for n, paid, before in zip(active.sum(1).tolist(), charged.tolist(), past.tolist(), strict=True):
        if n:
            total += paid * (12 * d * d + 2 * h * (d + h * math.log(n + before)))
    return total
