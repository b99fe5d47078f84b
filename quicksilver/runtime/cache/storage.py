"""What a cache layer asks of whoever keeps its K and V."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from quicksilver.runtime.cache.entries import Entries, EntryTable, KVLayout, QuantizeDequantize

KV = tuple[torch.Tensor, torch.Tensor]
"""K and V, (B, H_kv, K, head_dim) each."""


class Storage(ABC):
    """K and V of one layer, in one representation.

    Attributes:
        table: which entries there are.
        keys, values: the tensors themselves where the representation has them, else None.
    """

    def __init__(self) -> None:
        self.table = EntryTable()
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    @property
    def stored_entries(self) -> Entries:
        """Facts of the entries, of a storage that has some."""
        entries = self.table.entries
        assert entries is not None, "nothing has been stored"
        return entries

    @property
    def stored_kv(self) -> KV:
        """`keys` and `values`, of a representation that has them."""
        assert self.keys is not None, "nothing has been stored"
        assert self.values is not None
        return self.keys, self.values

    @property
    def stored_rows(self) -> KV:
        """`padded` of a storage that has entries."""
        both = self.padded()
        assert both is not None, "nothing has been stored"
        return both

    @property
    def can_append(self) -> bool:
        """All rows have as many entries, side by side as they are attended to: a further token can just be put behind them."""
        return False

    @abstractmethod
    def is_complete(self, n_columns: int) -> bool:
        """Each of the `n_columns` columns seen has a plain entry."""

    @abstractmethod
    def plan(self, new: Entries, keep: torch.Tensor | None, in_order: bool = True) -> KVLayout:
        """Layout after adding tokens with facts `new` (B, M), of which `keep` (B, M) bool get an entry (None: all); `in_order`: their
        slots ascend."""

    @abstractmethod
    def write(self, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Add new K, V (B, H_kv, M, head_dim) by `layout`; returns all K and V, padded with anything on the right."""

    @abstractmethod
    def append(self, keys: torch.Tensor, values: torch.Tensor, first_slot: int) -> KV:
        """Add plain tokens, (B, H_kv, M, head_dim), from `first_slot` on; returns all K and V."""

    @abstractmethod
    def padded(self) -> KV | None:
        """All K and V, rows padded on the right; None when empty."""

    @abstractmethod
    def keep_only(self, present: torch.Tensor) -> None:
        """Let entries go that are not in `present` (B, K) bool."""

    @abstractmethod
    def crop(self, n_columns: int, n_real: torch.Tensor) -> None:
        """Forget what came after the first `n_columns` columns, of which `n_real` (B, 1) are real tokens."""

    @abstractmethod
    def merge(self, into: torch.Tensor, quantize_dequantize: QuantizeDequantize | None) -> None:
        """Groups of entries become one, as `merge_entries` says; into: (B, K) long."""

    @abstractmethod
    def select_rows(self, rows: torch.Tensor) -> None:
        """The batch becomes rows `rows` (B',) of itself."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of the tensors that hold K and V."""

    @abstractmethod
    def billed_bytes(self) -> int:
        """Bytes the decisions ask for: entries times the size of one."""


def own(x: torch.Tensor) -> torch.Tensor:
    """x without what it is a view of: a fused q, k, v product, or a cache that was longer."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()
