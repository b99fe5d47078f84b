"""What the paper's mechanisms, at their defaults and as table fair_trial tuned them, plain baselines and this package's own schedule save of a
prompt's work, and at what cost, on one model and on a second training of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.reproduction import FOUND
from quicksilver.report.table import ENDS, NO_VALUE, Column, Lines, Panel, Table, number, numbers, signed

from ..sweeps import table_fair_trial as fair_trial
from ..sweeps.figure_ladder import SEEDS
from . import prompts
from .techniques import options, panel_rows, row_of, steps

PANEL, RECALL, WRITTEN = "continuation", "far-recall", "generation"
ALWAYS = {PANEL: fair_trial.TESTED, RECALL: prompts.on_far_text(RECALL), WRITTEN: prompts.WRITING}
GREEDY_ALONE = ("measure.generation.sampled=false",)  # rows that table generation does not have
DEFAULT = {"isolated.halting": "Paper: halting, default", "cumulative.quantization": "Paper: all four, default"}
TUNED = {  # mechanism and budget: Table 11 has those of 15%; at 25% the prompt-only one saves nearly what the rows below do
    ("halting", 15): "Paper: halting, tuned",
    (fair_trial.PROMPT_ONLY, 15): "Paper: halting, tuned, prompt only",
    (fair_trial.PROMPT_ONLY, 25): "the same, tuned to save at least 25%",
    ("fusion", 15): "Paper: fusion, tuned",
}
PLAIN = {
    "bfloat16": "bfloat16 alone",
    "position": "Drop the oldest tokens",
    "truncated": "Truncate the prompt",
    "40": "Predict K/V (ours)",
}


def front_rows() -> list[Row]:
    """Dense, the paper's mechanisms, plain baselines, and what is ours; then the same on text whose answers depend on distant context, and
    where the model writes."""
    return [row for panel in ALWAYS for row in _rows(panel)]


def _rows(panel: str, *model: str) -> list[Row]:
    always = (*ALWAYS[panel], *model)
    paper = (*always, *GREEDY_ALONE) if panel == WRITTEN else always
    alone, all_four = (  # table generation has the second one
        next(replace(row, section="", technique=said) for row in steps(panel, *words) if row.key == key)
        for (key, said), words in zip(DEFAULT.items(), (paper, always), strict=True)
    )
    tuned = (
        fair_trial.tuned(Row(panel, "", f"tuned.{mechanism}.{budget}", technique, paper), mechanism, budget)
        for (mechanism, budget), technique in TUNED.items()
    )
    dense, *plain = panel_rows(panel, {"": PLAIN}, *always)
    return [dense, alone, *tuned, all_four, *plain]


def _percent(name: str) -> Callable[[Mapping[str, Any]], Lines]:
    """A cell such as `+6.6% [+4.6, +8.7]`; above 1,000 without decimals."""

    def cell(row: Mapping[str, Any]) -> Lines:
        ends = numbers(row, name)
        middle, low, high = (signed(value, _decimals(ends[0] or 0)) for value in ends)
        return (NO_VALUE if ends[0] is None else f"{middle}% [{low}, {high}]",)

    return cell


def _decimals(percent: float) -> int:
    return 0 if abs(percent) >= 1000 else 1


COLUMNS = (
    Column("", "technique", "{technique}", align="left"),
    Column("", "FLOPs saved", "{prompt_executed_flops_saved_pct:+.1f}%"),
    Column("", "Δ perplexity", _percent("delta_ppl_pct")),
    Column("", "KL × 100", "{kl_nats:100*.1f}"),
    Column("", "Δ far recall", _percent("recall_delta_ppl_pct")),
    Column("", "Same text", "{agreement:.0f}% [{agreement_low:.0f}, {agreement_high:.0f}]"),
)
LEGEND = (
    "FLOPs saved: executed operations of a prompt of 448 tokens, signals included, in percent of dense inference. Negative: more work "
    "than dense. Times are in tables 11, quicksilver and peers. Tokens after the prompt are faster only where the cache holds fewer keys.",
    "Δ perplexity of the 64 tokens after the prompt, in percent, with its 95% interval, paired by window. KL × 100: of the dense model's "
    "next-token distribution to the run's, in hundredths of a nat a token.",
    "Δ far recall: the same for answers whose facts stand at the prompt's beginning (dataset far-recall, 64 windows).",
    f"Same text: share of 64 greedily generated tokens that are the dense model's, mean over {prompts.PROMPTS} prompts (agree in table generation).",
    "tuned: of all settings that the paper names, the one of least KL on calibration text that saves 15% (table fair_trial). The paper's "
    "thresholds act on scored tokens too. Prompt only: they act there alone, as the rows below do, and have a search of their own; its "
    "second row is the one that saves at least 25%. Truncate: "
    "the oldest tokens are cut before the first layer, 40% of the work. Nothing is fitted for it, nor for dropping the oldest.",
)


@artefact(front_rows, (prompts.TEXTS,))
def table_front(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table front: what it saves, and what it costs.

    Five numbers a row, dense left out: everything is against it. README's first screen shows it.
    """
    frame, panel = _panel(outcomes, "", "Protocol continuation")
    return Table(name, "What it saves, and what it costs", frame, (panel,), (*_found(frame), *LEGEND))


def _panel(outcomes: Sequence[Outcome], before: str, title: str) -> tuple[pd.DataFrame, Panel]:
    """The rows of one model: what was scored, with what is known of them from the panels of far recall and of generation; `before`: what the names
    of its panels begin with."""
    frame = comparison.frame([one for one in outcomes if one.row.key != "dense"])
    far = frame[frame["panel"] == before + RECALL].set_index("key")
    frame = frame[frame["panel"] == before + PANEL].reset_index(drop=True)
    texts = {
        one.row.key: prompts.written(one.record, prompts.GREEDY)
        for one in outcomes
        if one.row.panel == before + WRITTEN and one.row.key != "dense" and one.record is not None
    }
    of_texts = pd.DataFrame.from_dict(texts, "index", columns=[*(f"agreement{end}" for end in ENDS), "prompts", "record"])
    beside = {f"recall_delta_ppl_pct{end}": far[f"delta_ppl_pct{end}"] for end in ENDS} | {"recall_record": far["record"]}
    beside |= dict(of_texts.rename(columns={"record": "texts_record"}).items())
    frame = frame.assign(**{column: frame["key"].map(found) for column, found in beside.items()})
    mine = [one for one in outcomes if one.row.panel == before + PANEL]
    of = [
        f"{said}: {', '.join(f'{key} {run[: provenance.SHORT]}' for key, run in frame[['key', column]].dropna().itertuples(index=False))}."
        for said, column in {"Records of Δ far recall": "recall_record", "Records of Same text": "texts_record"}.items()
    ]
    notes = (*provenance.notes(mine), *of, *comparison.cautions(frame, before + PANEL))
    return frame, Panel(before + PANEL, title, COLUMNS, notes)


def _found(frame: pd.DataFrame) -> Iterator[str]:
    """What the rows say, as sentences that begin with `Found: `; README's first screen takes them."""
    rows = {row["key"]: row for row in frame[frame["status"] == comparison.MEASURED].to_dict("records")}

    def cost(key: str, of: str = "") -> str:
        value = rows[key][f"{of}delta_ppl_pct"]
        return f"{signed(value, _decimals(value))}%"

    def saved(key: str) -> str:
        value = rows[key]["prompt_executed_flops_saved_pct"]
        return f"saves {value:.1f}%" if value >= 0 else f"adds {-value:.1f}%"

    tuned, *in_prompt = (f"tuned.{mechanism}.{budget}" for mechanism, budget in TUNED if "halting" in mechanism)
    if {"isolated.halting", tuned} <= rows.keys():
        kept_out = [f"{saved(key)} for {cost(key)}" for key in in_prompt if key in rows]
        kept_out[1:] = (f"tuned to save more, it {said}" for said in kept_out[1:])
        yield (
            f"{FOUND}tuned on calibration text, the paper's halting {saved(tuned)} of a prompt's FLOPs for "
            f"{cost(tuned)} perplexity. At its default, halting {saved('isolated.halting')} for {cost('isolated.halting')}."
            + (f" Limited to the prompt, tuned halting {'; '.join(kept_out)}." if kept_out else "")
        )
    if {"40", "truncated"} <= rows.keys():
        ours, cut = rows["40"], rows["truncated"]
        apart = ours["delta_ppl_pct_low"] > cut["delta_ppl_pct_high"] or cut["delta_ppl_pct_low"] > ours["delta_ppl_pct_high"]
        texts, kept = list[Any](number(row, "agreement") for row in (ours, rows.get("position", {}), cut)), ""
        if None not in texts:
            shares = "prediction keeps {:.0f}%, dropping the oldest tokens {:.0f}%, truncation {:.0f}%".format(*texts)
            kept = f" Of the dense model's greedy text {shares}."
        yield (
            f"{FOUND}predicting the K/V of stopped tokens (ours) {saved('40')} for {cost('40')} perplexity; truncating the prompt "
            f"{saved('truncated')} for {cost('truncated')}. {'' if apart else 'Their intervals of perplexity overlap. '}"
            f"KL × 100 is {100 * ours['kl_nats']:.1f} against {100 * cut['kl_nats']:.1f}; when answers depend on distant context, perplexity changes by {cost('40', 'recall_')} "
            f"against {cost('truncated', 'recall_')}." + kept
        )


# --- a second training --------------------------------------------------------------------------------------------------------------
FITTED = "fitted"
PROMPT_ONLY = f"tuned.{fair_trial.PROMPT_ONLY}.25"
BOTH = dict.fromkeys(("dense", "isolated.halting", PROMPT_ONLY, "position", "truncated"), "") | {
    PROMPT_ONLY: "Paper: halting, tuned to save at least 25%, prompt only",
    "truncated": "Truncate the prompt, 40% of its tokens",
}
# That of reference-gpt2's schedules.yaml for 40%: searched on calibration text before the second model was trained.
SCHEDULE = "{drop_before:3,drop_share:0.196429,predict_before:10,protect_first:4,protect_last:32}"


def seeds_rows() -> list[Row]:
    """The rows of both trainings; what was searched was searched for the first."""
    found = []
    ours = (*options("fitted_prediction", save="null", schedule=SCHEDULE), "dataset.calibration_windows=40")
    for model, name in product(SEEDS, ALWAYS):
        panel, always = f"{model}.{name}", (*ALWAYS[name], f"model={model}")
        for row in _rows(name, f"model={model}"):
            if row.key in BOTH:
                of_first = row.of_model.get(SEEDS[0], row.overrides)
                if row.key == "truncated":  # weights of the second one are not kept: its records have the default of the module
                    of_first = tuple(word for word in of_first if ".keep=" not in word)
                found.append(replace(row, panel=panel, technique=BOTH[row.key] or row.technique, overrides=of_first, of_model={}))
        found.append(row_of(panel, "", FITTED, PLAIN["40"], "fitted_prediction", *always, overrides=ours))
    return [replace(row, defaults=("dataset=python-docs",)) for row in found]


@artefact(seeds_rows, (prompts.TEXTS,))
def table_seeds(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table seeds: one recipe, trained from two seeds."""
    titles = dict(zip(SEEDS, ("Seed 42 (reference-gpt2)", "Seed 43"), strict=True))
    frames, found = zip(*(_panel(outcomes, f"{model}.", title) for model, title in titles.items()), strict=True)
    legend = (
        *LEGEND[:-1],
        "tuned: table front says how. All settings were chosen on calibration text for seed 42, and none for seed 43. Thresholds are percentiles of "
        "each model's own signals. Predict K/V: the schedule is that of table front, the map a ridge regression on 40 windows of the calibrating part "
        "of the run's text. There the map was also trained. Weights of seed 43 are not in the package. Its docstrings, a part of the training text, are those "
        "of other package versions.",
    )
    return Table(name, "One recipe, trained from two seeds", pd.concat(frames, ignore_index=True), found, legend)
