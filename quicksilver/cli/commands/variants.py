"""Write the tables and figures of other models and texts that the repository has, and the page that lists them; run nothing (for maintainers).

quicksilver variants
quicksilver variants results_dir=/folder

A variant is written where all of its rows have a record: `quicksilver reproduce table 11 model=reference-llama` makes those of one, and
`quicksilver variants`, `quicksilver keep`, `quicksilver variants` put them into the repository. Keys of its own:
  results_dir=FOLDER   default: $QUICKSILVER_RESULTS, or results
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quicksilver.cli.arguments import ResultsFolder, split
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.report.artefacts import Artefact
    from quicksilver.report.reproduction import Variant

INDEX = "variants.md"


def main(words: Sequence[str]) -> int:
    """Write what can be written; returns the exit code.

    Raises:
        ConfigError: a key that there is not.
    """
    options, overrides = split(words, ResultsFolder, "variants")
    if overrides:
        raise ConfigError(f"{overrides[0]}: variants takes results_dir=FOLDER and no other key.")
    from quicksilver.files import write_files
    from quicksilver.report.reproduction import VARIANTS, make_command, variants_page

    root = Path(options.results_dir)
    there = {variant: _write(variant, root) for variant in VARIANTS}
    commands = {variant: {one: make_command(one, variant.overrides) for one in missing} for variant, missing in there.items()}
    (path,) = write_files(root, {INDEX: variants_page(there, commands).encode()})
    for variant, missing in there.items():
        print(f"{variant.title}: {sum(why is None for why in missing.values())} of {len(missing)} tables and figures.")
    print(f"Written: {path}")
    return 0


def _write(variant: Variant, root: Path) -> dict[Artefact, str | None]:
    """Write the variant's tables and figures; why each of the others is not there."""
    from quicksilver.cli.commands.reproduce import jobs_of_all
    from quicksilver.cli.progress import counted
    from quicksilver.report.artefacts import artefacts
    from quicksilver.report.reproduction import base_config, build, recorded, why_not
    from quicksilver.report.written import read
    from quicksilver.runs.jobs import run_context
    from quicksilver.runs.record_index import RecordIndex
    from quicksilver.runs.run import store_of

    overrides = [*variant.overrides, f"results_dir={root}"]
    base = base_config(overrides)
    answers = RecordIndex(root)
    with counted(len(artefacts()), f"reading runs of {variant.title}") as done:
        work, missing = jobs_of_all(overrides, answers, to_run=False, done=done)
    place = run_context(base) if any(job.config is not None for jobs in work.values() for job in jobs) else None
    found: dict[Artefact, str | None] = dict(missing)
    for artefact, jobs in work.items():
        recorded(artefact, jobs, store_of(base), place, answers)
        written = root / f"{artefact.kind}s" / f"{artefact.name}.json"
        found[artefact] = why_not(artefact.name, jobs, read(written).records if written.is_file() else ())
        if found[artefact] is None:
            build(artefact, jobs, base, overrides)
    answers.save()
    return {artefact: found[artefact] for artefact in artefacts()}
