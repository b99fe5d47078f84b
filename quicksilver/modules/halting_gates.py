"""Gates that learn whom to halt: p = σ(w · LN(h) + b) after each decision layer, and what trains them (Ye et al., arXiv 2303.05078).

Of the paper only the abstract and the introduction are at hand, so what follows is a reconstruction. A token stays where p ≥ ½. Going forward
the gate is that step; going backward it is p itself,

    g = 1[p ≥ ½] + p − stopgrad(p)

so its value is 0 or 1 and its pseudo-gradient that of p. The sparsity loss is λ Σ w_i p_i / Σ w_i with
w_i given from outside (smaller in ground-truth boxes), and λ follows a target share of token-layers.

Gates of a language model may be told a token's place in the prompt, too. The rule "the oldest tokens leave first" is then one of the gates that can
be learned; from the states alone a linear gate reads the place badly, and lost to that rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quicksilver.runtime.errors import ConfigError

OPEN = 1.0  # b before training: p = 0.73, nobody halts
PLACE_FEATURES = 2


class HaltingGates(nn.Module):
    """One gate for each decision layer.

    Args:
        width: D of the model.
        layers: after which a token may halt, 0-based, ascending.
        reads_only: the scores' derivative goes to w and b and not on into the states that they are read from. A model that is trained with
            its gates then learns from its task alone, under the halting that they decide.
        prompt_tokens: length of the prompts, whose `place_features` are added to what the gates read; None: states alone.

    Attributes:
        weight: (K, D). bias: (K,). place: (K, 2), or None.
        scores: p (B, N) by layer of the newest forward. kept: m (B, N) by layer, that entered the gate, without gradient.

    Raises:
        ConfigError: no layer, or layers out of order.
    """

    def __init__(self, width: int, layers: Sequence[int], *, reads_only: bool = False, prompt_tokens: int | None = None) -> None:
        super().__init__()
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ConfigError(f"layers={list(layers)}: give decision layers in ascending order, such as [0, 1, 2].")
        self.layers, self.reads_only, self.prompt_tokens = tuple(layers), reads_only, prompt_tokens
        self.weight = nn.Parameter(torch.zeros(len(layers), width))
        self.bias = nn.Parameter(torch.full((len(layers),), OPEN))
        self.place = None if prompt_tokens is None else nn.Parameter(torch.zeros(len(layers), PLACE_FEATURES))
        self.scores: dict[int, torch.Tensor] = {}
        self.kept: dict[int, torch.Tensor] = {}

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """w · LN(h) + v · place + b: hidden (..., N, D) -> (..., N) float32; LN without gain or bias, which w and b would swallow."""
        index = self.layers.index(layer)
        normed = nn.functional.layer_norm(hidden.float(), hidden.shape[-1:])
        found = normed @ self.weight[index].float() + self.bias[index].float()
        if self.place is None or self.prompt_tokens is None:
            return found
        place = torch.arange(hidden.shape[-2], device=hidden.device) / self.prompt_tokens
        return found + place_features(place) @ self.place[index].float()

    def gate(self, layer: int, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
        """g (B, N) after `layer`, for `equivalent_forward`; None where no decision is taken."""
        if layer == 0:
            self.scores, self.kept = {}, {}
        if layer not in self.layers:
            return None
        p = self.logits(layer, hidden.detach() if self.reads_only else hidden).sigmoid()
        self.scores[layer], self.kept[layer] = p, kept.detach()
        return straight_through(p).to(hidden.dtype)

    def sparsity(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Σ w_i p_i / Σ w_i of the newest forward over all tokens and gates, a halted token's p counting as 0; weights (B, N), None: 1.

        Every token of every layer costs the same. With a mean over the tokens that are left, the last gate halts the last few that a task
        needs: there each of them weighs most.
        """
        paid = total = torch.zeros(())
        for layer, p in self.scores.items():
            w = torch.ones_like(p) if weights is None else weights
            paid, total = paid + (self.kept[layer] * w * p).sum(), total + w.sum()
        return paid / total.clamp(min=1e-6)


def place_features(place: torch.Tensor) -> torch.Tensor:
    """Of places (...) in a prompt, 0 its first token and 1 behind its last: (..., 2) float32, a slope and a hill, either in −1 to 1."""
    slope = 2 * place.float() - 1
    return torch.stack([slope, 1 - 2 * slope.square()], dim=-1)


def straight_through(p: torch.Tensor) -> torch.Tensor:
    """1[p ≥ ½] in value, p in derivative."""
    # In this order: (1 + p) − p need not be 1.
    return (p >= 0.5).to(p.dtype) + (p - p.detach())
