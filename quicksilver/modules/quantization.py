"""Adaptive Matryoshka Quantization: at how many bits a token is held from half depth on (paper 2.5, App. E, O, R.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch

from quicksilver.modules.calibration import Calibrated, Calibration, Thresholds, is_percentile
from quicksilver.modules.checks import Ends, TokenMask, check_known_ids, layer_to_act, marked
from quicksilver.modules.halting import UNITS
from quicksilver.modules.signals import Entropy, Random, Signal
from quicksilver.runtime import Architecture, ConfigError, LayerView, TokenPolicy, TokenState
from quicksilver.runtime.ledger import BETA, BETA_APP_J
from quicksilver.runtime.options import Count, Positive, Share, TokenIds, check_number, is_list
from quicksilver.runtime.quantized.codes import UNTOUCHED, WIDTHS
from quicksilver.runtime.quantized.linear import IntegerExecutor, SimulatedExecutor

BETAS = {"bits_over_16": BETA, "app_j": BETA_APP_J}


@dataclass(kw_only=True)
class AdaptiveQuantization(TokenPolicy, Calibrated):
    """Hold each token at 8, 4 or 2 bits by its entropy H at half depth (paper 2.5): its linear inputs and its K/V.

    H < tau_low: the least of three `widths`; H > tau_high: the greatest; between them, bounds included: the middle one. Of two
    widths, tokens above tau_high get the greater where that is 8 or 16 bits ("no 2-bit" in Table 3); of 2 and 4 bits, tokens
    below tau_low get 2. Codes are nested (`runtime.quantized.codes.encode`). Causal, unless entropies are normalised by `minmax`.

    Args:
        depth: fraction of the layers gone through when widths are decided (layer 15 of 30, G.4).
        widths: one to three of 2, 4, 8, 16 (16 = untouched), ascending.
        bits: one width for every token, whatever its entropy: the uniform rows of Table 3.
        mix: the null: widths at random, with these shares of the tokens, one a width. `mix_of` says what a run's was.
        seed: of `mix`; the draw is a hash of (seed, layer, slot, token id).
        source: entropy of what, as `signals.Entropy` has it (docs/conflicts.md #5): `logit_lens`, `tuned_lens`, `latent` or `histogram`.
        unit: of the thresholds where they are numbers and H is not normalised: nats or bits.
        normalisation: `none`; `log_vocab`: over its greatest value, the logarithm of the number of outcomes (App. O); `minmax`:
            between the least and the greatest H of the batch's tokens (E.1). With `minmax` a token's width depends on later
            tokens and on batch mates: not causal, so it acts in prompts only.
        tau_low, tau_high: a number, one a layer, or a percentile of `calibration` such as "p30". The paper has (1.0, 2.3),
            (0.3, 0.6) and (0.25, 0.65): docs/conflicts.md #18.
        calibration: a `Calibration` or the path of one; percentiles need it.
        protected_ids, protected_mask: tokens that get at least `protected_bits` (R.2: names, numbers, rare words), by id, or by
            slot: a bool tensor (S,) or (B, S).
        protected_bits: 8 (R.2) or 16.
        protect_first: so do the first tokens of a sequence, the attention sinks.
        reassign: decide again after every later layer (the paper's future work) instead of once.
        execution: `simulate`: float products of dequantised values, groups of `group_size`. `int8`: integer products, one scale a
            token; tokens of 16 bits in float. How a product was really done is in `kernel`.
        scope: `linear`: the inputs of every linear layer. `residual`: the hidden state once, when widths are decided
            (docs/conflicts.md #19); the paper's ledger charges widths all the same.
        weights: `float`: the model's own; `int8`: quantised tokens meet 8-bit weights, one scale an output channel; `token`: they
            meet the leading bits of those, as many as they have. None: float for `simulate`, int8 for `int8`.
        group_size: values that share a scale under `simulate`; None: all of a token's.
        kv: hold K/V at the token's width as well, packed in the cache.
        kv_group_size: values of a head that share a scale there.
        beta: what the paper's ledger charges a width: `bits_over_16`, or App. J's `app_j` (docs/conflicts.md #22).
        lookahead: act outside prompts too, although `minmax` looks ahead; every number it touches is marked.

    Raises:
        ConfigError: widths other than 2, 4, 8, 16; thresholds out of order; options that exclude one another.
    """

    depth: Share = 0.5
    widths: Annotated[Sequence[int], check_widths] = (2, 4, 8)
    bits: Annotated[int, check_width] | None = None
    mix: Sequence[float] | None = None
    seed: Count = 0
    source: Literal["logit_lens", "tuned_lens", "latent", "histogram"] = "logit_lens"
    unit: Literal["nats", "bits"] = "nats"
    normalisation: Literal["none", "log_vocab", "minmax"] = "none"
    tau_low: Thresholds = 1.0
    tau_high: Thresholds = 2.3
    calibration: Calibration | Path | str | None = None
    protected_ids: TokenIds = ()
    protected_mask: TokenMask = None
    protected_bits: int = 8
    protect_first: Count = 0
    reassign: bool = False
    execution: Literal["simulate", "int8"] = "simulate"
    scope: Literal["linear", "residual"] = "linear"
    weights: Literal["float", "int8", "token"] | None = None
    group_size: Positive | None = 32
    kv: bool = True
    kv_group_size: Positive = 32
    beta: Literal["bits_over_16", "app_j"] = "bits_over_16"
    lookahead: bool = False
    priority: ClassVar[int] = 40
    halts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix is not None:
            self.mix = _shares(self.mix, self.widths)
            if self.bits is not None:
                raise ConfigError(f"bits={self.bits} and mix={list(self.mix)} are mutually exclusive: remove one.")
        if self.protected_bits not in (8, 16):
            raise ConfigError(f"protected_bits={self.protected_bits!r} protects nothing: give 8 (R.2) or 16.")
        self._entropy = Entropy(self.source)
        self._check_thresholds()
        self._executor = self._make_executor()

    def _check_thresholds(self) -> None:
        if self.normalisation != "none" and self.unit != "nats":
            given = f"unit={self.unit!r} has no effect with normalisation={self.normalisation!r}"
            raise ConfigError(f"{given}: thresholds are shares then.")
        for name, tau in (("tau_low", self.tau_low), ("tau_high", self.tau_high)):
            if is_percentile(tau) and self.normalisation == "minmax":
                raise ConfigError(f"{name}={tau!r}: normalisation='minmax' scales each batch anew: give a number.")
        if not any(isinstance(tau, (str, Sequence)) for tau in (self.tau_low, self.tau_high)):
            _in_order([self.tau_low], [self.tau_high])  # type: ignore[list-item]

    def _make_executor(self) -> SimulatedExecutor:
        integers = self.execution == "int8"
        weights = self.weights or ("int8" if integers else "float")
        if integers and weights == "float":
            raise ConfigError("execution='int8' multiplies integers: give weights='int8' or 'token', or execution='simulate'.")
        if self.scope == "residual" and (integers or weights != "float"):
            given = f"execution={self.execution!r}, weights={weights!r}"
            raise ConfigError(f"scope='residual' has nothing to multiply with {given}: give scope='linear'.")
        return (IntegerExecutor if integers else SimulatedExecutor)(
            scope=self.scope, weights=weights, group_size=self.group_size, kv=self.kv, kv_group_size=self.kv_group_size,
            beta=BETAS[self.beta],
        )  # fmt: skip

    @property
    def rule(self) -> Literal["uniform", "random", "entropy"]:
        """How widths are given: by `bits`, by `mix`, else by entropy."""
        return "uniform" if self.bits is not None else "random" if self.mix is not None else "entropy"

    @property
    def causal(self) -> bool:
        return self.rule != "entropy" or self.normalisation != "minmax"

    @property
    def precision(self) -> SimulatedExecutor:
        return self._executor

    def compared(self) -> list[tuple[Signal, Thresholds]]:
        return [(self._entropy, tau) for tau in (self.tau_low, self.tau_high) if self.rule == "entropy"]

    def bind(self, architecture: Architecture) -> None:
        self._entropy = self._entropy.bound(architecture)
        check_known_ids("protected_ids", self.protected_ids, architecture.vocab_size)
        self.first_layer = layer_to_act("depth", self.depth, architecture.n_layers, "hold tokens")
        self._executor.forget()
        if self.rule != "entropy":
            return
        self._divisor = UNITS[self.unit]  # nats to what the thresholds are in
        if self.normalisation == "log_vocab":
            outcomes = {"histogram": self._entropy.bins, "latent": architecture.width}
            self._divisor = math.log(outcomes.get(self.source, architecture.vocab_size))

        def resolve(name: str, tau: Thresholds) -> list[float]:
            values = self.resolved(name, tau, architecture, self._entropy.key) or []
            return [value / self._divisor for value in values] if is_percentile(tau) else values

        self._tau_low, self._tau_high = resolve("tau_low", self.tau_low), resolve("tau_high", self.tau_high)
        _in_order(self._tau_low, self._tau_high)

    def acts_at(self, layer: int) -> bool:
        return layer >= self.first_layer if self.reassign else layer == self.first_layer

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        assigned = self._assigned(view, tokens)
        possible = set(self.widths) if self.bits is None else {self.bits}
        if self.protect_first or self.protected_ids or self.protected_mask is not None:
            protected = marked(view, "protected", self.protected_ids, self.protected_mask, Ends(self.protect_first))
            assigned = torch.where(protected, assigned.clamp(min=self.protected_bits), assigned)
            possible.add(self.protected_bits)
        for width in sorted(possible):
            if width != UNTOUCHED or view.layer > self.first_layer:  # before the first decision every token is untouched
                tokens.set_bits(assigned == width, width)

    def _assigned(self, view: LayerView, tokens: TokenState) -> torch.Tensor:
        """The width of each token, (B, M) uint8; of inactive ones anything."""
        if self.bits is not None:
            return torch.full_like(view.slots, self.bits, dtype=torch.uint8)
        widths = torch.tensor(self.widths, dtype=torch.uint8, device=view.slots.device)
        if self.mix is not None:
            draw = Random(self.seed)(view, tokens)
            bounds = torch.tensor(self.mix, device=draw.device).cumsum(0)[:-1]
            return widths[torch.bucketize(draw, bounds, right=True)]
        entropy = self._entropy(view, tokens) / self._divisor
        if self.normalisation == "minmax":
            low = entropy.amin()
            span = entropy.masked_fill(~tokens.active, -math.inf).amax() - low
            # One token alone has neither a least nor a greatest: it keeps most.
            entropy = torch.where(span > 0, (entropy - low) / span, 1.0)
        above_low, above_high = (entropy >= self._tau_low[view.layer]).long(), (entropy > self._tau_high[view.layer]).long()
        if len(self.widths) == 3:
            return widths[above_low + above_high]
        return widths[(above_high if self.widths[-1] >= 8 else above_low).clamp(max=len(self.widths) - 1)]


def check_width(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is one of `WIDTHS`."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in WIDTHS:
        raise ConfigError(f"{name}={value!r} is not one of 2, 4, 8, 16 (16 = untouched).")


def check_widths(name: str, value: object) -> tuple[int, ...]:
    """One to three widths, ascending; raises ConfigError."""
    if not is_list(value) or not 1 <= len(value) <= 3:
        raise ConfigError(f"{name}={value!r} must be one to three of 2, 4, 8, 16, such as [2, 4, 8].")
    for i, width in enumerate(value):
        check_width(f"{name}[{i}]", width)
    if list(value) != sorted(set(value)):
        raise ConfigError(f"{name}={list(value)!r} must ascend, such as {sorted(set(value))}.")
    return tuple(value)


def _shares(value: object, widths: Sequence[int]) -> tuple[float, ...]:
    if not is_list(value) or len(value) != len(widths):
        raise ConfigError(f"mix={value!r} must have one share for each of widths={list(widths)}.")
    shares = tuple(check_number(f"mix[{i}]", share, 0.0, 1.0) for i, share in enumerate(value))
    if not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise ConfigError(f"mix={list(shares)} adds up to {sum(shares):g}, not to 1.")
    return shares


def _in_order(low: Sequence[float], high: Sequence[float]) -> None:
    for layer, (a, b) in enumerate(zip(low, high, strict=True)):
        if a > b:
            where = f" at layer {layer}" if len(low) > 1 else ""
            raise ConfigError(f"tau_low={a:g} is above tau_high={b:g}{where}: swap them, or make them equal for no middle width.")
