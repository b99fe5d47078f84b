"""Adaptive quantization: strategies of widths, and the grid of entropy thresholds."""
