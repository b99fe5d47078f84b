"""A pass and the plans of its layers: what they are, what comes of them, and the one place that chooses how a layer is executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from quicksilver.runtime.architecture import Architecture, Rotary
from quicksilver.runtime.cache import CacheLayer, Entries, KVLayout
from quicksilver.runtime.cache.stores import KV, put_rows, take_rows
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.ledger import LayerWork, PassWork
from quicksilver.runtime.module import PrecisionExecutor
from quicksilver.runtime.pass_state import NOTHING_KNOWN, Known, PassState, Ranges
from quicksilver.runtime.phases import phase
from quicksilver.runtime.placement import replaced
from quicksilver.runtime.translation import KVTranslator, MLPMap, PredictedKV
from quicksilver.runtime.visibility import Visibility

Way = Literal["plain", "append", "compact", "masked"]


@dataclass(frozen=True, eq=False)
class Packing:
    """The tokens of one layer, packed to the left.

    Attributes:
        order: (B, A) columns of the pass, chosen ones first in slot order, then distinct others; None: all N columns.
        real: (B, A) bool, which of them are chosen; None: all.
        width: A.
        ranges: the columns, the same in every row, where the host knows them.
    """

    order: torch.Tensor | None
    real: torch.Tensor | None
    width: int
    ranges: Ranges | None = None
    # What all layers are handed alike, rotary factors and positions, is packed once.
    _shared: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    @classmethod
    @phase("gather")
    def of(cls, mask: torch.Tensor, known: Known = NOTHING_KNOWN) -> Packing:
        """mask: (B, N) bool; known: what the host knows of those that are set."""
        n, (count, ranges) = mask.shape[1], known
        if ranges and count is not None and count < n:
            columns = torch.cat([torch.arange(start, stop, device=mask.device) for start, stop in ranges])
            return cls(columns.expand(mask.shape[0], -1), None, count, ranges)
        if count is None and mask.shape[0] == 1:  # one row: the chosen columns say how many
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
        if self.ranges is not None:
            return torch.cat([x[:, start:stop] for start, stop in self.ranges], dim=1)
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
class MappedMLP:
    """A map stands in for a layer's MLP.

    Attributes:
        map: what does.
        exact: which of the layer's packed tokens have their MLP computed all the same.
    """

    map: MLPMap
    exact: Packing

    def put_into(self, mlp: nn.Module, *, whole: bool) -> AbstractContextManager[None]:
        """For the length of the context; `whole`: the MLP is given all tokens, and what it returns for mapped ones is thrown away."""
        original, exact = mlp.forward, self.exact

        def forward(states: torch.Tensor) -> torch.Tensor:
            """(B, A, D) -> (B, A, D)."""
            mapped = self.map(states)
            if exact.width == 0:
                return mapped
            computed = exact.take(original(states)) if whole else original(exact.take(states))
            return exact.put(mapped, exact.take(mapped), computed)

        return replaced(mlp, forward=forward)


@dataclass(frozen=True)
class LayerPlan:
    """Everything that the execution of one layer needs, known before it runs.

    Attributes:
        way: which execution.
        packing: columns that are computed, and which of them are active; slots: (B, A) long, theirs. None: as the model has it.
        target: the cache that K and V go into, for the length of this call where the model keeps none; None: none is needed.
        layout: the entries of the target afterwards; None: it does not change, or finds out itself.
        halted: further entries, of halted tokens, after those of the computed ones.
        pieces: how both are put into slot order without sorting; None: `layout` sorts them.
        bits: (B, A) uint8, widths of the computed tokens; None: nothing is quantised.
        mlp: what stands in for the MLP, and for which tokens; None: nothing.
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
    pieces: Pieces | None = None
    bits: torch.Tensor | None = None
    mlp: MappedMLP | None = None
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
        size: (B, K) float32, tokens that each stands for; None: one each.
    """

    new_keys: torch.Tensor
    new_values: torch.Tensor
    keys: torch.Tensor
    slots: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    size: torch.Tensor | None = None

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
        attended: None where it was not asked for, or no token was computed.
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
        precision: what executes widths; None: nothing does.
        visibility: which tokens see which.
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
    def run_layer(
        self, call: LayerCall, inputs: dict[str, Any], bits: torch.Tensor | None, mlp: MappedMLP | None = None
    ) -> torch.Tensor:
        """The frozen layer on `inputs`, with the inputs of its linear layers at widths `bits` (B, A), and `mlp` in the place of its MLP."""
        with nullcontext() if mlp is None else mlp.put_into(self.arch.mlp(call.layer), whole=bits is not None):
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


# -- one forward of the model: what came in, what was decided about it, what layers leave for the layers after them ----------------


class Forward:
    """One pass, from the base model's pre-hook to its hook.

    Args:
        arguments: what the base model was called with, by name.
        n_layers: number of decoder layers.
        index: which pass of the run.
        decides_only: decisions are taken and not executed.
        remembers_kv: K and V are kept for `missing_kv="copy"`.

    Attributes:
        batch, n, seen: sequences, new columns, columns cached before.
        input_ids: (B, N) long, or None where the model was given embeddings; pass_ids: the same with -1 for padding.
        padded: some column, new or cached, is padding; past_valid: (B, seen) bool, those that are not, or None.
        past_real: (B,) long, real tokens before the pass, or as many in every row; n_real: (B, 1) long, in it.
        is_prompt: nothing was cached before and there is more than one column.
        decisions: what the modules decide. executed: what is executed: the same, or, where they only decide, a state that stays as it was.
        carried: where the layer before left the states of its packed tokens out of what it returned: which columns, and (B, A, D).
        predicted: K and V of later layers, of the tokens in `prediction_packing`, by source layer of their translator.

    Raises:
        ConfigError: neither ids nor embeddings, an attention mask that is no padding mask.
    """

    def __init__(self, arguments: dict[str, Any], n_layers: int, index: int, *, decides_only: bool, remembers_kv: bool) -> None:
        ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
        source = ids if ids is not None else embeds
        if source is None:
            raise ConfigError("The model was called without input_ids or inputs_embeds.")
        self.batch, self.n = source.shape[:2]
        cache = arguments.get("past_key_values")
        self.seen: int = cache.get_seq_length() if cache is not None else 0
        self.index = index
        self.input_ids = ids
        mask = self._padding_mask(arguments.get("attention_mask"), source.device)
        self.padded = mask is not None
        self.past_valid = None if mask is None else mask[:, : self.seen]
        valid, slots = self._columns(mask, source.device)
        self.decisions = self.executed = PassState(valid, slots, n_layers)
        if decides_only:
            self.executed = PassState(valid, slots, n_layers)
        self.decisions.tokens_per_row = self.executed.tokens_per_row = None if self.padded else self.n
        self.decisions.remembers_kv = remembers_kv
        self.pass_ids = ids.masked_fill(~valid, -1) if self.padded and ids is not None else ids
        self.is_prompt = self.seen == 0 and self.n > 1
        self.work = PassWork(layers=[])
        self.past_lengths: list[torch.Tensor | int] = []
        self.newest_kv: KV | None = None
        self.predicted: dict[int, PredictedKV] = {}
        self.arranged: tuple[tuple[object, ...], LayerPlan] | None = None  # the planner's, for layers with the same tokens
        self.carried: tuple[Packing, torch.Tensor] | None = None
        self._packing: Packing | None = None
        self._kept: dict[str, Packing] | None = None
        self._prediction_packing: dict[int, Packing] = {}
        self._exact: tuple[Packing, Packing] | None = None

    def _padding_mask(self, mask: Any, device: torch.device) -> torch.Tensor | None:
        """(B, seen + N) bool, or None where nothing is padding."""
        if mask is None:
            return None
        is_tensor = isinstance(mask, torch.Tensor)
        if not (is_tensor and mask.ndim == 2 and mask.shape[1] == self.end):
            shape, prepared = (tuple(mask.shape), mask.ndim == 4) if is_tensor else (f"a {type(mask).__name__}", True)
            hint = " A static cache prepares such masks: use a DynamicCache (leave out cache_implementation)." if prepared else ""
            raise ConfigError(
                f"attention_mask must be a (B, {self.end}) padding mask over cached and new tokens; got {shape}.{hint}"
            )
        mask = mask.to(device).bool()
        return None if bool(mask.all()) else mask

    def _columns(self, mask: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which new columns are tokens, (B, N) bool, and their slots, (B, N) long."""
        self.past_real: torch.Tensor | int = self.seen
        if mask is None:
            slots = torch.arange(self.seen, self.end, device=device).expand(self.batch, -1)
            return torch.ones(self.batch, self.n, dtype=torch.bool, device=device), slots
        valid = mask[:, self.seen :]
        self.past_real = mask[:, : self.seen].sum(1)
        return valid, self.past_real[:, None] + valid.long().cumsum(1) - 1

    @cached_property
    def n_real(self) -> torch.Tensor:
        return self.decisions.valid.sum(1, keepdim=True)

    @property
    def end(self) -> int:
        """Columns seen after the pass."""
        return self.seen + self.n

    @property
    def has_holes(self) -> bool:
        """Some row has padding between tokens."""
        if not self.padded:
            return False
        assert self.past_valid is not None
        tokens = torch.cat([self.past_valid, self.decisions.valid], dim=1).int()
        return bool(((tokens.diff(dim=1) == 1).sum(1) + tokens[:, 0] > 1).any())

    @property
    def is_plain(self) -> bool:
        """No decision is being executed and nothing is padding: the model's own call is right."""
        return not self.padded and self.executed.is_untouched

    def decided(self, changed_active: bool) -> None:
        """Note that modules decided; `changed_active`: tokens were halted or fused."""
        if self.executed is not self.decisions:
            return
        if changed_active:
            self._packing = None
        if changed_active or self.executed.any_kv_skipped:
            self._kept = None

    # -- which columns -----------------------------------------------------------------------------------------------------------

    def packing(self, layer: int) -> Packing:
        """The columns that take part in `layer`."""
        state = self.executed
        if self._packing is None or layer in state.resume_layers:
            self._packing = Packing.of(state.active(layer), state.left(layer))
            self._kept = None
        return self._packing

    def mlp(self, layer: int, packing: Packing) -> MappedMLP | None:
        """What stands in for the MLP of `layer`, whose packed tokens are in `packing`; None: nothing."""
        state = self.executed
        if layer not in state.mlp_maps or packing.width == 0:
            return None
        if self._exact is None or self._exact[0] is not packing:
            exact = ~packing.take(state.mappings[0].tokens)
            self._exact = packing, Packing.of(exact if packing.real is None else exact & packing.real)
        return MappedMLP(state.mlp_maps[layer], self._exact[1])

    def kept(self, layer: int) -> dict[str, Packing]:
        """The columns of halted tokens that are seen in `layer`, by where their K/V come from, but for predicted ones."""
        state = self.executed
        if self._kept is None:
            modes = sorted(state.kept_kv - {"predict"})
            self._kept = {mode: Packing.of(state.kept(layer, mode), state.known_kept(layer, mode)) for mode in modes}
        return self._kept

    def prediction_packing(self, layer: int, source_layer: int) -> Packing:
        """The columns whose K/V come from the translator of `source_layer`, as they were when their tokens halted."""
        state = self.executed
        if source_layer not in self._prediction_packing:
            halted = state.kept(layer, "predict") & (state.halt_layer == source_layer - 1)
            packing = Packing.of(halted, state.known_kept(layer, "predict", source_layer - 1))
            self._prediction_packing[source_layer] = packing
        packing = self._prediction_packing[source_layer]
        if layer in state.resume_layers:  # a token that takes part again has K/V of its own
            still = packing.take(state.kept(layer, "predict"))
            real = still if packing.real is None else still & packing.real
            packing = self._prediction_packing[source_layer] = Packing(packing.order, real, packing.width)
        return packing

    # -- K and V kept for later layers -------------------------------------------------------------------------------------------

    def predict(self, translator: KVTranslator, hidden: torch.Tensor) -> None:
        """Predict the K/V of all layers after the translator's source layer; hidden: (B, E, D), states entering that layer."""
        self.predicted[translator.source_layer] = translator.translate(hidden)

    def remember(self, packing: Packing, attended: Attended) -> None:
        """Keep each token's newest K, V of this pass, for `missing_kv="copy"`."""
        keys, values = attended.new_keys, attended.new_values
        if packing.order is None:
            self.newest_kv = (keys, values)
            return
        if self.newest_kv is None:
            shape = (*keys.shape[:2], self.n, keys.shape[3])
            self.newest_kv = (keys.new_zeros(shape), values.new_zeros(shape))
        where = packing.order[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        if packing.real is not None:
            real = packing.real[:, None, :, None]
            keys, values = (
                torch.where(real, new, old.gather(2, where)) for old, new in zip(self.newest_kv, (keys, values), strict=True)
            )
        self.newest_kv = (self.newest_kv[0].scatter(2, where, keys), self.newest_kv[1].scatter(2, where, values))


# -- from the state of a pass and a layer's cache to the layer's plan -------------------------------------------------------------


Pieces = tuple[tuple[int, int, int], ...]
"""Cuts of several parts, one after the other: which part, from where, to where."""


def pieces_of(packings: Sequence[Packing]) -> Pieces | None:
    """The columns of packings that share none, in ascending order; None: only the device knows them."""
    found: list[tuple[int, tuple[int, int, int]]] = []
    for part, packing in enumerate(packings):
        if packing.ranges is None:
            return None
        at = 0
        for start, stop in packing.ranges:
            found.append((start, (part, at, at + stop - start)))
            at += stop - start
    return tuple(piece for _, piece in sorted(found))


def join_pieces(parts: Sequence[torch.Tensor], pieces: Pieces | None, dim: int) -> torch.Tensor:
    """The parts one after the other along `dim`, or cut as `pieces` says."""
    if pieces is not None:
        parts = [parts[part].narrow(dim, start, stop - start) for part, start, stop in pieces]
    return torch.cat(tuple(parts), dim=dim)


class Planner:
    """Makes plans for the layers of one run.

    Args:
        visibility: which tokens see which.
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
        if not observes_kv and store is not None and self.appends(forward) and self.fits_behind(store, layer, forward.seen):
            return LayerPlan("append", Packing(None, None, 1), observes_kv=False)
        return self._masked(call, forward) if self.masked else self._compact(call, forward)

    def appends(self, forward: Forward) -> bool:
        """One new token in each row, and nothing decided about it yet."""
        return forward.n == 1 and forward.is_plain

    def fits_behind(self, store: CacheLayer, layer: int, seen: int) -> bool:
        """Whether one more token sees all entries of the layer as they lie there, after `seen` columns."""
        return (
            store.storage.can_append
            and self.visibility.one_token_sees_all(layer, seen)
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
                _, entries, keep = self._new_entries(call.layer, packing, halted, None, forward.executed)
                layout = store.plan(entries, keep, in_order=False)
            return LayerPlan("compact", packing, target=store, layout=layout, halted=halted)
        found = self._arranged(call, forward, packing, halted)
        target = self.new_store() if store is None and not found.own_keys_only else store
        return replace(found, target=target, halted=halted, mlp=forward.mlp(call.layer, packing))

    def _arranged(self, call: LayerCall, forward: Forward, packing: Packing, halted: tuple[HaltedKV, ...]) -> LayerPlan:
        """Where the K and V of a compact layer go and what sees them: as in the layer before where nothing has changed since, for sorting entries
        and comparing slots takes as long as a small layer's products."""
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
        pieces = pieces_of([packing, *(one.packing for one in halted)]) if halted else None
        own, entries, keep = self._new_entries(layer, packing, halted, pieces, state)
        # Active tokens come first and padding last, so the causal kernel is right for every real query without a mask, as long as the keys
        # are exactly the queries' own tokens and weigh the same; without causality only where no row is padded.
        own_keys_only = (
            fresh
            and not (halted or state.any_kv_skipped or self.visibility.weighs(entries))
            and self.visibility.own_kernel_fits(layer, forward.n, forward.end, even=packing.real is None)
        )
        layout = mask = None
        if store is not None or not own_keys_only:
            # A cache is in slot order, and halted tokens may come after computed ones that they stand before.
            in_order = pieces is not None or not halted
            layout = (store if store is not None else self.new_store()).plan(entries, keep, in_order)
        if not own_keys_only:
            all_seen = forward.n == 1 and self.visibility.one_token_sees_all(layer, forward.seen)
            assert layout is not None
            mask = self.visibility.mask(layer, own["slots"], packing.real, layout.entries, layout.valid, all_seen)
        bits = own.get("bits")
        if bits is not None and packing.real is not None:
            # Padding is computed at a width its row has anyway, lest it ask for products of a width that no token has.
            bits = torch.where(packing.real, bits, bits[:, :1])
        found = LayerPlan(
            "compact", packing, own["slots"], layout=layout, pieces=pieces, bits=bits, mask=mask, own_keys_only=own_keys_only
        )
        forward.arranged = (of, found) if only_slots and fresh else None
        return found

    def _new_entries(
        self, layer: int, packing: Packing, halted: tuple[HaltedKV, ...], pieces: Pieces | None, state: PassState
    ) -> tuple[Entries, Entries, torch.Tensor | None]:
        """Facts of the packed tokens; of these and the halted ones, behind them or as `pieces` says; which of them get an entry,
        (B, ...) bool, None: all."""
        own, keep = self._facts(state, packing.take), packing.real
        if state.any_kv_skipped:
            writes = packing.take(state.writes_kv(layer))
            keep = writes if keep is None else keep & writes
        if not halted:
            return own, own, keep
        of_each = [own, *(self._facts(state, one.packing.take) for one in halted)]
        kept = [keep, *(one.packing.real for one in halted)]
        entries = {name: join_pieces([facts[name] for facts in of_each], pieces, 1) for name in own}
        if all(real is None for real in kept):
            return own, entries, None
        masks = [or_all(real, facts["slots"]) for real, facts in zip(kept, of_each, strict=True)]
        return own, entries, join_pieces(masks, pieces, 1)

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
        mlp = None
        if layer in state.mlp_maps:
            mlp = MappedMLP(state.mlp_maps[layer], Packing(None, ~state.mappings[0].tokens, forward.n))
        return LayerPlan(
            "masked", packing, state.slots, target, layout, tuple(halted), bits=facts.get("bits"), mlp=mlp, mask=mask
        )
