"""Figures are drawn coarsely here: nothing that is tested depends on how many dots an inch has."""

from __future__ import annotations

from quicksilver.report import figure

figure._DPI = 40
