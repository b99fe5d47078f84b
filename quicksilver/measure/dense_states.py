"""What the dense model's states say before anything is left out of them: what a lens reads, and whether the paper's bounds hold.

    logit lens    softmax(head(norm(h_t^ℓ)))                              the paper's, of a model that was not trained for it
    tuned lens    softmax(head([1, LN₀(h_t^ℓ)] · W_ℓ))                    maps fitted on calibration text (modules/fitted.py)

Does the entropy there say anything about the prediction at the end? A lens whose loss of the next token is above ln V knows less
than uniform, and its entropy is of noise. Does it say how much a state loses when rounded to b bits, ‖h − Quant_b(h)‖₂ (E.3, E.9)?

    halting       ‖h_t^L − h_t^ℓ‖₂ ≤ Σ_{j>ℓ} L_j · ε,  ε = ‖h_t^ℓ − h_t^{ℓ−1}‖₂                       (B.4, H, P)
    fusion        ‖F_ℓ(h_t) − F_ℓ(½(h_t + h_u))‖₂ ≤ L_ℓ · ½‖h_t − h_u‖₂                               (D.4)
    fusion, end   ‖h_t^L − h_T̃^L‖₂ ≤ Σ_{k≥ℓ} L_k · ‖h_t^ℓ − h_u^ℓ‖₂,  T̃ starting as ½(h_t + h_u)     (N)

The paper names no Lipschitz constant. L_j is measured here: how much layer j stretches a small change of one token's own state, all
others left as they are, in the direction in which it stretches most (power iteration), the largest over the tokens that are
followed. A few iterations find a little less than the constant. The same with L_j = 1, layers that stretch nothing, says what the constants add.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np

from quicksilver.measure.latency import shared_weight_copy
from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.measure.strata import Share, wilson
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import InnerShare, Positive, at_least

if TYPE_CHECKING:
    import torch

    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.architecture import Architecture

LOGIT_LENS, TUNED = "logit lens", "tuned lens"
ROUNDED = (2, 4, 8)
BY_ENTROPY = 0  # in the place of a width: each token's own
_DRAWS = 10_000
INEQUALITIES = ("halting", "fusion", "fusion, end")
CONSTANTS = ("measured", "one")
Sides: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True)
class Reading:
    """One lens after one layer.

    Attributes:
        layer: from 1; after the last one there is nothing to read.
        nats: loss of the next token, nats a token; entropy_nats: mean entropy.
        correlation: Pearson's r of a token's entropy here with its entropy at the end, with the ends of its 95% interval, bootstrap over windows.
    """

    lens: str
    layer: int
    nats: float
    entropy_nats: float
    correlation: float
    correlation_low: float
    correlation_high: float


@dataclass(frozen=True)
class Rounding:
    """States after one layer, rounded.

    Attributes:
        layer: from 1. bits: of every token, or `BY_ENTROPY`: the 30% of lowest entropy at 2 bits, the next 40% at 4, the rest at 8.
        error_l2: mean of ‖h − Quant_b(h)‖₂ over tokens, in units of the state.
        correlation: Pearson's r of that error with the token's entropy by the logit lens; with its ends as of a `Reading`.
    """

    layer: int
    bits: int
    error_l2: float
    correlation: float
    correlation_low: float
    correlation_high: float


@dataclass(frozen=True)
class LensesResult(Result):
    """Attributes:
    uniform_nats: loss of who knows nothing, ln V; final_nats: of the model itself; final_entropy_nats: mean entropy at the end.
    tokens: whose next one was predicted, in so many windows.
    no_tuned_because: why there is no tuned lens; None: there is one.
    """

    uniform_nats: float
    final_nats: float
    final_entropy_nats: float
    windows: int
    tokens: int
    readings: list[Reading]
    roundings: list[Rounding] = field(default_factory=list)
    no_tuned_because: str | None = None

    def line(self) -> str:
        best = {one.lens: one for one in sorted(self.readings, key=lambda one: one.correlation)}
        names = [name for name in (LOGIT_LENS, TUNED) if name in best]
        said = (f"{name} r {best[name].correlation:.2f} after layer {best[name].layer}" for name in names)
        return f"entropy against the end: {', '.join(said)}"


@dataclass
class Lenses(Measurement, share=6.0, of_dense="alone", recorded_as="quicksilver.measure.lenses.Lenses"):
    """Dense passes over the first windows, every layer read by each lens.

    Args:
        windows: how many, at least 8; an interval needs them.
        rounding: round the states as well, to 2, 4 and 8 bits in groups of values as `AdaptiveQuantization` has them.
    """

    windows: Annotated[int, at_least(8)] = 16
    rounding: bool = True

    reads = ("tuned_lens",)  # modules.fitted.TUNED_LENS, whose import would bring torch

    def run(self, bench: Bench) -> LensesResult:
        import torch

        from quicksilver.modules.fitted import lens_for
        from quicksilver.modules.quantization import AdaptiveQuantization
        from quicksilver.runtime.architecture import architecture_of
        from quicksilver.runtime.quantized.codes import quantize_dequantize

        model = shared_weight_copy(bench.model)
        arch = architecture_of(model)
        lens, why = None, None
        try:
            lens = lens_for(arch)
        except ConfigError as error:
            why = str(error)
        texts = bench.windows.ids[: self.windows].to(model.device)
        names = [LOGIT_LENS] if lens is None else [LOGIT_LENS, TUNED]
        layers, tokens = arch.n_layers - 1, texts.shape[1] - 1
        found = np.zeros((len(names), layers, 2, len(texts), tokens))  # loss and entropy, nats
        final = np.zeros((2, len(texts), tokens))
        errors = np.zeros((layers, len(ROUNDED), len(texts), tokens))
        with torch.no_grad():
            for number, ids in enumerate(texts):
                bench.progress(number / len(texts))
                output = model(ids[None], use_cache=False, output_hidden_states=True)
                final[:, number] = _read(output.logits[0, :-1], ids[1:])
                for layer, hidden in enumerate(output.hidden_states[1:-1]):
                    states = hidden[0, :-1]  # (N, D)
                    found[0, layer, :, number] = _read(arch.logits(states), ids[1:])
                    if lens is not None:
                        found[1, layer, :, number] = _read(arch.output_head(lens.head_input(arch, layer, states)), ids[1:])
                    for place, bits in enumerate(ROUNDED if self.rounding else ()):
                        lost = states.float() - quantize_dequantize(states.float(), bits, AdaptiveQuantization.group_size)
                        errors[layer, place, number] = lost.norm(dim=-1).cpu().double().numpy()
        readings = [
            Reading(name, layer + 1, float(loss.mean()), float(entropy.mean()), *correlation(entropy, final[1]))
            for name, by_layer in zip(names, found, strict=True)
            for layer, (loss, entropy) in enumerate(by_layer)
        ]
        roundings = []
        for layer in range(layers) if self.rounding else ():
            entropies, of = found[0, layer, 1], dict(zip(ROUNDED, errors[layer], strict=True))
            low, high = np.quantile(entropies, (0.3, 0.7))
            of[BY_ENTROPY] = np.where(entropies < low, of[2], np.where(entropies < high, of[4], of[8]))
            for bits, lost in of.items():
                roundings.append(Rounding(layer + 1, bits, float(lost.mean()), *correlation(entropies, lost)))
        nats, entropy = (float(one) for one in final.mean(axis=(1, 2)))
        uniform = math.log(int(arch.model.config.get_text_config().vocab_size))
        return LensesResult(uniform, nats, entropy, len(texts), final[0].size, readings, roundings, why)


def _read(logits: torch.Tensor, following: torch.Tensor) -> np.ndarray:
    """Loss of the following tokens (N,) and entropy of logits (N, V), nats: (2, N)."""
    import torch

    log_p = logits.float().log_softmax(-1)
    loss = -log_p.gather(1, following[:, None])[:, 0]
    return torch.stack([loss, -(log_p.exp() * log_p).sum(-1)]).cpu().double().numpy()


def correlation(here: np.ndarray, end: np.ndarray) -> tuple[float, float, float]:
    """Pearson's r of two arrays (windows, tokens) over all their entries, with the ends of its 95% interval: windows are drawn, as their tokens
    are alike. A constant has no correlation: 0."""
    from scipy.stats import bootstrap

    sums = np.stack([np.ones_like(here), here, end, here * here, end * end, here * end]).sum(-1)  # (6, windows)

    def r(*drawn: Any, axis: int = -1) -> Any:
        n, x, y, xx, yy, xy = (np.asarray(one).sum(axis) for one in drawn)
        spread = np.sqrt(np.maximum(xx / n - (x / n) ** 2, 0) * np.maximum(yy / n - (y / n) ** 2, 0))
        return np.where(spread > 0, (xy / n - x * y / n**2) / np.where(spread > 0, spread, 1.0), 0.0)

    middle = float(r(*sums))
    if len(here) < 2 or np.ptp(here) == 0 or np.ptp(end) == 0:
        return middle, middle, middle
    draw = np.random.default_rng(0)
    drawn = bootstrap(tuple(sums), r, paired=True, vectorized=True, n_resamples=_DRAWS, method="percentile", rng=draw)
    return middle, float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


# --- bounds ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """One inequality at one layer, with constants that are `measured` or `one`.

    Attributes:
        layer: ℓ, from 1.
        cases: tokens, or pairs of neighbours, that it was tested on.
        holds: share of them, with an interval clustered by window.
        bound_ratio: the bound over what it bounds, median; and the 5th and 95th percentile.
    """

    inequality: str
    constants: str
    layer: int
    cases: int
    holds: Share
    bound_ratio: float
    bound_ratio_low: float
    bound_ratio_high: float


@dataclass(frozen=True)
class BoundsResult(Result):
    """Attributes:
    gains: L_j by layer, unitless.
    held: every inequality at every layer that was asked for.
    """

    gains: list[float]
    held: list[Held]

    def line(self) -> str:
        shares = {
            name: [one.holds.value for one in self.held if (one.inequality, one.constants) == (name, "measured")]
            for name in INEQUALITIES
        }
        return "bounds hold at least: " + ", ".join(f"{name} {100 * min(share):.0f}%" for name, share in shares.items())

    def of(self, inequality: str, constants: str, layer: int) -> Held:
        """The inequality of that name and layer. Raises ConfigError: it was not asked for."""
        for one in self.held:
            if (one.inequality, one.constants, one.layer) == (inequality, constants, layer):
                return one
        layers = sorted({one.layer for one in self.held})
        raise ConfigError(f"{inequality!r} ({constants!r}) was not tested at layer {layer}: there are layers {layers}.")


@dataclass
class Bounds(Measurement, share=0.8, of_dense="alone", recorded_as="quicksilver.measure.bounds.Bounds"):
    """Dense states of a few windows, and passes of single layers in which one token's state is changed.

    Args:
        windows, tokens: how many windows, and how many tokens of each, from its beginning.
        followed: tokens of each window whose state is changed, spread evenly.
        iterations: of the power method.
        depths: fractions of the depth at which a token halts or is fused.
    """

    windows: Positive = 4
    tokens: Positive = 96
    followed: Positive = 8
    iterations: Positive = 3
    depths: list[InnerShare] = field(default_factory=lambda: [0.4, 0.5, 0.667])

    def check(self, setting: Setting) -> None:
        if not self.followed < self.tokens <= setting.window_tokens:
            raise ConfigError(
                f"tokens={self.tokens} is out of range: more than followed={self.followed}, at most the {setting.window_tokens} of a window."
            )
        if not self.depths:
            raise ConfigError("depths=[] names no depth: give fractions of the depth, between 0 and 1.")

    def run(self, bench: Bench) -> BoundsResult:
        import torch

        from quicksilver.modules.checks import layer_after
        from quicksilver.runtime.architecture import architecture_of

        model = shared_weight_copy(bench.model)
        arch = architecture_of(model)
        if arch.n_layers < 3:
            raise ConfigError(f"bounds needs a model of at least 3 layers, and this one has {arch.n_layers}.")
        layers = sorted({min(max(1, layer_after(depth, arch.n_layers)), arch.n_layers - 2) for depth in self.depths})
        texts = bench.windows.ids[: self.windows, : self.tokens].to(model.device)
        every, gains = [], torch.zeros(arch.n_layers)
        for done, ids in enumerate(texts):
            bench.progress(done / len(texts))
            every.append(_Window(model, arch, ids, self.followed))
            gains = torch.maximum(gains, torch.stack([every[-1].gain(layer, self.iterations) for layer in range(arch.n_layers)]))
        held: list[Held] = []
        bounded = zip(INEQUALITIES, (_Window.halting, _Window.fusion, _Window.fusion_to_the_end), strict=True)
        for layer, (name, sides) in itertools.product(layers, bounded):
            pairs = [sides(window, layer) for window in every]
            # After layer ℓ come the layers from ℓ + 1; the fused pair enters the next one.
            factors = gains[layer + 1 : layer + 2] if name == "fusion" else gains[layer + 1 :]
            for constants, factor in zip(CONSTANTS, (float(factors.sum()), float(len(factors))), strict=True):
                held.append(_one(name, constants, layer, pairs, factor))
        return BoundsResult(gains.tolist(), held)


def _one(name: str, constants: str, layer: int, each: list[Sides], factor: float) -> Held:
    error, unit = (np.concatenate([pair[side].double().cpu().numpy() for pair in each]) for side in (0, 1))
    window = np.repeat(np.arange(len(each)), [len(pair[0]) for pair in each])
    bound = factor * unit
    low, middle, high = (float(end) for end in np.percentile(bound / np.maximum(error, 1e-12), [5, 50, 95]))
    # Rounding of float32 in both sides: a bound that is met exactly holds.
    return Held(name, constants, layer + 1, len(error), wilson(bound >= error * (1 - 1e-5), window), middle, low, high)


class _Window:
    """The dense states of one text (N,) long, and its layers one by one."""

    def __init__(self, model: Any, arch: Architecture, ids: torch.Tensor, followed: int) -> None:
        import torch

        self.arch = arch
        # From the second token on: the first one sees no other, and is an attention sink.
        self.followed = torch.linspace(1, len(ids) - 1, followed, device=ids.device).round().long()
        self._rows = torch.arange(followed, device=ids.device)
        self.calls: list[Callable[[torch.Tensor], torch.Tensor]] = []
        states: list[torch.Tensor] = []

        def entering(layer: Any, args: tuple, kwargs: dict) -> None:
            hidden, *more = args if args else (kwargs["hidden_states"],)
            rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
            states.append(hidden.detach())
            self.calls.append(lambda other: layer(other, *more, **rest))

        with torch.no_grad(), ExitStack() as hooks:
            for layer in arch.layers:
                hooks.callback(layer.register_forward_pre_hook(entering, with_kwargs=True).remove)
            model(ids[None], use_cache=False, logits_to_keep=1)
        with torch.no_grad():
            states.append(self.calls[-1](states[-1]))
        self.states = [state[0].float() for state in states]  # (N, D), before the first layer and after each

    def layer(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """States of the followed tokens after `layer`, each changed alone: own (R, D), entering it -> (R, D)."""
        # (R, N, D): row r is the text with its followed token r changed
        texts = self.states[layer].expand(len(own), -1, -1).index_put((self._rows, self.followed), own)
        return self.calls[layer](texts)[self._rows, self.followed]

    def gain(self, layer: int, iterations: int) -> torch.Tensor:
        """The largest singular value of a token's own Jacobian, and the largest of those: a scalar."""
        import torch

        at = self.states[layer][self.followed]
        step = 1e-2 * at.norm(dim=-1, keepdim=True)
        direction = torch.randn(at.shape, generator=torch.Generator().manual_seed(layer)).to(at)
        stretched = at.new_zeros(len(at))
        with torch.enable_grad():
            point = at.clone().requires_grad_()
            reached = self.layer(layer, point)
        for number in range(iterations):
            direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-12)
            with torch.no_grad():
                moved = (self.layer(layer, at + step * direction) - self.layer(layer, at - step * direction)) / (2 * step)
            stretched = torch.maximum(stretched, moved.norm(dim=-1))
            if number + 1 < iterations:
                (direction,) = torch.autograd.grad(reached, point, moved, retain_graph=True)
        return stretched.max().cpu()

    # -- two sides of an inequality: what is bounded, and what the constants are multiplied with; (cases,) each ---------------------

    def halting(self, layer: int) -> Sides:
        """Of every token but the first, halted after `layer`."""
        after, before, last = self.states[layer + 1][1:], self.states[layer][1:], self.states[-1][1:]
        return (last - after).norm(dim=-1), (after - before).norm(dim=-1)

    def fusion(self, layer: int) -> Sides:
        """Of every followed token and the one before it, fused after `layer`, in the layer that follows."""
        own, mean, apart = self._pair(layer)
        return (self.layer(layer + 1, own) - self.layer(layer + 1, mean)).detach().norm(dim=-1), apart / 2

    def fusion_to_the_end(self, layer: int) -> Sides:
        """The same, in the last layer's states; what is not fused is as it is in the dense model."""
        _, carried, apart = self._pair(layer)
        for later in range(layer + 1, self.arch.n_layers):
            carried = self.layer(later, carried).detach()
        return (self.states[-1][self.followed] - carried).norm(dim=-1), apart

    def _pair(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States after `layer` of the followed tokens (R, D), means with the token before (R, D), and how far those are apart (R,)."""
        after = self.states[layer + 1]
        own, neighbour = after[self.followed], after[self.followed - 1]
        return own, (own + neighbour) / 2, (own - neighbour).norm(dim=-1)
