"""Remake a table or figure of the paper: run what has no record yet, print, write, say how far it is from the committed one.

    python -m quicksilver.reproduce list
    python -m quicksilver.reproduce table 11 model=reference-gpt2 dataset=python-docs measure.repeats=9
    python -m quicksilver.reproduce readme

Exit code: 0 everything is there; 1 a run failed (what could be built was built); 2 the request makes no sense; 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quicksilver.report.artefacts import Artefact, Outcome, Row, artefacts, find
from quicksilver.runtime.errors import ConfigError, QuickSilverError

if TYPE_CHECKING:
    from quicksilver.harness.config import RunConfig
    from quicksilver.harness.record import Record
    from quicksilver.harness.run import Planned, Progress

NOT_YET = "not in this version"
REFUSED = "refused under all: looks ahead"
FAILED = "failed"
# Where something is or goes does not change what is measured: no other name for the table.
_NEUTRAL = ("results_dir", "data.root", "tracker")


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = _parser().parse_args(words)
    try:
        if arguments.what == "list":
            for artefact in artefacts():
                print(f"{artefact.kind} {artefact.number}: {artefact.title}")
            return 0
        if arguments.what == "readme":
            print(fill_readme(Path(__file__).resolve().parent.parent / "README.md", Path(arguments.tables)))
            return 0
        return reproduce(find(arguments.what, arguments.number), arguments.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except QuickSilverError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Finished records are kept: the same command goes on from here.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m quicksilver.reproduce", description="Remake a table or figure of the paper.")
    commands = parser.add_subparsers(dest="what", required=True, metavar="{table,figure,list,readme}")
    for kind in ("table", "figure"):
        command = commands.add_parser(kind, help=f"remake one {kind}: runs what has no record yet")
        command.add_argument("number", help="its number in the paper (`list` says which there are)")
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="model=…, dataset=…, measure.repeats=…, results_dir=…"
        )
    commands.add_parser("list", help="which tables and figures there are")
    readme = commands.add_parser("readme", help="put the written tables into README.md")
    readme.add_argument("tables", nargs="?", default="results/tables", help="folder of the written tables")
    return parser


# --- one artefact ---------------------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    """One row of the artefact on its way to an outcome."""

    row: Row
    overrides: list[str]  # the row's and the user's
    config: RunConfig | None = None
    record: Record | None = None
    reason: str | None = None
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.reason, self.error = FAILED, error


def reproduce(artefact: Artefact, overrides: Sequence[str]) -> int:
    """Run what is missing, print and write the artefact; returns the exit code.

    Raises:
        ConfigError: overrides that no run of the artefact could have.
        QuickSilverError: the model or the text cannot be had.
    """
    from quicksilver.harness.config import compose
    from quicksilver.harness.stats import MIN_WINDOWS
    from quicksilver.harness.store import Store
    from quicksilver.report.compare import committed, distance

    _check_words(overrides)
    plain = compose(list(overrides))
    if plain.dataset.windows is not None and plain.dataset.windows < MIN_WINDOWS:
        raise ConfigError(f"dataset.windows={plain.dataset.windows}: intervals need at least {MIN_WINDOWS} windows.")
    jobs = [_job(row, overrides) for row in artefact.experiment.rows()]
    _run_missing(jobs)

    failed = [job for job in jobs if job.error is not None]
    if all(job.record is None for job in jobs):
        _explain(failed)
        print(f"Nothing could be measured, so there is no {artefact.kind}.", file=sys.stderr)
        return 1
    store = Store(plain.results_dir)
    outcomes = [Outcome(job.row, job.record, store.dense_of(job.record) if job.record else None, job.reason) for job in jobs]
    table = artefact.experiment.table(outcomes, _name(artefact, plain, overrides))

    folder = Path(plain.results_dir) / "tables"
    reference = committed(folder / f"{table.name}.csv")
    print(table.text(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    print(distance(table.frame, reference, f"{table.name}.csv"))
    print("Written: " + ", ".join(map(str, table.write(folder))))
    _explain(failed)
    return 1 if failed else 0


def _check_words(overrides: Sequence[str]) -> None:
    for word in overrides:
        key = word.lstrip("+~").split("=")[0]
        if key in ("protocol", "protocol.name") or key.split(".")[0] == "modules":
            raise ConfigError(
                f"{word}: a table or figure sets protocol and modules itself. "
                f"To vary them: python -m quicksilver.run {shlex.quote(word)} …"
            )


def _name(artefact: Artefact, plain: RunConfig, overrides: Sequence[str]) -> str:
    """`table11` for the embedded default; model and dataset in the name of others, and a digest where more was changed."""
    from quicksilver.harness.config import compose

    default = compose([])
    more = sorted(word for word in overrides if word.split("=")[0] not in ("model", "dataset", *_NEUTRAL))
    parts = [artefact.name]
    if more or (plain.model.name, plain.dataset.name) != (default.model.name, default.dataset.name):
        parts += [plain.model.name, plain.dataset.name]
    if more:
        parts.append(hashlib.sha256("\n".join(more).encode()).hexdigest()[:6])
    return re.sub(r"[^\w.-]", "_", "-".join(parts))  # a model's name may be a path


def _job(row: Row, overrides: Sequence[str]) -> _Job:
    """The row's config, or why there can be none."""
    from quicksilver.harness.config import build_modules, choices, compose

    job = _Job(row, [*overrides, *row.overrides])
    if not set(row.needs) <= set(choices("modules")):
        job.reason = NOT_YET
        return job
    try:
        config = compose(job.overrides)
        modules = build_modules(config.modules)
    except ConfigError as error:
        job.fail(error)
        return job
    # Asked before anything runs: a refusal is part of the table, not a failure. The rule is quicksilver.measure's check_allowed.
    if config.protocol.name == "all" and not all(module.causal or module.lookahead for module in modules):
        job.reason = REFUSED
    else:
        job.config = config
    return job


def _run_missing(jobs: Sequence[_Job]) -> None:
    """Give every job with a config its record, or its error.

    Raises:
        QuickSilverError: what the first run needs (model, text) cannot be had; all others need it too.
    """
    from quicksilver.harness.run import Workplace, ensure, plan

    workplace = Workplace()
    waiting: list[_Job] = []
    for job in jobs:
        if job.config is None:
            continue
        try:
            plan([job.config], workplace)
        except QuickSilverError as error:
            if not waiting:
                raise
            job.fail(error)
        else:
            waiting.append(job)
    while waiting:
        configs = [job.config for job in waiting if job.config is not None]
        try:
            with _progress(plan(configs, workplace)) as report:
                records = ensure(configs, progress=report)
        except Exception as error:
            if not isinstance(error, QuickSilverError):
                traceback.print_exc()  # a fault of ours or of a library: the one line of the summary would not do
            waiting = _without_failed(waiting, error)
            continue
        for job, record in zip(waiting, records, strict=True):
            job.record = record
        return


def _without_failed(waiting: Sequence[_Job], error: Exception) -> list[_Job]:
    """Mark the jobs that the run which just failed stood for (rows may share one; all rows of a protocol need its dense run)."""
    from quicksilver.harness.run import plan

    planned = {job.row: plan([job.config]) for job in waiting if job.config is not None}
    broken = next(step.fingerprint for steps in planned.values() for step in steps if not step.done)
    left = []
    for job in waiting:
        if any(step.fingerprint == broken for step in planned[job.row]):
            job.fail(error)
        else:
            left.append(job)
    return left


def _explain(failed: Sequence[_Job]) -> None:
    """Why rows failed, and the command that repeats the first of them alone; rows with the same trouble share it."""
    troubles: dict[str, list[_Job]] = {}
    for job in failed:
        troubles.setdefault(str(job.error) or repr(job.error), []).append(job)
    for trouble, jobs in troubles.items():
        print(f"\nFailed: {', '.join(f'{job.row.panel} {job.row.key}' for job in jobs)}\n  {trouble}", file=sys.stderr)
        print(f"  To repeat it alone: python -m quicksilver.run {shlex.join(jobs[0].overrides)}", file=sys.stderr)


@contextmanager
def _progress(steps: Sequence[Planned]) -> Iterator[Callable[[Progress], None]]:
    """Say on stderr how much there is to do and how far it is: a bar with the time left on a terminal, else one line a run."""
    from quicksilver.harness.terminal import progress_bar

    missing = sum(not step.done for step in steps)
    if missing:
        print(
            f"{len(steps)} runs behind this, {len(steps) - missing} with a record, {missing} to do.", file=sys.stderr, flush=True
        )
    announced: set[int] = set()
    with progress_bar() as bar:

        def show(progress: Progress) -> None:
            bar(progress)
            if not sys.stderr.isatty() and progress.run not in announced:
                announced.add(progress.run)
                print(f"[{progress.run + 1}/{progress.runs}] {progress.label}", file=sys.stderr, flush=True)

        yield show


# --- README ---------------------------------------------------------------------------------------------------------------------

_MARKED = re.compile(r"(<!-- (\w+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def fill_readme(readme: Path, tables: Path) -> str:
    """Put every written table between its markers `<!-- NAME:begin -->` and `<!-- NAME:end -->`; says what was done.

    Raises:
        ConfigError: no README there, or a marked table that was not written yet.
    """
    if not readme.is_file():
        raise ConfigError(f"{readme} is not there: this command is for a clone of the repository.")
    names = []

    def filled(match: re.Match[str]) -> str:
        path = tables / f"{match[2]}.md"
        if not path.is_file():
            raise ConfigError(
                f"{path} is not there: make it first, make reproduce-table TABLE={match[2].removeprefix('table').lstrip('0')}."
            )
        names.append(match[2])
        # One level deeper: the table is a part of the README.
        return match[1] + re.sub(r"^#", "##", path.read_text(encoding="utf-8"), flags=re.MULTILINE) + match[3]

    content = _MARKED.sub(filled, readme.read_text(encoding="utf-8"))
    readme.write_text(content, encoding="utf-8")
    return f"{readme}: {', '.join(names) or 'no markers found'}"


if __name__ == "__main__":
    sys.exit(main())
