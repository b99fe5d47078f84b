"""What a run is worth and what it cost: quality, FLOPs, wall clock, energy and memory, each in a pass of its own.

Floor: above runtime, modules and data, below harness and report (docs/design.md §7). Names are imported when asked for: a stopwatch needs torch
alone, perplexity needs pandas as well.
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "Measurement": "measurement", "Result": "measurement", "Setting": "measurement",
    "Bench": "bench", "run_measurements": "bench",
    "Alternation": "latency", "LatencySamples": "latency", "alternate": "latency", "shared_weight_copy": "latency",
    "PeakMemory": "memory", "peak_memory": "memory", "peak_tensor_bytes": "memory",
    "attention_pairs": "flop_counter", "count_by_operator": "flop_counter", "count_executed": "flop_counter",
    "AuditResult": "audit", "Protocol": "perplexity", "Scores": "perplexity",
    "check_allowed": "perplexity", "check_windows": "perplexity", "score": "perplexity",
    "DenseLogits": "perplexity", "divergence": "perplexity",
    "Subject": "components", "component_latency": "components",
    "Served": "deployment", "serve": "deployment",
    "CodeCarbonMeter": "energy",
}  # fmt: skip

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
