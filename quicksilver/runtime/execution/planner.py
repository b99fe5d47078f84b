"""From the state of a pass and a layer's cache to the layer's plan: the one place that chooses how a layer is executed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quicksilver.runtime.cache import CacheLayer, Entries, join_entries
from quicksilver.runtime.execution.plan import HaltedKV, LayerCall, LayerPlan, Packing, or_all
from quicksilver.runtime.forward import Forward
from quicksilver.runtime.pass_state import PassState
from quicksilver.runtime.visibility import Visibility


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
        if not observes_kv and self._can_append(call, forward):
            return LayerPlan("append", Packing(None, None, forward.n), observes_kv=False)
        return self._masked(call, forward) if self.masked else self._compact(call, forward)

    def _is_dense(self, call: LayerCall, forward: Forward) -> bool:
        """The layer has all entries, and its queries see as far as the model has it."""
        complete = call.store is None or call.store.is_complete
        return complete and self.visibility.span_reaches_back(call.layer, forward.end)

    def _can_append(self, call: LayerCall, forward: Forward) -> bool:
        """One new token in each row, nothing decided about it yet, that sees all entries of the layer as they lie there."""
        store = call.store
        return (
            forward.n == 1
            and store is not None
            and forward.is_plain
            and store.can_append
            and self.visibility.sdpa
            and self.visibility.one_token_sees_all(call.layer, forward.seen)
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
        halted = self._halted(layer, forward)
        own = self._facts(state, packing.take)
        entries, keep = self._with_halted(own, self._own_entries(layer, packing, state), halted)
        if packing.width == 0:
            layout = store.plan(entries, keep, in_order=False) if store is not None and halted else None
            return LayerPlan("compact", packing, target=store, layout=layout, halted=halted)
        own_keys_only = self._own_keys_only(call, forward, entries, halted, packing.real is None)
        target = layout = mask = None
        if store is not None or not own_keys_only:
            target = store if store is not None else self.new_store()
            # A cache is in slot order, and halted tokens come after computed ones that they stand before.
            layout = target.plan(entries, keep, in_order=not halted)
        if not own_keys_only:
            all_seen = forward.n == 1 and self.visibility.one_token_sees_all(layer, forward.seen)
            assert layout is not None
            mask = self.visibility.mask(layer, own["slots"], packing.real, layout.entries, layout.valid, all_seen)
        bits = self._widths(own, packing)
        return LayerPlan("compact", packing, own["slots"], target, layout, halted, bits, mask, own_keys_only)

    def _own_entries(self, layer: int, packing: Packing, state: PassState) -> torch.Tensor | None:
        """Which of the packed tokens get an entry: (B, A) bool, None: all."""
        if not state.any_kv_skipped:
            return packing.real
        writes = packing.take(state.writes_kv(layer))
        return writes if packing.real is None else packing.real & writes

    def _with_halted(
        self, own: Entries, keep: torch.Tensor | None, halted: tuple[HaltedKV, ...]
    ) -> tuple[Entries, torch.Tensor | None]:
        """Facts of the packed tokens and, behind them, of the halted ones; which of them get an entry."""
        if not halted:
            return own, keep
        entries, kept = own, [or_all(keep, own["slots"])]
        for one in halted:
            assert one.facts is not None
            entries = join_entries(entries, one.facts)
            kept.append(or_all(one.packing.real, one.facts["slots"]))
        if keep is None and all(one.packing.real is None for one in halted):
            return entries, None
        return entries, torch.cat(kept, dim=1)

    def _own_keys_only(
        self, call: LayerCall, forward: Forward, entries: Entries, halted: tuple[HaltedKV, ...], even: bool
    ) -> bool:
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

    def _halted(self, layer: int, forward: Forward) -> tuple[HaltedKV, ...]:
        """K/V entries of halted tokens, as `missing_kv` has it."""
        state = forward.executed
        if not state.kept_kv:
            return ()
        found: list[tuple[str, Packing, int | None]] = [(mode, packing, None) for mode, packing in forward.kept(layer).items()]
        for source_layer in sorted(state.translators):
            source = "project" if source_layer == layer else "predict"
            found.append((source, forward.prediction_packing(layer, source_layer), source_layer))
        return tuple(
            HaltedKV(source, packing, self._facts(state, packing.take), translator)
            for source, packing, translator in found
            if packing.width
        )

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
