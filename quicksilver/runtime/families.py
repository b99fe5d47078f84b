"""Families near Llama's: norms behind the sublayers instead of before them, fused projections, caps on scores.

`architecture_of` finds them by their `model_types`, like every subclass of `Architecture`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.nn import functional

from quicksilver.runtime.architecture import LlamaArchitecture, Rotary
from quicksilver.runtime.errors import UnsupportedModelError
from quicksilver.runtime.placement import weights_present

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Olmo2Architecture(LlamaArchitecture):
    """OLMo 2: no norm before attention but behind it; q and k are normed over all heads together."""

    family = "olmo2"
    model_types: ClassVar[tuple[str, ...]] = ("olmo2",)

    def input_norm(self, layer: int) -> nn.Module:
        return nn.Identity()

    def normalised_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()

    def project_kv(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self._layer(layer).self_attn
        keys = self._heads(attention.k_norm(attention.k_proj(hidden)))
        return self._rotate(layer, keys, rotary), self._heads(attention.v_proj(hidden))

    def project_q(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        attention = self._layer(layer).self_attn
        return self._rotate(layer, self._heads(attention.q_norm(attention.q_proj(hidden))), rotary)

    def residual_readers(self, layer: int) -> NoReturn:
        _refuse_rotation(self.family)


class Phi3Architecture(LlamaArchitecture):
    """Phi-3 and Phi-4: q, k and v in one projection, in that order; rotary on the first part of each head where it is partial."""

    family = "phi3"
    model_types: ClassVar[tuple[str, ...]] = ("phi3",)

    def _rows(self, layer: int, hidden: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the fused projection's weight, which is (out, in)."""
        normed, fused = self.input_norm(layer)(hidden), self._layer(layer).self_attn.qkv_proj
        with weights_present(fused):
            return functional.linear(normed, fused.weight[start:stop])

    def _rotate(self, layer: int, states: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_leading_rotary

        return states if rotary is None else apply_leading_rotary(states, states, *rotary)[0]

    def project_kv(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        first, each = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        keys, values = self._rows(layer, hidden, first, first + 2 * each).split(each, dim=-1)
        return self._rotate(layer, self._heads(keys), rotary), self._heads(values)

    def project_q(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        return self._rotate(layer, self._heads(self._rows(layer, hidden, 0, self.n_heads * self.head_dim)), rotary)

    def attention_window(self, layer: int) -> int | None:
        return self.config.sliding_window

    def residual_readers(self, layer: int) -> list[tuple[nn.Module, list[nn.Module]]]:
        block: Any = self._layer(layer)
        return [(block.input_layernorm, [block.self_attn.qkv_proj]), (block.post_attention_layernorm, [block.mlp.gate_up_proj])]


class GemmaArchitecture(LlamaArchitecture):
    """Gemma 2 and 3: norms before and behind each sublayer, gains counted from one, sliding and full layers in turn.

    Gemma 2 caps the scores of attention and the logits by tanh (arXiv 2408.00118); Gemma 3 norms q and k, and has rotary factors for
    sliding and others for full layers, which each layer is handed by the model.

    Raises:
        UnsupportedModelError: attention that looks ahead (embedding models), or a cap that sdpa would leave out.
    """

    family = "gemma"
    model_types: ClassVar[tuple[str, ...]] = ("gemma2", "gemma3_text")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if getattr(self.config, "use_bidirectional_attention", None):
            raise UnsupportedModelError(
                "This Gemma attends to what follows (use_bidirectional_attention): it is no causal model."
            )
        if self.score_cap(0) is not None and self.attention_implementation != "eager":
            raise UnsupportedModelError(
                f"attn_implementation={self.attention_implementation!r} leaves out the cap that this Gemma puts on the scores of its "
                "attention: load it with attn_implementation='eager' (model.attn_implementation=eager)."
            )

    def normalised_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden.float(), (self.width,), eps=self.input_norm(layer).eps)  # type: ignore[arg-type]

    def residual_readers(self, layer: int) -> NoReturn:
        _refuse_rotation(self.family)

    def score_cap(self, layer: int) -> float | None:
        return getattr(self.attention(layer), "attn_logit_softcapping", None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = super().logits(hidden), getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _refuse_rotation(family: str) -> NoReturn:
    raise UnsupportedModelError(
        f"The residual stream of {family} cannot be rotated: a norm stands between its sublayers and the stream. "
        "Leave channel_sparsity out."
    )
