"""Predicted K/V beside plain baselines: on two models and two texts, on text that needs far context, and on prompts of other lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd

from quicksilver.measure.generation import GREEDY, SAMPLED, TEXTS, GenerationResult
from quicksilver.measure.needle import ABSENT, column
from quicksilver.records.record import Record
from quicksilver.records.stats import bootstrap, mean
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.figure import MARKERS, PALETTE, Figure, legend_below, panels, style
from quicksilver.report.table import ENDS, Column, Panel, Table, interval_columns, with_ends, without_folders

from .. import drawing as draw
from .techniques import FIRST, FUSION, SETTINGS, Members, chosen, of_each, options, panel_rows, truncations

# --- two models, two texts, and each part left out --------------------------------------------------------------------------------
SCHEDULES: Members = {"40": "40% of the prompt's work", "50": "50%"}
# Searched for reference-llama alone: half of its work does not yet cost the paper's reported 1.1% of perplexity; gpt2's does.
DEEPER: Members = {**SCHEDULES, "60": "60%"}
GATES: Members = {"learned": "learned gates, dropped, then predicted (Ye et al.)"}
TRUNCATED: Members = {
    "truncated": "oldest tokens cut before the first layer, 40% of the work",
    "truncated_50": "oldest cut, 50% of the work",
    "truncated_ends": "middle cut, 40% of the work",
}
OLDEST: Members = {"oldest": ("oldest dropped, 40%", "position"), **TRUNCATED}
_BLOCKS = "attention in blocks"
FORMATS: Members = {
    "bfloat16": "bfloat16 alone",
    "int8": "dynamic int8 alone",
    **{f"{save}.bfloat16": f"{save}%, in bfloat16" for save in (40, 50)},
    "bfloat16.blocks": f"bfloat16, {_BLOCKS}",
    "int8.blocks": f"dynamic int8, {_BLOCKS}",
    **{f"{save}.bfloat16.blocks": f"{save}%, in bfloat16, {_BLOCKS}" for save in (40, 50)},
}
DEEPER_FORMATS = {**FORMATS, "60.bfloat16": "60%, in bfloat16", "60.bfloat16.blocks": f"60%, in bfloat16, {_BLOCKS}"}
WITHOUT: Members = {
    "drop_all": "nothing predicted: the second stage is dropped too",
    "project": "projected, not predicted (SwiftKV, untrained)",
    "oldest": ("nothing but the oldest dropped, at the same work", "position"),
    **TRUNCATED,
}
CONTROLS: Members = {
    "fitted": "ridge on the windows of this text alone, true pairs",
    "fitted_50": "the same at 50%",
    "shuffled": "the first, fitted on shuffled tokens",
    "mean": "mean K/V of each layer and head",
    "static": "none dropped: all predicted at the layer that saves 40%",
}
_FIT = "dataset.calibration_windows=40"  # of the calibrating part; 20 thousand tokens
OWN = {
    "learned": ("learned_halting", "measure=quick"),
    "drop_all": ("quicksilver", *options("quicksilver", missing_kv="drop")),
    "project": ("quicksilver", *options("quicksilver", missing_kv="project")),
    "fitted": ("fitted_prediction", _FIT),
    "fitted_50": ("fitted_prediction", "modules.fitted_prediction.save=0.5", "dataset.calibration_windows=160", "measure=quick"),
    "shuffled": ("fitted_prediction", *options("fitted_prediction", control="shuffled"), _FIT),
    "mean": ("fitted_prediction", *options("fitted_prediction", control="mean"), _FIT),
    "static": ("fitted_prediction", *options("fitted_prediction", drop_oldest="false"), _FIT),
}
_OURS, _GATES, _FOR_COMPARISON = "The model's own schedules", "Instead of a schedule, gates trained for 40%", "For comparison"
_FORMATS, _LLAMA, _WIKITEXT = "Number formats", ("model=reference-llama",), ("dataset=wikitext103", "measure=quick")
_TAKEN_AWAY, _CONTROLS = "At 40%, one part taken away", "Controls at 40%: maps fitted when the run begins"
# panel -> title, rows by section, what its runs have besides
TWO_MODELS: dict[str, tuple[str, dict[str, Members], tuple[str, ...]]] = {
    "continuation": (
        "reference-gpt2 on python-docs, unless the command names others",
        {_OURS: SCHEDULES, _GATES: GATES, _TAKEN_AWAY: WITHOUT, _CONTROLS: CONTROLS, _FORMATS: FORMATS},
        (),
    ),
    "wikitext103": ("The same on WikiText-103 test", {_OURS: SCHEDULES, _GATES: GATES, _FOR_COMPARISON: OLDEST}, _WIKITEXT),
    "llama": ("reference-llama", {_OURS: DEEPER, _FOR_COMPARISON: OLDEST, _FORMATS: DEEPER_FORMATS}, _LLAMA),
    "llama.wikitext103": (
        "reference-llama on WikiText-103 test",
        {_OURS: DEEPER, _FOR_COMPARISON: TRUNCATED},
        _LLAMA + _WIKITEXT,
    ),
}


def two_models_rows() -> list[Row]:
    """Dense and its rows, panel by panel. More windows than Table 11 has: differences of a percent need them."""
    always, first = ("protocol=continuation", "dataset.windows=128"), ("model=reference-gpt2", "dataset=python-docs")
    return [
        replace(row, defaults=first)
        for panel, (_, sections, more) in TWO_MODELS.items()
        for row in panel_rows(panel, sections, *always, *more, own=OWN)
    ]


@artefact(two_models_rows)
def table_quicksilver(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table quicksilver: stopped tokens get K/V from a fitted linear map: two models, two texts, and each part of the technique left out.

    The rows that take one part away leave the rest as it is, so their budgets differ and stand beside their cost. Controls have the schedule of the
    40% row (one that of 50%) and a map that knows less, fitted on the calibrating part of the run's own text.
    """
    panels = {panel: title for panel, (title, _, _) in TWO_MODELS.items()}
    return comparison.table(outcomes, name, "Predicted instead of dropped, under protocol continuation", panels)


# --- far context ------------------------------------------------------------------------------------------------------------------
FAR_TEXTS = {
    "far-copy": "Passages given three times in a row",
    "far-recall": "Facts, a passage, then questions about the facts",
}
FAR: Members = {
    "predicted": ("predicted K/V (ours)", "40"),
    "protected": "ours, last 92 kept",
    "learned": "learned: dropped, then predicted",
    "position": "oldest dropped",
    "attention": "least attended dropped",
    "fusion": "least attended, fused",
    "drift": "least drift dropped (paper)",
    "truncated": "oldest cut before the first layer",
    "truncated_ends": "middle cut before the first layer",
    "random": "random dropped",
}
OURS_FAR = ("predicted", "protected", "learned")
# Schedules that protect 92 tokens: of their search, the one of least KL among those (docs/predicted-kv.md). On 64 calibration windows, that of
# reference-gpt2 has as much KL as the shipped one, and twice as many tokens until the first that differs. far-gpt2 has linear MLPs in all layers
# that can have one, and saves 38.7%: of its search only a schedule that drops tokens saves 40%. Other models have that of far-gpt2.
_LINEAR_92 = "{drop_before:1,drop_share:0,predict_before:%s,protect_first:4,protect_last:92,linear_mlp:[%s]}"
LAST_92 = {
    FIRST: _LINEAR_92 % (11, "1,2,3,4,5,6,7,8,9,10"),
    "far-llama": _LINEAR_92 % (8, "2,7"),
    "reference-gpt2": "{drop_before:3,drop_share:0.285714,predict_before:10,protect_first:4,protect_last:92,tile:32}",
    "reference-llama": "{drop_before:3,drop_share:0.214286,predict_before:9,protect_first:4,protect_last:92,tile:32}",
}
PROTECTED = ("quicksilver", "modules.quicksilver.save=null")


def on_far_text(text: str) -> tuple[str, ...]:
    """What every row on a text with far context has."""
    return ("protocol=continuation", "measure=quick", "dataset.windows=64", f"dataset={text}")


def far_context_rows() -> list[Row]:
    """Dense and every row, a panel a text."""
    own = {"protected": PROTECTED}
    return [_protecting(row) for text in FAR_TEXTS for row in panel_rows(text, {"": FAR}, *on_far_text(text), own=own)]


def _protecting(row: Row) -> Row:
    """The row with each model's schedule, if it is the one that protects more tokens."""
    schedules = {model: (*row.overrides, f"modules.quicksilver.schedule={schedule}") for model, schedule in LAST_92.items()}
    return of_each(row, schedules) if row.key == "protected" else row


@artefact(far_context_rows)
def table_far_context(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table far_context: which tokens may leave a prompt when answers depend on distant context.

    Text of the language reference gains little from far context, so dropping the oldest tokens is nearly free there. Here it is not: passages
    are repeated, or questions ask for facts that stand at the beginning (data/far_context.py). Everything saves about 40% of the prompt's work.
    """
    title = "Far context: which tokens may leave when answers depend on distant context (protocol continuation)"
    return comparison.table(outcomes, name, title, FAR_TEXTS)


@artefact(far_context_rows)
def figure_far_context(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure far_context: perplexity added to answers whose facts stand far back, by which tokens leave a prompt and what becomes of them."""
    found = comparison.frame(outcomes).dropna(subset=["delta_ppl_pct"])
    found = found[found["key"].isin([*FAR])]
    first = found[found["panel"] == next(iter(FAR_TEXTS))].sort_values("delta_ppl_pct")["key"]
    order = [*dict.fromkeys((*first, *(key for key in FAR if key in {*found["key"]})))]
    with style():
        drawing, plots = panels(1, len(FAR_TEXTS), size=(9, 3.2), sharey=True)
        for plot, (text, title) in zip(plots.flat, FAR_TEXTS.items(), strict=True):
            for row in found[found["panel"] == text].to_dict("records"):
                place, value, high = order.index(row["key"]), row["delta_ppl_pct"], row["delta_ppl_pct_high"]
                colour, marker = (PALETTE[1], "o") if row["key"] in OURS_FAR else (PALETTE[3], "s")
                look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": "", "elinewidth": 0.9, "capsize": 2}
                draw.intervals(plot, place, row, "delta_ppl_pct", across=True, **look)
                plot.annotate(f"{value:+.1f}", (max(value, high), place), (4, 0), textcoords="offset points", va="center")
            draw.vertical(plot, 0)
            plot.set(title=title, xlabel="Δ perplexity, % of dense")
            low, high = plot.get_xlim()
            plot.set_xlim(low, high + 0.12 * (high - low))  # room for the last number
            plot.grid(axis="y", visible=False)
        printed = {row.key: row.technique for row in far_context_rows()}
        plots[0, 0].set_yticks(range(len(order)), [printed[key] for key in order])
        plots[0, 0].invert_yaxis()
    saved = found["prompt_executed_flops_saved_pct"]
    work = f" Each saves {saved.min():.0f} to {saved.max():.0f}% of the prompt's work." if len(found) else ""
    caption = (
        f"Perplexity of the tokens after a prompt whose answers stand far back.{work} Round: K/V are predicted. Bars: 95% intervals, "
        "paired by window.",
        *provenance.notes(outcomes),
    )
    columns = ["panel", "key", "technique", "prompt_executed_flops_saved_pct", *(f"delta_ppl_pct{end}" for end in ENDS), "record"]
    title = "Answers that stand far back, by which tokens leave a prompt"
    return Figure(name, title, found[columns].reset_index(drop=True), drawing, caption, finding=_far_finding(found))


def _far_finding(found: pd.DataFrame) -> str:
    """What predicting costs on either text, beside cutting and dropping the oldest; nothing where one was not measured."""
    costs, said = found.set_index(["key", "panel"])["delta_ppl_pct"], []
    words = {"predicted": "predicting K/V costs", "truncated": "cutting the oldest", "position": "dropping them"}
    for key, what in words.items():
        both = [f"{costs[key, text]:+.1f}%" for text in FAR_TEXTS if (key, text) in costs.index]
        if len(both) < len(FAR_TEXTS):
            return ""
        said.append(f"{what} {' and '.join(both)}")
    return f"Answers far back: {', '.join(said)} perplexity"


# --- lengths ----------------------------------------------------------------------------------------------------------------------
SCORED = 64
LENGTHS = (128, 256, 448)  # reference-gpt2 has 512 positions
AT_ANY_LENGTH: Members = {
    "40": "Predicted K/V, 40% (ours)",
    "50": "50% (ours)",
    "position": "Oldest dropped, 40%",
    "attention": "Least attended dropped, 40%",
    "truncated": "Truncation, 40%, newest kept",
    "truncated_50": "Truncation, 50%",
}


def windows_of(length: int) -> tuple[str, ...]:
    """What every row has whose prompts are so long."""
    window = (f"protocol.prompt_tokens={length}", f"protocol.window_tokens={length + SCORED}")
    return ("protocol=continuation", *window, "measure=quick", "dataset.windows=64")


def lengths_rows() -> list[Row]:
    """Dense and every row, a panel a length."""
    return [
        row
        for length in LENGTHS
        for row in panel_rows(f"{length} tokens", {"": AT_ANY_LENGTH}, *windows_of(length), own=truncations(length))
    ]


@artefact(lengths_rows)
def table_lengths(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table lengths: the same maps and schedules on prompts of 128, 256 and 448 tokens, beside truncation and dropping.

    Maps and schedules were fitted at prompts of 448 tokens. A schedule says shares of the prompt, so that it holds for any length.
    """
    panels = {f"{length} tokens": f"A prompt of {length} tokens, then {SCORED} scored" for length in LENGTHS}
    title = "Prompt lengths: maps and schedules of one length on others (protocol continuation)"
    return comparison.table(outcomes, name, title, panels, cautious=False)


# --- models that use their context ------------------------------------------------------------------------------------------------
FAR_MODELS = (FIRST, "far-llama")
USED = {
    "source.448": ("Source code, a prompt of 448 tokens", "python-source", 448),
    "source.960": ("Source code, a prompt of 960 tokens", "python-source", 960),
    "docs.960": ("Documentation, a prompt of 960 tokens", "python-docs", 960),
    "recall.960": ("Facts, then questions about them, a prompt of 960 tokens", "far-recall", 960),
}


def context_used_rows() -> list[Row]:
    """Dense and every row, a panel a text and length."""
    found: list[Row] = []
    for model, (panel, (_, text, length)) in product(FAR_MODELS, USED.items()):
        always = (*windows_of(length), f"model={model}", f"dataset={text}")
        found += panel_rows(f"{model}.{panel}", {"": AT_ANY_LENGTH}, *always, own=truncations(length))
    return found


@artefact(context_used_rows)
def table_context_used(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table context_used: truncation, dropping and prediction on far-gpt2 and far-llama, whose answers need what stands far back.

    The reference models gain little behind 130 tokens, so truncation costs them little perplexity. These two were trained on windows of 1,024
    tokens of source code, documents and repeated passages. Maps and schedules were fitted and chosen on calibration text at prompts of 960.
    """
    title = "Models that use their context: what leaving 40% or 50% of a prompt's work out costs (protocol continuation)"
    panels = {f"{model}.{panel}": f"{model}: {said}" for model, (panel, (said, _, _)) in product(FAR_MODELS, USED.items())}
    return comparison.table(outcomes, name, title, panels, cautious=False)


# --- a needle ---------------------------------------------------------------------------------------------------------------------
NEEDLE: Members = {
    "40": "Predict K/V (ours)",
    "position": "Drop the oldest tokens",
    "attention": "Drop the least attended",
    "truncated": "Truncate the prompt",
    "random": "Drop random tokens",
}
NEEDLE_PROMPTS, DEPTHS, NEEDLE_TOKENS, CUE_TOKENS = 32, 10, 32, 8
NEEDLE_SIZE = (
    f"measure.needle.windows={NEEDLE_PROMPTS}", f"measure.needle.depths={DEPTHS}", f"measure.needle.needle_tokens={NEEDLE_TOKENS}",
    f"measure.needle.cue_tokens={CUE_TOKENS}",
)  # fmt: skip
PROMPT_TOKENS = {"reference-gpt2": 448, "reference-llama": 448, "far-gpt2": 960, "far-llama": 960}
NEEDLE_PANELS = {model: f"{model}, prompts of {tokens} tokens" for model, tokens in PROMPT_TOKENS.items()}


def needle_rows() -> list[Row]:
    """Dense and every row, a panel a model."""
    found: list[Row] = []
    for model, tokens in PROMPT_TOKENS.items():
        always = (*windows_of(tokens), "measure=needle", *NEEDLE_SIZE, f"model={model}", "dataset=python-docs")
        found += panel_rows(model, {"": NEEDLE}, *always, own=truncations(tokens))
    return found


def _needles(record: Record, depth: int | str | None = None, what: str = "answered") -> pd.Series:
    """At one depth, or over all of them: percent of a needle's tokens that are found, or `nats` a token; a row a window."""
    names = [column(what, place) for place in (range(DEPTHS) if depth is None else (depth,))]
    return record.windows[names].dropna().mean(axis=1) * (100 if what == "answered" else 1)


def _found_at_depths(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    rows = []
    ours = {one.row.panel: one.record for one in outcomes if one.row.key == "40" and one.record is not None}
    for one in outcomes:
        row, record = comparison.described(one), one.record
        if record is not None and one.dense is not None:
            row |= {"saved": record.flops_saved_pct("prompt_executed"), "record": record.fingerprint}
            means = {f"depth_{depth}": _needles(record, depth) for depth in range(DEPTHS)}
            means |= {"none": _needles(record, ABSENT), "nats": _needles(record, what="nats")}
            means["none_nats"] = _needles(record, ABSENT, "nats")
            row |= _averaged("found", _needles(record)) | {key: float(values.mean()) for key, values in means.items()}
            against = {"minus_dense": one.dense, "minus_ours": ours.get(one.row.panel)} if record.modules else {}
            for key, other in against.items():
                row |= {} if other in (None, record) else _averaged(key, _needles(record) - _needles(other))
        rows.append(row)
    named = [f"{name}{end}" for name in ("found", "minus_dense", "minus_ours") for end in ENDS]
    named += [*(f"depth_{depth}" for depth in range(DEPTHS)), "none", "nats", "none_nats", "record"]
    return pd.DataFrame(rows, columns=["panel", "section", "key", "technique", "status", "saved", *named])


def _panels(outcomes: Sequence[Outcome], titles: Mapping[str, str], columns: tuple[Column, ...]) -> tuple[Panel, ...]:
    """A panel for each title, with the notes of its own records."""
    notes = {key: provenance.notes([one for one in outcomes if one.row.panel == key]) for key in titles}
    return tuple(Panel(key, title, columns, notes[key]) for key, title in titles.items())


@artefact(needle_rows)
def table_needle(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table needle: a passage that stands once in the prompt, at ten depths, and is asked for at its end."""
    found_of = "needle found %"
    columns = (
        Column("", "technique", comparison.technique_cell, align="left"),
        Column("", "saved %", "{saved:+.1f}"),
        Column(found_of, "all depths", with_ends("found", between=" ")),
        Column(found_of, "minus dense", with_ends("minus_dense", "+.1f", " ")),
        Column(found_of, "minus ours", with_ends("minus_ours", "+.1f", " "), expendable=1),
        *(Column("by depth", f"{100 * (depth + 0.5) / DEPTHS:.0f}%", f"{{depth_{depth}:.0f}}") for depth in range(DEPTHS)),
        Column("by depth", "no needle", "{none:.0f}"),
        *(
            Column("nats a token", said, f"{{{key}:.2f}}", expendable=2)
            for key, said in (("nats", "all depths"), ("none_nats", "no needle"))
        ),
    )
    panels = _panels(outcomes, NEEDLE_PANELS, columns)
    legend = (
        f"A passage of {NEEDLE_TOKENS} tokens from another window replaces {NEEDLE_TOKENS} tokens of the prompt. The prompt ends with the passage's first {CUE_TOKENS} tokens. "
        f"The other {NEEDLE_TOKENS - CUE_TOKENS} are to follow. Needle found: share of them that is the likeliest token, given the true ones before it. It is the mean over "
        f"the first {NEEDLE_PROMPTS} prompts, with its 95% interval.",
        "by depth: how far down the passage stands, from the prompt's beginning (0%) to right before its last tokens (100%). minus dense, minus ours: over "
        "all depths, paired by prompt. no needle: the same where the passage stands at the end only. So much of it can be guessed.",
        "nats a token: negative log-likelihood of the asked tokens.",
        "far-gpt2 and far-llama were trained on windows of which some have repeated passages.",
        "saved: executed operations of the scored windows' prompts, signals included, in percent of dense.",
    )
    return Table(name, "A needle in the prompt: is it found, wherever it stands?", _found_at_depths(outcomes), panels, legend)


@artefact(needle_rows)
def figure_needle(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure needle: how much of a passage that stands once in the prompt is found, by where it stands."""
    found = _found_at_depths(outcomes).dropna(subset=["found"])
    depths = [100 * (depth + 0.5) / DEPTHS for depth in range(DEPTHS)]
    with style():
        drawing, plots = panels(2, 2, size=(9, 6), sharex=True)
        lines = {}
        for plot, (model, title) in zip(plots.flat, NEEDLE_PANELS.items(), strict=True):
            for row in found[found["panel"] == model].to_dict("records"):
                place = 0 if row["key"] == "dense" else 1 + [*NEEDLE].index(row["key"])
                look = {"color": ("black", *PALETTE[1:])[place], "marker": ("", *MARKERS)[place], "linestyle": "-"}
                lines[row["technique"]] = plot.plot(depths, [row[f"depth_{depth}"] for depth in range(DEPTHS)], **look)[0]
                if place == 0:
                    lines["Dense, no needle"] = plot.axhline(row["none"], color="black", linestyle=":", marker="")
            plot.set(title=title, ylim=(0, 100))
        for plot in plots[-1]:
            plot.set_xlabel("depth of the needle, % (100: right before the end)")
        for plot in plots[:, 0]:
            plot.set_ylabel("needle found, %")
        for name_of, line in lines.items():
            line.set_label(name_of)
        legend_below(drawing, [*lines.values()], ncols=4)
    caption = (
        f"A passage from elsewhere stands once in the prompt. Its first {CUE_TOKENS} tokens end the prompt. Found: the share of the next {NEEDLE_TOKENS - CUE_TOKENS} that is "
        "predicted, each given the true ones before it.",
        *provenance.notes(outcomes),
    )
    # By how much each is worse than dense on the model that finds most; nothing where one was not measured.
    less, finding = found[found["panel"] == "far-gpt2"].set_index("key")["minus_dense"], ""
    said = {"40": "predicting K/V finds", "truncated": "truncating", "position": "dropping the oldest"}
    if {*said} <= {*less.index}:
        apart = ", ".join(f"{what} {-less[key]:.0f}" for key, what in said.items())
        finding = f"far-gpt2: {apart} points less of a needle than dense"
    return Figure(name, "A needle in the prompt", found.reset_index(drop=True), drawing, caption, finding=finding)


# --- the model writes ------------------------------------------------------------------------------------------------------------
PROMPTS = 128  # of the first 64, reference-gpt2 keeps 31% of the dense tokens under prediction, of all 25%: fewer do not decide
WRITING = (
    "measure=generation", "protocol=continuation", f"dataset.windows={PROMPTS}", f"measure.generation.prompts={PROMPTS}",
    "measure.generation.prompt_tokens=448",
)  # fmt: skip
WAYS = {
    GREEDY: "Greedy: the likeliest token each time",
    SAMPLED: "Sampled: temperature 1, the same random numbers for both models",
    **{model: f"{model}, greedy, after prompts of 960 tokens" for model in FAR_MODELS},
}
SETTINGS_HERE = {
    "quicksilver": ("quicksilver",),
    "protected": PROTECTED,
    "paper": ("halting,kv_skipping,token_fusion,adaptive_quantization", *FUSION),
}
WORK = "About 40% of the prompt's work"
ALIKE = {
    "quicksilver": "Ours: predicted K/V",
    "position": "Oldest dropped",
    "attention": "Least attended dropped",
    "truncated": "Truncation, newest kept",
    "random": "Random tokens dropped",
}
SECTIONS = {
    WORK: ALIKE | {"protected": "Ours, with the last 92 tokens computed in all layers"},
    "The paper's rules, at what they save": {"paper": "All four, as in table 11"},
}
# Columns of generation.parquet that are averaged over prompts, and by how much they are multiplied.
_MEANS = {"same_tokens": 1.0, "agreement": 100.0, "edit_distance": 100.0, "repeated": 100.0, "distinct": 100.0, "nats": 1.0}
_OF_DENSE = ("repeated", "distinct", "nats")  # those that the dense text has by itself

LEGEND = (
    "same: tokens before the first that differs from the dense continuation, mean over prompts with its 95% interval; below it how many "
    "continuations are the dense one to the end.",
    "agree: share of places with the dense token, in percent; below it minus that of the panel's first row, paired by prompt. edit: Levenshtein "
    "distance in tokens over the length, in percent.",
    "repeated: 4-grams that stood in the same continuation before, in percent; below it minus that of the dense continuation, paired by "
    "prompt. distinct: different 2-grams, likewise.",
    "nats: negative log-likelihood a token under the dense model; below it minus that of the dense continuation, paired by prompt. Above 0: "
    "the dense model finds the text less likely than its own. A greedy text can be likelier than the dense greedy one, by repeating itself.",
    "saved: executed operations of prompt and continuation together, signals included, in percent of dense; below it of the prompts of the "
    "scored windows alone.",
    "MAUVE is in the records where its package is installed; of so few short texts it says little.",
)


def generation_rows() -> list[Row]:
    """Every row, once a panel; the first two panels share its run."""
    found = [
        _protecting(row)
        for panel in (GREEDY, SAMPLED)
        for section, members in SECTIONS.items()
        for row in chosen(panel, members, *WRITING, section=section, settings=SETTINGS | SETTINGS_HERE)
    ]
    of_length = (*windows_of(960), "dataset.windows=32", "measure=generation", "measure.generation.sampled=false")
    size = ("measure.generation.prompts=32", "measure.generation.prompt_tokens=960")
    members = {name: ALIKE[name] for name in ("quicksilver", "attention", "truncated")}
    settings = SETTINGS | SETTINGS_HERE | truncations(960)
    for model in FAR_MODELS:
        found += chosen(model, members, *of_length, *size, f"model={model}", section=WORK, settings=settings)
    return found


def written(record: Record, way: str) -> dict[str, Any]:
    """What one record says of one way of decoding: means over prompts with their intervals, differences to dense paired by prompt."""
    found = record.measured("generation", GenerationResult)
    frame = _texts(record, way)
    row: dict[str, Any] = {name: getattr(found, name) for name in ("prompts", "prompt_tokens", "new_tokens")}
    row |= {"identical": int(frame["identical"].sum()), "model": without_folders(record.model.name)}
    row["flops_saved_pct"] = 100 * (1 - found.executed_flops / found.dense_executed_flops)
    row |= {"prompt_flops_saved_pct": record.flops_saved_pct("prompt_executed"), "record": record.fingerprint}
    row |= {"weights_digest": record.model.weights_digest, "data": record.data.name}
    for name, scale in _MEANS.items():
        values = scale * frame[name].astype(float)
        row |= _averaged(name, values)
        if name in _OF_DENSE:
            row |= _averaged(f"{name}_more", values - scale * frame[f"dense_{name}"].astype(float))
    return row


def _texts(record: Record, way: str) -> pd.DataFrame:
    """Continuations of one way of decoding, a row a prompt."""
    return pd.read_parquet(record.path / TEXTS, filters=[("way", "==", way)]).sort_values("prompt", ignore_index=True)


def _averaged(column: str, values: pd.Series) -> dict[str, float]:
    return interval_columns(column, bootstrap(mean, values.astype(float)))


COLUMNS = [
    *("panel", "section", "key", "technique", "status", "prompts", "prompt_tokens", "new_tokens", "identical"),
    *("flops_saved_pct", "prompt_flops_saved_pct"),
    *(f"{name}{end}" for name in (*_MEANS, *(f"{name}_more" for name in _OF_DENSE), "agreement_less") for end in ENDS),
    *("model", "weights_digest", "data", "record", "dense_record"),
]


@artefact(generation_rows, (TEXTS,))
def table_generation(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table generation: continuations of prompts under rows that save about 40% of the prompt's work, beside the dense model's own.

    Perplexity says how likely a given text is; here the model writes. One panel is greedy, one draws with the same random numbers for both
    models. The texts themselves stand side by side in the report (`make report`, page Texts).
    """
    found = []
    first: dict[str, Record] = {}  # panel -> the row that the others of the panel are compared with
    for one in outcomes:
        row, way = comparison.described(one), SAMPLED if one.row.panel == SAMPLED else GREEDY
        if one.record is not None and one.dense is not None:
            row |= written(one.record, way) | {"dense_record": one.dense.fingerprint}
            other = first.setdefault(one.row.panel, one.record)
            if other is not one.record:
                row |= _averaged("agreement_less", 100 * (_texts(one.record, way)["agreement"] - _texts(other, way)["agreement"]))
        found.append(row)
    frame, against, alone = pd.DataFrame(found, columns=COLUMNS), "against the dense text", "the text by itself"
    agreed = with_ends("agreement", between=" ") + "\n" + with_ends("agreement_less", "+.1f", " ")
    columns = (
        Column("", "technique", comparison.technique_cell, align="left"),
        Column("", "saved %", "{flops_saved_pct:+.1f}\nprompt {prompt_flops_saved_pct:+.1f}"),
        Column(against, "same", with_ends("same_tokens", between=" ") + "\n{identical:.0f} of {prompts:.0f} to the end"),
        Column(against, "agree", agreed, expendable=1),
        Column(against, "edit", with_ends("edit_distance", between=" "), expendable=2),
        *(
            Column(alone, one, f"{{{one}:.{decimals}f}}\n" + with_ends(f"{one}_more", f"+.{decimals}f", " "), expendable=rank)
            for one, decimals, rank in (("repeated", 1, 0), ("distinct", 1, 3), ("nats", 2, 0))
        ),
    )
    sizes = frame[["prompts", "prompt_tokens", "new_tokens"]].dropna().drop_duplicates().astype(int).itertuples(index=False)
    size = [f"{prompts} prompts of {prompt} tokens, {new} new tokens after each." for prompts, prompt, new in sizes]
    return Table(
        name, "Generated text under modules beside the dense model's", frame, _panels(outcomes, WAYS, columns), (*size, *LEGEND)
    )
