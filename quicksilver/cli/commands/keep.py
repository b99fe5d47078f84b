"""Put the records behind every written table, figure and the ledger into results/records, where git has them (for maintainers).

quicksilver keep
quicksilver keep results_dir=/folder

Of a record's further files, those parts are kept that a table or figure says it reads (READS in its file). A record of which more than one and a
half megabytes a file are read is not kept: whoever rebuilds its table makes the run again. Beside the records lies an index, which row of which table each of them answers,
so that a clone finds them without composing configs; it is true of the package as it is now. A table that was measured here (NAME-mine)
replaces the one of that name. Afterwards `quicksilver reproduce all` writes the tables from the records that were kept. Keys of its own:
  results_dir=FOLDER   default: $QUICKSILVER_RESULTS, or results
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from quicksilver.cli.arguments import ResultsFolder, split
from quicksilver.runtime.errors import ConfigError


def main(words: Sequence[str]) -> int:
    """Copy the records; returns the exit code.

    Raises:
        ConfigError: nothing was written yet, or a record that is named is not there.
    """
    options, overrides = split(words, ResultsFolder, "keep")
    if overrides:
        raise ConfigError(f"{overrides[0]}: keep takes results_dir=FOLDER and no other key.")
    from quicksilver.files import write_files
    from quicksilver.records.keeping import commit_records
    from quicksilver.records.store import KEPT, Store
    from quicksilver.report.artefacts import artefacts
    from quicksilver.report.reproduction import LOCAL_SUFFIX
    from quicksilver.report.written import read
    from quicksilver.runs.record_index import INDEX, RecordIndex

    root = Path(options.results_dir)
    written = {path.stem: path for kind in ("tables", "figures") for path in sorted(root.glob(f"{kind}/*.json"))}
    written |= {path.stem: path for path in sorted(root.glob("claims*.json"))}
    if not written:
        raise ConfigError(f"results_dir={root}: there is no table or figure in it whose records could be kept.")
    reads = {one.name: one.reads for one in artefacts()}
    mine = [name for name in written if name.endswith(LOCAL_SUFFIX)]
    wanted: dict[str, set[str]] = {}
    for name, path in written.items():
        if f"{name}{LOCAL_SUFFIX}" in written:
            continue  # measured anew
        for fingerprint in read(path).records:
            wanted.setdefault(fingerprint, set()).update(reads.get(name.removesuffix(LOCAL_SUFFIX).split("-")[0], ()))
    pictures = {name: read(written[name]).pictures for name in mine}
    kept = commit_records(Store(root), wanted)
    index = RecordIndex(root).index()
    write_files((root / INDEX).parent, {(root / INDEX).name: (json.dumps(index, indent=1) + "\n").encode()})
    for name in mine:
        for file in (*(f"{name}.{suffix}" for suffix in ("md", "csv", "tex", "json", "svg")), *pictures[name]):
            (written[name].parent / file).unlink(missing_ok=True)
    size = sum(path.stat().st_size for path in (root / KEPT).rglob("*") if path.is_file())
    print(f"{len(set(wanted) - {folder.name for folder in kept})} records are too large to be kept.")
    print(f"{len(kept)} records in {kept[0].parent}, {size / 1e6:.1f} MB. Now: quicksilver reproduce all")
    return 0
