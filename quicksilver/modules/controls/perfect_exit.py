"""An oracle of halting: the earliest layer at which a token could stop without another prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from quicksilver.modules.checks import check_choice
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import TokenPolicy
from quicksilver.runtime.pass_state import MISSING_KV, MissingKV, TokenState
from quicksilver.runtime.run import apply
from quicksilver.runtime.trace import Trace
from quicksilver.runtime.view import LayerView

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class _LensPrediction(TokenPolicy):
    """Decides nothing: notes by layer which columns of the pass the logit lens predicts what for: (index, predicted), (B, M)."""

    noted: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        predicted = torch.full_like(view.index, -1)
        for row in range(view.slots.shape[0]):  # row by row: the logits of a whole batch are gigabytes
            mask = torch.zeros_like(tokens.active)
            mask[row] = tokens.active[row]
            predicted[mask] = view.logits(mask).argmax(-1)
        self.noted[view.layer] = view.index, predicted


@torch.inference_mode()
def perfect_exit(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    missing_kv: MissingKV = "project",
    pass_tokens: Sequence[int] | None = None,
) -> Trace:
    """An oracle, as a trace for `Replay`: each token halts after the earliest layer whose prediction is the last layer's.

    One dense run; the prediction of a layer is the largest logit of its logit lens. It knows what it saves, so it bounds what a
    signal can.

    Args:
        input_ids: (B, N) long; attention_mask: (B, N), 0 for padding.
        missing_kv: what later layers see of a halted token.
        pass_tokens: columns of each pass the trace is to be replayed in, such as (448, 64) for a prompt and its continuation;
            None: one pass.

    Raises:
        ConfigError: `pass_tokens` that do not add up to N.
    """
    check_choice("missing_kv", missing_kv, MISSING_KV)
    pass_tokens = [input_ids.shape[1]] if pass_tokens is None else list(pass_tokens)
    if sum(pass_tokens) != input_ids.shape[1]:
        raise ConfigError(
            f"pass_tokens={pass_tokens} add up to {sum(pass_tokens)}, and there are {input_ids.shape[1]} columns of input."
        )
    lens = _LensPrediction()
    with apply(model, [lens]) as run:
        final = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits.argmax(-1)
        (dense,) = run.trace.passes
    halt_layer = dense.halt_layer
    for layer in sorted(lens.noted, reverse=True):
        index, predicted = lens.noted[layer]
        same = torch.zeros_like(final, dtype=torch.bool).scatter(1, index, predicted == final.gather(1, index)).cpu()
        halt_layer = torch.where(same & dense.valid, layer, halt_layer).to(torch.int16)
    halted_kv = torch.where(halt_layer < dense.n_layers - 1, MISSING_KV.index(missing_kv), dense.halted_kv).to(torch.uint8)
    exits = dataclasses.replace(dense, halt_layer=halt_layer, halted_kv=halted_kv)
    passes, first = [], 0
    for n in pass_tokens:
        columns: dict[str, Any] = {
            name: x[:, first : first + n] for name, x in vars(exits).items() if isinstance(x, torch.Tensor)
        }
        passes.append(dataclasses.replace(exits, first_column=first, **columns))
        first += n
    return Trace(exits.n_layers, passes)
