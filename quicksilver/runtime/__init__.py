"""Ground floor: executes what modules decide, on frozen decoder layers. Imports torch and transformers, nothing else.

Names are imported when they are first used: who only needs an error message does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicksilver.runtime.architecture import Architecture, architecture_of
    from quicksilver.runtime.errors import ConfigError, QuickSilverError, UnsupportedModelError
    from quicksilver.runtime.ledger import Flops
    from quicksilver.runtime.module import (
        EvictionPolicy,
        MergePolicy,
        PrecisionExecutor,
        RuntimeModule,
        SpanPolicy,
        TokenPolicy,
        Transform,
    )
    from quicksilver.runtime.pass_state import (
        MISSING_KV,
        CacheMerge,
        Eviction,
        Fusion,
        MLPMapping,
        PassState,
        Precision,
        TokenState,
    )
    from quicksilver.runtime.run import EXECUTIONS, KVBytes, Run, apply
    from quicksilver.runtime.trace import PassTrace, Trace
    from quicksilver.runtime.translation import KVTranslator, MLPMap
    from quicksilver.runtime.view import CacheView, LayerView
    from quicksilver.runtime.visibility import Span

_HOMES = ("errors", "architecture", "ledger", "module", "pass_state", "run", "trace", "translation", "view", "visibility")

__all__ = [
    "EXECUTIONS", "MISSING_KV", "Architecture", "CacheMerge", "CacheView", "ConfigError", "Eviction", "EvictionPolicy", "Flops",
    "Fusion", "KVBytes", "KVTranslator", "LayerView", "MLPMap", "MLPMapping", "MergePolicy", "PassState", "PassTrace", "Precision", "PrecisionExecutor",
    "QuickSilverError", "Run", "RuntimeModule", "Span", "SpanPolicy", "TokenPolicy", "TokenState", "Trace", "Transform",
    "UnsupportedModelError", "apply", "architecture_of",
]  # fmt: skip


def __getattr__(name: str) -> object:
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
