"""What a technique is, read off the class that implements it: which verbs it uses, where it may act, what it does to the weights."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

import pandas as pd

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
