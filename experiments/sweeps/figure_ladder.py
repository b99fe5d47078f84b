"""Figure ladder: what 40% of a prompt's work costs by size of the model, which tokens leave by which signal, and the trend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter

from quicksilver.report import sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, legend_below, panels, style
from quicksilver.report.table import signed

from . import ladder

_COSTS = {"delta_ppl_pct": "Δ perplexity after the prompt, % of dense", "kl_nats": "KL to dense × 100, nats a token"}
_SCALE = {"delta_ppl_pct": 1.0, "kl_nats": 100.0}
_APART = 1.03  # points of one model stand beside each other, by this factor of their size
_WIDE = 8.0  # a greater ratio of costs is drawn on a logarithmic axis


def rows() -> list[Row]:
    """Dense and each technique on every model that is there."""
    return ladder.rows()


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Perplexity on the left, KL on the right, a line a signal; the model of another family stands apart."""
    frame = ladder.frame(outcomes)
    drawn = frame[frame["key"].isin(ladder.TECHNIQUES) & frame["kl_nats"].notna()]
    with style():
        ratios = {"width_ratios": [3.4, 1.7, 3.4, 1.7]}
        drawing, axes = panels(1, 4, size=(13.0, 3.9), gridspec_kw=ratios)
        for place, (cost, label) in enumerate(_COSTS.items()):
            pair = axes[0, 2 * place : 2 * place + 2]
            pair[1].sharey(pair[0])
            for plot, models in zip(pair, (ladder.LADDER, ladder.OTHERS), strict=True):
                _draw(plot, drawn[drawn["panel"].isin(models)], cost, by_size=models is ladder.LADDER)
            pair[0].set_ylabel(label)
            mine = drawn[cost]
            if (drawn[f"{cost}_low"] > 0).all() and mine.max() > _WIDE * mine.min():
                pair[0].set_yscale("log")
                pair[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                pair[0].yaxis.set_major_formatter("{x:g}")
                pair[0].yaxis.set_minor_formatter(NullFormatter())
            else:
                pair[0].axhline(0, color=GREY, linewidth=0.8, linestyle="-", marker="")
                pair[1].axhline(0, color=GREY, linewidth=0.8, linestyle="-", marker="")
            pair[0].set_title("GPT-2 by size, trained alike")
            pair[1].set_title("Trained longer")
            pair[1].tick_params(labelleft=False, which="both")
            pair[1].set_visible(drawn["panel"].isin(ladder.OTHERS).any())
        handles = axes[0, 0].get_legend_handles_labels()[0] or axes[0, 1].get_legend_handles_labels()[0]
        if handles:
            legend_below(drawing, handles, ncols=len(handles), title="Which tokens of the prompt are dropped")
    caption = (*_said(outcomes, frame), *sweeps.notes(outcomes, name))
    return Figure(name, "What 40% of a prompt's work costs, by size of the model", frame, drawing, caption)


def _draw(plot: Any, points: pd.DataFrame, cost: str, *, by_size: bool) -> None:
    """Models along the number of their parameters, or beside one another."""
    scale = _SCALE[cost]
    sizes = points.drop_duplicates("panel").sort_values("parameters")
    places = sizes["parameters"] if by_size else [2.0**place for place in range(len(sizes))]
    where = pd.Series(list(places), index=sizes["panel"], dtype=float)
    for place, (key, title) in enumerate(ladder.TECHNIQUES.items()):
        mine = points[points["key"] == key].sort_values("parameters")
        if mine.empty:
            continue
        middle = scale * mine[cost]
        spread = [(middle - scale * mine[f"{cost}_low"]).clip(lower=0), (scale * mine[f"{cost}_high"] - middle).clip(lower=0)]
        x = mine["panel"].map(where) * _APART ** (place - len(ladder.TECHNIQUES) // 2)
        plot.errorbar(
            x, middle, yerr=spread, label=title, color=PALETTE[place], marker=MARKERS[place], linestyle=DASHES[place] if by_size else "",
            elinewidth=0.7, capsize=1.5,
        )  # fmt: skip
    plot.set_xscale("log", base=2)
    plot.set_xticks(list(where), [_described(one) for one in sizes.to_dict("records")])
    plot.minorticks_off()
    if len(sizes):
        plot.set_xlim(where.min() / 1.4, where.max() * 1.4)


def _described(model: dict[str, Any]) -> str:
    """`ladder-gpt2-1m`, below it its size, depth and training."""
    trained = "" if pd.isna(model["trained_tokens"]) else f"\n{_millions(model['trained_tokens'])} tokens"
    return f"{model['panel']}\n{_millions(model['parameters'])}, {model['layers']:.0f} layers{trained}"


def _said(outcomes: Sequence[Outcome], frame: pd.DataFrame) -> tuple[str, ...]:
    """What is drawn, the trend as far as its interval allows, what differs beside size, the best signal of each model, and who is missing."""
    drawn = (
        f"Dropped after {100 * ladder.DROP_DEPTH:g}% of the layers, as many tokens as save {ladder.SAVES_PCT:g}% of a prompt's operations; predicted: K/V of "
        "all but the last few from half depth on. Bars: 95% over windows."
    )
    said = [drawn, _trend(frame), _confounded(outcomes, frame), _training(frame), _best(outcomes, frame)]
    absent = ladder.missing()
    if absent:
        said.append(
            f"Not drawn, because the weights are not here: {', '.join(absent)}. In a clone, make train-reference MODEL={absent[0]} trains one."
        )
    unmeasured = [f"{one.row.panel} {one.row.key}" for one in outcomes if one.record is None]
    if unmeasured:
        said.append(f"Not drawn, because there is no record: {', '.join(unmeasured)}.")
    return tuple(one for one in said if one)


def _trend(frame: pd.DataFrame) -> str:
    trends = frame[frame["panel"] == ladder.TREND]
    if trends.empty:
        return "One size is no trend."
    parts = []
    for row in trends.to_dict("records"):
        low, middle, high = (100 * row[f"kl_nats_per_doubling{end}"] for end in ("_low", "", "_high"))
        undecided = " (undecided)" if low <= 0 <= high else ""
        name = "predicted" if row["key"] == ladder.PREDICTED else row["technique"].lower()
        parts.append(f"{name} {signed(middle, 2)} [{signed(low, 2)}, {signed(high, 2)}]{undecided}")
    sizes = int(trends["sizes"].min())
    of_two = ", a difference of two sizes and no line" if sizes == 2 else f", a line through {sizes} sizes"
    of_two += " trained on as many tokens" if trends["alike"].all() else ""
    return f"KL × 100 for each doubling of the parameters of a GPT-2{of_two}: {'; '.join(parts)}."


def _confounded(outcomes: Sequence[Outcome], frame: pd.DataFrame) -> str:
    """What else differs between the rungs, so that the trend is not of size alone."""
    of_rungs = frame["panel"].isin(ladder.LADDER) & frame["key"].isin(ladder.TECHNIQUES) & frame["parameters"].notna()
    rungs = frame[of_rungs].drop_duplicates("panel").sort_values("parameters")
    if len(rungs) < 2:
        return ""
    else_ = []
    if rungs["layers"].nunique() > 1:
        else_.append(f"depth ({_each(rungs['layers'].map('{:.0f}'.format))} layers)")
    if rungs["trained_tokens"].nunique() > 1:
        else_.append(f"training ({_each(rungs['trained_tokens'].map(_millions))} tokens)")
    if rungs["token_digest"].nunique() > 1:
        else_.append("tokenizer and docstrings (of other packages)")
    apart = f"Not of size alone, as they differ in {', '.join(else_)} too. " if else_ else ""
    return f"{apart}Each model was trained once: intervals are of the text and say nothing of another training."


def _training(frame: pd.DataFrame) -> str:
    """What the same shape costs after less training and after more."""
    rows = frame[frame["panel"].isin(ladder.LONGER) & frame["kl_nats"].notna()].set_index(["panel", "key"])
    less, more = ladder.LONGER
    keys = [key for key in ladder.TECHNIQUES if (less, key) in rows.index and (more, key) in rows.index]
    if not keys:
        return ""

    def cost(model: str, key: str) -> str:
        low, middle, high = (100 * rows.loc[(model, key), f"kl_nats{end}"] for end in ("_low", "", "_high"))
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

    names = {key: "predicted" if key == ladder.PREDICTED else ladder.SIGNALS[key].lower() for key in keys}
    tokens = [_millions(rows.loc[(model, keys[0]), "trained_tokens"]) for model in ladder.LONGER]
    costs = "; ".join(f"{names[key]} {cost(less, key)} and {cost(more, key)}" for key in keys)
    return f"{less} and {more} have one shape and saw {tokens[0]} and {tokens[1]} tokens, of other text. KL × 100: {costs}."


def _best(outcomes: Sequence[Outcome], frame: pd.DataFrame) -> str:
    parts = []
    for model in dict.fromkeys(outcome.row.panel for outcome in outcomes):
        signals = ladder.best_signal(outcomes, model)
        rows = frame[(frame["panel"] == model) & frame["beside"].notna()].set_index("key")
        if not signals or signals[0].row.key not in rows.index:
            continue
        key = signals[0].row.key
        said = f"{model}: {ladder.SIGNALS[key].lower()} ({ladder.SIGNALS[rows.loc[key, 'beside']].lower()} {_difference(rows.loc[key])})"
        if ladder.PREDICTED in rows.index:
            said += f"; against predicting {_difference(rows.loc[ladder.PREDICTED])}"
        parts.append(said)
    if not parts:
        return ""
    return (
        "Least KL × 100 of what drops tokens (the next best is worse by, paired by window; the best is dearer than predicting by): "
        f"{'. '.join(parts)}."
    )


def _difference(row: pd.Series) -> str:
    low, middle, high = (100 * row[f"beside_kl_nats{end}"] for end in ("_low", "", "_high"))
    return f"{signed(middle, 2)} [{signed(low, 2)}, {signed(high, 2)}]" + (", not told apart" if low <= 0 <= high else "")


def _each(values: pd.Series) -> str:
    return ", ".join(values)


def _millions(count: float) -> str:
    return f"{count / 1e6:.1f} M"
