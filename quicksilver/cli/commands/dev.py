"""Commands of those who work on QuickSilver itself; all but completion need a clone of the repository.

quicksilver dev benchmark                what the runtime costs and saves on this machine, within twenty minutes
quicksilver dev benchmark only=[runtime,scaling] minutes=5
quicksilver dev benchmark against=HEAD~20
quicksilver dev keep                     put the records behind every written table, figure and the ledger into results/records, where git has them
quicksilver dev variants                 write what the repository has of other models and texts: tables, figures, the ledger, and results/variants.md
eval "$(quicksilver dev completion bash)"      completes commands, keys and choices; in ~/.bashrc, or with zsh in ~/.zshrc
quicksilver dev readme                   put the written tables and figures into README.md, between its markers

Keys of keep, variants and readme: results_dir=FOLDER (default: $QUICKSILVER_RESULTS, or results). Keys of benchmark:
  only=[…]          parts: runtime, prediction, quantization, break_even, scaling
  minutes=16        no part begins after that
  against=REVISION  is this code slower than that one? Both in turns; nothing else is measured
  output=FOLDER     default: results/benchmarks
  runtime=OPTIONS   further options of that part of scripts/benchmark.py, in one word; in the same way prediction, quantization, break_even, scaling

keep: of a record's further files, those parts are kept that a table or figure says it reads (READS in its file); a record of which a file is
larger than one and a half megabytes is not kept. Beside the records lies an index, which row of which table each of them answers. A table
that was measured here (NAME-mine) replaces the one of that name. Then `quicksilver reproduce all` writes the tables from what was kept.
variants: one is written where all of its rows have a record. `quicksilver reproduce table 11 model=reference-llama` makes those of one, and
`dev variants`, `dev keep`, `dev variants` put them into the repository.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quicksilver.cli.arguments import ResultsFolder, split
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Options, check_positive

if TYPE_CHECKING:
    from quicksilver.report.artefacts import Artefact
    from quicksilver.report.reproduction import Variant

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "scripts" / "benchmark.py"
PARTS = ("runtime", "prediction", "quantization", "break_even", "scaling")


def main(words: Sequence[str]) -> int:
    """Do what the first word says; returns the exit code.

    Raises:
        ConfigError: there is no such command, or it refuses a key.
    """
    name, *rest = words or ["nothing"]
    if name not in COMMANDS:
        raise ConfigError(f"{name}: quicksilver dev takes {', '.join(COMMANDS)}.")
    return COMMANDS[name](rest)


def _results(words: Sequence[str], command: str) -> Path:
    options, overrides = split(words, ResultsFolder, f"dev {command}")
    if overrides:
        raise ConfigError(f"{overrides[0]}: dev {command} takes results_dir=FOLDER and no other key.")
    return Path(options.results_dir)


def keep(words: Sequence[str]) -> int:
    """Copy the records; returns the exit code.

    Raises:
        ConfigError: nothing was written yet, or a record that is named is not there.
    """
    from quicksilver.files import write_files
    from quicksilver.records.keeping import commit_records
    from quicksilver.records.store import KEPT, Store
    from quicksilver.report.artefacts import artefacts
    from quicksilver.report.reproduction import LOCAL_SUFFIX
    from quicksilver.report.table import read
    from quicksilver.runs.jobs import INDEX, RecordIndex

    root = _results(words, "keep")
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


def variants(words: Sequence[str]) -> int:
    """Write what can be written; returns the exit code.

    Raises:
        ConfigError: a key that there is not.
    """
    from quicksilver.cli.commands import claims
    from quicksilver.files import write_files
    from quicksilver.report.reproduction import VARIANTS, make_command, variants_page

    root = _results(words, "variants")
    there = {variant: _write_variant(variant, root) for variant in VARIANTS}
    for variant in VARIANTS:
        claims.main([*variant.overrides, f"results_dir={root}"])
    commands = {variant: {one: make_command(one, variant.overrides) for one in missing} for variant, missing in there.items()}
    (path,) = write_files(root, {"variants.md": variants_page(there, commands).encode()})
    for variant, missing in there.items():
        print(f"{variant.title}: {sum(why is None for why in missing.values())} of {len(missing)} tables and figures.")
    print(f"Written: {path}")
    return 0


def _write_variant(variant: Variant, root: Path) -> dict[Artefact, str | None]:
    """Write the variant's tables and figures; why each of the others is not there."""
    from quicksilver.cli.commands.reproduce import recorded_of_all
    from quicksilver.report.artefacts import artefacts
    from quicksilver.report.reproduction import base_config, build, why_not
    from quicksilver.report.table import read
    from quicksilver.runs.jobs import RecordIndex

    overrides = [*variant.overrides, f"results_dir={root}"]
    base = base_config(overrides)
    answers = RecordIndex(root)
    there, missing = recorded_of_all(base, overrides, answers)
    found: dict[Artefact, str | None] = dict(missing)
    for artefact, (jobs, _) in there.items():
        written = root / f"{artefact.kind}s" / f"{artefact.name}.json"
        found[artefact] = why_not(artefact.name, jobs, read(written).records if written.is_file() else ())
        if found[artefact] is None:
            build(artefact, jobs, base, overrides)
    return {artefact: found[artefact] for artefact in artefacts()}


def readme(words: Sequence[str]) -> int:
    """Rewrite what stands between the markers; returns the exit code.

    Raises:
        ConfigError: no README there, or something marked that was not written yet.
    """
    from quicksilver.report.reproduction import fill_readme

    print(fill_readme(REPOSITORY / "README.md", _results(words, "readme")))
    return 0


# --- benchmark --------------------------------------------------------------------------------------------------------------------


@dataclass
class Benchmark(Options):
    """Keys of `quicksilver dev benchmark`."""

    only: list[str] | None = None
    minutes: Annotated[float, check_positive] = 16.0
    against: str | None = None
    output: str | None = None
    runtime: str = ""
    prediction: str = ""
    quantization: str = ""
    break_even: str = ""
    scaling: str = ""


def benchmark(words: Sequence[str]) -> int:
    """Run scripts/benchmark.py; returns its exit code.

    Raises:
        ConfigError: a part that there is not, a key of a run, or no clone.
    """
    options, overrides = split(words, Benchmark, "dev benchmark")
    if overrides:
        raise ConfigError(f"{overrides[0]}: a benchmark has shapes of its own and no run. Keys: {', '.join(vars(options))}.")
    if options.only is not None and (not options.only or set(options.only) - set(PARTS)):
        unknown = next((part for part in options.only if part not in PARTS), "[]")
        raise ConfigError(f"only={unknown}: there is no such part. Parts: {', '.join(PARTS)}.")
    if not SCRIPT.is_file():
        raise ConfigError(
            "quicksilver dev benchmark needs a clone of the repository: its scripts are not in the installed package."
        )
    return subprocess.run(benchmark_command(options)).returncode


def benchmark_command(options: Benchmark) -> list[str]:
    """The command line of scripts/benchmark.py, or of scripts/benchmark_against.py."""
    output = Path(options.output) if options.output else None
    if options.against is not None:
        words = [sys.executable, str(SCRIPT.with_name("benchmark_against.py")), options.against]
        return [*words, *(["--output", str(output / "against.json")] if output else [])]
    words = [sys.executable, str(SCRIPT), "all", "--minutes", str(options.minutes)]
    words += ["--only", *options.only] if options.only else []
    words += ["--output", str(output)] if output else []
    for part in PARTS:
        more = getattr(options, part)
        words += [f"--{part.replace('_', '-')}={more}"] if more else []
    return words


def completion(words: Sequence[str]) -> int:
    """Print the script of a shell, or the candidates of a line; returns the exit code.

    Raises:
        ConfigError: another shell.
    """
    from quicksilver.cli.completion import SCRIPTS, candidates

    if len(words) == 2 and words[0] == "words":
        print("\n".join(candidates(words[1])))
        return 0
    if len(words) != 1 or words[0] not in SCRIPTS:
        raise ConfigError(f"{' '.join(words) or 'nothing'}: say for which shell: quicksilver dev completion bash, or zsh.")
    print(SCRIPTS[words[0]])
    return 0


COMMANDS = {"benchmark": benchmark, "completion": completion, "keep": keep, "readme": readme, "variants": variants}
