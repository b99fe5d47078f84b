"""Confidence early exit: a token leaves once the model is sure of it (CALM)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F

from quicksilver.modules.halting import HaltingPolicy
from quicksilver.runtime.options import Fractions, Positive, Share, between
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.view import LayerView


@dataclass(kw_only=True)
class ConfidenceExit(HaltingPolicy):
    """A token leaves after the first layer at which its confidence exceeds the threshold. Causal.

    Source: "Confident Adaptive Language Modeling" (Schuster et al., arXiv 2207.07061), equations 1 to 5.
    `softmax`: the difference of the two largest probabilities of the output head on the token's state. `state`: the cosine of the
    states entering and leaving the layer. Layers above see K/V projected from the state the token left with: CALM's state
    propagation (`missing_kv="project"`).

    What differs: CALM exits in the decoder of T5, after its encoder has read the prompt in full, and fine-tunes the model so that
    early states can be read; here prompt and continuation alike may exit, on frozen weights. The threshold is given, not calibrated
    for a risk. CALM's third measure, a trained classifier, is left out. The output head's cost is in every ledger.

    Args:
        measure: of confidence, as above.
        threshold: λ, 0 to 1; a confidence must exceed it, so that at 1 no token leaves.
        temperature: of the decaying threshold, 0.9·λ + 0.1·exp(−temperature · slot / horizon); None: the same for all.
        horizon: tokens over which it decays.

    Raises:
        ConfigError: an option out of range.
    """

    measure: Literal["softmax", "state"] = "state"
    threshold: Share = 0.9
    temperature: Annotated[float, between(0.0)] | None = None
    horizon: Positive = 512
    window: Fractions = (0.0, 1.0)

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        if self.measure == "state":
            confidence = F.cosine_similarity(view.before.float(), view.after.float(), dim=-1).clamp(max=1.0)
        else:
            confidence = torch.full(eligible.shape, -math.inf, device=eligible.device)
            confidence[eligible] = view.logit_margin(eligible)
        return eligible & (confidence > self._thresholds(view))

    def _thresholds(self, view: LayerView) -> torch.Tensor | float:
        if self.temperature is None:
            return self.threshold
        return 0.9 * self.threshold + 0.1 * torch.exp(-self.temperature * view.slots / self.horizon)
