"""What transformers sees of a layer's cache.

The runtime puts these layers in place of the layers of whatever `DynamicCache` the model or `generate()` made, so growing, beams
(`reorder_cache`) and `crop` keep working through the usual calls. `get_seq_length()` answers with the columns seen, so positions stay
right when layer 30 holds half of the tokens.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Literal

import torch
from transformers.cache_utils import Cache, DynamicLayer

from quicksilver.runtime.cache.stores import (
    KV,
    DenseColumns,
    DenseRows,
    Entries,
    KVLayout,
    PackedCodes,
    QuantizeDequantize,
    Storage,
)
from quicksilver.runtime.errors import UnsupportedModelError
from quicksilver.runtime.phases import phase

Kind = Literal["ragged", "masked", "packed"]


class CacheLayer(DynamicLayer):
    """The cache of one layer: which columns it has seen, and a storage that keeps K and V.

    Args:
        kind: `ragged`: entries and nothing else. `masked`: all columns with a mask. `packed`: `ragged` until an entry with a width comes
            in, from then on entries are kept at their widths.
        group_size: of `packed`, values of a head that share a scale.

    Attributes:
        storage: keeps K and V, in its `keys` and `values` where it has them so.
        entries, is_entry, lengths, length, facts, can_append: of the storage.
        seen: columns of input seen, padding and skipped tokens included.
        unmerged_from: columns seen when the prompt ended, or when entries were last merged.
        changed_at: columns seen when entries were last merged or left, in this layer or another of its cache.
        continues: tokens of this pass are put behind what there is, though the layer lacks others.
    """

    is_croppable = True

    def __init__(self, kind: Kind = "ragged", group_size: int = 32) -> None:
        self.kind, self.group_size = kind, group_size
        self._forget()
        super().__init__()

    def empty(self) -> CacheLayer:
        """Another one of the same kind, with nothing in it."""
        return CacheLayer(self.kind, self.group_size)

    def _forget(self) -> None:
        self.storage: Storage = DenseColumns() if self.kind == "masked" else DenseRows()
        self.seen = self.unmerged_from = self.changed_at = 0
        self.continues = False
        self._real_seen: torch.Tensor | None = None
        self._uncounted_real = 0

    # -- what there is -----------------------------------------------------------------------------------------------------------

    keys = property(attrgetter("storage.keys"), lambda self, keys: setattr(self.storage, "keys", keys))
    values = property(attrgetter("storage.values"), lambda self, values: setattr(self.storage, "values", values))
    entries, is_entry, lengths, length, facts, can_append = (
        property(attrgetter(f"storage.{name}")) for name in ("entries", "is_entry", "lengths", "length", "facts", "can_append")
    )

    def add_fact(self, name: str, fact: torch.Tensor) -> None:
        """Note something of each entry: (B, K)."""
        self.storage.put((self.entries or {}) | {name: fact}, self.storage.present)

    @property
    def slots(self) -> torch.Tensor | None:
        """(B, K) long."""
        entries = self.entries
        return None if entries is None else entries["slots"]

    @property
    def is_complete(self) -> bool:
        """Every column seen has a plain entry: the model's own attention mask is right."""
        return self.seen == 0 or self.storage.is_complete(self.seen)

    @property
    def is_packed(self) -> bool:
        """Entries are kept at their widths."""
        return isinstance(self.storage, PackedCodes)

    @property
    def real_seen(self) -> torch.Tensor | None:
        """(B, 1) long, real tokens seen."""
        if self._uncounted_real:
            if self._real_seen is None:
                self._real_seen = torch.zeros_like(self.storage.stored_entries["slots"][:, :1])
            self._real_seen, self._uncounted_real = self._real_seen + self._uncounted_real, 0
        return self._real_seen

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def padded(self) -> KV | None:
        return self.storage.padded()

    def resident_bytes(self) -> int:
        return self.storage.resident_bytes()

    def billed_bytes(self) -> int:
        return self.storage.billed_bytes()

    # -- growing -----------------------------------------------------------------------------------------------------------------

    @phase("write_kv")
    def plan(self, new: Entries, keep: torch.Tensor | None, in_order: bool = True) -> KVLayout:
        """As `Storage.plan`."""
        return self.storage.plan(new, keep, in_order)

    @phase("write_kv")
    def write(self, layout: KVLayout, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Add new K, V (B, H_kv, M, head_dim) by `layout`; returns all K, V of the layer, padded."""
        self._note(keys)
        if self.kind == "packed" and "bits" in layout.entries and not self.is_packed:
            self.storage = PackedCodes.of(self.storage, self.group_size, keys)
        return self.storage.write(layout, keys, values)

    def advance(self, n_columns: int, n_real: torch.Tensor) -> None:
        """Note that a pass of `n_columns` columns went by, n_real (B, 1) of them real."""
        real_seen = self.real_seen
        self._real_seen = n_real.clone() if real_seen is None else real_seen + n_real
        self.seen += n_columns

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> KV:
        """The plain path of a layer in which every token takes part. key_states: (B, H_kv, M, head_dim).

        Raises:
            UnsupportedModelError: the layer lacks tokens.
        """
        if not self.continues and not self.is_complete:
            raise UnsupportedModelError(
                "This KV cache was written under quicksilver.apply and lacks tokens in some layers: continue with it inside the context, "
                "or start a new cache."
            )
        return self.append(key_states, value_states)

    @phase("write_kv")
    def append(self, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Put plain tokens behind what there is; keys: (B, H_kv, M, head_dim). Returns all K, V of the layer."""
        n = keys.shape[2]
        both = self.storage.append(keys, values, self.seen)
        if not self.is_initialized:
            self._note(keys)
        self._uncounted_real += n
        self.seen += n
        return both

    def _note(self, keys: torch.Tensor) -> None:
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device

    def adopt(self, layer: DynamicLayer, valid: torch.Tensor | None) -> None:
        """Take over a plain layer's content; valid: (B, seen) bool of real columns, None: all."""
        if layer.keys is None or layer.keys.numel() == 0:
            return
        batch, n = layer.keys.shape[0], layer.keys.shape[2]
        if valid is None:
            valid = torch.ones(batch, n, dtype=torch.bool, device=layer.keys.device)
        facts = {"slots": valid.long().cumsum(1) - 1}
        assert layer.values is not None
        self.write(self.plan(facts, None if bool(valid.all()) else valid), layer.keys, layer.values)
        self.advance(n, valid.sum(1, keepdim=True))
        self.unmerged_from = n

    # -- rearranging -------------------------------------------------------------------------------------------------------------

    @phase("fuse")
    def merge(self, into: torch.Tensor, quantize_dequantize: QuantizeDequantize | None = None) -> None:
        """Merge entries, as `merge_entries` says; into: (B, K) long, columns of `padded`."""
        self.storage.merge(into, quantize_dequantize)
        self.unmerged_from = self.changed_at = self.seen

    @phase("write_kv")
    def evict(self, gone: torch.Tensor) -> None:
        """Let entries go for good; gone: (B, K) bool, columns of `padded`."""
        self.storage.keep_only(self.is_entry & ~gone)
        self.changed_at = self.seen

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        real_seen = self.real_seen
        if real_seen is not None:
            self._real_seen = real_seen[beam_idx]
        if self.entries is not None:
            self.storage.select_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if (real_seen := self.real_seen) is not None:  # there may be no entry
            self.reorder_cache(torch.arange(real_seen.shape[0], device=real_seen.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns (transformers gives a negative number).

        Raises:
            UnsupportedModelError: in a layer of the cache entries to be forgotten were merged with others, or others made way for them.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number.")
        n = -tokens_to_remove
        real_seen = self.real_seen
        if n == 0:
            return
        if self.seen - n < self.changed_at:  # before anything is cut: a cache is cropped layer by layer
            raise UnsupportedModelError(
                f"The last {n} cached columns cannot be taken back: K/V entries were merged or left the cache after them. Decode without "
                "speculation, or set decode_every=0."
            )
        if self.entries is None or real_seen is None:  # columns of which none has an entry here
            self.seen, self._real_seen = self.seen - n, None if real_seen is None else real_seen - n
            self.unmerged_from = min(self.unmerged_from, self.seen)
            return
        self._real_seen = real_seen - n  # the last columns of a sequence are never padding
        self.seen -= n
        self.unmerged_from = min(self.unmerged_from, self.seen)
        self.storage.crop(self.seen, self._real_seen)

    def reset(self) -> None:
        self._forget()
        self.is_initialized = False


def take_over(cache: Cache, layer: int, fresh: CacheLayer, past_valid: torch.Tensor | None) -> CacheLayer:
    """The layer of `fresh`'s kind at `layer` of `cache`; `fresh` is put there in place of a plain one if need be.

    Args:
        past_valid: (B, seen) bool of the columns already cached, None: all are real.

    Raises:
        UnsupportedModelError: a static, quantized or offloaded cache, or one written under another execution.
    """
    if getattr(cache, "offloading", False):
        raise UnsupportedModelError(
            "A cache that is offloaded moves whole layers, and cannot hold different tokens per layer: leave out offloading=True, or "
            'cache_implementation="offloaded" of generate.'
        )
    if len(cache.layers) <= layer:
        cache.layers.extend(fresh.empty() for _ in range(layer - len(cache.layers)))
        cache.layers.append(fresh)
    found = cache.layers[layer]
    if isinstance(found, CacheLayer):
        if found.kind == fresh.kind:
            return found
        if found.seen:
            raise UnsupportedModelError(
                "This KV cache was written under another execution (compact or masked), or with other widths; start a new cache."
            )
    else:
        if not isinstance(found, DynamicLayer) or type(found).__name__ not in ("DynamicLayer", "DynamicSlidingWindowLayer"):
            raise UnsupportedModelError(
                f"A cache of {type(found).__name__} cannot hold different tokens per layer; use the default DynamicCache."
            )
        kept = 0 if found.keys is None else found.keys.shape[-2]
        if getattr(found, "is_sliding", False) and found.get_seq_length() and found.get_seq_length() != kept:
            raise UnsupportedModelError(
                "A sliding-window cache that has already dropped tokens cannot be taken over; start inside the context."
            )
        fresh.adopt(found, past_valid)
    cache.layers[layer] = fresh
    return fresh
