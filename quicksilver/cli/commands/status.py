"""Say what is at work below a results folder: sweeps, single runs, the processes that make them, and jobs in the queue.

quicksilver status
quicksilver status results_dir=/folder

Of each run that is being made: the window, windows a second, the time left, and the host, process and job of Slurm that makes it. The same
stands in progress.json beside the unfinished record. `quicksilver list sweep NAME` is the table of one sweep.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.cli.arguments import ResultsFolder, split
from quicksilver.runtime.errors import ConfigError


def main(words: Sequence[str]) -> int:
    """Print it; returns the exit code.

    Raises:
        ConfigError: another key than results_dir.
    """
    from quicksilver.report.sweep_status import status

    options, rest = split(words, ResultsFolder, "status")
    if rest:
        raise ConfigError(f"{rest[0]}: quicksilver status takes results_dir=FOLDER and no other key.")
    print(status(options.results_dir))
    return 0
