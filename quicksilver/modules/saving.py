"""Halting that saves a given share of a prompt's work, for any model: a share of tokens needs no threshold that fits the model.

The tokens of a prompt that get the least attention from its last ones leave after a fifth of the depth, in one shot: of the ways to thin a
prompt that were measured, the one that costs least on most models (the frontier figure). Generated tokens go through every layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from quicksilver.modules.checks import check_share
from quicksilver.modules.halting import Halting
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.run import apply

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIGNAL = {"name": "attention", "last_queries": 64, "pool": 9}  # pooled: what stands beside something looked at is needed with it
_TRIED = (0.3, 0.7)  # shares of the tokens; what they save lies on a line, but for the attention among the tokens that are left
_MOST = 0.98


def halting_for_saving(model: PreTrainedModel, save: float, *, prompt_tokens: int = 128, **options: Any) -> Halting:
    """A `Halting` that saves about `save` of the executed FLOPs of a prompt, its own signal included.

    Which tokens leave depends on the text, how many does not: three passes over a prompt of arbitrary tokens find the share.

    Args:
        save: share of the FLOPs, between 0 and 1.
        prompt_tokens: length of the prompts that are meant; the signal weighs more in short ones.
        options: further ones of `Halting`, but for rule, signal, schedule and share.

    Raises:
        ConfigError: a share that cannot be saved.
    """
    check_share("save", save)
    vocabulary = int(model.config.get_text_config().vocab_size)
    prompt_tokens = min(prompt_tokens, getattr(model.config, "max_position_embeddings", prompt_tokens))
    ids = (torch.arange(prompt_tokens) % vocabulary).unsqueeze(0).to(model.device)
    dense = _executed(model, ids, [])
    few, many = (1 - _executed(model, ids, [_halting(share, options)]) / dense for share in _TRIED)
    slope = (many - few) / (_TRIED[1] - _TRIED[0])
    share = _TRIED[0] + (save - few) / slope
    if share > _MOST:
        most = few + slope * (_MOST - _TRIED[0])
        raise ConfigError(
            f"save={save:g}: halting saves at most {most:.2f} of this model's work in a prompt of {prompt_tokens} tokens. Ask less, or open "
            "the window earlier: window=(0.1, 0.8)."
        )
    return _halting(max(0.0, share), options)


def _halting(share: float, options: dict[str, Any]) -> Halting:
    given = {"window": (0.2, 0.8), "missing_kv": "drop", "resume_layers": 0, **options}
    return Halting(rule="capacity", signal=SIGNAL, schedule="one_shot", halted_share=share, **given)


@torch.inference_mode()
def _executed(model: PreTrainedModel, ids: torch.Tensor, modules: list[Halting]) -> int:
    """FLOPs of a prompt ids (1, N), its last logits included."""
    with apply(model, modules) as run:
        model(ids, use_cache=True, logits_to_keep=1)
        return run.flops.executed
