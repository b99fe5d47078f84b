"""Thresholds: a number, one number per layer, or a percentile of what a model's signals are on text (paper B.2, C.3).

Percentiles are measured once per model and data (`calibrate_modules`; `quicksilver calibrate` is the command line), kept as JSON, and found
again by digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeGuard

import numpy as np
import torch

from quicksilver import numerics
from quicksilver.modules.fitted import FittedFile, model_digest
from quicksilver.modules.signals import Drift, Entropy, Signal
from quicksilver.runtime import Architecture, ConfigError, LayerView, RuntimeModule, TokenPolicy, TokenState, apply
from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.options import check_number, is_list
from quicksilver.runtime.reading import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    reads_states = False
    format = "quicksilver-calibration-1"
    remedy = "run `quicksilver calibrate model=MODEL text=FILE` and give its file as calibration=FILE, or give a number"

    def thresholds(self, key: str, percentile: float) -> list[float]:
        """The percentile in each layer, length L, interpolated between grid points; 0 where nothing was measured. Raises
        ConfigError: a percentile outside the grid, or a signal that was not measured."""
        if not self.grid[0] <= percentile <= self.grid[-1]:
            raise ConfigError(f"Percentile p{percentile:g} is outside the calibrated p{self.grid[0]:g} to p{self.grid[-1]:g}.")
        if key not in self.percentiles:
            raise ConfigError(f"The calibration has {', '.join(sorted(self.percentiles))}, not {key!r}: calibrate again.")
        return [0.0 if row is None else float(np.interp(percentile, self.grid, row)) for row in self.percentiles[key]]

    @property
    def weights_digest(self) -> str:  # type: ignore[override]
        """`model_digest` of the model; empty where none was given."""
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
                f"n_layers={self.n_layers!r} is no whole number, or provenance={type(self.provenance).__name__} no object"
            )
        if not self.grid or list(self.grid) != sorted({check_number("grid", p, 0.0, 100.0) for p in self.grid}):
            raise ConfigError(f"its grid {list(self.grid)!r} is not ascending")
        for key, rows in self.percentiles.items():
            if len(rows) != self.n_layers:
                raise ConfigError(f"{key} has {len(rows)} layers and n_layers is {self.n_layers}")
            for row in rows:
                if row is not None and len([check_number(key, value) for value in row]) != len(self.grid):
                    raise ConfigError(f"{key} has {len(row)} values in a layer and the grid {len(self.grid)}")


class Calibrated:
    """A module whose thresholds may be percentiles of what a calibration measured.

    Attributes:
        calibration: a `Calibration`, the path of one, or None until one is measured (`calibration.calibrate_modules`).
    """

    calibration: Calibration | Path | str | None

    def compared(self) -> Iterable[tuple[Signal, Thresholds | None]]:
        """Every signal that is compared with thresholds, and these."""
        return []

    def calibration_signals(self) -> list[Signal]:
        """The signals whose percentiles are thresholds and have not been measured; empty where `calibration` is given."""
        asked = {signal.key: signal for signal, tau in self.compared() if is_percentile(tau)}
        return list(asked.values()) if self.calibration is None else []

    def resolved(self, name: str, value: Thresholds | None, architecture: Architecture, key: str) -> list[float] | None:
        """The option `name` as one threshold per layer, length L; None where it is None.

        Args:
            key: what a percentile is of (`Signal.key`).

        Raises:
            ConfigError: a list of another length, a percentile without a calibration or with one of another model.
        """
        n_layers, calibration = architecture.n_layers, self.calibration
        if value is None:
            return None
        if not isinstance(value, str):
            values = value if isinstance(value, Sequence) else [value] * n_layers
            if len(values) != n_layers:
                found = f"{name} has {len(values)} values and the model has {n_layers} layers"
                raise ConfigError(f"{found}: give one per layer, or one number.")
            return [float(v) for v in values]
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


def check_thresholds(name: str, value: float | Sequence[float] | str, high: float = math.inf) -> None:
    """What can be said of thresholds before the model is known; raises ConfigError."""
    if is_percentile(value):
        if float(value[1:]) > 100:
            raise ConfigError(f"{name}={value!r} is no percentile: give one from 'p0' to 'p100', such as 'p25'.")
    elif is_list(value):
        if not value:
            raise ConfigError(f"{name}=[] names no threshold: give a number, or a list with one number per layer.")
        for layer, v in enumerate(value):
            check_number(f"{name}[{layer}]", v, 0.0, high)
    elif isinstance(value, str | bytes):
        wanted = "give one, a list with one per layer, or a percentile such as 'p25'"
        raise ConfigError(f"{name}={value!r} is not a number; {wanted}.")
    else:
        check_number(name, value, 0.0, high)


# One for all layers, one per layer, or a calibrated percentile such as "p25".
Thresholds = Annotated[float | Sequence[float] | str, check_thresholds]


def thresholds_of(module: object) -> dict[str, list[float]]:
    """What a bound module compares with in each layer, length L each: its attributes `_tau_…`, for the record."""
    of_tau = ((name, value) for name, value in vars(module).items() if name.startswith("_tau_"))
    return {name.removeprefix("_"): value for name, value in of_tau if isinstance(value, list)}


# -- measuring ---------------------------------------------------------------------------------------------------------------------
GRID = tuple(range(1, 100))
# What halts where the attention of halted tokens is measured.
HALTED_BY: tuple[Signal, ...] = (Drift("relative"), Entropy("logit_lens"))
SIGNALS: tuple[Signal, ...] = (*HALTED_BY, Drift("l2"), Drift("cosine"))
Progress = Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]]


@dataclass
class Measuring(TokenPolicy):
    """Decides nothing: collects the signals of the active tokens, or of those that another module has just halted."""

    signals: Sequence[Signal]
    of_newly_halted: bool = False
    priority: ClassVar[int] = 90
    halts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.values: dict[str, dict[int, list[torch.Tensor]]] = {signal.key: {} for signal in self.signals}

    def bind(self, architecture: Architecture) -> None:
        self.signals = [signal.bound(architecture) for signal in self.signals]

    @property
    def causal(self) -> bool:
        return all(signal.causal for signal in self.signals)

    def wants_attention(self, layer: int) -> bool:
        return any(signal.needs_attention for signal in self.signals)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        where = tokens.newly_halted if self.of_newly_halted else tokens.active
        if not bool(where.any()):
            return
        for signal in self.signals:
            self.values[signal.key].setdefault(view.layer, []).append(signal(view, tokens, where)[where].cpu())

    def percentiles(self, n_layers: int, grid: Sequence[float]) -> dict[str, list[list[float] | None]]:
        """As in `Calibration`. Scores of +inf (the observing queries of the attention signal) are no measurements."""

        def row(pieces: list[torch.Tensor]) -> list[float] | None:
            values = torch.cat(pieces).numpy() if pieces else np.empty(0)
            values = values[np.isfinite(values)]
            return np.percentile(values, grid).tolist() if values.size else None

        return {key: [row(layers.get(layer, [])) for layer in range(n_layers)] for key, layers in self.values.items()}


def calibrate(
    model: PreTrainedModel,
    windows: torch.Tensor,
    *,
    signals: Sequence[Signal] = SIGNALS,
    grid: Sequence[float] = GRID,
    batch_size: int = 8,
    source: dict[str, Any] | None = None,
    progress: Progress = iter,
) -> Calibration:
    """Measure `signals` in every layer but the last, after which nothing can halt (B.2, steps 1 and 2).

    Signals of attention received are measured in a second run, on the tokens that halt there when drift and entropy are below
    their 25th percentile (C.3), and kept under `halted_key`. What halts no token measures nothing.

    Args:
        windows: (W, N) long, token ids, no padding.
        grid: percentiles to keep, ascending.
        source: said about model and data in the provenance (names, paths).
        progress: wraps the batches of a run (`tqdm.tqdm`).

    Raises:
        ConfigError: no windows; attention without the relative drift and the logit-lens entropy.
    """
    if windows.dim() != 2 or windows.numel() == 0:
        raise ConfigError(f"Calibration needs windows of shape (W, N), not {tuple(windows.shape)}: give more text.")
    of_all = Measuring([s for s in signals if not s.needs_attention])
    n_layers = _forward(model, windows, [of_all], batch_size, progress)
    provenance = _provenance(model, windows) | {"torch": torch.__version__, "source": source or {}}
    calibration = Calibration(n_layers, tuple(grid), of_all.percentiles(n_layers, grid), provenance)
    of_halted = Measuring([s for s in signals if s.needs_attention], of_newly_halted=True)
    if of_halted.signals:
        from quicksilver.modules.halting import Halting  # which has thresholds itself

        halting = Halting(tau_drift="p25", tau_entropy="p25", calibration=calibration, resume_layers=0)
        _forward(model, windows, [halting, of_halted], batch_size, progress)
        calibration.percentiles.update({halted_key(key): rows for key, rows in of_halted.percentiles(n_layers, grid).items()})
    return calibration


def calibrated(
    folder: Path | str,
    model: PreTrainedModel,
    windows: torch.Tensor,
    *,
    signals: Sequence[Signal] = SIGNALS,
    grid: Sequence[float] = GRID,
    **options: Any,
) -> Calibration:
    """The calibration of this model, windows and signals: the one in `folder` if it was made before, else made and kept there.
    options: further ones of `calibrate`; they do not change what is measured."""
    path = calibration_path(folder, model, windows, signals, grid)
    if path.exists():
        return Calibration.load(path)
    calibration = calibrate(model, windows, signals=signals, grid=grid, **options)
    calibration.save(path)
    return calibration


def calibration_path(
    folder: Path | str,
    model: PreTrainedModel,
    windows: torch.Tensor,
    signals: Sequence[Signal] = SIGNALS,
    grid: Sequence[float] = GRID,
) -> Path:
    """Where `calibrated` keeps it: named by the digest of everything that decides the content."""
    content = _provenance(model, windows) | {"signals": sorted(s.key for s in signals), "grid": [float(g) for g in grid]}
    return Path(folder) / f"{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]}.json"


def calibrate_modules(
    modules: Sequence[RuntimeModule],
    folder: Path | str,
    model: PreTrainedModel,
    windows: torch.Tensor,
    *,
    made_before: Path | None = None,
    **options: Any,
) -> Calibration | None:
    """Give a calibration of `model` and `windows` to the modules whose percentiles have none. It holds the signals they ask for and no
    others, each measured once and kept in a file of its own below `folder`. Modules that are to be fitted are.

    Args:
        made_before: a folder with calibrations that are read as well.
        options: of `calibrate`.

    Returns:
        The calibration, or None when no module asks.
    """
    fitting = [m for m in modules if isinstance(m, Fitted) and not m.fitted]
    for learner in fitting:
        learner.fit(model, windows, options.get("batch_size", 8))
    asking = [m for m in modules if isinstance(m, Calibrated) and m.calibration_signals()]
    if not asking:
        return Calibration(architecture_of(model).n_layers, GRID, {}, _provenance(model, windows)) if fitting else None
    asked = {s.key: s for m in asking for s in m.calibration_signals()}
    paths = {key: calibration_path(folder, model, windows, [signal]) for key, signal in asked.items()}
    found = {
        key: Calibration.load(path)
        for key, kept in paths.items()
        for path in [kept, *([] if made_before is None else [made_before / kept.name])][::-1]
        if path.exists()
    }
    missing = [signal for key, signal in asked.items() if key not in found]
    if missing:
        # Attention is measured on the tokens that drift and entropy halt (C.3).
        needed = [*HALTED_BY, *missing] if any(signal.needs_attention for signal in missing) else missing
        made = calibrate(model, windows, signals=list({signal.key: signal for signal in needed}.values()), **options)
        for signal in missing:
            key = halted_key(signal.key) if signal.needs_attention else signal.key
            found[signal.key] = Calibration(made.n_layers, made.grid, {key: made.percentiles[key]}, made.provenance)
            found[signal.key].save(paths[signal.key])
    parts = [found[key] for key in asked]
    percentiles = {key: rows for part in parts for key, rows in part.percentiles.items()}
    calibration = Calibration(parts[0].n_layers, parts[0].grid, percentiles, parts[0].provenance)
    for module in asking:
        module.calibration = calibration
    return calibration


def _provenance(model: PreTrainedModel, windows: torch.Tensor) -> dict[str, Any]:
    return {
        "model_digest": model_digest(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "data_digest": hashlib.sha256(windows.cpu().to(torch.int64).contiguous().numpy().tobytes()).hexdigest(),
        "windows": windows.shape[0],
        "window_tokens": windows.shape[1],
        "numerics_version": numerics.VERSION,
    }


@torch.inference_mode()
def _forward(
    model: PreTrainedModel, windows: torch.Tensor, modules: Sequence[RuntimeModule], batch_size: int, progress: Progress
) -> int:
    """Run the windows through the model under `modules`; returns its number of layers."""
    with apply(model, modules) as run:
        for batch in progress(windows.split(batch_size)):
            model(batch.to(model.device), use_cache=False)
            run.reset()
        return run.arch.n_layers
