"""Table 1: attributes of acceleration methods: the paper's, and what is read off the classes that implement them here.

The paper's columns are its own words; nothing is measured. The second panel is derived from the code: which verbs of the runtime a
class calls, whether it reads later tokens, what it does to the weights, and what it cannot be combined with.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Column, Lines, Panel, Table

VERBS = ("halt", "skip_kv", "fuse", "set_bits")  # of TokenState
METHODS = ("merge_cache", "evict", "span", "applied")  # of the kinds of module that are no TokenPolicy
_CONTROLS = ("quicksilver.modules.controls", "quicksilver.fitting")  # nulls, oracles and controls are no techniques


def techniques() -> pd.DataFrame:
    """One row a class that a yaml of conf/modules names, nulls left out.

    Columns: `module` (the yaml of that class alone, or the first of several), `class`, `source` (arXiv numbers of its docstring),
    `verbs`, `weights`, `acts`, `excludes` (other modules that it does not go with), as text.
    """
    from quicksilver.runs.choices import choices
    from quicksilver.runs.parts import build_modules, module_entry

    built: dict[type, tuple[str, Any]] = {}
    for name in choices("modules"):
        (module,) = build_modules(dict([module_entry(name)]))
        if not type(module).__module__.startswith(_CONTROLS):
            shortest = min((name, built.get(type(module), (name,))[0]), key=len)
            built[type(module)] = (shortest, module if shortest == name else built[type(module)][1])
    claims = {cls: _claims(module) for cls, (_, module) in built.items()}
    rows = []
    for cls, (name, module) in sorted(built.items(), key=lambda item: item[1][0]):
        others = [built[other][0] for other in built if other is not cls and claims[other] & claims[cls]]
        rows.append(
            {
                "module": name,
                "class": cls.__name__,
                "source": ", ".join(dict.fromkeys(re.findall(r"\d{4}\.\d{5}", " ".join((inspect.getdoc(cls) or "").split())))),
                "verbs": ", ".join(verbs(cls)),
                "weights": weights(module),
                "acts": "anywhere" if module.causal else "between passes" if verbs(cls) == ["evict"] else "in prompts",
                "excludes": ", ".join(sorted(others)),
            }
        )
    return pd.DataFrame(rows)


def verbs(cls: type) -> list[str]:
    """What the class, its bases included, calls on the token state, and which methods of the other kinds of module it has."""
    called = set().union(*(_calls(base) for base in cls.__mro__ if base.__module__.startswith("quicksilver.")))
    return [verb for verb in VERBS if verb in called] + [method for method in METHODS if hasattr(cls, method)]


def weights(module: Any) -> str:
    """What happens to the model's weights while the module is applied."""
    from quicksilver.runtime import TokenPolicy, Transform

    if isinstance(module, Transform) and module.changes_weights:
        return "exchanged while applied"
    executor = module.precision if isinstance(module, TokenPolicy) else None
    return (
        "frozen" if executor is None or getattr(executor, "weights", "float") == "float" else "frozen, coded copies beside them"
    )


def _claims(module: Any) -> frozenset[str]:
    """What the runtime gives to one module only."""
    from quicksilver.runtime import SpanPolicy, TokenPolicy, Transform

    claimed = set()
    quantises = isinstance(module, TokenPolicy) and module.precision is not None
    if quantises or (isinstance(module, Transform) and module.changes_weights):
        claimed.add("weights")
    if isinstance(module, SpanPolicy) and module.span(0) is not None:
        claimed.add("span")
    return frozenset(claimed)


@cache
def _calls(cls: type) -> frozenset[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return frozenset(
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "tokens"
    )


def settings(module: str) -> Mapping[str, Any]:
    """The options of `modules=[module]`, resolved."""
    from quicksilver.runs.parts import module_entry

    return module_entry(module)[1]


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
    found = techniques().set_index("class", drop=False)
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
