"""Nulls and oracles: what a mechanism must be compared with (docs/design.md §4).

Many nulls are `Halting` with another signal: tokens at random or by position at an exact rate are `Halting(rule="capacity",
signal="random")` and `signal="position"`. The nulls here need more than that.
"""

from quicksilver.modules.controls.exponential_decay import ExponentialDecay
from quicksilver.modules.controls.perfect_exit import perfect_exit
from quicksilver.modules.controls.random_halting import RandomHalting
from quicksilver.modules.controls.replay import Replay
from quicksilver.modules.controls.shuffled import shuffled
from quicksilver.modules.controls.static_depth import StaticDepth
from quicksilver.modules.controls.word_class_halting import WordClassHalting

__all__ = ["ExponentialDecay", "RandomHalting", "Replay", "StaticDepth", "WordClassHalting", "perfect_exit", "shuffled"]
