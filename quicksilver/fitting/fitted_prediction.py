"""Halting by a schedule whose map is fitted when a run begins: controls of prediction, and layers that no shipped map starts from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from quicksilver.fitting.fit import fit_translators
from quicksilver.fitting.schedules import saved_pct
from quicksilver.fitting.text import FitText
from quicksilver.modules.staged_halting import PresetHalting, Schedule, schedule_of
from quicksilver.modules.thresholds import Fitted
from quicksilver.modules.translators import EMBEDDED, BoundTranslator, Translator
from quicksilver.runtime.architecture import Architecture, architecture_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Positive

NONE = "none"


@dataclass(kw_only=True)
class FittedPrediction(PresetHalting, Fitted):
    """`PresetHalting` with a map that is fitted by ridge regression on the calibration text of the run.

    What a fitted map must beat is a map that knows less, at the same schedule and so at the same work: one of shuffled tokens, and the
    mean K and V of each layer and head. All three are fitted here on the same windows, so that nothing else differs between them.

    Args:
        control: `none`: states and K/V of the same token. `shuffled`: K/V of another token of the text. `mean`: the mean K and V.
        drop_oldest: False: nobody is dropped; all tokens but the protected stop before one layer, the deepest that saves `save`
            of a prompt of `prompt_tokens` (static P@ℓ).
        prompt_tokens: for that choice.

    Raises:
        ConfigError: what `PresetHalting` refuses; an unknown control; a schedule of its own beside `drop_oldest=False`; in `fit`, too
            little text, or a budget that no layer reaches; by `apply`, a module that was not fitted.
    """

    control: Literal["none", "shuffled", "mean"] = "none"
    drop_oldest: bool = True
    prompt_tokens: Positive = 448
    translator: ClassVar[str] = EMBEDDED  # type: ignore[misc]  # no option: it is fitted here

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drop_oldest and self.schedule is not None:
            raise ConfigError("drop_oldest=false chooses its own schedule: give save instead of a schedule.")
        self._map: Translator | None = None

    @property
    def fitted(self) -> bool:
        return self._map is not None or self.missing_kv != "predict"

    @torch.no_grad()
    def fit(self, model: Any, windows: torch.Tensor, batch_size: int = 8) -> None:
        """Fit the map from the layer at which the schedule stops tokens.

        Args:
            model: a causal language model of a known family.
            windows: (W, N) long, calibration text.
        """
        architecture = architecture_of(model)
        source = self._schedule(architecture).predict_before
        digest = hashlib.sha256(windows.cpu().contiguous().numpy().astype("<i8").tobytes()).hexdigest()
        text = FitText(windows, {"windows": len(windows), "digest": digest})
        control = None if self.control == NONE else self.control
        self._map = fit_translators(architecture, text, [source], control=control, batch_size=batch_size)[source]

    def bind(self, architecture: Architecture) -> None:
        schedule = self._schedule(architecture)
        translator: str | BoundTranslator = EMBEDDED
        if self.missing_kv == "predict":
            if self._map is None:
                raise ConfigError("fitted_prediction has no map: call fit(model, windows) with calibration text first.")
            translator = self._map.bound(architecture)
        halting = schedule.halting(self.missing_kv, translator)
        halting.bind(architecture)
        self._halting = halting

    def _schedule(self, architecture: Architecture) -> Schedule:
        if isinstance(self.schedule, Schedule):
            return self.schedule
        assert self.save is not None
        if self.drop_oldest:
            return schedule_of(architecture, self.save)
        return static_schedule(architecture, self.save, self.prompt_tokens)


def static_schedule(architecture: Architecture, save: float, prompt_tokens: int = 448, protect_last: int = 32) -> Schedule:
    """All tokens but the first 4 and the last few stop before the deepest layer at which that saves the share `save` of a prompt.

    Raises:
        ConfigError: none does.
    """
    for layer in range(architecture.n_layers - 2, 1, -1):
        schedule = Schedule(1, 0.0, layer, 4, protect_last)
        if saved_pct(architecture, schedule, prompt_tokens) >= 100 * save:
            return schedule
    raise ConfigError(
        f"save={save:g}: no layer saves so much of a prompt of {prompt_tokens} tokens by prediction alone: ask for less."
    )
