"""How right is the pseudo-gradient? Against what really happens when one decision is turned round (docs/learned-halting.md).

The true effect of a decision g ∈ {0, 1} is L(g = 1) − L(g = 0), all other decisions as they are: two forward passes. What training uses in
its place is one derivative of the equivalent forward at the decision that was taken, dL/dg.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from quicksilver.fitting.equivalent import Derivative, equivalent_forward
from quicksilver.runtime.errors import ConfigError

Loss = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Effects:
    """What decisions of one forward do to the loss.

    Attributes:
        kept: (K,) bool, the decision that was taken.
        true: (K,) L(g = 1) − L(g = 0). finite: (K,) the one-sided difference of the soft mask at the decision.
        estimated: by name of the derivative, (K,) dL/dg.
    """

    kept: np.ndarray
    true: np.ndarray
    finite: np.ndarray
    estimated: dict[str, np.ndarray]


def effects(
    model: PreTrainedModel, loss: Loss, layer: int, decisions: torch.Tensor, tokens: Sequence[int], step: float = 1e-3
) -> Effects:
    """The effects of the decisions about `tokens` of the first row, taken after `layer`.

    Args:
        loss: runs the model and gives a scalar.
        decisions: (B, N) of 1 and 0.
        step: of the finite difference.

    Raises:
        ConfigError: no token.
    """
    if not tokens:
        raise ConfigError("There is no token whose decision could be turned round: give at least one.")

    def run(g: torch.Tensor, derivative: Derivative = "both") -> torch.Tensor:
        with equivalent_forward(model, lambda at, hidden, kept: g if at == layer else None, derivative):
            return loss()

    names: tuple[Derivative, ...] = ("both", "states", "attention")
    estimated: dict[str, np.ndarray] = {}
    with torch.enable_grad():
        for name in names:
            g = decisions.clone().requires_grad_()
            (slope,) = torch.autograd.grad(run(g, name), g)
            estimated[name] = slope[0, list(tokens)].numpy()
    true, finite = [], []
    with torch.no_grad():
        for token in tokens:

            def at(value: float, token: int = token) -> float:
                g = decisions.clone()
                g[0, token] = value
                return float(run(g))

            here = float(decisions[0, token])
            true.append(at(1.0) - at(0.0))
            inward = step if here < 0.5 else -step  # a mask beyond 0 or 1 would be a negative weight
            finite.append((at(here + inward) - at(here)) / inward)
    return Effects(decisions[0, list(tokens)].numpy() > 0.5, np.array(true), np.array(finite), estimated)


@dataclass(frozen=True)
class Accuracy:
    """How near an estimate is to the true effects: correlation, share of equal signs, mean error over mean size, and the number of decisions."""

    correlation: float
    same_sign: float
    relative_error: float
    decisions: int


def accuracy(true: np.ndarray, estimated: np.ndarray) -> Accuracy:
    """Signs are compared where the true effect is not negligible (above a hundredth of the largest)."""
    matters = np.abs(true) > 0.01 * np.abs(true).max()
    return Accuracy(
        float(np.corrcoef(true, estimated)[0, 1]),
        float((np.sign(true) == np.sign(estimated))[matters].mean()),
        float(np.abs(true - estimated).mean() / np.abs(true).mean()),
        len(true),
    )
