"""Static early exit: every token leaves after the same layer."""

from __future__ import annotations

from dataclasses import dataclass

from quicksilver.modules.controls import StaticDepth
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.options import Share
from quicksilver.runtime.pass_state import MissingKV


@dataclass(kw_only=True)
class StaticExit(StaticDepth):
    """Every token leaves after `depth` of the layers, and the output head reads it there. Causal.

    Source: "The Right Tool for the Job: Matching Model and Instance Complexities" (Schwartz et al., arXiv 2004.07453) and
    "Depth-Adaptive Transformer" (Elbayad et al., arXiv 1910.10073), whose exits at one depth are this.

    What differs: those train an output head for every exit; here the model is frozen and its own head, behind the final norm,
    reads a state it was not trained on. No token runs in the layers above, so their K/V are never read (`missing_kv="drop"`).

    Args:
        depth: fraction of the layers that are run; 1: all of them, the dense model.
    """

    depth: Share = 0.6
    missing_kv: MissingKV = "drop"

    def bind(self, architecture: Architecture) -> None:
        self._dense = self.depth == 1
        if not self._dense:
            super().bind(architecture)

    def acts_at(self, layer: int) -> bool:
        return not self._dense and super().acts_at(layer)
