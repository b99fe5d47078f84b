"""Do the paper's Lipschitz bounds hold on real states, and how loose are they (B.4, D.4, H, N)?

    halting       ‖h_t^L − h_t^ℓ‖₂ ≤ Σ_{j>ℓ} L_j · ε,  ε = ‖h_t^ℓ − h_t^{ℓ−1}‖₂                       (B.4, H, P)
    fusion        ‖F_ℓ(h_t) − F_ℓ(½(h_t + h_u))‖₂ ≤ L_ℓ · ½‖h_t − h_u‖₂                               (D.4)
    fusion, end   ‖h_t^L − h_T̃^L‖₂ ≤ Σ_{k≥ℓ} L_k · ‖h_t^ℓ − h_u^ℓ‖₂,  T̃ starting as ½(h_t + h_u)     (N)

The paper names no constant. L_j is measured here: how much layer j stretches a small change of one token's own state, all others left as they
are, in the direction in which it stretches most (power iteration), the largest over the tokens that are followed. A few iterations find a
little less than the constant. The same with L_j = 1, layers that stretch nothing, says what the constants add.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.measure.strata import Share, wilson
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import InnerShare, Positive

if TYPE_CHECKING:
    import torch

    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.architecture import Architecture

Sides: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
INEQUALITIES = ("halting", "fusion", "fusion, end")
CONSTANTS = ("measured", "one")


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
        each = ", ".join(
            f"{name} {100 * min(one.holds.value for one in self.held if (one.inequality, one.constants) == (name, 'measured')):.0f}%"
            for name in INEQUALITIES
        )
        return f"bounds hold at least: {each}"

    def of(self, inequality: str, constants: str, layer: int) -> Held:
        """The inequality of that name and layer.

        Raises:
            ConfigError: it was not asked for.
        """
        for one in self.held:
            if (one.inequality, one.constants, one.layer) == (inequality, constants, layer):
                return one
        layers = sorted({one.layer for one in self.held})
        raise ConfigError(f"{inequality!r} ({constants!r}) was not tested at layer {layer}: there are layers {layers}.")


@dataclass
class Bounds(Measurement):
    """Dense states of a few windows, and passes of single layers in which one token's state is changed.

    Args:
        windows: how many.
        tokens: how many of each, from its beginning.
        followed: tokens of each window whose state is changed, spread evenly.
        iterations: of the power method.
        depths: fractions of the depth at which a token halts or is fused.
    """

    windows: Positive = 4
    tokens: Positive = 96
    followed: Positive = 8
    iterations: Positive = 3
    depths: list[InnerShare] = field(default_factory=lambda: [0.4, 0.5, 0.667])

    share = 0.8
    of_dense = "alone"

    def check(self, setting: Setting) -> None:
        if not self.followed < self.tokens <= setting.window_tokens:
            raise ConfigError(
                f"tokens={self.tokens} is out of range: more than followed={self.followed}, at most the {setting.window_tokens} of a window."
            )
        if not self.depths:
            raise ConfigError("depths=[] names no depth: give fractions of the depth, between 0 and 1.")

    def run(self, bench: Bench) -> BoundsResult:
        import torch

        from quicksilver.measure.latency import shared_weight_copy
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
            window = _Window(model, arch, ids, self.followed)
            gains = torch.maximum(gains, torch.stack([window.gain(layer, self.iterations) for layer in range(arch.n_layers)]))
            every.append(window)
        held: list[Held] = []
        bounded = zip(INEQUALITIES, (_Window.halting, _Window.fusion, _Window.fusion_to_the_end), strict=True)
        for layer, (name, sides) in itertools.product(layers, bounded):
            pairs = [sides(window, layer) for window in every]
            # After layer ℓ come the layers from ℓ + 1; the fused pair enters the next one.
            factors = gains[layer + 1 : layer + 2] if name == "fusion" else gains[layer + 1 :]
            for constants, factor in zip(CONSTANTS, (float(factors.sum()), float(len(factors))), strict=True):
                held.append(_one(name, constants, layer, pairs, factor))
        return BoundsResult([float(gain) for gain in gains], held)


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
        # From the second token on: the first one sees nobody, and is an attention sink.
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
