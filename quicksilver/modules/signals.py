"""Signals: one score per token of a view, (B, M) float32, low = halt first. Any subclass of `Signal` is found by its `name`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F

from quicksilver.modules.checks import active_first
from quicksilver.modules.fitted import TUNED_LENS, lens_for
from quicksilver.runtime import ConfigError, LayerView, TokenState
from quicksilver.runtime.options import Count, Odd, Options, Positive, at_least, check_choice

if TYPE_CHECKING:
    from quicksilver.runtime.architecture import Architecture


class Signal(Options, ABC):
    """A score per token.

    Class attributes:
        name: how a config selects it.
        causal: a token's score reads tokens up to it only.
        needs_attention: asks for `view.attention_received`.
    """

    name: ClassVar[str]
    causal: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = False

    @property
    def key(self) -> str:
        """Under which a calibration files this signal's percentiles; signals with different values have different keys."""
        return self.name

    def bound(self, architecture: Architecture) -> Signal:
        """The signal as it is on this model; the same where it is the same on all."""
        return self

    def __call__(self, view: LayerView, tokens: TokenState, where: torch.Tensor | None = None) -> torch.Tensor:
        """Scores (B, M) float32 of the tokens in `where` (B, M) bool (default: the active ones), +inf elsewhere."""
        where = tokens.active if where is None else where
        return self.score(view, tokens, where).masked_fill(~where, math.inf)

    @abstractmethod
    def score(self, view: LayerView, tokens: TokenState, where: torch.Tensor) -> torch.Tensor:
        """Scores (B, M) float32; outside `where` any value will do."""


@dataclass(frozen=True)
class Drift(Signal):
    """How far a layer moved the state (paper 2.1; the kinds are docs/conflicts.md #3).

    `relative`: ‖h^ℓ − h^{ℓ−1}‖₂ / ‖h^ℓ‖₂; `l2`: ‖h^ℓ − h^{ℓ−1}‖₂ in state units (the paper's); `cosine`: 1 − cos(h^{ℓ−1}, h^ℓ).
    """

    kind: Literal["relative", "l2", "cosine"] = "relative"
    name: ClassVar[str] = "drift"

    @property
    def key(self) -> str:
        return f"drift-{self.kind}"

    def score(self, view: LayerView, tokens: TokenState, where: torch.Tensor) -> torch.Tensor:
        before, after = view.before.float(), view.after.float()
        if self.kind == "cosine":
            return 1 - F.cosine_similarity(before, after, dim=-1)
        moved = (after - before).norm(dim=-1)
        return moved if self.kind == "l2" else moved / after.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class UpdateNorm(Signal):
    """Root mean square of the layer's update, ‖h^ℓ − h^{ℓ−1}‖₂ / √D: the `l2` drift in units that do not grow with the width."""

    name: ClassVar[str] = "update_norm"

    def score(self, view: LayerView, tokens: TokenState, where: torch.Tensor) -> torch.Tensor:
        return (view.after.float() - view.before.float()).norm(dim=-1) / math.sqrt(view.after.shape[-1])


@dataclass(frozen=True)
class StateNorm(Signal):
    """Norm of the state that leaves the layer, ‖h^ℓ‖₂: what carries little says little."""

    name: ClassVar[str] = "state_norm"

    def score(self, view: LayerView, tokens: TokenState, where: torch.Tensor) -> torch.Tensor:
        return view.after.float().norm(dim=-1)


@dataclass(frozen=True)
class Entropy(Signal):
    """Entropy in nats (docs/conflicts.md #4, #5).

    `logit_lens`: of softmax(head(final_norm(h^ℓ))), paper 2.1; computed only where it is asked for, because the head costs more
    than three layers. `tuned_lens`: the same by maps fitted to the model (`modules/fitted.py`). `latent`: of softmax over the D entries of h^ℓ (2.5). `histogram`: of the counts of the standardised
    entries of h^ℓ in `bins` equal bins over ±4 standard deviations (FAQ); 0 to log(bins).
    """

    of: Literal["logit_lens", "tuned_lens", "latent", "histogram"] = "logit_lens"
    bins: Annotated[int, at_least(2)] = 64
    name: ClassVar[str] = "entropy"

    @property
    def key(self) -> str:
        return f"entropy-{self.of}" + (f"-{self.bins}" if self.of == "histogram" else "")

    def bound(self, architecture: Architecture) -> Entropy:
        if self.of != TUNED_LENS:
            return self
        return LensEntropy(self.of, self.bins, lens=partial(lens_for(architecture).head_input, architecture))

    def score(self, view: LayerView, tokens: TokenState, where: torch.Tensor) -> torch.Tensor:
        if self.of in ("logit_lens", TUNED_LENS):
            scores = torch.full(where.shape, math.inf, device=where.device)
            scores[where] = view.logit_entropy_nats(where, self.head_input(view))
            return scores
        states = view.after.float()
        if self.of == "latent":
            log_p = states.log_softmax(-1)
            return -(log_p.exp() * log_p).sum(-1)
        spread = states.std(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        standard = (states - states.mean(-1, keepdim=True)) / spread
        bin_of = ((standard.clamp(-4, 4) + 4) * (self.bins / 8)).long().clamp_max(self.bins - 1)
        counts = torch.zeros(*states.shape[:-1], self.bins, device=states.device)
        p = counts.scatter_add_(-1, bin_of, torch.ones_like(states)) / states.shape[-1]
        return torch.special.entr(p).sum(-1)

    def head_input(self, view: LayerView) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What the head is given for states (K, D) of this layer; None: their final norm. Raises ConfigError: a lens of no model."""
        if self.of == TUNED_LENS:
            raise ConfigError(f"entropy={TUNED_LENS} is for halting and quantization, which know their model: take another here.")
        return None


@dataclass(frozen=True)
class LensEntropy(Entropy):
    """`tuned_lens` of one model. lens: from a layer and states after it, (K, D), to what the head is given for them."""

    lens: Callable[[int, torch.Tensor], torch.Tensor] = field(kw_only=True)

    def head_input(self, view: LayerView) -> Callable[[torch.Tensor], torch.Tensor]:
        def from_lens(hidden: torch.Tensor) -> torch.Tensor:
            view.add_signal_flops(2 * hidden.shape[0] * hidden.shape[1] ** 2)
            return self.lens(view.layer, hidden)

        return from_lens


@dataclass(frozen=True)
class AttentionReceived(Signal):
    """Attention a token gets in this layer from the last `last_queries` tokens of its row (None: all).

    Looks at later tokens, so it is for prompts only. The last tokens themselves are the observation window (SnapKV, arXiv
    2404.14469) and score +inf, so that a prompt no longer than the window ranks by age. Costs a small q·k product, in the ledger. With
    `pool`, an odd number, a token scores as the most attended of the `pool` active tokens around it.
    """

    last_queries: Positive | None = 16
    reduce: Literal["mean", "max"] = "mean"
    pool: Odd = 1
    name: ClassVar[str] = "attention"
    causal: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = True

    @property
    def key(self) -> str:
        pooled = f"-pool-{self.pool}" if self.pool > 1 else ""
        return f"attention-{self.reduce}-{self.last_queries or 'all'}{pooled}"

    def score(self, view: LayerView, tokens: TokenState, where: torch.Tensor) -> torch.Tensor:
        received = view.attention_received(self.last_queries, self.reduce)
        if self.pool > 1:
            received = pooled(received, tokens.active | tokens.newly_halted, self.pool)
        return received if self.last_queries is None else without_observers(received, tokens, self.last_queries)


def without_observers(received: torch.Tensor, tokens: TokenState, queries: int) -> torch.Tensor:
    """Attention (B, M) with +inf for the observing queries: fewer see them, so their low sums say nothing."""
    taking_part = tokens.active | tokens.newly_halted
    from_end = taking_part.flip(1).cumsum(1).flip(1)  # 1 = the row's last token
    return received.masked_fill(taking_part & (from_end <= queries), math.inf)


def pooled(scores: torch.Tensor, taking_part: torch.Tensor, size: int) -> torch.Tensor:
    """The greatest of the `size` scores (B, M) of at least 0 around each of the tokens taking part, (B, M) bool, counted among these."""
    order, _ = active_first(taking_part)
    packed = scores.masked_fill(~taking_part, 0.0).gather(1, order)
    greatest = F.max_pool1d(packed[:, None], size, stride=1, padding=size // 2)[:, 0]
    return torch.zeros_like(scores).scatter(1, order, greatest)


@dataclass(frozen=True)
class Position(Signal):
    """The slot: oldest first."""

    name: ClassVar[str] = "position"

    def score(self, view: LayerView, tokens: TokenState, where: torch.Tensor) -> torch.Tensor:
        return view.slots.float()


@dataclass(frozen=True)
class Random(Signal):
    """Uniform in [0, 1): a hash of (seed, layer, slot, token id), no state: the same alone, in a batch, left-padded, in prefill and in decoding.

    With the slot alone every sequence would lose the same positions; a model that is given embeddings has no ids and falls back to it.
    """

    seed: Count = 0
    name: ClassVar[str] = "random"

    def score(self, view: LayerView, tokens: TokenState, where: torch.Tensor) -> torch.Tensor:
        return slot_draw(self.seed, view.layer, view.slots, view.input_ids)


def slot_draw(seed: int, layer: int, slots: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Uniform in [0, 1): the hash that `Random` scores by; slots and ids (B, M) long -> (B, M) float32."""
    bits = _mix(slots ^ _mix(_mix(seed) ^ layer))
    if input_ids is not None:
        bits = _mix(bits ^ _mix(input_ids.long() + 1))
    return (bits >> 8).float() / 2**24  # 24 bits: exact in float32, and never 1.0


_MASK = 0xFFFFFFFF
Bits = TypeVar("Bits", int, torch.Tensor)


def _mix(x: Bits) -> Bits:
    """32-bit hash "lowbias32" (Wellons, https://nullprogram.com/blog/2018/07/31/); int64 products wrap and keep the low bits."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


SignalSpec = str | Mapping | Signal


def signal_names() -> dict[str, type[Signal]]:
    """Every signal there is, by name; what derives from a signal and gives itself no name of its own is not one."""
    found: dict[str, type[Signal]] = {}
    waiting = list(Signal.__subclasses__())
    for cls in waiting:  # grows meanwhile
        waiting += cls.__subclasses__()
        found.setdefault(cls.name, cls)
    return found


def make_signal(spec: SignalSpec, **defaults: object) -> Signal:
    """The signal a config names: `"attention"`, `{"name": "attention", "last_queries": 32}`, or a `Signal` as it is.

    Args:
        defaults: options used where `spec` does not give them and the signal has them.

    Raises:
        ConfigError: an unknown name or option.
    """
    if isinstance(spec, Signal):
        return spec
    options = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    name = options.pop("name", None)
    known = signal_names()
    check_choice("signal", name, known)
    cls = known[name]
    allowed: list[str] = [f.name for f in fields(cls)] if is_dataclass(cls) else []
    for option in options:
        check_choice(f"option of signal {name!r}", option, allowed or ["(it has none)"])
    return cls(**{k: v for k, v in defaults.items() if k in allowed} | options)


def lowest(scores: torch.Tensor, eligible: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The k lowest scores of each row among `eligible`; ties go to the earlier token, NaN comes last. No host sync.

    Args:
        scores: (B, M); eligible: (B, M) bool; k: (B, 1) long, capped at what is eligible.

    Returns:
        (B, M) bool.
    """
    order = scores.argsort(dim=1, stable=True)
    candidates = eligible.gather(1, order)
    return torch.zeros_like(eligible).scatter(1, order, candidates & (candidates.long().cumsum(1) <= k))
