"""The detector: pillars embedded one by one, a bidirectional transformer encoder among them, one linear head on each; and the encoder's adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quicksilver.runtime.architecture import Architecture, Rotary
from quicksilver.runtime.errors import ConfigError, UnsupportedModelError

from .pillars import N_FEATURES, N_MEASURED, N_OUTPUTS, N_WAVES
from .scenes import CLASSES

RARE = -math.log(99)  # heat of one in a hundred: the focal loss starts from few centres


class EncoderConfig(PreTrainedConfig):
    """Shape of an encoder: `hidden_size` D, `num_hidden_layers`, `num_attention_heads`, `intermediate_size` of the feed-forward part."""

    model_type = "torch_encoder"
    hidden_size: int = 32
    num_hidden_layers: int = 4
    num_attention_heads: int = 2
    intermediate_size: int = 64


class EncoderAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention`'s weights behind transformers' attention functions, K and V handed to a port first where there is one."""

    is_causal = False
    num_key_value_groups = 1

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads, batch_first=True)
        self.config = config
        self.scaling = self.head_dim**-0.5

    def heads(self, hidden: torch.Tensor, first: int, n: int) -> list[torch.Tensor]:
        """`n` of the projections q, k, v from the `first` on: hidden (B, M, D) -> n of (B, H, M, head_dim)."""
        rows = slice(first * self.embed_dim, (first + n) * self.embed_dim)
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        projected = nn.functional.linear(hidden, self.in_proj_weight[rows], bias)
        parts = projected.view(*hidden.shape[:-1], n, self.num_heads, self.head_dim).unbind(-3)
        return [part.transpose(1, 2) for part in parts]

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_values: Any = None
    ) -> torch.Tensor:
        query, key, value = self.heads(hidden, 0, 3)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        attended, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.out_proj(attended.reshape(*hidden.shape[:2], self.embed_dim))


class EncoderLayer(nn.TransformerEncoderLayer):
    """`nn.TransformerEncoderLayer` with the norm first and GELU, called as a decoder layer is: its weights are that layer's, name by
    name."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(
            config.hidden_size, config.num_attention_heads, config.intermediate_size, dropout=0.0, activation="gelu",
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.self_attn: EncoderAttention = EncoderAttention(config)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_values: Any = None
    ) -> torch.Tensor:
        """hidden_states (B, M, D) -> (B, M, D); attention_mask (B, 1, M, K), bool or additive."""
        hidden = hidden_states + self.self_attn(self.norm1(hidden_states), attention_mask, past_key_values)
        return hidden + self.linear2(self.activation(self.linear1(self.norm2(hidden))))


class _AsTorchDrawsIt(PreTrainedModel):
    config_class = EncoderConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """torch's own initialisation stays."""


class Encoder(_AsTorchDrawsIt):
    """A stack of `EncoderLayer`s."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None = None) -> BaseModelOutput:
        """inputs_embeds (B, N, D), attention_mask (B, N) of 1 for tokens and 0 for padding -> last_hidden_state (B, N, D), before the
        final norm: who reads it may have to know which states are frozen.

        Raises:
            ConfigError: a mask that is no padding mask of these tokens.
        """
        hidden, mask = inputs_embeds, attention_mask
        if mask is not None:
            if mask.shape != hidden.shape[:2]:
                raise ConfigError(f"attention_mask has shape {tuple(mask.shape)}; give (B, N) = {tuple(hidden.shape[:2])}.")
            mask = mask.bool()[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask)
        return BaseModelOutput(last_hidden_state=hidden)


class EncoderArchitecture(Architecture):
    """A model whose `encoder` is an `Encoder` and whose output head is one linear map of its normed states.

    Raises:
        UnsupportedModelError: a base model that is no `Encoder`, attention other than sdpa.
    """

    family = "torch_encoder"
    model_types: ClassVar[tuple[str, ...]] = ("torch_encoder",)
    causal = False

    def __init__(self, model: PreTrainedModel) -> None:
        if not isinstance(model.base_model, Encoder):
            raise UnsupportedModelError(f"{type(model).__name__} has no encoder of the token-halting study as its base model.")
        super().__init__(model)
        if self.attention_implementation != "sdpa":
            raise UnsupportedModelError(
                f"attn_implementation={self.attention_implementation!r}: a torch_encoder has 'sdpa' alone; leave it out of the config."
            )
        # The fused projection of nn.MultiheadAttention is a bare parameter, which no nn.Linear holds.
        self.linear_params_per_layer += self._layer(0).self_attn.in_proj_weight.numel()

    def _find_layers(self) -> nn.ModuleList:
        return self.base.layers

    @property
    def final_norm(self) -> nn.Module:
        return self.base.norm

    def attention(self, layer: int) -> nn.Module:
        return self._layer(layer).self_attn

    def mlp(self, layer: int) -> NoReturn:
        raise UnsupportedModelError(
            "A torch encoder layer has no module that is its feed-forward part: linear1 and linear2 lie in the layer."
        )

    def input_norm(self, layer: int) -> nn.Module:
        return self._layer(layer).norm1

    @property
    def embeddings(self) -> list[nn.Module]:
        return []

    def residual_readers(self, layer: int) -> NoReturn:
        raise UnsupportedModelError(
            "The residual stream of torch_encoder cannot be rotated: its norms take the mean off. Leave channel_sparsity out."
        )

    def residual_writers(self, layer: int) -> list[nn.Module]:
        return [self._layer(layer).self_attn.out_proj, self._layer(layer).linear2]

    def project_kv(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._layer(layer).self_attn.heads(self.input_norm(layer)(hidden), 1, 2)
        return keys, values

    def project_q(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        return self._layer(layer).self_attn.heads(self.input_norm(layer)(hidden), 0, 1)[0]


class PillarDetector(_AsTorchDrawsIt):
    """Features of pillars (B, N, F) -> outputs (B, N, C + 6): heat logits by class, then the regressed box (`pillars.N_REGRESSED`).

    The head looks at one pillar alone. What a centre must know of its neighbours has to come through the encoder's attention.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed = nn.Sequential(nn.Linear(N_FEATURES, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.place = nn.Linear(N_WAVES, width, bias=False)
        self.encoder = Encoder(config)
        self.head = nn.Linear(width, N_OUTPUTS)
        with torch.no_grad():
            self.head.bias[: len(CLASSES)] = RARE
            for layer in self.encoder.layers:  # keys start as queries: a pillar looks at its like, and at its neighbours
                fused = cast(EncoderLayer, layer).self_attn.in_proj_weight
                fused[width : 2 * width] = fused[:width]
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    @property
    def shape(self) -> Shape:
        return Shape(self.config.hidden_size, self.config.num_hidden_layers, self.config.num_attention_heads)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(inputs_embeds=self.embed(features) + self.place(features[..., N_MEASURED:])).last_hidden_state
        return self.head(self.encoder.norm(hidden))


@dataclass(frozen=True)
class Shape:
    """Of a detector."""

    width: int = 48
    layers: int = 4
    heads: int = 3

    def config(self) -> EncoderConfig:
        """The feed-forward part is twice as wide."""
        return EncoderConfig(
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=2 * self.width,
        )


def detector(shape: Shape, seed: int) -> PillarDetector:
    """A fresh one, drawn by `seed`."""
    torch.manual_seed(seed)
    return PillarDetector(shape.config()).eval()
