"""The mechanisms, each a dataclass in one file: what they decide, never how it is executed. A new one is a new file."""

from quicksilver.modules.calibration import Calibrated, Calibration, Fitted, calibrate, calibrate_modules, calibrated
from quicksilver.modules.channel_sparsity import ChannelSparsity
from quicksilver.modules.controls import (
    ExponentialDecay,
    RandomHalting,
    Replay,
    StaticDepth,
    WordClassHalting,
    perfect_exit,
    shuffled,
)
from quicksilver.modules.fitted import Translator
from quicksilver.modules.fusion import TokenFusion
from quicksilver.modules.halting import PRESETS, Halting, HaltingPolicy
from quicksilver.modules.kv_skipping import KVSkipping
from quicksilver.modules.learned_halting import LearnedHalting
from quicksilver.modules.linear_mlp import LinearMLP
from quicksilver.modules.quantization import AdaptiveQuantization
from quicksilver.modules.signals import Signal, make_signal
from quicksilver.modules.staged_halting import PresetHalting, Schedule, Stage, StagedHalting
from quicksilver.runtime.quantized.codes import mix_of

__all__ = [
    "PRESETS", "AdaptiveQuantization", "Calibrated", "Calibration", "ChannelSparsity", "ExponentialDecay", "Fitted", "Halting", "HaltingPolicy",
    "KVSkipping", "LearnedHalting", "LinearMLP", "PresetHalting", "RandomHalting", "Replay", "Schedule", "Signal", "Stage", "StagedHalting", "StaticDepth", "TokenFusion",
    "Translator", "WordClassHalting", "calibrate", "calibrate_modules", "calibrated", "make_signal", "mix_of", "perfect_exit", "shuffled",
]  # fmt: skip
