"""The smallest model with a bidirectional encoder, random."""

import torch
from tiny import LAYERS, WIDTH
from torch import nn
from transformers import PreTrainedModel

from quicksilver.studies.token_halting.model import Encoder, EncoderConfig


class Tagger(PreTrainedModel):
    """The smallest model with an encoder: a label for every token."""

    config_class = EncoderConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.head = nn.Linear(config.hidden_size, 5)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.encoder.norm(self.encoder(inputs_embeds=states, attention_mask=attention_mask).last_hidden_state))


torch.manual_seed(0)
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 40}
MODEL = Tagger(EncoderConfig(**SIZES, attn_implementation="sdpa")).eval()


def states(rows: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, n, WIDTH, generator=torch.Generator().manual_seed(seed))
