"""Halting in two stages, as it was chosen for one model: a few old tokens are dropped early, nearly all others are predicted later.

Before layer d the oldest tokens of a prompt stop and are seen no more. Before layer p all stop but the first and the last few, and the K/V
of the layers after p are predicted (`modules/translators.py`). Which d, p and how many is a property of the model: it was chosen on
calibration text (docs/predicted-kv.md) and lies beside the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import yaml

from quicksilver.modules.checks import check_count, check_number, check_share
from quicksilver.modules.staged_halting import StagedHalting
from quicksilver.modules.thresholds import model_digest
from quicksilver.modules.translators import BESIDE, EMBEDDED, MODELS_FOLDER, BoundTranslator
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import TokenPolicy
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.translation import KVTranslator
from quicksilver.runtime.view import LayerView

SCHEDULES_FILE = "schedules.yaml"
REMEDY = "give schedule={drop_before, drop_share, predict_before, protect_last} and a translator, or fit and search: docs/predicted-kv.md"


@dataclass(frozen=True)
class Schedule:
    """Which tokens of a prompt stop where.

    Args:
        drop_before: the layer (from 0) before which the oldest stop and are dropped.
        drop_share: how many, as a share of the prompt.
        predict_before: the layer before which all others stop, but the protected; their K/V are predicted from there.
        protect_first, protect_last: tokens that go through all layers.

    Raises:
        ConfigError: a share outside [0, 1], layers out of order.
    """

    drop_before: int
    drop_share: float
    predict_before: int
    protect_first: int = 4
    protect_last: int = 32

    def __post_init__(self) -> None:
        for name in ("protect_first", "protect_last"):
            check_count(f"schedule.{name}", getattr(self, name))
        for name in ("drop_before", "predict_before"):
            check_count(f"schedule.{name}", getattr(self, name), 1)
        check_number("schedule.drop_share", self.drop_share, 0.0, 1.0)
        if self.drop_before >= self.predict_before:
            raise ConfigError(
                f"schedule: tokens are dropped before layer {self.drop_before} and predicted before layer {self.predict_before}: drop earlier "
                "than you predict."
            )

    def __str__(self) -> str:
        dropped = f"{100 * self.drop_share:.3g}% d@{self.drop_before} + " if self.drop_share else ""
        return f"{dropped}P@{self.predict_before}/{self.protect_last}"

    def halting(self, missing_kv: str = "predict", translator: str | Path | BoundTranslator = EMBEDDED) -> StagedHalting:
        """The module that does it, with another `missing_kv` for the second stage where that is compared."""
        dropped = {"before": self.drop_before, "share": self.drop_share, "signal": "position", "missing_kv": "drop"}
        stopped: dict[str, Any] = {"before": self.predict_before, "rest": True, "missing_kv": missing_kv}
        if missing_kv == "predict":
            stopped["translator"] = translator
        stages = [dropped, stopped] if self.drop_share else [stopped]
        return StagedHalting(stages=stages, protect_first=self.protect_first, protect_last=self.protect_last)


@dataclass(kw_only=True)
class PresetHalting(TokenPolicy):
    """Halting by a `Schedule` (`P@ℓ`): the model's own at a budget, or one that is given.

    Acts in prompts only, as where a prompt ends decides who stops.

    Args:
        save: share of the prompt's executed FLOPs for which the model's schedule was chosen, 0 to 1.
        schedule: a schedule, or its fields, in place of the model's own; `save` is unread then.
        missing_kv: what later layers see of the second stage's tokens: `predict`, or what it is compared with (`project`: SwiftKV
            without training; `drop`).
        translator: `embedded`, or the path of one.

    Raises:
        ConfigError: neither a share nor a schedule; by `bind`: no schedule for this model at that budget, a stage that the model has no
            layer for, a translator that does not fit.
    """

    save: float | None = 0.4
    schedule: Schedule | Mapping[str, Any] | None = None
    missing_kv: str = "predict"
    translator: str | Path = "embedded"
    lookahead: bool = False
    priority: ClassVar[int] = 10

    def __post_init__(self) -> None:
        self._halting: StagedHalting | None = None
        if self.save is not None:
            check_share("save", self.save)
        elif self.schedule is None:
            raise ConfigError(
                "save=None and schedule=None: give one of them, a share such as save=0.4 or a schedule of your own."
            )
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            self.schedule = read_schedule(self.schedule)

    @property
    def causal(self) -> bool:
        return False

    @property
    def copies_kv(self) -> bool:
        return self.missing_kv == "copy"

    @property
    def halting(self) -> StagedHalting:
        """The stages, once they are known.

        Raises:
            ConfigError: before `bind`.
        """
        if self._halting is None:
            raise ConfigError("The stages of a preset are the model's own: give the module to quicksilver.apply first.")
        return self._halting

    @property
    def translators(self) -> Mapping[int, KVTranslator]:
        return self.halting.translators

    def bind(self, architecture: Architecture) -> None:
        schedule = self.schedule
        if schedule is None:
            assert self.save is not None
            schedule = schedule_of(architecture, self.save)
        assert isinstance(schedule, Schedule)
        halting = schedule.halting(self.missing_kv, self.translator)
        halting.bind(architecture)
        self._halting = halting

    def required_layers(self) -> frozenset[int]:
        return self.halting.required_layers()

    def acts_at(self, layer: int) -> bool:
        return self.halting.acts_at(layer)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        self.halting.decide(view, tokens)


def read_schedule(content: Mapping[str, Any]) -> Schedule:
    """A schedule from its fields; raises ConfigError for one that it has not, or lacks."""
    known = [f.name for f in fields(Schedule)]
    unknown = sorted(set(content) - set(known))
    if unknown:
        raise ConfigError(f"schedule has no {unknown[0]}: there are {', '.join(known)}.")
    try:
        return Schedule(**content)
    except TypeError as error:
        raise ConfigError(f"schedule={dict(content)} is incomplete ({error}): give {', '.join(known)}.") from error


def schedule_of(architecture: Architecture, save: float) -> Schedule:
    """The schedule that was chosen for the model to save that share of a prompt's executed FLOPs.

    Raises:
        ConfigError: none ships with the model, or none at that budget.
    """
    own = schedules_of(architecture)
    if not own:
        digest = model_digest(architecture.model)
        raise ConfigError(f"save={save:g}: no schedule ships with this model (digest {digest[:12]}…): {REMEDY}.")
    if round(save, 6) not in own:
        raise ConfigError(
            f"save={save:g}: for this model there are schedules for {', '.join(f'{share:g}' for share in own)}; or {REMEDY}."
        )
    return own[round(save, 6)]


def schedules_of(architecture: Architecture) -> dict[float, Schedule]:
    """The schedules that ship with the model, by the share of a prompt's executed FLOPs that they were chosen for, ascending; none: {}."""
    digest = model_digest(architecture.model)
    for content in _shipped().values():
        if content["weights_digest"] == digest:
            own = content["schedules"]
            return {round(pct / 100, 6): read_schedule(own[pct]["schedule"]) for pct in sorted(own)}
    return {}


def shipped_with_schedules() -> list[str]:
    """Names of the shipped models that have schedules of their own."""
    return list(_shipped())


def _shipped() -> dict[str, Any]:
    found = sorted(MODELS_FOLDER.glob(f"*/{BESIDE}/{SCHEDULES_FILE}"))
    return {path.parts[-3]: yaml.safe_load(path.read_text(encoding="utf-8")) for path in found}
