"""Errors for the person at the keyboard: what was wrong, the value, what to do."""


class QuickSilverError(Exception):
    """Something that cannot be computed as asked."""


class ConfigError(QuickSilverError, ValueError):
    """An option, or a combination of options, that makes no sense; the message names the value and the remedy."""


class UnsupportedModelError(QuickSilverError):
    """A model family, cache or attention implementation the runtime has no adapter for."""
