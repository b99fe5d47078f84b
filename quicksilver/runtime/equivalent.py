"""A forward pass that gives what the halted one gives and can be differentiated by who halts (Ye et al., arXiv 2303.05078).

Halting is a step: its derivative is zero or does not exist. The pass here computes every token in every layer and multiplies by what is
left of it, the keep mask m^ℓ = m^{ℓ−1} · g^ℓ (B, N):

    attention weights   m_j e^{s_ij} / Σ_k m_k e^{s_ik}      a halted token is not attended to
    states              h_i + m_i · (layer(h)_i − h_i)       a halted token stays as it is

With m in {0, 1} the values are those of the run that drops halted tokens; a gate g that is 0 or 1 in value and has a derivative gives every
decision a pseudo-gradient. Only the abstract and the introduction of the paper are at hand: the formulas are a reconstruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quicksilver.runtime.architecture import architecture_of

_NAME = "quicksilver_keep"
_WIDER = 8  # columns, of which one is used: kernels like widths that are multiples of eight
Derivative = Literal["both", "states", "attention"]
Gate = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]


class KeepMask:
    """What is left of each token, layer by layer.

    Attributes:
        current: m after the newest gate; in_attention: as the layer under way weighs keys. None: everything is left.
        kept: (B, N) by layer: m entering the layer.
    """

    def __init__(self) -> None:
        self.current: torch.Tensor | None = None
        self.in_attention: torch.Tensor | None = None
        self.kept: list[torch.Tensor | None] = []


_MASK: ContextVar[KeepMask | None] = ContextVar("keep_mask", default=None)  # of the forward under way


@contextmanager
def equivalent_forward(model: PreTrainedModel, gate: Gate, derivative: Derivative = "both") -> Iterator[KeepMask]:
    """For the length of the context the model's forward is the equivalent one.

    Args:
        model: of a known family, with sdpa attention; called without cache and without padding.
        gate: called after each layer but the last with its index, its states (B, N, D) and m (B, N) so far; returns g (B, N), or None
            where nothing halts. Values other than 0 and 1 are a soft mask.
        derivative: through what a gate's derivative flows: `both` places where m stands, the `states` or the `attention` weights alone.

    Yields:
        The masks of the newest forward.

    Raises:
        UnsupportedModelError: no adapter for the model's family.
    """
    arch = architecture_of(model)
    mask = KeepMask()
    before = model.config._attn_implementation
    previous: list[Any] = []

    def wrap(index: int, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if index == 0:
                mask.current, mask.kept = None, []
            mask.kept.append(mask.current)
            mask.in_attention = mask.current.detach() if mask.current is not None and derivative == "states" else mask.current
            after = original(hidden, *args, **kwargs)
            if mask.current is not None:
                m = mask.current.detach() if derivative == "attention" else mask.current
                after = hidden + m[..., None] * (after - hidden)
            if index < arch.n_layers - 1:
                everything = torch.ones(after.shape[:2], dtype=after.dtype, device=after.device)
                g = gate(index, after, everything if mask.current is None else mask.current)
                if g is not None:
                    mask.current = g if mask.current is None else mask.current * g
            return after

        return forward

    token = _MASK.set(mask)
    try:
        for index, layer in enumerate(arch.layers):
            previous.append(layer.__dict__.get("forward"))
            layer.forward = wrap(index, layer.forward)
        _set_attention(model, _NAME)
        yield mask
    finally:
        _set_attention(model, before)
        for layer, kept in zip(arch.layers, previous, strict=False):
            if kept is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.forward = kept
        _MASK.reset(token)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Σ_j m_j e^{s_ij} v_j / Σ_k m_k e^{s_ik}, (B, M, H, head_dim), by the fused kernel.

    The softmax's own denominator cancels: with a_ij the plain weights this is Σ a_ij m_j v_j / Σ a_ij m_j, and the denominator is one
    more column of values. No score is −∞, so m = 0 has a derivative.
    """
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    mask = _MASK.get()
    if mask is None or mask.in_attention is None:
        return sdpa(module, query, key, value, attention_mask, **options)
    weight, width = mask.in_attention[:, None, :, None], value.shape[-1]
    # The kernel wants q and k as wide as v: zeros say nothing to a score.
    query, key = (nn.functional.pad(part, (0, _WIDER)) for part in (query, key))
    column = nn.functional.pad(weight.expand(*value.shape[:3], 1), (0, _WIDER - 1))
    both, _ = sdpa(module, query, key, torch.cat([value * weight, column], dim=-1), attention_mask, **options)
    # A query that sees nobody gets nothing, as from the kernel that masks.
    return both[..., :width] / both[..., width : width + 1].clamp(min=torch.finfo(both.dtype).tiny), None


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """transformers' own setter asks whether a kernel of that name can be downloaded."""
    model.config._attn_implementation_internal = name


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
# Without one of its own transformers hands no mask to an attention function, and a sliding window would see everything.
ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
