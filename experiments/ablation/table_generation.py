"""Table generation: continuations of prompts under rows that save about 40% of the prompt's work, beside the dense model's own.

Perplexity says how likely a given text is; here the model writes. One panel is greedy, one draws with the same random numbers for both
models. The texts themselves stand side by side in the report (`make report`, page Texts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from quicksilver.measure.generation import GREEDY, SAMPLED, TEXTS, GenerationResult
from quicksilver.records.record import Record
from quicksilver.records.stats import bootstrap
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import ENDS, Column, Panel, Table, with_ends, without_folders

from .prompts import KEPT, windows_of
from .techniques import SETTINGS, chosen

READS = (TEXTS,)
PANELS = {
    GREEDY: "Greedy: the likeliest token each time",
    SAMPLED: "Sampled: temperature 1, the same random numbers for both models",
    **{model: f"{model}, greedy, after prompts of 960 tokens" for model in KEPT},
}
ALWAYS = (
    "measure=generation", "protocol=continuation", "dataset.windows=64", "measure.generation.prompts=64",
    "measure.generation.prompt_tokens=448",
)  # fmt: skip
# Schedules that protect three tiles. On 64 calibration windows, that of reference-gpt2 has as much KL as the shipped one, and twice as many tokens
# until the first that differs; reference-llama wins nothing by its own (docs/predicted-kv.md).
LAST_92 = {
    "reference-gpt2": "{drop_before:3,drop_share:0.285714,predict_before:10,protect_first:4,protect_last:92,tile:32}",
    "reference-llama": "{drop_before:3,drop_share:0.214286,predict_before:9,protect_first:4,protect_last:92,tile:32}",
}
SETTINGS_HERE = {
    "quicksilver": ("quicksilver",),
    "protected": ("quicksilver", "modules.quicksilver.save=null"),
    "paper": ("halting,kv_skipping,token_fusion,adaptive_quantization",),
}
WORK = "About 40% of the prompt's work"
ALIKE = {
    "quicksilver": "Ours: oldest dropped, then predicted",
    "position": "Oldest dropped",
    "attention": "Least attended dropped",
    "truncated": "Truncation, newest kept",
    "random": "Random tokens dropped",
}
SECTIONS = {
    WORK: ALIKE | {"protected": "Ours, with the last 92 tokens computed in all layers"},
    "The paper's rules, at what they save": {"paper": "All four"},
}
# Columns of generation.parquet that are averaged over prompts, and by how much they are multiplied.
_MEANS = {"same_tokens": 1.0, "agreement": 100.0, "edit_distance": 100.0, "repeated": 100.0, "distinct": 100.0, "nats": 1.0}
_OF_DENSE = ("repeated", "distinct", "nats")  # those that the dense text has by itself

LEGEND = (
    "same: tokens before the first that differs from the dense continuation, mean over prompts with its 95% interval; below it how many "
    "continuations are the dense one to the end.",
    "agree: share of places with the dense token; edit: Levenshtein distance in tokens over the length. Both in percent.",
    "repeated: 4-grams that stood in the same continuation before, in percent; below it minus that of the dense continuation, paired by "
    "prompt. distinct: different 2-grams, likewise.",
    "nats: negative log-likelihood a token under the dense model; below it minus that of the dense continuation, paired by prompt. Above 0: "
    "the dense model finds the text less likely than its own. A greedy text can be likelier than the dense greedy one, by repeating itself.",
    "saved: executed operations of prompt and continuation together, signals included, in percent of dense; below it of the prompts of the "
    "scored windows alone.",
    "MAUVE is in the records where its package is installed; of so few short texts it says little.",
)


def rows() -> list[Row]:
    """Every row, once a panel; the first two panels share its run."""
    found = [
        _protecting(row) if row.key == "protected" else row
        for panel in (GREEDY, SAMPLED)
        for section, members in SECTIONS.items()
        for row in chosen(panel, members, *ALWAYS, section=section, settings=SETTINGS | SETTINGS_HERE)
    ]
    of_length = (*windows_of(960), "dataset.windows=32", "measure=generation", "measure.generation.sampled=false")
    size = ("measure.generation.prompts=32", "measure.generation.prompt_tokens=960")
    for model, kept in KEPT.items():
        truncated = ("prompt_truncation", f"modules.prompt_truncation.keep={kept[960][0]}")
        settings = SETTINGS | SETTINGS_HERE | {"truncated": truncated}
        members = {name: ALIKE[name] for name in ("quicksilver", "attention", "truncated")}
        found += chosen(model, members, *of_length, *size, f"model={model}", section=WORK, settings=settings)
    return found


def _protecting(row: Row) -> Row:
    """The row with each model's schedule."""
    of_model = {model: (*row.overrides, f"modules.quicksilver.schedule={schedule}") for model, schedule in LAST_92.items()}
    return replace(row, overrides=of_model["reference-gpt2"], of_model=of_model)


def measured(record: Record, way: str) -> dict[str, Any]:
    """What one record says of one way of decoding: means over prompts with their intervals, differences to dense paired by prompt."""
    found = record.measured("generation", GenerationResult)
    frame = pd.read_parquet(record.path / TEXTS, filters=[("way", "==", way)])
    row: dict[str, Any] = {
        **{"prompts": found.prompts, "prompt_tokens": found.prompt_tokens, "new_tokens": found.new_tokens},
        "identical": int(frame["identical"].sum()),
        "flops_saved_pct": 100 * (1 - found.executed_flops / found.dense_executed_flops),
        "prompt_flops_saved_pct": record.flops_saved_pct("prompt_executed"),
        **{"model": without_folders(record.model.name), "weights_digest": record.model.weights_digest, "data": record.data.name},
        "record": record.fingerprint,
    }
    for name, scale in _MEANS.items():
        values = scale * frame[name].astype(float)
        averaged = {name: values}
        if name in _OF_DENSE:
            averaged[f"{name}_more"] = values - scale * frame[f"dense_{name}"].astype(float)
        for column, mine in averaged.items():
            row |= dict(zip((f"{column}{end}" for end in ENDS), bootstrap(lambda x: x.mean(-1), mine), strict=True))
    return {key: float(value) if hasattr(value, "dtype") else value for key, value in row.items()}


COLUMNS = [
    *("panel", "section", "key", "technique", "status", "prompts", "prompt_tokens", "new_tokens", "identical"),
    *("flops_saved_pct", "prompt_flops_saved_pct"),
    *(f"{name}{end}" for name in (*_MEANS, *(f"{name}_more" for name in _OF_DENSE)) for end in ENDS),
    *("model", "weights_digest", "data", "record", "dense_record"),
]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel a way of decoding."""
    found = []
    for one in outcomes:
        row = comparison.described(one)
        if one.record is not None and one.dense is not None:
            way = SAMPLED if one.row.panel == SAMPLED else GREEDY
            row |= measured(one.record, way) | {"dense_record": one.dense.fingerprint}
        found.append(row)
    frame = pd.DataFrame(found, columns=COLUMNS)
    columns = (
        Column("", "technique", comparison.technique_cell, align="left"),
        Column("", "saved %", "{flops_saved_pct:+.1f}\nprompt {prompt_flops_saved_pct:+.1f}"),
        Column(
            "against the dense text",
            "same",
            with_ends("same_tokens", between=" ") + "\n{identical:.0f} of {prompts:.0f} to the end",
        ),
        Column("against the dense text", "agree", with_ends("agreement", between=" "), expendable=1),
        Column("against the dense text", "edit", with_ends("edit_distance", between=" "), expendable=2),
        Column("the text by itself", "repeated", _more("repeated", 1)),
        Column("the text by itself", "distinct", _more("distinct", 1), expendable=3),
        Column("the text by itself", "nats", _more("nats", 2)),
    )
    panels = tuple(
        Panel(key, title, columns, provenance.notes([one for one in outcomes if one.row.panel == key]))
        for key, title in PANELS.items()
    )
    return Table(name, "Generated text under modules beside the dense model's", frame, panels, (*_size(frame), *LEGEND))


def _size(frame: pd.DataFrame) -> tuple[str, ...]:
    sizes = frame[["prompts", "prompt_tokens", "new_tokens"]].dropna().drop_duplicates().astype(int)
    return tuple(
        f"{prompts} prompts of {prompt} tokens, {new} new tokens after each."
        for prompts, prompt, new in sizes.itertuples(index=False)
    )


def _more(name: str, decimals: int) -> str:
    return f"{{{name}:.{decimals}f}}\n" + with_ends(f"{name}_more", f"+.{decimals}f", between=" ")
