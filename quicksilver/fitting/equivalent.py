"""A forward pass that gives what the halted one gives and can be differentiated by which tokens halt (Ye et al., arXiv 2303.05078).

Halting is a step: its derivative is zero or does not exist. The pass here computes every token in every layer and multiplies by what is
left of it, the keep mask m^ℓ = m^{ℓ−1} · g^ℓ (B, N):

    attention weights   m_j e^{s_ij} / Σ_k m_k e^{s_ik}      a halted token is not attended to
    states              h_i + m_i · (layer(h)_i − h_i)       a halted token stays as it is

With m in {0, 1} the values are those of the run that drops halted tokens; a gate g that is 0 or 1 in value and has a derivative gives every
decision a pseudo-gradient. Where the K/V of halted tokens are predicted they stay in sight, and later layers see

    K, V                     g_j (own K, V)_j + (1 − g_j) (predicted K, V)_j

Only the abstract and the introduction of the paper are at hand: the formulas are a reconstruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.block_attention import attention_function, register, sdpa
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.placement import replaced
from quicksilver.runtime.translation import KVTranslator, PredictedKV

_NAME = "quicksilver_keep"
_LEAST = 0.05  # of a query's attention
_WIDER = 8  # columns, of which one is used: kernels like widths that are multiples of eight
Derivative = Literal["both", "states", "attention"]
KV = tuple[torch.Tensor, torch.Tensor]
Gate = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]


@dataclass
class KeepMask:
    """What is left of each token, layer by layer.

    Attributes:
        current: m after the newest gate; seen: the same, but 1 for tokens whose K/V are predicted; in_attention: as the layer under way
            weighs keys. None: everything is left.
        predicted: what the layer under way mixes in: g (B, N), with K and V (B, H_kv, N, head_dim), in order of their gates.
        kept: (B, N) by layer: m entering the layer.
    """

    current: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    in_attention: torch.Tensor | None = None
    predicted: list[tuple[torch.Tensor, KV]] = field(default_factory=list)
    kept: list[torch.Tensor | None] = field(default_factory=list)


_MASK: ContextVar[KeepMask] = ContextVar("keep_mask")  # of the forward under way


@contextmanager
def equivalent_forward(
    model: PreTrainedModel, gate: Gate, derivative: Derivative = "both", translators: Mapping[int, KVTranslator] | None = None
) -> Iterator[KeepMask]:
    """For the length of the context the model's forward is the equivalent one.

    Args:
        model: of a known family, with sdpa attention; called without cache and without padding.
        gate: called after each layer but the last with its index, its states (B, N, D) and m (B, N) so far; returns g (B, N), or None
            where nothing halts. Values other than 0 and 1 are a soft mask.
        translators: by the layer that a gate stands after: what predicts the K/V of those that halt there. Other gates drop.
        derivative: through what a gate's derivative flows: `both` places where m stands, the `states` or the `attention` weights alone.

    Yields:
        The masks of the newest forward.

    Raises:
        UnsupportedModelError: no adapter for the model's family.
        ConfigError: while it runs, a gate that drops behind one that predicts.
    """
    arch = architecture_of(model)
    mask = KeepMask()
    predicting = dict(translators or {})
    stopped: list[tuple[torch.Tensor, PredictedKV]] = []  # g, and what is predicted

    def wrap(index: int, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if index == 0:
                mask.current, mask.seen, mask.kept = None, None, []
                stopped.clear()
            mask.kept.append(mask.current)
            mask.in_attention = mask.seen.detach() if mask.seen is not None and derivative == "states" else mask.seen
            rotary = kwargs.get("position_embeddings")
            mask.predicted = [
                (g.detach() if derivative == "states" else g, (arch.rotate_keys(index, keys, rotary), values))
                for g, (keys, values) in ((g, by_layer[index]) for g, by_layer in stopped if index in by_layer)
            ]
            after = original(hidden, *args, **kwargs)
            if mask.current is not None:
                m = mask.current.detach() if derivative == "attention" else mask.current
                after = hidden + m[..., None] * (after - hidden)
            if index == arch.n_layers - 1:
                return after
            everything = torch.ones(after.shape[:2], dtype=after.dtype, device=after.device)
            g = gate(index, after, everything if mask.current is None else mask.current)
            if g is None:
                return after
            mask.current = g if mask.current is None else mask.current * g
            if index in predicting:
                stopped.append((g, predicting[index].translate(after)))
            elif stopped:
                raise ConfigError(f"The gate after layer {index} drops tokens behind one that predicts K/V: drop first.")
            else:
                mask.seen = mask.current
            return after

        return forward

    with ExitStack() as stack:
        stack.callback(_MASK.reset, _MASK.set(mask))
        for index, layer in enumerate(arch.layers):
            stack.enter_context(replaced(layer, forward=wrap(index, layer.forward)))
        stack.enter_context(attention_function(model, _NAME))
        yield mask


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Σ_j m_j e^{s_ij} v_j / Σ_k m_k e^{s_ik}, (B, M, H, head_dim), by the fused kernel: log m_j is added to scores, and the derivative by m,
    which is there where m = 0, too, comes from `_slope`."""
    mask = _MASK.get()
    # The first gate that halts a token says what is seen.
    for g, (keys, values) in reversed(mask.predicted):
        own = g[:, None, :, None]
        key, value = own * key + (1 - own) * keys, own * value + (1 - own) * values
    if (m := mask.in_attention) is None:
        return sdpa(module, query, key, value, attention_mask, **options)
    scores = _visible(module, query, key, attention_mask) + m.detach().clamp(min=0).log()[:, None, None, :].to(query.dtype)
    blind = (scores == -torch.inf).all(-1, keepdim=True)  # (B, 1, M, 1)
    attended, _ = sdpa(module, query, key, value, scores.masked_fill(blind, 0.0), **options)
    # A query that sees no key gets nothing, as from the kernel that masks.
    attended = attended.masked_fill(blind.transpose(1, 2), 0.0)
    if not m.requires_grad:
        return attended, None
    slope = _slope(m, attended.detach(), (module, query.detach(), key.detach(), value.detach(), attention_mask), options)
    return attended + (slope - slope.detach()), None


def _visible(module: nn.Module, query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """What is added to scores, 0 or −∞: (1 or B, 1, M, N)."""
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        return attention_mask
    shape = (query.shape[2], key.shape[2])
    if attention_mask is None:
        seen = torch.ones(shape, dtype=torch.bool, device=query.device)
        attention_mask = (seen.tril() if getattr(module, "is_causal", True) else seen)[None, None]
    return torch.zeros(attention_mask.shape, dtype=query.dtype, device=query.device).masked_fill(~attention_mask, -torch.inf)


def _slope(m: torch.Tensor, attended: torch.Tensor, inputs: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """What has the derivative of attention by m and no other: with plain weights a_ij, that is a_ij (v_j − out_i) / Σ_k a_ik m_k.

    One call of the fused kernel: Σ a_ij m_j v_j, and Σ a_ij m_j as one more column of values. A query whose attention is nearly all on halted
    tokens would have slopes of hundreds of thousands, layer upon layer, for a change of no more than v_j − out_i. So the share of attention
    that is left is taken as `_LEAST` where it is less.
    """
    module, query, key, value, attention_mask = inputs
    width = value.shape[-1]
    # The kernel wants q and k as wide as v: zeros say nothing to a score.
    query, key = (nn.functional.pad(part, (0, _WIDER)) for part in (query, key))
    weight = m[:, None, :, None]
    column = nn.functional.pad(weight.expand(*value.shape[:3], 1), (0, _WIDER - 1))
    values = torch.cat([value * weight, column], dim=-1)
    both, _ = sdpa(module, query, key, values, attention_mask, **options)
    left = both[..., width : width + 1]
    return (both[..., :width] - attended * left) / left.detach().clamp(min=_LEAST)


register(_NAME, _attend)
