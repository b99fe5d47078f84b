"""Channel sparsity: inside each token, small input channels of every linear map are set to zero (TEAL)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quicksilver.modules.checks import check_number
from quicksilver.modules.residual_rotation import RotatedModel, linear_maps, weight_of
from quicksilver.modules.thresholds import Fitted, model_digest
from quicksilver.runtime.architecture import Architecture, architecture_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import Transform

# Energies of products are filed by their binary logarithm, 64 bins an octave, from 2^-80 to 2^48.
_BINS_PER_OCTAVE, _LOWEST, _HIGHEST = 64, -80, 48


@dataclass(kw_only=True)
class ChannelSparsity(Transform, Fitted):
    """Before each linear map of the decoder layers, and before the output head, the input channels of a token that contribute little
    are set to zero. Causal: a channel is judged by its own value and by thresholds that were fixed on calibration text.

    Source: "Training-Free Activation Sparsity in Large Language Models" (TEAL, Liu et al., arXiv 2408.14690). A channel's size is
    |x_i| · ‖w_i‖, w_i its row of the weights, as in WINA (arXiv 2505.19427): what its product may add to the output. The rotation of
    the residual stream is that of SliceGPT (Ashkboos et al., arXiv 2401.15024): norms are folded into the maps behind them, and
    the principal components of the normalised states become the channels, most of which are small. The model computes the same
    function until channels are set to zero.

    What differs: TEAL finds the sparsity of each map by a greedy search; here every map loses the same share `error` of its
    output's energy on calibration text, as far as channels are independent. Inputs of the maps that write to the residual stream
    (attention output, second MLP map) are not rotated. There is no sparse kernel: the products are dense, so *executed* FLOPs
    are those of the dense model, and *nominal* ones leave out the products with a zero.

    Other modules see the rotated residual stream. Relative drift and everything made of logits are the same there.

    Args:
        error: share of the energy of each map's output, Σ_i (|x_i| · ‖w_i‖)² over channels and tokens, that is set to zero; 0 to 1.
        rotate: fold the rotation into the weights. False: channels as they are.

    Raises:
        ConfigError: an option out of range; by `apply`, a module that was not fitted, or that was fitted to other weights.
    """

    error: float = 0.0006
    rotate: bool = True

    def __post_init__(self) -> None:
        check_number("error", self.error, 0.0, 1.0)
        self._skippable = torch.zeros((), dtype=torch.int64)
        self._digest: str | None = None
        self._rotation: torch.Tensor | None = None  # (D, D) float64
        self._thresholds: list[torch.Tensor] = []  # (K,) float32 for each of `linear_maps`

    @property
    def fitted(self) -> bool:
        return self._digest is not None

    @property
    def skippable_flops(self) -> int:
        return int(self._skippable)

    @torch.no_grad()
    def fit(self, model: Any, windows: torch.Tensor, batch_size: int = 8) -> None:
        """Find the rotation and the thresholds, in one dense pass over the windows for each. Memory does not grow with the text.

        Args:
            model: a causal language model of a known family.
            windows: (W, N) long, calibration text.
        """
        architecture = architecture_of(model)

        def run() -> None:
            for batch in windows.split(batch_size):
                model(batch.to(model.device), use_cache=False)

        self._rotation = RotatedModel.principal_components(architecture, run) if self.rotate else None
        with self._weights(architecture):
            energies = [_Energies(weight_of(linear)) for linear in linear_maps(architecture)]
            with ExitStack() as stack:
                for linear, energy in zip(linear_maps(architecture), energies, strict=True):
                    handle = linear.register_forward_pre_hook(lambda _, args, energy=energy: energy.add(args[0]))
                    stack.callback(handle.remove)
                run()
        self._thresholds = [energy.thresholds(self.error) for energy in energies]
        self._digest = model_digest(model)

    @contextmanager
    def applied(self, architecture: Architecture) -> Iterator[None]:
        if self._digest is None:
            raise ConfigError("channel_sparsity has no thresholds: call fit(model, windows) with calibration text first.")
        if self._digest != (found := model_digest(architecture.model)):
            raise ConfigError(
                f"channel_sparsity was fitted to other weights (digest {self._digest[:12]}…, this model's is {found[:12]}…): fit it again."
            )
        with self._weights(architecture), ExitStack() as stack:
            for linear, threshold in zip(linear_maps(architecture), self._thresholds, strict=True):
                handle = linear.register_forward_pre_hook(self._zeroing(linear, threshold))
                stack.callback(handle.remove)
            yield

    @contextmanager
    def _weights(self, architecture: Architecture) -> Iterator[None]:
        if self._rotation is None:
            yield
        else:
            with RotatedModel(architecture, self._rotation).applied():
                yield

    def _zeroing(self, linear: nn.Module, threshold: torch.Tensor) -> Any:
        weight = weight_of(linear)
        threshold, flops_per_channel = threshold.to(weight), 2 * weight.shape[1]
        self._skippable = self._skippable.to(weight.device)

        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            small = args[0].abs() < threshold
            self._skippable += small.sum() * flops_per_channel
            return (args[0].masked_fill(small, 0), *args[1:])

        return hook


class _Energies:
    """How the energy of a map's output is spread over the sizes of its input channels, streaming.

    Args:
        weight: (K, M).
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.norms = weight.float().norm(dim=1)  # (K,)
        bins = (_HIGHEST - _LOWEST) * _BINS_PER_OCTAVE
        self.by_bin = torch.zeros(bins, dtype=torch.float64, device=weight.device)

    def add(self, states: torch.Tensor) -> None:
        """states: (..., K), an input of the map."""
        size = states.float().abs().reshape(-1, states.shape[-1]) * self.norms
        bins = ((size.log2() - _LOWEST) * _BINS_PER_OCTAVE).clamp(0, len(self.by_bin) - 1).long()  # log2(0) falls into the first
        self.by_bin.scatter_add_(0, bins.flatten(), size.double().square().flatten())

    def thresholds(self, error: float) -> torch.Tensor:
        """(K,) float32: below these, channels carry at most the share `error` of the energy."""
        share = self.by_bin.cumsum(0) / self.by_bin.sum().clamp_min(torch.finfo(torch.float64).tiny)
        kept = int((share <= error).sum())  # so many bins, from the smallest sizes on, may go
        size = 0.0 if kept == 0 else 2.0 ** (kept / _BINS_PER_OCTAVE + _LOWEST)
        return size / self.norms.clamp_min(torch.finfo(torch.float32).tiny)
