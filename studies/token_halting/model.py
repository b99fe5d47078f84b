"""The detector: pillars embedded one by one, a transformer encoder among them, one linear head on each."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from .encoder import Encoder, EncoderConfig, EncoderLayer
from .pillars import N_FEATURES, N_MEASURED, N_OUTPUTS, N_WAVES
from .scenes import CLASSES

RARE = -math.log(99)  # heat of one in a hundred: the focal loss starts from few centres


class PillarDetector(PreTrainedModel):
    """Features of pillars (B, N, F) -> outputs (B, N, C + 6): heat logits by class, then the regressed box (`pillars.N_REGRESSED`).

    The head looks at one pillar alone. What a centre must know of its neighbours has to come through the encoder's attention.
    """

    config_class = EncoderConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True

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

    def _init_weights(self, module: nn.Module) -> None:
        """torch's own initialisation stays."""

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(inputs_embeds=self.embed(features) + self.place(features[..., N_MEASURED:])).last_hidden_state
        return self.head(self.encoder.norm(hidden))


def detector(width: int, layers: int, heads: int, seed: int) -> PillarDetector:
    """A fresh one, drawn by `seed`; the feed-forward part is twice as wide."""
    torch.manual_seed(seed)
    config = EncoderConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=2 * width,
    )
    return PillarDetector(config).eval()
