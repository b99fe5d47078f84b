"""What a model says after a prompt: the logits that fitting and choosing compare with the dense model's."""

from __future__ import annotations

from typing import Any

import torch


def continuation_log_probs(model: Any, ids: torch.Tensor, prompt_tokens: int) -> torch.Tensor:
    """Log-probabilities of what follows a prompt, teacher-forced, given the cache that the prompt left: ids (B, N) -> (B, N − P, V)."""
    ids = ids.to(model.device)
    prompt = model(ids[:, :prompt_tokens], use_cache=True, logits_to_keep=1)
    rest = model(ids[:, prompt_tokens:-1], use_cache=True, past_key_values=prompt.past_key_values)
    return torch.cat([prompt.logits, rest.logits], dim=1).float().log_softmax(-1)


def kl_nats(dense: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(dense ‖ other) a token, mean over the positions of each row: two of (B, S, V) log-probabilities -> (B,)."""
    return (dense.exp() * (dense - other)).sum(-1).mean(1)
