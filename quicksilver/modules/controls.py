"""Nulls and oracles: what a mechanism must be compared with (docs/design.md §4). Tokens at random or by position at an exact rate are
`Halting(rule="capacity", signal="random")` and `signal="position"`; the nulls here need more than that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch

from quicksilver.modules.checks import active_first, check_known_ids, own_columns
from quicksilver.modules.halting import HaltingPolicy, fill_up
from quicksilver.modules.signals import Random, lowest
from quicksilver.runtime import Architecture, CacheView, ConfigError, KVTranslator, LayerView, MLPMap, RuntimeModule, Span, apply
from quicksilver.runtime.module import EvictionPolicy, MergePolicy, PrecisionExecutor, SpanPolicy, TokenPolicy
from quicksilver.runtime.options import Count, Fractions, Share, between, check_choice, check_count, check_token_ids
from quicksilver.runtime.pass_state import MISSING_KV, Fusion, MissingKV, PassState, TokenState
from quicksilver.runtime.trace import PassTrace, Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# -- halting that reads no state ---------------------------------------------------------------------------------------------------
@dataclass(kw_only=True)
class StaticDepth(HaltingPolicy):
    """Every token stops after the same `depth`, a fraction of the layers: early exit that reads no state. Causal."""

    depth: Share = 0.5
    window: tuple[float, float] = field(default=(0.5, 1.0), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.window = (self.depth, 1.0)

    def halts_oldest(self, layer: int) -> bool:
        return True  # all of them

    def halted_share_after(self, layer: int) -> float | None:
        return 1.0

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        return eligible


@dataclass(kw_only=True)
class RandomHalting(HaltingPolicy):
    """Each token halts after each layer of the window with probability `rate`, whatever its state.

    The draw is that of the signal `Random`.
    """

    rate: Share = 0.1
    seed: Count = 0
    resume_layers: Count = 4

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        return eligible & (Random(self.seed)(view, tokens, eligible) < self.rate)


@dataclass(kw_only=True)
class ExponentialDecay(HaltingPolicy):
    """Random tokens halt so that N·exp(−alpha·ℓ) are active in layer ℓ, counted from 0 (App. J: alpha from 0.05 to 0.1).

    Args:
        even: every row keeps exactly that many (non-causal). False: each token halts with probability 1 − exp(−alpha) after each
            layer, so that rows are uneven (causal).
    """

    alpha: Annotated[float, between(0.0)] = 0.07
    even: bool = True
    seed: Count = 0
    window: Fractions = (0.0, 1.0)

    @property
    def chooses_causally(self) -> bool:  # type: ignore[override]
        return not self.even

    def bind(self, architecture: Architecture) -> None:
        super().bind(architecture)
        self._halted_shares = self.scheduled_shares(architecture.n_layers, "exponential", alpha=self.alpha)

    def halted_share_after(self, layer: int) -> float | None:
        return self._halted_shares[layer] if self.even else None

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        draw = Random(self.seed)(view, tokens, eligible)
        if self.even:
            return fill_up(view, tokens, eligible, draw, self._halted_shares[view.layer])
        return eligible & (draw < 1 - math.exp(-self.alpha))


_WORD_IDS = ("function_ids", "letter_ids", "begin_ids", "end_ids")


@dataclass(kw_only=True)
class WordClassHalting(HaltingPolicy):
    """All tokens of a prompt's function words stop after one layer, or all of its content words.

    A function word is one token of a closed list that is a whole word; any other token with letters belongs to a content word; what has no
    letters never stops. It reads the token after each, so it acts in prompts only.

    Args:
        halted: function or content.
        depth: fraction of the layers after which they stop.
        at_random: as many tokens of each row stop, drawn from all that may: the null of the class.
        seed: of the draw.
        function_ids: tokens that read like a function word, or the name of a set, as on the command line. letter_ids: tokens with a letter.
        begin_ids, end_ids: tokens that begin with a letter, and that end with one: where one follows the other, a word goes on.

    Raises:
        ConfigError: in a run, a model that was given embeddings.
    """

    halted: Literal["function", "content"] = "function"
    depth: Share = 0.5
    at_random: bool = False
    seed: Count = 0
    function_ids: Sequence[int | str] = ("@function_words",)
    letter_ids: Sequence[int | str] = ("@with_letters",)
    begin_ids: Sequence[int | str] = ("@begins_with_a_letter",)
    end_ids: Sequence[int | str] = ("@ends_with_a_letter",)
    missing_kv: MissingKV = "drop"
    protect_first: Count = 1
    protect_last: Count | None = 1
    window: tuple[float, float] = field(default=(0.5, 0.5), init=False)
    chooses_causally: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _WORD_IDS:
            if not self._sets(name):
                setattr(self, name, check_token_ids(name, getattr(self, name)))
        self.window = (self.depth, self.depth)

    def bind(self, architecture: Architecture) -> None:
        super().bind(architecture)
        self._tables: list[torch.Tensor] = []
        for name in _WORD_IDS:
            if sets := self._sets(name):
                instead = f"quicksilver.data.annotation.token_set({sets[0]!r}, tokenizer)"
                raise ConfigError(f"{name} names {sets[0]}: give ids, {instead}.")
            ids = list(getattr(self, name))
            check_known_ids(name, ids, architecture.vocab_size)
            table = torch.zeros(architecture.vocab_size, dtype=torch.bool)
            self._tables.append(table.index_fill(0, torch.tensor(ids).long(), True))

    def _sets(self, name: str) -> list[str]:
        """Sets of words that an option names in place of ids; `quicksilver run` puts the ids of the model's tokenizer there."""
        return [entry for entry in getattr(self, name) if isinstance(entry, str) and entry.startswith("@")]

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        function, content = self.classes(view)
        mask = eligible & (function if self.halted == "function" else content).gather(1, view.index)
        if not self.at_random:
            return mask
        return lowest(Random(self.seed)(view, tokens, eligible), eligible, mask.sum(1, keepdim=True))

    def classes(self, view: LayerView) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens of the pass are function words and which belong to content words: (B, N) bool each."""
        ids = view.pass_ids
        if ids is None:
            raise ConfigError("WordClassHalting knows words by token ids, but the model was given embeddings: give input_ids.")
        real = ids >= 0
        function, letter, begins, ends = (table.to(ids.device)[ids.clamp(min=0)] & real for table in self._tables)
        goes_on = torch.zeros_like(real)
        goes_on[:, 1:] = begins[:, 1:] & ends[:, :-1]  # this token continues the word before it
        whole = ~goes_on
        whole[:, :-1] &= ~goes_on[:, 1:]
        function = function & whole
        return function, letter & ~function


# -- a trace once more -------------------------------------------------------------------------------------------------------------
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
    first_pass: Count = 0
    like: Sequence[RuntimeModule] = ()
    priority: ClassVar[int] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        passes = self.trace.passes
        decided = {layer for p in passes for layer in torch.cat([p.halt_layer[p.valid], p.kv_layer[p.valid]]).tolist()}
        kinds = ("fusions", "precisions", "mappings")
        events = {event.layer for p in passes for kind in kinds for event in getattr(p, kind)}
        self._layers = decided - {self.trace.n_layers - 1} | events
        self._policies = [module for module in self.like if isinstance(module, TokenPolicy)]
        self._loaded: int | None = None

    @property
    def copies_kv(self) -> bool:
        return any(bool(_halted_by(p, "copy").any()) for p in self.trace.passes)

    @property
    def translators(self) -> Mapping[int, KVTranslator]:
        return {layer: translator for policy in self._policies for layer, translator in policy.translators.items()}

    @property
    def mlp_maps(self) -> Mapping[int, MLPMap]:
        return {layer: one for policy in self._policies for layer, one in policy.mlp_maps.items()}

    @property
    def proportional_attention(self) -> bool:
        return any(policy.proportional_attention for policy in self._policies)

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
        return next((policy.precision for policy in self._policies if policy.precision is not None), None)

    def bind(self, architecture: Architecture) -> None:
        if self.trace.n_layers != architecture.n_layers:
            layers = f"The trace has {self.trace.n_layers} layers and this one has {architecture.n_layers}"
            raise ConfigError(f"{layers}: replay it on the model it was made with.")
        if self.precision is None and any(p.precisions for p in self.trace.passes):
            raise ConfigError("The trace holds tokens at fewer bits: give Replay(trace, like=modules) the module that did.")
        predicted = {n for p in self.trace.passes for n in p.halt_layer[_halted_by(p, "predict")].unique().tolist()}
        if predicted - set(self.translators):
            raise ConfigError("The trace holds predicted K/V: give Replay(trace, like=modules) the module that did it.")
        if not self.mlp_maps and any(p.mappings for p in self.trace.passes):
            raise ConfigError(
                "The trace holds MLPs in whose place stood maps: give Replay(trace, like=modules) the module that did it."
            )
        self._loaded = None

    def acts_at(self, layer: int) -> bool:
        return layer in self._layers

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        if self._loaded != view.pass_index:
            self._load(view)
        # Layers without skipping need no mask. KV skipping comes first: a token that is fused or halted at that layer is active until then.
        if view.layer in self._kv_layers:
            tokens.skip_kv((self._pass.kv_layer.gather(1, view.index) == view.layer) & tokens.active)
        for mapping in (m for m in self._pass.mappings if m.layer == view.layer):
            tokens.map_mlp(mapping.tokens.gather(1, view.index), self.mlp_maps)
        # Fusion comes before halting: what halts here was not merged away here, but the target of a fusion may halt at the same layer.
        for fusion in (f for f in self._pass.fusions if f.layer == view.layer):
            # (B, N): column of the pass -> of the view
            in_view = torch.zeros_like(fusion.into).scatter(1, view.index, own_columns(view.index))
            tokens.fuse(in_view.gather(1, fusion.into.gather(1, view.index)), fusion.weight.gather(1, view.index))
        here = self._pass.halt_layer.gather(1, view.index) == view.layer
        how = self._how.gather(1, view.index)
        for code in self._codes:
            mode, resume_layers = divmod(code, self.trace.n_layers + 1)
            missing_kv = MISSING_KV[mode]
            translator = self.translators.get(view.layer) if missing_kv == "predict" else None
            if missing_kv != "predict" or translator is not None:  # else no token halts so here: `bind` has seen to it
                tokens.halt(here & (how == code), missing_kv=missing_kv, resume_layers=resume_layers, translator=translator)
        for precision in (p for p in self._pass.precisions if p.layer == view.layer):
            for bits in set(precision.bits.unique().tolist()) - {0}:
                tokens.set_bits(precision.bits.gather(1, view.index) == bits, bits)

    def merge_cache(self, view: CacheView) -> torch.Tensor | None:
        here = [merge.into for merge in self._find(view.pass_index).merges if merge.layer == view.layer]
        if not here:
            return None
        into = reduce(lambda so_far, later: later.gather(1, so_far), here).to(view.slots.device)
        columns = own_columns(view.slots)
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
        n, known = self.first_pass + pass_index, len(self.trace.passes)
        if n >= known:
            raise ConfigError(f"The trace has {known} passes and this would be number {n + 1}: replay the same batches.")
        return self.trace.passes[n]

    def _load(self, view: LayerView) -> None:
        p = self._find(view.pass_index)
        expected, found = p.valid.sum(1).tolist(), view.n_tokens[:, 0].tolist()
        if expected != found:
            there = f"Pass {self.first_pass + view.pass_index + 1} of the trace has rows of {expected} tokens"
            raise ConfigError(f"{there}, and was given {found}: replay the same batches.")
        self._pass = p.mapped(lambda tensor: tensor.to(view.index.device))
        # How a token is held while halted, as one number: missing_kv and resume_layers.
        self._how = self._pass.halted_kv.long() * (p.n_layers + 1) + (p.n_layers - self._pass.resume_layer.long())
        self._codes = self._how[_halted(self._pass)].unique().tolist()
        self._kv_layers = set(p.kv_layer[p.valid].unique().tolist()) - {p.n_layers - 1}
        self._loaded = view.pass_index


def _halted(p: PassTrace) -> torch.Tensor:
    """(B, N) bool: real tokens that halted at some layer."""
    return p.valid & (p.halt_layer < p.n_layers - 1)


def _halted_by(p: PassTrace, missing_kv: str) -> torch.Tensor:
    return _halted(p) & (p.halted_kv == MISSING_KV.index(missing_kv))


# -- its decisions on other tokens -------------------------------------------------------------------------------------------------
def shuffled(trace: Trace, seed: int, protect_first: int = 4, protect_last: int = 1, parts: int = 1) -> Trace:
    """The same decisions on other tokens: the null at exactly the trace's budget, per layer and row.

    In each pass and row the decisions (halting depth, what is kept of it, resumption, K/V, fusion, bits) are permuted, each
    token's together, among the real tokens that are not protected; protected ones keep their own. A token that is to be merged
    away goes into the next one to its right that goes on, weighted by size; where none does, it goes on itself.

    Args:
        seed: of the permutations.
        protect_first: attention sinks. `KVSkipping` spares them by default, so a fair null must spare them too.
        protect_last: the last tokens of a prompt, of which `Halting` spares one when it looks at the whole prompt.
        parts: equal parts of a row's tokens within which decisions are permuted. With 10, tokens of each tenth halt as often as in the
            trace, so that a rule of position alone is no better than its null.

    Raises:
        ConfigError: a trace in which K/V entries were merged while decoding, or evicted.
    """
    check_count("protect_first", protect_first)
    check_count("protect_last", protect_last)
    check_count("parts", parts, 1)
    generator = torch.Generator().manual_seed(seed)
    passes = []
    for p in (p.cpu() for p in trace.passes):
        if p.merges:
            raise ConfigError("K/V merged while decoding cannot be shuffled: give decode_every=0, or criterion='random' as null.")
        if p.evictions:
            raise ConfigError("A trace with K/V entries evicted cannot be shuffled: compare with a module that evicts at random.")
        nth = p.valid.long().cumsum(1)  # 1 = the row's first token of this pass
        protected = p.first_column + nth <= protect_first
        if p.first_column == 0 and p.valid.shape[1] > 1:  # a prompt; elsewhere no token is known to be the last
            protected |= nth > p.valid.sum(1, keepdim=True) - protect_last
        free = p.valid & ~protected
        part = (nth - 1) * parts // p.valid.sum(1, keepdim=True).clamp(min=1)  # (B, N)
        draw = (torch.rand(free.shape, generator=generator) + part).masked_fill(~free, parts + 1.0)
        source = draw.argsort(dim=1, stable=True)
        target, _ = active_first(free)
        taken = torch.empty_like(source).scatter(1, target, source)  # (B, N): from which token each has its decisions
        if p.fusions:
            taken = _last_goes_on(p, free, taken)
        passes.append(_fused_again(p.mapped(partial(torch.gather, dim=1, index=taken))))
    return Trace(trace.n_layers, passes)


def _last_goes_on(p: PassTrace, free: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """`taken`, with the last free token of each row going as deep as any: every token that is merged away then has one to go into."""
    columns = own_columns(free)
    depth = torch.where(free & (p.fused_layer == p.n_layers - 1).gather(1, taken), p.halt_layer.gather(1, taken), -1)
    deepest = torch.where(depth == depth.amax(1, keepdim=True), columns, -1).amax(1, keepdim=True)
    last = torch.where(free, columns, -1).amax(1, keepdim=True)
    last = torch.where(last < 0, deepest, last)
    swapped = taken.scatter(1, last, taken.gather(1, deepest))
    return swapped.scatter(1, deepest, taken.gather(1, last))


def _fused_again(p: PassTrace) -> PassTrace:
    """`p` with the fusions that its `fused_layer` asks for."""
    n, columns = p.valid.shape[1], own_columns(p.valid)
    fused_layer, size, fusions = p.fused_layer, torch.ones(p.valid.shape), []
    for layer in sorted({fusion.layer for fusion in p.fusions}):
        goes_on = p.valid & (p.halt_layer > layer) & (fused_layer > layer)
        target = torch.where(goes_on, columns, n).flip(1).cummin(1).values.flip(1)
        leaves = p.valid & (fused_layer == layer)
        fused_layer = fused_layer.masked_fill(leaves & (target == n), p.n_layers - 1)
        into = torch.where(leaves & (target < n), target, columns)
        fusions.append(Fusion(layer, into, size))
        size = torch.zeros_like(size).scatter_add(1, into, size)
    return dataclasses.replace(p, fused_layer=fused_layer, fusions=tuple(fusions))


# -- the oracle --------------------------------------------------------------------------------------------------------------------
@torch.inference_mode()
def perfect_exit(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    missing_kv: MissingKV = "project",
    pass_tokens: Sequence[int] | None = None,
) -> Trace:
    """An oracle, as a trace for `Replay`: each token halts after the earliest layer whose prediction, by the logit lens, is the last layer's.

    One dense run. It knows what it saves, so it bounds what a signal can.

    Args:
        input_ids: (B, N) long; attention_mask: (B, N), 0 for padding.
        missing_kv: what later layers see of a halted token.
        pass_tokens: columns of each pass the trace is to be replayed in, such as (448, 64); None: one pass.

    Raises:
        ConfigError: `pass_tokens` that do not add up to N.
    """
    check_choice("missing_kv", missing_kv, MISSING_KV)
    pass_tokens = [input_ids.shape[1]] if pass_tokens is None else list(pass_tokens)
    if sum(pass_tokens) != input_ids.shape[1]:
        raise ConfigError(f"pass_tokens={pass_tokens} add up to {sum(pass_tokens)}, for {input_ids.shape[1]} columns.")
    with apply(model, []) as run:  # refuses a model in training mode, and one that is under modules already
        arch = run.arch
        dense = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, output_hidden_states=True)
    final = dense.logits.argmax(-1).cpu()
    valid = torch.ones_like(final, dtype=torch.bool) if attention_mask is None else attention_mask.bool().cpu()
    slots, last = valid.long().cumsum(1) - 1, arch.n_layers - 1
    halt_layer = torch.full_like(final, last, dtype=torch.int16)
    for layer in reversed(range(last)):
        # Row by row: the logits of a whole batch are gigabytes.
        predicted = torch.stack([arch.logits(row).argmax(-1).cpu() for row in dense.hidden_states[layer + 1]])
        halt_layer = halt_layer.masked_fill(valid & (predicted == final), layer)
    passes, first = [], 0
    for real, at, halted in zip(*(whole.split(pass_tokens, dim=1) for whole in (valid, slots, halt_layer)), strict=True):
        state = PassState(real, at, arch.n_layers)
        state.halt_layer = halted
        state.halted_kv = state.halted_kv.masked_fill(halted < last, MISSING_KV.index(missing_kv))
        passes.append(PassTrace.of(state, first))
        first += real.shape[1]
    return Trace(arch.n_layers, passes)
