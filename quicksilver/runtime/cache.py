"""Caches whose layers hold different tokens.

They are `transformers` cache *layers*: the runtime puts them in place of the layers of whatever `DynamicCache` the model or
`generate()` made, so growing, beams (`reorder_cache`) and `crop` keep working through the usual calls. `get_seq_length()` answers with
the columns seen, so positions stay right when layer 30 holds half of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer

from quicksilver.runtime.errors import UnsupportedModelError

Entries = dict[str, torch.Tensor]
"""Facts about each K/V entry, (B, K) each: `slots` long, and where they matter `size` float32 (super-tokens), `bits` uint8,
`attention` float32 (received so far)."""

_DEFAULTS: dict[str, tuple[float, torch.dtype]] = {
    "size": (1.0, torch.float32),
    "bits": (16, torch.uint8),
    "attention": (0.0, torch.float32),
}


def join_entries(past: Entries | None, new: Entries) -> Entries:
    """Entries of [past, new]; a fact that one side lacks has its default there."""
    if past is None:
        return dict(new)
    joined: Entries = {}
    for name in past.keys() | new.keys():
        sides = []
        for side in (past, new):
            if name in side:
                sides.append(side[name])
            else:
                value, dtype = _DEFAULTS[name]
                sides.append(torch.full_like(side["slots"], value, dtype=dtype))  # type: ignore[arg-type]
        joined[name] = torch.cat(sides, dim=1)
    return joined


Hold = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""How K or V (B, H_kv, M, head_dim) read after having been held at widths (B, M): `PrecisionExecutor.hold_kv`."""


def merge_entries(
    entries: Entries,
    present: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    into: torch.Tensor,
    hold: Hold | None = None,
) -> tuple[Entries, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups of entries become one: K and V their means weighted by size, in the place of the one they go `into` (B, K) long.

    A rotary key keeps the rotation it was stored with, so a group's key is a mean over positions as well. With `hold` the means are
    held at the width of the entry they go into.
    """
    size = entries.get("size")
    size = torch.ones_like(present, dtype=torch.float32) if size is None else size
    moves = present & (into != torch.arange(into.shape[1], device=into.device))
    rows, sources = moves.nonzero(as_tuple=True)
    targets = into[rows, sources]
    is_target = torch.zeros_like(present).index_put((rows, targets), present.new_ones(()))
    grown = size.index_put((rows, targets), size[rows, sources], accumulate=True)
    number = is_target.flatten().long().cumsum(0).view_as(into) - 1  # of each target among all
    merged = []
    for states in (keys, values):
        by_entry = states.transpose(1, 2)  # (B, K, H_kv, head_dim)
        total = by_entry[is_target].float() * size[is_target][:, None, None]
        total.index_add_(0, number[rows, targets], by_entry[rows, sources].float() * size[rows, sources][:, None, None])
        mean = (total / grown[is_target][:, None, None]).to(states.dtype)  # (T, H_kv, head_dim)
        if hold is not None and "bits" in entries:
            mean = hold(mean.transpose(0, 1)[None], entries["bits"][is_target][None])[0].transpose(0, 1)
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


class RaggedLayer(DynamicLayer):
    """K and V of the tokens that have an entry in this layer, and nothing else.

    Rows of equal length are kept as (B, H_kv, K, head_dim). Rows of unequal length are kept end to end, (T, H_kv, head_dim) with T the
    sum of the lengths, and padded when read: the bytes resident are the bytes billed. Slots ascend within a row.
    """

    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0  # columns of input seen, padding and skipped tokens included
        self.valid: torch.Tensor | None = None  # (B, K) bool; None: rows of equal length
        self.settled = 0  # columns seen when the prompt ended, or when entries were last merged
        self.merged = False
        self.evicted = 0  # columns seen when entries last left
        self._entries: Entries | None = None
        self._real_seen: torch.Tensor | None = None
        # Plain columns at the end whose facts nobody has asked for: decoding need not write down what can be counted.
        self._uncounted_entries = self._uncounted_real = self._rows = 0

    @property
    def entries(self) -> Entries | None:
        """Facts of each entry; None: nothing has been stored."""
        if self._uncounted_entries:
            slots = torch.arange(self.seen - self._uncounted_entries, self.seen, device=self.device)
            self._entries = join_entries(self._entries, {"slots": slots.expand(self._rows, -1)})
            self._uncounted_entries = 0
        return self._entries

    @entries.setter
    def entries(self, entries: Entries | None) -> None:
        self._entries, self._uncounted_entries = entries, 0

    @property
    def real_seen(self) -> torch.Tensor | None:
        """(B, 1) long, real tokens seen."""
        if self._uncounted_real:
            if self._real_seen is None:
                self._real_seen = torch.zeros(self._rows, 1, dtype=torch.long, device=self.device)
            self._real_seen, self._uncounted_real = self._real_seen + self._uncounted_real, 0
        return self._real_seen

    @real_seen.setter
    def real_seen(self, real_seen: torch.Tensor | None) -> None:
        self._real_seen, self._uncounted_real = real_seen, 0

    def _count(self) -> None:
        """Write down the facts of plain columns, before something changes that they are counted by."""
        _ = self.entries, self.real_seen

    @property
    def slots(self) -> torch.Tensor | None:
        """(B, K) long."""
        return None if self.entries is None else self.entries["slots"]

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) long: entries of each row."""
        assert self.slots is not None
        return self.slots.new_full((self.slots.shape[0],), self.slots.shape[1]) if self.valid is None else self.valid.sum(1)

    @property
    def length(self) -> torch.Tensor | int:
        """Entries of each row, (B,) long, or of all of them."""
        if self.valid is not None:
            return self.lengths
        return self._uncounted_entries + (0 if self._entries is None else self._entries["slots"].shape[1])

    @property
    def facts(self) -> frozenset[str]:
        """Names of what is known of entries."""
        return frozenset(self._entries or ("slots",))

    @property
    def is_even(self) -> bool:
        """All rows have as many entries, kept side by side as they are attended to: a further token can just be put behind them."""
        return self.valid is None and self.keys is not None

    @property
    def is_complete(self) -> bool:
        """Every column seen has a plain entry: the model's own attention mask is right."""
        return self.seen == 0 or (self.valid is None and self.length == self.seen and len(self.facts) == 1)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def resident_bytes(self) -> int:
        """Bytes of the tensors that hold K and V."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    def billed_bytes(self) -> int:
        """Bytes the decisions ask for: entries times the size of one."""
        if self.keys is None:
            return 0
        heads = self.keys.shape[1]  # in both representations
        return int(self.lengths.sum()) * 2 * heads * self.keys.shape[-1] * self.keys.element_size()

    def plan(self, new: Entries, keep: torch.Tensor | None) -> KVLayout:
        """Layout after adding tokens with facts `new` (B, M), of which only `keep` (B, M) bool get an entry (None: all)."""
        entries = join_entries(self.entries, new)
        slots = entries["slots"]
        if keep is None and self.valid is None:
            return KVLayout(entries, None, None, new)
        valid = torch.ones_like(slots, dtype=torch.bool)
        n_past = slots.shape[1] - new["slots"].shape[1]
        if self.valid is not None:
            valid[:, :n_past] = self.valid
        if keep is not None:
            valid[:, n_past:] = keep
        # Entries to the left, in slot order; what is not one to the right, cut off at the longest row.
        rank = torch.where(valid, slots, torch.iinfo(torch.long).max)
        order = rank.argsort(dim=1, stable=True)[:, : int(valid.sum(1).max())]
        valid = valid.gather(1, order)
        entries = {name: fact.gather(1, order) for name, fact in entries.items()}
        return KVLayout(entries, None if bool(valid.all()) else valid, order, new)

    def padded(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K, V as (B, H_kv, K, head_dim), rows padded with zeros on the right; None when empty."""
        if self.keys is None:
            return None
        if self.valid is None:
            return self.keys, self.values
        shape = (*self.valid.shape, *self.keys.shape[1:])
        out = []
        for flat in (self.keys, self.values):
            rows = flat.new_zeros(shape)
            rows[self.valid] = flat
            out.append(rows.transpose(1, 2))
        return out[0], out[1]

    def write(self, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new K, V (B, H_kv, M, head_dim) by `layout`; returns all K, V of the layer, padded."""
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device
        past = self.padded()
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        if layout.order is not None:
            index = layout.order[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
            keys, values = keys.gather(2, index), values.gather(2, index)
        self._store(layout.entries, layout.valid, keys, values)
        return keys, values

    def _store(self, entries: Entries, valid: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.entries, self.valid = entries, valid
        if valid is None:
            self.keys, self.values = _own(keys), _own(values)
        else:
            self.keys, self.values = keys.transpose(1, 2)[valid], values.transpose(1, 2)[valid]

    def advance(self, n_columns: int, n_real: torch.Tensor) -> None:
        """Note that a pass of `n_columns` columns went by, n_real (B, 1) of them real."""
        self._count()
        self.real_seen = n_real.clone() if self.real_seen is None else self.real_seen + n_real
        self.seen += n_columns

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The plain path of a layer in which every token takes part. key_states: (B, H_kv, M, head_dim)."""
        self._refuse_unless_complete()
        return self.extend(key_states, value_states)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put plain tokens behind what an even layer has; keys: (B, H_kv, M, head_dim). Returns all K, V of the layer."""
        n = keys.shape[2]
        if self.keys is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
            self.keys, self.values = keys, values
        else:
            self.keys, self.values = _own(keys), _own(values)
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device
        self._rows = keys.shape[0]
        self._uncounted_entries += n
        self._uncounted_real += n
        self.seen += n
        return keys, values

    def _refuse_unless_complete(self) -> None:
        if not self.is_complete:
            raise UnsupportedModelError(
                "This KV cache was written under quicksilver.apply and lacks tokens in some layers: continue with it inside the context, "
                "or start a new cache."
            )

    def adopt(self, layer: DynamicLayer, valid: torch.Tensor | None) -> None:
        """Take over a plain layer's content; valid: (B, seen) bool of real columns, None: all."""
        if layer.keys is None or layer.keys.numel() == 0:
            return
        batch, n = layer.keys.shape[0], layer.keys.shape[2]
        if valid is None:
            valid = torch.ones(batch, n, dtype=torch.bool, device=layer.keys.device)
        self._adopt_columns({"slots": valid.long().cumsum(1) - 1}, valid, layer.keys, layer.values)
        self.advance(n, valid.sum(1, keepdim=True))
        self.settled = n

    def _adopt_columns(self, entries: Entries, valid: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.write(self.plan(entries, None if bool(valid.all()) else valid), keys, values)

    @property
    def is_entry(self) -> torch.Tensor:
        """(B, K) bool: columns of `padded` that are entries."""
        assert self.slots is not None
        return torch.ones_like(self.slots, dtype=torch.bool) if self.valid is None else self.valid

    def merge(self, into: torch.Tensor, hold: Hold | None = None) -> None:
        """Merge entries, as `merge_entries` says; into: (B, K) long, columns of `padded`."""
        keys, values = self.padded()  # type: ignore[misc]
        self._store_present(*merge_entries(self.entries, self.is_entry, keys, values, into, hold))  # type: ignore[arg-type]
        self.settled, self.merged = self.seen, True

    def evict(self, gone: torch.Tensor) -> None:
        """Let entries go for good; gone: (B, K) bool, columns of `padded`."""
        self._keep_only(self.is_entry & ~gone)
        self.evicted = self.seen

    def _keep_only(self, present: torch.Tensor) -> None:
        self._store_present(self.entries, present, *self.padded())  # type: ignore[arg-type, misc]

    def _store_present(self, entries: Entries, present: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        order = (~present).to(torch.uint8).argsort(dim=1, stable=True)
        index = order[:, None, :, None].expand_as(keys)
        entries = {name: fact.gather(1, order) for name, fact in entries.items()}
        self._store_trimmed(entries, present.gather(1, order), keys.gather(2, index), values.gather(2, index))

    def _select_rows(self, rows: torch.Tensor) -> None:
        if self.entries is None:
            return
        keys, values = self.padded()  # type: ignore[misc]
        self.real_seen = self.real_seen[rows]  # type: ignore[index]
        entries = {name: fact[rows] for name, fact in self.entries.items()}
        self._store_trimmed(entries, None if self.valid is None else self.valid[rows], keys[rows], values[rows])

    def _store_trimmed(self, entries: Entries, valid: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows after cutting off columns that are padding in all of them."""
        if valid is not None:
            width = int(valid.sum(1).max())
            entries = {name: fact[:, :width] for name, fact in entries.items()}
            valid, keys, values = valid[:, :width], keys[:, :, :width], values[:, :, :width]
            if bool(valid.all()):
                valid = None
        self._store(entries, valid, keys, values)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.slots is not None:
            self._select_rows(torch.arange(self.slots.shape[0], device=self.slots.device).repeat_interleave(repeats))

    def _retreat(self, n: int) -> None:
        """Raises UnsupportedModelError when entries to be forgotten were merged with others, or others made way for them."""
        if self.merged and self.seen - n < self.settled:
            raise UnsupportedModelError(
                f"The last {n} cached columns reach into K/V entries that were merged, and cannot be taken back: decode without "
                "speculation, or set decode_every=0."
            )
        if self.seen - n < self.evicted:
            raise UnsupportedModelError(
                f"The last {n} cached columns cannot be taken back: K/V entries left the cache after them. Decode without speculation."
            )
        self._count()
        self.seen -= n
        self.settled = min(self.settled, self.seen)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns (transformers gives a negative number)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number.")
        n = -tokens_to_remove
        if n == 0 or self.entries is None:
            return
        self._retreat(n)
        self.real_seen = self.real_seen - n  # the last columns of a sequence are never padding
        keys, values = self.padded()  # type: ignore[misc]
        valid = self.entries["slots"] < self.real_seen
        if self.valid is not None:
            valid &= self.valid
        self._store_trimmed(self.entries, valid, keys, values)

    def reset(self) -> None:
        self.keys = self.values = self.valid = None
        self._entries = self._real_seen = None
        self._uncounted_entries = self._uncounted_real = 0
        self.seen = self.settled = self.evicted = 0
        self.merged = self.is_initialized = False


class MaskedLayer(RaggedLayer):
    """The reference: K and V of every column stay in memory, and a mask says which of them count.

    Rows are (B, H_kv, seen, head_dim); `present` (B, seen) bool. Nothing is packed, nothing is saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.present: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        return self.seen == 0 or (bool(self.present.all()) and len(self.entries) == 1)  # type: ignore[union-attr, arg-type]

    @property
    def lengths(self) -> torch.Tensor:
        return self.present.sum(1)  # type: ignore[union-attr]

    @property
    def length(self) -> torch.Tensor | int:
        return 0 if self.present is None else self.lengths

    @property
    def is_entry(self) -> torch.Tensor:
        return self.present  # type: ignore[return-value]

    def merge(self, into: torch.Tensor, hold: Hold | None = None) -> None:
        self.entries, self.present, self.keys, self.values = merge_entries(
            self.entries,
            self.is_entry,
            self.keys,
            self.values,
            into,
            hold,  # type: ignore[arg-type]
        )
        self.settled, self.merged = self.seen, True

    def _keep_only(self, present: torch.Tensor) -> None:
        self.present = present

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, entries: Entries, present: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add K, V (B, H_kv, N, head_dim) of all columns of a pass; returns all of them."""
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device
        if self.entries is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
            present = torch.cat([self.present, present], dim=1)  # type: ignore[list-item]
        self.keys, self.values, self.entries, self.present = keys, values, join_entries(self.entries, entries), present
        return keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._refuse_unless_complete()
        batch, n = key_states.shape[0], key_states.shape[2]
        slots = torch.arange(self.seen, self.seen + n, device=key_states.device).expand(batch, n)
        self.advance(n, slots.new_full((batch, 1), n))
        return self.append(key_states, value_states, {"slots": slots}, torch.ones_like(slots, dtype=torch.bool))

    def _adopt_columns(self, entries: Entries, valid: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.append(keys, values, entries, valid)

    def _select_rows(self, rows: torch.Tensor) -> None:
        if self.entries is not None:
            self.keys, self.values, self.present = self.keys[rows], self.values[rows], self.present[rows]  # type: ignore[index]
            self.entries = {name: fact[rows] for name, fact in self.entries.items()}
            self.real_seen = self.real_seen[rows]  # type: ignore[index]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number.")
        n = -tokens_to_remove
        if n == 0 or self.entries is None:
            return
        self._retreat(n)
        self.real_seen = self.real_seen - n  # type: ignore[operator]
        self.keys, self.values = _own(self.keys[:, :, : self.seen]), _own(self.values[:, :, : self.seen])
        self.present = self.present[:, : self.seen]  # type: ignore[index]
        self.entries = {name: fact[:, : self.seen] for name, fact in self.entries.items()}

    def reset(self) -> None:
        super().reset()
        self.present = None


def _own(x: torch.Tensor) -> torch.Tensor:
    """x without what it is a view of: a fused q, k, v product, or a cache that was longer."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def take_over(cache: Cache, layer: int, fresh: RaggedLayer, past_valid: torch.Tensor | None) -> RaggedLayer:
    """The layer of `fresh`'s kind at `layer` of `cache`; `fresh` is put there in place of a plain one if need be.

    Args:
        past_valid: (B, seen) bool of the columns already cached, None: all are real.

    Raises:
        UnsupportedModelError: a static, quantized or offloaded cache, or one written under another execution.
    """
    if len(cache.layers) <= layer:
        cache.layers.extend(type(fresh)() for _ in range(layer - len(cache.layers)))
        cache.layers.append(fresh)
    found = cache.layers[layer]
    if type(found) is type(fresh):
        return found
    if isinstance(found, RaggedLayer) and found.seen:
        raise UnsupportedModelError("This KV cache was written under another execution (compact or masked); start a new cache.")
    if not isinstance(found, RaggedLayer):
        if type(found).__name__ not in ("DynamicLayer", "DynamicSlidingWindowLayer"):
            raise UnsupportedModelError(
                f"A cache of {type(found).__name__} cannot hold different tokens per layer; use the default DynamicCache."
            )
        if getattr(found, "is_sliding", False) and found.get_seq_length() and found.get_seq_length() != found.keys.shape[2]:
            raise UnsupportedModelError(
                "A sliding-window cache that has already dropped tokens cannot be taken over; start inside the context."
            )
        fresh.adopt(found, past_valid)
    cache.layers[layer] = fresh
    return fresh
