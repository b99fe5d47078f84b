"""A harness that runs no model, for commands that ask for records, and intervals of fewer draws, as in tests/report."""

from fake_harness import harness
from fakes import fewer_draws

__all__ = ["fewer_draws", "harness"]
