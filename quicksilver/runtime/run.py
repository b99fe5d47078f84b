"""Wrap the layer, not the model: `apply` puts the modules' decisions into effect on frozen decoder layers (docs/design.md §2).

A decoder layer does not care which tokens it is given. Under `compact` each layer is called on its active tokens alone, with their own
rotary factors and a mask built from their slots, and the result is scattered back. Under `masked` every layer is called on all tokens,
and what should not have happened is undone: the paper's way, which saves nothing and serves as the reference. Under `decide` the modules
decide and everything is executed: the price of the policy.

A token's way through a layer: the planner makes a plan of the state of the pass (`plan`), one of four executions follows it
(`executions`), and the modules decide for the next layer (`view`).
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers.cache_utils import Cache

from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.cache import CacheLayer, take_over
from quicksilver.runtime.cache.stores import take_rows
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.executions import EXECUTE, keys_per_query
from quicksilver.runtime.generation import user_prompts_only
from quicksilver.runtime.ledger import BETA, Flops, LayerWork, PassWork, head_flops, pass_flops
from quicksilver.runtime.module import (
    EvictionPolicy,
    MergePolicy,
    RuntimeModule,
    SpanPolicy,
    TokenPolicy,
    Transform,
    check_modules,
    layers_asked,
    list_of_modules,
    the_span,
)
from quicksilver.runtime.phases import phase
from quicksilver.runtime.placement import replaced
from quicksilver.runtime.plan import Forward, LayerCall, LayerPlan, Machine, Planner
from quicksilver.runtime.trace import PassTrace, Trace
from quicksilver.runtime.view import Deciding
from quicksilver.runtime.visibility import Visibility

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Execution = Literal["compact", "masked", "decide"]
EXECUTIONS: tuple[str, ...] = ("compact", "masked", "decide")
_NOT_WATCHED: AbstractContextManager[Sequence[torch.Tensor]] = nullcontext(())


@dataclass(frozen=True)
class KVBytes:
    """Bytes of the last cache written, of all ranks together: `billed` by the decisions, `resident` in its tensors."""

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
        ConfigError: an unknown execution, decision layers that are no list of the model's layers, a model in training mode, modules that are
            no list of modules, options a module refuses. By a call inside the block: a model that was changed or copied there, a module
            that was bound to another model since, a second thread, a prompt of packed documents.
        UnsupportedModelError: no adapter for the model's family or attention implementation.
    """
    return Run(model, modules, execution, decision_layers)


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
        self.arch = architecture_of(model)
        if model.training:
            raise ConfigError("The model is in training mode (dropout is on): call model.eval() first.")
        self.execution = execution
        modules = list_of_modules(modules)
        self.decision_layers = layers_asked(self.arch, decision_layers)
        check_modules(self.arch, modules, self.decision_layers)
        self.transforms = [module for module in modules if isinstance(module, Transform)]
        deciding = (module for module in modules if not isinstance(module, Transform))
        self.modules = sorted(deciding, key=lambda module: module.priority)
        self.token_policies = [module for module in self.modules if isinstance(module, TokenPolicy)]
        executing = [] if execution == "decide" else self.modules
        for layer in range(self.arch.n_layers):
            self.arch.spans[layer] = the_span(layer, [module for module in executing if isinstance(module, SpanPolicy)])
        precision = next((one.precision for one in self.token_policies if one.precision is not None), None)
        self._copies_kv = any(module.copies_kv for module in self.token_policies)
        self._visibility = Visibility(self.arch, any(module.proportional_attention for module in self.token_policies))
        self._machine = Machine(self.arch, precision, self._visibility)
        this = weakref.proxy(self)  # no reference cycle: the cache is freed with the run, not at the next garbage collection
        self._planner = Planner(self._visibility, execution == "masked", precision is not None, lambda: this._new_store())
        self._store_kind = self._new_store().kind
        merging = [module for module in executing if isinstance(module, MergePolicy) and module.merges_cache]
        evicting = [module for module in executing if isinstance(module, EvictionPolicy) and module.evicts_cache]
        lens = lambda hidden, normed=False: this._lens(hidden, normed)
        self._deciding = Deciding(self._machine, lens, merging, evicting)
        self._entered = ExitStack()
        self._in_signal = False
        self._pass_lock, self._thread = threading.Lock(), 0  # held from a pass's beginning to its end, by this thread
        self.reset()

    def count_decisions(self, counts: bool) -> None:
        """Whether the ledger counts what modules from outside of this package compute when they decide; not while a clock runs."""
        self._deciding.counts = counts

    def reset(self, pass_index: int = 0) -> None:
        """Forget traces and ledgers: between measurements, or between batches of one run. The next pass counts as number `pass_index`."""
        self._first_pass = pass_index
        self._passes: list[tuple[PassWork, PassTrace]] = []
        self._flops: list[Flops] = []
        self._skippable_before = self._skippable_flops()
        self._head_tokens = 0
        self._current: Forward | None = None
        self._continuing: list[CacheLayer] = []  # the cache's layers, in a pass that only appends to them
        self._cache: Cache | None = None

    # -- what came of it ---------------------------------------------------------------------------------------------------------

    @property
    def pass_index(self) -> int:
        return self._first_pass + len(self._passes)

    @property
    def trace(self) -> Trace:
        """Every decision since the start or the last `reset`."""
        return Trace(self.arch.n_layers, [trace.cpu() for _, trace in self._passes])

    @property
    def flops(self) -> Flops:
        """The ledgers since the start or the last `reset`, of all ranks together where a model is cut among several."""
        for work, trace in self._passes[len(self._flops) :]:
            self._flops.append(pass_flops(self.arch, work, trace, self.beta))
        skippable = self._skippable_flops() - self._skippable_before
        return sum(self._flops, head_flops(self.arch, self._head_tokens)) + Flops(nominal=-skippable, skippable=skippable)

    @property
    def flops_of_rank(self) -> int:
        """Floating-point operations that this process executed; summed over the ranks, `flops.executed`."""
        passes = sum(work.executed_by_rank(self.arch) for work, _ in self._passes)
        return passes + head_flops(self.arch.of_rank, self._head_tokens).executed

    def _skippable_flops(self) -> int:
        return sum(transform.skippable_flops for transform in self.transforms)

    @property
    def beta(self) -> Mapping[int, float]:
        """What the paper's ledger charges a token by its width."""
        precision = self._machine.precision
        return BETA if precision is None else precision.beta

    @property
    def work(self) -> PassWork:
        """What the last pass ran; empty before the first."""
        return self._passes[-1][0] if self._passes else PassWork(layers=[])

    @property
    def kv_bytes(self) -> KVBytes:
        """Bytes of the last cache written, zero where none was."""
        layers = self.kv_bytes_by_layer
        return KVBytes(sum(layer.billed for layer in layers), sum(layer.resident for layer in layers))

    @property
    def kv_bytes_by_layer(self) -> list[KVBytes]:
        """The same for each layer, in order; empty where no cache was written."""
        size = self.arch.ranks.size  # each rank holds as many heads
        layers: list[Any] = [] if self._cache is None else self._cache.layers
        if all(isinstance(layer, CacheLayer) for layer in layers):
            return [KVBytes(size * layer.billed_bytes(), size * layer.resident_bytes()) for layer in layers]
        resident = [0 if layer.keys is None else layer.keys.nbytes + layer.values.nbytes for layer in layers]
        return [KVBytes(size * n, size * n) for n in resident]

    @property
    def kv_bytes_of_rank(self) -> KVBytes:
        """`kv_bytes` that lie in this process."""
        size = self.arch.ranks.size
        return KVBytes(self.kv_bytes.billed // size, self.kv_bytes.resident // size)

    # -- the context -------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        if getattr(self.arch.base, "_quicksilver_run", None) is not None:
            raise ConfigError(
                "This model is already under quicksilver.apply; leave that context first, or give all modules at once."
            )
        with ExitStack() as entered:
            for transform in self.transforms:
                entered.enter_context(transform.applied(self.arch))
            entered.enter_context(user_prompts_only(self.arch.model, [*self.transforms, *self.modules]))
            entered.enter_context(replaced(self.arch.base, _quicksilver_run=self))
            base_signature = inspect.signature(self.arch.base.forward)

            def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
                self._check_unchanged()
                bound = base_signature.bind_partial(*args, **kwargs).arguments if args else dict(kwargs)
                self._begin(dict(bound.pop("kwargs", {})) | bound)

            # Under `torch.compile` the model's own code around the layers is compiled; which tokens are computed depends on values.
            as_is = torch.compiler.disable
            for handle in (
                self.arch.base.register_forward_pre_hook(as_is(before), with_kwargs=True),
                self.arch.base.register_forward_hook(as_is(lambda module, args, output: self._end(output))),
                self.arch.base.register_forward_hook(as_is(lambda module, args, output: self._leave()), always_call=True),
                self.arch.output_head.register_forward_pre_hook(as_is(lambda module, args: self._count_head(args[0]))),
            ):
                entered.callback(handle.remove)
            for index, layer in enumerate(self.arch.layers if self.modules else ()):
                # accelerate (device_map) also sets forward on the instance: it is kept, called, and put back.
                entered.enter_context(replaced(layer, forward=self._wrap(index, layer.forward)))
            self._entered = entered.pop_all()
        self._attention = self.arch.config._attn_implementation
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._leave()
        self._entered.close()
        self._current = None

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ConfigError("A model cannot be copied or pickled inside `with apply(…)`: do it before or after the block.")

    def _check_unchanged(self) -> None:
        """Raises ConfigError where what the run was made for is no longer what is called."""
        if self.arch.model.training:
            raise ConfigError("The model was put in training mode inside `with apply(…)` (dropout is on): call model.eval().")
        attention = self.arch.config._attn_implementation
        if attention != self._attention:
            raise ConfigError(
                f"attn_implementation was {self._attention!r} when the block began and is {attention!r} now: set it before."
            )
        for module in (*self.transforms, *self.modules):
            if module.bound_to() is not self.arch.model:
                raise ConfigError(
                    f"{type(module).__name__} was given to another model since this block was made: make a module for each model."
                )

    def _begin(self, arguments: dict[str, Any]) -> None:
        self._leave()  # a pass that was interrupted: torch calls no hook after KeyboardInterrupt
        if not self._pass_lock.acquire(blocking=False):
            raise ConfigError("Another thread is in the middle of a pass of this model: call it from one thread at a time.")
        self._thread = threading.get_ident()
        self._current = current = Forward(
            arguments, self.arch.n_layers, self.pass_index,
            decides_only=self.execution == "decide", remembers_kv=self._copies_kv,
        )  # fmt: skip
        if self.modules:
            self._check_seen(arguments, current)
        if self._no_module_acts_in(current):
            self._continue(arguments.get("past_key_values"), current)

    def _check_seen(self, arguments: dict[str, Any], current: Forward) -> None:
        """Raises ConfigError where transformers would let tokens see each other by another rule than by their slots."""
        windows = [window for window in self._visibility.windows if window is not None]
        if windows and current.end > min(windows) and current.has_holes:
            raise ConfigError(
                f"attention_mask has padding between tokens, and this model's sliding window ({min(windows)} columns) counts it: put the padding "
                "before or behind the tokens of a row."
            )
        positions, use_cache = arguments.get("position_ids"), arguments.get("use_cache")
        # transformers looks for packed documents where it is given neither a mask nor a cache.
        cached = (
            arguments.get("past_key_values") is not None
            or use_cache
            or (use_cache is None and getattr(self.arch.config, "use_cache", False))
        )
        if cached or arguments.get("attention_mask") is not None or not isinstance(positions, torch.Tensor):
            return
        if bool((positions.diff(dim=-1) != 1).any()):
            raise ConfigError(
                "position_ids do not count up by one: documents packed into one row, which modules would let see each other. Give each document "
                "a row of its own, padded, with an attention_mask."
            )

    def _leave(self) -> None:
        """The pass of this thread is over, or failed; of another's nothing changes."""
        if self._thread != threading.get_ident():
            return
        for store in self._continuing:
            store.continues = False
        self._continuing = []
        self._thread = 0
        self._pass_lock.release()

    def _no_module_acts_in(self, current: Forward) -> bool:
        """One new token a row, about which no module will be asked in any layer: nothing can change before the pass ends."""
        asked = any(policy.causal or policy.lookahead for policy in self.token_policies)
        return current.n == 1 and current.seen > 0 and not (asked or self._copies_kv or self._deciding.evicting)

    def _continue(self, cache: Cache | None, current: Forward) -> None:
        """Let the model's own layers append to the cache by themselves, if every layer of it can."""
        stores: list[Any] = [] if cache is None else cache.layers
        if len(stores) != self.arch.n_layers or not self.modules or not self._planner.appends(current):
            return
        fits, kind, seen = self._planner.fits_behind, self._store_kind, current.seen
        for layer, store in enumerate(stores):
            if not (isinstance(store, CacheLayer) and store.kind == kind and fits(store, layer, seen)):
                return
        self._cache, self._continuing = cache, stores
        current.past_lengths = lengths = [store.storage.length for store in stores]
        for store in stores:
            store.continues = True
        by_length = {length: LayerWork(current.batch, 1, int(length) + 1) for length in set(lengths)}
        current.work.layers = [by_length[length] for length in lengths]

    def _end(self, output: Any) -> None:
        current = self._current
        assert current is not None
        cache = getattr(output, "past_key_values", None)
        if cache is not None:
            self._cache = cache
        work = current.work
        if not self.modules:
            for layer in range(self.arch.n_layers):
                keys = keys_per_query(self._visibility, layer, current, keeps_all=False)
                work.layers.append(LayerWork(current.batch, current.n, keys))
            current.past_lengths = [current.past_real] * self.arch.n_layers
        work.past_real, work.past_lengths = current.past_real, current.past_lengths
        work.causal_block = self.arch.causal_block
        work.translation_flops_per_token = {t.source_layer: t.flops_per_token for t in current.decisions.translators.values()}
        work.map_flops_per_token = {layer: one.flops_per_token for layer, one in current.decisions.mlp_maps.items()}
        if (self._deciding.merging or self._deciding.evicting) and cache is not None:
            self._deciding.about_cache(cache, current)
        self._passes.append((work, PassTrace.of(current.decisions, current.seen)))

    def _count_head(self, hidden: torch.Tensor) -> None:
        if not self._in_signal:
            self._head_tokens += hidden.numel() // self.arch.width

    def _lens(self, hidden: torch.Tensor, normed: bool = False) -> torch.Tensor:
        """The logit lens, without counting it, or what of it is skippable, as the model's output head; `normed`: of the head's own input."""
        self._in_signal, before = True, self._skippable_flops()
        try:
            return self.arch.output_head(hidden) if normed else self.arch.logits(hidden)
        finally:
            self._in_signal = False
            self._skippable_before += self._skippable_flops() - before

    # -- one layer ---------------------------------------------------------------------------------------------------------------

    def _wrap(self, layer: int, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        names = list(self.arch.layer_signature.parameters)[1:]  # without self
        mask_at, own_call, compiling = names.index("attention_mask"), phase("layer")(original), torch.compiler.is_dynamo_compiling

        @torch.compiler.disable
        def planned(*args: Any, **kwargs: Any) -> torch.Tensor:
            arguments = dict(zip(names, args, strict=False)) | kwargs  # GPT-2 passes cache and mask positionally
            if self._continuing:
                return own_call(**arguments | {"attention_mask": None})
            current = self._current
            if current is None:
                raise QuickSilverError("A decoder layer was called outside its model's forward; call the model.")
            return self._layer(layer, original, arguments, current)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self._continuing and not compiling():
                mask = kwargs.get("attention_mask") if len(args) <= mask_at else args[mask_at]
                if mask is None:
                    return own_call(*args, **kwargs)
            return planned(*args, **kwargs)

        return forward

    @phase("runtime")
    def _layer(
        self, layer: int, original: Callable[..., torch.Tensor], arguments: dict[str, Any], current: Forward
    ) -> torch.Tensor:
        """Plan, execute, decide: (B, N, D) states leaving the layer."""
        cache: Cache | None = arguments.get(self.arch.cache_argument)
        store = self._store(cache, layer, current)
        current.past_lengths.append(0 if store is None else store.length)
        call = LayerCall(layer, original, arguments, store)
        policies = self._policies(layer, current)
        watched = any(policy.wants_attention(layer) for policy in policies)
        sums_attention = store is not None and self._deciding.sums_attention(layer)
        plan = self._planner.plan(call, current, observes_kv=watched or sums_attention or self._copies_kv)
        plan = self._carrying(plan, call, current, asked=bool(policies) or sums_attention)
        with self._watching(layer) if watched else _NOT_WATCHED as attention_outputs:
            result = EXECUTE[plan.way](plan, call, current, self._machine)
        current.work.layers.append(result.work)
        if self._copies_kv and result.attended is not None:
            current.remember(result.packing, result.attended)
        if sums_attention:
            self._deciding.add_attention(call, current, result)
        output = result.output
        if policies:
            attended = attention_outputs[0] if attention_outputs else None
            output = self._deciding.about_tokens(policies, call, current, result, watched=watched, attention_output=attended)
        if layer == self.arch.n_layers - 1 and current.executed.fusions:
            # What was merged away reads as the super-token that carried it (ToMe's unmerge): the model gets N states back.
            output = take_rows(output, current.executed.representatives())
        return output

    def _carrying(self, plan: LayerPlan, call: LayerCall, current: Forward, asked: bool) -> LayerPlan:
        """The plan, marked where its states may stay packed on their way to the next layer; what came packed and does not fit is put in.

        Args:
            asked: a module looks at the states that enter or leave the layer.
        """
        compact_one = plan.way == "compact" and not asked
        if current.carried is not None and not (compact_one and plan.packing is current.carried[0]):
            (packing, packed), current.carried = current.carried, None
            call.arguments["hidden_states"] = packing.put_all(call.hidden, packed)
        carries = compact_one and plan.packing.order is not None and plan.packing.width > 0 and not self._is_looked_at(call.layer)
        return replace(plan, carries=True) if carries else plan

    def _is_looked_at(self, layer: int) -> bool:
        """Whether anything but the next layer gets the states that leave this one: a hook, which transformers sets where a model is asked
        for its hidden states, or accelerate, which moves them."""
        if layer == self.arch.n_layers - 1:
            return True
        here, after = self.arch.layers[layer], self.arch.layers[layer + 1]
        return bool(here._forward_hooks or after._forward_pre_hooks) or hasattr(here, "_hf_hook") or hasattr(after, "_hf_hook")

    def _policies(self, layer: int, current: Forward) -> list[TokenPolicy]:
        """The modules that are asked after this layer."""
        if layer == self.arch.n_layers - 1 or (self.decision_layers is not None and layer not in self.decision_layers):
            return []
        # What a module that looks ahead knows of a prompt is legitimate; elsewhere it would be the answer (docs/design.md §3).
        return [m for m in self.token_policies if m.acts_at(layer) and (m.causal or m.lookahead or current.is_prompt)]

    @contextmanager
    def _watching(self, layer: int) -> Iterator[Sequence[torch.Tensor]]:
        """What the layer's attention returns while the context is open."""
        outputs: list[torch.Tensor] = []
        handle = self.arch.attention(layer).register_forward_hook(
            lambda module, args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
        try:
            yield outputs
        finally:
            handle.remove()

    def _store(self, cache: Cache | None, layer: int, current: Forward) -> CacheLayer | None:
        """The layer's cache, of the run's kind; None: the model keeps none."""
        if cache is None:
            return None
        self._cache = cache
        found = cache.layers[layer] if layer < len(cache.layers) else None
        if isinstance(found, CacheLayer) and found.kind == self._store_kind:
            return found
        return take_over(cache, layer, self._new_store(), current.past_valid)

    def _new_store(self) -> CacheLayer:
        if self.execution == "masked":
            return CacheLayer("masked")
        precision = self._machine.precision
        return CacheLayer("ragged") if precision is None else precision.new_store()
