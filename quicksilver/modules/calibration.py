"""Measure a model's signals on text, for thresholds that are percentiles (paper B.2, C.3).

Made once per model and data by `calibrated` (`quicksilver calibrate` is its command line), kept as JSON, and found again by digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from quicksilver import numerics
from quicksilver.modules.fitted import model_digest
from quicksilver.modules.halting import Halting
from quicksilver.modules.signals import Drift, Entropy, Signal
from quicksilver.modules.thresholds import Calibrated, Calibration, Fitted, halted_key
from quicksilver.runtime.architecture import Architecture, architecture_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import RuntimeModule, TokenPolicy
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.run import apply
from quicksilver.runtime.view import LayerView

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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

    Args:
        options: further ones of `calibrate`; they do not change what is measured.
    """
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
