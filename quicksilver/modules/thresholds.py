"""Thresholds: a number, one number per layer, or a percentile of what was measured (paper B.2, C.3)."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import numpy as np
import torch

from quicksilver.modules.fitted import FittedFile, model_digest
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import check_number, is_list
from quicksilver.runtime.reading import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quicksilver.modules.signals import Signal
    from quicksilver.runtime.architecture import Architecture

SHIPPED_CALIBRATIONS = Path(__file__).resolve().parent / "calibrations"  # of the reference models (scripts/ship_calibrations.py)

_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Calibration(FittedFile):
    """Percentiles of signals, per layer.

    Attributes:
        n_layers: layers of the model.
        grid: the percentiles kept, ascending.
        percentiles: signal key -> for each layer the values at `grid`, or None where nothing was measured.
        provenance: model and data digests, dtype, windows, versions.
    """

    n_layers: int
    grid: tuple[float, ...]
    percentiles: dict[str, list[list[float] | None]] = field(repr=False)  # thousands of numbers
    provenance: dict[str, Any] = field(default_factory=dict)

    kind = "calibration"
    format = "quicksilver-calibration-1"
    remedy = "run `quicksilver calibrate model=MODEL text=FILE` and give its file as calibration=FILE, or give a number"

    def thresholds(self, key: str, percentile: float) -> list[float]:
        """The percentile in each layer, length L, interpolated between grid points; 0 where nothing was measured.

        Raises:
            ConfigError: a percentile outside the grid, or a signal that was not measured.
        """
        if not self.grid[0] <= percentile <= self.grid[-1]:
            raise ConfigError(f"Percentile p{percentile:g} is outside the calibrated p{self.grid[0]:g} to p{self.grid[-1]:g}.")
        if key not in self.percentiles:
            raise ConfigError(
                f"The calibration has {', '.join(sorted(self.percentiles))}, not {key!r}: calibrate again with that signal."
            )
        return [0.0 if row is None else float(np.interp(percentile, self.grid, row)) for row in self.percentiles[key]]

    @property
    def weights_digest(self) -> str:  # type: ignore[override]
        """`model_digest` of the model; empty where nobody said."""
        return str(self.provenance.get("model_digest", ""))

    def model_facts(self) -> dict[str, object]:
        return {"n_layers": self.n_layers}

    @classmethod
    def _read(cls, path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
        content = read_json(path)
        if isinstance(content, dict):
            content["format"] = content.pop("schema", None)
        return content, {}

    def _written(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
        return json.dumps({"schema": self.format, **facts}, allow_nan=False).encode()

    def __post_init__(self) -> None:
        if not isinstance(self.n_layers, int) or not isinstance(self.provenance, dict):
            raise ConfigError(
                f"n_layers={self.n_layers!r} and provenance={type(self.provenance).__name__}, not a whole number and an object"
            )
        if not self.grid or list(self.grid) != sorted({check_number("grid", p, 0.0, 100.0) for p in self.grid}):
            raise ConfigError(f"its grid {list(self.grid)!r} is not ascending")
        for key, rows in self.percentiles.items():
            if len(rows) != self.n_layers:
                raise ConfigError(f"{key} has {len(rows)} layers and n_layers is {self.n_layers}")
            for row in rows:
                if row is not None and len([check_number(key, value) for value in row]) != len(self.grid):
                    raise ConfigError(f"{key} has {len(row)} values in a layer and the grid {len(self.grid)}")


class Calibrated(ABC):
    """A module whose thresholds may be percentiles of what a calibration measured.

    Attributes:
        calibration: a `Calibration`, the path of one, or None until somebody measures one (`calibration.calibrate_modules`).
    """

    calibration: Calibration | Path | str | None

    @abstractmethod
    def calibration_signals(self) -> list[Signal]:
        """The signals whose percentiles are thresholds and have not been measured; empty where `calibration` is given."""

    def resolved(self, name: str, architecture: Architecture, key: str) -> list[float] | None:
        """The option `name` as one threshold per layer (`resolve_thresholds`); None where it is None."""
        tau = getattr(self, name)
        return None if tau is None else resolve_thresholds(name, tau, architecture, self.calibration, key)


def shipped_calibration(digest: str) -> Calibration | None:
    """What the package ships for the model of that `model_digest`; None: it is none of its reference models."""
    for path in sorted(SHIPPED_CALIBRATIONS.glob("*.json")):
        if digest in path.read_text(encoding="utf-8"):
            return Calibration.load(path)
    return None


class Fitted(ABC):
    """A module that must see calibration text before it can be applied."""

    @property
    @abstractmethod
    def fitted(self) -> bool:
        """Whether `fit` was called."""

    @abstractmethod
    def fit(self, model: PreTrainedModel, windows: torch.Tensor, batch_size: int = 8) -> None:
        """Learn from windows of text (W, N) long what `apply` needs; the model is left as it is."""


def halted_key(key: str) -> str:
    """Under which the signal `key` of halted tokens alone is kept (C.3)."""
    return f"{key}-halted"


def is_percentile(value: object) -> TypeGuard[str]:
    """True for a calibrated percentile, such as "p25"."""
    return isinstance(value, str) and _PERCENTILE.fullmatch(value) is not None


def check_thresholds(name: str, value: float | Sequence[float] | str, low: float = 0.0, high: float = math.inf) -> None:
    """What can be said of thresholds before the model is known; raises ConfigError."""
    if is_percentile(value):
        check_number(f"the percentile of {name}", float(value[1:]), 0, 100)
    elif is_list(value):
        if not value:
            raise ConfigError(f"{name}=[] names no threshold: give a number, or a list with one number per layer.")
        for layer, v in enumerate(value):
            check_number(f"{name}[{layer}]", v, low, high)
    elif isinstance(value, str | bytes):
        raise ConfigError(
            f"{name}={value!r} is not a number; give one, a list with one per layer, or a percentile such as 'p25'."
        )
    else:
        check_number(name, value, low, high)


# One for all layers, one per layer, or a calibrated percentile such as "p25".
Thresholds = Annotated[float | Sequence[float] | str, check_thresholds]


def resolve_thresholds(
    name: str, value: Thresholds, architecture: Architecture, calibration: Calibration | Path | str | None, key: str
) -> list[float]:
    """`value` as one threshold per layer, length L.

    Args:
        key: what a percentile is of (`Signal.key`).

    Raises:
        ConfigError: a list of another length, a percentile without a calibration or with one of another model.
    """
    n_layers = architecture.n_layers
    if not isinstance(value, str):
        if not isinstance(value, Sequence):
            return [float(value)] * n_layers
        if len(value) != n_layers:
            raise ConfigError(
                f"{name} has {len(value)} values and the model {n_layers} layers: give one per layer, or one number."
            )
        return [float(v) for v in value]
    if calibration is None:
        calibration = shipped_calibration(model_digest(architecture.model))
    if calibration is None:
        raise ConfigError(f"{name}={value!r} is a calibrated percentile and there is no calibration: {Calibration.remedy}.")
    if not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    try:
        calibration.check(architecture)
    except ConfigError as error:
        raise ConfigError(f"{name}={value!r}: {error}") from error
    return calibration.thresholds(key, float(value[1:]))


def thresholds_of(module: object) -> dict[str, list[float]]:
    """What a bound module compares with in each layer, length L each: its attributes `_tau_…`, for the record."""
    found = {name.lstrip("_"): value for name, value in vars(module).items() if name.startswith("_tau_")}
    return {name: value for name, value in found.items() if isinstance(value, list)}
