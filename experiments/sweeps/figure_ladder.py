"""Figure ladder: what 40% of a prompt's work costs by size of the model, which tokens leave by which signal, and the trend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter, SymmetricalLogLocator

from quicksilver.models.loading import EMBEDDED
from quicksilver.records.record import Record
from quicksilver.records.stats import Interval, bootstrap, mean
from quicksilver.report import comparison, sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import GREY, Figure, legend_below, letters, panels, style
from quicksilver.report.table import ENDS, interval_columns, signed
from quicksilver.runtime.reading import read_json

from .. import drawing as draw
from ..ablation.techniques import SETTINGS, options, row_of

# Model -> layers; then of 448 tokens, the fewest that save 40% of the prompt when they leave after a quarter of the layers, and the most last ones
# that may go on where all others are predicted from half depth on, and the fewest to cut from the prompt. A test asks the runtime whether they do.
DIALS = {
    "ladder-gpt2-1m": (12, 199, 29, 144),
    "ladder-gpt2-2m": (12, 208, 26, 152),
    "ladder-gpt2-4m": (16, 214, 24, 157),
    "ladder-gpt2-8m": (16, 221, 22, 163),
    "reference-gpt2": (16, 221, 22, 163),
    "reference-gpt2-seed43": (16, 221, 22, 163),
    "reference-llama": (16, 219, 54, 161),
}
LADDER, OTHERS = [*DIALS][:4], [*DIALS][4:]  # the others were trained longer, on other text: no rungs
LONGER = ("ladder-gpt2-8m", "reference-gpt2")  # one shape, trained on more tokens
SEEDS = ("reference-gpt2", "reference-gpt2-seed43")  # one recipe, trained twice
SAVES_PCT = 40.0
PROMPT_TOKENS = 448  # of protocol continuation
DROP_DEPTH, PREDICT_DEPTH = 0.25, 0.5  # whole numbers of layers where there are 12 or 16
PROTECT_FIRST = 4
PREDICTED, TRUNCATED, TREND = "predicted", "truncated", "trend"
TEXT = ("dataset=python-docs",)  # unless a person names another
ALWAYS = ("protocol=continuation", "measure=sweep", "dataset.windows=128", "dataset.calibration_windows=40")
SIGNALS = {"position": "Oldest", "attention": "Least attended", "drift": "Least drift (paper)", "random": "Random"}
COLUMNS = ["parameters", "layers", "trained_tokens", "beside", "beside_kl_nats", "beside_kl_nats_low", "beside_kl_nats_high"]
TECHNIQUES = {
    PREDICTED: "All predicted at half depth, none dropped",
    **SIGNALS,
    TRUNCATED: "Oldest, before the first layer (truncation)",
}


def is_there(model: str) -> bool:
    """Whether the package has this model's shape; of the largest rung it has no weights, and records alone."""
    return (EMBEDDED / model / "config.json").is_file()


def overrides(model: str, technique: str) -> tuple[str, ...]:
    """The modules of a technique, its dial set for this model."""
    layers, dropped, protected, cut = DIALS[model]
    if technique == TRUNCATED:
        return ("modules=[prompt_truncation]", *options("prompt_truncation", keep=f"{1 - cut / PROMPT_TOKENS:.6g}"))
    if technique == PREDICTED:
        ends = f"protect_first:{PROTECT_FIRST},protect_last:{protected}"
        schedule = f"{{drop_before:1,drop_share:0,predict_before:{round(PREDICT_DEPTH * layers)},{ends}}}"
        return ("modules=[fitted_prediction]", *options("fitted_prediction", save="null", schedule=schedule))
    module, *signal = SETTINGS[technique]
    dial = options("halting", window=f"[{DROP_DEPTH:g},0.8]", halted_share=f"{dropped / PROMPT_TOKENS:.6g}")
    return (f"modules=[{module}]", *signal, *dial)


def rows() -> list[Row]:
    """Dense and each technique on every model that is there."""
    found = []
    for model in filter(is_there, DIALS):
        always = (*ALWAYS, f"model={model}")
        found.append(replace(row_of(model, "", "dense", "Dense", "", *always), defaults=TEXT))
        # Of the largest rung there are no weights to make that record.
        mine = {key: title for key, title in TECHNIQUES.items() if key != TRUNCATED or model != LADDER[-1]}
        found += [Row(model, "", key, title, (*always, *overrides(model, key)), defaults=TEXT) for key, title in mine.items()]
    return found


def trained_tokens(model: str) -> Any:
    """How many tokens the model was trained on, as its training wrote."""
    return read_json(EMBEDDED / model / "training.json")["held_out"][-1]["tokens"]


# --- what is measured -------------------------------------------------------------------------------------------------------------
def measured(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """`comparison.frame`, then a row a trend.

    Added: `parameters`, `layers` and `trained_tokens` of the model. `beside`: in the row of a model's best signal the next best one, in that of
    prediction the best signal; `beside_kl_nats`: KL of that one minus KL of this, paired by window. In a row of panel `trend`:
    `kl_nats_per_doubling` of the number of parameters, over `sizes` models, `alike`: that saw as many tokens.
    """
    found, more = comparison.frame(outcomes), []
    for outcome in outcomes:
        record, row = outcome.record, outcome.row
        known: dict[str, Any] = {"trained_tokens": trained_tokens(row.panel)}
        if record is not None:
            known |= {"parameters": record.model.parameters, "layers": record.model.layers}
            mine = (one for one in outcomes if one.row.panel == row.panel and one.record is not None)
            signals = [one for one in mine if one.row.key in SIGNALS]
            signals.sort(key=lambda one: float(_kl(one.record).mean()))  # least KL first
            others = signals if row.key == PREDICTED else signals[1:] if outcome in signals[:1] else []
            if others:
                difference = bootstrap(mean, _kl(others[0].record) - _kl(record))
                known |= {"beside": others[0].row.key, **interval_columns("beside_kl_nats", difference)}
        more.append(known)
    found = pd.concat([found, pd.DataFrame(more, columns=COLUMNS)], axis=1)
    trends = pd.DataFrame(_trends(outcomes))
    return found if trends.empty else pd.concat([found, trends], ignore_index=True)


def _trends(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    of_rungs = [one for one in outcomes if one.row.panel in LADDER and one.record is not None]
    for technique, title in TECHNIQUES.items():
        rungs = [one.record for one in of_rungs if one.row.key == technique and one.record is not None]
        # The largest group of models that saw as many tokens, so that a trend is not one of training; all, where no two did.
        counted = Counter(trained_tokens(one.model.name) for one in rungs).most_common(1)
        largest = [one for one in rungs for tokens, _ in counted if trained_tokens(one.model.name) == tokens]
        alike = len(largest) > 1
        rungs = largest if alike else rungs
        # Windows are numbered along the text: those of the same number lie at the same place of it, whatever the tokenizer.
        if len(rungs) < 2 or len({(one.data.digest, one.data.windows, one.protocol) for one in rungs}) > 1:
            continue
        slope = slope_per_doubling([one.model.parameters for one in rungs], [_kl(one) for one in rungs])
        row = {"panel": TREND, "section": "", "key": technique, "technique": title, "status": TREND, "sizes": len(rungs)}
        yield row | {"alike": alike, **interval_columns("kl_nats_per_doubling", slope)}


def slope_per_doubling(parameters: Sequence[int], kl_nats: Sequence[np.ndarray]) -> Interval:
    """Least squares of the mean KL against log2 of the number of parameters, with its interval over windows.

    Every model weighs the same: windows of a small model differ less, and weights by their variance would make the line one through the small
    ones. What another training of the same model would have given is not in the interval.

    Args:
        kl_nats: (W,) of each model, nats a token, the same windows for all.
    """
    doublings = np.log2(np.asarray(parameters, dtype=np.float64))
    windows = np.stack(kl_nats)  # (M, W)
    apart = doublings - doublings.mean()
    share = apart / (apart**2).sum()
    return bootstrap(mean, share @ windows)  # the slope is linear in the means


def _kl(record: Record | None) -> np.ndarray:
    """(W,) nats a token, in the order of the text."""
    assert record is not None
    return record.windows.sort_values("window")["kl_nats"].to_numpy(np.float64)


# --- the figure -------------------------------------------------------------------------------------------------------------------
_COSTS = {
    "delta_ppl_pct": (1.0, "Δ perplexity after the prompt, % of dense"),
    "kl_nats": (100.0, "KL to dense × 100, nats a token"),
}
_APART = 1.03  # points of one model stand beside each other, by this factor of their size
_WIDE = 8.0  # a greater ratio of costs is drawn on a logarithmic axis


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Perplexity above, KL below, a line a signal; models that were trained longer stand apart."""
    frame = measured(outcomes)
    drawn = frame[frame["key"].isin(TECHNIQUES) & frame["kl_nats"].notna()]
    with style():
        drawing, axes = panels(2, 2, size=(10.4, 7.6), sharex="col", sharey="row", width_ratios=[3.4, 2.6])
        for (cost, (_, label)), (rungs, others) in zip(_COSTS.items(), axes, strict=True):
            _draw(rungs, drawn[drawn["panel"].isin(LADDER)], cost, by_size=True)
            _draw(others, drawn[drawn["panel"].isin(OTHERS)], cost, by_size=False)
            rungs.set_ylabel(label)
            if (drawn[f"{cost}_low"] > 0).all() and drawn[cost].max() > _WIDE * drawn[cost].min():
                rungs.set_yscale("log")
                rungs.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            else:  # linear to 1 on either side of 0, where most are
                rungs.set_yscale("symlog", linthresh=1)
                rungs.set_ylabel(f"{label}\n(linear to 1, then log)")
                rungs.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1, subs=(1, 2, 5)))
                for plot in (rungs, others):
                    draw.horizontal(plot, 0, color=GREY)
            rungs.yaxis.set_major_formatter("{x:g}")
            rungs.yaxis.set_minor_formatter(NullFormatter())
            others.set_visible(drawn["panel"].isin(OTHERS).any())
        axes[0, 0].set_title("GPT-2 by size, trained alike")
        axes[0, 1].set_title("Trained longer")
        handles = {one.get_label(): one for plot in axes[0][::-1] for one in plot.get_legend_handles_labels()[0]}
        letters(drawing, 9)
        if there := [handles[title] for title in TECHNIQUES.values() if title in handles]:
            heading = "Which tokens of the prompt are dropped"
            legend_below(drawing, there, ncols=3, title=heading, fontsize=9, title_fontsize=9)
    caption = (*_said(outcomes, frame), *sweeps.notes(outcomes, name))
    title = "What 40% of a prompt's work costs, by size of the model"
    return Figure(name, title, frame, drawing, caption, finding=_finding(drawn))


def _finding(drawn: pd.DataFrame) -> str:
    """How much more the paper's signal costs than the age of a token; nothing where it costs less on some model."""
    by_key = drawn.pivot(index="panel", columns="key", values="kl_nats")
    least = (by_key["drift"] / by_key["position"]).min() if {"drift", "position"} <= set(by_key) else 0.0
    said = f"Dropping by least drift (paper) costs at least {math.floor(10 * least) / 10} times the KL of dropping the oldest tokens, on every model"
    return said if least > 1 else ""


def _draw(plot: Any, points: pd.DataFrame, cost: str, *, by_size: bool) -> None:
    """Models along the number of their parameters, or beside one another."""
    sizes = points.drop_duplicates("panel").sort_values("parameters")
    places = sizes["parameters"] if by_size else [2.0**place for place in range(len(sizes))]
    where = pd.Series(list(places), index=sizes["panel"], dtype=float)
    for place, (key, title) in enumerate(TECHNIQUES.items()):
        mine = points[points["key"] == key].sort_values("parameters")
        if len(mine):
            x = mine["panel"].map(where) * _APART ** (place - len(TECHNIQUES) // 2)
            look = draw.look(place, label=title, elinewidth=0.7, capsize=1.5)
            look |= {} if by_size else {"linestyle": ""}
            draw.intervals(plot, x, mine, cost, times=_COSTS[cost][0], **look)
    plot.set_xscale("log", base=2)
    described = []
    for model in sizes.to_dict("records"):
        family, _, size = model["panel"].partition("-")
        parameters, tokens = (_millions(model[name]) for name in ("parameters", "trained_tokens"))
        described.append(f"{family}-\n{size}\n{parameters} parameters\n{model['layers']:.0f} layers\n{tokens} tokens")
    plot.set_xticks(list(where), described)
    plot.minorticks_off()
    if len(sizes):
        plot.set_xlim(where.min() / 1.4, where.max() * 1.4)


# --- what is said of it -----------------------------------------------------------------------------------------------------------
def _said(outcomes: Sequence[Outcome], frame: pd.DataFrame) -> tuple[str, ...]:
    """What is drawn, the trend as far as its interval allows, what differs beside size, the best signal of each model, and who is missing."""
    drawn = (
        f"Dropped after {100 * DROP_DEPTH:g}% of the layers, as many tokens as save {SAVES_PCT:g}% of a prompt's operations; predicted: K/V of "
        "all but the last few from half depth on. Bars: 95% over windows."
    )
    said = [drawn, _trend(frame), _confounded(frame), _training(frame), _seeds(outcomes), _best(outcomes, frame)]
    if absent := [model for model in LADDER if not is_there(model)]:
        trains = f"In a clone, make train-reference MODEL={absent[0]} trains one."
        said.append(f"Not drawn, because the weights are not here: {', '.join(absent)}. {trains}")
    if unmeasured := [f"{one.row.panel} {one.row.key}" for one in outcomes if one.record is None]:
        said.append(f"Not drawn, because there is no record: {', '.join(unmeasured)}.")
    return tuple(filter(None, said))


def _times_100(row: Any, column: str, undecided: str = ", not told apart") -> tuple[str, str]:
    """`+1.20 [+0.50, +1.90]`, and what is said where the interval holds 0."""
    middle, low, high = (100 * row[f"{column}{end}"] for end in ENDS)
    return f"{signed(middle, 2)} [{signed(low, 2)}, {signed(high, 2)}]", undecided * bool(low <= 0 <= high)


def _named_in_text(key: str) -> str:
    return SIGNALS[key].lower() if key in SIGNALS else key


def _trend(frame: pd.DataFrame) -> str:
    trends = frame[frame["panel"] == TREND]
    if trends.empty:
        return "One size is no trend."
    parts = []
    for row in trends.to_dict("records"):
        slope, undecided = _times_100(row, "kl_nats_per_doubling", " (undecided)")
        fewer = f" ({row['sizes']:.0f} sizes)" * bool(row["sizes"] < trends["sizes"].max())
        parts.append(f"{_named_in_text(row['key'])}{fewer} {slope}{undecided}")
    sizes = int(trends["sizes"].max())
    of_two = ", a difference of two sizes and no line" if sizes == 2 else f", a line through {sizes} sizes"
    of_two += " trained on as many tokens" if trends["alike"].all() else ""
    return f"KL × 100 for each doubling of the parameters of a GPT-2{of_two}: {'; '.join(parts)}."


def _confounded(frame: pd.DataFrame) -> str:
    """What else differs between the rungs, so that the trend is not of size alone."""
    of_rungs = frame["panel"].isin(LADDER) & frame["key"].isin(TECHNIQUES) & frame["parameters"].notna()
    rungs = frame[of_rungs].drop_duplicates("panel").sort_values("parameters")
    if len(rungs) < 2:
        return ""
    differing = {
        "layers": f"depth ({', '.join(rungs['layers'].map('{:.0f}'.format))} layers)",
        "trained_tokens": f"training ({', '.join(rungs['trained_tokens'].map(_millions))} tokens)",
        "token_digest": "tokenizer and docstrings (of other packages)",
    }
    else_ = ", ".join(said for column, said in differing.items() if rungs[column].nunique() > 1)
    apart = f"Not of size alone, as they differ in {else_} too. " if else_ else ""
    return f"{apart}Intervals are of the text, and say nothing of another training."


def _training(frame: pd.DataFrame) -> str:
    """What the same shape costs after less training and after more."""
    rows = frame[frame["panel"].isin(LONGER) & frame["kl_nats"].notna()].set_index(["panel", "key"])
    keys = [key for key in TECHNIQUES if all((model, key) in rows.index for model in LONGER)]
    if not keys:
        return ""

    def cost(model: str, key: str) -> str:
        middle, low, high = (100 * rows.loc[(model, key), f"kl_nats{end}"] for end in ENDS)
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

    tokens = " and ".join(_millions(rows.loc[(model, keys[0]), "trained_tokens"]) for model in LONGER)
    costs = "; ".join(f"{_named_in_text(key)} {' and '.join(cost(model, key) for model in LONGER)}" for key in keys)
    return f"{' and '.join(LONGER)} have one shape and saw {tokens} tokens, of other text. KL × 100: {costs}."


def _seeds(outcomes: Sequence[Outcome]) -> str:
    """What another training of one recipe changes: KL of both, and the difference, paired by window."""
    found = {(one.row.panel, one.row.key): _kl(one.record) for one in outcomes if one.record and one.row.key in TECHNIQUES}
    parts = []
    for key in TECHNIQUES:
        if all((model, key) in found for model in SEEDS):
            first, second = (found[model, key] for model in SEEDS)
            apart, undecided = _times_100(interval_columns("apart", bootstrap(mean, second - first)), "apart")
            means = f"{100 * first.mean():.2f} and {100 * second.mean():.2f}"
            parts.append(f"{_named_in_text(key)} {means} ({apart}{undecided})")
    same = "differ in the seed of their weights and windows, and in docstrings of other package versions"
    return f"{' and '.join(SEEDS)} {same}. KL × 100 of both, and the difference: {'; '.join(parts)}." if parts else ""


def _best(outcomes: Sequence[Outcome], frame: pd.DataFrame) -> str:
    parts = []
    for model in dict.fromkeys(outcome.row.panel for outcome in outcomes):
        rows = frame[(frame["panel"] == model) & frame["beside"].notna()].set_index("key")
        apart = {key: "{}{}".format(*_times_100(row, "beside_kl_nats")) for key, row in rows.iterrows()}
        for key in rows.index.intersection(list(SIGNALS)):
            said = f"{model}: {_named_in_text(key)} ({_named_in_text(rows.loc[key, 'beside'])} {apart[key]})"
            parts.append(said + (f"; against predicting {apart[PREDICTED]}" if PREDICTED in apart else ""))
    meant = "the next best is worse by, paired by window; the best is dearer than predicting by"
    return f"Least KL × 100 of what drops tokens ({meant}): {'. '.join(parts)}." if parts else ""


def _millions(count: float) -> str:
    return f"{count / 1e6:.1f} M"
