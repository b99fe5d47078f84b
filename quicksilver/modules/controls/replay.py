"""A saved trace as a module: its decisions once more."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quicksilver.modules.checks import check_count
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import EvictionPolicy, MergePolicy, RuntimeModule, SpanPolicy, TokenPolicy
from quicksilver.runtime.pass_state import MISSING_KV, Fusion, Precision, TokenState
from quicksilver.runtime.precision import PrecisionExecutor
from quicksilver.runtime.trace import PassTrace, Trace
from quicksilver.runtime.translation import KVTranslator
from quicksilver.runtime.view import CacheView, LayerView
from quicksilver.runtime.visibility import Span

_PREDICT = MISSING_KV.index("predict")


@dataclass
class Replay(TokenPolicy, MergePolicy, EvictionPolicy, SpanPolicy):
    """The decisions of a saved trace once more: the policy apart from its execution, device and dtype (docs/design.md §4).

    Give the model the same batches in the same order, without `run.reset()` in between. The decisions are made already, so a
    replay acts in every pass and counts as causal, even where the modules that made the trace looked ahead.

    Args:
        trace: what to repeat.
        first_pass: the trace's pass that stands for the run's first.
        like: the modules that made the trace, for what a trace does not hold: the executor of bit-widths, the translators, whether
            super-tokens draw attention in proportion to their size, how far back queries see. They decide nothing.

    Raises:
        ConfigError: a trace of a model with other depth, or with bit-widths that no module in `like` executes; in a pass that the
            trace lacks, or that has other rows or tokens.
    """

    trace: Trace
    first_pass: int = 0
    like: Sequence[RuntimeModule] = ()
    priority: ClassVar[int] = 10

    def __post_init__(self) -> None:
        check_count("first_pass", self.first_pass)
        decided = {layer for p in self.trace.passes for layer in torch.cat([p.halt_layer[p.valid], p.kv_layer[p.valid]]).tolist()}
        events = {f.layer for p in self.trace.passes for f in p.fusions} | {
            q.layer for p in self.trace.passes for q in p.precisions
        }
        self._layers = decided - {self.trace.n_layers - 1} | events
        self._loaded: int | None = None

    @property
    def copies_kv(self) -> bool:
        copied = MISSING_KV.index("copy")
        return any(bool(((p.halted_kv == copied) & _halted(p)).any()) for p in self.trace.passes)

    @property
    def translators(self) -> Mapping[int, KVTranslator]:
        each = (module.translators for module in self.like if isinstance(module, TokenPolicy))
        return {layer: translator for of_module in each for layer, translator in of_module.items()}

    @property
    def proportional_attention(self) -> bool:
        return any(module.proportional_attention for module in self.like if isinstance(module, TokenPolicy))

    @property
    def merges_cache(self) -> bool:
        return any(p.merges for p in self.trace.passes)

    @property
    def evicts_cache(self) -> bool:
        return any(p.evictions for p in self.trace.passes)

    def span(self, layer: int) -> Span | None:
        spans = (module.span(layer) for module in self.like if isinstance(module, SpanPolicy))
        return next((span for span in spans if span is not None), None)

    @property
    def precision(self) -> PrecisionExecutor | None:
        executors = (module.precision for module in self.like if isinstance(module, TokenPolicy))
        return next((executor for executor in executors if executor is not None), None)

    def bind(self, architecture: Architecture) -> None:
        if self.trace.n_layers != architecture.n_layers:
            raise ConfigError(
                f"The trace is of a model with {self.trace.n_layers} layers and this one has {architecture.n_layers}: "
                "replay it on the model it was made with."
            )
        if self.precision is None and any(p.precisions for p in self.trace.passes):
            raise ConfigError("The trace holds tokens at fewer bits: give Replay(trace, like=modules) the module that did.")
        predicted = {
            int(layer) for p in self.trace.passes for layer in p.halt_layer[_halted(p) & (p.halted_kv == _PREDICT)].unique()
        }
        if predicted - set(self.translators):
            raise ConfigError(
                "The trace holds tokens whose K/V are predicted: give Replay(trace, like=modules) the module that did."
            )
        self._loaded = None

    def acts_at(self, layer: int) -> bool:
        return layer in self._layers

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        if self._loaded != view.pass_index:
            self._load(view)
        # Layers without skipping are left out: they need no mask then. KV skipping comes first, because a token that is fused or halted
        # at the layer that takes its K/V away is active until then.
        if view.layer in self._kv_layers:
            tokens.skip_kv((self._pass.kv_layer.gather(1, view.index) == view.layer) & tokens.active)
        # Fusion comes before halting, in whatever order the run had them: a token that halts here was not merged away here, but the
        # target of a fusion may halt at the same layer.
        for fusion in (f for f in self._pass.fusions if f.layer == view.layer):
            columns = torch.arange(view.index.shape[1], device=view.index.device).expand_as(view.index)
            in_view = torch.zeros_like(fusion.into).scatter(1, view.index, columns)  # (B, N): column of the pass -> of the view
            tokens.fuse(in_view.gather(1, fusion.into.gather(1, view.index)), fusion.weight.gather(1, view.index))
        here = self._pass.halt_layer.gather(1, view.index) == view.layer
        how = self._how.gather(1, view.index)
        for code in self._codes:
            mode, resume_layers = divmod(code, self.trace.n_layers + 1)
            translator = self.translators.get(view.layer) if mode == _PREDICT else None
            if mode == _PREDICT and translator is None:
                continue  # nobody halts so here: `bind` has seen to it
            tokens.halt(here & (how == code), missing_kv=MISSING_KV[mode], resume_layers=resume_layers, translator=translator)
        for precision in (p for p in self._pass.precisions if p.layer == view.layer):
            said = precision.bits.gather(1, view.index)
            for bits in set(precision.bits.unique().tolist()) - {0}:
                tokens.set_bits(said == bits, bits)

    def merge_cache(self, view: CacheView) -> torch.Tensor | None:
        here = [merge.into for merge in self._find(view.pass_index).merges if merge.layer == view.layer]
        if not here:
            return None
        into = here[0].to(view.slots.device)
        for later in here[1:]:
            into = later.to(into.device).gather(1, into)
        columns = torch.arange(view.slots.shape[1], device=view.slots.device).expand_as(view.slots)
        # From slots to the columns of this cache; what is no entry is written to a column of its own.
        at = torch.where(view.present, view.slots, into.shape[1])
        column_of = into.new_zeros(into.shape[0], into.shape[1] + 1).scatter(1, at, columns)
        target = column_of.gather(1, into.gather(1, view.slots.clamp(0, into.shape[1] - 1)))
        return torch.where(view.present, target, columns)

    def evict(self, view: CacheView) -> torch.Tensor | None:
        here = [eviction.gone for eviction in self._find(view.pass_index).evictions if eviction.layer == view.layer]
        if not here:
            return None
        gone = torch.stack(here).any(0).to(view.slots.device)
        return gone.gather(1, view.slots.clamp(0, gone.shape[1] - 1)) & view.present

    def _find(self, pass_index: int) -> PassTrace:
        number_in_trace = self.first_pass + pass_index
        if number_in_trace >= len(self.trace.passes):
            raise ConfigError(
                f"The trace has {len(self.trace.passes)} passes and this would be number {number_in_trace + 1}: "
                "replay the same batches in the same order."
            )
        return self.trace.passes[number_in_trace]

    def _load(self, view: LayerView) -> None:
        p = self._find(view.pass_index)
        expected, found = p.valid.sum(1).tolist(), view.n_tokens[:, 0].tolist()
        if expected != found:
            raise ConfigError(
                f"Pass {self.first_pass + view.pass_index + 1} of the trace has rows of {expected} tokens and the model was "
                f"given {found}: replay the same batches in the same order."
            )
        self._pass = _on(p, view.index.device)
        # How a token is held while halted, as one number: missing_kv and resume_layers.
        self._how = self._pass.halted_kv.long() * (p.n_layers + 1) + (p.n_layers - self._pass.resume_layer.long())
        self._codes = self._how[_halted(self._pass)].unique().tolist()
        self._kv_layers = set(p.kv_layer[p.valid].unique().tolist()) - {p.n_layers - 1}
        self._loaded = view.pass_index


def _on(p: PassTrace, device: torch.device) -> PassTrace:
    tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(p).items() if isinstance(x, torch.Tensor)}
    fusions = tuple(Fusion(f.layer, f.into.to(device), f.weight.to(device)) for f in p.fusions)
    precisions = tuple(Precision(q.layer, q.bits.to(device)) for q in p.precisions)
    return dataclasses.replace(p, **tensors, fusions=fusions, precisions=precisions)


def _halted(p: PassTrace) -> torch.Tensor:
    """(B, N) bool: real tokens that halted at some layer."""
    return p.valid & (p.halt_layer < p.n_layers - 1)
