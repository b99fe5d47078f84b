"""Learned halting on a detector: the second paper (arXiv 2303.05078)."""
