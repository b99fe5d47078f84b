"""Look at a sweep: what is done, running, failed and waiting, and what was found so far.

quicksilver sweep list
quicksilver sweep status NAME
quicksilver sweep status NAME results_dir=/folder

`quicksilver run -m …` makes a sweep; its name is the one given as name=…, or the one it prints. The same table is a page,
results/sweeps/NAME/index.html, which is written anew whenever a run begins or ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from quicksilver.cli.progress import width
from quicksilver.runtime.errors import ConfigError

_USAGE = "quicksilver sweep list, or quicksilver sweep status NAME (results_dir=…)"


def main(words: Sequence[str]) -> int:
    """List sweeps, or print one; returns the exit code: 1 where a run of it failed.

    Raises:
        ConfigError: no such sweep, or a request that makes no sense.
    """
    results_dir = os.environ.get("QUICKSILVER_RESULTS", "results")
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key != "results_dir":
            raise ConfigError(f"{key}: there is no such key. Keys of sweep: results_dir.")
        if equals:
            results_dir = value
        else:
            rest.append(word)
    from quicksilver.report.sweep_status import Board
    from quicksilver.runs.sweep import Sweep, names

    match rest:
        case ["list"]:
            for name in names(results_dir):
                board = Board(Sweep.load(results_dir, name))
                print(board.headline(board.rows()))
            return 0
        case ["status", name]:
            board = Board(Sweep.load(results_dir, name))
            print(board.text(width()))
            return 1 if any(row["state"] == "failed" for row in board.rows()) else 0
    raise ConfigError(f"{' '.join(rest) or 'sweep'}: {_USAGE}.")
