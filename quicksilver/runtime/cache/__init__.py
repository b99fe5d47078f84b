"""KV caches whose layers hold different tokens.

`CacheLayer` is what transformers sees of one layer; it holds a storage, one class per kind: `DenseRows` the entries and nothing else,
`DenseColumns` every column with a mask, `PackedCodes` entries at 8, 4 or 2 bits.
"""

from quicksilver.runtime.cache.layer import CacheLayer, take_over
from quicksilver.runtime.cache.stores import Entries, KVLayout, join_entries

__all__ = ["CacheLayer", "Entries", "KVLayout", "join_entries", "take_over"]
