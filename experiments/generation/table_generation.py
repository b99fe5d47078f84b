"""Table generation: continuations of prompts under rows that save about 40% of the prompt's work, beside the dense model's own.

Perplexity says how likely a given text is; here the model writes. One panel is greedy, one draws with the same random numbers for both
models. The texts themselves stand side by side in the report (`make report`, page Texts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from quicksilver.measure.generation import GREEDY, SAMPLED, TEXTS, GenerationResult
from quicksilver.records.record import Record
from quicksilver.records.stats import bootstrap
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.comparison import MEASURED
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number, signed, without_folders

READS = (TEXTS,)
PANELS = {
    GREEDY: "Greedy: the likeliest token each time",
    SAMPLED: "Sampled: temperature 1, the same random numbers for both models",
}
ALWAYS = (
    "measure=generation", "protocol=continuation", "dataset.windows=16", "measure.generation.prompts=16",
    "measure.generation.prompt_tokens=448",
)  # fmt: skip
MATCHED, PAPER = "About 40% of the prompt's work", "The paper's rules, at what they save"
# section -> key, what is printed, modules, overrides
ROWS: dict[str, tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...]] = {
    MATCHED: (
        ("quicksilver", "Ours: oldest dropped, then predicted", ("quicksilver",), ()),
        ("position", "Oldest dropped", ("halting_attention",), ("modules.halting.signal=position",)),
        ("attention", "Least attended dropped", ("halting_attention",), ()),
        ("truncated", "Truncation, newest kept", ("prompt_truncation",), ()),
        ("random", "Random tokens dropped", ("halting_attention",), ("modules.halting.signal=random",)),
    ),
    PAPER: (("paper", "All four", ("halting", "kv_skipping", "token_fusion", "adaptive_quantization"), ()),),
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
    """Every row, once a panel; both panels share its run."""
    found = []
    for panel in PANELS:
        for section, members in ROWS.items():
            for key, technique, modules, overrides in members:
                found.append(
                    Row(panel, section, key, technique, (*ALWAYS, f"modules=[{','.join(modules)}]", *overrides), modules)
                )
    return found


@cache
def texts(folder: Path) -> pd.DataFrame:
    """generation.parquet of a record."""
    return pd.read_parquet(folder / TEXTS)


def measured(record: Record, way: str) -> dict[str, Any]:
    """What one record says of one way of decoding: means over prompts with their intervals, differences to dense paired by prompt."""
    found = record.measured("generation", GenerationResult)
    frame = texts(record.path)
    frame = frame[frame["way"] == way]
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
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), bootstrap(lambda x: x.mean(-1), values), strict=True))
        if name in _OF_DENSE:
            difference = values - scale * frame[f"dense_{name}"].astype(float)
            ends = (f"{name}_more", f"{name}_more_low", f"{name}_more_high")
            row |= dict(zip(ends, bootstrap(lambda x: x.mean(-1), difference), strict=True))
    return {key: float(value) if hasattr(value, "dtype") else value for key, value in row.items()}


COLUMNS = [
    *("panel", "section", "key", "technique", "status", "prompts", "prompt_tokens", "new_tokens", "identical"),
    *("flops_saved_pct", "prompt_flops_saved_pct"),
    *(f"{name}{end}" for name in _MEANS for end in ("", "_low", "_high")),
    *(f"{name}_more{end}" for name in _OF_DENSE for end in ("", "_low", "_high")),
    *("model", "weights_digest", "data", "record", "dense_record"),
]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel a way of decoding."""
    found = []
    for one in outcomes:
        row: dict[str, Any] = {"panel": one.row.panel, "section": one.row.section, "key": one.row.key}
        row |= {"technique": one.row.technique, "status": one.reason or MEASURED}
        if one.record is not None and one.dense is not None:
            row |= measured(one.record, one.row.panel) | {"dense_record": one.dense.fingerprint}
        found.append(row)
    frame = pd.DataFrame(found, columns=COLUMNS)
    columns = (
        Column("", "technique", _technique, align="left"),
        Column("", "saved %", _saved),
        Column("against the dense text", "same", _same),
        Column("against the dense text", "agree", lambda row: _mean(row, "agreement"), expendable=1),
        Column("against the dense text", "edit", lambda row: _mean(row, "edit_distance"), expendable=2),
        Column("the text by itself", "repeated", lambda row: _more(row, "repeated", 1)),
        Column("the text by itself", "distinct", lambda row: _more(row, "distinct", 1), expendable=3),
        Column("the text by itself", "nats", lambda row: _more(row, "nats", 2)),
    )
    panels = tuple(
        Panel(key, title, columns, provenance.notes([one for one in outcomes if one.row.panel == key]))
        for key, title in PANELS.items()
    )
    return Table(name, "Generated text under modules beside the dense model's", frame, panels, (*_size(frame), *LEGEND))


def _size(frame: pd.DataFrame) -> tuple[str, ...]:
    sizes = frame[["prompts", "prompt_tokens", "new_tokens"]].dropna().drop_duplicates().astype(int)
    return tuple(
        f"{prompts} prompts of {prompt} tokens, {new} new tokens after each: a small sample, and its intervals say so."
        for prompts, prompt, new in sizes.itertuples(index=False)
    )


def _technique(row: Mapping[str, Any]) -> Lines:
    return (row["technique"],) if row["status"] == MEASURED else (row["technique"], row["status"])


def _saved(row: Mapping[str, Any]) -> Lines:
    whole, prompt = number(row, "flops_saved_pct"), number(row, "prompt_flops_saved_pct")
    return (NO_VALUE,) if whole is None else (signed(whole), f"prompt {signed(prompt)}")


def _same(row: Mapping[str, Any]) -> Lines:
    lines = _mean(row, "same_tokens")
    return lines if lines == (NO_VALUE,) else (lines[0], f"{row['identical']:.0f} of {row['prompts']:.0f} to the end")


def _mean(row: Mapping[str, Any], name: str) -> Lines:
    value, low, high = (number(row, f"{name}{end}") for end in ("", "_low", "_high"))
    return (NO_VALUE,) if value is None else (f"{value:.1f} [{low:.1f} {high:.1f}]",)


def _more(row: Mapping[str, Any], name: str, decimals: int) -> Lines:
    value, *more = (number(row, f"{name}{end}") for end in ("", "_more", "_more_low", "_more_high"))
    if value is None:
        return (NO_VALUE,)
    middle, low, high = (signed(one, decimals) for one in more)
    return (f"{value:.{decimals}f}", f"{middle} [{low} {high}]")
