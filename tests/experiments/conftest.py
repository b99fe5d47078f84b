"""Figures are drawn coarsely here, and intervals of fewer draws: nothing that is tested depends on how many dots or draws there are."""

from fakes import fewer_draws

from quicksilver.report import figure

figure._DPI = 40

__all__ = ["fewer_draws"]
