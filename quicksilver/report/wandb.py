"""Everything that was made, as a W&B project: runs with their numbers and files, sweeps as groups, tables, figures.

    python -m quicksilver.report.wandb results_dir=results tracker.project=quicksilver tracker.mode=offline

Records stay the source: this is a mirror of what the report shows, made again whenever it is wanted. Offline is the default; nothing
leaves the machine until `wandb sync` (docs/wandb.md).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from quicksilver.harness.config import TrackerConfig, choices, compose
from quicksilver.harness.tracker import check_tracker, mirror, start
from quicksilver.report.site.site import Piece, Run, Site, describe
from quicksilver.runtime.errors import QuickSilverError

TABLES_AND_FIGURES = "tables and figures"  # name and kind of the one run that is no record


def publish(results_dir: Path | str, config: TrackerConfig) -> Site:
    """Mirror the records that tables and figures name, then the tables and figures; returns what was there.

    Raises:
        ConfigError: nothing was made yet, or wandb is not installed.
        QuickSilverError: W&B refuses (no login …).
    """
    check_tracker(config)
    site = Site(Path(results_dir))
    for run in site.runs.values():
        if run.record is not None:
            mirror(run.record, config, site.root, group=group_of(site, run), tags=_tags(run), more=_numbers(run))
    _publish_pieces(site, config)
    return site


def sweeps(site: Site) -> dict[str, list[str]]:
    """Fingerprints of the records of each multirun: the panels of tables that have the name of an experiment."""
    found: dict[str, list[str]] = {}
    for piece in site.pieces:
        for panel in piece.panels.keys() & set(choices("experiment")):
            found.setdefault(panel, piece.panels[panel])
    return dict(sorted(found.items()))


def group_of(site: Site, run: Run) -> str | None:
    """The W&B group of a record: the sweep that it belongs to, if it is of one."""
    return next((f"sweep {name}" for name, members in sweeps(site).items() if run.fingerprint in members), None)


def _tags(run: Run) -> list[str]:
    """What names the record."""
    return [piece.name for piece in run.pieces]


def _numbers(run: Run) -> dict[str, Any]:
    """Differences to dense, which a record alone does not have."""
    return {key: value for key, value in run.row.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def _publish_pieces(site: Site, config: TrackerConfig) -> None:
    written = [piece for piece in site.pieces if piece.written]
    content = hashlib.sha256()
    for path in (path for piece in written for path in _files(site, piece)):
        content.update(path.read_bytes())
    with start(config, site.root, id=content.hexdigest()[:20], name=TABLES_AND_FIGURES, job_type=TABLES_AND_FIGURES) as run:
        for piece in written:
            run.log(_shown(site, piece))
            for path in _files(site, piece):
                run.log_artifact(str(path), name=path.name, type=piece.kind)
        ledger = site.root / "claims.csv"
        if ledger.is_file():
            run.log({"claims": _table(ledger)})


def _files(site: Site, piece: Piece) -> list[Path]:
    return sorted((site.root / f"{piece.kind}s").glob(f"{piece.name}.*"))


def _shown(site: Site, piece: Piece) -> dict[str, Any]:
    """A table as a table, a figure as a picture."""
    import wandb

    folder = site.root / f"{piece.kind}s"
    if piece.kind == "figure":
        return {piece.name: wandb.Image(str(folder / f"{piece.name}.png"), caption=piece.title)}
    return {piece.name: _table(folder / f"{piece.name}.csv")} if piece.data else {}


def _table(path: Path) -> Any:
    import wandb

    # As text: a column that holds numbers in one row and words in the next is refused otherwise.
    return wandb.Table(dataframe=pd.read_csv(path, dtype=str, keep_default_na=False))


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        config = compose(["tracker=wandb", *(sys.argv[1:] if words is None else words)])
        site = publish(config.results_dir, config.tracker)
    except QuickSilverError as error:
        print(error, file=sys.stderr)
        return 1
    records = sum(run.record is not None for run in site.runs.values())
    pieces = sum(piece.written for piece in site.pieces)
    print(f"{records} records, {pieces} tables and figures: project {config.tracker.project}, {config.tracker.mode}.")
    if config.tracker.mode == "offline":
        print(f"To send them: wandb sync {site.root}/wandb/offline-run-*")
    if site.problems:
        print(f"Not there:\n{describe(site.problems)}", file=sys.stderr)
    return 1 if site.problems else 0


if __name__ == "__main__":
    sys.exit(main())
