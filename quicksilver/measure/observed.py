"""The dense model watched layer by layer over many windows: what a measurement on words needs beside the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quicksilver.measure.latency import shared_weight_copy
from quicksilver.runtime.module import TokenPolicy
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.run import apply
from quicksilver.runtime.view import LayerView

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench

Look = Callable[[LayerView, TokenState], dict[str, torch.Tensor]]


@dataclass
class _Watch(TokenPolicy):
    """Decides nothing: keeps what `look` says of every layer."""

    look: Look
    attention: bool
    priority = 90
    halts = False

    def __post_init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    @property
    def causal(self) -> bool:
        return not self.attention

    def wants_attention(self, layer: int) -> bool:
        return self.attention

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        self.seen.append(self.look(view, tokens))


def observed(bench: Bench, windows: int, width: int, look: Look, *, attention: bool = False) -> dict[str, torch.Tensor]:
    """What `look` says of the first `windows` windows in the dense model, each as a prompt of `width` tokens.

    Args:
        look: from a view to arrays (B, …) by name, the same names and shapes in every layer it says them in.
        attention: whether `look` asks for attention received.

    Returns:
        By name (L', W, …) on the CPU, L' the layers that are asked: all but the last, which nothing is decided after.
    """
    rows: list[list[dict[str, torch.Tensor]]] = []
    size = bench.protocol.batch_size
    model = shared_weight_copy(bench.model)
    with torch.no_grad():
        for start in range(0, windows, size):
            bench.progress(start / windows)
            watch = _Watch(look, attention)
            batch = bench.windows.ids[start : min(start + size, windows), :width].to(bench.model.device)
            with apply(model, [watch], execution="compact"):
                model(batch, use_cache=False, logits_to_keep=1)
            rows.append([{name: value.float().cpu() for name, value in one.items()} for one in watch.seen])
    names = rows[0][0]
    return {name: torch.stack([torch.cat([row[layer][name] for row in rows]) for layer in range(len(rows[0]))]) for name in names}
