"""What a module sees, one layer of one pass after it ran or the entries of one layer of the cache between two passes; and what asks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import Cache

from quicksilver.runtime.cache import CacheLayer
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import EvictionPolicy, MergePolicy, RuntimeModule, TokenPolicy
from quicksilver.runtime.pass_state import CacheMerge, Eviction, TokenState
from quicksilver.runtime.phases import phase
from quicksilver.runtime.plan import Attended, Forward, LayerCall, LayerResult, Machine, Packing, or_all

T = TypeVar("T")


@dataclass(eq=False)
class LayerView:
    """One layer of one pass after it ran: what a module may look at.

    Attributes:
        layer, n_layers: this layer (0-based) and their number.
        pass_index: which forward since the runtime was applied or reset.
        is_prompt: nothing was cached before and the pass has more than one token: all of it is known (docs/design.md §3).
        before, after: (B, M, D) states entering and leaving the layer.
        slots: (B, M) long, index in the sequence from its first real token.
        index: (B, M) long, column in this pass.
        input_ids: (B, M) long, or None when the model was given embeddings.
        n_tokens: (B, 1) long, real tokens of each row in this pass.
        pass_ids: (B, N) long, the ids of the whole pass, -1 for padding; None as `input_ids`.
        tokens_per_row: what `n_tokens` says of every row, where no row is padded; else None.
        add_signal_flops: counts what a signal took; matrix products of a module of yours are counted without it.
        head, received, own_keys, own_attention_output, all_heads: what the methods read.
    """

    layer: int
    n_layers: int
    pass_index: int
    is_prompt: bool
    before: torch.Tensor
    after: torch.Tensor
    slots: torch.Tensor
    index: torch.Tensor
    input_ids: torch.Tensor | None
    n_tokens: torch.Tensor
    head: Callable[..., torch.Tensor]
    received: Callable[[int | None, str], torch.Tensor] | None
    add_signal_flops: Callable[[int], None]
    all_heads: Callable[[torch.Tensor], torch.Tensor] = lambda states: states
    pass_ids: torch.Tensor | None = None
    own_keys: torch.Tensor | None = None
    own_attention_output: torch.Tensor | None = None
    tokens_per_row: int | None = None

    def logits(self, mask: torch.Tensor) -> torch.Tensor:
        """Logit lens of the K tokens in mask (B, M) bool, in row-major order: (K, V). Its cost goes into the ledger."""
        return self.head(self.after[mask])

    def logit_entropy_nats(
        self, mask: torch.Tensor, head_input: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Entropy of the logit lens of the K tokens in mask (B, M): (K,) float32, in nats (paper 2.1).

        Args:
            head_input: what the head is given for states (K', D) instead of their final norm: (K', D) (a fitted lens).
        """

        def entropy_nats(logits: torch.Tensor) -> torch.Tensor:
            log_p = logits.log_softmax(-1)
            return -(log_p.exp() * log_p).sum(-1)

        return self._of_logits(mask, entropy_nats, head_input)

    def logit_margin(self, mask: torch.Tensor) -> torch.Tensor:
        """By how much the logit lens of the K tokens in mask (B, M) prefers its first choice: (K,) float32, the difference of the two
        largest probabilities, 0 to 1 (CALM, arXiv 2207.07061)."""

        def margin(logits: torch.Tensor) -> torch.Tensor:
            first, second = logits.softmax(-1).topk(2, dim=-1).values.unbind(-1)
            return first - second

        return self._of_logits(mask, margin)

    def _of_logits(
        self,
        mask: torch.Tensor,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        head_input: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        selected = self.after[mask]
        if selected.shape[0] == 0:
            return selected.new_zeros(0, dtype=torch.float32)
        head = self.head if head_input is None else lambda piece: self.head(head_input(piece), True)
        # In pieces: K x V logits of a long prompt and a large vocabulary would be gigabytes.
        return torch.cat([reduce(head(piece).float()) for piece in selected.split(1024)])

    def attention_received(self, last_queries: int | None = 16, reduce: str = "mean") -> torch.Tensor:
        """Attention each token of the view gets in this layer from the last `last_queries` active tokens of its row: (B, M) float32.

        `mean` over heads and queries, or the `max` over both. None: from all active tokens. The queries' own tokens are included.

        Raises:
            ConfigError: the module did not say `wants_attention` for this layer, or an unknown `reduce`.
        """
        if reduce not in ("mean", "max"):
            raise ConfigError(f"attention_received(reduce={reduce!r}): give 'mean' or 'max'.")
        return self._watched(self.received, "Attention")(last_queries, reduce)

    @property
    def keys(self) -> torch.Tensor:
        """The tokens' own keys of this layer, as they are attended to: (B, H_kv, M, head_dim). Raises ConfigError as
        `attention_received`."""
        return self.all_heads(self._watched(self.own_keys, "view.keys"))

    @property
    def attention_output(self) -> torch.Tensor:
        """What the layer's attention adds to the residual stream: (B, M, D). Raises ConfigError as `attention_received`."""
        return self._watched(self.own_attention_output, "view.attention_output")

    def _watched(self, value: T | None, name: str) -> T:
        if value is None:
            raise ConfigError(
                f"{name} was not kept at layer {self.layer}: the module must return True from wants_attention({self.layer})."
            )
        return value


@dataclass(frozen=True)
class CacheView:
    """The K/V entries of one layer between two passes: what a module that merges or evicts them may look at.

    Attributes:
        layer, n_layers, pass_index: as in `LayerView`; the pass is the one that has just gone by.
        slots: (B, K) long, ascending within a row; present: (B, K) bool, False where there is no entry.
        size: (B, K) float32, original tokens that each entry stands for.
        n_seen: (B, 1) long, real tokens seen so far.
        n_new: columns since the prompt, or since entries were last merged.
        attention: (B, K) float32, attention each entry has received so far, summed over queries and averaged over heads; None unless
            a module's `sums_attention` asked for it.
        read_keys: gives `keys`.
    """

    layer: int
    n_layers: int
    pass_index: int
    slots: torch.Tensor
    present: torch.Tensor
    size: torch.Tensor
    n_seen: torch.Tensor
    n_new: int
    read_keys: Callable[[], torch.Tensor]
    attention: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor:
        """(B, H_kv, K, head_dim), unpacked when asked for."""
        return self.read_keys()


# -- asking the modules --------------------------------------------------------------------------------------------------------------


class Deciding:
    """Builds the views of one run and asks its modules.

    Args:
        machine: of the run.
        logits: the logit lens, (K, D) -> (K, V), not counted as the model's output head.
        merging, evicting: modules that are asked about the cache.

    Attributes:
        counts: count what decisions of foreign modules compute; False while a clock runs, which it would slow.
    """

    counts = True

    def __init__(
        self,
        machine: Machine,
        logits: Callable[..., torch.Tensor],
        merging: Sequence[MergePolicy],
        evicting: Sequence[EvictionPolicy],
    ) -> None:
        self.machine, self._logits, self.merging, self.evicting = machine, logits, merging, evicting

    # -- tokens ------------------------------------------------------------------------------------------------------------------

    @phase("decide")
    def about_tokens(
        self,
        policies: Sequence[TokenPolicy],
        call: LayerCall,
        forward: Forward,
        result: LayerResult,
        *,
        watched: bool,
        attention_output: torch.Tensor | None,
    ) -> torch.Tensor:
        """Ask `policies` about a layer that ran; returns its output (B, N, D), with merged and quantised states put in.

        Args:
            watched: a module asked to see attention, keys or `attention_output` (B, A, D).
        """
        packing, state = result.packing, forward.decisions
        if packing.width == 0:
            return result.output
        after = packing.take(result.output) if result.after is None else result.after
        view = self._view(call, forward, result, after, watched, attention_output)
        tokens = TokenState(state, view, packing.order, self._real(forward, packing, view.index))
        before = (state.halt_layer, len(state.fusions))
        for policy in policies:
            shown, fusions = _written(view), len(state.fusions)
            with self._counted(policy, forward):
                answer: object = policy.decide(view, tokens)
            if answer is not None:
                raise ConfigError(
                    f"{type(policy).__name__}.decide returned something, which decides nothing: call tokens.halt(mask)."
                )
            if _written(view) != shown and len(state.fusions) == fusions:  # what is fused, `fuse` puts into the view
                raise ConfigError(
                    f"{type(policy).__name__}.decide changed the states of layer {call.layer}: read view.before and view.after, and write "
                    "into neither."
                )
        forward.decided(changed_active=state.halt_layer is not before[0] or len(state.fusions) != before[1])
        if forward.executed is not state:
            return result.output
        if self.machine.precision is not None and state.precisions and state.precisions[-1].layer == call.layer:
            said = packing.take(state.precisions[-1].bits)
            bits = torch.where(said > 0, said, 16)
            view.after = self.machine.precision.quantize_dequantize_states(view.after, bits)
        if view.after is after:
            return result.output
        return view.after if packing.order is None else packing.put(result.output, after, view.after)

    @contextmanager
    def _counted(self, module: RuntimeModule, forward: Forward) -> Iterator[None]:
        """Within, matrix products of a module from outside of this package are counted, so far as it does not count them itself."""
        if not self.counts or type(module).__module__.startswith("quicksilver."):
            yield
            return
        counter, counted = FlopCounterMode(display=False), forward.work.signal_flops_of_rank
        with counter:
            yield
        self._count(forward, max(0, counter.get_total_flops() - (forward.work.signal_flops_of_rank - counted)))

    def _view(
        self,
        call: LayerCall,
        forward: Forward,
        result: LayerResult,
        after: torch.Tensor,
        watched: bool,
        attention_output: torch.Tensor | None,
    ) -> LayerView:
        packing, slots = result.packing, forward.decisions.slots
        own_slots = packing.take(slots) if result.slots is None else result.slots
        arch, work = self.machine.arch, forward.work
        index = packing.order
        if index is None:
            index = torch.arange(forward.n, device=slots.device).expand(forward.batch, -1)

        def logits(hidden: torch.Tensor, normed: bool = False) -> torch.Tensor:
            each = 2 * hidden.shape[0] * arch.width
            work.signal_flops += each * arch.vocab_size
            work.signal_flops_of_rank += each * arch.of_rank.vocab_size
            return self._logits(hidden, normed)

        def attention(last_queries: int | None, reduce: str) -> torch.Tensor:
            assert attended is not None
            received = self._received(call, forward, packing, attended, last_queries, reduce)
            return received.gather(1, own_slots.clamp(min=0))

        attended = result.attended if watched else None
        return LayerView(
            layer=call.layer, n_layers=arch.n_layers, pass_index=forward.index, is_prompt=forward.is_prompt,
            before=packing.take(call.hidden) if result.before is None else result.before, after=after, slots=own_slots, index=index,
            input_ids=None if forward.input_ids is None else packing.take(forward.input_ids), n_tokens=forward.n_real,
            head=logits, received=None if attended is None else attention, add_signal_flops=lambda n: self._count(forward, n),
            pass_ids=forward.pass_ids, all_heads=arch.ranks.all_heads,
            own_keys=None if attended is None else attended.new_keys, own_attention_output=attention_output,
            tokens_per_row=forward.decisions.tokens_per_row,
        )  # fmt: skip

    def _real(self, forward: Forward, packing: Packing, like: torch.Tensor) -> torch.Tensor:
        """(B, A) bool: which of the packed columns are active."""
        if packing.order is None and packing.real is None:
            return forward.executed.valid
        return or_all(packing.real, like)

    def _received(
        self, call: LayerCall, forward: Forward, packing: Packing, attended: Attended, last_queries: int | None, reduce: str
    ) -> torch.Tensor:
        """Attention received from tokens of the pass, by slot: (B, S) float32. Its cost goes into the ledger."""
        slots = packing.take(forward.decisions.slots)
        real = self._real(forward, packing, slots)
        if forward.executed is not forward.decisions:  # computed all the same, but what was halted asks for nothing
            real = real & packing.take(forward.decisions.active(call.layer))
        received, flops = self.machine.visibility.attention_received(
            call.layer, packing.take(call.hidden), packing.rotary(call.rotary, forward.batch), slots, real, attended,
            last_queries=last_queries, reduce=reduce, n_slots=forward.end,
        )  # fmt: skip
        self._count(forward, flops)
        return received

    def _count(self, forward: Forward, flops: int) -> None:
        """Operations of a signal, which every rank does."""
        forward.work.signal_flops += self.machine.arch.ranks.size * flops
        forward.work.signal_flops_of_rank += flops

    # -- the cache ---------------------------------------------------------------------------------------------------------------

    def sums_attention(self, layer: int) -> bool:
        """Whether an eviction policy asks what each entry of the layer receives."""
        return any(policy.sums_attention(layer) for policy in self.evicting)

    @phase("decide")
    def add_attention(self, call: LayerCall, forward: Forward, result: LayerResult) -> None:
        """Add to each entry's `attention` what it received in this pass."""
        store = call.store
        if store is None or store.entries is None:
            return
        if result.attended is None:  # no token was computed: no entry received anything
            if "attention" not in store.facts:
                store.add_fact("attention", torch.zeros_like(store.entries["slots"], dtype=torch.float32))
            return
        received = self._received(call, forward, result.packing, result.attended, None, "sum")
        entries = store.storage.stored_entries
        own = received.gather(1, entries["slots"].clamp(0, received.shape[1] - 1))
        store.add_fact("attention", entries.get("attention", torch.zeros_like(own)) + own * store.is_entry)

    @phase("decide")
    def about_cache(self, cache: Cache, forward: Forward) -> None:
        """Ask which entries become one, after every pass but the first, and which leave the cache, after every pass."""
        stores = cast(list[CacheLayer], cache.layers)
        for layer, store in enumerate(stores):
            if forward.seen == 0:
                store.unmerged_from = store.seen
            for merging in self.merging if forward.seen else ():
                self._merge(merging, layer, store, forward)
            for evicting in self.evicting:
                if store.entries is not None:
                    self._evict(evicting, layer, store, forward)
        changed_at = max(store.changed_at for store in stores)
        for store in stores:
            store.changed_at = changed_at

    def _merge(self, policy: MergePolicy, layer: int, store: CacheLayer, forward: Forward) -> None:
        with self._counted(policy, forward):
            into = policy.merge_cache(self._cache_view(layer, store, forward))
        if into is None:
            return
        if store.entries is None:  # nothing to merge; the columns since the last merge are counted as in any other layer
            store.unmerged_from = store.changed_at = store.seen
            return
        slots = store.storage.stored_entries["slots"]
        by_slot = torch.arange(store.seen, device=slots.device).repeat(forward.batch, 1)
        forward.decisions.merges.append(CacheMerge(layer, _by_slot(store, slots.gather(1, into), by_slot)))
        precision = self.machine.precision
        store.merge(into, None if precision is None else precision.quantize_dequantize_kv)

    def _evict(self, policy: EvictionPolicy, layer: int, store: CacheLayer, forward: Forward) -> None:
        with self._counted(policy, forward):
            gone = policy.evict(self._cache_view(layer, store, forward))
        if gone is None or not bool((gone := gone & store.is_entry).any()):
            return
        by_slot = gone.new_zeros(forward.batch, store.seen)
        forward.decisions.evictions.append(Eviction(layer, _by_slot(store, gone, by_slot)))
        store.evict(gone)

    def _cache_view(self, layer: int, store: CacheLayer, forward: Forward) -> CacheView:
        """What a policy is shown of a layer's entries; of one without any, a column that is none."""
        arch, entries, n_seen = self.machine.arch, store.entries, store.real_seen
        assert n_seen is not None
        none = torch.zeros_like(n_seen)
        slots, present = (none, none.bool()) if entries is None else (entries["slots"], store.is_entry)

        def keys() -> torch.Tensor:
            if entries is None:
                return none.new_zeros((forward.batch, arch.n_kv_heads, 1, arch.head_dim), dtype=arch.model.dtype)
            return arch.ranks.all_heads(store.storage.stored_rows[0])

        known = entries or {}
        return CacheView(
            layer=layer, n_layers=arch.n_layers, pass_index=forward.index, slots=slots, present=present,
            size=known.get("size", torch.ones_like(slots, dtype=torch.float32)), n_seen=n_seen, n_new=store.seen - store.unmerged_from,
            read_keys=keys, attention=known.get("attention"),
        )  # fmt: skip


def _written(view: LayerView) -> list[tuple[int, int]]:
    """Which tensors the view's states are, and how often each was written into: they are the run's own, so that a view costs no copy. Under
    inference_mode torch does not count."""
    return [(id(one), 0 if one.is_inference() else one._version) for one in (view.before, view.after)]


def _by_slot(store: CacheLayer, values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """values (B, K) of the entries of `store`, by slot, because columns depend on the execution: `others` (B, S) where there is none."""
    spare = others[:, :1]  # what is no entry is written to a column of its own
    at = torch.where(store.is_entry, store.storage.stored_entries["slots"], others.shape[1])
    return torch.cat([others, spare], dim=1).scatter(1, at, values)[:, :-1]
