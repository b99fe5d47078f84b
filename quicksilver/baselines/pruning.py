"""The model with MLP channels left out: structured pruning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import UnsupportedModelError
from quicksilver.runtime.module import Transform
from quicksilver.runtime.options import Share


@dataclass(kw_only=True)
class ChannelPruning(Transform):
    """Every MLP loses the channels whose weights are smallest, without training afterwards. Causal.

    Source: "Pruning Filters for Efficient ConvNets" (Li et al., arXiv 1608.08710), for the inner channels of an MLP.

    What differs: a channel's size is the product of two norms: of the weights that write it, and of those that read it.

    Args:
        share: of each MLP's channels that is left out.

    Raises:
        UnsupportedModelError: by `apply`, a family with a norm behind its MLP, or a model that is cut among processes.
    """

    share: Share = 0.3
    changes_weights: ClassVar[bool] = False

    @contextmanager
    def applied(self, architecture: Architecture) -> Iterator[None]:
        if architecture.ranks.size > 1:
            raise UnsupportedModelError("channel_pruning: the model is cut among processes: leave out model.parallel.")
        exchanged: list[tuple[Any, dict[str, Any]]] = []
        try:
            for layer in range(architecture.n_layers):
                readers, writer = architecture.residual_readers(layer)[-1][1], architecture.residual_writers(layer)[-1]
                width = _rows(writer).shape[1]
                sizes = _rows(writer).double().norm(dim=0)
                for reader in readers:
                    sizes = sizes * _rows(reader).double().reshape(-1, width, architecture.width).norm(dim=(0, 2))
                kept = sizes.topk(round((1 - self.share) * width)).indices.sort().values
                for linear in (*readers, writer):
                    exchanged.append((linear, dict(linear._parameters)))
                    _keep(linear, kept, width, columns=linear is writer)
            lost = sum(old["weight"].numel() - linear.weight.numel() for linear, old in exchanged)
            # The ledger is read after the run as well, so it stays.
            architecture.linear_params_per_layer = architecture.dense_linear_params_per_layer - lost // architecture.n_layers
            yield
        finally:
            for linear, parameters in exchanged:
                linear._parameters.update(parameters)
                _declare(linear)


def _rows(linear: Any) -> torch.Tensor:
    """Its weight as (outputs, inputs)."""
    return linear.weight.T if isinstance(linear, Conv1D) else linear.weight


def _keep(linear: Any, kept: torch.Tensor, width: int, *, columns: bool) -> None:
    """Only these of the `width` channels: input columns, or output rows; one map may hold several rows for a channel, `width` apart."""
    rows = _rows(linear)
    places = kept if columns else (kept + width * torch.arange(len(rows) // width, device=kept.device)[:, None]).flatten()
    rows = rows[:, places] if columns else rows[places]
    linear._parameters["weight"] = _fixed(rows.T if isinstance(linear, Conv1D) else rows)
    if linear.bias is not None and not columns:
        linear._parameters["bias"] = _fixed(linear.bias[places])
    _declare(linear)


def _fixed(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().contiguous(), requires_grad=False)


def _declare(linear: Any) -> None:
    """Make its own numbers of inputs and outputs those of its weight."""
    outputs, inputs = _rows(linear).shape
    if isinstance(linear, Conv1D):
        linear.nx, linear.nf = inputs, outputs
    else:
        linear.in_features, linear.out_features = inputs, outputs
