"""Errors for the person at the keyboard: what was wrong, the value, what to do."""

from pathlib import Path

_CLONE = Path(__file__).resolve().parents[2]


def installing(*extras: str) -> str:
    """`pip install 'quicksilver-lm[plots]'`, or from the clone that the package lies in; what an error says of a missing package."""
    where = "quicksilver-lm"
    if (_CLONE / "pyproject.toml").is_file():
        where = "." if Path.cwd() == _CLONE else str(_CLONE)
    alone = " in an environment of its own (docs/clusters.md)" if "ray" in extras else ""
    return f"pip install '{where}[{','.join(extras)}]'{alone}"


class QuickSilverError(Exception):
    """Something that cannot be computed as asked."""


class ConfigError(QuickSilverError, ValueError):
    """An option, or a combination of options, that makes no sense; the message names the value and the remedy."""


class UnsupportedModelError(QuickSilverError):
    """A model family, cache or attention implementation the runtime has no adapter for."""


class UnavailableError(ConfigError):
    """Something that this machine or this model lacks. A table has the reason in its row, and is whole.

    Attributes:
        reason: without the remedy.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason} {remedy}".strip())
        self.reason = reason


class KernelError(UnavailableError):
    """A kernel that this machine lacks or computes wrongly."""
