"""Give existing records the identity that this version asks for, where it computes the same numbers.

quicksilver rekey
quicksilver rekey results_dir=/folder

The golden run is compared first: where its numbers changed, no record is touched (docs/identity.md). Killed, the same command goes on.

Keys of its own:
  results_dir=FOLDER   default: $QUICKSILVER_RESULTS, or results
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from quicksilver.cli.arguments import ResultsFolder, split
from quicksilver.runtime.errors import ConfigError


def main(words: Sequence[str]) -> int:
    """Compare the golden run and re-key; returns the exit code: 1 where a record had to be left.

    Raises:
        QuickSilverError: the numbers of the golden run are not the same.
    """
    options, overrides = split(words, ResultsFolder, "rekey")
    if overrides:
        raise ConfigError(f"{overrides[0]}: rekey takes every record below results_dir=FOLDER and no other key.")
    folder = Path(options.results_dir)
    if not (folder / "runs").is_dir():
        raise ConfigError(f"results_dir={folder}: there are no records in it (no folder runs).")
    from quicksilver.runs import golden
    from quicksilver.runs.rekey import rekey

    print("Comparing the golden run …", flush=True)
    golden.compare(golden.load(), dict(golden.run()))
    done = rekey(folder)
    for name, why in done.left.items():
        print(f"{folder / 'runs' / name} is left as it is: {why}.", file=sys.stderr)
    print(
        f"{len(done.renamed)} records have their new identity, {len(done.kept)} had it, {len(done.left)} are left as they were."
    )
    return 1 if done.left else 0
