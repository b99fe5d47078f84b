"""Do the dense model's signals follow the class of a word? Entropy by class and layer (paper E.4), attention that halted tokens still get
(C.1), and what explains drift: position, frequency, the place in the word, or the class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.measure.words import Counted, check_annotated
from quicksilver.runtime.options import Count, InnerShare

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.pass_state import TokenState
    from quicksilver.runtime.view import LayerView

SIGNALS_OF_WORDS = "word_signals.safetensors"


@dataclass(frozen=True)
class Means:
    """Means by layer with their standard errors, clustered by sentence."""

    tokens: int
    mean: list[float]
    error: list[float]


@dataclass(frozen=True)
class AttentionOfHalted:
    """What tokens that a run has halted by `layer` receive in the dense model; lists are by layer.

    Attributes:
        layer: from 1.
        tokens: halted ones; token_share: of all tokens that are part of a word.
        mass_share: of the attention that all of these receive, that of the halted ones.
        against_position: the same over what tokens at the same slots receive on average; 1 is no different from others there.
    """

    layer: int
    tokens: int
    token_share: float
    mass_share: list[float]
    against_position: list[float]


@dataclass(frozen=True)
class WordSignalsResult(Result):
    """Signals of the dense model after each layer but the last, which nothing is decided after; classes are ours.

    Attributes:
        counted: what was looked at.
        entropy_nats: of the logit lens, by class (and `function`, `all`).
        attention: None where nothing had halted.
        drift_explained: share of the variance of log relative drift, by the terms of a linear model, added one after the other; `class`
            stands alone as well, as `class alone`.
    """

    counted: Counted
    entropy_nats: dict[str, Means]
    attention: AttentionOfHalted | None
    drift_explained: dict[str, list[float]]

    def line(self) -> str:
        best = max(range(len(self.drift_explained["class"])), key=lambda layer: self.drift_explained["word start"][layer])
        added = self.drift_explained["class"][best] - self.drift_explained["word start"][best]
        return f"log drift after layer {best + 1}: R² {self.drift_explained['class'][best]:.2f}, of which class adds {added:.3f}"


@dataclass
class WordSignals(Measurement):
    """Watch the dense model over a few windows. Writes word_signals.safetensors: `drift_relative`, `entropy_nats` and `attention_received`,
    (L-1, W, P) float16 each, rows and columns as `window` and `slot` of words.parquet.

    Args:
        windows: so many of the run's; 0: all.
        depth: whoever has halted after this fraction of the depth is "halted".
    """

    windows: Count = 32
    depth: InnerShare = 0.5

    share = 0.1
    of_dense = "never"

    def check(self, setting: Setting) -> None:
        check_annotated(setting)

    def run(self, bench: Bench) -> WordSignalsResult:
        import numpy as np

        from quicksilver.data.annotation import CLASSES, FUNCTION
        from quicksilver.measure.observed import observed
        from quicksilver.measure.strata import r_squared
        from quicksilver.measure.word_classes import halt_layers
        from quicksilver.measure.words import covariates, decided_tokens, token_frame
        from quicksilver.modules.checks import layer_after

        windows, width = min(self.windows or len(bench.windows.ids), len(bench.windows.ids)), decided_tokens(bench)
        tokens, counted = token_frame(bench, windows)
        seen = observed(bench, windows, width, _look, attention=True)
        bench.files[SIGNALS_OF_WORDS] = lambda path: _save(seen, path)
        at = (slice(None), tokens["window"].to_numpy(), tokens["slot"].to_numpy())
        entropy, drift, received = (
            seen[name].numpy()[at].astype(float) for name in ("entropy_nats", "drift_relative", "attention_received")
        )
        label, sentence = tokens["class"].to_numpy(), tokens["sentence"].to_numpy()
        groups = {name: label == name for name in CLASSES} | {"function": np.isin(label, FUNCTION), "all": label != ""}
        entropies = {name: _means(entropy[:, one], sentence[one]) for name, one in groups.items() if one.any()}
        columns = covariates(tokens)
        names = list(columns)
        nested = {name: [columns[one] for one in names[: i + 1]] for i, name in enumerate(names)} | {
            "class alone": [columns["class"]]
        }
        log_drift = np.log(np.maximum(drift, 1e-12))
        explained = {name: [r_squared(one, chosen) for one in log_drift] for name, chosen in nested.items()}
        assert bench.trace is not None  # quality is measured first
        layer = layer_after(self.depth, bench.trace.n_layers)
        halted = halt_layers(bench.trace, width)[at[1], at[2]] <= layer
        attention = None
        if 0 < halted.sum() < len(halted):
            at_slot = seen["attention_received"].numpy().mean(1)[:, tokens["slot"]]
            attention = AttentionOfHalted(
                layer + 1, int(halted.sum()), float(halted.mean()), (received[:, halted].sum(1) / received.sum(1)).tolist(),
                (received[:, halted].sum(1) / at_slot[:, halted].sum(1)).tolist(),
            )  # fmt: skip
        return WordSignalsResult(counted, entropies, attention, explained)


def _look(view: LayerView, tokens: TokenState) -> dict[str, torch.Tensor]:
    from quicksilver.modules.signals import AttentionReceived, Drift

    everyone = tokens.active | tokens.newly_halted
    return {
        "drift_relative": Drift("relative").score(view, tokens, everyone),
        "entropy_nats": view.logit_entropy_nats(everyone).view(everyone.shape),
        "attention_received": AttentionReceived(last_queries=None).score(view, tokens, everyone),
    }


def _means(values: np.ndarray, clusters: np.ndarray) -> Means:
    """Of values (L', n)."""
    import numpy as np

    mean = values.mean(1)
    _, number = np.unique(clusters, return_inverse=True)
    sums = np.stack([np.bincount(number, weights=row) for row in values - mean[:, None]])
    count = sums.shape[1]
    error = np.sqrt((sums**2).sum(1) * count / max(1, count - 1)) / values.shape[1]
    return Means(values.shape[1], mean.tolist(), error.tolist())


def _save(arrays: dict[str, torch.Tensor], path: object) -> None:
    from safetensors.torch import save_file

    # Half precision: three digits of each, and small enough to be kept with the repository (records/keeping.py).
    save_file({name: value.half().contiguous() for name, value in arrays.items()}, str(path))
