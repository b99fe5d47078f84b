"""How a layer of the cache holds its entries, and facts about each: dense tensors, or codes packed at their widths. Moving tokens whole."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quicksilver.runtime.quantized.codes import STORED_AS, UNTOUCHED, WIDTHS, ByWidth, Codes, encode, pack, rows_of, unpack

KV = tuple[torch.Tensor, torch.Tensor]
"""K and V, (B, H_kv, K, head_dim) each."""

Entries = dict[str, torch.Tensor]
"""Facts about each K/V entry, (B, K) each: `slots` long, and where they matter `size` float32 (super-tokens), `bits` uint8,
`attention` float32 (received so far)."""

_DEFAULTS = {"size": (1.0, torch.float32), "bits": (16, torch.uint8), "attention": (0.0, torch.float32)}


def join_entries(past: Entries | None, new: Entries) -> Entries:
    """Entries of [past, new]; a fact that one side lacks has its default there."""
    if past is None:
        return dict(new)

    def fact(side: Entries, name: str) -> torch.Tensor:
        return side[name] if name in side else torch.full_like(side["slots"], _DEFAULTS[name][0], dtype=_DEFAULTS[name][1])

    return {name: torch.cat([fact(past, name), fact(new, name)], dim=1) for name in past.keys() | new.keys()}


QuantizeDequantize = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""How K or V (B, H_kv, M, head_dim) read after having been coded at widths (B, M): `PrecisionExecutor.quantize_dequantize_kv`."""


def merge_entries(
    entries: Entries, present: torch.Tensor, kv: KV, into: torch.Tensor, quantize_dequantize: QuantizeDequantize | None = None
) -> tuple[Entries, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups of entries become one: K and V their means weighted by size, in the place of the one they go `into` (B, K) long.

    A rotary key keeps the rotation it was stored with, so a group's key is a mean over positions as well. With `quantize_dequantize` the means are
    coded at the width of the entry they go into.
    """
    size = entries.get("size", torch.ones_like(present, dtype=torch.float32))
    moves = present & (into != torch.arange(into.shape[1], device=into.device))
    rows, sources = moves.nonzero(as_tuple=True)
    targets = into[rows, sources]
    is_target = torch.zeros_like(present).index_put((rows, targets), present.new_ones(()))
    grown = size.index_put((rows, targets), size[rows, sources], accumulate=True)
    number = is_target.flatten().long().cumsum(0).view_as(into) - 1  # of each target among all
    merged = []
    for states in kv:
        by_entry = states.transpose(1, 2)  # (B, K, H_kv, head_dim)
        total = by_entry[is_target].float() * size[is_target][:, None, None]
        total.index_add_(0, number[rows, targets], by_entry[rows, sources].float() * size[rows, sources][:, None, None])
        mean = (total / grown[is_target][:, None, None]).to(states.dtype)  # (T, H_kv, head_dim)
        if quantize_dequantize is not None and "bits" in entries:
            mean = quantize_dequantize(mean.transpose(0, 1)[None], entries["bits"][is_target][None])[0].transpose(0, 1)
        merged.append(by_entry.masked_scatter(is_target[..., None, None], mean).transpose(1, 2))
    summed = {"size": grown}
    if "attention" in entries:
        received = entries["attention"]
        summed["attention"] = received.index_put((rows, targets), received[rows, sources], accumulate=True)
    return entries | summed, present & ~moves, merged[0], merged[1]


@dataclass
class KVLayout:
    """Which entries a layer will hold, known before its K and V are.

    Attributes:
        entries: facts of each entry, (B, K) each.
        valid: (B, K) bool, or None when every row is full.
        order: (B, K) columns of [past, new], None: all of them, in order.
        new: facts of what comes in, (B, M) each, whether it gets an entry or not.
    """

    entries: Entries
    valid: torch.Tensor | None
    order: torch.Tensor | None
    new: Entries

    @property
    def slots(self) -> torch.Tensor:
        return self.entries["slots"]


class Storage(ABC):
    """K and V of one layer in one representation, and which entries they are.

    Plain entries at the end, of which nothing but the slot is known, are counted, and written down only when asked for.

    Attributes:
        present: (B, K) bool, columns that are entries; None: all.
        keys, values: the tensors themselves where the representation has them, else None.
    """

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.present: torch.Tensor | None = None
        self._entries: Entries | None = None
        self._n_plain = self._first_plain = 0

    # -- which entries there are -------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Entries | None:
        """(B, K) each; None: nothing has been stored."""
        if self._n_plain:
            slots = torch.arange(self._first_plain, self._first_plain + self._n_plain, device=self.keys.device)
            self._entries = join_entries(self._entries, {"slots": slots.expand(self.keys.shape[0], -1)})
            self._n_plain = 0
        return self._entries

    @property
    def stored_entries(self) -> Entries:
        """The same, of a storage that has some."""
        entries = self.entries
        assert entries is not None, "nothing has been stored"
        return entries

    def put(self, entries: Entries | None, present: torch.Tensor | None) -> None:
        """Replace all that is known of entries."""
        self._entries, self.present, self._n_plain = entries, present, 0

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) long: entries of each row."""
        return self.is_entry.sum(1)

    @property
    def length(self) -> torch.Tensor | int:
        """Entries of each row, (B,) long, or of all of them."""
        if self.present is not None:
            return self.lengths
        return self._n_plain + (0 if self._entries is None else self._entries["slots"].shape[1])

    @property
    def facts(self) -> frozenset[str]:
        """Names of what is known of entries."""
        return frozenset(self._entries or ("slots",))

    @property
    def is_entry(self) -> torch.Tensor:
        """(B, K) bool: columns that are entries."""
        if self.present is not None:
            return self.present
        return torch.ones_like(self.stored_entries["slots"], dtype=torch.bool)

    @property
    def can_append(self) -> bool:
        """All rows have as many entries, side by side as they are attended to: a further token can just be put behind them."""
        return False

    @abstractmethod
    def is_complete(self, n_columns: int) -> bool:
        """Each of the `n_columns` columns seen has a plain entry."""

    # -- growing -----------------------------------------------------------------------------------------------------------------

    def plan(self, new: Entries, keep: torch.Tensor | None, in_order: bool = True) -> KVLayout:
        """Layout after adding tokens with facts `new` (B, M), of which `keep` (B, M) bool get an entry (None: all): entries to the left
        in slot order, what is none cut off. `in_order`: the slots of `new` ascend already."""
        entries = join_entries(self.entries, new)
        slots = entries["slots"]
        if keep is None and self.present is None:  # as many in every row: no host has to ask how many
            if in_order:
                return KVLayout(entries, None, None, new)
            order = slots.argsort(dim=1, stable=True)
            return KVLayout({name: fact.gather(1, order) for name, fact in entries.items()}, None, order, new)
        valid = torch.ones_like(slots, dtype=torch.bool)
        n_past = slots.shape[1] - new["slots"].shape[1]
        if self.present is not None:
            valid[:, :n_past] = self.present
        if keep is not None:
            valid[:, n_past:] = keep
        rank = torch.where(valid, slots, torch.iinfo(torch.long).max)
        order = rank.argsort(dim=1, stable=True)[:, : int(valid.sum(1).max())]
        valid = valid.gather(1, order)
        entries = {name: fact.gather(1, order) for name, fact in entries.items()}
        return KVLayout(entries, None if bool(valid.all()) else valid, order, new)

    @abstractmethod
    def write(self, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Add new K, V (B, H_kv, M, head_dim) by `layout`; returns all K and V, padded with anything on the right."""

    def append(self, keys: torch.Tensor, values: torch.Tensor, first_slot: int) -> KV:
        """Add plain tokens, (B, H_kv, M, head_dim), from `first_slot` on; returns all K and V."""
        slots = torch.arange(first_slot, first_slot + keys.shape[2], device=keys.device).expand(keys.shape[0], -1)
        return self.write(self.plan({"slots": slots}, None), keys, values)

    def after_stored(self, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """What there is, padded, with new K, V (B, H_kv, M, head_dim) behind it."""
        past = self.padded()
        return (keys, values) if past is None else (torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2))

    @abstractmethod
    def padded(self) -> KV | None:
        """All K and V, rows padded on the right; None when empty."""

    @property
    def stored_rows(self) -> KV:
        """The same of a storage that has entries."""
        both = self.padded()
        assert both is not None, "nothing has been stored"
        return both

    # -- rearranging -------------------------------------------------------------------------------------------------------------

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

    def resident_bytes(self) -> int:
        """Bytes of the tensors that hold K and V."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    def billed_bytes(self) -> int:
        """Bytes the decisions ask for: entries times the size of one. Facts of an entry (slot, width) are not counted."""
        if self.keys is None:
            return 0
        heads, head_dim = self.keys.shape[1], self.keys.shape[-1]  # in both dense representations
        return int(self.lengths.sum()) * 2 * heads * head_dim * self.keys.element_size()


def packed_to_the_left(entries: Entries, present: torch.Tensor) -> tuple[Entries, torch.Tensor, torch.Tensor]:
    """Entries before what is none: the facts and `present` (B, K) in the new order, and the order (B, K) long of columns."""
    order = (~present).to(torch.uint8).argsort(dim=1, stable=True)
    return {name: fact.gather(1, order) for name, fact in entries.items()}, present.gather(1, order), order


def without_padding(entries: Entries, present: torch.Tensor) -> tuple[Entries, torch.Tensor | None, int]:
    """Columns cut off that are padding in all rows: the facts, `present` (None: all), and how many columns are left."""
    width = int(present.sum(1).max())
    present = present[:, :width]
    return {name: fact[:, :width] for name, fact in entries.items()}, None if bool(present.all()) else present, width


def own(x: torch.Tensor) -> torch.Tensor:
    """x in memory of its own, head after head as `DynamicCache` has it: not a view of a fused q, k, v product, or of a longer cache."""
    whole = x.contiguous()
    return whole if whole.untyped_storage().nbytes() == x.nbytes else whole.clone()


# -- moving tokens whole -------------------------------------------------------------------------------------------------------------
# A token's state is one run of memory: copying it as one is ten times as fast as `gather`, which goes number by number. Same bits.


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


class DenseRows(Storage):
    """K and V of the tokens that have an entry, and nothing else.

    Rows of equal length are kept as (B, H_kv, K, head_dim). Rows of unequal length are kept end to end, (T, H_kv, head_dim) with T the
    sum of the lengths, and padded when read: the bytes resident are the bytes billed. Slots ascend within a row.
    """

    @property
    def can_append(self) -> bool:
        return self.present is None and self.keys is not None

    def is_complete(self, n_columns: int) -> bool:
        return self.present is None and bool(self.length == n_columns) and len(self.facts) == 1

    def write(self, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> KV:
        keys, values = self.after_stored(keys, values)
        if layout.order is not None:
            keys, values = take_kv(keys, layout.order), take_kv(values, layout.order)
        self._store(layout.entries, layout.valid, keys, values)
        return (keys, values) if self.present is not None else (self.keys, self.values)

    def append(self, keys: torch.Tensor, values: torch.Tensor, first_slot: int) -> KV:
        if not self._n_plain:
            self._first_plain = first_slot
        self._n_plain += keys.shape[2]  # they are written down when asked for
        if self.keys is None:
            self.keys, self.values = both = own(keys), own(values)
        else:  # side by side: no row is padded
            self.keys, self.values = both = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
        return both

    def padded(self) -> KV | None:
        """Rows are padded with zeros."""
        if self.keys is None or self.present is None:
            return None if self.keys is None else (self.keys, self.values)
        keys, values = (part.new_zeros(*self.present.shape, *part.shape[1:]) for part in (self.keys, self.values))
        keys[self.present], values[self.present] = self.keys, self.values
        return keys.transpose(1, 2), values.transpose(1, 2)

    def keep_only(self, present: torch.Tensor) -> None:
        self._store_packed(self.stored_entries, present, *self.stored_rows)

    def crop(self, n_columns: int, n_real: torch.Tensor) -> None:
        entries = self.stored_entries
        present = entries["slots"] < n_real
        if self.present is not None:
            present &= self.present
        self._store_trimmed(entries, present, *self.stored_rows)

    def merge(self, into: torch.Tensor, quantize_dequantize: QuantizeDequantize | None) -> None:
        self._store_packed(*merge_entries(self.stored_entries, self.is_entry, self.stored_rows, into, quantize_dequantize))

    def select_rows(self, rows: torch.Tensor) -> None:
        entries = {name: fact[rows] for name, fact in self.stored_entries.items()}
        keys, values = (part[rows] for part in self.stored_rows)
        if self.present is None:
            self._store(entries, None, keys, values)
        else:
            self._store_trimmed(entries, self.present[rows], keys, values)

    def _store(self, entries: Entries, present: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.put(entries, present)
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
        return bool(self.is_entry.all()) and len(self.facts) == 1

    def plan(self, new: Entries, keep: torch.Tensor | None, in_order: bool = True) -> KVLayout:
        keep = torch.ones_like(new["slots"], dtype=torch.bool) if keep is None else keep
        present = keep if self.present is None else torch.cat([self.present, keep], dim=1)
        return KVLayout(join_entries(self.entries, new), present, None, new)

    def write(self, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> KV:
        self.keys, self.values = self.after_stored(keys, values)
        self.put(layout.entries, layout.valid)
        return self.keys, self.values

    def padded(self) -> KV | None:
        return None if self.keys is None else (self.keys, self.values)

    def keep_only(self, present: torch.Tensor) -> None:
        self.put(self.entries, present)

    def crop(self, n_columns: int, n_real: torch.Tensor) -> None:
        self.keys, self.values = (own(part[:, :, :n_columns]) for part in (self.keys, self.values))
        entries = {name: fact[:, :n_columns] for name, fact in self.stored_entries.items()}
        self.put(entries, self.is_entry[:, :n_columns])

    def merge(self, into: torch.Tensor, quantize_dequantize: QuantizeDequantize | None) -> None:
        merged = merge_entries(self.stored_entries, self.is_entry, self.stored_rows, into, quantize_dequantize)
        entries, present, self.keys, self.values = merged
        self.put(entries, present)

    def select_rows(self, rows: torch.Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.put({name: fact[rows] for name, fact in self.stored_entries.items()}, self.is_entry[rows])


Pool = tuple[torch.Tensor, ...]
"""Entries of one width, (T, 2, H_kv, ...), K and V side by side: at 16 bits their values, else packed codes, scales, offsets."""


class PackedCodes(Storage):
    """K and V packed at the width of each entry (its `bits` fact): two 4-bit or four 2-bit codes a byte, scales in bfloat16.

    Entries of a width lie end to end, row by row, in slot order: what is resident is what is billed. Entries of 16 bits keep the
    dtype they came in. Reading decodes. An entry is coded once, when it comes in: selecting rows and cropping move codes.
    """

    def __init__(self, group_size: int, n_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.group_size = group_size
        self.n_heads, self.head_dim, self.dtype = n_heads, head_dim, dtype
        self.pools: dict[int, Pool] = {}

    @classmethod
    def of(cls, dense: Storage, group_size: int, like: torch.Tensor) -> PackedCodes:
        """What `dense` holds, as a pool of 16 bits; like: (B, H_kv, M, head_dim) of what will come in."""
        made = cls(group_size, like.shape[1], like.shape[3], like.dtype)
        made.put(dense.entries, dense.present)
        if dense.keys is not None:
            kv = (dense.keys, dense.values)
            flat = [part.transpose(1, 2).flatten(0, 1) for part in kv] if dense.present is None else kv
            made.pools = {UNTOUCHED: (torch.stack(flat, dim=1),)}
        return made

    def is_complete(self, n_columns: int) -> bool:
        return False

    def write(self, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> KV:
        batch = keys.shape[0]
        bits = layout.new.get("bits")
        if bits is None:
            bits = torch.full_like(layout.new["slots"], UNTOUCHED, dtype=torch.uint8)
        states = torch.stack([keys.transpose(1, 2), values.transpose(1, 2)], dim=2)  # (B, M, 2, H_kv, head_dim)
        new = ByWidth.of(bits)
        if layout.order is None and (batch == 1 or len(self.pools.keys() | new.rows.keys()) == 1):
            self.pools = self._extended(new, states, batch)  # decoding ends here: nothing has to move
            self.put(layout.entries, layout.valid)
        else:
            past = self.entries is not None
            at = self._places() if past else torch.zeros(batch, 0, dtype=torch.long, device=keys.device)
            at, pools = torch.cat([at, self._new_places(new, bits)], dim=1), self._extended(new, states)
            self._keep_places(layout.entries, layout.valid, at if layout.order is None else at.gather(1, layout.order), pools)
        return self.stored_rows

    def padded(self) -> KV | None:
        bits = self.stored_entries["bits"]
        shape = (*bits.shape, 2, self.n_heads, self.head_dim)
        if self.present is None and len(self.pools) == 1:
            ((width, pool),) = self.pools.items()
            states = self._decode(pool, width).view(shape)
        else:
            states = torch.zeros(shape, dtype=self.dtype, device=bits.device)
            for width, pool in self.pools.items():
                states[self.is_entry & (bits == width)] = self._decode(pool, width)
        return states[:, :, 0].transpose(1, 2), states[:, :, 1].transpose(1, 2)

    def keep_only(self, present: torch.Tensor) -> None:
        entries, present, order = packed_to_the_left(self.stored_entries, present)
        self._keep_places_trimmed(entries, present, self._places().gather(1, order), self.pools)

    def crop(self, n_columns: int, n_real: torch.Tensor) -> None:
        left = self.is_entry & (self.stored_entries["slots"] < n_real)
        self._keep_places_trimmed(self.stored_entries, left, self._places(), self.pools)

    def merge(self, into: torch.Tensor, quantize_dequantize: QuantizeDequantize | None) -> None:
        """A merged entry is coded anew at its width, whatever `quantize_dequantize`."""
        before = self.stored_entries
        size = before.get("size", torch.ones_like(self.is_entry, dtype=torch.float32))
        entries, present, keys, values = merge_entries(before, self.is_entry, self.stored_rows, into)
        targets = present & (entries["size"] != size)
        states = torch.stack([keys.transpose(1, 2), values.transpose(1, 2)], dim=2)[targets][None]
        bits = entries["bits"][targets][None]
        at, pools = (
            self._places().masked_scatter(targets, self._new_places(ByWidth.of(bits), bits)),
            self._extended(ByWidth.of(bits), states),
        )
        entries, present, order = packed_to_the_left(entries, present)
        self._keep_places_trimmed(entries, present, at.gather(1, order), pools)

    def select_rows(self, rows: torch.Tensor) -> None:
        entries = {name: fact[rows] for name, fact in self.stored_entries.items()}
        self._keep_places_trimmed(entries, self.is_entry[rows], self._places()[rows], self.pools)

    def resident_bytes(self) -> int:
        return sum(part.nbytes for pool in self.pools.values() for part in pool)

    def billed_bytes(self) -> int:
        bits = self.stored_entries["bits"][self.is_entry]
        groups = math.ceil(self.head_dim / min(self.group_size, self.head_dim))
        total = 0
        for width in WIDTHS:
            if width == UNTOUCHED:
                head = self.head_dim * self.dtype.itemsize
            else:
                head = math.ceil(self.head_dim * width / 8) + groups * 2 * STORED_AS.itemsize
            total += int((bits == width).sum()) * 2 * self.n_heads * head
        return total

    # -- codes -----------------------------------------------------------------------------------------------------------------

    def _encode(self, states: torch.Tensor, bits: int) -> Pool:
        """states: (T, 2, H_kv, head_dim)."""
        if bits == UNTOUCHED:
            return (states,)
        codes = encode(states, bits, self.group_size, STORED_AS)
        return pack(codes.code, bits), codes.scale, codes.offset

    def _decode(self, pool: Pool, bits: int) -> torch.Tensor:
        """K, V (T, 2, H_kv, head_dim) of a width's entries."""
        if bits == UNTOUCHED:
            return pool[0]
        code, scale, offset = pool
        size, width = min(self.group_size, self.head_dim), self.head_dim
        return Codes(bits, unpack(code, bits, width), scale, offset, size).decode(self.dtype)

    # -- pools: where an entry lies in the pool of its width is its place, (B, K) long -----------------------------------------

    def _places(self) -> torch.Tensor:
        at = torch.zeros_like(self.stored_entries["slots"])
        bits = self.stored_entries.get("bits", torch.full_like(at, UNTOUCHED, dtype=torch.uint8))
        for width in self.pools:
            here = self.is_entry & (bits == width)
            at = torch.where(here, here.flatten().cumsum(0).view_as(at) - 1, at)
        return at

    def _new_places(self, new: ByWidth, bits: torch.Tensor) -> torch.Tensor:
        """Those of entries of widths `bits` (B, M) that are added at the ends of the pools: (B, M) long."""
        at = torch.zeros(bits.numel(), dtype=torch.long, device=bits.device)
        for width, rows in new.rows.items():
            before = self.pools[width][0].shape[0] if width in self.pools else 0
            n = at.shape[0] if rows is None else rows.shape[0]
            at[slice(None) if rows is None else rows] = torch.arange(before, before + n, device=at.device)
        return at.view_as(bits)

    def _extended(self, new: ByWidth, states: torch.Tensor, batch: int = 1) -> dict[int, Pool]:
        """The pools with states (B, M, 2, H_kv, head_dim) added at their end, or at the end of each of `batch` rows of one width."""
        extended, flat = dict(self.pools), states.flatten(0, 1)
        for width, rows in new.rows.items():
            parts = self._encode(rows_of(flat, rows), width)
            if width in extended:
                parts = tuple(_joined_rows(old, part, batch) for old, part in zip(extended[width], parts, strict=True))
            extended[width] = parts
        return extended

    def _keep_places(self, entries: Entries, present: torch.Tensor | None, at: torch.Tensor, pools: dict[int, Pool]) -> None:
        """Keep the entries at the places `at` (B, K) of `pools`, in that order, and nothing else."""
        self.put(entries, present)
        self.pools = {}
        for width, pool in pools.items():
            places = at[self.is_entry & (entries["bits"] == width)]
            if places.numel():
                self.pools[width] = tuple(part[places] for part in pool)

    def _keep_places_trimmed(self, entries: Entries, present: torch.Tensor, at: torch.Tensor, pools: dict[int, Pool]) -> None:
        entries, trimmed, width = without_padding(entries, present)
        self._keep_places(entries, trimmed, at[:, :width], pools)


def _joined_rows(old: torch.Tensor, new: torch.Tensor, batch: int) -> torch.Tensor:
    """(B·K, ...) and (B·M, ...), row by row, as (B·(K+M), ...)."""
    if batch == 1:
        return torch.cat([old, new])
    rest = old.shape[1:]
    return torch.cat([old.view(batch, -1, *rest), new.view(batch, -1, *rest)], dim=1).view(-1, *rest)
