"""A layer's plan: what it is, what comes of it, and the one place that chooses how a layer is executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from quicksilver.runtime.architecture import Architecture, Rotary
from quicksilver.runtime.cache import CacheLayer, Entries, KVLayout, join_entries
from quicksilver.runtime.cache.entries import put_rows, take_rows
from quicksilver.runtime.ledger import LayerWork
from quicksilver.runtime.module import PrecisionExecutor
from quicksilver.runtime.phases import phase
from quicksilver.runtime.visibility import Visibility

if TYPE_CHECKING:
    from quicksilver.runtime.forward import Forward
    from quicksilver.runtime.pass_state import PassState

KV = tuple[torch.Tensor, torch.Tensor]
Way = Literal["plain", "append", "compact", "masked"]


@dataclass(frozen=True, eq=False)
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
    _shared: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

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
        return x if self.order is None else take_rows(x, self.order)

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
    """

    source: str
    packing: Packing
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
        visibility: who sees whom.
    """

    arch: Architecture
    precision: PrecisionExecutor | None
    visibility: Visibility

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


# -- from the state of a pass and a layer's cache to the layer's plan -------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """Where the K and V of a compact layer go and who sees them: the same for all layers with the same tokens.

    Attributes:
        own: facts of the computed tokens, (B, A) each.
        layout, mask, own_keys_only: as in `LayerPlan`.
    """

    own: Entries
    layout: KVLayout | None
    mask: torch.Tensor | None
    own_keys_only: bool


class Planner:
    """Makes plans for the layers of one run.

    Args:
        visibility: who sees whom.
        masked: everything is computed and then undone; else only what is active is computed.
        quantises: whether widths are executed.
        new_store: a cache layer of the run's kind.
    """

    def __init__(self, visibility: Visibility, masked: bool, quantises: bool, new_store: Callable[[], CacheLayer]) -> None:
        self.visibility, self.masked, self.quantises, self.new_store = visibility, masked, quantises, new_store

    def plan(self, call: LayerCall, forward: Forward, observes_kv: bool) -> LayerPlan:
        """The plan of one layer; `observes_kv`: its K and V are needed afterwards."""
        store, layer = call.store, call.layer
        complete = forward.is_plain and (store is None or store.is_complete)
        if complete and self.visibility.span_reaches_back(layer, forward.end):
            return LayerPlan("plain", Packing(None, None, forward.n), observes_kv=observes_kv)
        if not observes_kv and store is not None and self.can_append(store, layer, forward):
            return LayerPlan("append", Packing(None, None, 1), observes_kv=False)
        return self._masked(call, forward) if self.masked else self._compact(call, forward)

    def can_append(self, store: CacheLayer, layer: int, forward: Forward) -> bool:
        """One new token in each row, nothing decided about it yet, that sees all entries of the layer as they lie there."""
        return (
            forward.n == 1
            and forward.is_plain
            and self.visibility.sdpa
            and store.can_append
            and self.visibility.one_token_sees_all(layer, forward.seen)
            and not (self.visibility.proportional and self.visibility.weighs(store.facts))
        )

    def _facts(self, state: PassState, take: Callable[[torch.Tensor], torch.Tensor]) -> Entries:
        """What a cache must know of new entries, in the coordinates of `take`."""
        facts = {"slots": take(state.slots)}
        if state.fusions:
            facts["size"] = take(state.size)
        if self.quantises and state.precisions:
            facts["bits"] = take(state.bits)
        return facts

    # -- compact -----------------------------------------------------------------------------------------------------------------

    def _compact(self, call: LayerCall, forward: Forward) -> LayerPlan:
        store, packing, halted = call.store, forward.packing(call.layer), self._halted(call.layer, forward)
        if packing.width == 0:
            layout = None
            if store is not None and halted:
                _, entries, keep = self._new_entries(call.layer, packing, halted, forward.executed)
                layout = store.plan(entries, keep, in_order=False)
            return LayerPlan("compact", packing, target=store, layout=layout, halted=halted)
        found = self._arrangement(call, forward, packing, halted)
        target = self.new_store() if store is None and not found.own_keys_only else store
        bits = found.own.get("bits")
        if bits is not None and packing.real is not None:
            # Padding is computed at a width its row has anyway, lest it ask for products of a width that no token has.
            bits = torch.where(packing.real, bits, bits[:, :1])
        return LayerPlan(
            "compact", packing, found.own["slots"], target, found.layout, halted, bits, found.mask, found.own_keys_only
        )

    def _arrangement(self, call: LayerCall, forward: Forward, packing: Packing, halted: tuple[HaltedKV, ...]) -> Arrangement:
        """That of the layer before where nothing has changed since: sorting entries and comparing slots takes as long as a small layer's
        products."""
        layer, store, state = call.layer, call.store, forward.executed
        fresh = store is None or store.slots is None
        # What it follows from where of tokens nothing but the slot is known; packings are compared as objects.
        of = (
            packing,
            *(one.packing for one in halted),
            store is None,
            self.visibility.windows[layer],
            self.visibility.arch.spans[layer],
        )
        only_slots = not (state.any_kv_skipped or state.fusions or state.precisions)
        if only_slots and fresh and forward.arranged is not None and forward.arranged[0] == of:
            return forward.arranged[1]
        own, entries, keep = self._new_entries(layer, packing, halted, state)
        # Active tokens come first and padding last, so the causal kernel is right for every real query without a mask, as long as the keys
        # are exactly the queries' own tokens and weigh the same; without causality only where no row is padded.
        own_keys_only = (
            fresh
            and not (halted or state.any_kv_skipped or self.visibility.weighs(entries))
            and self.visibility.own_kernel_fits(layer, forward.n, forward.end, even=packing.real is None)
        )
        layout = mask = None
        if store is not None or not own_keys_only:
            # A cache is in slot order, and halted tokens come after computed ones that they stand before.
            layout = (store if store is not None else self.new_store()).plan(entries, keep, in_order=not halted)
        if not own_keys_only:
            all_seen = forward.n == 1 and self.visibility.one_token_sees_all(layer, forward.seen)
            assert layout is not None
            mask = self.visibility.mask(layer, own["slots"], packing.real, layout.entries, layout.valid, all_seen)
        found = Arrangement(own, layout, mask, own_keys_only)
        forward.arranged = (of, found) if only_slots and fresh else None
        return found

    def _new_entries(
        self, layer: int, packing: Packing, halted: tuple[HaltedKV, ...], state: PassState
    ) -> tuple[Entries, Entries, torch.Tensor | None]:
        """Facts of the packed tokens; of these and, behind them, the halted ones; which of them get an entry, (B, ...) bool, None: all."""
        own, keep = self._facts(state, packing.take), packing.real
        if state.any_kv_skipped:
            writes = packing.take(state.writes_kv(layer))
            keep = writes if keep is None else keep & writes
        if not halted:
            return own, own, keep
        entries, kept = own, [or_all(keep, own["slots"])]
        for one in halted:
            facts = self._facts(state, one.packing.take)
            entries = join_entries(entries, facts)
            kept.append(or_all(one.packing.real, facts["slots"]))
        if keep is None and all(one.packing.real is None for one in halted):
            return own, entries, None
        return own, entries, torch.cat(kept, dim=1)

    def _halted(self, layer: int, forward: Forward) -> tuple[HaltedKV, ...]:
        """Halted tokens that have K/V entries, as `missing_kv` has it."""
        state = forward.executed
        if not state.kept_kv:
            return ()
        found = [HaltedKV(mode, packing) for mode, packing in forward.kept(layer).items()]
        for source_layer in sorted(state.translators):
            name = "project" if source_layer == layer else "predict"
            found.append(HaltedKV(name, forward.prediction_packing(layer, source_layer), source_layer))
        return tuple(one for one in found if one.packing.width)

    # -- masked ------------------------------------------------------------------------------------------------------------------

    def _masked(self, call: LayerCall, forward: Forward) -> LayerPlan:
        layer, state = call.layer, forward.executed
        target = call.store if call.store is not None else self.new_store()
        facts = self._facts(state, lambda field: field)
        packing = Packing(None, state.active(layer), forward.n)
        layout = target.plan(facts, state.kv_present(layer))
        mask = self.visibility.mask(layer, state.slots, packing.real, layout.entries, layout.valid)
        halted = [
            HaltedKV(mode, Packing(None, state.kept(layer, mode), forward.n))
            for mode in ("zero", "copy")
            if mode in state.kept_kv
        ]
        for source_layer in sorted(state.translators):
            real = state.kept(layer, "predict") & (state.halt_layer == source_layer - 1)
            name = "project" if source_layer == layer else "predict"
            halted.append(HaltedKV(name, Packing(None, real, forward.n), source_layer))
        return LayerPlan("masked", packing, state.slots, target, layout, tuple(halted), facts.get("bits"), mask)
