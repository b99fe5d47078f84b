"""Put the written tables and figures into README.md of a clone.

quicksilver readme
quicksilver readme results_dir=/folder
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quicksilver.cli.arguments import split
from quicksilver.report.reproduction import fill_readme


@dataclass
class Options:
    """results_dir: folder that holds tables/ and figures/, as README.md is to name it."""

    results_dir: str = "results"


def main(words: Sequence[str]) -> int:
    """Rewrite what stands between the markers; returns the exit code.

    Raises:
        ConfigError: no README there, or something marked that was not written yet.
    """
    options, _ = split(words, Options, "readme")
    print(fill_readme(Path(__file__).resolve().parents[3] / "README.md", Path(options.results_dir)))
    return 0
