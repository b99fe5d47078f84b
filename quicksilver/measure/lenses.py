"""What a lens reads in the dense model's middle layers: does the entropy there say anything about the prediction at the end?

    logit lens    softmax(head(norm(h_t^ℓ)))                              the paper's, of a model that was not trained for it
    tuned lens    softmax(head([1, LN₀(h_t^ℓ)] · W_ℓ))                    maps fitted on calibration text (modules/fitted.py)

A lens whose loss of the next token is above ln V knows less than uniform, and its entropy is of noise.

And does that entropy say how much a state loses when it is rounded to b bits, ‖h − Quant_b(h)‖₂ (paper E.3, E.9)?
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from quicksilver.measure.latency import shared_weight_copy
from quicksilver.measure.measurement import Measurement, Result
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import at_least

if TYPE_CHECKING:
    import torch

    from quicksilver.measure.bench import Bench

LOGIT_LENS, TUNED = "logit lens", "tuned lens"
ROUNDED = (2, 4, 8)
BY_ENTROPY = 0  # in the place of a width: each token's own
_DRAWS = 10_000


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
        best = {one.lens: max(self.readings, key=lambda it: it.correlation * (it.lens == one.lens)) for one in self.readings}
        return "entropy against the end: " + ", ".join(
            f"{name} r {one.correlation:.2f} after layer {one.layer}" for name, one in best.items()
        )


@dataclass
class Lenses(Measurement):
    """Dense passes over the first windows, every layer read by each lens.

    Args:
        windows: how many, at least 8; an interval needs them.
        rounding: round the states as well, to 2, 4 and 8 bits in groups of values as `AdaptiveQuantization` has them.
    """

    windows: Annotated[int, at_least(8)] = 16
    rounding: bool = True

    share = 6.0
    of_dense = "alone"
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
        rounded = range(layers) if self.rounding else ()
        roundings = [one for layer in rounded for one in _roundings(layer, found[0, layer, 1], errors[layer])]
        nats, entropy = (float(one) for one in final.mean(axis=(1, 2)))
        uniform = math.log(int(arch.model.config.get_text_config().vocab_size))
        return LensesResult(uniform, nats, entropy, len(texts), final[0].size, readings, roundings, why)


def _roundings(layer: int, entropies: np.ndarray, errors: np.ndarray) -> Iterator[Rounding]:
    """entropies (windows, N), errors (widths, windows, N)."""
    of = dict(zip(ROUNDED, errors, strict=True))
    low, high = np.quantile(entropies, (0.3, 0.7))
    of[BY_ENTROPY] = np.where(entropies < low, of[2], np.where(entropies < high, of[4], of[8]))
    for bits, lost in of.items():
        yield Rounding(layer + 1, bits, float(lost.mean()), *correlation(entropies, lost))


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
    ends = bootstrap(
        tuple(sums), r, paired=True, vectorized=True, n_resamples=_DRAWS, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return middle, float(ends.low), float(ends.high)
