"""Channel sparsity: inside each token, small input channels of every linear map are set to zero (TEAL), in a rotated basis (SliceGPT)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.modules.fitted import model_digest
from quicksilver.modules.thresholds import Fitted
from quicksilver.runtime.architecture import Architecture, architecture_of
from quicksilver.runtime.errors import ConfigError, UnsupportedModelError
from quicksilver.runtime.module import Transform
from quicksilver.runtime.options import Share

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


# -- another orthonormal basis of the residual stream: the same function with other channels ---------------------------------------


def linear_maps(architecture: Architecture) -> list[nn.Module]:
    """The linear maps of all decoder layers, and the output head."""
    inside = [m for layer in architecture.layers for m in layer.modules() if isinstance(m, (nn.Linear, Conv1D))]
    return [*inside, architecture.output_head]


def weight_of(linear: nn.Module) -> torch.Tensor:
    """The weight as (K inputs, M outputs).

    Raises:
        UnsupportedModelError: weights that are offloaded.
    """
    weight: torch.Tensor = linear.weight.detach()  # type: ignore[operator]
    if weight.is_meta:
        raise UnsupportedModelError("The weights of a linear layer are offloaded and cannot be rotated: load the model whole.")
    return weight if isinstance(linear, Conv1D) else weight.T


class RotatedModel:
    """A model whose residual stream has another basis.

    A norm is a projection or none (the mean that a LayerNorm takes off), a division by the length, a gain and a bias. Projection,
    gain and bias are linear and go into the maps before and behind it; what is left does not depend on the basis. States x become
    x · Q: maps that write to the stream are multiplied by Q, maps that read from it by its transpose (Ashkboos et al., arXiv
    2401.15024).

    Args:
        rotation: Q, (D, D) float64, orthogonal.
    """

    def __init__(self, architecture: Architecture, rotation: torch.Tensor) -> None:
        self.architecture, self.rotation = architecture, rotation

    @staticmethod
    def principal_components(architecture: Architecture, run: Callable[[], None]) -> torch.Tensor:
        """The rotation to the principal components of the normalised states that maps read, (D, D) float64, greatest variance first.

        Args:
            run: passes the model over calibration text.
        """
        width, device = architecture.width, weight_of(architecture.output_head).device
        covariance = torch.zeros(width, width, dtype=torch.float64, device=device)

        def add(norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            states = _without_gain(norm, args[0]).double().reshape(-1, width)
            covariance.add_(states.T @ states)

        handles = [norm.register_forward_pre_hook(add) for norm, _ in _norms(architecture)]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        return torch.linalg.eigh(covariance)[1].flip(1)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model in the other basis; afterwards it is as it was."""
        before: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        renormed: list[nn.Module] = []

        def put(module: nn.Module, name: str, value: torch.Tensor) -> None:
            before.append((module, name, module._parameters.get(name)))
            dtype = _parameter(module, "weight").dtype
            module._parameters[name] = nn.Parameter(value.to(dtype).contiguous(), requires_grad=False)

        try:
            self._rotate(put)
            for norm, _ in _norms(self.architecture):
                norm.forward = MethodType(_without_gain_and_mean, norm)
                renormed.append(norm)
            yield
        finally:
            for norm in renormed:
                del norm.forward
            for module, name, parameter in reversed(before):
                module._parameters[name] = parameter

    def _rotate(self, put: Callable[[nn.Module, str, torch.Tensor], None]) -> None:
        """Put the rotation, and what norms do beside dividing, into the maps that read and write the stream."""
        arch, rotation = self.architecture, self.rotation

        def put_linear(linear: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            if bias is not None:
                put(linear, "bias", bias)
            put(linear, "weight", weight if isinstance(linear, Conv1D) else weight.T)

        # A LayerNorm takes the mean off; here the maps that write do, so that the stream has none.
        centred = any(isinstance(norm, nn.LayerNorm) for norm, _ in _norms(arch))
        for norm, readers in _norms(arch):
            gain = _parameter(norm, "weight").double()
            for linear in readers:
                weight, bias = weight_of(linear).double(), _bias(linear)
                if norm._parameters.get("bias") is not None:
                    shift = _parameter(norm, "bias").double() @ weight
                    bias = shift if bias is None else bias + shift
                put_linear(linear, rotation.T @ (gain[:, None] * weight), bias)
        for layer in range(arch.n_layers):
            for linear in arch.residual_writers(layer):
                weight, bias = weight_of(linear).double(), _bias(linear)
                if centred:
                    weight = weight - weight.mean(1, keepdim=True)
                    bias = None if bias is None else bias - bias.mean()
                put_linear(linear, weight @ rotation, None if bias is None else bias @ rotation)
        for embedding in arch.embeddings:
            table = _parameter(embedding, "weight").double()
            if centred:
                table = table - table.mean(1, keepdim=True)
            put(embedding, "weight", table @ rotation)


def _norms(architecture: Architecture) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Every norm of the residual stream with the maps that read what it gives."""
    inside = [pair for layer in range(architecture.n_layers) for pair in architecture.residual_readers(layer)]
    return [*inside, (architecture.final_norm, [architecture.output_head])]


def _parameter(module: nn.Module, name: str) -> torch.Tensor:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter.detach()


def _bias(linear: nn.Module) -> torch.Tensor | None:
    return None if linear._parameters.get("bias") is None else _parameter(linear, "bias").double()


def _epsilon(norm: nn.Module) -> float:
    return float(norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon)  # type: ignore[arg-type]


def _without_gain(norm: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """What the norm gives before its gain and bias: (..., D)."""
    if isinstance(norm, nn.LayerNorm):
        states = states - states.mean(-1, keepdim=True)
    return _without_gain_and_mean(norm, states)


def _without_gain_and_mean(norm: nn.Module, states: torch.Tensor) -> torch.Tensor:
    wide = states.float() if states.dtype != torch.float64 else states
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _epsilon(norm))).to(states.dtype)
