"""Quantised arithmetic: codes of activations and K/V, linear layers on them."""
