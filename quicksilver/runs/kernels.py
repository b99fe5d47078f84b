"""Which kernels are fastest for a model on this machine: measured once, kept in the results folder, part of a run's identity.

Kernels round differently, so what was chosen must be known before a record is looked for. It is measured when a run is planned, the first time
that a model meets a machine (processor, torch, number of threads); afterwards it is read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quicksilver.records.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quicksilver.runs.config import RunConfig
    from quicksilver.runtime.quantized.choosing import Choices

_KEPT = "cache/kernels.json"


def kernel_choices(config: RunConfig, weights_digest: str, load: Callable[[], PreTrainedModel]) -> Choices:
    """The choices for the linear layers of a model; a new measurement says in one line what it chose.

    Args:
        load: gives the model; called where nothing is kept.
    """
    import torch

    from quicksilver.runtime.architecture import architecture_of
    from quicksilver.runtime.quantized.choosing import Choices, choose, linears_of, machine

    threads = torch.get_num_threads()
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        store, where = Store(config.results_dir), machine()
        kept = _read(store)
        key = f"{weights_digest} {config.model.dtype} {config.model.device_map}"
        entry = kept.get(where, {}).get(key)
        if entry is not None:
            return Choices(entry["by_kind"], entry["speedup"])
        found = choose(linears_of(architecture_of(load()).layers))
        print(f"Kernels for {config.model.name} on {where}: {found.line()}", file=sys.stderr, flush=True)
        kept.setdefault(where, {})[key] = {"by_kind": dict(found.by_kind), "speedup": dict(found.speedup)}
        store.write_cache(_KEPT, kept)
        return found
    finally:
        torch.set_num_threads(threads)


def _read(store: Store) -> dict[str, dict[str, Any]]:
    """What is kept; a damaged file is a cache that is lost, and what names no kernel of this version is measured again."""
    from quicksilver.runtime.quantized.kernels import KERNELS

    try:
        kept = json.loads((store.root / _KEPT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(kept, dict):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for where, models in kept.items():
        for key, entry in models.items() if isinstance(models, dict) else ():
            chosen = entry.get("by_kind") if isinstance(entry, dict) else None
            gains = entry.get("speedup") if isinstance(entry, dict) else None
            if isinstance(chosen, dict) and isinstance(gains, dict) and set(chosen.values()) <= set(KERNELS):
                found.setdefault(where, {})[key] = entry
    return found
