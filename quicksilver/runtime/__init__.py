"""Ground floor: executes what modules decide, on frozen decoder layers. Imports torch and transformers, nothing else."""

from quicksilver.runtime.architecture import Architecture, architecture_of
from quicksilver.runtime.engine import EXECUTIONS, KVBytes, Run, apply
from quicksilver.runtime.errors import ConfigError, QuickSilverError, UnsupportedModelError
from quicksilver.runtime.ledger import Flops
from quicksilver.runtime.module import RuntimeModule
from quicksilver.runtime.precision import PrecisionExecutor
from quicksilver.runtime.state import MISSING_KV, CacheMerge, CacheView, Fusion, LayerView, PassState, Precision, TokenState
from quicksilver.runtime.trace import PassTrace, Trace

__all__ = [
    "EXECUTIONS", "MISSING_KV", "Architecture", "CacheMerge", "CacheView", "ConfigError", "Flops", "Fusion", "KVBytes", "LayerView", "PassState", "PassTrace", "Precision", "PrecisionExecutor", "QuickSilverError",
    "Run", "RuntimeModule", "TokenState", "Trace", "UnsupportedModelError", "apply", "architecture_of",
]  # fmt: skip
