"""What a module sees: one layer of one pass after it ran, or the entries of one layer of the cache between two passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quicksilver.runtime.errors import ConfigError


@dataclass(eq=False)
class LayerView:
    """One layer of one pass after it ran: what a module may look at.

    Attributes:
        layer, n_layers: this layer (0-based) and their number.
        pass_index: which forward since the runtime was applied or reset.
        is_prompt: nothing was cached before and the pass has more than one token: all of it is known (docs/design.md §3).
        before, after: (B, M, D) states entering and leaving the layer.
        slots: (B, M) long, index in the sequence from its first real token.
        index: (B, M) long, column in this pass.
        input_ids: (B, M) long, or None when the model was given embeddings.
        n_tokens: (B, 1) long, real tokens of each row in this pass.
        pass_ids: (B, N) long, the ids of the whole pass, -1 for padding; None as `input_ids`.
        tokens_per_row: what `n_tokens` says of every row, where no row is padded; else None.
        add_signal_flops: counts what a signal took.
        head, received, own_keys, own_attention_output, all_heads: what the methods read.
    """

    layer: int
    n_layers: int
    pass_index: int
    is_prompt: bool
    before: torch.Tensor
    after: torch.Tensor
    slots: torch.Tensor
    index: torch.Tensor
    input_ids: torch.Tensor | None
    n_tokens: torch.Tensor
    head: Callable[..., torch.Tensor]
    received: Callable[[int | None, str], torch.Tensor] | None
    add_signal_flops: Callable[[int], None]
    all_heads: Callable[[torch.Tensor], torch.Tensor] = lambda states: states
    pass_ids: torch.Tensor | None = None
    own_keys: torch.Tensor | None = None
    own_attention_output: torch.Tensor | None = None
    tokens_per_row: int | None = None

    def logits(self, mask: torch.Tensor) -> torch.Tensor:
        """Logit lens of the K tokens in mask (B, M) bool, in row-major order: (K, V). Its cost goes into the ledger."""
        return self.head(self.after[mask])

    def logit_entropy_nats(
        self, mask: torch.Tensor, head_input: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Entropy of the logit lens of the K tokens in mask (B, M): (K,) float32, in nats (paper 2.1).

        Args:
            head_input: what the head is given for states (K', D) instead of their final norm: (K', D) (a fitted lens).
        """

        def entropy_nats(logits: torch.Tensor) -> torch.Tensor:
            log_p = logits.log_softmax(-1)
            return -(log_p.exp() * log_p).sum(-1)

        return self._of_logits(mask, entropy_nats, head_input)

    def logit_margin(self, mask: torch.Tensor) -> torch.Tensor:
        """By how much the logit lens of the K tokens in mask (B, M) prefers its first choice: (K,) float32, the difference of the two
        largest probabilities, 0 to 1 (CALM, arXiv 2207.07061)."""

        def margin(logits: torch.Tensor) -> torch.Tensor:
            first, second = logits.softmax(-1).topk(2, dim=-1).values.unbind(-1)
            return first - second

        return self._of_logits(mask, margin)

    def _of_logits(
        self,
        mask: torch.Tensor,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        head_input: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        selected = self.after[mask]
        if selected.shape[0] == 0:
            return selected.new_zeros(0, dtype=torch.float32)
        # In pieces: K x V logits of a long prompt and a large vocabulary would be gigabytes.
        return torch.cat(
            [
                reduce((self.head(piece) if head_input is None else self.head(head_input(piece), True)).float())
                for piece in selected.split(1024)
            ]
        )

    def attention_received(self, last_queries: int | None = 16, reduce: str = "mean") -> torch.Tensor:
        """Attention each token of the view gets in this layer from the last `last_queries` active tokens of its row: (B, M) float32.

        `mean` over heads and queries, or the `max` over both. None: from all active tokens. The queries' own tokens are included.

        Raises:
            ConfigError: the module did not say `wants_attention` for this layer, or an unknown `reduce`.
        """
        if reduce not in ("mean", "max"):
            raise ConfigError(f"attention_received(reduce={reduce!r}): give 'mean' or 'max'.")
        if self.received is None:
            raise ConfigError(
                f"Attention was not kept at layer {self.layer}: the module must return True from wants_attention({self.layer})."
            )
        return self.received(last_queries, reduce)

    @property
    def keys(self) -> torch.Tensor:
        """The tokens' own keys of this layer, as they are attended to: (B, H_kv, M, head_dim). Raises ConfigError as
        `attention_received`."""
        return self.all_heads(self._watched(self.own_keys, "keys"))

    @property
    def attention_output(self) -> torch.Tensor:
        """What the layer's attention adds to the residual stream: (B, M, D). Raises ConfigError as `attention_received`."""
        return self._watched(self.own_attention_output, "attention_output")

    def _watched(self, value: torch.Tensor | None, name: str) -> torch.Tensor:
        if value is None:
            raise ConfigError(
                f"view.{name} was not kept at layer {self.layer}: the module must return True from wants_attention({self.layer})."
            )
        return value


@dataclass(frozen=True)
class CacheView:
    """The K/V entries of one layer between two passes: what a module that merges or evicts them may look at.

    Attributes:
        layer, n_layers, pass_index: as in `LayerView`; the pass is the one that has just gone by.
        slots: (B, K) long, ascending within a row; present: (B, K) bool, False where there is no entry.
        size: (B, K) float32, original tokens that each entry stands for.
        n_seen: (B, 1) long, real tokens seen so far.
        n_new: columns since the prompt, or since entries were last merged.
        attention: (B, K) float32, attention each entry has received so far, summed over queries and averaged over heads; None unless
            a module's `sums_attention` asked for it.
        read_keys: gives `keys`.
    """

    layer: int
    n_layers: int
    pass_index: int
    slots: torch.Tensor
    present: torch.Tensor
    size: torch.Tensor
    n_seen: torch.Tensor
    n_new: int
    read_keys: Callable[[], torch.Tensor]
    attention: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor:
        """(B, H_kv, K, head_dim), unpacked when asked for."""
        return self.read_keys()
