"""What a run is worth and what it cost: quality, FLOPs, wall clock and memory, each in a pass of its own.

Floor: above runtime and modules, below data, harness and report (DESIGN §7).
"""

from quicksilver.measure.flops import attention_pairs, count_by_operator, count_executed
from quicksilver.measure.latency import Alternation, LatencySamples, Ratio, alternate
from quicksilver.measure.memory import PeakMemory, peak_memory
from quicksilver.measure.perplexity import Audit, Protocol, Scores, audit, check_allowed, check_windows, score, windows_of
from quicksilver.measure.token_bytes import token_byte_lengths

__all__ = [
    "Alternation",
    "Audit",
    "LatencySamples",
    "PeakMemory",
    "Protocol",
    "Ratio",
    "Scores",
    "alternate",
    "attention_pairs",
    "audit",
    "check_allowed",
    "check_windows",
    "count_by_operator",
    "count_executed",
    "peak_memory",
    "score",
    "token_byte_lengths",
    "windows_of",
]
