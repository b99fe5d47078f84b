"""Staged halting: at each of a few layers some tokens of a prompt halt, each stage by its own rule (docs/design.md §4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quicksilver.modules.halting import HaltingPolicy
from quicksilver.modules.signals import Signal
from quicksilver.modules.stages import Stage, check_prompt, halted_before, halted_by, layers_of, stages_of
from quicksilver.modules.thresholds import Calibrated, Calibration, is_percentile, resolve_thresholds
from quicksilver.modules.translators import EMBEDDED, translator_for
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.pass_state import MISSING_KV, MissingKV, TokenState
from quicksilver.runtime.view import LayerView


@dataclass(kw_only=True)
class StagedHalting(HaltingPolicy, Calibrated):
    """Tokens of a prompt halt in stages, each with its own layer, amount, signal and `missing_kv`.

    Numbers and shares are of each row's own real tokens. It reads the whole prompt, so it acts in prompts only, unless every stage
    is a threshold on a causal signal.

    Args:
        stages: `Stage`s, or mappings of their options, in order of depth. `missing_kv`, `protect_first` and `protect_last` of the
            module are for stages that give none; forced tokens halt at the first stage.
        calibration: a `Calibration` or the path of one; percentiles in `below` need it.

    Raises:
        ConfigError: what `Stage` refuses; stages out of order, or that halt more than there is; by `bind`, a stage that leaves no
            layer to save; in a run, a `count` larger than what a prompt has left.
    """

    stages: Sequence[Stage | Mapping[str, Any]] = (
        {"before": 0.2, "share": 0.2, "signal": "position", "missing_kv": "drop"},
        {"before": 0.5, "share": 0.4, "signal": "attention", "missing_kv": "drop"},
    )
    missing_kv: MissingKV = "drop"
    protect_first: int = 4
    protect_last: int | None = 1
    window: tuple[float, float] = field(default=(0.0, 1.0), init=False)
    calibration: Calibration | Path | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stages = stages_of(
            self.stages, missing_kv=self.missing_kv, protect_first=self.protect_first, protect_last=self.protect_last
        )

    @property
    def chooses_causally(self) -> bool:
        return all(stage.causal for stage in self._stages)

    @property
    def protected_last(self) -> int:
        return self._stages[0].protect_last or 0  # no later stage protects more

    @property
    def copies_kv(self) -> bool:
        return any(stage.missing_kv == "copy" for stage in self._stages)

    def calibration_signals(self) -> list[Signal]:
        if self.calibration is not None:
            return []
        return [signal for stage in self._stages if is_percentile(stage.below) and (signal := stage.score) is not None]

    def bind(self, architecture: Architecture) -> None:
        for i, stage in enumerate(self._stages):
            if stage.missing_kv not in MISSING_KV:
                raise ConfigError(
                    f"stages[{i}]: missing_kv={stage.missing_kv!r} cannot be executed by this version: give one of "
                    f"{', '.join(MISSING_KV)}."
                )
        layers = layers_of(self._stages, architecture.n_layers, self.resume_layers)
        self._number_of = {layer - 1: i for i, layer in enumerate(layers)}  # by the layer that it is decided after
        self.first_layer, self.last_layer = layers[0] - 1, layers[-1] - 1
        self._translators = {
            layer: translator_for(architecture, self._stages[i].translator or EMBEDDED, layer + 1)
            for layer, i in self._number_of.items()
            if self._stages[i].missing_kv == "predict"
        }
        self._tau_below: dict[int, float] = {}
        for layer, i in self._number_of.items():
            stage = self._stages[i]
            if stage.below is not None and stage.score is not None:
                taus = resolve_thresholds(f"stages[{i}].below", stage.below, architecture, self.calibration, stage.score.key)
                self._tau_below[layer] = taus[layer]

    def required_layers(self) -> frozenset[int]:
        return frozenset(self._number_of)

    def acts_at(self, layer: int) -> bool:
        return layer in self._number_of

    def wants_attention(self, layer: int) -> bool:
        signal = self._stages[self._number_of[layer]].score if self.acts_at(layer) else None
        return signal is not None and signal.needs_attention

    def protected_at(self, layer: int) -> tuple[int, int]:
        stage = self._stages[self._number_of[layer]]
        return stage.protect_first or 0, stage.protect_last or 0

    def missing_kv_at(self, layer: int) -> str:
        return self._stages[self._number_of[layer]].missing_kv or self.missing_kv

    def halted_of(self, layer: int, n_tokens: int, n_left: int) -> int | None:
        i = self._number_of[layer]
        before = halted_before(self._stages, i, n_tokens)
        # Another module may have halted tokens that this stage protects: then only the device knows how many are left.
        return halted_by(self._stages[i], n_tokens, before) if before is not None and n_left == n_tokens - before else None

    def _count_per_row(self, view: LayerView, tokens: TokenState) -> int | None:
        # Outside of a prompt (`lookahead`) the protected tokens are not in the pass.
        return super()._count_per_row(view, tokens) if view.is_prompt else None

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        i = self._number_of[view.layer]
        if view.is_prompt and self._stages[i].count is not None:
            check_prompt(self._stages, i, int(view.n_tokens.min()) if view.tokens_per_row is None else view.tokens_per_row)
        return self._stages[i].choose(view, tokens, eligible, self._tau_below.get(view.layer))

    def describe(self) -> str:
        """One line for a table: `96 oldest dropped @3, rest but 4+32 predicted @10`."""
        return ", ".join(stage.describe() for stage in self._stages)
