"""Table 1: attributes of acceleration methods: the paper's, and what is read off the classes that implement them here.

The paper's columns are its own words; nothing is measured. The second panel is derived from the code: which verbs of the runtime a
class calls, whether it reads later tokens, what it does to the weights, and what it cannot be combined with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Column, Lines, Panel, Table

from . import attributes

ATTRIBUTES = ("retraining", "architecture", "runtime_only", "token_level", "stackable")
YES, NO = "yes", "no"
# Table 1 of the paper, row by row: requires retraining, architecture change, runtime-only, token-level, stackable; and what is it here.
PAPER: dict[str, tuple[tuple[str, str, str, str, str], tuple[str, ...]]] = {
    "Early exit": ((YES, "possibly", NO, NO, "limited"), ("StaticExit", "ConfidenceExit")),
    "Mixture-of-experts routing": ((YES, YES, NO, NO, NO), ()),
    "Speculative decoding": ((NO, "light wrapper", YES, NO, "limited"), ("PromptLookup",)),
    "Attention/layer pruning": ((YES, "model patch", NO, NO, "limited"), ()),
    "Quantization": ((YES, "compiler patch", NO, NO, YES), ("Int8Dynamic", "BFloat16", "FastestLinear")),
    "Token merging": (("sometimes", "light patch", YES, YES, YES), ("TokenMerging",)),
    "Sparse attention": ((YES, YES, NO, NO, NO), ("SlidingWindow", "SinkAttention")),
    "Low-rank approximation": ((YES, YES, NO, NO, "limited"), ()),
    "FlashInfer": ((NO, "kernel only", YES, NO, YES), ()),
    "LayerDrop": ((YES, YES, NO, NO, "limited"), ()),
    "QuickSilver": ((NO, NO, YES, YES, YES), ("Halting", "KVSkipping", "TokenFusion", "AdaptiveQuantization")),
    "(not in the paper's table)": (
        ("",) * 5,
        (
            "PromptTruncation",
            "PromptPruning",
            "OneShotHalting",
            "HeavyHitter",
            "StagedHalting",
            "PresetHalting",
            "LearnedHalting",
            "ChannelSparsity",
            "BlockAttention",
        ),
    ),
}


def rows() -> list[Row]:
    """None: there is nothing to run."""
    return []


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """The paper's panel and the derived one."""
    found = attributes.techniques().set_index("class", drop=False)
    papers, derived = [], []
    for technique, (values, classes) in PAPER.items():
        here = found.loc[list(classes), "module"].tolist()
        if any(values):
            papers.append({"panel": "paper", "section": "", "key": technique, "technique": technique, "here": ", ".join(here)})
            papers[-1] |= dict(zip(ATTRIBUTES, values, strict=True))
        for one in found.loc[list(classes)].to_dict("records"):
            derived.append({"panel": "derived", "section": technique, "key": one["module"], "technique": technique} | one)
    frame = pd.DataFrame([*papers, *derived])
    panels = (
        Panel(
            "paper",
            "As the paper has it",
            (
                Column("", "technique", _text("technique"), align="left"),
                *(Column("the paper", one.replace("_", " "), _text(one), align="left") for one in ATTRIBUTES),
                Column("", "here", _text("here"), align="left"),
            ),
            ("arXiv 2506.22396, Table 1; no cell of it is measured, there or here.",),
        ),
        Panel(
            "derived",
            "Read off the classes in this version",
            (
                Column("", "module", _text("module"), align="left"),
                Column("", "arXiv", _text("source"), align="left", expendable=1),
                Column("", "weights", _text("weights"), align="left"),
                Column("", "verbs", _text("verbs"), align="left"),
                Column("", "acts", _text("acts"), align="left"),
                Column("", "does not go with", _text("excludes"), align="left"),
            ),
            ("Every class of conf/modules but the nulls, with the options of its yaml.",),
        ),
    )
    legend = (
        "verbs: what it calls on the tokens of a layer (halt, skip_kv, fuse, set_bits), and what it does besides: evict and merge_cache change "
        "the K/V cache between two passes, span limits how far back queries see, applied exchanges something of the model itself. A technique "
        "without one of the first four decides about no single token.",
        "acts: anywhere where a decision about a token reads that token and those before it; in prompts where it reads later ones too; "
        "between passes where it decides about the cache alone. None of them trains anything: where the paper says that early exit or quantization requires retraining, here it goes without, and "
        "`table peers` says at what loss.",
        "does not go with: the runtime holds one bit-width and one attention span for each token, so two modules that set the "
        "same one cannot be combined. Everything else can.",
    )
    return Table(name, "Table 1: attributes of acceleration methods", frame, panels, legend)


def _text(column: str) -> Callable[[Mapping[str, Any]], Lines]:
    return lambda row: (str(row[column]) if isinstance(row[column], str) and row[column] else "-",)
