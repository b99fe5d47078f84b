"""Signals of the dense model by word class: entropy over depth (E.4), attention to halted tokens (C.1), and what explains drift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from quicksilver.measure.words import SIGNALS_OF_WORDS, WORDS, Means, WordSignalsResult
from quicksilver.records.record import Record
from quicksilver.records.stats import bootstrap
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.figure import DASHES, MARKERS, PALETTE, Figure, panels, style

from .. import drawing as draw
from . import runs

READS = (
    *(f"{WORDS}:{column}" for column in ("window", "slot", "halt_layer")),
    f"{SIGNALS_OF_WORDS}:attention_received",
    f"{SIGNALS_OF_WORDS}:drift_relative",  # for notebook 4
)
Z = 1.96
DRAWN = ("determiner", "preposition", "conjunction", "pronoun", "auxiliary", "content")
TERMS = {"position": "position", "log frequency": "+ log frequency", "word start": "+ word start", "class": "+ class"}


def rows() -> list[Row]:
    """The paper's rule, whose halted tokens are followed; the signals are those of the dense model."""
    return runs.halting(runs.MAIN)


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Three pictures."""
    (record,) = runs.records(outcomes)
    found = record.measured("word_signals", WordSignalsResult)
    with style():
        drawing, axes = panels(1, 3, size=(10.5, 3.5))
        parts = [part for panel, axis in zip((_entropy, _attention, _drift), axes[0], strict=True) for part in panel(axis, found)]
    caption = (*_said(found), *runs.whose_tags(outcomes), *provenance.notes(outcomes))
    frame = pd.concat(parts, ignore_index=True)
    return Figure(name, "Signals of the dense model by word class", frame, drawing, caption)


def _by_layer(what: str, of: str, value: Any, **more: Any) -> pd.DataFrame:
    return pd.DataFrame({"what": what, "of": of, "layer": np.arange(1, len(value) + 1), "value": value, **more})


def _look(place: int) -> dict[str, Any]:
    return {"color": PALETTE[place], "linestyle": DASHES[place], "marker": MARKERS[place], "markersize": 2.5}


def _entropy(axis: Axes, found: WordSignalsResult) -> Iterator[pd.DataFrame]:
    for place, kind in enumerate(kind for kind in DRAWN if kind in found.entropy_nats):
        one = found.entropy_nats[kind]
        mean, error = np.array(one.mean), Z * np.array(one.error)
        part = _by_layer("entropy_nats", kind, mean, low=mean - error, high=mean + error)
        axis.plot(part["layer"], mean, label=kind, **_look(place))
        axis.fill_between(part["layer"], part["low"], part["high"], color=PALETTE[place], alpha=0.2, linewidth=0)
        yield part
    axis.set(title="Entropy of the logit lens", xlabel="layer", ylabel="nats")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6, ncols=2)


def _attention(axis: Axes, found: WordSignalsResult) -> Iterator[pd.DataFrame]:
    halted = found.attention
    axis.set(title=f"Attention to tokens halted by layer {halted.layer if halted else '-'}", xlabel="layer")
    if halted is None:
        return
    drawn = {"share of all attention": halted.mass_share, "÷ what others get at the same place": halted.against_position}
    for place, (label, got) in enumerate(drawn.items()):
        part = _by_layer(f"attention of halted, {label}", "halted", got)
        axis.plot(part["layer"], got, label=label, **_look(place))
        yield part
    draw.horizontal(axis, 1, linewidth=0.7)
    share = {"color": PALETTE[0], "linestyle": ":", "label": "their share of the tokens"}
    draw.horizontal(axis, halted.token_share, linewidth=0.7, **share)
    draw.vertical(axis, halted.layer, color="#8a8a8a", linewidth=0.7, linestyle="--")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6, loc="lower right")


def _drift(axis: Axes, found: WordSignalsResult) -> Iterator[pd.DataFrame]:
    below = np.zeros(len(found.drift_explained["class"]))
    for colour, (term, label) in zip((0, 3, 6, 1), TERMS.items(), strict=True):
        height = np.array(found.drift_explained[term])
        part = _by_layer("drift_explained", label, height)
        axis.bar(part["layer"], height - below, bottom=below, color=PALETTE[colour], width=0.8, label=label)
        yield part
        below = height
    axis.set(title="Variance of log relative drift explained", xlabel="layer", ylabel="R²", ylim=(0, 1.25))
    axis.legend(fontsize=6, ncols=2, loc="upper center")


def _said(found: WordSignalsResult) -> tuple[str, ...]:
    function, content = found.entropy_nats["function"], found.entropy_nats["content"]
    explained = found.drift_explained
    added = np.array(explained["class"]) - np.array(explained["word start"])
    strongest = int(np.argmax(explained["position"]))
    lines = [
        f"Bands: 95% intervals clustered by sentence; {found.counted.tokens} tokens of {found.counted.sentences} sentences. Entropy from half of "
        f"the depth to the last layer that is looked at: function words {_change(function)}, content words {_change(content)}; the paper says that it collapses for function words.",
        f"Drift: position alone explains up to {explained['position'][strongest]:.2f} (layer {strongest + 1}); class adds {added.min():.3f} to {added.max():.3f}.",
    ]
    if found.attention is not None:
        half, last = found.attention.layer - 1, -1
        ratio = found.attention.against_position
        lines.append(
            f"Attention to halted tokens over that of others at the same place: {ratio[half]:.2f} in layer {half + 1}, {ratio[last]:.2f} in the last that "
            "is looked at; the paper says that it decays."
        )
    return tuple(lines)


def _change(one: Means) -> str:
    change = _deepened(one)
    return f"{one.mean[_half(one)]:.2f} → {one.mean[-1]:.2f} nats ({change.value:+.2f} [{change.low:+.2f} {change.high:+.2f}])"


def _half(one: Means) -> int:
    return len(one.mean) // 2


def _deepened(one: Means) -> Estimate:
    """Mean entropy in the last layer that is looked at, less that at half of the depth. As if the two were of different sentences, which is
    wider than they are."""
    change, error = one.mean[-1] - one.mean[_half(one)], float(np.hypot(one.error[-1], one.error[_half(one)]))
    return Estimate(change, change - Z * error, change + Z * error)


# --- claims -----------------------------------------------------------------------------------------------------------------------


def _answer(words: str) -> AnsweredBy:
    def of(record: Record) -> Estimate:
        return _deepened(record.measured("word_signals", WordSignalsResult).entropy_nats[words])

    note = f"{words} words, logit lens of the dense model, last layer that is looked at, less half of the depth"
    return AnsweredBy(runs.HALTING, runs.MAIN, of_record=of, note=note)


def _decay(record: Record) -> Estimate | None:
    """What halted tokens get over what others get at the same place: mean of the layers after they halted, over that of the layer by which they
    had; bootstrap over windows."""
    found = record.measured("word_signals", WordSignalsResult).attention
    if found is None:
        return None
    received = record.arrays(SIGNALS_OF_WORDS)["attention_received"].astype(float)
    tokens = pd.read_parquet(record.path / WORDS)
    tokens = tokens[(tokens["halt_layer"] <= found.layer) & (tokens["window"] < received.shape[1])]
    at_place, half = received.mean(1), found.layer - 1
    window, slot = tokens["window"].to_numpy(), tokens["slot"].to_numpy()
    of_tokens = (
        *(received[half + 1 :, window, slot].mean(0), at_place[half + 1 :, slot].mean(0)),
        *(received[half, window, slot], at_place[half, slot]),
    )
    sums = [np.bincount(window, weights=values, minlength=received.shape[1]) for values in of_tokens]
    return Estimate.of(bootstrap(lambda a, b, c, d: (a.sum(-1) / b.sum(-1)) / (c.sum(-1) / d.sum(-1)), *sums))


_KEPT = "over what others get at the same place, in the dense model: layers after half of the depth"
ANSWERS = {
    "e4.collapse.entropy_change_nats": _answer("function"),
    "o.entropy.entropy_change_nats": tuple(_answer(words) for words in ("function", "content")),
    "c1.decay.attention_kept_ratio": AnsweredBy(runs.HALTING, runs.MAIN, of_record=_decay, note=_KEPT),
}
