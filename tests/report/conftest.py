"""Fixtures of the tests of tables, figures and the report. Figures are drawn coarsely, and intervals of fewer draws, as in tests/experiments."""

from fake_harness import harness
from fakes import fewer_draws

from quicksilver.report import figure

figure._DPI = 40

__all__ = ["fewer_draws", "harness"]
