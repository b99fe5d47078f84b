"""Dynamic Token Halting: which tokens halt, and after which layer (paper 2.1, App. B)."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch

from quicksilver.modules.calibration import Calibrated, Calibration, Thresholds, is_percentile
from quicksilver.modules.checks import Ends, TokenMask, check_known_ids, layer_after, marked, share_of
from quicksilver.modules.fitted import EMBEDDED, BoundTranslator, translator_for
from quicksilver.modules.signals import Drift, Entropy, Position, Signal, SignalSpec, lowest, make_signal
from quicksilver.runtime import Architecture, ConfigError, KVTranslator, LayerView, TokenPolicy, apply, architecture_of
from quicksilver.runtime.options import Count, Fractions, Share, TokenIds, between, check_choice, check_count, check_share
from quicksilver.runtime.pass_state import MissingKV, TokenState

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ENOUGH = 8  # tokens, fewer of which may all halt by chance
UNITS = {"nats": 1.0, "bits": math.log(2)}  # in nats
SIGNAL = {"name": "attention", "last_queries": 64, "pool": 9}  # pooled: what stands beside something looked at is needed with it
_TRIED = (0.3, 0.7)  # shares of the tokens; what they save lies on a line, but for the attention among the tokens that are left
_MOST = 0.98


class HaltsEverything(UserWarning):
    """Thresholds that no token of the model stays above."""


@dataclass(kw_only=True)
class HaltingPolicy(TokenPolicy):
    """What all halting policies share: where they act, which tokens never or always halt, what later layers see of halted ones.

    A subclass implements `choose`, its own choice. Full processing takes precedence over forced halting, and forced halting over
    that choice (2.1; the formula there contradicts its text, docs/conflicts.md #8).

    Args:
        window: first and last point of the depth at which a token may halt, as fractions of it (G.2: 6 to 24 of 30).
        full_ids, full_mask: tokens that never halt, by id, or by slot: a bool tensor (S,) or (B, S).
        forced_ids, forced_mask: tokens that halt at the first layer of the window, by id or by slot.
        protect_first: the first tokens of a sequence never halt (attention sinks).
        protect_last: nor do the last tokens of a prompt: the very last one's logits predict what follows. Which tokens are the last
            is known in a prompt only, so a policy that protects them is not causal. None: 0 for a causal policy, else 1.
        missing_kv: what later layers see of a halted token: nothing, K/V projected from its frozen state, the K/V of the layer it
            halted at, zeros, or K/V that the translator which ships with the model predicts (another one: `StagedHalting`).
        resume_layers: halted tokens take part again in that many last layers.
        lookahead: a non-causal policy acts outside prompts too (the paper's variant); every number it touches is marked.

    Class attributes:
        chooses_causally: whether `choose` reads tokens up to t only, about t.

    Raises:
        ConfigError: by `bind`, options that leave no layer to halt at.
    """

    window: Fractions = (0.2, 0.8)
    full_ids: TokenIds = ()
    full_mask: TokenMask = None
    forced_ids: TokenIds = ()
    forced_mask: TokenMask = None
    protect_first: Count = 0
    protect_last: Count | None = None
    missing_kv: MissingKV = "project"
    resume_layers: Count = 0
    lookahead: bool = False
    priority: ClassVar[int] = 10
    chooses_causally: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._translators: dict[int, BoundTranslator] = {}  # by the layer that tokens halt after

    @abstractmethod
    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        """Which of the `eligible` (B, M) bool to halt after this layer: (B, M) bool."""

    @property
    def protected_last(self) -> int:
        """`protect_last`, with its default put in."""
        return (0 if self.chooses_causally else 1) if self.protect_last is None else self.protect_last

    @property
    def causal(self) -> bool:
        return self.chooses_causally and not self.protected_last

    @property
    def copies_kv(self) -> bool:
        return self.missing_kv == "copy"

    @property
    def translators(self) -> Mapping[int, KVTranslator]:
        return self._translators

    def bind(self, architecture: Architecture) -> None:
        n_layers = architecture.n_layers
        check_known_ids("full_ids", self.full_ids, architecture.vocab_size)
        check_known_ids("forced_ids", self.forced_ids, architecture.vocab_size)
        self.first_layer = layer_after(self.window[0], n_layers)
        # Halting after layer i spares a token the layers from i + 1 to the one it resumes in; later than this it spares none.
        # A predicted token goes on to a layer that is not predicted, so one more must follow.
        last_useful = n_layers - 2 - max(self.resume_layers, self.missing_kv == "predict")
        self.last_layer = min(layer_after(self.window[1], n_layers), last_useful)
        if last_useful < 0:
            resumed = f"with resume_layers={self.resume_layers} a halted token resumes in all that follow"
            fewer = f"resume fewer layers, at most {max(0, n_layers - 2)}"
            if self.resume_layers <= n_layers - 2:  # there is none that K/V could be predicted for
                resumed, fewer = "missing_kv='predict' is for those after the next one", "give another missing_kv"
            raise ConfigError(f"Nothing would ever halt: the model has {n_layers} layers, and {resumed}: {fewer}.")
        if self.first_layer > self.last_layer:
            opens = f"window={self.window} opens after layer {self.first_layer} of 0 to {n_layers - 1}"
            late = f"with resume_layers={self.resume_layers} halting after layer {last_useful + 1} or later saves nothing"
            raise ConfigError(f"Nothing would ever halt: {opens}, and {late}. Open the window earlier, or resume fewer layers.")
        places = range(self.first_layer, self.last_layer + 1) if self.missing_kv == "predict" else ()
        self._translators = {n: translator_for(architecture, EMBEDDED, n + 1) for n in places if self.acts_at(n)}

    def acts_at(self, layer: int) -> bool:
        return self.first_layer <= layer <= self.last_layer

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        protected = self.protected_at(view.layer)
        full = marked(view, "full", self.full_ids, self.full_mask, protected)
        how: dict[str, Any] = {"missing_kv": self.missing_kv_at(view.layer), "resume_layers": self.resume_layers}
        how["translator"] = self._translators.get(view.layer)
        if self.forced_ids or self.forced_mask is not None:
            tokens.halt(tokens.active & ~full & marked(view, "forced", self.forced_ids, self.forced_mask, Ends()), **how)
        chosen = self.choose(view, tokens, tokens.active & ~full)
        oldest_from = protected.first if self.halts_oldest(view.layer) else None
        tokens.halt(chosen, count_per_row=self._count_per_row(view, tokens), oldest_from=oldest_from, **how)

    def protected_at(self, layer: int) -> Ends:
        """The tokens that do not halt after `layer`."""
        return Ends(self.protect_first, self.protected_last)

    def missing_kv_at(self, layer: int) -> str:
        """What later layers see of tokens that halt after `layer`."""
        return self.missing_kv

    def halts_oldest(self, layer: int) -> bool:
        """Whether `choose` takes the oldest of the tokens that may halt after `layer`, or all of them."""
        return False

    def halted_share_after(self, layer: int) -> float | None:
        """Share of a row's tokens that have halted once `choose` was asked after `layer`; None: it depends on the data."""
        return None

    def scheduled_shares(self, n_layers: int, schedule: str, share: float = 0.0, alpha: float = 0.0) -> list[float]:
        """Share of a row's tokens that shall have halted after each layer, length L, never decreasing; see `Halting`."""
        opening = self.last_layer - self.first_layer + 1

        def after(steps: int) -> float:  # layers of the window that have decided
            if schedule == "exponential":
                return 1 - math.exp(-alpha * steps)
            return share if schedule == "one_shot" else share * steps / opening

        decided = (min(layer, self.last_layer) - self.first_layer + 1 for layer in range(n_layers))
        return [after(steps) if steps > 0 else 0.0 for steps in decided]

    def _count_per_row(self, view: LayerView, tokens: TokenState) -> int | None:
        """How many tokens of each row `choose` halts, where that follows from shapes alone; None: only the device knows."""
        by_name = self.full_ids or self.full_mask is not None or self.forced_ids or self.forced_mask is not None
        if by_name or view.tokens_per_row is None or tokens.n_left is None:
            return None
        return self.halted_of(view.layer, view.tokens_per_row, tokens.n_left)

    def halted_of(self, layer: int, n_tokens: int, n_left: int) -> int | None:
        """How many `choose` halts in a row of `n_tokens`, of which `n_left` have not halted; None: it depends on the data."""
        share = self.halted_share_after(layer)
        if share is None:
            return None
        k = max(0, math.floor(n_tokens * share + 0.5) - (n_tokens - n_left))
        return k if k <= n_left - self.protect_first - self.protected_last else None


@dataclass(kw_only=True)
class Halting(HaltingPolicy, Calibrated):
    """Freeze tokens whose state has converged (paper 2.1, App. B): a signal scores each token, a rule says how many of them halt.

    `rule="threshold"`, the paper's: a token halts when its drift *and* its entropy are below the layer's thresholds. Causal.
    Drift is tested first and entropy only of the tokens that passed, because the output head costs more than three layers.
    `rule="capacity"`: in every row exactly the k tokens of lowest `signal` halt, k a share of the row's own real tokens, by a
    schedule over depth. It reads the whole prompt, so it acts in prompts only; its shapes do not depend on the data.
    Several layers with a choice of their own each: `StagedHalting`.

    Args:
        preset: the paper's thresholds as printed, `paper-b2`, `paper-g2` or `paper-fig9` (`PRESETS`); replaces what it names.
        rule: as above; `capacity` needs no calibration and leaves the thresholds unread.
        tau_drift, tau_entropy: a number, one number per layer, or a percentile such as "p25" (B.2). None: not tested.
        unit: of `tau_entropy` where it is given as numbers (percentiles are in nats).
        drift: `relative`, `l2` or `cosine` (docs/conflicts.md #3).
        entropy: `logit_lens`, `tuned_lens`, `latent` or `histogram` (docs/conflicts.md #5).
        calibration: a `Calibration` or the path of one. None: the one that ships with the model, where percentiles need it.
        signal: for `capacity`: drift, update_norm, entropy, attention, position, random, or a mapping of a name and its options.
        schedule: `one_shot`: `halted_share` at the opening of the window. `gradual`: in equal steps over the window.
            `exponential`: N·exp(−alpha·ℓ) tokens go on, ℓ layers after the opening of the window (App. J).
        halted_share: share of the row's real tokens that have halted at the end of the schedule.
        alpha: per layer, App. J: 0.05 to 0.1.
        resume_layers: 4: a tenth of the damage at the same saving (docs/design.md §4).

    Raises:
        ConfigError: a threshold below 0, not finite or of the wrong length, or a percentile without a calibration.
    """

    preset: str | None = None
    rule: Literal["threshold", "capacity"] = "threshold"
    tau_drift: Thresholds | None = "p25"
    tau_entropy: Thresholds | None = "p25"
    unit: Literal["nats", "bits"] = "nats"
    drift: Literal["relative", "l2", "cosine"] = "relative"
    entropy: Literal["logit_lens", "tuned_lens", "latent", "histogram"] = "logit_lens"
    calibration: Calibration | Path | str | None = None
    signal: SignalSpec = "drift"
    schedule: Literal["one_shot", "gradual", "exponential"] = "gradual"
    halted_share: Share = 0.5
    alpha: Annotated[float, between(0.0)] = 0.07
    resume_layers: Count = 4

    def __post_init__(self) -> None:
        if self.preset is not None:
            check_choice("preset", self.preset, PRESETS)
            for name, value in PRESETS[self.preset].items():
                setattr(self, name, value)
        super().__post_init__()
        if self.rule == "threshold" and self.tau_drift is None and self.tau_entropy is None:
            raise ConfigError("rule='threshold' needs tau_drift or tau_entropy: numbers, or a percentile such as 'p25'.")
        self._drift = Drift(self.drift)
        self._entropy: Signal = Entropy(self.entropy)
        self._signal: Signal = make_signal(self.signal, kind=self.drift, of=self.entropy)

    @classmethod
    def from_preset(cls, model: PreTrainedModel, save: float, *, prompt_tokens: int = 128, **options: Any) -> Halting:
        """Halting inside prompts that saves about `save` of their executed FLOPs, its own signal included, on any model.

        Which tokens leave depends on the text, how many does not: three passes over a prompt of arbitrary tokens find the share.

        Args:
            save: share of the FLOPs, between 0 and 1.
            prompt_tokens: length of the prompts that are meant; the signal weighs more in short ones.
            options: further ones of `Halting`, but for rule, signal, schedule and share.

        Raises:
            ConfigError: a share that cannot be saved, prompts in which all tokens are protected.
            UnsupportedModelError: no adapter for the model.
        """
        check_share("save", save)
        check_count("prompt_tokens", prompt_tokens, 2)
        architecture_of(model)
        prompt_tokens = min(prompt_tokens, getattr(model.config, "max_position_embeddings", prompt_tokens))
        ids = (torch.arange(prompt_tokens) % int(model.config.get_text_config().vocab_size)).unsqueeze(0).to(model.device)
        given = {"window": (0.2, 0.8), "missing_kv": "drop", "resume_layers": 0, **options}

        def halting(share: float) -> Halting:
            return cls(rule="capacity", signal=SIGNAL, schedule="one_shot", halted_share=share, **given)

        @torch.inference_mode()
        def executed(modules: list[Halting]) -> int:
            with apply(model, modules) as run:
                model(ids, use_cache=True, logits_to_keep=1)
                return run.flops.executed

        dense = executed([])
        few, many = (1 - executed([halting(share)]) / dense for share in _TRIED)
        if many <= few:
            raise ConfigError(f"prompt_tokens={prompt_tokens}: the protected tokens are the whole prompt. Give longer ones.")
        slope = (many - few) / (_TRIED[1] - _TRIED[0])
        share = _TRIED[0] + (save - few) / slope
        if share > _MOST:
            most = few + slope * (_MOST - _TRIED[0])
            work = f"{most:.2f} of this model's work in a prompt of {prompt_tokens} tokens"
            instead = "Ask less, or open the window earlier: window=(0.1, 0.8)"
            raise ConfigError(f"save={save:g}: halting saves at most {work}. {instead}.")
        return halting(max(0.0, share))

    @property
    def chooses_causally(self) -> bool:  # type: ignore[override]
        return self.rule == "threshold"

    def compared(self) -> list[tuple[Signal, Thresholds | None]]:
        return [] if self.rule == "capacity" else [(self._drift, self.tau_drift), (self._entropy, self.tau_entropy)]

    def bind(self, architecture: Architecture) -> None:
        super().bind(architecture)
        self._entropy, self._signal = self._entropy.bound(architecture), self._signal.bound(architecture)
        if self.rule == "capacity":
            self._halted_shares = self.scheduled_shares(architecture.n_layers, self.schedule, self.halted_share, self.alpha)
            return
        given = [tau for tau in (self.tau_drift, self.tau_entropy) if tau is not None]
        self._unchecked = all(isinstance(tau, int | float) for tau in given)  # one number for all layers, of any model
        self._tau_drift = self.resolved("tau_drift", self.tau_drift, architecture, self._drift.key)
        self._tau_entropy_nats = self.resolved("tau_entropy", self.tau_entropy, architecture, self._entropy.key)
        if self._tau_entropy_nats is not None and not is_percentile(self.tau_entropy):
            self._tau_entropy_nats = [tau * UNITS[self.unit] for tau in self._tau_entropy_nats]

    def acts_at(self, layer: int) -> bool:
        once = self.rule == "capacity" and self.schedule == "one_shot"
        return layer == self.first_layer if once else super().acts_at(layer)

    def wants_attention(self, layer: int) -> bool:
        return self.rule == "capacity" and self._signal.needs_attention and self.acts_at(layer)

    def halts_oldest(self, layer: int) -> bool:
        return self.rule == "capacity" and isinstance(self._signal, Position)

    def halted_share_after(self, layer: int) -> float | None:
        return self._halted_shares[layer] if self.rule == "capacity" else None

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        if self.rule == "capacity":
            return fill_up(view, tokens, eligible, self._signal(view, tokens, eligible), self._halted_shares[view.layer])
        if self._tau_drift is not None:
            eligible = eligible & (self._drift(view, tokens, eligible) < self._tau_drift[view.layer])
        if self._tau_entropy_nats is not None:
            eligible = eligible & (self._entropy(view, tokens, eligible) < self._tau_entropy_nats[view.layer])
        # Elsewhere than on a CPU, looking costs a wait.
        if self._unchecked and view.layer == self.first_layer and eligible.device.type == "cpu":
            self._warn_if_all_halt(tokens, eligible)
        return eligible

    def _warn_if_all_halt(self, tokens: TokenState, halting: torch.Tensor) -> None:
        if (active := int(tokens.active.sum())) < _ENOUGH:
            return
        self._unchecked = False
        if bool(halting[tokens.active].all()):
            taus = {"tau_drift": self.tau_drift, "tau_entropy": self.tau_entropy}
            said = ", ".join(f"{name}={tau}" for name, tau in taus.items() if tau is not None)
            warnings.warn(
                f"Halting: all {active} tokens halt at once, after layer {self.first_layer}, the first that may halt: {said} is above "
                "everything this model does there, and what it says then is noise. Take thresholds of this model: "
                "Halting.from_preset(model, save=0.2), or a percentile such as tau_drift='p25' with a calibration.",
                HaltsEverything,
                stacklevel=2,
            )


_PAPER = {"rule": "threshold", "drift": "l2", "unit": "nats", "resume_layers": 0}
PRESETS: dict[str, dict[str, Any]] = {
    # B.2 and B.5: no halting before layer 5, of 30 as in G.2 and the figures
    "paper-b2": _PAPER | {"tau_drift": 0.045, "tau_entropy": 1.15, "unit": "bits", "window": (5 / 30, 1.0)},
    # G.2 gives no unit; entropies elsewhere in the paper use the natural logarithm
    "paper-g2": _PAPER | {"tau_drift": 1e-3, "tau_entropy": 1.15, "window": (0.2, 0.8)},
    # Figure 9 draws the drift alone
    "paper-fig9": _PAPER | {"tau_drift": 1.0, "tau_entropy": None, "window": (0.0, 1.0)},
}


def fill_up(view: LayerView, tokens: TokenState, eligible: torch.Tensor, scores: torch.Tensor, share: float) -> torch.Tensor:
    """The eligible tokens of lowest score, (B, M) bool, so many that `share` of each row's real tokens are out: halted before,
    merged into others, or halted now (or all eligible are)."""
    halted = view.n_tokens - tokens.active.sum(1, keepdim=True)
    return lowest(scores, eligible, share_of(view.n_tokens, share) - halted)
