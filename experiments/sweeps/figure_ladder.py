"""Figure ladder: what 40% of a prompt's work costs by size of the model, which tokens leave by which signal, and the trend."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter

from quicksilver.models.loading import EMBEDDED
from quicksilver.records.record import Record
from quicksilver.records.stats import Interval, bootstrap, mean
from quicksilver.report import comparison, sweeps
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, legend_below, panels, style
from quicksilver.report.table import signed
from quicksilver.runtime.errors import ConfigError

LADDER = ("ladder-gpt2-1m", "ladder-gpt2-2m", "ladder-gpt2-4m", "ladder-gpt2-8m")
OTHERS = ("reference-gpt2", "reference-llama")  # trained longer, on other text: no rungs
LONGER = ("ladder-gpt2-8m", "reference-gpt2")  # one shape, trained twice
SAVES_PCT = 40.0
PROMPT_TOKENS = 448  # of protocol continuation
DROP_DEPTH, PREDICT_DEPTH = 0.25, 0.5  # whole numbers of layers where there are 12 or 16
PROTECT_FIRST = 4
PREDICTED, TREND = "predicted", "trend"
ALWAYS = ("protocol=continuation", "measure=sweep", "dataset.windows=128", "dataset.calibration_windows=40")
SIGNALS = {"position": "Oldest", "attention": "Least attended", "drift": "Least drift (paper)", "random": "Random"}
COLUMNS = ["parameters", "layers", "trained_tokens", "beside", "beside_kl_nats", "beside_kl_nats_low", "beside_kl_nats_high"]
TECHNIQUES = {PREDICTED: "All predicted at half depth, none dropped", **SIGNALS}


@dataclass(frozen=True)
class Shape:
    """What decides the work of a prompt.

    Attributes:
        layers, width, vocabulary: as in config.json.
        attention_width: heads times their width.
        linear_params: weights of a layer's matrices; kv_params: those that make K and V.
    """

    layers: int
    width: int
    vocabulary: int
    attention_width: int
    linear_params: int
    kv_params: int

    def layer_flops(self, tokens: int, keys: int | None = None, projected: int = 0) -> int:
        """Operations of a layer on `tokens`, which see `keys` each (None: those up to themselves), and of K and V alone for `projected`."""
        pairs = tokens * (tokens + 1) // 2 if keys is None else tokens * keys
        return 2 * self.linear_params * tokens + 2 * self.kv_params * projected + 4 * self.attention_width * pairs

    def saved_pct(self, layers: Sequence[int]) -> float:
        """Percent of a dense prompt's operations that a run saves whose layers take so many each; the head sees one token."""
        head = 2 * self.width * self.vocabulary
        return 100 * (1 - (sum(layers) + head) / (self.layers * self.layer_flops(PROMPT_TOKENS) + head))


def is_there(model: str) -> bool:
    """Whether the package has this model's shape; of the largest rung it has no weights, and records alone."""
    return (EMBEDDED / model / "config.json").is_file()


def missing() -> list[str]:
    """Rungs that are not in the package."""
    return [model for model in LADDER if not is_there(model)]


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape that a config.json of GPT-2 or Llama describes."""
    if config["model_type"] == "gpt2":
        width = config["n_embd"]
        linear = 4 * width * width + 2 * width * (config["n_inner"] or 4 * width)
        return Shape(config["n_layer"], width, config["vocab_size"], width, linear, 2 * width * width)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    kv = 2 * width * config["num_key_value_heads"] * head
    linear = 2 * width * heads * head + kv + 3 * width * config["intermediate_size"]
    return Shape(config["num_hidden_layers"], width, config["vocab_size"], heads * head, linear, kv)


def dropped_tokens(shape: Shape) -> int:
    """How many tokens leave after `DROP_DEPTH`: the fewest that save `SAVES_PCT`.

    Raises:
        ConfigError: not even all of them do.
    """
    first = round(DROP_DEPTH * shape.layers)
    whole = shape.layer_flops(PROMPT_TOKENS)
    for dropped in range(PROMPT_TOKENS):
        left = shape.layer_flops(PROMPT_TOKENS - dropped)
        if shape.saved_pct([whole] * first + [left] * (shape.layers - first)) >= SAVES_PCT:
            return dropped
    raise ConfigError(f"{shape}: dropping at {DROP_DEPTH:g} of the depth saves less than {SAVES_PCT:g}% of a prompt.")


def protected_tokens(shape: Shape) -> int:
    """How many last tokens go on where all others are predicted from `PREDICT_DEPTH` on: the most that leave `SAVES_PCT` saved.

    Raises:
        ConfigError: not even one may.
    """
    source = round(PREDICT_DEPTH * shape.layers)
    for last in range(PROMPT_TOKENS - PROTECT_FIRST, 0, -1):
        kept = PROTECT_FIRST + last
        stopped = PROMPT_TOKENS - kept
        after = shape.layer_flops(kept, PROMPT_TOKENS)
        # In the source layer K and V follow from the state; the map then makes those of all layers after it at once.
        predicting = 2 * shape.kv_params * stopped * (shape.layers - source)
        work = [shape.layer_flops(PROMPT_TOKENS)] * source + [after] * (shape.layers - source) + [predicting]
        if shape.saved_pct(work) >= SAVES_PCT:
            return last
    raise ConfigError(f"{shape}: predicting from {PREDICT_DEPTH:g} of the depth on saves less than {SAVES_PCT:g}% of a prompt.")


def overrides(shape: Shape, technique: str) -> tuple[str, ...]:
    """The modules of a technique, its dial set for a model of this shape."""
    if technique == PREDICTED:
        at = "modules.fitted_prediction"
        fields = {
            "drop_before": 1, "drop_share": 0, "predict_before": round(PREDICT_DEPTH * shape.layers),
            "protect_first": PROTECT_FIRST, "protect_last": protected_tokens(shape),
        }  # fmt: skip
        schedule = ",".join(f"{name}:{value}" for name, value in fields.items())
        return ("modules=[fitted_prediction]", f"{at}.save=null", f"{at}.schedule={{{schedule}}}")
    at = "modules.halting"
    signal = () if technique == "attention" else (f"{at}.signal={technique}",)
    share = dropped_tokens(shape) / PROMPT_TOKENS
    return ("modules=[halting_attention]", *signal, f"{at}.window=[{DROP_DEPTH:g},0.8]", f"{at}.halted_share={share:.6g}")


def rows() -> list[Row]:
    """Dense and each technique on every model that is there."""
    found = []
    for model in (*LADDER, *OTHERS):
        if not is_there(model):
            continue
        shape = shape_of(json.loads((EMBEDDED / model / "config.json").read_text(encoding="utf-8")))
        always = (*ALWAYS, f"model={model}")
        found.append(Row(model, "", "dense", "Dense", (*always, "modules=[]")))
        found += [
            Row(model, "", technique, title, (*always, *overrides(shape, technique))) for technique, title in TECHNIQUES.items()
        ]
    return found


def trained_tokens(model: str) -> int | None:
    """How many tokens the model was trained on, as its training wrote; None: it did not."""
    path = EMBEDDED / model / "training.json"
    if not path.is_file():
        return None
    held_out = json.loads(path.read_text(encoding="utf-8")).get("held_out") or [{}]
    return held_out[-1].get("tokens")


def measured(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """`comparison.frame`, then a row a trend.

    Added: `parameters`, `layers` and `trained_tokens` of the model. `beside`: in the row of a model's best signal the next best one, in that of
    prediction the best signal; `beside_kl_nats`: KL of that one minus KL of this, paired by window. In a row of panel `trend`:
    `kl_nats_per_doubling` of the number of parameters, over `sizes` models, `alike`: that saw as many tokens.
    """
    found = comparison.frame(outcomes)
    more: list[dict[str, Any]] = []
    for outcome in outcomes:
        record = outcome.record
        known = {} if record is None else {"parameters": record.model.parameters, "layers": record.model.layers}
        more.append(known | {"trained_tokens": trained_tokens(outcome.row.panel)} | _beside(outcome, outcomes))
    found = pd.concat([found, pd.DataFrame(more, columns=COLUMNS)], axis=1)
    trends = pd.DataFrame(_trends(outcomes))
    return found if trends.empty else pd.concat([found, trends], ignore_index=True)


def best_signal(outcomes: Sequence[Outcome], model: str) -> list[Outcome]:
    """The outcomes of a model's signals, least KL first."""
    mine = [one for one in outcomes if one.row.panel == model and one.row.key in SIGNALS and one.record is not None]
    return sorted(mine, key=lambda one: float(_kl(one.record).mean()))


def _beside(outcome: Outcome, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    signals = best_signal(outcomes, outcome.row.panel)
    if outcome.record is None or not signals:
        return {}
    if outcome.row.key == PREDICTED:
        other = signals[0]
    elif outcome is signals[0] and len(signals) > 1:
        other = signals[1]
    else:
        return {}
    difference = bootstrap(mean, _kl(other.record) - _kl(outcome.record))
    return {"beside": other.row.key, **_named("beside_kl_nats", difference)}


def _trends(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    found = []
    for technique in TECHNIQUES:
        rungs = [
            one.record for one in outcomes if one.row.key == technique and one.row.panel in LADDER and one.record is not None
        ]
        rungs = _trained_alike(rungs)
        # Windows are numbered along the text: those of the same number lie at the same place of it, whatever the tokenizer.
        if len(rungs) < 2 or len({(one.data.digest, one.data.windows, one.protocol) for one in rungs}) > 1:
            continue
        slope = slope_per_doubling([one.model.parameters for one in rungs], [_kl(one) for one in rungs])
        found.append(
            {
                "panel": TREND, "section": "", "key": technique, "technique": TECHNIQUES[technique], "status": TREND,
                "sizes": len(rungs), "alike": len({trained_tokens(one.model.name) for one in rungs}) == 1, **_named("kl_nats_per_doubling", slope),
            }
        )  # fmt: skip
    return found


def _trained_alike(rungs: list[Record]) -> list[Record]:
    """The largest group of models that saw as many tokens, so that a trend is not one of training; all, where no two did."""
    groups: dict[int | None, list[Record]] = {}
    for one in rungs:
        groups.setdefault(trained_tokens(one.model.name), []).append(one)
    largest = max(groups.values(), key=len, default=rungs)
    return largest if len(largest) > 1 else rungs


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


def _named(name: str, found: Interval) -> dict[str, float]:
    values = {name: float(found.value), f"{name}_low": float(found.low), f"{name}_high": float(found.high)}
    if not all(map(math.isfinite, values.values())):
        raise ConfigError(f"{name}: {values} are no numbers.")
    return values


_COSTS = {"delta_ppl_pct": "Δ perplexity after the prompt, % of dense", "kl_nats": "KL to dense × 100, nats a token"}
_SCALE = {"delta_ppl_pct": 1.0, "kl_nats": 100.0}
_APART = 1.03  # points of one model stand beside each other, by this factor of their size
_WIDE = 8.0  # a greater ratio of costs is drawn on a logarithmic axis


def figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Perplexity on the left, KL on the right, a line a signal; the model of another family stands apart."""
    frame = measured(outcomes)
    drawn = frame[frame["key"].isin(TECHNIQUES) & frame["kl_nats"].notna()]
    with style():
        ratios = {"width_ratios": [3.4, 1.7, 3.4, 1.7]}
        drawing, axes = panels(1, 4, size=(13.0, 3.9), gridspec_kw=ratios)
        for place, (cost, label) in enumerate(_COSTS.items()):
            pair = axes[0, 2 * place : 2 * place + 2]
            pair[1].sharey(pair[0])
            for plot, models in zip(pair, (LADDER, OTHERS), strict=True):
                _draw(plot, drawn[drawn["panel"].isin(models)], cost, by_size=models is LADDER)
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
            pair[1].set_visible(drawn["panel"].isin(OTHERS).any())
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
    for place, (key, title) in enumerate(TECHNIQUES.items()):
        mine = points[points["key"] == key].sort_values("parameters")
        if mine.empty:
            continue
        middle = scale * mine[cost]
        spread = [(middle - scale * mine[f"{cost}_low"]).clip(lower=0), (scale * mine[f"{cost}_high"] - middle).clip(lower=0)]
        x = mine["panel"].map(where) * _APART ** (place - len(TECHNIQUES) // 2)
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
        f"Dropped after {100 * DROP_DEPTH:g}% of the layers, as many tokens as save {SAVES_PCT:g}% of a prompt's operations; predicted: K/V of "
        "all but the last few from half depth on. Bars: 95% over windows."
    )
    said = [drawn, _trend(frame), _confounded(outcomes, frame), _training(frame), _best(outcomes, frame)]
    absent = missing()
    if absent:
        said.append(
            f"Not drawn, because the weights are not here: {', '.join(absent)}. In a clone, make train-reference MODEL={absent[0]} trains one."
        )
    unmeasured = [f"{one.row.panel} {one.row.key}" for one in outcomes if one.record is None]
    if unmeasured:
        said.append(f"Not drawn, because there is no record: {', '.join(unmeasured)}.")
    return tuple(one for one in said if one)


def _trend(frame: pd.DataFrame) -> str:
    trends = frame[frame["panel"] == TREND]
    if trends.empty:
        return "One size is no trend."
    parts = []
    for row in trends.to_dict("records"):
        low, middle, high = (100 * row[f"kl_nats_per_doubling{end}"] for end in ("_low", "", "_high"))
        undecided = " (undecided)" if low <= 0 <= high else ""
        name = "predicted" if row["key"] == PREDICTED else row["technique"].lower()
        parts.append(f"{name} {signed(middle, 2)} [{signed(low, 2)}, {signed(high, 2)}]{undecided}")
    sizes = int(trends["sizes"].min())
    of_two = ", a difference of two sizes and no line" if sizes == 2 else f", a line through {sizes} sizes"
    of_two += " trained on as many tokens" if trends["alike"].all() else ""
    return f"KL × 100 for each doubling of the parameters of a GPT-2{of_two}: {'; '.join(parts)}."


def _confounded(outcomes: Sequence[Outcome], frame: pd.DataFrame) -> str:
    """What else differs between the rungs, so that the trend is not of size alone."""
    of_rungs = frame["panel"].isin(LADDER) & frame["key"].isin(TECHNIQUES) & frame["parameters"].notna()
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
    rows = frame[frame["panel"].isin(LONGER) & frame["kl_nats"].notna()].set_index(["panel", "key"])
    less, more = LONGER
    keys = [key for key in TECHNIQUES if (less, key) in rows.index and (more, key) in rows.index]
    if not keys:
        return ""

    def cost(model: str, key: str) -> str:
        low, middle, high = (100 * rows.loc[(model, key), f"kl_nats{end}"] for end in ("_low", "", "_high"))
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

    names = {key: "predicted" if key == PREDICTED else SIGNALS[key].lower() for key in keys}
    tokens = [_millions(rows.loc[(model, keys[0]), "trained_tokens"]) for model in LONGER]
    costs = "; ".join(f"{names[key]} {cost(less, key)} and {cost(more, key)}" for key in keys)
    return f"{less} and {more} have one shape and saw {tokens[0]} and {tokens[1]} tokens, of other text. KL × 100: {costs}."


def _best(outcomes: Sequence[Outcome], frame: pd.DataFrame) -> str:
    parts = []
    for model in dict.fromkeys(outcome.row.panel for outcome in outcomes):
        signals = best_signal(outcomes, model)
        rows = frame[(frame["panel"] == model) & frame["beside"].notna()].set_index("key")
        if not signals or signals[0].row.key not in rows.index:
            continue
        key = signals[0].row.key
        said = f"{model}: {SIGNALS[key].lower()} ({SIGNALS[rows.loc[key, 'beside']].lower()} {_difference(rows.loc[key])})"
        if PREDICTED in rows.index:
            said += f"; against predicting {_difference(rows.loc[PREDICTED])}"
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
