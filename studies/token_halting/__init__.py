"""Learned token halting on a detector of cars and pedestrians in lidar-like scenes (Ye et al., arXiv 2303.05078)."""
