"""Fixtures of the tests of tables, figures and the report."""

from fake_harness import harness

__all__ = ["harness"]
