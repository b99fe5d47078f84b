"""Which entries a cache layer has: facts about each, the layout of what comes in, and moving tokens whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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

    Plain entries at the end, of which nothing but the slot is known, are counted and written down only when somebody asks.

    Attributes:
        present: (B, K) bool, columns that are entries; None: all.
        keys, values: the tensors themselves where the representation has them, else None.
    """

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.present: torch.Tensor | None = None
        self._entries: Entries | None = None
        self._n_plain = self._first_plain = self._rows = 0
        self._device: torch.device | None = None

    # -- which entries there are -------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Entries | None:
        """(B, K) each; None: nothing has been stored."""
        if self._n_plain:
            slots = torch.arange(self._first_plain, self._first_plain + self._n_plain, device=self._device)
            self._entries = join_entries(self._entries, {"slots": slots.expand(self._rows, -1)})
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

    def add_plain(self, n: int, first_slot: int, rows: int, device: torch.device) -> None:
        """Count `n` plain entries a row, from `first_slot` on, behind those there are."""
        if not self._n_plain:
            self._first_plain = first_slot
        self._n_plain += n
        self._rows, self._device = rows, device

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
    """x without what it is a view of: a fused q, k, v product, or a cache that was longer."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


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
