"""Judge every number that the paper claims by the records that are there; run nothing.

quicksilver claims
quicksilver claims model=gpt2-large dataset=wikitext103

Prints the ledger and writes it to results/claims.md, .csv and .json. Keys: those of `quicksilver reproduce`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quicksilver.cli.arguments import check_overrides
from quicksilver.cli.commands.reproduce import recorded_of_all
from quicksilver.cli.progress import explain, width
from quicksilver.report.reproduction import LOCAL_SUFFIX, VARIANTS, all_kept, base_config, make_command, name_of
from quicksilver.report.table import read
from quicksilver.runs.jobs import RecordIndex

if TYPE_CHECKING:
    import pandas as pd

    from quicksilver.records.store import Store

NAME = "claims"


def main(words: Sequence[str]) -> int:
    """Print and write the claims ledger; returns the exit code.

    Raises:
        ConfigError: overrides that no run could have; an experiment that answers a claim or names a row that is not there.
        QuickSilverError: the model or the text of the overrides cannot be had.
    """
    from quicksilver.report.claims.ledger import Source, ledger
    from quicksilver.runs.run import store_of

    overrides = check_overrides(words, "claims")
    base = base_config(overrides)
    answers = RecordIndex(base.results_dir, base.records)
    store = store_of(base)
    found, troubles = recorded_of_all(base, overrides, answers)
    failed = [job for jobs, _ in found.values() for job in jobs if job.error is not None]
    sources = [Source(one, outcomes, make_command(one, overrides)) for one, (_, outcomes) in found.items()]
    name = name_of(NAME, base, overrides)
    whole = all(all_kept(source.outcomes, store) for source in sources) and not _lacks(store, name)
    table = ledger(sources, name if whole else f"{name}{LOCAL_SUFFIX}", _others(store) if name == NAME else {})
    print(table.text(width()))
    print("Written: " + ", ".join(map(str, table.write(store.root, "md", "csv", "json"))))
    explain(failed)
    for artefact, trouble in troubles.items():
        print(f"{artefact.kind} {artefact.number}: {trouble}", file=sys.stderr)
    return 1 if failed or troubles else 0


def _others(store: Store) -> dict[str, pd.DataFrame]:
    """The written ledgers of other models and texts, by what these are called."""
    import pandas as pd

    paths = {one.title: store.root / f"{NAME}-{one.name}.json" for one in VARIANTS}
    return {title: pd.DataFrame(read(path).entries) for title, path in paths.items() if path.is_file()}


def _lacks(store: Store, name: str) -> bool:
    """Whether the written ledger names records that are not here, too large to be kept: it says more than what can be said now."""
    path = store.root / f"{name}.json"
    return path.is_file() and any(store.get(fingerprint) is None for fingerprint in read(path).records)
