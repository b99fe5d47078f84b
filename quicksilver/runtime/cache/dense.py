"""K and V in the model's own number format: the entries and nothing else, or every column with a mask."""

from __future__ import annotations

import torch

from quicksilver.runtime.cache.entries import (
    Entries,
    KVLayout,
    QuantizeDequantize,
    merge_entries,
    packed_to_the_left,
    without_padding,
)
from quicksilver.runtime.cache.storage import KV, Storage, own
from quicksilver.runtime.rows import take_kv


class DenseRows(Storage):
    """K and V of the tokens that have an entry, and nothing else.

    Rows of equal length are kept as (B, H_kv, K, head_dim). Rows of unequal length are kept end to end, (T, H_kv, head_dim) with T the
    sum of the lengths, and padded when read: the bytes resident are the bytes billed. Slots ascend within a row.
    """

    @property
    def can_append(self) -> bool:
        return self.table.present is None and self.keys is not None

    def is_complete(self, n_columns: int) -> bool:
        table = self.table
        return table.present is None and bool(table.length == n_columns) and len(table.facts) == 1

    def plan(self, new: Entries, keep: torch.Tensor | None, in_order: bool = True) -> KVLayout:
        return self.table.plan_packed(new, keep, in_order)

    def write(self, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> KV:
        past = self.padded()
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        if layout.order is not None:
            keys, values = take_kv(keys, layout.order), take_kv(values, layout.order)
        self._store(layout.entries, layout.valid, keys, values)
        return keys, values

    def append(self, keys: torch.Tensor, values: torch.Tensor, first_slot: int) -> KV:
        n = keys.shape[2]
        if self.keys is not None:
            past_keys, past_values = self.stored_kv
            keys, values = torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2)
            self.keys, self.values = keys, values
        else:
            self.keys, self.values = own(keys), own(values)
        self.table.add_plain(n, first_slot, keys.shape[0], keys.device)
        return keys, values

    def padded(self) -> KV | None:
        """Rows are padded with zeros."""
        if self.keys is None:
            return None
        present = self.table.present
        if present is None:
            return self.stored_kv
        shape = (*present.shape, *self.keys.shape[1:])
        out = []
        for flat in self.stored_kv:
            rows = flat.new_zeros(shape)
            rows[present] = flat
            out.append(rows.transpose(1, 2))
        return out[0], out[1]

    def keep_only(self, present: torch.Tensor) -> None:
        self._store_packed(self.stored_entries, present, *self.stored_rows)

    def crop(self, n_columns: int, n_real: torch.Tensor) -> None:
        entries = self.stored_entries
        present = entries["slots"] < n_real
        if self.table.present is not None:
            present &= self.table.present
        self._store_trimmed(entries, present, *self.stored_rows)

    def merge(self, into: torch.Tensor, quantize_dequantize: QuantizeDequantize | None) -> None:
        keys, values = self.stored_rows
        self._store_packed(*merge_entries(self.stored_entries, self.table.is_entry, keys, values, into, quantize_dequantize))

    def select_rows(self, rows: torch.Tensor) -> None:
        if self.table.entries is None:
            return
        entries = {name: fact[rows] for name, fact in self.table.entries.items()}
        keys, values = (part[rows] for part in self.stored_rows)
        if self.table.present is None:
            self._store(entries, None, keys, values)
        else:
            self._store_trimmed(entries, self.table.present[rows], keys, values)

    def resident_bytes(self) -> int:
        return 0 if self.keys is None else sum(part.nbytes for part in self.stored_kv)

    def billed_bytes(self) -> int:
        if self.keys is None:
            return 0
        heads, head_dim = self.keys.shape[1], self.keys.shape[-1]  # in both representations
        return int(self.table.lengths.sum()) * 2 * heads * head_dim * self.keys.element_size()

    def _store(self, entries: Entries, present: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.table.put(entries, present)
        if present is None:
            self.keys, self.values = own(keys), own(values)
        else:
            self.keys, self.values = keys.transpose(1, 2)[present], values.transpose(1, 2)[present]

    def _store_packed(self, entries: Entries, present: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        entries, present, order = packed_to_the_left(entries, present)
        self._store_trimmed(entries, present, take_kv(keys, order), take_kv(values, order))

    def _store_trimmed(self, entries: Entries, present: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        entries, trimmed, width = without_padding(entries, present)
        self._store(entries, trimmed, keys[:, :, :width], values[:, :, :width])


class DenseColumns(Storage):
    """The reference: K and V of every column stay in memory, and a mask says which of them count.

    (B, H_kv, columns seen, head_dim). Nothing is packed, nothing is saved.
    """

    def is_complete(self, n_columns: int) -> bool:
        return bool(self.table.is_entry.all()) and len(self.table.facts) == 1

    def plan(self, new: Entries, keep: torch.Tensor | None, in_order: bool = True) -> KVLayout:
        return self.table.plan_in_place(new, keep)

    def write(self, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> KV:
        if self.keys is not None:
            past_keys, past_values = self.stored_kv
            keys, values = torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2)
        self.keys, self.values = keys, values
        self.table.put(layout.entries, layout.valid)
        return keys, values

    def append(self, keys: torch.Tensor, values: torch.Tensor, first_slot: int) -> KV:
        slots = torch.arange(first_slot, first_slot + keys.shape[2], device=keys.device).expand(keys.shape[0], -1)
        return self.write(self.plan({"slots": slots}, None), keys, values)

    def padded(self) -> KV | None:
        return None if self.keys is None else self.stored_kv

    def keep_only(self, present: torch.Tensor) -> None:
        self.table.put(self.table.entries, present)

    def crop(self, n_columns: int, n_real: torch.Tensor) -> None:
        self.keys, self.values = (own(part[:, :, :n_columns]) for part in self.stored_kv)
        entries = {name: fact[:, :n_columns] for name, fact in self.stored_entries.items()}
        self.table.put(entries, self.table.is_entry[:, :n_columns])

    def merge(self, into: torch.Tensor, quantize_dequantize: QuantizeDequantize | None) -> None:
        keys, values = self.stored_kv
        merged = merge_entries(self.stored_entries, self.table.is_entry, keys, values, into, quantize_dequantize)
        entries, present, self.keys, self.values = merged
        self.table.put(entries, present)

    def select_rows(self, rows: torch.Tensor) -> None:
        if self.table.entries is not None:
            self.keys, self.values = (part[rows] for part in self.stored_kv)
            entries = {name: fact[rows] for name, fact in self.stored_entries.items()}
            self.table.put(entries, self.table.is_entry[rows])

    def resident_bytes(self) -> int:
        return 0 if self.keys is None else sum(part.nbytes for part in self.stored_kv)

    def billed_bytes(self) -> int:
        if self.keys is None:
            return 0
        heads, head_dim = self.keys.shape[1], self.keys.shape[-1]
        return int(self.table.lengths.sum()) * 2 * heads * head_dim * self.keys.element_size()
