"""Fit a lens: one dense pass over the text, then one ridge regression for each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from quicksilver.fitting.regression import RIDGE, TOKENS_PER_COEFFICIENT
from quicksilver.fitting.text import FitText
from quicksilver.modules.lens import Lens
from quicksilver.modules.thresholds import model_digest
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError

Progress = Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]]


@torch.no_grad()
def fit_lens(
    architecture: Architecture, text: FitText, *, ridge: float = RIDGE, batch_size: int = 4, progress: Progress = iter
) -> Lens:
    """From the state after each layer to what the model's own last state gives the output head.

    Args:
        ridge: λ as a multiple of the mean of the diagonal of XᵀX.
        progress: wraps the batches (`tqdm.tqdm`).

    Raises:
        ConfigError: too little text, or states that are not finite.
    """
    arch, rows = architecture, 1 + architecture.width
    if text.ids.numel() < TOKENS_PER_COEFFICIENT * rows:
        raise ConfigError(
            f"{text.ids.numel()} tokens are too few to fit {rows} coefficients a column: give at least {TOKENS_PER_COEFFICIENT * rows}."
        )
    xx = torch.zeros(arch.n_layers - 1, rows, rows, dtype=torch.float64)
    xy = torch.zeros(arch.n_layers - 1, rows, arch.width, dtype=torch.float64)
    states: list[torch.Tensor] = []

    def meet(layer: int, module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        normed = arch.normalised_input(layer, hidden).flatten(0, 1)
        states.append(torch.cat([torch.ones_like(normed[:, :1]), normed], dim=1))  # (B·N, 1 + D)

    def end(module: Any, args: Any, output: torch.Tensor) -> None:
        target = output.flatten(0, 1).float()
        for layer, state in enumerate(states):
            xx[layer] += (state.T @ state).cpu().double()
            xy[layer] += (state.T @ target).cpu().double()
        states.clear()

    handles = [layer.register_forward_hook(partial(meet, index)) for index, layer in enumerate(arch.layers[: arch.n_layers - 1])]
    handles.append(arch.final_norm.register_forward_hook(end))
    try:
        for batch in progress(text.ids.split(batch_size)):
            arch.base(input_ids=batch.to(arch.model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if not bool(torch.isfinite(xy).all() and torch.isfinite(xx).all()):
        raise ConfigError("The model's states are not all finite: fit with model.dtype=float32.")
    penalty = ridge * xx.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(rows, dtype=torch.float64)
    weight = torch.cholesky_solve(xy, torch.linalg.cholesky(xx + penalty)).float()
    said = {**text.provenance, "digest": text.digest, "ridge": ridge, "tokens": text.ids.numel()}
    return Lens(weight, model_digest(arch.model), said)
