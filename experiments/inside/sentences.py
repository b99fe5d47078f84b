"""What artefacts share that look inside a text: their runs, their texts, how a token is labelled, what a caption must say.

Five runs serve all of them. Their thresholds are calibrated percentiles, higher than those of the tables, so that a sentence of few
tokens has something to show; every caption says so, and what it costs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import pandas as pd

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
# Words of the sentence of Table 5 that must halt, and words that must not.
_OVERRIDDEN = ("modules.halting.forced_ids=[and,to,by]", "modules.halting.full_ids=[token,cache]")
_STEPS = ("modules.token_fusion.fused_share=0.5", "modules.token_fusion.every=2")
_ALL = ("halting", "kv_skipping", "token_fusion", "adaptive_quantization")


def _run(key: str, technique: str, protocol: str, modules: tuple[str, ...], *overrides: str) -> Row:
    return Row("", "", key, technique, (f"protocol={protocol}", f"modules=[{','.join(modules)}]", *overrides), modules)


RUNS = {
    run.key: run
    for run in (
        _run("halting", "Token halting", "all", ("halting",), *_HALTING, "measure=signals"),
        _run("overridden", "Token halting with forced words", "all", ("halting",), *_HALTING, "measure=signals", *_OVERRIDDEN),
        # 30, 40 and 30% of the calibrating part's tokens at 2, 4 and 8 bits.
        _run("quantization", "Adaptive quantization", "all", _ALL[3:], *_QUANTIZATION, "measure=signals"),
        # Half of each prompt in several steps: a setting that shows the mechanism, not one that pays.
        _run("fusing", "Token fusion in steps", "continuation", _ALL[2:3], *_FUSION, *_STEPS, "measure=signals"),
        _run("all four", "All four mechanisms", "continuation", _ALL, *_HALTING, *_FUSION, *_QUANTIZATION, "measure=signals"),
    )
}


def runs(*keys: str) -> Callable[[], list[Row]]:
    """What returns these of `RUNS`."""
    return lambda: [RUNS[key] for key in keys]


def read_of_windows(*arrays: str) -> tuple[str, ...]:
    """What an artefact reads that looks at the windows as well: what became of their tokens, and these arrays, `run.…` and `dense.…`."""
    return (*READ, *(f"{SIGNALS}:[!012].{name}" for name in (*_STATES, *arrays)))


def measured(outcomes: Sequence[Outcome], key: str) -> Record:
    """The record of that row.
    Raises ConfigError: the run failed, so there is nothing to draw."""
    outcome = next(outcome for outcome in outcomes if outcome.row.key == key)
    if outcome.record is None:
        raise ConfigError(f"the run {key!r} has no record ({outcome.reason}), and there is nothing to draw without it")
    return outcome.record


def layers(signals: pd.DataFrame, column: str) -> pd.DataFrame:
    """One signal as a table: a row a layer (0: before the first), a column a token."""
    return signals.pivot(index="layer", columns="slot", values=column)


def in_layers(signals: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """A copy of `layer`, `slot`, `token` and these columns, from layer 1 on."""
    return signals.loc[signals["layer"] > 0, ["layer", "slot", "token", *columns]].copy()


def labels(tokens: Iterable[str]) -> list[str]:
    """Tokens as one sees them: white space made visible, dollars that are no formula."""
    shown = {"": "␣", "\n": "⏎", "\n\n": "⏎⏎"}
    stripped = (token.strip(" ") for token in tokens)
    return [shown.get(token, re.sub(r"\s", "⏎", token)).replace("$", r"\$").replace("�", "·") for token in stripped]


def halted_after(active: pd.DataFrame) -> pd.Series:
    """The last layer (from 1) each token went through before it first sat one out, by slot; the number of layers if it never did."""
    idle = ~active.astype(bool)
    return (idle.idxmax() - 1).where(idle.any(), active.index[-1])


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
    shown: tuple[str, ...] = ()
    if text is not None:
        found = record.texts[text]
        said = f"{_PLACES[text]}, “{''.join(found.tokens).strip()}”" if text < WINDOW else f"{found.name} of the run's text"
        more = "of this model, given as a prompt of its own" if text < WINDOW else "from its beginning"
        shown = (f"Shown: {said}, {len(found.tokens)} tokens {more}.",)
    return (*sentences, *shown, *_thresholds(record), *map(_cost, outcomes), *notes(outcomes))


def _thresholds(record: Record) -> tuple[str, ...]:
    entries = ((f"{name}.{key}", value) for name, entry in record.config["modules"].items() for key, value in entry.items())
    percentiles = [f"{key}={value}" for key, value in entries if isinstance(value, str) and re.fullmatch(r"p\d+", value)]
    if not percentiles:
        return ()
    assert record.calibration is not None  # of percentiles
    return (
        f"Thresholds: {', '.join(percentiles)}, percentiles of the signal in each layer, over {record.calibration.windows} windows of the "
        "dataset's calibrating part. The tables use other percentiles.",
    )


def _cost(outcome: Outcome) -> str:
    assert outcome.record is not None
    assert outcome.dense is not None
    change = paired_records(outcome.record, outcome.dense)
    ppl, low, high = map(signed, (change.relative_pct, change.relative_pct_low, change.relative_pct_high))
    prefix, of = ("prompt_", "prompts’ ") if outcome.record.flops("prompt_nominal") is not None else ("", "")
    nominal, paper = (f"{outcome.record.flops_saved_pct(f'{prefix}{ledger}'):.0f}%" for ledger in ("nominal", "paper"))
    technique = outcome.row.technique[:1].lower() + outcome.row.technique[1:]
    return (
        f"With these settings, {technique}: perplexity of the run's text {ppl}% [{low} {high}]; {of}FLOPs saved {nominal} in the nominal and "
        f"{paper} in the paper's ledger."
    )
