"""A layer's plan and what comes of it: everything its execution needs, and everything that deciding and the ledgers need afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from quicksilver.runtime.architecture import Architecture, Rotary
from quicksilver.runtime.cache import CacheLayer, Entries, KVLayout
from quicksilver.runtime.ledger import LayerWork
from quicksilver.runtime.module import PrecisionExecutor
from quicksilver.runtime.phases import phase
from quicksilver.runtime.rows import put_rows, take_rows

KV = tuple[torch.Tensor, torch.Tensor]
Way = Literal["plain", "append", "compact", "masked"]


@dataclass(frozen=True)
class Packing:
    """The tokens of one layer, packed to the left.

    Attributes:
        order: (B, A) columns of the pass, chosen ones first in slot order, then distinct others; None: all N columns.
        real: (B, A) bool, which of them are chosen; None: all.
        width: A.
    """

    order: torch.Tensor | None
    real: torch.Tensor | None
    width: int
    # What all layers are handed alike, rotary factors and positions, is packed once.
    _shared: list[tuple[Any, Any]] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    @phase("gather")
    def of(cls, mask: torch.Tensor, count: int | None = None) -> Packing:
        """mask: (B, N) bool; count: how many are set in each row, where the host knows it."""
        n = mask.shape[1]
        if count is None and mask.shape[0] == 1:  # one row: who is chosen says how many
            order = mask[0].nonzero().view(1, -1)
            return cls(None, None, n) if order.shape[1] == n else cls(order, None, order.shape[1])
        if count is not None:
            low = high = count
        else:
            counts = mask.sum(1)
            low, high = torch.stack([counts.min(), counts.max()]).tolist()  # the one host sync of a decision
        if low == n:
            return cls(None, None, n)
        # Padding columns are other tokens of the same row: scattering their own old state back changes nothing.
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :high]
        real = None if low == high else torch.arange(high, device=mask.device) < counts[:, None]
        return cls(order, real, high)

    @phase("gather")
    def take(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, ...) -> (B, A, ...)."""
        if self.order is None:
            return x
        return take_rows(x, self.order)

    def put(self, full: torch.Tensor, packed_old: torch.Tensor, packed_new: torch.Tensor) -> torch.Tensor:
        """`full` (B, N, D) with the chosen columns replaced by `packed_new` (B, A, D); `packed_old` is what `take` gave."""
        return self.put_all(full, self.of_chosen(packed_old, packed_new))

    def of_chosen(self, packed_old: torch.Tensor, packed_new: torch.Tensor) -> torch.Tensor:
        """(B, A, D): new states of the chosen columns, old ones of padding."""
        return packed_new if self.real is None else torch.where(self.real[..., None], packed_new, packed_old)

    @phase("scatter")
    def put_all(self, full: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """`full` (B, N, D) with the packed columns, padding among them, replaced by `packed` (B, A, D)."""
        return packed if self.order is None else put_rows(full, self.order, packed)

    def rotary(self, rotary: Rotary | None, batch: int) -> Rotary | None:
        """Rotary factors (1 or B, N, ...) of the packed tokens."""
        if rotary is None:
            return None
        return self._once(rotary, lambda: (self.take(rows(rotary[0], batch)), self.take(rows(rotary[1], batch))))

    def positions(self, ids: torch.Tensor, batch: int) -> torch.Tensor:
        """Position ids (1 or B, N) of the packed tokens."""
        return self._once(ids, lambda: self.take(rows(ids, batch)))

    def _once(self, whole: Any, pack: Callable[[], Any]) -> Any:
        for known, packed in self._shared:
            if known is whole:
                return packed
        self._shared.append((whole, pack()))
        return self._shared[-1][1]


def rows(x: torch.Tensor, batch: int) -> torch.Tensor:
    """(1 or B, N, ...) -> (B, N, ...)."""
    return x if x.shape[0] == batch else x.expand(batch, *x.shape[1:])


def or_all(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A mask of which None means all; bool, of the shape of `like`."""
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask


@dataclass(frozen=True)
class LayerCall:
    """The model's own call of one decoder layer.

    Attributes:
        layer: its index.
        original: the layer's forward.
        arguments: what the model calls it with, by name.
        store: its cache; None: the model keeps none.
        hidden: (B, N, D); rotary: cos and sin, (1 or B, N, rotary_dim), or None.
    """

    layer: int
    original: Callable[..., torch.Tensor]
    arguments: dict[str, Any]
    store: CacheLayer | None

    @property
    def hidden(self) -> torch.Tensor:
        return self.arguments["hidden_states"]

    @property
    def rotary(self) -> Rotary | None:
        return self.arguments.get("position_embeddings")


@dataclass(frozen=True)
class HaltedKV:
    """K/V entries of tokens that are halted in a layer and seen there all the same.

    Attributes:
        source: where they come from: `project`ed from the frozen state, `copy` of the newest there were, `zero`, or `predict`ed, when
            the token halted, by the translator of source layer `translator`.
        packing: which columns. Under `masked` all of them, `real` says which.
        facts: of the entries, (B, E) each; None under `masked`.
    """

    source: str
    packing: Packing
    facts: Entries | None
    translator: int | None = None


@dataclass(frozen=True)
class LayerPlan:
    """Everything that the execution of one layer needs, known before it runs.

    Attributes:
        way: which execution.
        packing: columns that are computed, and which of them are active; slots: (B, A) long, theirs. None: as the model has it.
        target: the cache that K and V go into, for the length of this call where the model keeps none; None: none is needed.
        layout: the entries of the target afterwards; None: it does not change, or finds out itself.
        halted: further entries, of halted tokens, after those of the computed ones.
        bits: (B, A) uint8, widths of the computed tokens; None: nothing is quantised.
        mask: (B, 1, A, K), as attention takes it; None: none, the kernel's own causality.
        own_keys_only: queries attend to nothing but the keys computed with them.
        observes_kv: whether K and V are needed afterwards.
        carries: the states that leave the layer are read by the next layer only.
    """

    way: Way
    packing: Packing
    slots: torch.Tensor | None = None
    target: CacheLayer | None = None
    layout: KVLayout | None = None
    halted: tuple[HaltedKV, ...] = ()
    bits: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    own_keys_only: bool = False
    observes_kv: bool = True
    carries: bool = False

    @property
    def planned(self) -> KVLayout:
        """The layout, of a plan that has one."""
        assert self.layout is not None, "the plan leaves the layout to its target"
        return self.layout


@dataclass(frozen=True)
class Attended:
    """K and V of one layer, as its queries met them.

    Attributes:
        new_keys, new_values: (B, H_kv, A, head_dim), of the computed tokens.
        keys: (B, H_kv, K, head_dim), all that were attended to.
        slots: (B, K) long; None: 0 to K-1. valid: (B, K) bool, which are entries; None: all.
    """

    new_keys: torch.Tensor
    new_values: torch.Tensor
    keys: torch.Tensor
    slots: torch.Tensor | None = None
    valid: torch.Tensor | None = None

    @property
    def key_slots(self) -> torch.Tensor:
        """(B, K) long."""
        if self.slots is not None:
            return self.slots
        return torch.arange(self.keys.shape[2], device=self.keys.device).expand(self.keys.shape[0], -1)


@dataclass(frozen=True)
class LayerResult:
    """What every execution returns.

    Attributes:
        output: (B, N, D) states leaving the layer, of all tokens.
        packing: as in the plan.
        work: for the ledger.
        attended: None where nobody asked, or nobody was computed.
        before, after: (B, A, D) states of the packed tokens entering and leaving it, where they are at hand: else `packing` takes them.
        slots: (B, A) long of the packed tokens, likewise.
    """

    output: torch.Tensor
    packing: Packing
    work: LayerWork
    attended: Attended | None = None
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    slots: torch.Tensor | None = None


@dataclass(frozen=True)
class Machine:
    """What all layers of a run share.

    Attributes:
        arch: the model's adapter.
        precision: who executes widths; None: nobody.
    """

    arch: Architecture
    precision: PrecisionExecutor | None

    def quantize_dequantize(self, states: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
        """New K or V (B, H_kv, A, head_dim) as they read at widths `bits` (B, A); None: as they are."""
        if bits is None or self.precision is None:
            return states
        return self.precision.quantize_dequantize_kv(states, bits)

    @phase("layer")
    def run_layer(self, call: LayerCall, inputs: dict[str, Any], bits: torch.Tensor | None) -> torch.Tensor:
        """The frozen layer on `inputs`, with the inputs of its linear layers at widths `bits` (B, A)."""
        if bits is None or self.precision is None:
            return call.original(**inputs)
        return self.precision.run_layer(self.arch.layers[call.layer], bits, lambda: call.original(**inputs))

    def inputs(self, call: LayerCall, plan: LayerPlan, hidden: torch.Tensor, port: Any) -> dict[str, Any]:
        """Arguments for the layer on the packed tokens `hidden` (B, A, D), with `port` in the place of the cache."""
        batch = hidden.shape[0]
        inputs = call.arguments | {"hidden_states": hidden, "attention_mask": plan.mask, self.arch.cache_argument: port}
        if call.rotary is not None:
            inputs["position_embeddings"] = plan.packing.rotary(call.rotary, batch)
        if call.arguments.get("position_ids") is not None:
            inputs["position_ids"] = plan.packing.positions(call.arguments["position_ids"], batch)
        return inputs
