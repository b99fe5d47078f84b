"""The model with MLP channels left out: structured pruning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.pytorch_utils import Conv1D

from quicksilver.modules.kernels import exchange
from quicksilver.runtime import Architecture, Transform, UnsupportedModelError
from quicksilver.runtime.architecture import linear_params
from quicksilver.runtime.options import Share
from quicksilver.runtime.quantized.kernels import weight_of


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
        lost = 0
        with ExitStack() as stack:
            for layer in range(architecture.n_layers):
                readers, writer = architecture.residual_readers(layer)[-1][1], architecture.residual_writers(layer)[-1]
                width = weight_of(writer).shape[1]
                sizes = weight_of(writer).double().norm(dim=0)
                for reader in readers:
                    sizes = sizes * weight_of(reader).double().reshape(-1, width, architecture.width).norm(dim=(0, 2))
                kept = sizes.topk(round((1 - self.share) * width)).indices.sort().values
                lost += sum(_keep(stack, linear, kept, width, columns=linear is writer) for linear in (*readers, writer))
            # The ledger is read after the run as well, so they stay.
            architecture.linear_params_per_layer = architecture.dense_linear_params_per_layer - lost // architecture.n_layers
            architecture.mlp_params_per_layer = linear_params(architecture.mlp(0))
            yield


def _keep(stack: ExitStack, linear: Any, kept: torch.Tensor, width: int, *, columns: bool) -> int:
    """Only these of the `width` channels, until the stack closes: input columns, or output rows; one map may hold several rows for a channel,
    `width` apart. Returns how many weights are left out."""
    stack.callback(_declare, linear)  # once the weight is back
    rows = weight_of(linear)
    places = kept if columns else (kept + width * torch.arange(len(rows) // width, device=kept.device)[:, None]).flatten()
    left = rows[:, places] if columns else rows[places]
    exchange(stack, linear, "weight", left.T if isinstance(linear, Conv1D) else left)
    if linear.bias is not None and not columns:
        exchange(stack, linear, "bias", linear.bias[places])
    _declare(linear)
    return rows.numel() - left.numel()


def _declare(linear: Any) -> None:
    """Make its own numbers of inputs and outputs those of its weight."""
    outputs, inputs = weight_of(linear).shape
    if isinstance(linear, Conv1D):
        linear.nx, linear.nf = inputs, outputs
    else:
        linear.in_features, linear.out_features = inputs, outputs
