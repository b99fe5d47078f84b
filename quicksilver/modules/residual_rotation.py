"""Another orthonormal basis of the residual stream, folded into the weights: the same function with other channels (SliceGPT)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import UnsupportedModelError


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
