"""Prompt-token pruning: what the prompt's last token does not look at goes no further (LazyLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from quicksilver.modules.checks import layer_after
from quicksilver.modules.halting import HaltingPolicy, fill_up
from quicksilver.modules.signals import AttentionReceived
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Count, Fractions, Share, check_number, is_list
from quicksilver.runtime.pass_state import MissingKV, TokenState
from quicksilver.runtime.view import LayerView


@dataclass(kw_only=True)
class PromptPruning(HaltingPolicy):
    """At a few layers, the tokens of a prompt that its last token attends to least are dropped, progressively more of them.

    Source: "LazyLLM: Dynamic Token Pruning for Efficient Long Context LLM Inference" (Fu et al., arXiv 2407.14057), equations 1 and
    2: a token's importance is the attention the last token gives it, averaged over the heads.

    What is not done: LazyLLM chooses anew at each decoding step and revives dropped tokens, whose states it keeps in an auxiliary
    cache; here the tokens dropped from the prompt stay dropped (no K/V above the layer they went through, as its static variant
    has it), and tokens that follow the prompt are processed in full. Its pruning layers are found by tuning; here they are
    fractions of the depth.

    Args:
        layers: fractions of the layers gone through at which tokens are dropped, rising.
        kept: share of the prompt's tokens that go on after each of those, falling; 1: all. One number: after the last, and as
            many fewer at each.

    Raises:
        ConfigError: an option out of range, lists of unequal length or in the wrong order; by `bind`, two that are one layer.
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
        assert not isinstance(self.kept, int | float)
        if len(self.layers) != len(self.kept):
            raise ConfigError(
                f"layers has {len(self.layers)} numbers and kept {len(self.kept)}: give one share for each pruning layer."
            )
        if list(self.layers) != sorted(self.layers) or list(self.kept) != sorted(self.kept, reverse=True):
            raise ConfigError(
                f"layers={list(self.layers)} must rise and kept={list(self.kept)} must fall: what was dropped stays dropped."
            )
        self._attention = AttentionReceived(last_queries=1)

    def bind(self, architecture: Architecture) -> None:
        super().bind(architecture)
        at = [layer_after(fraction, architecture.n_layers) for fraction in self.layers]
        if len(set(at)) < len(at):
            raise ConfigError(
                f"layers={list(self.layers)} are layers {at} of this model with {architecture.n_layers}: "
                "give fractions that are layers of their own."
            )
        self._kept = dict(zip(at, self.kept, strict=True))  # type: ignore[arg-type]  # a list since __post_init__

    def acts_at(self, layer: int) -> bool:
        return super().acts_at(layer) and self._kept.get(layer, 1.0) < 1

    def wants_attention(self, layer: int) -> bool:
        return self.acts_at(layer)

    def halted_share_after(self, layer: int) -> float | None:
        return 1 - self._kept[layer]

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        importance = self._attention(view, tokens, eligible)
        return fill_up(view, tokens, eligible, importance, 1 - self._kept[view.layer])
