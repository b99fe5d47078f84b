"""Everything that was made, as a W&B project: runs with their numbers and files, sweeps as groups, tables, figures.

    python -m quicksilver.report.wandb results_dir=results tracker.project=quicksilver tracker.mode=offline

Records stay the source: this is a mirror of what the report shows, made again whenever it is wanted. Offline is the default; nothing
leaves the machine until `wandb sync` (docs/wandb.md).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from quicksilver.report.site.collection import Collection, Piece, describe
from quicksilver.report.table import Written, read
from quicksilver.runs.choices import choices
from quicksilver.runs.config import TrackerConfig, compose
from quicksilver.runs.sweep import Sweep, names
from quicksilver.runs.tracker import check_tracker, mirror, start
from quicksilver.runtime.errors import QuickSilverError

TABLES_AND_FIGURES = "tables and figures"  # name and kind of the one run that is no record


def publish(results_dir: Path | str, config: TrackerConfig) -> Collection:
    """Mirror the records of this folder and those that its tables and figures name, then tables and figures; returns what was there.

    Raises:
        ConfigError: nothing was made yet, or wandb is not installed.
        QuickSilverError: W&B refuses (no login …).
    """
    check_tracker(config)
    site = Collection(Path(results_dir))
    groups = {fingerprint: f"sweep {name}" for name, members in reversed(sweeps(site).items()) for fingerprint in members}
    for fingerprint, run in site.runs.items():
        if run.record is not None:
            # Two runs of a sweep never look the same: `NAME [17/200] tau_drift=p40 | model | text | …`.
            name = " | ".join(filter(None, (run.sweep, run.label, run.differing if run.sweep is None else None)))
            # Differences to dense, which a record alone does not have.
            numbers = {key: value for key, value in run.row.items() if type(value) in (int, float)}
            kind: dict[str, Any] = dict(name=name, group=groups.get(fingerprint), tags=[piece.name for piece in run.pieces])
            mirror(run.record, config, site.root, more=numbers, **kind)
    _publish_pieces(site, config)
    return site


def sweeps(site: Collection) -> dict[str, list[str]]:
    """Fingerprints of the records of each sweep: the panels of tables that have the name of an experiment, and what `run -m` made otherwise."""
    found: dict[str, list[str]] = {}
    for piece in site.pieces:
        for panel in piece.panels.keys() & set(choices("experiment")):
            found.setdefault(panel, piece.panels[panel])
    for name in names(site.root):
        with suppress(QuickSilverError):
            made = [run.fingerprint for run in Sweep.load(site.root, name).manifest.runs if run.fingerprint is not None]
            if not any(set(made) <= set(members) for members in found.values()):
                found[name] = made
    return dict(sorted(found.items()))


def _publish_pieces(site: Collection, config: TrackerConfig) -> None:
    import wandb

    written = [(piece, piece.written, _files(piece)) for piece in site.pieces if piece.written]
    if not written:
        return
    content = hashlib.sha256(b"".join(path.read_bytes() for _, _, paths in written for path in paths))
    with start(config, site.root, id=content.hexdigest()[:20], name=TABLES_AND_FIGURES, job_type=TABLES_AND_FIGURES) as run:
        for piece, what, paths in written:
            if piece.kind == "figure" and what.pictures[0] in piece.pictures:
                run.log({piece.name: wandb.Image(str(piece.folder / what.pictures[0]), caption=piece.title)})
            elif piece.kind == "table" and what.rows:
                run.log({piece.name: _table(what)})
            for path in paths:
                run.log_artifact(str(path), name=path.name, type=piece.kind)
        if site.claims is not None:
            run.log({"claims": _table(read(site.root / "claims.json"))})


def _files(piece: Piece) -> list[Path]:
    """Its own files; what a link leads to was not written here."""
    names = sorted({f"{piece.name}.{suffix}" for suffix in ("md", "csv", "tex", "json", "svg")} - {*piece.pictures})
    return sorted(piece.folder / name for name in (*filter(piece.has, names), *piece.pictures))


def _table(written: Written) -> Any:
    import wandb

    # As text: a column that holds numbers in one row and words in the next is refused otherwise.
    rows = [["" if value is None else str(value) for value in row] for row in written.rows]
    return wandb.Table(dataframe=pd.DataFrame(rows, columns=list(written.columns), dtype=object))


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        config = compose(["tracker=wandb", *(sys.argv[1:] if words is None else words)])
        site = publish(config.results_dir, config.tracker)
    except QuickSilverError as error:
        print(error, file=sys.stderr)
        return 1
    records = sum(run.record is not None for run in site.runs.values())
    pieces = sum(piece.written is not None for piece in site.pieces)
    print(f"{records} records, {pieces} tables and figures: project {config.tracker.project}, {config.tracker.mode}.")
    if config.tracker.mode == "offline":
        print(f"To send them: wandb sync {site.root}/wandb/offline-run-*")
    if site.problems:
        print(f"Not there:\n{describe(site.problems)}", file=sys.stderr)
    return 1 if site.problems else 0


if __name__ == "__main__":
    sys.exit(main())
