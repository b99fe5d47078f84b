"""What a module sees, without a model: views whose states, logits and attention are what a test says. Nothing here is a test."""

from collections.abc import Sequence
from types import SimpleNamespace

import tiny
import torch

from quicksilver.runtime import LayerView, PassState, RuntimeModule, TokenState

LAYERS = 10


class Pass:
    """One pass of rows of the given lengths, padded on the left; the decisions taken in it are in `state`.

    Args:
        ids: (B, N) long; None: the model was given embeddings.
        first_slot: tokens cached before.
        logits: what the head answers for states (K, D).
    """

    def __init__(
        self, lengths: Sequence[int], *, extra: int = 0, n_layers: int = LAYERS, ids: torch.Tensor | None = None, first_slot: int = 0,
        is_prompt: bool = True, logits: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        n = max(lengths) + extra
        self.shape = (len(lengths), n)
        self.lengths = torch.tensor(lengths)[:, None]
        valid = torch.arange(n) >= n - self.lengths
        self.slots = torch.where(valid, first_slot + valid.long().cumsum(1) - 1, -1)
        self.state = PassState(valid, self.slots, n_layers)
        self.ids, self.is_prompt, self.n_layers = ids, is_prompt, n_layers
        self.head = logits
        self.asked_logits = 0

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.asked_logits += hidden.shape[0]
        return hidden if self.head is None else hidden @ self.head

    def look(
        self, layer: int, before: torch.Tensor | None = None, after: torch.Tensor | None = None, attention: torch.Tensor | None = None
    ) -> tuple[LayerView, TokenState]:  # fmt: skip
        """The view after `layer`; states (B, N, D) and attention (B, N) are random unless given."""
        generator = torch.Generator().manual_seed(layer)
        before = torch.randn(*self.shape, 8, generator=generator) if before is None else before
        after = before + torch.randn(before.shape, generator=generator) if after is None else after
        attention = torch.rand(self.shape, generator=generator) if attention is None else attention
        view = LayerView(
            layer=layer, n_layers=self.n_layers, pass_index=0, is_prompt=self.is_prompt, before=before, after=after,
            slots=self.slots, index=torch.arange(self.shape[1]).expand(self.shape), input_ids=self.ids, n_tokens=self.lengths,
            head=self._logits, received=lambda last_queries, reduce: attention, add_signal_flops=lambda n: None,
        )  # fmt: skip
        return view, TokenState(self.state, view, None, self.state.active(layer))

    def ask(self, module: RuntimeModule, layer: int, halted: list[list[bool]] | None = None, **seen: torch.Tensor) -> LayerView:
        """Ask `module` after `layer`, once `halted` (B, N) have; the view, with the states that it leaves behind."""
        module.bind(architecture(self.n_layers))
        view, tokens = self.look(layer, **seen)
        if halted is not None:
            tokens.halt(torch.tensor(halted), missing_kv="project")
        if module.acts_at(layer):
            module.decide(view, tokens)
        return view

    def run(self, module: RuntimeModule, layers: Sequence[int] | None = None) -> PassState:
        """Ask `module` after each layer, as the runtime would."""
        module.bind(architecture(self.n_layers))
        for layer in range(self.n_layers - 1) if layers is None else layers:
            if module.acts_at(layer):
                module.decide(*self.look(layer))
        return self.state

    def halted(self, layer: int) -> torch.Tensor:
        """(B, N) bool: halted by decision after `layer` or before."""
        return self.state.valid & (self.state.halt_layer <= layer)


def architecture(n_layers: int = LAYERS) -> SimpleNamespace:
    """As much of an architecture as a module without a calibration asks for."""
    return SimpleNamespace(n_layers=n_layers, model=tiny.load("gpt2"), vocab_size=50_000, rotated_by="")
