"""Moving tokens whole: a token's state is one run of memory, and copying it as one is ten times as fast as `gather`, which goes
number by number. Values are moved, never computed: results are the same bits.
"""

from __future__ import annotations

import torch


def take_rows(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """(B, N, ...) -> (B, A, ...): columns `order` (B, A) long of each sequence."""
    if x.ndim == 2:
        return x.gather(1, order)
    return x.flatten(0, 1).index_select(0, _flat(order, x.shape[1])).unflatten(0, order.shape)


def put_rows(full: torch.Tensor, order: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A copy of `full` (B, N, ...) with the columns `order` (B, A) long, no two alike, replaced by `new` (B, A, ...)."""
    put = full.flatten(0, 1).index_copy(0, _flat(order, full.shape[1]), new.flatten(0, 1))
    return put.unflatten(0, full.shape[:2])


def take_kv(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """(B, H_kv, N, head_dim) -> (B, H_kv, A, head_dim), which lie in memory as a projection leaves them: token after token."""
    return take_rows(states.transpose(1, 2), order).transpose(1, 2)


def join_kv(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """(B, H_kv, ., head_dim) one after the other, token after token in memory."""
    return parts[0] if len(parts) == 1 else torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)


def _flat(order: torch.Tensor, n: int) -> torch.Tensor:
    """Columns of each of B sequences as rows of all sequences end to end, (B · A,)."""
    if order.shape[0] == 1:
        return order.flatten()
    first = torch.arange(0, order.shape[0] * n, n, device=order.device)
    return (order + first[:, None]).flatten()
