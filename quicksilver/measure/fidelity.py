"""How near a run stays to the dense model: KL divergence of its predictions from the dense ones, and whether the likeliest token agrees.

A perplexity may fall while predictions drift apart; these two may not. Both are taken position by position on the same tokens, so that
they pair by window as perplexity does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from quicksilver.measure.latency import shared_weight_copy
from quicksilver.measure.perplexity import Protocol, scored_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT_BYTES = 2**30  # dense logits that are kept for the null and for the next run; what is beyond is computed again
_ROWS_AT_A_TIME = 256  # as in perplexity.py: a float32 copy of all logits of a batch would triple the peak


def divergence(dense: torch.Tensor, run: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(dense‖run) and agreement of the likeliest token, by position.

    Args:
        dense, run: (B, S, V) logits of the same positions.

    Returns:
        Nats, (B, S) float64, and whether both have their greatest logit at the same token, (B, S) bool.
    """
    positions = max(1, _ROWS_AT_A_TIME // dense.shape[0])
    kl, same = [], []
    for some_dense, some_run in zip(dense.split(positions, dim=1), run.split(positions, dim=1), strict=True):
        log_p, log_q = some_dense.float().log_softmax(-1), some_run.float().log_softmax(-1)
        # Rounding leaves equal distributions a few 1e-8 to either side of 0.
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64).clamp(min=0))
        same.append(some_dense.argmax(-1) == some_run.argmax(-1))
    return torch.cat(kl, dim=1), torch.cat(same, dim=1)


class DenseLogits:
    """The dense model's logits of batches of windows, computed once where they fit into `kept_bytes`.

    Args:
        model: the model of the run, whose weights it shares; not under `apply` yet.
    """

    def __init__(self, model: PreTrainedModel, protocol: Protocol, kept_bytes: int = KEPT_BYTES) -> None:
        self._model, self._protocol, self._left = shared_weight_copy(model), protocol, kept_bytes
        self._kept: dict[int, list[torch.Tensor]] = {}

    def comparison(self, first_window: int, batch: torch.Tensor) -> Comparison:
        """Of the windows (B, N) with the dense model; `first_window` says which they are."""
        return Comparison(self._of(first_window, batch))

    def _of(self, first_window: int, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits (B, S, V), call by call as `scored_logits` yields them."""
        if first_window in self._kept:
            yield from self._kept[first_window]
            return
        calls: list[torch.Tensor] = []
        held, fits = 0, True
        for logits, _ in scored_logits(self._model, batch, self._protocol):
            held += logits.nbytes
            fits = fits and held <= self._left
            calls = [*calls, logits] if fits else []
            yield logits
        if fits:
            self._kept[first_window] = calls
            self._left -= held


class DensePasses:
    """What passes of the dense model gave that several runs need: computed by the first of them.

    Attributes:
        logits: of the windows.
        peak_tensor_bytes: of one batch; None: nobody asked yet.
        energy_j_per_token: as CodeCarbon read it over one batch, again and again; by its settings.
    """

    def __init__(self, model: PreTrainedModel, protocol: Protocol) -> None:
        self.logits = DenseLogits(model, protocol)
        self.peak_tensor_bytes: int | None = None
        self.energy_j_per_token: dict[str, float] = {}


class Comparison:
    """One batch compared with the dense model, call by call."""

    def __init__(self, dense: Iterator[torch.Tensor]) -> None:
        self._dense = dense
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, logits: torch.Tensor) -> None:
        """The run's logits of the next call, (B, S, V)."""
        self._found.append(divergence(next(self._dense), logits))

    def columns(self) -> dict[str, list[float]]:
        """By window, over its scored positions: mean `kl_nats` and the share `top1_agreement`."""
        next(self._dense, None)  # the last call is kept when the iterator ends
        kl, same = (torch.cat(parts, dim=1) for parts in zip(*self._found, strict=True))
        return {"kl_nats": kl.mean(1).tolist(), "top1_agreement": same.double().mean(1).tolist()}
