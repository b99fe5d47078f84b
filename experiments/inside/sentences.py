"""What artefacts share that look inside a text: their runs, their texts, how a token is labelled, what a caption must say.

Four runs serve all of them. Their thresholds are calibrated percentiles, higher than those of the tables, so that a sentence of few
tokens has something to show; every caption says so, and what it costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from quicksilver.records.record import SIGNALS, Record
from quicksilver.records.stats import paired_records
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.provenance import notes
from quicksilver.report.table import signed
from quicksilver.runtime.errors import ConfigError

SENTENCE, FOX, NEGATION, WINDOW = range(4)  # texts of measure=signals, in its order; windows come last
READ = (f"{SIGNALS}:[012].*",)  # of the sentences all
_STATES = ("run.active", "run.kv", "run.bits", "run.carrier")
_PLACES = ("the sentence of Table 5", "the sentence of Figure 22", "the sentence of R.1")

_HALTING = ("modules.halting.tau_drift=p60", "modules.halting.tau_entropy=p60")
_FUSION = ("modules.token_fusion.rule=capacity", "modules.token_fusion.tau_fuse=null")
_QUANTIZATION = ("modules.adaptive_quantization.tau_low=p30", "modules.adaptive_quantization.tau_high=p70")
FORCED, FULL = ("and", "to", "by"), ("token", "cache")  # words of the sentence of Table 5


def halting() -> Row:
    """Token halting alone, every position decided causally."""
    return Row("", "", "halting", "Token halting", ("protocol=all", "modules=[halting]", *_HALTING, "measure=signals"))


def overridden() -> Row:
    """The same with words that must halt and words that must not."""
    overrides = (f"modules.halting.forced_ids=[{','.join(FORCED)}]", f"modules.halting.full_ids=[{','.join(FULL)}]")
    row = halting()
    return Row("", "", "overridden", "Token halting with forced words", (*row.overrides, *overrides))


def quantization() -> Row:
    """Adaptive quantization alone, 30, 40 and 30% of the calibrating part's tokens at 2, 4 and 8 bits."""
    overrides = ("protocol=all", "modules=[adaptive_quantization]", *_QUANTIZATION, "measure=signals")
    return Row("", "", "quantization", "Adaptive quantization", overrides, ("adaptive_quantization",))


def everything() -> Row:
    """All four mechanisms on a prompt."""
    names = ("halting", "kv_skipping", "token_fusion", "adaptive_quantization")
    overrides = ("protocol=continuation", f"modules=[{','.join(names)}]", *_HALTING, *_FUSION, *_QUANTIZATION, "measure=signals")
    return Row("", "", "all four", "All four mechanisms", overrides, names)


def read_of_windows(*arrays: str) -> tuple[str, ...]:
    """`READS` of a file that looks at the windows as well: what became of their tokens, and these arrays, `run.…` and `dense.…`."""
    return (*READ, *(f"{SIGNALS}:[!012].{name}" for name in (*_STATES, *arrays)))


def measured(outcomes: Sequence[Outcome], key: str) -> tuple[Outcome, Record]:
    """The outcome of that row and its record.

    Raises:
        ConfigError: the run failed, so there is nothing to draw.
    """
    outcome = next(outcome for outcome in outcomes if outcome.row.key == key)
    if outcome.record is None:
        raise ConfigError(f"the run {key!r} has no record ({outcome.reason}), and there is nothing to draw without it")
    return outcome, outcome.record


def layers(signals: pd.DataFrame, column: str) -> pd.DataFrame:
    """One signal as a table: a row a layer (0: before the first), a column a token."""
    return signals.pivot(index="layer", columns="slot", values=column)


def labels(tokens: Iterable[str]) -> list[str]:
    """Tokens as one sees them: white space made visible, dollars that are no formula."""
    shown = {"": "␣", "\n": "⏎", "\n\n": "⏎⏎"}
    return [
        shown.get(token.strip(" "), re.sub(r"\s", "⏎", token.strip(" "))).replace("$", r"\$").replace("�", "·")
        for token in tokens
    ]


def halted_after(active: pd.DataFrame) -> pd.Series:
    """The last layer (from 1) each token went through before it first sat one out, by slot; the number of layers if it never did."""
    idle = ~active.astype(bool)
    return (idle.idxmax() - 1).where(idle.any(), active.index[-1])


UNTOUCHED = "untouched"  # in the model's own dtype
_UNTOUCHED_BITS = 16  # as records write it, whatever the dtype is
# From dark to light: readable in grey.
HELD = {
    UNTOUCHED: "#14213d",
    "8 bits": "#1f7a8c",
    "4 bits": "#de8b22",
    "2 bits": "#f4de95",
    "halted": "#ffffff",
    "carried": "#bdbdbd",
}


def held(signals: pd.DataFrame) -> pd.Series:
    """How each token is held in each layer, one of `HELD`: its bits or untouched, or halted, or carried by a neighbour it was fused with."""
    state = signals["bits"].map(width).where(signals["active"], "halted")
    return state.where(signals["carrier"] == signals["slot"], "carried")


def width(bits: int) -> str:
    """`8 bits`, or `untouched`."""
    return UNTOUCHED if bits == _UNTOUCHED_BITS else f"{bits} bits"


def draw_held(axes: Axes, states: pd.DataFrame, **options: Any) -> None:
    """A picture of `HELD` states (rows, columns), with the options of `imshow`."""
    codes = {name: code for code, name in enumerate(HELD)}
    axes.imshow(
        states.replace(codes).to_numpy(dtype=float), cmap=ListedColormap(list(HELD.values())), vmin=-0.5, vmax=len(HELD) - 0.5, aspect="auto",
        interpolation="nearest", **options,
    )  # fmt: skip
    axes.grid(visible=False)


def held_legend(present: Iterable[str], dtype: str) -> list[Patch]:
    """Handles for a legend of the states that are there, in a model of `dtype`."""
    words = {UNTOUCHED: f"{dtype}, untouched", "halted": "halted: not computed", "carried": "carried by a neighbour"}
    there = set(present)
    return [
        Patch(facecolor=colour, edgecolor="#808080", linewidth=0.5, label=words.get(name, name))
        for name, colour in HELD.items()
        if name in there
    ]


def window(record: Record) -> tuple[int, int]:
    """First and last layer, from 1, after which a token may halt in that run."""
    entry, n_layers = record.config["modules"]["halting"], record.model.layers
    low, high = (layer_after(fraction, n_layers) for fraction in entry["window"])
    return low, min(high, n_layers - 1 - entry["resume_layers"])


def layer_after(fraction: float, n_layers: int) -> int:
    """The layer, from 1, after which that fraction of the depth has been gone through."""
    from quicksilver.modules.checks import layer_after as index_of_layer  # needs torch, which drawing does not

    return index_of_layer(fraction, n_layers) + 1


def caption(outcomes: Sequence[Outcome], text: int | None, *sentences: str) -> tuple[str, ...]:
    """What was shown, by which thresholds and at what cost; then model, data, protocol, execution, records."""
    record = next(outcome.record for outcome in outcomes if outcome.record is not None)
    shown = () if text is None else (_shown(record, text),)
    return (*sentences, *shown, *_thresholds(record), *map(_cost, outcomes), *notes(outcomes))


def _shown(record: Record, text: int) -> str:
    tokens = record.texts[text].tokens
    if text >= WINDOW:
        return f"Shown: {record.texts[text].name} of the run's text, {len(tokens)} tokens from its beginning."
    return (
        f"Shown: {_PLACES[text]}, “{''.join(tokens).strip()}”, {len(tokens)} tokens of this model, given as a prompt of its own."
    )


def _thresholds(record: Record) -> tuple[str, ...]:
    modules = record.config["modules"]
    percentiles = [
        f"{name}.{key}={value}"
        for name, entry in modules.items()
        for key, value in entry.items()
        if isinstance(value, str) and re.fullmatch(r"p\d+", value)
    ]
    if not percentiles:
        return ()
    assert record.calibration is not None  # of percentiles
    windows = record.calibration.windows
    return (
        f"Thresholds: {', '.join(percentiles)}, percentiles of the signal in each layer, over {windows} windows of the dataset's calibrating "
        "part. The tables use other percentiles.",
    )


def _cost(outcome: Outcome) -> str:
    assert outcome.record is not None
    assert outcome.dense is not None
    change = paired_records(outcome.record, outcome.dense)
    low, high = signed(change.relative_pct_low), signed(change.relative_pct_high)
    prefix = "prompt_" if outcome.record.flops("prompt_nominal") is not None else ""
    saved = [f"{outcome.record.flops_saved_pct(f'{prefix}{ledger}'):.0f}%" for ledger in ("nominal", "paper")]
    technique = outcome.row.technique[:1].lower() + outcome.row.technique[1:]
    return (
        f"With these settings {technique} changes the perplexity of the run's text by {signed(change.relative_pct)}% [{low} {high}] and saves "
        f"{saved[0]} of the {'prompts’ ' if prefix else ''}FLOPs in the nominal and {saved[1]} in the paper's ledger."
    )
