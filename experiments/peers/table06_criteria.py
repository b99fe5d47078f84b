"""Table 6: decision criteria of halting and fusion: the paper's, and those that the modules decide by here.

The paper's cells are its own words. What stands beside them is read off the classes and the yaml files of `halting` and `token_fusion`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Column, Lines, Panel, Table

from . import table01_attributes as attributes

# Table 6 of the paper: aspect -> halting, fusion.
PAPER = {
    "goal": ("Freeze stable tokens", "Merge semantically similar tokens"),
    "granularity": ("Per-token", "Token pair/group"),
    "trigger": (
        "Low entropy H(p_t) < τ_halt; low drift ‖h_t^ℓ − h_t^(ℓ−1)‖; stable attention",
        "Distance ‖h_t − h_u‖ < τ_fuse; cosine similarity high; attention overlap (optional)",
    ),
    "scope": ("Local to token t", "Requires pairwise scanning"),
    "output": ("Token t halted (no deeper layers)", "Tokens (t, u) fused into one"),
    "impact": ("Reduces compute depth per token", "Shortens effective sequence length"),
    "priority": ("Prefer halting if unpaired", "Prefer fusion if high similarity"),
}
_WIDTH = 38  # characters of a cell's line


def rows() -> list[Row]:
    """None: there is nothing to run."""
    return []


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """One row an aspect."""
    from quicksilver.runs.parts import build_modules

    options = {module: attributes.settings(module) for module in ("halting", "token_fusion")}
    built = {module: build_modules({module: entry})[0] for module, entry in options.items()}
    ours = [_halting(options["halting"], built["halting"]), _fusion(options["token_fusion"], built["token_fusion"])]
    frame = pd.DataFrame(
        {
            "panel": "criteria", "section": "", "key": aspect, "aspect": aspect,
            "paper_halting": papers[0], "halting": ours[0].get(aspect, ""), "paper_fusion": papers[1], "fusion": ours[1].get(aspect, ""),
        }
        for aspect, papers in PAPER.items()
    )  # fmt: skip
    columns = (
        Column("", "aspect", lambda row: (row["aspect"],), align="left"),
        *(
            Column(group, header, _wrapped(key), align="left")
            for group, header, key in (
                ("halting", "the paper", "paper_halting"), ("halting", "here", "halting"),
                ("fusion", "the paper", "paper_fusion"), ("fusion", "here", "fusion"),
            )
        ),
    )  # fmt: skip
    notes = (
        "arXiv 2506.22396, Table 6; beside it modules=[halting] and modules=[token_fusion] with the options of their yaml files.",
    )
    legend = (
        "pN: the N-th percentile of the signal on the calibrating part of the text, layer by layer. Stable attention has no definition in the "
        "paper and is no criterion here; attention received is a signal of its own (signal=attention).",
        "The paper's last row contradicts its 2.4 and I.4, which put halting first (conflict 16): that is the order here.",
    )
    return Table(
        name,
        "Table 6: decision criteria, halting against fusion",
        frame,
        (Panel("criteria", "Criteria", columns, notes),),
        legend,
    )


def _halting(options: Mapping[str, Any], module: Any) -> dict[str, str]:
    window = " to ".join(f"{part:g}" for part in options["window"])
    return {
        "goal": f"verbs: {', '.join(attributes.verbs(type(module)))}",
        "granularity": "a token",
        "trigger": f"drift ({options['drift']}) < {options['tau_drift']} and entropy ({options['entropy']}) < {options['tau_entropy']}, after "
        f"{window} of the depth",
        "scope": _scope(module),
        "output": f"state frozen, K/V: {options['missing_kv']}; takes part again in the last {options['resume_layers']} layers",
        "priority": f"asked at {module.priority}",
    }


def _fusion(options: Mapping[str, Any], module: Any) -> dict[str, str]:
    largest = "any number" if options["max_group"] is None else f"at most {options['max_group']}"
    attention = "" if options["tau_attention"] is None else f", or query-key cosine > {options['tau_attention']}"
    return {
        "goal": f"verbs: {', '.join(attributes.verbs(type(module)))}",
        "granularity": f"neighbours, {largest} to a group",
        "trigger": f"distance of neighbours ({options['criterion']}) < {options['tau_fuse']}{attention}, after {options['start']:g} of the depth",
        "scope": _scope(module),
        "output": f"one token in the slot of the last, mean by {options['merge']}",
        "priority": f"asked at {module.priority}, after halting ({options['first']} first)",
    }


def _scope(module: Any) -> str:
    return "the token and those before it: anywhere" if module.causal else "later tokens as well: in prompts only"


def _wrapped(key: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        import textwrap

        return tuple(textwrap.wrap(row[key], _WIDTH)) or ("-",)

    return cell
