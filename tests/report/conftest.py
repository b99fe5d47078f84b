"""Fixtures of the tests of tables, figures and the report. Figures are drawn coarsely, as in tests/experiments."""

from fake_harness import harness

from quicksilver.report import figure

figure._DPI = 40

__all__ = ["harness"]
