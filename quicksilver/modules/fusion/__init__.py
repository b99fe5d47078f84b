"""Contextual Token Fusion: which neighbours are carried on as one super-token (paper 2.3, App. D, I).

`policy` decides about the tokens of a prompt; it reads `distances`, spares `exemptions`, and joins pairs by `grouping`. `cache` merges
K/V entries while decoding.
"""

from quicksilver.modules.fusion.policy import TokenFusion

__all__ = ["TokenFusion"]
