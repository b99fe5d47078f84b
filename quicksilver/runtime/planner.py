"""From the state of a pass and a layer's cache to the layer's plan: the one place that chooses how a layer is executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quicksilver.runtime.cache import CacheLayer, Entries, KVLayout, join_entries
from quicksilver.runtime.forward import Forward
from quicksilver.runtime.pass_state import PassState
from quicksilver.runtime.plan import HaltedKV, LayerCall, LayerPlan, Packing, or_all
from quicksilver.runtime.visibility import Span, Visibility


class Source(NamedTuple):
    """Halted tokens that are seen in a layer: where their K and V come from, their columns, and the translator's source layer."""

    name: str
    packing: Packing
    translator: int | None


@dataclass(frozen=True)
class Arrangement:
    """Where the K and V of a compact layer go and who sees them: the same for all layers with the same tokens.

    Attributes:
        own: facts of the computed tokens, (B, A) each; others, of the halted ones that are seen.
        layout, mask, own_keys_only: as in `LayerPlan`.
    """

    own: Entries
    others: tuple[Entries, ...]
    layout: KVLayout | None
    mask: torch.Tensor | None
    own_keys_only: bool


@dataclass(frozen=True)
class Situation:
    """What an arrangement follows from where of tokens nothing but the slot is known.

    Attributes:
        packings: of the computed tokens and of the halted ones; these very objects.
        fresh: the layer's cache has no entries, or there is none; cached: there is one.
        window, span: how far back its queries see.
    """

    packings: tuple[Packing, ...]
    fresh: bool
    cached: bool
    window: int | None
    span: Span | None

    def is_that_of(self, other: Situation) -> bool:
        return (
            self.fresh
            and (self.fresh, self.cached, self.window, self.span) == (other.fresh, other.cached, other.window, other.span)
            and len(self.packings) == len(other.packings)
            and all(one is another for one, another in zip(self.packings, other.packings, strict=True))
        )


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
        if forward.is_plain and self._is_dense(call, forward):
            return LayerPlan("plain", Packing(None, None, forward.n), observes_kv=observes_kv)
        if not observes_kv and call.store is not None and self.can_append(call.store, call.layer, forward):
            return LayerPlan("append", Packing(None, None, 1), observes_kv=False)
        return self._masked(call, forward) if self.masked else self._compact(call, forward)

    def _is_dense(self, call: LayerCall, forward: Forward) -> bool:
        """The layer has all entries, and its queries see as far as the model has it."""
        complete = call.store is None or call.store.is_complete
        return complete and self.visibility.span_reaches_back(call.layer, forward.end)

    def can_append(self, store: CacheLayer, layer: int, forward: Forward) -> bool:
        """One new token in each row, nothing decided about it yet, that sees all entries of the layer as they lie there."""
        return (
            forward.n == 1
            and forward.is_plain
            and store.can_append
            and self.visibility.sdpa
            and self.visibility.one_token_sees_all(layer, forward.seen)
            and not self.visibility.weighs(store.facts)
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
        layer, store, state = call.layer, call.store, forward.executed
        packing = forward.packing(layer)
        sources = self._sources(layer, forward)
        if packing.width == 0:
            own, others = self._facts(state, packing.take), self._others(sources, state)
            entries, keep = self._with_halted(own, self._own_entries(layer, packing, state), sources, others)
            layout = store.plan(entries, keep, in_order=False) if store is not None and sources else None
            halted = self._halted(sources, others)
            return LayerPlan("compact", packing, target=store, layout=layout, halted=halted)
        found = self._arrangement(call, forward, packing, sources)
        halted, target = self._halted(sources, found.others), None
        if store is not None or not found.own_keys_only:
            target = store if store is not None else self.new_store()
        bits = self._widths(found.own, packing)
        return LayerPlan(
            "compact", packing, found.own["slots"], target, found.layout, halted, bits, found.mask, found.own_keys_only
        )

    def _arrangement(self, call: LayerCall, forward: Forward, packing: Packing, sources: list[Source]) -> Arrangement:
        """That of the layer before where nothing has changed since: sorting entries and comparing slots takes as long as a small layer's
        products."""
        state, store = forward.executed, call.store
        situation = Situation(
            (packing, *(one.packing for one in sources)),
            fresh=store is None or store.slots is None,
            cached=store is not None,
            window=self.visibility.windows[call.layer],
            span=self.visibility.arch.spans[call.layer],
        )
        only_slots = not (state.any_kv_skipped or state.fusions or state.precisions)
        if only_slots and forward.arranged is not None and situation.is_that_of(forward.arranged[0]):
            return forward.arranged[1]
        found = self._arrange(call, forward, packing, sources)
        forward.arranged = (situation, found) if only_slots else None
        return found

    def _arrange(self, call: LayerCall, forward: Forward, packing: Packing, sources: list[Source]) -> Arrangement:
        layer, store, state = call.layer, call.store, forward.executed
        own, others = self._facts(state, packing.take), self._others(sources, state)
        entries, keep = self._with_halted(own, self._own_entries(layer, packing, state), sources, others)
        own_keys_only = self._own_keys_only(call, forward, entries, bool(sources), packing.real is None)
        layout = mask = None
        if store is not None or not own_keys_only:
            # A cache is in slot order, and halted tokens come after computed ones that they stand before.
            layout = (store if store is not None else self.new_store()).plan(entries, keep, in_order=not sources)
        if not own_keys_only:
            all_seen = forward.n == 1 and self.visibility.one_token_sees_all(layer, forward.seen)
            assert layout is not None
            mask = self.visibility.mask(layer, own["slots"], packing.real, layout.entries, layout.valid, all_seen)
        return Arrangement(own, others, layout, mask, own_keys_only)

    def _own_entries(self, layer: int, packing: Packing, state: PassState) -> torch.Tensor | None:
        """Which of the packed tokens get an entry: (B, A) bool, None: all."""
        if not state.any_kv_skipped:
            return packing.real
        writes = packing.take(state.writes_kv(layer))
        return writes if packing.real is None else packing.real & writes

    def _with_halted(
        self, own: Entries, keep: torch.Tensor | None, sources: list[Source], others: tuple[Entries, ...]
    ) -> tuple[Entries, torch.Tensor | None]:
        """Facts of the packed tokens and, behind them, of the halted ones; which of them get an entry."""
        if not sources:
            return own, keep
        entries, kept = own, [or_all(keep, own["slots"])]
        for one, facts in zip(sources, others, strict=True):
            entries = join_entries(entries, facts)
            kept.append(or_all(one.packing.real, facts["slots"]))
        if keep is None and all(one.packing.real is None for one in sources):
            return entries, None
        return entries, torch.cat(kept, dim=1)

    def _own_keys_only(self, call: LayerCall, forward: Forward, entries: Entries, halted: bool, even: bool) -> bool:
        """Active tokens come first and padding last, so the causal kernel is right for every real query without a mask, as long as the
        keys are exactly the queries' own tokens and weigh the same; without causality only where no row is padded (`even`)."""
        fresh = call.store is None or call.store.slots is None
        return (
            fresh
            and not halted
            and not forward.executed.any_kv_skipped
            and not self.visibility.weighs(entries)
            and self.visibility.own_kernel_fits(call.layer, forward.n, forward.end, even)
        )

    def _widths(self, own: Entries, packing: Packing) -> torch.Tensor | None:
        bits = own.get("bits")
        if bits is None or packing.real is None:
            return bits
        # Padding is computed at a width its row has anyway, lest it ask for products of a width that no token has.
        return torch.where(packing.real, bits, bits[:, :1])

    def _sources(self, layer: int, forward: Forward) -> list[Source]:
        """Halted tokens that have K/V entries, as `missing_kv` has it."""
        state = forward.executed
        if not state.kept_kv:
            return []
        found = [Source(mode, packing, None) for mode, packing in forward.kept(layer).items()]
        for source_layer in sorted(state.translators):
            name = "project" if source_layer == layer else "predict"
            found.append(Source(name, forward.prediction_packing(layer, source_layer), source_layer))
        return [one for one in found if one.packing.width]

    def _others(self, sources: list[Source], state: PassState) -> tuple[Entries, ...]:
        return tuple(self._facts(state, one.packing.take) for one in sources)

    def _halted(self, sources: list[Source], others: tuple[Entries, ...]) -> tuple[HaltedKV, ...]:
        return tuple(HaltedKV(one.name, one.packing, facts, one.translator) for one, facts in zip(sources, others, strict=True))

    # -- masked ------------------------------------------------------------------------------------------------------------------

    def _masked(self, call: LayerCall, forward: Forward) -> LayerPlan:
        layer, state = call.layer, forward.executed
        target = call.store if call.store is not None else self.new_store()
        facts = self._facts(state, lambda field: field)
        packing = Packing(None, state.active(layer), forward.n)
        layout = target.plan(facts, state.kv_present(layer))
        mask = self.visibility.mask(layer, state.slots, packing.real, layout.entries, layout.valid)
        halted = tuple(self._masked_halted(layer, forward))
        return LayerPlan("masked", packing, state.slots, target, layout, halted, facts.get("bits"), mask)

    def _masked_halted(self, layer: int, forward: Forward) -> list[HaltedKV]:
        state = forward.executed
        found = [
            HaltedKV(mode, Packing(None, state.kept(layer, mode), forward.n), None)
            for mode in ("zero", "copy")
            if mode in state.kept_kv
        ]
        for source_layer in sorted(state.translators):
            source = "project" if source_layer == layer else "predict"
            real = state.kept(layer, "predict") & (state.halt_layer == source_layer - 1)
            found.append(HaltedKV(source, Packing(None, real, forward.n), None, source_layer))
        return found
