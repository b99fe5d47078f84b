"""Commands of those who work on QuickSilver itself; all but completion need a clone of the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quicksilver.cli.arguments import Command, ResultsFolder, key
from quicksilver.cli.main import COMMANDS, commands, load
from quicksilver.files import write_files
from quicksilver.report.artefacts import artefacts
from quicksilver.report.table import read
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import check_positive

if TYPE_CHECKING:
    from quicksilver.report.artefacts import Artefact
    from quicksilver.report.reproduction import Variant

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "scripts" / "benchmark.py"
PARTS = ("runtime", "presets", "lengths", "prediction", "quantization", "break_even", "scaling")
# The shell hands the line up to the cursor to `quicksilver dev completion words LINE`, which answers one candidate a line.
_BASH = """_quicksilver() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##* }"
    local IFS=$'\\n'
    COMPREPLY=($(quicksilver dev completion words "$line" 2>/dev/null))
    # Readline replaces what follows the last = or : alone.
    local kept="${word%"${word##*[=:]}"}"
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -o nosort -F _quicksilver quicksilver"""
_ZSH = """_quicksilver() {
    local -a found
    found=("${(@f)$(quicksilver dev completion words "$LBUFFER" 2>/dev/null)}")
    compadd -Q -S '' -- $found
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _quicksilver quicksilver"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH}


@dataclass
class Keep(ResultsFolder):
    """
    quicksilver dev keep
    quicksilver dev keep add=[0a1b2c3d4e5f6a7b8c9d]

    With `add`, records of a method of yours join those of the repository, for the leaderboard. results/records/added.json names them.

    Of a record's further files, those parts are kept that a table or figure says it reads (READS in its file). A record of which a file is
    larger than one and a half megabytes is not kept. Beside the records lies an index: which row of which table each of them answers. A table
    that was measured here (NAME-mine) replaces the one of that name, unless records are added. Then `quicksilver reproduce all` and
    `quicksilver dev variants` write the tables from what was kept.
    """

    add: list[str] | None = key("[RECORD,…]", "fingerprints of finished runs in results/runs, or their beginnings")

    def main(self) -> int:
        from quicksilver.records.keeping import ADDED, commit_records
        from quicksilver.records.record import load_record
        from quicksilver.records.store import KEPT, Store, read_object
        from quicksilver.report.reproduction import LOCAL_SUFFIX
        from quicksilver.runs.jobs import INDEX, RecordIndex

        root, store = Path(self.results_dir), Store(self.results_dir)
        written = {path.stem: path for kind in ("tables", "figures") for path in sorted(root.glob(f"{kind}/*.json"))}
        written |= {path.stem: path for path in sorted(root.glob("claims*.json"))}
        if self.add:
            written = {name: path for name, path in written.items() if not name.endswith(LOCAL_SUFFIX)}
        for name in self.add or ():
            if not any(one.startswith(name) for one in store.folders()):
                copy = f"mkdir -p {store.runs} && cp -r FOLDER/results/runs/{name} {store.runs}/"
                raise ConfigError(f"{name}: {store.runs} has no such run. Copy it there: {copy}")
        new = [*map(store.named, self.add or ())]
        added = sorted({*read_object(root / KEPT / ADDED).get("records", ()), *new})
        if not written and not added:
            raise ConfigError(f"results_dir={root}: there is no table or figure in it whose records could be kept.")
        reads = {one.name: one.reads for one in artefacts()}
        mine = [name for name in written if name.endswith(LOCAL_SUFFIX)]
        wanted: dict[str, set[str]] = {fingerprint: set() for fingerprint in added}
        for name, path in written.items():
            for fingerprint in read(path).records if f"{name}{LOCAL_SUFFIX}" not in written else ():  # else measured anew
                wanted.setdefault(fingerprint, set()).update(reads.get(name.removesuffix(LOCAL_SUFFIX).split("-")[0], ()))
        pictures = {name: read(written[name]).pictures for name in mine}
        remembered = RecordIndex(root)  # what the repository has of it is about to be replaced, too
        print(f"Reading {len(wanted)} records, at a hundred a second …", file=sys.stderr, flush=True)
        before = (root / INDEX).read_text() if self.add and (root / INDEX).is_file() else None
        kept = commit_records(store, wanted, new if self.add else None)
        index = before or json.dumps(remembered.index(), indent=1) + "\n"
        more = {ADDED: (json.dumps({"records": added}, indent=1) + "\n").encode()} if added else {}
        write_files((root / INDEX).parent, {(root / INDEX).name: index.encode(), **more})
        for name in mine:
            # The committed one may name records that are replaced; without it, it is written anew.
            gone = [f"{name}.{suffix}" for suffix in ("md", "csv", "tex", "json", "svg")]
            for file in (f"{name.removesuffix(LOCAL_SUFFIX)}.json", *gone, *pictures[name]):
                (written[name].parent / file).unlink(missing_ok=True)
        size = sum(path.stat().st_size for path in (root / KEPT).rglob("*") if path.is_file())
        if too_large := set(wanted) - {folder.name for folder in kept}:
            print(f"{len(too_large)} records are too large to be kept.")
        then = "quicksilver reproduce all" + "; quicksilver dev variants" * bool(mine)
        if self.add:
            then = f"commit {root / KEPT}, in a clone of the project, and attach your method's file, and the yaml that modules= names, to the pull request"
        for fingerprint in new:
            record = load_record(store.folders()[fingerprint])
            dense = f", with its dense run {record.dense_fingerprint}" if record.dense_fingerprint else ""
            print(f"added {fingerprint}: {record.label}{dense}")
        print(f"{len(kept)} records in {kept[0].parent}, {size / 1e6:.1f} MB. Now: {then}")
        return 0


@dataclass
class Variants(ResultsFolder):
    """
    quicksilver dev variants

    A table or figure is written where all of its rows have a record. To add one, type `quicksilver reproduce table 11 model=reference-llama`.
    Then `dev variants`, `dev keep` and `dev variants` put it into the repository.
    """

    def main(self) -> int:
        from quicksilver.cli.commands.reproduce import Claims
        from quicksilver.report.reproduction import VARIANTS, command_of, variants_page

        root = Path(self.results_dir)
        there = {variant: _write_variant(variant, root) for variant in VARIANTS}
        for variant in VARIANTS:
            Claims.parsed([*variant.overrides, f"results_dir={root}"], "quicksilver claims").main()
        typed = {variant: {one: command_of(one, variant.overrides) for one in missing} for variant, missing in there.items()}
        (path,) = write_files(root, {"variants.md": variants_page(there, typed).encode()})
        for variant, missing in there.items():
            print(f"{variant.title}: {sum(why is None for why in missing.values())} of {len(missing)} tables and figures.")
        print(f"Written: {path}")
        return 0


def _write_variant(variant: Variant, root: Path) -> dict[Artefact, str | None]:
    """Write the variant's tables and figures; why each of the others is not there."""
    from quicksilver.cli.commands.reproduce import recorded_of_all
    from quicksilver.report.reproduction import base_config, build, why_not
    from quicksilver.runs.jobs import RecordIndex

    overrides = [*variant.overrides, f"results_dir={root}"]
    base = base_config(overrides)
    there, missing = recorded_of_all(base, overrides, RecordIndex(root))
    found: dict[Artefact, str | None] = dict(missing)
    for artefact, (jobs, _) in there.items():
        written = root / f"{artefact.kind}s" / f"{artefact.name}.json"
        found[artefact] = why_not(artefact.name, jobs, read(written).records if written.is_file() else ())
        if found[artefact] is None:
            build(artefact, jobs, base, overrides, svg=True)
    return {artefact: found[artefact] for artefact in artefacts()}


@dataclass
class Readme(ResultsFolder):
    """
    quicksilver dev readme
    """

    def main(self) -> int:
        from quicksilver.report.reproduction import fill_readme

        for page in ("README.md", "results/findings.md"):
            print(fill_readme(REPOSITORY / page, Path(self.results_dir)))
        return 0


@dataclass
class Benchmark(Command):
    """
    quicksilver dev benchmark
    quicksilver dev benchmark full=true
    quicksilver dev benchmark only=[runtime,scaling] minutes=5
    quicksilver dev benchmark against=HEAD~20
    """

    only: list[str] | None = key("[…]", f"parts: {', '.join(PARTS)}")
    full: bool = key("true", "all parts, not the standard ones", False)
    minutes: Annotated[float, check_positive] = key("20", "no part begins after that", 20.0)
    against: str | None = key("REVISION", "is this code slower than that one? Both in turns; nothing else is measured")
    output: str | None = key("FOLDER", "default: results/benchmarks")
    runtime: str = key("OPTIONS", "further options of that part of scripts/benchmark.py, in one word", "")
    presets: str = key("OPTIONS", "in the same way", "")
    lengths: str = key("OPTIONS", "in the same way", "")
    prediction: str = key("OPTIONS", "in the same way", "")
    quantization: str = key("OPTIONS", "in the same way", "")
    break_even: str = key("OPTIONS", "in the same way", "")
    scaling: str = key("OPTIONS", "in the same way", "")

    def main(self) -> int:
        """Run scripts/benchmark.py; returns its exit code."""
        if self.only is not None and (not self.only or set(self.only) - set(PARTS)):
            unknown = next((part for part in self.only if part not in PARTS), "[]")
            raise ConfigError(f"only={unknown}: there is no such part. Parts: {', '.join(PARTS)}.")
        if not SCRIPT.is_file():
            raise ConfigError("quicksilver dev benchmark needs a clone: its scripts are not in the installed package.")
        return subprocess.run(self.command()).returncode

    def command(self) -> list[str]:
        """The command line of scripts/benchmark.py, or of scripts/benchmark_against.py."""
        if self.against is not None:
            words = [sys.executable, str(SCRIPT.with_name("benchmark_against.py")), self.against]
            return [*words, *(["--output", str(Path(self.output) / "against.json")] if self.output else [])]
        words = [sys.executable, str(SCRIPT), "all", "--minutes", str(self.minutes)]
        words += ["--only", *self.only] if self.only else ["--full"] * self.full
        words += ["--output", str(Path(self.output))] if self.output else []
        return [*words, *(f"--{part.replace('_', '-')}={more}" for part in PARTS if (more := getattr(self, part)))]


@dataclass
class Completion(Command):
    """
    eval "$(quicksilver dev completion bash)"      in ~/.bashrc, or with zsh in ~/.zshrc
    """

    takes = "all"

    def main(self) -> int:
        words = self.overrides
        if len(words) == 2 and words[0] == "words":
            print("\n".join(candidates(words[1])))
        elif len(words) == 1 and words[0] in SCRIPTS:
            print(SCRIPTS[words[0]])
        else:
            raise ConfigError(f"{' '.join(words) or 'nothing'}: say for which shell: quicksilver dev completion bash, or zsh.")
        return 0


def candidates(line: str) -> list[str]:
    """Words that may end `line`, the command line up to the cursor; none where nothing is known."""
    words = line.split()
    word = "" if not words or line.endswith(" ") else words.pop()
    return [one for one in _all_of(words[1:], word) if one.startswith(word)]


def _all_of(given: Sequence[str], word: str) -> list[str]:
    """Whatever may follow `given`, the words after `quicksilver`."""
    if not given or given == ["dev"]:
        return commands("dev " if given else "")
    depth = 2 if given[0] == "dev" else 1
    name, rest = " ".join(given[:depth]), given[depth:]
    if name not in COMMANDS:
        return []
    command = load(name)
    if names := command.next_names(rest):
        return names
    of_run = _of_run([one for one in rest if "=" in one], word) if command.takes == "run" or name == "run" else []
    return sorted({*(f"{own}=" for own in command.own_keys()), *of_run})


def _of_run(overrides: Sequence[str], word: str) -> list[str]:
    """Hydra's own completion of an override, with what was given before it."""
    from hydra.errors import HydraException
    from hydra.plugins.completion_plugin import DefaultCompletionPlugin
    from omegaconf.errors import OmegaConfBaseException

    from quicksilver.runs.choices import choices
    from quicksilver.runs.config import hydra_started

    key, equals, value = word.partition("=")
    if key == "modules" and equals:  # a list: its last name is completed, which Hydra does not
        chosen = value.lstrip("[").split(",")[:-1]
        return [f"modules=[{','.join([*chosen, name])}" for name in choices("modules") if name not in chosen]
    with hydra_started() as hydra:
        try:
            return DefaultCompletionPlugin(hydra.config_loader)._query("run", " ".join([*overrides, word]))
        except (HydraException, OmegaConfBaseException):
            return []
