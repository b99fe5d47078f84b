"""Runs: their configuration, and making those whose records are missing. `compose` and `ensure` import Hydra and torch when called."""

from __future__ import annotations

from typing import Any

_HOMES = {
    "compose": "config", "RunConfig": "config",
    "ensure": "run", "make": "run", "plan": "run", "Plan": "run", "Planned": "run", "Progress": "run",
}  # fmt: skip

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
