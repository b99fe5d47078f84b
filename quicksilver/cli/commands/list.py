"""Name every table and figure that `quicksilver reproduce` makes.

quicksilver list
quicksilver list figure
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report.artefacts import artefacts, listing
from quicksilver.runtime.errors import ConfigError


def main(words: Sequence[str]) -> int:
    """Print the list; returns the exit code.

    Raises:
        ConfigError: words that are neither table nor figure.
    """
    if unknown := {*words} - {"table", "figure"}:
        raise ConfigError(f"{min(unknown)}: quicksilver list takes table, figure, or nothing.")
    print(listing([artefact for artefact in artefacts() if not words or artefact.kind in words]))
    return 0
