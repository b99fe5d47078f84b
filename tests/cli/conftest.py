"""A harness that runs no model, for commands that ask for records."""

from __future__ import annotations

from fake_harness import harness

__all__ = ["harness"]
