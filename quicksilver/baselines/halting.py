"""Published policies that halt tokens: confidence and static early exit, one-shot halting, prompt-token pruning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F

from quicksilver.modules.checks import layer_after
from quicksilver.modules.controls import StaticDepth
from quicksilver.modules.halting import HaltingPolicy, fill_up
from quicksilver.modules.signals import AttentionReceived
from quicksilver.runtime import Architecture, ConfigError, LayerView, TokenState
from quicksilver.runtime.options import Count, Fractions, Positive, Share, between, check_number, is_list
from quicksilver.runtime.pass_state import MissingKV


@dataclass(kw_only=True)
class ConfidenceExit(HaltingPolicy):
    """A token leaves after the first layer at which its confidence exceeds the threshold. Causal.

    Source: "Confident Adaptive Language Modeling" (CALM, Schuster et al., arXiv 2207.07061), equations 1 to 5. Layers above see K/V
    projected from the state the token left with (`missing_kv="project"`).

    What differs: CALM exits in the decoder of T5, fine-tuned so that early states can be read; here prompt and continuation may exit, on
    frozen weights. The threshold is given, not calibrated for a risk. CALM's trained classifier is left out.

    Args:
        measure: `softmax`: the difference of the two largest probabilities of the output head on the token's state, whose cost is in
            every ledger. `state`: the cosine of the states entering and leaving the layer.
        threshold: λ, 0 to 1; a confidence must exceed it, so that at 1 no token leaves.
        temperature: of the decaying threshold, 0.9·λ + 0.1·exp(−temperature · slot / horizon); None: the same for all.
        horizon: tokens over which it decays.
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
        threshold: torch.Tensor | float = self.threshold
        if self.temperature is not None:
            threshold = 0.9 * self.threshold + 0.1 * torch.exp(-self.temperature * view.slots / self.horizon)
        return eligible & (confidence > threshold)


@dataclass(kw_only=True)
class StaticExit(StaticDepth):
    """Every token leaves after `depth` of the layers, and the output head reads it there. Causal.

    Source: "The Right Tool for the Job: Matching Model and Instance Complexities" (Schwartz et al., arXiv 2004.07453) and
    "Depth-Adaptive Transformer" (Elbayad et al., arXiv 1910.10073), whose exits at one depth are this.

    What differs: those train an output head for every exit; here the model's own head reads a state it was not trained on. No token runs in
    the layers above, so their K/V are never read.

    Args:
        depth: fraction of the layers that are run; 1: all of them, the dense model.
    """

    depth: Share = 0.6
    missing_kv: MissingKV = "drop"

    def bind(self, architecture: Architecture) -> None:
        if self.depth < 1:
            super().bind(architecture)

    def acts_at(self, layer: int) -> bool:
        return self.depth < 1 and super().acts_at(layer)


@dataclass(kw_only=True)
class OneShotHalting(HaltingPolicy):
    """At one layer the share of a prompt's tokens whose attention output is smallest halts; the rest goes on to the end.

    Source: "Stability Implies Redundancy: Delta Attention Selective Halting for Efficient Long-Context Prefilling" (DASH, Chen et al., arXiv
    2604.18103). The score is ‖U_t‖₂, U the output of the layer's self-attention before it joins the residual stream. Decoding is as ever.

    What differs: the layer is a fraction of the depth. The first tokens (attention sinks) are spared, beside the last one.

    Args:
        halted_share: ρ, share of a row's real tokens that halt; 0: none, the dense model.
        start: fraction of the layers gone through when the choice is made.
    """

    halted_share: Share = 0.54
    start: Share = 0.3
    missing_kv: MissingKV = "drop"
    protect_first: Count = 4
    window: tuple[float, float] = field(default=(0.3, 1.0), init=False)
    chooses_causally: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.window = (self.start, 1.0)

    def acts_at(self, layer: int) -> bool:
        return layer == self.first_layer and self.halted_share > 0

    def wants_attention(self, layer: int) -> bool:
        return self.acts_at(layer)

    def halted_share_after(self, layer: int) -> float | None:
        return self.halted_share

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        return fill_up(view, tokens, eligible, view.attention_output.float().norm(dim=-1), self.halted_share)


@dataclass(kw_only=True)
class PromptPruning(HaltingPolicy):
    """At a few layers, the tokens of a prompt that its last token attends to least are dropped, progressively more of them.

    Source: "LazyLLM: Dynamic Token Pruning for Efficient Long Context LLM Inference" (Fu et al., arXiv 2407.14057), equations 1 and
    2: a token's importance is the attention the last token gives it, averaged over the heads.

    What differs: LazyLLM chooses anew at each decoding step and revives dropped tokens; here those stay dropped, as in its static variant,
    and tokens that follow the prompt are processed in full. Its pruning layers are tuned; here they are fractions of the depth.

    Args:
        layers: fractions of the layers gone through at which tokens are dropped, rising.
        kept: share of the prompt's tokens that go on after each of those, falling. One number: after the last, in equal steps.

    Raises:
        ConfigError: lists of unequal length or in the wrong order; by `bind`, two that are one layer.
    """

    layers: Sequence[float] = (0.2, 0.5, 0.75)
    kept: Sequence[float] | Share = (0.7, 0.5, 0.4)
    missing_kv: MissingKV = "drop"
    protect_first: Count = 4
    window: Fractions = (0.0, 1.0)
    chooses_causally: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.kept, int | float) and is_list(self.layers):
            fewer = (1 - self.kept) / max(1, len(self.layers))
            self.kept = [1 - fewer * (i + 1) for i in range(len(self.layers))]
        for name in ("layers", "kept"):
            values = getattr(self, name)
            if not is_list(values) or not len(values):
                raise ConfigError(f"{name}={values!r} must be a list of numbers from 0 to 1, such as [0.25, 0.5, 0.75].")
            setattr(self, name, tuple(check_number(f"{name}[{i}]", value, 0.0, 1.0) for i, value in enumerate(values)))
        self._kept_shares: tuple[float, ...] = self.kept  # type: ignore[assignment]  # a tuple by now
        if len(self.layers) != len(self._kept_shares):
            raise ConfigError(f"layers has {len(self.layers)} numbers and kept {len(self._kept_shares)}: give one share each.")
        if list(self.layers) != sorted(self.layers) or list(self._kept_shares) != sorted(self._kept_shares, reverse=True):
            raise ConfigError(f"layers={list(self.layers)} must rise and kept={list(self._kept_shares)} must fall.")
        self._attention = AttentionReceived(last_queries=1)

    def bind(self, architecture: Architecture) -> None:
        super().bind(architecture)
        at = [layer_after(fraction, architecture.n_layers) for fraction in self.layers]
        if len(set(at)) < len(at):
            raise ConfigError(f"layers={list(self.layers)} are layers {at} of {architecture.n_layers}: give layers of their own.")
        self._kept = dict(zip(at, self._kept_shares, strict=True))

    def acts_at(self, layer: int) -> bool:
        return super().acts_at(layer) and self._kept.get(layer, 1.0) < 1

    def wants_attention(self, layer: int) -> bool:
        return self.acts_at(layer)

    def halted_share_after(self, layer: int) -> float | None:
        return 1 - self._kept[layer]

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        return fill_up(view, tokens, eligible, self._attention(view, tokens, eligible), 1 - self._kept[view.layer])
