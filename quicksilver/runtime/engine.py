"""Wrap the layer, not the model: `apply` puts the modules' decisions into effect on frozen decoder layers (DESIGN §2).

A decoder layer does not care which tokens it is given. Under `compact` each layer is called on its active tokens alone, with their own
rotary factors and a mask built from their slots, and the result is scattered back. Under `masked` every layer is called on all tokens,
and what should not have happened is undone: the paper's way, which saves nothing and serves as the reference. Under `decide` the modules
decide and everything is executed: the price of the policy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from quicksilver.runtime.architecture import Architecture, Rotary, architecture_of
from quicksilver.runtime.cache import Entries, KVLayout, MaskedLayer, RaggedLayer, join_entries, take_over
from quicksilver.runtime.errors import ConfigError, QuickSilverError, UnsupportedModelError
from quicksilver.runtime.ledger import BETA, Flops, LayerWork, PassWork, head_flops, pass_flops
from quicksilver.runtime.module import KINDS, EvictionPolicy, MergePolicy, RuntimeModule, SpanPolicy, TokenPolicy, Transform
from quicksilver.runtime.state import CacheMerge, CacheView, Eviction, LayerView, PassState, Span, TokenState
from quicksilver.runtime.trace import PassTrace, Trace

Execution = Literal["compact", "masked", "decide"]
EXECUTIONS: tuple[str, ...] = ("compact", "masked", "decide")
_NOT_WATCHED: AbstractContextManager[Sequence[torch.Tensor]] = nullcontext(())


@dataclass(frozen=True)
class KVBytes:
    """Bytes of the last cache written: `billed` by the decisions, `resident` in its tensors."""

    billed: int = 0
    resident: int = 0


def apply(
    model: PreTrainedModel,
    modules: Sequence[RuntimeModule],
    *,
    execution: Execution = "compact",
    decision_layers: Sequence[int] | None = None,
) -> Run:
    """Run `model` under `modules` for the length of a `with` block; afterwards nothing is left on the model.

    Args:
        model: a frozen Hugging Face causal language model of a known family, in eval mode.
        modules: what decides; called in the order of their `priority`.
        execution: `compact` computes active tokens only, `masked` computes all and undoes (reference), `decide` decides and executes all.
        decision_layers: layers after which modules are asked (0-based); None: after every layer. Fewer means fewer host syncs on a GPU.

    Raises:
        ConfigError: an unknown execution, a decision layer the model lacks, a model in training mode, options a module refuses, a module of no kind.
        UnsupportedModelError: no adapter for the model's family or attention implementation.
    """
    return Run(model, modules, execution, decision_layers)


@dataclass
class Packing:
    """The tokens of one layer, packed to the left.

    Attributes:
        order: (B, A) columns of the pass, active ones first in slot order, then distinct inactive ones; None: all N columns.
        real: (B, A) bool, which of them are active; None: all.
        width: A.
    """

    order: torch.Tensor | None
    real: torch.Tensor | None
    width: int

    @classmethod
    def of(cls, mask: torch.Tensor, count: int | None = None) -> Packing:
        """mask: (B, N) bool; count: how many are set in each row, where the host knows it."""
        n = mask.shape[1]
        if count is not None:
            low = high = count
        else:
            counts = mask.sum(1)
            low, high = torch.stack([counts.min(), counts.max()]).tolist()  # the one host sync of a decision
        if low == n:
            return cls(None, None, n)
        # Padding columns are inactive tokens of the same row: scattering their own old state back harms nobody.
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :high]
        real = None if low == high else torch.arange(high, device=mask.device) < counts[:, None]
        return cls(order, real, high)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, ...) -> (B, A, ...)."""
        if self.order is None:
            return x
        index = self.order.reshape(*self.order.shape, *([1] * (x.ndim - 2))).expand(-1, -1, *x.shape[2:])
        return x.gather(1, index)

    def put(self, full: torch.Tensor, packed_old: torch.Tensor, packed_new: torch.Tensor) -> torch.Tensor:
        """`full` (B, N, D) with the active columns replaced by `packed_new` (B, A, D)."""
        if self.order is None:
            return packed_new
        if self.real is not None:
            packed_new = torch.where(self.real[..., None], packed_new, packed_old)
        return full.scatter(1, self.order[..., None].expand_as(packed_new), packed_new)


class _Pass:
    """One forward of the model, from the base model's pre-hook to its hook."""

    def __init__(self, run: Run, arguments: dict[str, Any]) -> None:
        ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
        source = ids if ids is not None else embeds
        if source is None:
            raise ConfigError("The model was called without input_ids or inputs_embeds.")
        self.batch, self.n = source.shape[:2]
        cache = arguments.get("past_key_values")
        self.seen: int = cache.get_seq_length() if cache is not None else 0
        self.input_ids = ids
        device = source.device

        mask = arguments.get("attention_mask")
        self.past_valid: torch.Tensor | None = None
        self.padded = False
        if mask is not None:
            if not (isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == self.seen + self.n):
                shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
                raise ConfigError(
                    f"attention_mask must be a (B, {self.seen + self.n}) padding mask over cached and new tokens; got {shape}."
                )
            mask = mask.to(device).bool()
            if not bool(mask.all()):
                self.padded = True
                self.past_valid = mask[:, : self.seen]
        if self.past_valid is not None and mask is not None:
            valid = mask[:, self.seen :]
            self.past_real = self.past_valid.sum(1)
            slots = self.past_real[:, None] + valid.long().cumsum(1) - 1
            self.n_real = valid.sum(1, keepdim=True)
        else:
            valid = torch.ones(self.batch, self.n, dtype=torch.bool, device=device)
            self.past_real = torch.full((self.batch,), self.seen, device=device)
            slots = torch.arange(self.seen, self.seen + self.n, device=device).expand(self.batch, -1)
            self.n_real = torch.full((self.batch, 1), self.n, device=device)
        self.state = PassState(valid, slots, run.arch.n_layers)
        self.state.remembers_kv = run._copies_kv
        self.state.n_each = None if self.padded else self.n
        self.pass_ids = ids.masked_fill(~valid, -1) if self.padded and ids is not None else ids
        self.is_prompt = self.seen == 0 and self.n > 1
        self.index = run.pass_index
        self.work = PassWork(layers=[])
        self.past_lengths: list[torch.Tensor | int] = []
        self.packing: Packing | None = None  # of the previous layer; None when it must be made anew
        self.kept: dict[str, Packing] | None = None
        self.predicted: dict[int, tuple[Packing, Mapping[int, tuple[torch.Tensor, torch.Tensor]]]] = {}  # by source layer
        self.copied: tuple[torch.Tensor, torch.Tensor] | None = None  # K, V (B, H_kv, N, head_dim) for missing_kv=copy

    @property
    def all_run(self) -> bool:
        """No decision so far and no padding: the plain model's own call is right."""
        state = self.state
        return not (self.padded or state.any_halted or state.any_kv_skipped or state.fusions or state.precisions)


class Run:
    """What `with apply(...) as run` gives.

    Attributes:
        arch: the model's adapter.
        modules: the modules that decide, in the order they are asked; token_policies: those that decide about tokens.
        transforms: what changes the model for the length of the context.
    """

    def __init__(
        self, model: PreTrainedModel, modules: Sequence[RuntimeModule], execution: str, decision_layers: Sequence[int] | None
    ) -> None:
        if execution not in EXECUTIONS:
            raise ConfigError(f"execution={execution!r} is not one of {', '.join(EXECUTIONS)}.")
        if model.training:
            raise ConfigError("The model is in training mode (dropout is on): call model.eval() first.")
        self.arch = architecture_of(model)
        self.execution = execution
        if decision_layers is not None:
            wrong = [layer for layer in decision_layers if not 0 <= layer < self.arch.n_layers]
            if wrong:
                raise ConfigError(f"decision_layers={wrong} do not exist: the model has layers 0 to {self.arch.n_layers - 1}.")
        self.decision_layers = None if decision_layers is None else frozenset(decision_layers)
        for module in modules:
            if not isinstance(module, KINDS):
                raise ConfigError(
                    f"{type(module).__name__} is no kind of runtime module: derive it from one or more of "
                    f"{', '.join(kind.__name__ for kind in KINDS)}."
                )
        self.transforms = [module for module in modules if isinstance(module, Transform)]
        self.modules = sorted(
            (module for module in modules if not isinstance(module, Transform)), key=lambda module: module.priority
        )
        self.token_policies = [module for module in self.modules if isinstance(module, TokenPolicy)]
        for module in (*self.transforms, *self.modules):
            module.bind(self.arch)
        if self.decision_layers:
            for module in self.token_policies:
                would = [layer for layer in range(self.arch.n_layers) if module.acts_at(layer)]
                missing = sorted(module.required_layers() - self.decision_layers)
                if missing:
                    raise ConfigError(
                        f"decision_layers={sorted(self.decision_layers)}: {type(module).__name__} decides after layer "
                        f"{', '.join(map(str, missing))} too. Add {'it' if len(missing) == 1 else 'them'}."
                    )
                if would and self.decision_layers.isdisjoint(would):
                    raise ConfigError(
                        f"decision_layers={sorted(self.decision_layers)}: {type(module).__name__} would never be asked, it acts after "
                        f"layer {', '.join(map(str, would))}. Add one of these."
                    )
        if self.modules and self.arch.attention_implementation not in ("sdpa", "eager"):
            raise UnsupportedModelError(
                f"attn_implementation={self.arch.attention_implementation!r} cannot mask tokens by slot; load the model with 'sdpa' or 'eager'."
            )
        self._copies_kv = any(module.copies_kv for module in self.token_policies)
        self._proportional = any(module.proportional_attention for module in self.token_policies)
        executing = [] if execution == "decide" else self.modules
        self._merging = [module for module in executing if isinstance(module, MergePolicy) and module.merges_cache]
        self._evicting = [module for module in executing if isinstance(module, EvictionPolicy) and module.evicts_cache]
        spanning = [module for module in executing if isinstance(module, SpanPolicy)]
        for layer in range(self.arch.n_layers):
            self.arch.spans[layer] = _the_span(layer, spanning)
        executors = [module.precision for module in self.token_policies if module.precision is not None]
        if len(executors) > 1:
            raise ConfigError(f"{len(executors)} modules set precision; give one.")
        self._precision = executors[0] if executors else None
        self._store_kind = type(self._new_store())
        # Asked for in every layer of every pass, and a transformers config takes microseconds to answer.
        self._windows = [self.arch.attention_window(layer) for layer in range(self.arch.n_layers)]
        changed = [type(transform).__name__ for transform in self.transforms if transform.changes_weights]
        if len(changed) > 1 or (changed and self._precision is not None):
            others = [] if self._precision is None else [type(m).__name__ for m in self.token_policies if m.precision is not None]
            raise ConfigError(f"{' and '.join([*changed, *others])} all change what the weights are multiplied as; give one.")
        self._handles: list[Any] = []
        self._previous: list[Any] = []
        self._transformed = ExitStack()
        self._in_signal = False
        self.reset()

    def reset(self) -> None:
        """Forget traces and ledgers: between measurements, or between batches of one run."""
        self._passes: list[tuple[PassWork, PassTrace]] = []
        self._flops: list[Flops] = []
        self._head_tokens = 0
        self._current: _Pass | None = None
        self._cache: Cache | None = None

    @property
    def pass_index(self) -> int:
        return len(self._passes)

    @property
    def trace(self) -> Trace:
        """Every decision since the start or the last `reset`."""
        return Trace(self.arch.n_layers, [trace.cpu() for _, trace in self._passes])

    @property
    def flops(self) -> Flops:
        """The ledgers since the start or the last `reset`."""
        for work, trace in self._passes[len(self._flops) :]:
            self._flops.append(pass_flops(self.arch, work, trace, self.beta))
        return sum(self._flops, head_flops(self.arch, self._head_tokens))

    @property
    def beta(self) -> Mapping[int, float]:
        """What the paper's ledger charges a token by its width."""
        return BETA if self._precision is None else self._precision.beta

    @property
    def kv_bytes(self) -> KVBytes:
        """Bytes of the last cache written, zero where none was."""
        layers = self.kv_bytes_by_layer
        return KVBytes(sum(layer.billed for layer in layers), sum(layer.resident for layer in layers))

    @property
    def kv_bytes_by_layer(self) -> list[KVBytes]:
        """The same for each layer, in order; empty where no cache was written."""
        layers = [] if self._cache is None else self._cache.layers
        if all(isinstance(layer, RaggedLayer) for layer in layers):
            return [KVBytes(layer.billed_bytes(), layer.resident_bytes()) for layer in layers]
        resident = [0 if layer.keys is None else layer.keys.nbytes + layer.values.nbytes for layer in layers]
        return [KVBytes(n, n) for n in resident]

    # -- the context -------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        if getattr(self.arch.base, "_quicksilver_run", None) is not None:
            raise ConfigError(
                "This model is already under quicksilver.apply; leave that context first, or give all modules at once."
            )
        with ExitStack() as transformed:
            for transform in self.transforms:
                transformed.enter_context(transform.applied(self.arch))
            self._transformed = transformed.pop_all()
        self.arch.base._quicksilver_run = self
        base_signature = inspect.signature(self.arch.base.forward)

        def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
            self._begin(base_signature.bind_partial(*args, **kwargs).arguments)

        self._handles = [
            self.arch.base.register_forward_pre_hook(before, with_kwargs=True),
            self.arch.base.register_forward_hook(lambda module, args, output: self._end(output)),
            self.arch.output_head.register_forward_pre_hook(lambda module, args: self._count_head(args[0])),
        ]
        if self.modules:
            for index, layer in enumerate(self.arch.layers):
                # accelerate (device_map) also sets forward on the instance: it is kept, called, and put back.
                self._previous.append(layer.__dict__.get("forward"))
                layer.forward = self._wrap(index, layer.forward)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        if self.modules:
            for layer, previous in zip(self.arch.layers, self._previous, strict=True):
                if previous is None:
                    del layer.forward
                else:
                    layer.forward = previous
        self._handles, self._previous = [], []
        del self.arch.base._quicksilver_run
        self._transformed.close()
        self._current = None

    def _begin(self, arguments: dict[str, Any]) -> None:
        self._current = _Pass(self, dict(arguments.get("kwargs", {})) | arguments)

    def _end(self, output: Any) -> None:
        current = self._current
        assert current is not None
        cache = getattr(output, "past_key_values", None)
        if cache is not None:
            self._cache = cache
        if not self.modules:
            current.work.layers = [
                LayerWork(current.batch, current.n, self._dense_keys(layer, current)) for layer in range(self.arch.n_layers)
            ]
            current.past_lengths = [current.past_real] * self.arch.n_layers
        current.work.past_real = current.past_real
        current.work.past_lengths = current.past_lengths
        if (self._merging or self._evicting) and cache is not None:
            self._settle(cache, current)
        self._passes.append((current.work, PassTrace.of(current.state, current.seen)))

    def _count_head(self, hidden: torch.Tensor) -> None:
        if not self._in_signal:
            self._head_tokens += hidden.numel() // self.arch.width

    def _dense_keys(self, layer: int, current: _Pass) -> int | None:
        """Keys per query of the plain model's attention; None: its causal kernel, which skips the upper triangle."""
        window = self._windows[layer]
        fits = window is None or current.n < window  # transformers gives a mask from n = window on
        if self.arch.attention_implementation == "sdpa" and current.seen == 0 and not current.padded and fits:
            return None
        # The plain cache of a sliding window keeps what the next token can see; a ragged one keeps all.
        seen = current.seen if window is None or self.modules else min(current.seen, window - 1)
        return seen + current.n

    # -- one layer ---------------------------------------------------------------------------------------------------------------

    def _wrap(self, layer: int, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        names = list(self.arch.layer_signature.parameters)[1:]  # without self

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            call = dict(zip(names, args, strict=False)) | kwargs  # GPT-2 passes cache and mask positionally
            current = self._current
            if current is None:
                raise QuickSilverError("A decoder layer was called outside its model's forward; call the model.")
            return self._layer(layer, original, call, current)

        return forward

    def _layer(self, layer: int, original: Callable[..., torch.Tensor], call: dict[str, Any], current: _Pass) -> torch.Tensor:
        cache: Cache | None = call.get(self.arch.cache_argument)
        store = self._store(cache, layer, current) if cache is not None else None
        self._cache = cache if cache is not None else self._cache
        current.past_lengths.append(0 if store is None else store.length)

        deciding = self._deciders(layer, current)
        wants_attention = any(module.wants_attention(layer) for module in deciding)
        sums_attention = store is not None and any(module.sums_attention(layer) for module in self._evicting)
        hidden = call["hidden_states"]  # (B, N, D)
        port: _PlainPort | _CompactPort | _MaskedPort | None
        plain = current.all_run and (store is None or store.is_complete) and self._in_sight(layer, current)
        with self._watched(layer) if wants_attention else _NOT_WATCHED as attention_output:
            if plain or (self.execution == "decide" and not current.padded):
                port = _PlainPort(store) if wants_attention or sums_attention or self._copies_kv else None
                output = self._plain(layer, original, call, current, port if port is not None else cache)
                packing = Packing(None, None, current.n)
            elif not (wants_attention or sums_attention) and store is not None and self._just_behind(layer, store, current):
                output = self._behind(original, call, current, store)
                packing, port = Packing(None, None, current.n), None
            elif self.execution == "compact" or self.execution == "decide":
                output, packing, port = self._compact(layer, original, call, current, store)
            else:
                output, port = self._masked(layer, original, call, current, store)
                packing = Packing(None, None, current.n)
        if self._copies_kv and port is not None:
            self._remember_kv(layer, current, packing, port)
        if sums_attention and port is not None:
            assert store is not None
            assert store.entries is not None
            received = self._received(layer, call, current, packing, packing.take(hidden), port, None, "sum")
            entries = store.entries
            own = received.gather(1, entries["slots"].clamp(0, received.shape[1] - 1))
            total = entries.get("attention", torch.zeros_like(own)) + own * store.is_entry
            store.entries = entries | {"attention": total}
        if deciding:
            watched = port if wants_attention else None
            attended = attention_output[0] if attention_output else None
            output = self._decide(layer, deciding, call, current, packing, hidden, output, watched, attended)
        if layer == self.arch.n_layers - 1 and current.state.fusions and self.execution != "decide":
            # What was merged away reads as the super-token that carried it (ToMe's unmerge): the model gets N states back.
            output = output.gather(1, current.state.representatives()[..., None].expand_as(output))
        return output

    @contextmanager
    def _watched(self, layer: int) -> Iterator[Sequence[torch.Tensor]]:
        """What the layer's attention returns while the context is open."""
        outputs: list[torch.Tensor] = []
        handle = self.arch.attention(layer).register_forward_hook(
            lambda module, args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
        try:
            yield outputs
        finally:
            handle.remove()

    def _in_sight(self, layer: int, current: _Pass) -> bool:
        """Whether every query of the pass reaches back to the first token, as far as the modules' spans go."""
        span = self.arch.spans[layer]
        return span is None or current.seen + current.n <= span.reach

    def _store(self, cache: Cache, layer: int, current: _Pass) -> RaggedLayer:
        found = cache.layers[layer] if layer < len(cache.layers) else None
        if type(found) is self._store_kind:
            return found  # type: ignore[return-value]
        return take_over(cache, layer, self._new_store(), current.past_valid)

    def _new_store(self) -> RaggedLayer:
        if self.execution == "masked":
            return MaskedLayer()
        return RaggedLayer() if self._precision is None else self._precision.new_store()

    def _facts(self, state: PassState, take: Callable[[torch.Tensor], torch.Tensor]) -> Entries:
        """What a cache must know of new entries, in the coordinates of `take`."""
        facts = {"slots": take(state.slots)}
        if state.fusions and self.execution != "decide":
            facts["size"] = take(state.size)
        if self._precision is not None and state.precisions and self.execution != "decide":
            facts["bits"] = take(state.bits)
        return facts

    def _run_layer(
        self, layer: int, original: Callable[..., torch.Tensor], inputs: dict[str, Any], bits: torch.Tensor | None
    ) -> torch.Tensor:
        if bits is None or self._precision is None:
            return original(**inputs)
        return self._precision.run_layer(self.arch.layers[layer], bits, lambda: original(**inputs))

    def _plain(
        self, layer: int, original: Callable[..., torch.Tensor], call: dict[str, Any], current: _Pass, cache: Any
    ) -> torch.Tensor:
        """The layer as the model called it: the model's own mask, every token."""
        current.work.layers.append(LayerWork(current.batch, current.n, self._dense_keys(layer, current)))
        return original(**(call | {self.arch.cache_argument: cache}))

    def _just_behind(self, layer: int, store: RaggedLayer, current: _Pass) -> bool:
        """One new token in each row, nothing decided about it yet: it sees all that the layer has, so there is nothing to plan or mask."""
        window = self._windows[layer]
        return (
            current.n == 1
            and current.all_run
            and store.is_even
            and self.execution == "compact"
            and not self._copies_kv
            and self.arch.attention_implementation == "sdpa"
            and (window is None or current.seen < window)
            and self._in_sight(layer, current)
            and not (self._proportional and "size" in store.facts)
        )

    def _behind(
        self, original: Callable[..., torch.Tensor], call: dict[str, Any], current: _Pass, store: RaggedLayer
    ) -> torch.Tensor:
        output = original(**(call | {"attention_mask": None, self.arch.cache_argument: _BehindPort(store)}))
        keys = store.length
        assert isinstance(keys, int)
        current.work.layers.append(LayerWork(current.batch, 1, keys))
        return output

    def _compact(
        self, layer: int, original: Callable[..., torch.Tensor], call: dict[str, Any], current: _Pass, store: RaggedLayer | None
    ) -> tuple[torch.Tensor, Packing, _CompactPort | None]:
        """Gather the active tokens, call the layer on them, scatter the result."""
        state = current.state
        executing_all = self.execution == "decide"
        if current.packing is None or layer in state.resume_layers:
            if executing_all:
                current.packing = Packing.of(state.valid, state.n_each)
            else:
                current.packing = Packing.of(state.active(layer), state.n_active(layer))
            current.kept = None
        packing = current.packing
        hidden, rotary = call["hidden_states"], call.get("position_embeddings")

        extra = None if executing_all else self._kept_kv(layer, hidden, rotary, current)
        extra_work = (extra.n_projected, extra.n_predicted) if extra else (0, 0)
        keep = packing.real
        if state.any_kv_skipped and not executing_all:
            writes = packing.take(state.writes_kv(layer))
            keep = writes if keep is None else keep & writes
        facts = self._facts(state, packing.take)
        slots, bits = facts["slots"], facts.get("bits")
        if bits is not None and packing.real is not None:
            # Padding is computed at a width its row has anyway, lest it ask for products of a width that no token has.
            bits = torch.where(packing.real, bits, bits[:, :1])
        if extra is not None:
            # Said even where all are kept: a cache is in slot order, and these come after tokens they stood before.
            keep = torch.cat([_or_all(keep, slots), _or_all(extra.real, extra.facts["slots"])], dim=1)
            facts = join_entries(facts, extra.facts)

        if packing.width == 0:
            # Nobody takes part: what is halted but not skipped may still have to be stored.
            if store is not None:
                if extra is not None:
                    store.write(store.plan(facts, keep), extra.keys, extra.values)
                store.advance(current.n, current.n_real)
            current.work.layers.append(LayerWork(current.batch, 0, 0, *extra_work))
            return hidden, packing, None

        # Active tokens come first and padding last, so the causal kernel is right for every real query without a mask,
        # as long as the keys are exactly the queries' own tokens and weigh the same.
        skipping = state.any_kv_skipped and not executing_all
        fresh = store is None or store.slots is None
        weighted = self._proportional and "size" in facts
        own_keys_only = extra is None and not skipping and fresh and not weighted and self._causal_kernel_fits(layer, current)
        layout = mask = None
        window = self._windows[layer]
        target = store if store is not None else self._new_store()
        if store is not None or not own_keys_only:
            layout = target.plan(facts, keep)
        if layout is not None and not own_keys_only:
            # By columns seen, not by entries: fewer entries than the window may still reach further back than it does.
            one_new = current.n == 1 and (window is None or current.seen < window) and self._in_sight(layer, current)
            mask = self._mask(layer, slots, packing.real, layout.entries, layout.valid, one_new)
        port = _CompactPort(target, layout, extra, slots, packing.real, own_keys_only, self._holder(bits))
        before = packing.take(hidden)
        inputs = call | self._layer_inputs(before, mask, rotary, packing, call, port)
        output = self._run_layer(layer, original, inputs, bits)
        if store is not None:
            store.advance(current.n, current.n_real)
        keys = None if own_keys_only or layout is None else layout.slots.shape[1]
        current.work.layers.append(LayerWork(current.batch, packing.width, keys, *extra_work))
        return packing.put(hidden, before, output), packing, port

    def _holder(self, bits: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """How new K or V read once they are held at `bits` (B, A); None where nothing is."""
        precision = self._precision
        return None if bits is None or precision is None else lambda states: precision.hold_kv(states, bits)

    def _layer_inputs(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        rotary: Rotary | None,
        packing: Packing,
        call: dict[str, Any],
        port: Any,
    ) -> dict[str, Any]:
        inputs = {"hidden_states": hidden, "attention_mask": mask, self.arch.cache_argument: port}
        if rotary is not None:
            inputs["position_embeddings"] = tuple(packing.take(_rows(part, hidden.shape[0])) for part in rotary)
        if call.get("position_ids") is not None:
            inputs["position_ids"] = packing.take(_rows(call["position_ids"], hidden.shape[0]))
        return inputs

    def _kept_kv(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None, current: _Pass) -> _Extra | None:
        """K and V of tokens that are halted but not skipped (`missing_kv` other than drop)."""
        state = current.state
        if not state.kept_kv:
            return None
        if current.kept is None:
            current.kept = {mode: Packing.of(state.kept(layer, mode)) for mode in sorted(state.kept_kv - {"predict"})}
        parts: list[_Extra] = []
        for mode, packing in current.kept.items():
            if packing.width == 0:
                continue
            projected = 0
            if mode == "copy":
                assert current.copied is not None
                index = _gather_index(packing, current)
                keys, values = (
                    part.gather(2, index[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
                    for part in current.copied
                )
            else:
                gathered = tuple(packing.take(_rows(part, current.batch)) for part in rotary) if rotary is not None else None
                if mode == "project":
                    keys, values = self.arch.project_kv(layer, packing.take(hidden), gathered)  # type: ignore[arg-type]
                    projected = packing.width
                else:
                    shape = (current.batch, self.arch.n_kv_heads, packing.width, self.arch.head_dim)
                    keys, values = hidden.new_zeros(shape), hidden.new_zeros(shape)
            parts.append(_Extra(keys, values, self._facts(state, packing.take), packing.real, projected))
        parts += [
            self._predicted_kv(source, layer, hidden, rotary, current) for source in sorted(state.translators) if source <= layer
        ]
        parts = [part for part in parts if part.keys.shape[2]]
        return _Extra.join(parts) if parts else None

    def _predicted_kv(self, source: int, layer: int, hidden: torch.Tensor, rotary: Rotary | None, current: _Pass) -> _Extra:
        """K and V of the tokens that stopped before layer `source`, all of which keep their columns from there on."""
        state, shape = current.state, (current.batch, self.arch.n_kv_heads, 0, self.arch.head_dim)
        n_projected = n_predicted = 0
        if layer == source:
            packing = Packing.of(state.predicted(layer, source))
            n_projected = packing.width
            if packing.width:
                predicted = state.translators[source].translate(packing.take(hidden))
                current.predicted[source] = packing, predicted
                n_predicted = packing.width * len(predicted)
        elif source in current.predicted:
            packing, predicted = current.predicted[source]
        else:
            empty = hidden.new_zeros(shape)
            return _Extra(empty, empty, {}, None, 0)
        gathered = tuple(packing.take(_rows(part, current.batch)) for part in rotary) if rotary is not None else None
        if layer == source:
            keys, values = self.arch.project_kv(layer, packing.take(hidden), gathered)  # type: ignore[arg-type]
        else:
            keys, values = predicted[layer]
            keys = self.arch.rotate_keys(layer, keys, gathered)  # type: ignore[arg-type]
        real = packing.real
        if layer > source and (state.any_kv_skipped or state.resume_layers):
            real = packing.take(state.predicted(layer, source))
            if packing.real is not None:
                real = real & packing.real
        return _Extra(keys, values, self._facts(state, packing.take), real, n_projected, n_predicted)

    def _masked(
        self, layer: int, original: Callable[..., torch.Tensor], call: dict[str, Any], current: _Pass, store: RaggedLayer | None
    ) -> tuple[torch.Tensor, _MaskedPort]:
        """Call the layer on all tokens, hide the absent keys by a mask, and put the inactive states back."""
        state = current.state
        active, present = state.active(layer), state.kv_present(layer)
        target = store if isinstance(store, MaskedLayer) else MaskedLayer()
        facts = self._facts(state, lambda field: field)
        entries = join_entries(target.entries, facts)
        key_present = present if target.present is None else torch.cat([target.present, present], dim=1)
        mask = self._mask(layer, state.slots, active, entries, key_present)
        hidden = call["hidden_states"]
        replaced: list[_Replaced] = []
        if self._copies_kv and current.copied is not None:
            replaced.append((state.kept(layer, "copy"), *current.copied))
        everything, n_predicted = Packing(None, None, current.n), 0
        for source in sorted(state.translators):
            if layer == source:
                current.predicted[source] = everything, state.translators[source].translate(hidden)
                n_predicted += current.n * (self.arch.n_layers - 1 - source)
            elif source < layer:
                keys, values = current.predicted[source][1][layer]
                keys = self.arch.rotate_keys(layer, keys, call.get("position_embeddings"))  # type: ignore[arg-type]
                replaced.append((state.predicted(layer, source), keys, values))
        bits = facts.get("bits")
        port = _MaskedPort(target, facts, present, state.kept(layer, "zero"), replaced, self._holder(bits))
        inputs = call | self._layer_inputs(hidden, mask, call.get("position_embeddings"), everything, call, port)
        # As under `compact`: K and V of a halted token are projected in full precision, then held at its width.
        output = self._run_layer(layer, original, inputs, None if bits is None else torch.where(active, bits, 16))
        if store is not None:
            store.advance(current.n, current.n_real)
        current.work.layers.append(LayerWork(current.batch, current.n, key_present.shape[1], 0, n_predicted))
        return torch.where(active[..., None], output, hidden), port

    def _causal_kernel_fits(self, layer: int, current: _Pass) -> bool:
        window = self._windows[layer]
        in_window = window is None or current.n <= window
        return self.arch.attention_implementation == "sdpa" and in_window and self._in_sight(layer, current)

    def _mask(
        self,
        layer: int,
        queries: torch.Tensor,
        real: torch.Tensor | None,
        entries: Entries,
        valid: torch.Tensor | None,
        one_new: bool = False,
    ) -> torch.Tensor | None:
        """Who may see whom, by slot: queries (B, A), entries (B, K) -> (B, 1, A, K); None: all see all.

        Boolean for sdpa, additive for eager and where super-tokens weigh more: log size is added to their scores (ToMe, arXiv 2210.09461).

        A query that sees no key gets a zero attention output from sdpa.

        Raises:
            QuickSilverError: such a query (a `real` one) under eager attention, which would give it the mean of all values.
        """
        sdpa = self.arch.attention_implementation == "sdpa"
        keys = entries["slots"]
        log_size = entries["size"].log() if self._proportional and "size" in entries else None
        if sdpa and one_new and valid is None and log_size is None:
            return None  # one new token after its past
        visible = _visible(self.arch, layer, queries, keys, valid)[:, None]
        dtype = self.arch.model.dtype
        if sdpa:
            if log_size is None:
                return visible
            return log_size[:, None, None].to(dtype).expand(visible.shape).masked_fill(~visible, float("-inf"))
        blind = ~visible.any(-1)[:, 0]
        if bool((blind if real is None else blind & real).any()):
            raise QuickSilverError(
                f"At layer {layer} a token has no key left to attend to, and attn_implementation='eager' would give it the mean of all values: use 'sdpa', or protect the first tokens."
            )
        bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        if log_size is not None:
            bias += log_size[:, None, None].to(dtype)
        return bias.masked_fill(~visible, torch.finfo(dtype).min)

    def _remember_kv(self, layer: int, current: _Pass, packing: Packing, port: _PlainPort | _CompactPort | _MaskedPort) -> None:
        """Keep each token's newest K, V of this pass, for missing_kv=copy."""
        keys, values = port.new_keys, port.new_values
        if packing.order is None:
            current.copied = (keys, values)
            return
        if current.copied is None:
            shape = (keys.shape[0], keys.shape[1], current.n, keys.shape[3])
            current.copied = (keys.new_zeros(shape), values.new_zeros(shape))
        index = packing.order[:, None, :, None]
        real = None if packing.real is None else packing.real[:, None, :, None]
        updated = []
        for old, new in zip(current.copied, (keys, values), strict=True):
            where = index.expand(-1, old.shape[1], -1, old.shape[3])
            updated.append(old.scatter(2, where, new if real is None else torch.where(real, new, old.gather(2, where))))
        current.copied = (updated[0], updated[1])

    # -- between two passes ------------------------------------------------------------------------------------------------------

    def _settle(self, cache: Cache, current: _Pass) -> None:
        """Ask the modules which entries of the cache become one, after every pass but the first, and which leave it, after every pass."""
        for layer, store in enumerate(cache.layers):
            assert isinstance(store, RaggedLayer)
            if current.seen == 0:
                store.settled = store.seen
            for merging in self._merging if current.seen else ():
                if store.entries is None:
                    break
                into = merging.merge_cache(self._cache_view(layer, store, current))
                if into is not None:
                    slots = store.entries["slots"]
                    by_slot = torch.arange(store.seen, device=slots.device).repeat(current.batch, 1)
                    current.state.merges.append(CacheMerge(layer, _by_slot(store, slots.gather(1, into), by_slot)))
                    store.merge(into, None if self._precision is None else self._precision.hold_kv)
            for evicting in self._evicting:
                if store.entries is None:
                    break
                gone = evicting.evict(self._cache_view(layer, store, current))
                if gone is not None and bool((gone := gone & store.is_entry).any()):
                    by_slot = gone.new_zeros(current.batch, store.seen)
                    current.state.evictions.append(Eviction(layer, _by_slot(store, gone, by_slot)))
                    store.evict(gone)

    def _cache_view(self, layer: int, store: RaggedLayer, current: _Pass) -> CacheView:
        assert store.entries is not None
        assert store.real_seen is not None
        slots = store.entries["slots"]
        return CacheView(
            layer=layer, n_layers=self.arch.n_layers, pass_index=current.index, slots=slots, present=store.is_entry,
            size=store.entries.get("size", torch.ones_like(slots, dtype=torch.float32)), n_seen=store.real_seen,
            n_new=store.seen - store.settled, read_keys=lambda: store.padded()[0],  # type: ignore[index]
            attention=store.entries.get("attention"),
        )  # fmt: skip

    # -- deciding ----------------------------------------------------------------------------------------------------------------

    def _deciders(self, layer: int, current: _Pass) -> list[TokenPolicy]:
        if layer == self.arch.n_layers - 1 or (self.decision_layers is not None and layer not in self.decision_layers):
            return []
        # What a module that looks ahead knows of a prompt is legitimate; elsewhere it would be the answer (DESIGN §3).
        return [m for m in self.token_policies if m.acts_at(layer) and (m.causal or m.lookahead or current.is_prompt)]

    def _decide(
        self,
        layer: int,
        deciding: list[TokenPolicy],
        call: dict[str, Any],
        current: _Pass,
        packing: Packing,
        before: torch.Tensor,
        after: torch.Tensor,
        port: _PlainPort | _CompactPort | _MaskedPort | None,
        attention_output: torch.Tensor | None,
    ) -> torch.Tensor:
        """Ask the modules; returns the layer's output, with merged states where tokens were fused."""
        if packing.width == 0:
            return after
        state = current.state
        packed_before, packed_after = packing.take(before), packing.take(after)
        index = packing.order
        if index is None:
            index = torch.arange(current.n, device=before.device).expand(current.batch, -1)
            real = state.active(layer)
        else:
            real = _or_all(packing.real, index)

        def count(n: int) -> None:
            current.work.signal_flops += n

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            count(2 * hidden.shape[0] * self.arch.width * self.arch.vocab_size)
            self._in_signal = True
            try:
                return self.arch.logits(hidden)
            finally:
                self._in_signal = False

        def attention(last_queries: int | None, reduce: str) -> torch.Tensor:
            assert port is not None
            received = self._received(layer, call, current, packing, packed_before, port, last_queries, reduce)
            return received.gather(1, packing.take(state.slots).clamp(min=0))

        view = LayerView(
            layer=layer, n_layers=self.arch.n_layers, pass_index=current.index, is_prompt=current.is_prompt,
            before=packed_before, after=packed_after, slots=packing.take(state.slots), index=index,
            input_ids=None if current.input_ids is None else packing.take(current.input_ids),
            n_tokens=current.n_real, logits=logits, attention=attention if port is not None else None, count_flops=count,
            pass_ids=current.pass_ids, keys=None if port is None else port.new_keys, attention_output=attention_output,
            n_each=state.n_each,
        )  # fmt: skip
        tokens = TokenState(state, view, packing.order, real)
        decided = (state.halt_layer, len(state.fusions))
        for module in deciding:
            module.decide(view, tokens)
        changed = state.halt_layer is not decided[0] or len(state.fusions) != decided[1]
        if changed or state.any_kv_skipped:
            current.kept = None
        if changed and self.execution == "compact":
            current.packing = None
        if self._precision is not None and state.precisions and state.precisions[-1].layer == layer:
            said = packing.take(state.precisions[-1].bits)
            view.after = self._precision.hold_states(view.after, torch.where(said > 0, said, 16))
        if view.after is packed_after or self.execution == "decide":
            return after
        return packing.put(after, packed_after, view.after)

    def _received(
        self,
        layer: int,
        call: dict[str, Any],
        current: _Pass,
        packing: Packing,
        packed_before: torch.Tensor,
        port: _PlainPort | _CompactPort | _MaskedPort,
        last_queries: int | None,
        reduce: str,
    ) -> torch.Tensor:
        """Attention received from tokens of the pass, by slot: (B, S) float32. Its cost goes into the ledger."""
        rotary = call.get("position_embeddings")
        packed_rotary = tuple(packing.take(_rows(part, current.batch)) for part in rotary) if rotary is not None else None
        slots = packing.take(current.state.slots)
        real = current.state.active(layer) if packing.order is None else _or_all(packing.real, slots)
        received, flops = _attention_received(
            self.arch, layer, packed_before, packed_rotary, slots, real, port.keys, port.key_slots, port.key_valid, last_queries,
            reduce, current.seen + current.n,
        )  # fmt: skip
        current.work.signal_flops += flops
        return received


def _the_span(layer: int, modules: Sequence[SpanPolicy]) -> Span | None:
    spans = [span for module in modules if (span := module.span(layer)) is not None]
    if len(spans) > 1:
        raise ConfigError(f"{len(spans)} modules limit how far back the queries of layer {layer} see; give one.")
    return spans[0] if spans else None


def _visible(
    arch: Architecture, layer: int, queries: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor | None
) -> torch.Tensor:
    """Which keys a query may attend to, by slot: queries (B, Q), keys, valid (B, K) -> (B, Q, K) bool."""
    visible = keys[:, None, :] <= queries[:, :, None]
    window, span = arch.attention_window(layer), arch.spans[layer]
    if window is not None:
        visible &= keys[:, None, :] > queries[:, :, None] - window
    if span is not None:
        visible &= span.sees(queries, keys)
    if valid is not None:
        visible &= valid[:, None, :]
    return visible


def _by_slot(store: RaggedLayer, values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """values (B, K) of the entries of `store`, by slot, because columns depend on the execution: `others` (B, S) where there is none."""
    assert store.entries is not None
    spare = others[:, :1]  # what is no entry is written to a column of its own
    at = torch.where(store.is_entry, store.entries["slots"], others.shape[1])
    return torch.cat([others, spare], dim=1).scatter(1, at, values)[:, :-1]


@dataclass
class _Extra:
    """K, V (B, H_kv, E, head_dim) of halted tokens, facts of their entries (B, E); `real` (B, E) bool or None."""

    keys: torch.Tensor
    values: torch.Tensor
    facts: Entries
    real: torch.Tensor | None
    n_projected: int
    n_predicted: int = 0

    @classmethod
    def join(cls, parts: list[_Extra]) -> _Extra:
        first, *others = parts
        for part in others:
            real = None
            if first.real is not None or part.real is not None:
                real = torch.cat([_or_all(first.real, first.facts["slots"]), _or_all(part.real, part.facts["slots"])], dim=1)
            first = cls(
                torch.cat([first.keys, part.keys], dim=2),
                torch.cat([first.values, part.values], dim=2),
                join_entries(first.facts, part.facts),
                real,
                first.n_projected + part.n_projected,
                first.n_predicted + part.n_predicted,
            )
        return first


class _PlainPort:
    """Stands where the layer expects its cache, on the plain path: passes K and V on and remembers them."""

    def __init__(self, store: RaggedLayer | None) -> None:
        self.store = store

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.new_keys, self.new_values = keys, values
        if self.store is not None:
            keys, values = self.store.update(keys, values)
        self.keys = keys
        return keys, values

    @property
    def key_slots(self) -> torch.Tensor:
        return torch.arange(self.keys.shape[2], device=self.keys.device).expand(self.keys.shape[0], -1)

    key_valid = None


class _BehindPort:
    """Stands where the layer expects its cache: puts K and V behind what there is."""

    def __init__(self, store: RaggedLayer) -> None:
        self.store = store

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.store.extend(keys, values)


class _CompactPort:
    """Stands where the layer expects its cache: stores what has an entry, returns what is attended to."""

    def __init__(
        self,
        store: RaggedLayer,
        layout: KVLayout | None,
        extra: _Extra | None,
        slots: torch.Tensor,
        real: torch.Tensor | None,
        own_keys_only: bool,
        hold: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.store, self.layout, self.extra, self.own_keys_only, self.hold = store, layout, extra, own_keys_only, hold
        if own_keys_only or layout is None:
            self.key_slots, self.key_valid = slots, real
        else:
            self.key_slots, self.key_valid = layout.slots, layout.valid

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.new_keys, self.new_values = keys, values
        if self.extra is not None:
            keys, values = torch.cat([keys, self.extra.keys], dim=2), torch.cat([values, self.extra.values], dim=2)
        stored = self.store.write(self.layout, keys, values) if self.layout is not None else (keys, values)
        if not self.own_keys_only or (self.layout is not None and self.layout.order is None):
            keys, values = stored  # without an order, a new store holds just the queries' own, held at their widths already
        elif self.hold is not None:
            keys, values = self.hold(keys), self.hold(values)
        self.keys = keys
        return keys, values


_Replaced = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # whose (B, N) bool; K, V (B, H_kv, N, head_dim)


class _MaskedPort:
    """Stands where the layer expects its cache under `masked`: all columns, with zeroed, copied and predicted entries put in."""

    def __init__(
        self,
        store: MaskedLayer,
        facts: Entries,
        present: torch.Tensor,
        zeroed: torch.Tensor,
        replaced: Sequence[_Replaced],
        hold: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.store, self.facts, self.present, self.zeroed, self.replaced = store, facts, present, zeroed, replaced
        self.hold = hold

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (part.masked_fill(self.zeroed[:, None, :, None], 0) for part in (keys, values))
        for where, other_keys, other_values in self.replaced:
            keys = torch.where(where[:, None, :, None], other_keys, keys)
            values = torch.where(where[:, None, :, None], other_values, values)
        self.new_keys, self.new_values = keys, values
        if self.hold is not None:
            keys, values = self.hold(keys), self.hold(values)
        self.keys, values = self.store.append(keys, values, self.facts, self.present)
        assert self.store.slots is not None
        self.key_slots, self.key_valid = self.store.slots, self.store.present
        return self.keys, values


def _rows(x: torch.Tensor, batch: int) -> torch.Tensor:
    """(1 or B, N, ...) -> (B, N, ...)."""
    return x if x.shape[0] == batch else x.expand(batch, *x.shape[1:])


def _or_all(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask


def _gather_index(packing: Packing, current: _Pass) -> torch.Tensor:
    if packing.order is not None:
        return packing.order
    return torch.arange(current.n, device=current.state.valid.device).expand(current.batch, -1)


def _attention_received(
    arch: Architecture,
    layer: int,
    before: torch.Tensor,
    rotary: Rotary | None,
    slots: torch.Tensor,
    real: torch.Tensor,
    keys: torch.Tensor,
    key_slots: torch.Tensor,
    key_valid: torch.Tensor | None,
    last_queries: int | None,
    reduce: str,
    n_slots: int,
) -> tuple[torch.Tensor, int]:
    """Attention that keys receive from the last active tokens of a view: a small q·k product, not the full matrix.

    before (B, M, D), slots, real (B, M), keys (B, H_kv, K, head_dim), key_slots, key_valid (B, K) -> (B, S) float32 by slot, S =
    `n_slots` beyond every slot of the view and of the keys, and the FLOPs it took. `sum`: over queries, the mean over heads.
    """
    batch, m = slots.shape
    n_queries = m if last_queries is None else min(last_queries, m)
    rank = torch.where(real, slots, -1)
    chosen = rank.topk(n_queries, dim=1).indices  # (B, Q) columns of the view
    is_query = real.gather(1, chosen)
    picked = (
        tuple(part.gather(1, chosen[..., None].expand(-1, -1, part.shape[-1])) for part in rotary) if rotary is not None else None
    )
    queries = arch.project_q(layer, before.gather(1, chosen[..., None].expand(-1, -1, before.shape[-1])), picked)  # type: ignore[arg-type]
    groups = arch.n_heads // arch.n_kv_heads
    queries = queries.reshape(batch, arch.n_kv_heads, groups * n_queries, arch.head_dim)
    scores = (queries @ keys.transpose(-1, -2)).float() * arch.scaling(layer)
    scores = scores.view(batch, arch.n_kv_heads, groups, n_queries, -1)
    visible = _visible(arch, layer, slots.gather(1, chosen), key_slots, key_valid)
    weights = scores.masked_fill(~visible[:, None, None], torch.finfo(torch.float32).min).softmax(-1)
    weights = weights * (visible & is_query[..., None])[:, None, None]
    if reduce == "max":
        received = weights.amax(dim=(1, 2, 3))
    else:
        received = weights.sum(dim=(1, 2, 3)) / arch.n_heads
        if reduce == "mean":
            received = received / is_query.sum(1, keepdim=True).clamp(min=1)
    by_slot = received.new_zeros(batch, n_slots)
    clean = received if key_valid is None else received * key_valid
    by_slot.scatter_add_(1, key_slots.clamp(min=0), clean)
    flops = batch * n_queries * 2 * (arch.query_params_per_layer + arch.n_heads * arch.head_dim * keys.shape[2])
    return by_slot, flops
