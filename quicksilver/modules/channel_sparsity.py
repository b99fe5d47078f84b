"""Channel sparsity: inside each token, small input channels of every linear map are set to zero (TEAL), in a rotated basis (SliceGPT)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.modules.calibration import Fitted
from quicksilver.modules.fitted import check_weights, model_digest
from quicksilver.modules.kernels import exchange
from quicksilver.runtime import Architecture, ConfigError, Transform, architecture_of
from quicksilver.runtime.architecture import linears_of
from quicksilver.runtime.options import Share
from quicksilver.runtime.placement import replaced
from quicksilver.runtime.quantized import kernels

# Energies of products are filed by their binary logarithm, 64 bins an octave, from 2^-80 to 2^48.
_BINS_PER_OCTAVE, _LOWEST, _HIGHEST = 64, -80, 48


@dataclass(kw_only=True)
class ChannelSparsity(Transform, Fitted):
    """Before each linear map of the decoder layers, and before the output head, the input channels of a token that contribute little
    are set to zero. Causal: a channel is judged by its own value and by thresholds that were fixed on calibration text.

    Source: "Training-Free Activation Sparsity in Large Language Models" (TEAL, Liu et al., arXiv 2408.14690). A channel's size is
    |x_i| · ‖w_i‖, w_i its row of the weights, as in WINA (arXiv 2505.19427): what its product may add to the output. The rotation of
    the residual stream is that of SliceGPT (Ashkboos et al., arXiv 2401.15024): norms are folded into the maps behind them, and
    the principal components of the normalised states become the channels, most of which are small.

    What differs: TEAL finds the sparsity of each map by a greedy search; here every map loses the same share `error` of its
    output's energy on calibration text, as far as channels are independent. Inputs of the maps that write to the residual stream
    (attention output, second MLP map) are not rotated. There is no sparse kernel: the products are dense, so *executed* FLOPs
    are those of the dense model, and *nominal* ones leave out the products with a zero.

    Other modules see the rotated residual stream. Relative drift and everything made of logits are the same there.

    Args:
        error: share of the energy of each map's output, Σ_i (|x_i| · ‖w_i‖)² over channels and tokens, that is set to zero; 0 to 1.
        rotate: fold the rotation into the weights. False: channels as they are.

    Raises:
        ConfigError: by `apply`, a module that was not fitted, or that was fitted to other weights.
    """

    error: Share = 0.0006
    rotate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
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

        self._rotation = principal_components(architecture, run) if self.rotate else None
        with ExitStack() as stack:
            stack.enter_context(self._basis(architecture))
            energies = [_Energies(weight_of(linear)) for linear in linear_maps(architecture)]
            for linear, energy in zip(linear_maps(architecture), energies, strict=True):
                stack.enter_context(linear.register_forward_pre_hook(energy.add))
            run()
        self._thresholds = [energy.thresholds(self.error) for energy in energies]
        self._digest = model_digest(model)

    def bind(self, architecture: Architecture) -> None:
        super().bind(architecture)
        architecture.rotated_by = "channel_sparsity" if self.rotate else ""

    @contextmanager
    def applied(self, architecture: Architecture) -> Iterator[None]:
        if self._digest is None:
            raise ConfigError("channel_sparsity has no thresholds: call fit(model, windows) with calibration text first.")
        check_weights("channel_sparsity", self._digest, architecture, "fit it again")
        with ExitStack() as stack:
            stack.enter_context(self._basis(architecture))
            for linear, threshold in zip(linear_maps(architecture), self._thresholds, strict=True):
                stack.enter_context(linear.register_forward_pre_hook(self._zeroing(linear, threshold)))
            yield

    def _basis(self, architecture: Architecture) -> Any:
        return nullcontext() if self._rotation is None else rotated(architecture, self._rotation)

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

    def add(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """A hook before the map, whose input is (..., K)."""
        size = args[0].float().abs().reshape(-1, args[0].shape[-1]) * self.norms
        bins = ((size.log2() - _LOWEST) * _BINS_PER_OCTAVE).clamp(0, len(self.by_bin) - 1).long()  # log2(0) falls into the first
        self.by_bin.scatter_add_(0, bins.flatten(), size.double().square().flatten())

    def thresholds(self, error: float) -> torch.Tensor:
        """(K,) float32: below these, channels carry at most the share `error` of the energy."""
        share = self.by_bin.cumsum(0) / self.by_bin.sum().clamp_min(torch.finfo(torch.float64).tiny)
        kept = int((share <= error).sum())  # so many bins, from the smallest sizes on, may go
        size = 0.0 if kept == 0 else 2.0 ** (kept / _BINS_PER_OCTAVE + _LOWEST)
        return size / self.norms.clamp_min(torch.finfo(torch.float32).tiny)


# -- another orthonormal basis of the residual stream: the same function with other channels ---------------------------------------
def linear_maps(architecture: Architecture) -> list[nn.Module]:
    """The linear maps of all decoder layers, and the output head."""
    return [*linears_of(architecture.layers), architecture.output_head]


def weight_of(linear: nn.Module) -> torch.Tensor:
    """The weight as (K inputs, M outputs); raises UnsupportedModelError where it is offloaded."""
    return kernels.weight_of(linear).T


def principal_components(architecture: Architecture, run: Callable[[], None]) -> torch.Tensor:
    """The rotation to the principal components of the normalised states that maps read, (D, D) float64, greatest variance first.
    run: passes the model over calibration text."""
    width, device = architecture.width, weight_of(architecture.output_head).device
    covariance = torch.zeros(width, width, dtype=torch.float64, device=device)

    def add(norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        centred = args[0] - args[0].mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else args[0]
        states = _divided(norm, centred).double().reshape(-1, width)
        covariance.add_(states.T @ states)

    with ExitStack() as stack:
        for norm, _ in _norms(architecture):
            stack.enter_context(norm.register_forward_pre_hook(add))
        run()
    return torch.linalg.eigh(covariance)[1].flip(1)


@contextmanager
def rotated(architecture: Architecture, rotation: torch.Tensor) -> Iterator[None]:
    """The model with another basis of its residual stream; afterwards it is as it was.

    A norm is a projection or none (the mean that a LayerNorm takes off), a division by the length, a gain and a bias. Projection,
    gain and bias are linear and go into the maps before and behind it; what is left does not depend on the basis. States x become
    x · Q: maps that write to the stream are multiplied by Q, maps that read from it by its transpose (Ashkboos et al., arXiv
    2401.15024).

    Args:
        rotation: Q, (D, D) float64, orthogonal.
    """
    norms = _norms(architecture)
    # A LayerNorm takes the mean off; here the maps that write do, so that the stream has none.
    centred = any(isinstance(norm, nn.LayerNorm) for norm, _ in norms)

    def written(x: torch.Tensor) -> torch.Tensor:
        """What is written to the stream, (..., D), in the other basis."""
        return (x - x.mean(-1, keepdim=True) if centred else x) @ rotation

    with ExitStack() as stack:

        def put(module: nn.Module, name: str, value: torch.Tensor) -> None:
            exchange(stack, module, name, value.to(_parameter(module, "weight").dtype))

        def put_linear(linear: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            if bias is not None:
                put(linear, "bias", bias)
            put(linear, "weight", weight if isinstance(linear, Conv1D) else weight.T)

        for norm, readers in norms:
            gain = _parameter(norm, "weight").double()
            for linear in readers:
                weight, bias = weight_of(linear).double(), _bias(linear)
                if (shift := _bias(norm)) is not None:
                    bias = shift @ weight if bias is None else bias + shift @ weight
                put_linear(linear, rotation.T @ (gain[:, None] * weight), bias)
        for linear in (one for layer in range(architecture.n_layers) for one in architecture.residual_writers(layer)):
            bias = _bias(linear)
            put_linear(linear, written(weight_of(linear).double()), None if bias is None else written(bias))
        for embedding in architecture.embeddings:
            put(embedding, "weight", written(_parameter(embedding, "weight").double()))
        for norm, _ in norms:
            stack.enter_context(replaced(norm, forward=MethodType(_divided, norm)))
        yield


def _norms(architecture: Architecture) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Every norm of the residual stream with the maps that read what it gives."""
    inside = [pair for layer in range(architecture.n_layers) for pair in architecture.residual_readers(layer)]
    return [*inside, (architecture.final_norm, [architecture.output_head])]


def _parameter(module: nn.Module, name: str) -> torch.Tensor:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter.detach()


def _bias(module: nn.Module) -> torch.Tensor | None:
    return None if module._parameters.get("bias") is None else _parameter(module, "bias").double()


def _divided(norm: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """What a norm without mean, gain and bias gives: (..., D)."""
    epsilon = float(norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon)  # type: ignore[arg-type]
    wide = states.float() if states.dtype != torch.float64 else states
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(states.dtype)
