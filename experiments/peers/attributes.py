"""Tables 1 and 6 and Figure 1: the paper's own words about techniques, beside what is read off the classes and yaml files here.

Nothing is measured. Derived from the code: which verbs of the runtime a class calls, whether it reads later tokens, what it does to the weights,
what it cannot be combined with, and by which criteria `halting` and `token_fusion` decide.
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

from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.figure import PALETTE, Figure, panels, style
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table

VERBS = ("halt", "skip_kv", "fuse", "set_bits")  # of TokenState
METHODS = ("merge_cache", "evict", "span", "applied")  # of the kinds of module that are no TokenPolicy
_OLD_NAMES = ("quicksilver", "quicksilver_50")  # of predicted_kv
_CONTROLS = ("quicksilver.modules.controls", "quicksilver.fitting")  # nulls, oracles and controls are no techniques


def techniques() -> pd.DataFrame:
    """One row a class that a yaml of conf/modules names, nulls left out.

    Columns: `module` (the yaml of that class alone, or the first of several), `class`, `source` (arXiv numbers of its docstring),
    `verbs`, `weights`, `acts`, `excludes` (other modules that it does not go with), as text.
    """
    from quicksilver.runs.choices import choices
    from quicksilver.runs.parts import build_modules, module_entry

    built: dict[type, tuple[str, Any]] = {}
    for name in sorted(reversed([name for name in choices("modules") if name not in _OLD_NAMES]), key=len):
        (module,) = build_modules(dict([module_entry(name)]))
        if not type(module).__module__.startswith(_CONTROLS):
            built.setdefault(type(module), (name, module))
    claims = {name: _claims(module) for name, module in built.values()}
    rows = []
    for cls, (name, module) in sorted(built.items(), key=lambda item: item[1][0]):
        papers = re.findall(r"\d{4}\.\d{5}", " ".join((inspect.getdoc(cls) or "").split()))
        row = {"module": name, "class": cls.__name__, "source": ", ".join(dict.fromkeys(papers)), "verbs": ", ".join(verbs(cls))}
        acts = "anywhere" if module.causal else "between passes" if verbs(cls) == ["evict"] else "in prompts"
        excludes = sorted(other for other in claims if other != name and claims[other] & claims[name])
        rows.append(row | {"weights": weights(module), "acts": acts, "excludes": ", ".join(excludes)})
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
    return "frozen" if getattr(executor, "weights", "float") == "float" else "frozen, coded copies beside them"


def _claims(module: Any) -> frozenset[str]:
    """What the runtime gives to one module only."""
    from quicksilver.runtime import SpanPolicy, TokenPolicy, Transform

    quantises = isinstance(module, TokenPolicy) and module.precision is not None
    exchanges = isinstance(module, Transform) and module.changes_weights
    spans = isinstance(module, SpanPolicy) and module.span(0) is not None
    return frozenset(["weights"] * (quantises or exchanges) + ["span"] * spans)


@cache
def _calls(cls: type) -> frozenset[str]:
    """Names of what is called on `tokens`."""
    called = (node.func for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))) if isinstance(node, ast.Call))
    methods = (one for one in called if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name))
    return frozenset(one.attr for one in methods if isinstance(one.value, ast.Name) and one.value.id == "tokens")


def _left(key: str, header: str = "", group: str = "") -> Column:
    return Column(group, header or key, f"{{{key}}}", align="left")


# --- Table 1 ----------------------------------------------------------------------------------------------------------------------
ATTRIBUTES = ("retraining", "architecture", "runtime_only", "token_level", "stackable")
YES, NO = "yes", "no"
# Table 1 of the paper, row by row: requires retraining, architecture change, runtime-only, token-level, stackable; and what is it here.
TABLE_1: dict[str, tuple[tuple[str, str, str, str, str], tuple[str, ...]]] = {
    "Early exit": ((YES, "possibly", NO, NO, "limited"), ("StaticExit", "ConfidenceExit")),
    "Mixture-of-experts routing": ((YES, YES, NO, NO, NO), ()),
    "Speculative decoding": ((NO, "light wrapper", YES, NO, "limited"), ("PromptLookup",)),
    "Attention/layer pruning": ((YES, "model patch", NO, NO, "limited"), ("ChannelPruning",)),
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
            *("PromptTruncation", "PromptPruning", "OneShotHalting", "HeavyHitter", "StagedHalting", "PresetHalting"),
            *("LearnedHalting", "LinearMLP", "ChannelSparsity", "BlockAttention"),
        ),
    ),
}


@artefact(list)
def table01_attributes(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table 1: attributes of acceleration methods: the paper's, and what is read off the classes that implement them here."""
    found = techniques().set_index("class", drop=False)
    papers, derived = [], []
    for technique, (values, classes) in TABLE_1.items():
        here = found.loc[list(classes), "module"].tolist()
        if any(values):
            papers.append({"panel": "paper", "section": "", "key": technique, "technique": technique, "here": ", ".join(here)})
            papers[-1] |= dict(zip(ATTRIBUTES, values, strict=True))
        for one in found.loc[list(classes)].to_dict("records"):
            derived.append({"panel": "derived", "section": technique, "key": one["module"], "technique": technique} | one)
    paper = Panel(
        "paper",
        "As the paper has it",
        (_left("technique"), *(_left(one, one.replace("_", " "), "the paper") for one in ATTRIBUTES), _left("here")),
        ("arXiv 2506.22396, Table 1; no cell of it is measured, there or here.",),
    )
    arxiv, apart = Column("", "arXiv", "{source}", align="left", expendable=1), _left("excludes", "does not go with")
    read_off = Panel(
        "derived",
        "Read off the classes in this version",
        (_left("module"), arxiv, _left("weights"), _left("verbs"), _left("acts"), apart),
        ("Every class of conf/modules but the nulls, with the options of its yaml.",),
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
    frame = pd.DataFrame([*papers, *derived])
    return Table(name, "Table 1: attributes of acceleration methods", frame, (paper, read_off), legend)


# --- Table 6 ----------------------------------------------------------------------------------------------------------------------
# Table 6 of the paper: aspect -> halting, fusion.
TABLE_6 = {
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
# By whether it is causal.
SCOPE = {True: "the token and those before it: anywhere", False: "later tokens as well: in prompts only"}
_WIDTH = 38  # characters of a line of a cell


@artefact(list)
def table06_criteria(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table 6: decision criteria of halting and fusion: the paper's, and those that the modules decide by here."""
    from quicksilver.runs.parts import build_modules, module_entry

    options = {module: module_entry(module)[1] for module in ("halting", "token_fusion")}
    halting, fusion = (build_modules({module: entry})[0] for module, entry in options.items())
    ours = _halting(options["halting"], halting), _fusion(options["token_fusion"], fusion)
    frame = pd.DataFrame(
        {
            **{"panel": "criteria", "section": "", "key": aspect, "aspect": aspect},
            **{"paper_halting": papers[0], "halting": ours[0].get(aspect, "")},
            **{"paper_fusion": papers[1], "fusion": ours[1].get(aspect, "")},
        }
        for aspect, papers in TABLE_6.items()
    )
    columns = [_left("aspect")]
    for group in ("halting", "fusion"):
        for header, key in (("the paper", f"paper_{group}"), ("here", group)):
            columns.append(Column(group, header, _wrapped(key), "left"))
    notes = (
        "arXiv 2506.22396, Table 6; beside it modules=[halting] and modules=[token_fusion] with the options of their yaml files.",
    )
    legend = (
        "pN: the N-th percentile of the signal on the calibrating part of the text, layer by layer. Stable attention has no definition in the "
        "paper and is no criterion here; attention received is a signal of its own (signal=attention).",
        "The paper's last row contradicts its 2.4 and I.4, which put halting first (conflict 16): that is the order here.",
    )
    panel = Panel("criteria", "Criteria", tuple(columns), notes)
    return Table(name, "Table 6: decision criteria, halting against fusion", frame, (panel,), legend)


def _halting(options: Mapping[str, Any], module: Any) -> dict[str, str]:
    window = " to ".join(f"{part:g}" for part in options["window"])
    return {
        "goal": f"verbs: {', '.join(verbs(type(module)))}",
        "granularity": "a token",
        "trigger": f"drift ({options['drift']}) < {options['tau_drift']} and entropy ({options['entropy']}) < {options['tau_entropy']}, after "
        f"{window} of the depth",
        "scope": SCOPE[module.causal],
        "output": f"state frozen, K/V: {options['missing_kv']}; takes part again in the last {options['resume_layers']} layers",
        "priority": f"asked at {module.priority}",
    }


def _fusion(options: Mapping[str, Any], module: Any) -> dict[str, str]:
    largest = "any number" if options["max_group"] is None else f"at most {options['max_group']}"
    attention = "" if options["tau_attention"] is None else f", or query-key cosine > {options['tau_attention']}"
    return {
        "goal": f"verbs: {', '.join(verbs(type(module)))}",
        "granularity": f"neighbours, {largest} to a group",
        "trigger": f"distance of neighbours ({options['criterion']}) < {options['tau_fuse']}{attention}, after {options['start']:g} of the depth",
        "scope": SCOPE[module.causal],
        "output": f"one token in the slot of the last, mean by {options['merge']}",
        "priority": f"asked at {module.priority}, after halting ({options['first']} first)",
    }


def _wrapped(key: str) -> Callable[[Mapping[str, Any]], Lines]:
    return lambda row: tuple(textwrap.wrap(row[key], _WIDTH)) or (NO_VALUE,)


# --- Figure 1 ---------------------------------------------------------------------------------------------------------------------
# The first verb that a class has says what it decides about.
BRANCHES = {
    "halt": "how deep a token goes",
    "fuse": "which tokens merge",
    "merge_cache": "which tokens merge",
    "set_bits": "bit-width of a token",
    "skip_kv": "which K/V is kept",
    "evict": "which K/V is kept",
    "span": "how far back queries see",
    "applied": "the model itself: format, decoding",
}
_OTHER = "several of these: a preset"
# Truncation is applied before the model is called, and is no format of it: class -> branch.
_APART = {"PromptTruncation": "which tokens enter"}
COLUMNS = ["branch", "module", "class", "acts", "weights", "source", "quicksilver", "height"]


@artefact(list)
def figure01_taxonomy(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 1: taxonomy of techniques: what this version implements, by what each decides about, read off the classes."""
    frame = taxonomy(techniques())
    leaves = len(frame)
    with style():
        drawing, axes = panels(size=(8.5, 0.2 * leaves + 0.5))
        axis = axes[0, 0]
        axis.set_axis_off()
        axis.set_xlim(0, 1)
        axis.set_ylim(leaves - 0.4, -1.4)
        heights = frame.groupby("branch", sort=False)["height"].agg(["mean", "min", "max"])
        root = (leaves - 1) / 2
        line: dict[str, Any] = {"linestyle": "-", "marker": ""}

        def write(x: float, y: float, text: object, **look: Any) -> None:
            axis.text(x, y, str(text), va="center", ha="left", **look)

        write(0.0, root, "runtime\nacceleration,\nfrozen model", weight="bold")
        for place, (branch, (mean, low, high)) in enumerate(heights.iterrows()):
            colour = PALETTE[place % len(PALETTE)]
            axis.plot([0.135, 0.17, 0.17, 0.2], [root, root, mean, mean], color="#8a8a8a", linewidth=0.9, **line)
            write(0.205, mean, branch, color=colour, weight="bold")
            axis.plot([0.475, 0.475], [low - 0.35, high + 0.35], color=colour, linewidth=3, **line)
            axis.axhspan(low - 0.5, high + 0.5, 0.475, 1, facecolor=colour, alpha=0.08 * (place % 2), linewidth=0)
        for one in frame.to_dict("records"):
            write(0.49, one["height"], one["module"], weight="bold" if one["quicksilver"] else "normal")
            write(0.68, one["height"], one["acts"])
            write(0.80, one["height"], one["weights"].replace("frozen, coded copies beside them", "frozen, coded copies"))
        for x, text in ((0.205, "decides about"), (0.49, "module"), (0.68, "acts"), (0.80, "weights")):
            write(x, -1, text, style="italic", color="#555555")
    said = (
        "Every mechanism of conf/modules but the nulls, grouped by what it decides about; bold: the paper's four. acts anywhere: a decision reads a "
        "token and those before it; in prompts: it reads later tokens too; between passes: it changes the cache alone. None of them trains the model.",
        "Categories of the paper that are not implemented here: " + ", ".join(one.lower() for one, (_, classes) in TABLE_1.items() if not classes) + ".",
    )  # fmt: skip
    finding = f"Of the {leaves} mechanisms of this package, {frame['quicksilver'].sum()} are the paper's"
    return Figure(name, "Figure 1: taxonomy of what is implemented", frame, drawing, said, finding=finding)


def taxonomy(found: pd.DataFrame) -> pd.DataFrame:
    """One row a class of `techniques`, by branch: `branch`, `module`, `class`, `acts`, `weights`, `source`, `quicksilver`, `height`."""
    branch = found["verbs"].map(lambda verbs: next((BRANCHES[verb] for verb in BRANCHES if verb in verbs.split(", ")), _OTHER))
    branch = found["class"].map(_APART).fillna(branch)
    order = list(dict.fromkeys([*_APART.values(), *BRANCHES.values(), _OTHER]))
    found = found.assign(branch=branch, quicksilver=found["class"].isin(TABLE_1["QuickSilver"][1]))
    place = found["branch"].map(order.index)
    found = found.assign(place=place).sort_values(["place", "module"]).drop(columns="place")
    return found.assign(height=range(len(found)))[COLUMNS]
